// Byte layout of the BITMAP_GPU format, shared by the packer, by validation and by device code: plain constants and
// functions, no dependency. kernels/format/bitmap_gpu.h says what the format is for.
#ifndef SPMMD_KERNELS_FORMAT_BITMAP_GPU_LAYOUT_H_
#define SPMMD_KERNELS_FORMAT_BITMAP_GPU_LAYOUT_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace spmmd::bitmap_gpu {

inline constexpr uint32_t kLayoutVersion = 1;

// Section ids.
inline constexpr uint32_t kChunkSection = 1;   // the chunks, one after the other, each a multiple of 128 bytes
inline constexpr uint32_t kOffsetSection = 2;  // uint32[chunks + 1]: chunk c is bytes [offset[c], offset[c + 1]) * 16

// Indices into PackedLayer::params.
inline constexpr int kParamChunkCols = 0;      // 128 or 256
inline constexpr int kParamMaxChunkBytes = 1;  // of the largest chunk: what a kernel reserves for one

// A chunk is 16 rows x chunk_cols columns; chunk (row block b, column block c) has index b * column_blocks + c.
inline constexpr int kChunkRows = 16;
inline constexpr int kLanes = 32;
inline constexpr int kStepCols = 16;   // one tensor-core step
inline constexpr int kStreams = 64;    // two value streams a lane
inline constexpr int kRowBytes = 128;  // one value of every stream
inline constexpr int kMaxStreamRow = 64;
inline constexpr uint32_t kNoJump = 7;

constexpr bool IsChunkCols(int64_t cols) { return cols == 128 || cols == 256; }
constexpr int Steps(int chunk_cols) { return chunk_cols / kStepCols; }

// Inside a chunk:
//   mask words      chunk_cols / 64 uint32 a lane, lane-major
//   descriptors     one uint32 a lane
//   value rows      row r holds value r of stream 2 * lane + half at bytes r * 128 + lane * 4 + half * 2
//
// Lane l stands for l = 4 * g + t, as in the fragments of mma.m16n8k16: of every 16-column step it holds the four
// columns 2t, 2t+1, 2t+8, 2t+9 of row g (stream "half" 0) and of row g + 8 (half 1). Bits [8s, 8s + 4) of its mask are
// those four columns of row g in step s, bits [8s + 4, 8s + 8) those of row g + 8. A stream's values follow in bit
// order, and start at row 0 of the stream's own column.
//
// Streams differ in length, the chunk's value rows do not: so a long stream may continue, from some step on, in the
// unused end of a short stream's column (a "borrowed tail"). Descriptor bits [16h, 16h + 16) for half h:
//   bits 0..2   step - steps / 2 at whose start the stream jumps, kNoJump if it never does
//   bits 3..8   column of the tail: 2 * lane + half
//   bits 9..15  first row of the tail
constexpr int MaskWords(int chunk_cols) { return chunk_cols / 64; }
constexpr int MaskBytes(int chunk_cols) { return MaskWords(chunk_cols) * 4 * kLanes; }
constexpr int HeaderBytes(int chunk_cols) { return MaskBytes(chunk_cols) + 4 * kLanes; }
constexpr int ChunkBytes(int chunk_cols, int value_rows) { return HeaderBytes(chunk_cols) + value_rows * kRowBytes; }
// The last step at which a stream may jump: the code after it means "never".
constexpr int LastJumpStep(int chunk_cols) { return chunk_cols == 256 ? 14 : 7; }

// Column of a step's element e (0..3) of a lane.
constexpr int ElementCol(int lane, int e) { return (lane % 4) * 2 + e % 2 + e / 2 * 8; }
constexpr int ElementRow(int lane, int half) { return lane / 4 + half * 8; }

struct Jump {
  int step = -1;  // -1: none
  int column = 0;
  int row = 0;
};
constexpr uint32_t EncodeJump(const Jump& jump, int chunk_cols) {
  if (jump.step < 0) return kNoJump;
  return static_cast<uint32_t>(jump.step - Steps(chunk_cols) / 2) | static_cast<uint32_t>(jump.column) << 3 |
         static_cast<uint32_t>(jump.row) << 9;
}
constexpr Jump DecodeJump(uint32_t descriptor, int half, int chunk_cols) {
  const uint32_t bits = descriptor >> (16 * half) & 0xffffu;
  if ((bits & 7u) == kNoJump) return {};
  return {static_cast<int>(bits & 7u) + Steps(chunk_cols) / 2, static_cast<int>(bits >> 3 & 63u),
          static_cast<int>(bits >> 9)};
}

// Proves that decoding the chunk reads value rows of this chunk only, and that no bit lies outside the matrix: rows and
// cols are what of the chunk is inside. Adds the chunk's nonzeros to *nnz.
inline bool CheckChunk(const void* chunk, size_t bytes, int chunk_cols, int rows, int cols, int64_t* nnz) {
  const size_t header = static_cast<size_t>(HeaderBytes(chunk_cols));
  if (bytes < header || (bytes - header) % kRowBytes != 0) return false;
  const int value_rows = static_cast<int>((bytes - header) / kRowBytes);
  if (value_rows > kMaxStreamRow) return false;
  const int words = MaskWords(chunk_cols);
  const auto* base = static_cast<const unsigned char*>(chunk);
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t mask[4];
    uint32_t descriptor;
    std::memcpy(mask, base + static_cast<size_t>(lane * words) * 4, static_cast<size_t>(words) * 4);
    std::memcpy(&descriptor, base + static_cast<size_t>(MaskBytes(chunk_cols) + lane * 4), 4);
    for (int half = 0; half < 2; ++half) {
      const Jump jump = DecodeJump(descriptor, half, chunk_cols);
      int before = 0;
      int after = 0;
      for (int word = 0; word < words; ++word) {
        const uint32_t bits = mask[word] & (0x0f0f0f0fu << (4 * half));
        const int steps_before = jump.step < 0 ? 4 : jump.step - word * 4;
        const uint32_t early = steps_before >= 4 ? ~0u : steps_before <= 0 ? 0u : (1u << (8 * steps_before)) - 1;
        before += std::popcount(bits & early);
        after += std::popcount(bits & ~early);
        if (bits != 0 && ElementRow(lane, half) >= rows) return false;
        if (bits != 0 && cols < chunk_cols) {
          for (int bit = 0; bit < 32; ++bit) {
            if ((bits >> bit & 1u) != 0 && (word * 4 + bit / 8) * kStepCols + ElementCol(lane, bit % 4) >= cols) {
              return false;
            }
          }
        }
      }
      if (before > value_rows || (jump.step >= 0 && jump.row + after > value_rows)) return false;
      *nnz += before + after;
    }
  }
  return true;
}

}  // namespace spmmd::bitmap_gpu

#endif  // SPMMD_KERNELS_FORMAT_BITMAP_GPU_LAYOUT_H_
