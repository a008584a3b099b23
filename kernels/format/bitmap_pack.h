// The inner loop of the BITMAP packer: up to kGroupCols columns of one tile, vectorised, dispatched at run time.
#ifndef SPMMD_KERNELS_FORMAT_BITMAP_PACK_H_
#define SPMMD_KERNELS_FORMAT_BITMAP_PACK_H_

#include <cstddef>
#include <cstdint>

#include "kernels/format/bitmap.h"
#include "kernels/format/dense.h"

namespace spmmd::bitmap {

inline constexpr int64_t kGroupCols = 8;

// Scratch of one worker. `values` takes a whole group plus the overhang of the last full-width store.
struct PackScratch {
  alignas(64) std::byte columns[kGroupCols * (kTileRows * 4 + 64)];
  alignas(64) std::byte values[kGroupCols * kTileRows * 4 + 64];
};

// Packs columns [col0, col0 + cols) of rows [row0, row0 + rows) of `w`, cols <= kGroupCols, rows <= kTileRows.
// masks: [cols][ceil(rows / 64)] and counts: [cols] are overwritten; the packed values, column after column, go to
// scratch.values. Returns their number.
int64_t PackGroup(const DenseView& w, int64_t row0, int64_t rows, int64_t col0, int64_t cols, PackScratch& scratch,
                  uint64_t* masks, uint32_t* counts);

}  // namespace spmmd::bitmap

#endif  // SPMMD_KERNELS_FORMAT_BITMAP_PACK_H_
