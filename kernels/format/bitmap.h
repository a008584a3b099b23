// BITMAP: one bit an element and the nonzeros' values verbatim, in the order that the CPU kernels consume them.
//
// One layout serves SpMV, SpMM and SpMspV. W [M, K] is cut into tiles of kTileRows x kTileCols (the last ones may be
// smaller). Within a tile, every column is a *piece*: the bits of its rows and its packed values in ascending row
// order. Vector lanes run along M, so that x[k] is a broadcast, and a column that a sparse x does not touch is skipped
// together with its cache lines: at 50 % a piece of 4096 fp16 rows is 512 bytes of mask and about 4 KiB of values.
// Pieces are that long because hardware prefetchers run on beyond what is read: of randomly skipped pieces of 1 KiB
// they fetch a good part all the same, of 4 KiB (measured on Zen 4) hardly any.
//
// Numbers:
//   tile (b, c)         rows [4096 b, 4096 b + 4096) and columns [256 c, 256 c + 256), clipped to M and K;
//                       tiles are numbered t = b * column_tiles + c, column_tiles = ceil(K / 256)
//   strips(b)           ceil(rows of block b / 64); block b is a row of tiles; all blocks but the last have 64 strips
// Sections (all little-endian):
//   kValues (id 1)        dtype values: tile after tile in t order; in a tile column after column; in a column by row
//   kMasks (id 2)         uint64 [block][K][strips(b)]: bit i of word s is row 4096 b + 64 s + i; bits of rows >= M are
//   0
//   kTileStarts (id 3)    uint64 [tiles + 1]: index into kValues of each tile's first value; the last entry is nnz
//   kColumnStarts (id 4)  uint32 [block][K]: start of the column's piece, relative to its tile's start
// params: [0] = kTileRows, [1] = kTileCols, [2] = number of NaNs and infinities among the values, [3] = 1 when no value
// is tiny (dense_rows.h), 0 when some are, when dtype is not bf16, or from a packer that did not look; the rest 0.
// There are no filler entries; padding counts the mask bits of rows >= M only.
//
// Bytes per dense element at sparsity s and M a multiple of 4096: (1 - s) * SizeOf(dtype) + 1/8 + 4/4096 + 8/2^20. fp16
// at 50 %: 1.126, the bitmap bound (1.125) + 0.1 %.
#ifndef SPMMD_KERNELS_FORMAT_BITMAP_H_
#define SPMMD_KERNELS_FORMAT_BITMAP_H_

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/format/dense.h"
#include "kernels/format/packed_layer.h"

namespace spmmd::bitmap {

inline constexpr uint32_t kLayoutVersion = 1;
inline constexpr int64_t kStripRows = 64;
inline constexpr int64_t kTileRows = 4096;
inline constexpr int64_t kTileCols = 256;
inline constexpr int64_t kStripsPerTile = kTileRows / kStripRows;

inline constexpr size_t kNonfiniteParam = 2;
inline constexpr size_t kNoTinyParam = 3;

enum SectionId : uint32_t { kValues = 1, kMasks = 2, kTileStarts = 3, kColumnStarts = 4 };

// Typed access to a layer that has passed Validate(); borrows its memory.
struct View {
  DType dtype = DType::kF16;
  int64_t m = 0;
  int64_t k = 0;
  int64_t blocks = 0;        // rows of tiles
  int64_t column_tiles = 0;  // tiles a block
  const std::byte* values = nullptr;
  const uint64_t* masks = nullptr;
  const uint64_t* tile_starts = nullptr;
  const uint32_t* column_starts = nullptr;

  int64_t rows(int64_t block) const { return std::min(kTileRows, m - block * kTileRows); }
  int64_t strips(int64_t block) const { return (rows(block) + kStripRows - 1) / kStripRows; }
  // Mask words of column `col` in `block`: strips(block) of them.
  const uint64_t* column_masks(int64_t block, int64_t col) const {
    return masks + block * k * kStripsPerTile + col * strips(block);
  }
  // Index into values of the first value of the piece of `col` in `block`.
  uint64_t piece_start(int64_t block, int64_t col) const {
    return tile_starts[block * column_tiles + col / kTileCols] + column_starts[block * k + col];
  }
};

View MakeView(const PackedLayer& layer);

// Exact bytes of a packed layer, before packing it. M and K must pass CheckShape.
size_t PackedBytes(DType dtype, int64_t m, int64_t k, int64_t nnz);

// The cases of the Format switches in packed_layer.h; see there. All three dtypes.
absl::StatusOr<PackedLayer> Pack(const DenseView& w, const PackOptions& options);
absl::Status Unpack(const PackedLayer& layer, const MutableDenseView& out);
absl::Status Validate(const PackedLayer& layer);

}  // namespace spmmd::bitmap

#endif  // SPMMD_KERNELS_FORMAT_BITMAP_H_
