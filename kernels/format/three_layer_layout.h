// Byte layout of the THREE_LAYER format, shared by the packer, by validation and by device code; plain constants and
// functions, no dependency.
//
// THREE_LAYER: 2:4 slots for the sparse tensor cores, surplus nonzeros parked in unused slots, and a sparse rest; after
// "Accelerating GPU Inference of Large Language Models with Moderately Unstructured Sparse Weight Matrices" (DAC '26),
// sections 3 and 4. fp16 and bf16.
//
// A kernel multiplies a tile with W = W_t + W_r + R. W_t has two values of every four neighbours along K; W_r, the
// other two, whose surplus values travel in empty slots of W_t and are moved out on the chip; R is what found no slot.
//
// Tiles. W is cut into tiles of 64 rows x 128 columns, zero beyond M and K. Tile (i, j) has rows [64 i, 64 i + 64) and
// columns [128 j, 128 j + 128) and number i * ceil(K / 128) + j.
//
// Groups and slots. A group is four neighbouring columns of one row. Of its nonzeros the first two (in column order)
// are W_t's; further ones are surplus. The group's metadata nibble is p | q << 2 for the pair p < q of columns that W_t
// keeps, one of the six values 4 (0,1), 8 (0,2), 12 (0,3), 9 (1,2), 13 (1,3), 14 (2,3). A group of one nonzero keeps
// (0,1) or (2,3), whichever has it, an empty one (0,1). Slot 0 of the group is the value at column p, slot 1 that at q.
// W_r's pair is the complement, so W_r needs no metadata of its own: for eight nibbles x of a word,
//   e = (x >> 3 ^ x >> 1) & 0x11111111;  complement = x ^ (e * 5 | (e ^ 0x11111111) * 10).
//
// Fragment order. Values and metadata lie as the registers of `mma.sp.sync.aligned.m16n8k32` (.f16/.bf16 A, PTX ISA,
// "Matrix Fragments for sparse mma.m16n8k32") and of `wgmma.mma_async.sp.m64nNk32` with A in registers (PTX ISA,
// "Asynchronous warpgroup-level matrix multiply: sparse", whose warp w of the warpgroup holds rows 16 w to 16 w + 15 in
// the same fragment). A tile is 4 strips of 16 rows by 4 steps of 32 columns; lane l = 4 g + t of the warp of strip s
// holds, at step k, four registers of one group each:
//   register 0: row g,     columns 4 t ... 4 t + 3 of the step        register 1: row g + 8, the same columns
//   register 2: row g,     columns 16 + 4 t ... 16 + 4 t + 3          register 3: row g + 8, the same columns
// slot 0 in the lower half. Register r of lane l at step k of strip s is word ((4 s + k) * 32 + l) * 4 + r of the tile:
// one 128-bit load a lane and step, 512 contiguous bytes a warp. A slot's number in the tile, 0 to 4095, is its 16-bit
// index there; slots of W_r are numbered alike.
//
// Metadata order. Metadata of m16n8k32 sits in two lanes of each four: lane t = h holds columns [16 h, 16 h + 16) (four
// nibbles a row, ascending from bit 0), row g in the lower and row g + 8 in the upper half-word. The sparsity selector
// says whether lanes t = 0, 1 (selector 0) or t = 2, 3 (selector 1) are read, so one register serves two steps: word
// ((s * 32 + l) * 2 + j) of the tile belongs to lane l of strip s and step 2 j + t / 2, half h = t % 2. A kernel loads
// 8 bytes a lane and strip and passes word j with selector k % 2 at step k = 2 j + k % 2.
//
// Code numbers. A tile's slots are 64 rows of 32 words of shared memory, one in each bank, two slots a word. Codes
// number them column by column: the slot at row r, column c (0 to 63, bank c / 2) has number 64 c + r, and slot s the
// number s % 64 * 64 + s / 64. So each of the 64 decoding threads walks about one column, and the 32 even or odd ones a
// bank each: with numbers in the order of slots all threads would start in one bank and then meet at random.
//
// Slot-Filling codes. The surplus elements of a tile, by ascending number of their W_r slots, are matched in order with
// empty slots of W_t, ascending too. The moves (from slot a of W_t to slot b of W_r) are cut into 64 pieces, one a
// decoding thread, of equal code length. A tile without surplus has no code bytes. Otherwise:
//   uint32 first[64]        thread i's first move: number of a in bits 0-15, of b in bits 16-31; 0xffffffff: no move
//   uint16 units[U][64]     unit u of thread i: two codes, the earlier in the lower byte
// A code has the distance of a's number in bits 0-3 and of b's in bits 4-7, added to the thread's. Neither is 0:
// move the value at a to b and clear a. One or both are 0: only the position moves. Such dummy codes cross gaps of more
// than 15 (the paper's dummy points); code 0 fills a thread's last units. Numbers ascend from code to code and thread
// to thread.
//
// Residual. Surplus that finds no empty slot in its tile (spread evenly over the surplus) is kept by row, then column:
// CSR with the row in the index, because a tile has only 13 bits of position: (row in tile) << 7 | column in tile.
// Its places are slots of W_r that no move goes to.
//
// Sections:
//   1 values              8192 bytes a tile: the slots of W_t, parked values included
//   2 metadata            1024 bytes a tile
//   3 code_offsets        uint32 [tiles + 1], in 128-byte units of section 4
//   4 codes               a multiple of 128 bytes a tile
//   5 residual_offsets    uint64 [tiles + 1], in entries
//   6 residual_positions  uint16 an entry
//   7 residual_values     16 bits an entry
// params: [0] 64, [1] 128, [2] 64, [3] code bytes of the tile that has most.
//
// Padding counted: empty slots that hold no parked value, dummy and filler codes, absent first moves.
//
// The distance range is 15 and not the paper's "up to 16": distance 0 marks dummies, which lets them cross gaps in
// either coordinate without touching a live slot.
#ifndef SPMMD_KERNELS_FORMAT_THREE_LAYER_LAYOUT_H_
#define SPMMD_KERNELS_FORMAT_THREE_LAYER_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace spmmd::three_layer {

inline constexpr uint32_t kLayoutVersion = 3;
inline constexpr int64_t kTileRows = 64;
inline constexpr int64_t kTileCols = 128;
inline constexpr int64_t kTileSlots = kTileRows * kTileCols / 2;
inline constexpr int64_t kTileGroups = kTileSlots / 2;
inline constexpr int64_t kTileMetadataWords = kTileGroups / 8;
inline constexpr int64_t kTileValueBytes = kTileSlots * 2;
inline constexpr int64_t kTileMetadataBytes = kTileMetadataWords * 4;
inline constexpr int kThreads = 64;
inline constexpr int kMaxDistance = 15;
inline constexpr size_t kFirstBytes = size_t{kThreads} * 4;  // the first moves at the head of a tile's codes
inline constexpr size_t kCodeGranule = 128;                  // bytes: one unit of all threads
inline constexpr uint32_t kNoMove = 0xffffffffu;

// Section ids.
enum SectionId : uint32_t {
  kValues = 1,
  kMetadata = 2,
  kCodeOffsets = 3,
  kCodes = 4,
  kResidualOffsets = 5,
  kResidualPositions = 6,
  kResidualValues = 7,
};

// Indices into PackedLayer::params.
inline constexpr int kParamTileRows = 0;
inline constexpr int kParamTileCols = 1;
inline constexpr int kParamThreads = 2;
inline constexpr int kParamMaxCodeBytes = 3;

// Number of the group that holds (row, 4 * quad ... 4 * quad + 3) of a tile: its slots are 2 * group and 2 * group + 1.
constexpr int64_t GroupOf(int64_t row, int64_t quad) {
  const int64_t strip = row / 16;
  const int64_t step = quad / 8;
  const int64_t lane = row % 8 * 4 + quad % 4;
  const int64_t reg = quad % 8 / 4 * 2 + row % 16 / 8;
  return ((strip * 4 + step) * 32 + lane) * 4 + reg;
}

struct Position {
  int64_t row;
  int64_t quad;
};
// Inverse of GroupOf.
constexpr Position PositionOf(int64_t group) {
  const int64_t reg = group % 4;
  const int64_t lane = group / 4 % 32;
  const int64_t step = group / 128 % 4;
  const int64_t strip = group / 512;
  return {strip * 16 + reg % 2 * 8 + lane / 4, step * 8 + reg / 2 * 4 + lane % 4};
}

// The number by which codes call a slot, and back: the function is its own inverse.
constexpr int64_t CodeNumber(int64_t slot) { return slot % 64 * 64 + slot / 64; }

// Where a group's metadata nibble is in the tile's metadata: word and bit.
struct MetadataPlace {
  int64_t word;
  int shift;
};
constexpr MetadataPlace MetadataOf(int64_t row, int64_t quad) {
  const int64_t strip = row / 16;
  const int64_t step = quad / 8;
  const int64_t lane = row % 8 * 4 + step % 2 * 2 + quad % 8 / 4;
  return {(strip * 32 + lane) * 2 + step / 2, static_cast<int>(row % 16 / 8 * 16 + quad % 4 * 4)};
}
constexpr unsigned NibbleAt(const uint32_t* metadata, Position position) {
  const MetadataPlace place = MetadataOf(position.row, position.quad);
  return metadata[place.word] >> place.shift & 15u;
}

// The two columns that a nibble keeps, and the two that it leaves.
struct Pair {
  int p;
  int q;
};
constexpr Pair PairOf(unsigned nibble) { return {static_cast<int>(nibble & 3u), static_cast<int>(nibble >> 2)}; }
constexpr Pair Complement(Pair pair) {
  int rest[2] = {0, 0};
  int count = 0;
  for (int column = 0; column < 4 && count < 2; ++column) {
    if (column != pair.p && column != pair.q) rest[count++] = column;
  }
  return {rest[0], rest[1]};
}
// Whether all eight nibbles have p < q.
constexpr bool AreLegalNibbles(uint32_t x) {
  const uint32_t p0 = x;
  const uint32_t p1 = x >> 1;
  const uint32_t q0 = x >> 2;
  const uint32_t q1 = x >> 3;
  return ((~((q1 & ~p1) | (~(q1 ^ p1) & q0 & ~p0))) & 0x11111111u) == 0;
}

// One tile's packed bytes.
struct Tile {
  const uint16_t* values;    // kTileSlots
  const uint32_t* metadata;  // kTileMetadataWords
  const uint8_t* codes;
  size_t code_bytes;
  const uint16_t* residual_positions;
  const uint16_t* residual_values;
  size_t residual;
};

// What one tile's codes come to.
struct CodeCounts {
  int64_t moves = 0;
  int64_t dummies = 0;
  int64_t fillers = 0;
};

// Calls move(a, b), a and b slots, for each move of a tile's codes, in order. Returns false, at the first offence, when
// a position leaves the tile or does not ascend, or a thread without a first move has codes.
template <typename Move>
bool WalkCodes(const uint8_t* codes, size_t code_bytes, CodeCounts* counts, Move move) {
  if (code_bytes == 0) return true;
  if (code_bytes < kFirstBytes) return false;
  const auto units = static_cast<int64_t>((code_bytes - kFirstBytes) / kCodeGranule);
  int64_t previous_from = -1;
  int64_t previous_to = -1;
  for (int thread = 0; thread < kThreads; ++thread) {
    uint32_t word = 0;
    std::memcpy(&word, codes + static_cast<size_t>(thread) * sizeof(word), sizeof(word));
    int64_t from = word & 0xffffu;
    int64_t to = word >> 16;
    const bool absent = word == kNoMove;
    if (!absent) {
      if (from >= kTileSlots || to >= kTileSlots || from <= previous_from || to <= previous_to) return false;
      move(CodeNumber(from), CodeNumber(to));
      ++counts->moves;
    }
    for (int64_t i = 0; i < 2 * units; ++i) {
      const size_t unit = kFirstBytes + static_cast<size_t>(i / 2) * kCodeGranule + static_cast<size_t>(2 * thread);
      const uint8_t code = codes[unit + static_cast<size_t>(i % 2)];
      if (code == 0) {
        ++counts->fillers;
        continue;
      }
      if (absent) return false;
      from += code & 15;
      to += code >> 4;
      if (from >= kTileSlots || to >= kTileSlots) return false;
      if ((code & 15) != 0 && code >> 4 != 0) {
        move(CodeNumber(from), CodeNumber(to));
        ++counts->moves;
      } else {
        ++counts->dummies;
      }
    }
    if (!absent) {
      previous_from = from;
      previous_to = to;
    }
  }
  return true;
}

// Whether W_t has the column of a residual position.
inline bool IsKept(const uint32_t* metadata, int64_t position) {
  const Pair kept = PairOf(NibbleAt(metadata, {position / kTileCols, position % kTileCols / 4}));
  return position % 4 == kept.p || position % 4 == kept.q;
}

inline bool IsNonzero16(uint16_t bits) { return (bits & 0x7fffu) != 0; }

// The tile as 64 x 128 elements. Returns false when it is damaged.
inline bool DecodeTile(const Tile& tile, uint16_t* dense) {
  uint16_t kept[kTileSlots];
  uint16_t moved[kTileSlots] = {};
  std::memcpy(kept, tile.values, sizeof(kept));
  CodeCounts counts;
  if (!WalkCodes(tile.codes, tile.code_bytes, &counts, [&](int64_t from, int64_t to) {
        moved[to] = kept[from];
        kept[from] = 0;
      })) {
    return false;
  }
  for (int64_t i = 0; i < kTileMetadataWords; ++i) {
    if (!AreLegalNibbles(tile.metadata[i])) return false;
  }
  std::memset(dense, 0, kTileRows * kTileCols * sizeof(uint16_t));
  for (int64_t row = 0; row < kTileRows; ++row) {
    for (int64_t quad = 0; quad < kTileCols / 4; ++quad) {
      const Pair pair = PairOf(NibbleAt(tile.metadata, {row, quad}));
      const Pair other = Complement(pair);
      const int64_t slot = 2 * GroupOf(row, quad);
      uint16_t* group = dense + row * kTileCols + quad * 4;
      group[pair.p] = kept[slot];
      group[pair.q] = kept[slot + 1];
      group[other.p] = moved[slot];
      group[other.q] = moved[slot + 1];
    }
  }
  int64_t previous = -1;
  for (size_t i = 0; i < tile.residual; ++i) {
    const int64_t position = tile.residual_positions[i];
    if (position <= previous || position >= kTileRows * kTileCols || IsKept(tile.metadata, position) ||
        IsNonzero16(dense[position])) {
      return false;  // each element has one home only
    }
    dense[position] = tile.residual_values[i];
    previous = position;
  }
  return true;
}

// As CheckTile for a tile that lies wholly inside the matrix, without decoding it. Every move has its own source and
// target, so the nonzeros are those of the slots and the residual.
inline bool CheckInnerTile(const Tile& tile, int64_t* nnz) {
  bool legal = true;
  for (int64_t i = 0; i < kTileMetadataWords; ++i) legal &= AreLegalNibbles(tile.metadata[i]);
  if (!legal) return false;

  const uint16_t* slots = tile.values;
  uint64_t moved_to[kTileSlots / 64] = {};
  CodeCounts counts;
  if (!WalkCodes(tile.codes, tile.code_bytes, &counts, [&](int64_t from, int64_t to) {
        moved_to[to / 64] |= uint64_t{IsNonzero16(slots[from])} << (to % 64);
      })) {
    return false;
  }
  int64_t count = 0;
  for (int64_t i = 0; i < kTileSlots; ++i) count += IsNonzero16(slots[i]) ? 1 : 0;
  int64_t previous = -1;
  for (size_t i = 0; i < tile.residual; ++i) {
    const int64_t position = tile.residual_positions[i];
    if (position <= previous || position >= kTileRows * kTileCols) return false;
    previous = position;
    if (IsKept(tile.metadata, position)) return false;
    // Each element has one home only: no move goes to the place of this one.
    const Position group{position / kTileCols, position % kTileCols / 4};
    const Pair other = Complement(PairOf(NibbleAt(tile.metadata, group)));
    const int64_t slot = 2 * GroupOf(group.row, group.quad) + (position % 4 == other.q ? 1 : 0);
    if ((moved_to[slot / 64] >> (slot % 64) & 1u) != 0) return false;
    count += IsNonzero16(tile.residual_values[i]) ? 1 : 0;
  }
  *nnz += count;
  return true;
}

// Proves that decoding the tile stays inside it and that each element has one home, and adds its nonzeros to *nnz.
// `rows` and `cols` are what of the tile lies inside the matrix: nothing may hide beyond, where a kernel's activations
// need not be finite.
inline bool CheckTile(const Tile& tile, int64_t rows, int64_t cols, int64_t* nnz) {
  if (rows >= kTileRows && cols >= kTileCols) return CheckInnerTile(tile, nnz);
  uint16_t dense[kTileRows * kTileCols];
  if (!DecodeTile(tile, dense)) return false;
  for (int64_t r = 0; r < kTileRows; ++r) {
    for (int64_t c = 0; c < kTileCols; ++c) {
      const bool nonzero = IsNonzero16(dense[r * kTileCols + c]);
      if (nonzero && (r >= rows || c >= cols)) return false;
      *nnz += nonzero ? 1 : 0;
    }
  }
  return true;
}

}  // namespace spmmd::three_layer

#endif  // SPMMD_KERNELS_FORMAT_THREE_LAYER_LAYOUT_H_
