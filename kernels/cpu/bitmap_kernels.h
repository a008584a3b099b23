// The inner loops over BITMAP layers: partial sums of one row block over a range of columns. Target-independent callers
// (bitmap_matmul.cc) split a layer into such ranges, spread them over threads and finish the outputs.
//
// Every row's sum is a chain of fused multiply-adds in ascending column order, one per column and token, whatever the
// number of tokens and whether the columns are listed or consecutive. (A zero weight or a skipped column leaves the sum
// as it is.) Results therefore have the same bits for a token alone, in a batch, and as a sparse vector. Targets
// without fused multiply-add (SSE4, scalar) round differently, but keep the rule among themselves.
#ifndef SPMMD_KERNELS_CPU_BITMAP_KERNELS_H_
#define SPMMD_KERNELS_CPU_BITMAP_KERNELS_H_

#include <bit>
#include <cstdint>

#include "kernels/format/bitmap.h"

namespace spmmd::cpu {

// How the stored values become fp32.
enum class Decode : uint8_t {
  kF16,
  // fp16 by integer operations, without rebiasing the exponent: the result is w * 2^-112, exactly. The caller
  // multiplies x by kScaledF16Factor, so that every product is the true one. It needs |x| < kScaledF16Limit, finite
  // weights and no denormals-are-zero mode; kF16 has no such limits and gives the same bits.
  kF16Scaled,
  kBf16,
  // bf16 weights and x, two columns an instruction (AVX512_BF16). It gives the bits of kBf16 where no product, sum or
  // operand is subnormal: when the layer has no tiny value and none that is not finite, and every x[k] is zero or a
  // bf16 value of at least kBf16DotMinX. (Weights and x have 8 significant bits, so that products and sums are
  // multiples of 2^-7 * kTinyMagnitude * 2^-7 * kBf16DotMinX = 2^-126, the smallest normal number.)
  kBf16Dot,
  kF32,
};
inline constexpr float kBf16DotMinX = 0x1p-64f;
inline constexpr float kScaledF16Factor = 0x1p112f;
inline constexpr float kScaledF16Limit = 0x1p15f;

// Whether the running target has a kernel for kF16Scaled (that is faster than kF16).
bool HasScaledF16();
// Whether this machine has a kernel for kBf16Dot that is faster than kBf16.
bool HasBf16Dot();

// Sums come in groups of kGroupRows rows.
inline constexpr int64_t kGroupRows = 32;

enum class RowOrder : uint8_t {
  kNatural,  // lane i is row i of the group
  kEvenOdd,  // the 16 even rows, then the 16 odd rows
  kFours,    // of every 8 rows the first 4, then of every 8 rows the last 4
};
// The order in which the running target keeps the rows of a group.
RowOrder RowOrderOf(Decode decode);

// One row block of a layer that has passed Validate(), or some strips of it.
struct BitmapBlock {
  const std::byte* values = nullptr;
  const uint64_t* masks = nullptr;          // [K][strips], the whole block's
  const uint64_t* tile_starts = nullptr;    // the block's, [column_tiles + 1]
  const uint32_t* column_starts = nullptr;  // [K]
  int64_t k = 0;
  int64_t strips = 0;  // of the block
  int64_t begin = 0;   // strips that kernels work on
  int64_t end = 0;

  BitmapBlock(const bitmap::View& view, int64_t block) : BitmapBlock(view, block, 0, view.strips(block)) {}
  BitmapBlock(const bitmap::View& view, int64_t block, int64_t begin_strip, int64_t end_strip)
      : values(view.values),
        masks(view.column_masks(block, 0)),
        tile_starts(view.tile_starts + block * view.column_tiles),
        column_starts(view.column_starts + block * view.k),
        k(view.k),
        strips(view.strips(block)),
        begin(begin_strip),
        end(end_strip) {}

  bool whole() const { return begin == 0 && end == strips; }
  uint64_t piece_start(int64_t col) const { return tile_starts[col / bitmap::kTileCols] + column_starts[col]; }
  // End of the piece, which is the start of its successor.
  uint64_t piece_end(int64_t col) const {
    return (col + 1) % bitmap::kTileCols == 0 || col + 1 == k ? tile_starts[col / bitmap::kTileCols + 1]
                                                              : piece_start(col + 1);
  }
};

// Columns of one block, all in one tile.
struct ColumnRange {
  const BitmapBlock* block = nullptr;
  const uint32_t* ids = nullptr;  // ascending; null: first, first + 1, ...
  int64_t first = 0;
  int64_t count = 0;

  int64_t id(int64_t i) const { return ids == nullptr ? first + i : ids[i]; }
};

// acc[groups][kGroupRows] += sum over i < columns.count of W[block, columns.id(i)] * x[i], over the groups of the
// block's strips [begin, end). acc is 64-byte aligned. `next` (block null: none) is what this thread will probably be
// asked for after that; its head is prefetched.
void SpmvRange(const ColumnRange& columns, const ColumnRange& next, Decode decode, const float* x, float* acc);

// Token counts that SpmmRange takes: the smallest that is >= tokens, for 1 <= tokens <= kMaxTileTokens.
inline constexpr int kMaxTileTokens = 12;
int TileTokens(int tokens);

// The x of SpmmRange with kBf16Dot, but for tokens = 1: column i in the upper half, column i + 1 in the lower. Both are
// bf16 values.
inline uint32_t Bf16Pair(float first, float second) {
  return std::bit_cast<uint32_t>(first) | std::bit_cast<uint32_t>(second) >> 16;
}

// acc[groups][tokens][kGroupRows] += W[block, begin:end] * x, over the groups of the block's strips, tokens a value of
// TileTokens(). x: [end - begin][tokens]; with kBf16Dot and tokens > 1 [ceil((end - begin) / 2)][tokens] of Bf16Pair,
// the last one's second column zero where there is none, and `begin` even.
void SpmmRange(const BitmapBlock& block, Decode decode, int64_t begin, int64_t end, const float* x, int tokens,
               float* acc);

}  // namespace spmmd::cpu

#endif  // SPMMD_KERNELS_CPU_BITMAP_KERNELS_H_
