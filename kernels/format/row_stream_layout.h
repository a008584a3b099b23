// Byte layout of the ROW_STREAM format, shared by the packer and by the kernels that read it. Plain constants and
// constexpr functions only: this header is included by device code.
#ifndef SPMMD_KERNELS_FORMAT_ROW_STREAM_LAYOUT_H_
#define SPMMD_KERNELS_FORMAT_ROW_STREAM_LAYOUT_H_

#include <cstdint>

namespace spmmd::row_stream {

// How a value is stored. The coded forms hold bfloat16 only.
//
// A coded value is the 16-bit word of a *rebased* bfloat16: sign, an exponent field f = exponent - base of 2 or 3 bits,
// 7 mantissa bits. Field 0 is a bfloat16 subnormal, so that all-zero bits are zero and numbers just below the window
// are still exact when their last mantissa bits are zero. The word's low byte is stored whole; of the high byte only
// the sign and the upper one or two bits of the field, in separate planes. What the window cannot hold exactly is an
// escape: a zero in the stream and an entry (column, bfloat16) in the tile's escape list.
enum class Coding : uint8_t { kVerbatim = 0, kCode2 = 2, kCode3 = 3 };

inline constexpr int kWarpLanes = 32;
inline constexpr int kBlockSlots = 16;  // slots a lane takes from one block
inline constexpr int kMaxWarps = 16;
inline constexpr int kMaxRowsPerTile = 512;
// Columns are relative to a segment, 16 bits wide; one segment's activations must fit shared memory as fp32.
inline constexpr int64_t kMaxSegmentColumns = 49152;

// Section ids.
inline constexpr uint32_t kStreamSection = 1;    // blocks, in tile, warp, block order
inline constexpr uint32_t kStartSection = 2;     // uint16 [tile][warp][lane]: segment column of the lane's first slot
inline constexpr uint32_t kTileSection = 3;      // TileHeader [tile]
inline constexpr uint32_t kBaseSection = 4;      // coded only: uint8 [tile][row of the tile]
inline constexpr uint32_t kEscapeSection = 5;    // coded only: uint32 [unit][lane]: column << 16 | bfloat16 bits
inline constexpr uint32_t kRowOrderSection = 6;  // only when rows are sorted: uint32 [tile row]: row of W, or kNoRow
inline constexpr uint32_t kNoRow = 0xffffffffu;

// Indices into PackedLayer::params.
inline constexpr int kParamRowsPerTile = 0;
inline constexpr int kParamWarps = 1;
inline constexpr int kParamRunBits = 2;
inline constexpr int kParamCoding = 3;
inline constexpr int kParamUniformBlocks = 4;  // blocks of every lane of every tile, 0 when TileHeader says
inline constexpr int kParamSegmentColumns = 5;
inline constexpr int kParamMaxBlocks = 6;

struct TileHeader {
  uint32_t first_block;        // of the tile's warp 0, in blocks; warp w starts at first_block + w * blocks
  uint32_t blocks;             // per lane
  uint32_t first_escape_unit;  // a unit is 32 entries, one a lane; unit u of a tile belongs to its warp u % warps
  uint32_t escape_units;
};
static_assert(sizeof(TileHeader) == 16);

// A block serves one warp for kBlockSlots slots a lane. Byte offsets inside it, by lane:
//   verbatim: values 0..7 at 0, values 8..15 at 512, 16 bytes a lane each; runs at 1024.
//   coded:    low bytes at 0, 16 bytes a lane; run_bits 2: {planes, runs} at 512, 8 bytes a lane;
//             run_bits 4: planes at 512, 4 bytes a lane, runs at 640, 8 bytes a lane;
//             kCode3 adds the field's third bit, 2 bytes a lane, at the end.
constexpr int ValueBytes(Coding coding) {
  return kWarpLanes * (coding == Coding::kVerbatim ? 32 : coding == Coding::kCode2 ? 20 : 22);
}
constexpr int RunBytes(int run_bits) { return kWarpLanes * kBlockSlots * run_bits / 8; }
constexpr int BlockBytes(Coding coding, int run_bits) { return ValueBytes(coding) + RunBytes(run_bits); }
constexpr int RunOffset(Coding coding, int run_bits, int lane) {
  if (coding == Coding::kVerbatim) return 1024 + lane * (run_bits == 2 ? 4 : 8);
  return run_bits == 2 ? 512 + lane * 8 + 4 : 640 + lane * 8;
}
constexpr int PlaneOffset(int run_bits, int lane) { return 512 + lane * (run_bits == 2 ? 8 : 4); }
constexpr int ThirdBitOffset(int run_bits, int lane) { return (run_bits == 2 ? 768 : 896) + lane * 2; }

// Slot s = 4q + j. Runs are laid out so that `(word >> shift) & mask` yields four of them, one a byte, for slots
// 4q..4q+3; planes so that one rotation and one mask yield the four high bytes.
constexpr int RunWord(int run_bits, int slot) { return run_bits == 2 ? 0 : slot / 8; }
constexpr int RunShift(int run_bits, int slot) {
  return run_bits == 2 ? (slot % 4) * 8 + (slot / 4) * 2 : (slot % 4) * 8 + (slot % 8 / 4) * 4;
}
constexpr int FieldBitShift(int slot) { return (8 * (slot % 4) + 2 * (slot / 4)) & 31; }     // bit 8 of the word
constexpr int SignBitShift(int slot) { return (8 * (slot % 4) + 7 + 2 * (slot / 4)) & 31; }  // bit 15
constexpr int ThirdBitShift(int slot) {                                                      // bit 9
  constexpr int kBase[4] = {4, 12, 0, 8};
  return kBase[slot % 4] + slot / 4;
}

// Columns behind a segment's end that a lane's cursor may run over: every padding slot advances by one.
constexpr int64_t PadColumns(int64_t max_blocks) { return max_blocks * kBlockSlots; }

constexpr int FieldMax(Coding coding) { return coding == Coding::kCode2 ? 3 : 7; }

// The rebased word of bfloat16 bits `v` (not a zero), or false when the window [base, base + FieldMax] does not hold
// it exactly. base = 0 stores the exponent itself, subnormals included. Infinities and NaNs are never held.
constexpr bool Recode(uint16_t v, int base, Coding coding, uint16_t* word) {
  const int exponent = (v >> 7) & 0xff;
  const int mantissa = v & 0x7f;
  const int field = exponent - base;
  *word = 0;
  if (exponent == 0xff || field > FieldMax(coding)) return false;
  if (base == 0 || field >= 1) {
    *word = static_cast<uint16_t>((v & 0x8000) | (field << 7) | mantissa);
    return true;
  }
  const int shift = 1 - field;
  const int significand = 0x80 | mantissa;
  if (exponent == 0 || shift > 7 || (significand & ((1 << shift) - 1)) != 0) return false;
  *word = static_cast<uint16_t>((v & 0x8000) | (significand >> shift));
  return true;
}

// Inverse of Recode.
constexpr uint16_t Uncode(uint16_t word, int base) {
  if ((word & 0x7fff) == 0) return 0;
  int field = (word >> 7) & 0xff;
  int mantissa = word & 0x7f;
  if (field == 0 && base != 0) {
    field = 1;
    while ((mantissa & 0x80) == 0) {
      mantissa <<= 1;
      --field;
    }
    mantissa &= 0x7f;
  }
  return static_cast<uint16_t>((word & 0x8000) | ((field + base) << 7) | mantissa);
}

}  // namespace spmmd::row_stream

#endif  // SPMMD_KERNELS_FORMAT_ROW_STREAM_LAYOUT_H_
