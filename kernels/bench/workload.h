// Synthetic layers and activations for benchmarks: N(0, 1/sqrt(K)) weights pruned by a score, N(0, 1) activations.
#ifndef SPMMD_KERNELS_BENCH_WORKLOAD_H_
#define SPMMD_KERNELS_BENCH_WORKLOAD_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/format/dense.h"

namespace spmmd::bench {

struct Mask {
  // Standard deviation of the logarithm of a column's scale in the pruning score |w| * scale (as Wanda's activation
  // norms give it): 0 for a uniform mask; 0.5 to 1 make columns of very different density.
  double sigma = 0;
  // 2:4 instead: the two largest of every four neighbours along K stay, whatever the sparsity asked for.
  bool two_four = false;
};

// [m, k] weights of which a share `sparsity` is zero (to within sampling error). Same seed, same weights, whatever the
// number of threads.
absl::StatusOr<DenseMatrix> RandomWeights(DType dtype, int64_t m, int64_t k, double sparsity, Mask mask, uint64_t seed);

absl::StatusOr<DenseMatrix> RandomTokens(DType dtype, int64_t n, int64_t k, uint64_t seed);

// A random subset of round((1 - sparsity) * k) indices, ascending, with N(0, 1) values.
void RandomSparseVector(int64_t k, double sparsity, uint64_t seed, std::vector<uint32_t>* indices,
                        std::vector<float>* values);

}  // namespace spmmd::bench

#endif  // SPMMD_KERNELS_BENCH_WORKLOAD_H_
