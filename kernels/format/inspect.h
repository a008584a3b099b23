// What can be said of weights for people to look at: where a format put the nonzeros, and where in the matrix they are.
#ifndef SPMMD_KERNELS_FORMAT_INSPECT_H_
#define SPMMD_KERNELS_FORMAT_INSPECT_H_

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/format/dense.h"
#include "kernels/format/packed_layer.h"

namespace spmmd {

// What a format knows of its layer beyond the bytes of its sections. Names are stable lower_snake.
struct LayerStats {
  std::vector<std::pair<std::string_view, double>> shares;    // of the nonzeros, 0 to 1 and, for fillers, above
  std::vector<std::pair<std::string_view, int64_t>> numbers;  // tile sizes, code widths, counts
};

// THREE_LAYER: where the nonzeros went (sparse_tc + slot_filled + residual = 1) and what the codes cost; RLC_CSC and
// ROW_STREAM: fillers and escapes; of the others their parameters. `layer` must be valid.
LayerStats ComputeLayerStats(const PackedLayer& layer);

// Share of nonzeros over a grid laid on the matrix. Cell (i, j) covers rows [i * M / rows, (i + 1) * M / rows) and
// columns likewise.
struct DensityMap {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<double> density;  // [rows, cols], 0 to 1
  double lowest = 0;            // of the cells
  double highest = 0;
  int64_t empty_rows = 0;  // of the matrix: without a nonzero
  int64_t empty_cols = 0;

  double at(int64_t i, int64_t j) const { return density[static_cast<size_t>(i * cols + j)]; }
};

// A map of at most `rows` x `cols` cells (both at least 1), fewer where the matrix has fewer rows or columns.
DensityMap MapDensity(const DenseView& w, int64_t rows, int64_t cols);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_FORMAT_INSPECT_H_
