// How pairs of CTAs are dealt out to the layers of one launch: each layer gets whole pairs of `rows` row blocks. Plain
// C++, for the schedules of spmm_pair and spmm_stream.
#ifndef SPMMD_KERNELS_CUDA_PAIRED_ROWS_H_
#define SPMMD_KERNELS_CUDA_PAIRED_ROWS_H_

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace spmmd::cuda {

// Pairs that the layers take at `rows` row blocks a pair.
inline int64_t PairsOf(const std::vector<int64_t>& row_blocks, int64_t rows) {
  int64_t pairs = 0;
  for (const int64_t blocks : row_blocks) pairs += (blocks + rows - 1) / rows;
  return pairs;
}

// The fewest row blocks a pair with which the layers take no more than `most_pairs`; 0 when there are too few pairs.
inline int64_t RowsOfAPair(const std::vector<int64_t>& row_blocks, int64_t most_pairs) {
  if (most_pairs < static_cast<int64_t>(row_blocks.size())) return 0;
  const int64_t all = std::accumulate(row_blocks.begin(), row_blocks.end(), int64_t{0});
  int64_t rows = std::max<int64_t>(1, (all + most_pairs - 1) / most_pairs);
  while (PairsOf(row_blocks, rows) > most_pairs) ++rows;
  return rows;
}

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_PAIRED_ROWS_H_
