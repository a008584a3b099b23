// `spmm_bench --backend=cuda --op=spmm`: SpMM kernels beside cublasLt on one GPU, turn by turn in one process.
//
// Weights are N(0, 0.02), pruned by magnitude to the asked sparsity; the dense baseline multiplies the same pruned
// matrix with the fastest of cublasLt's candidates. Copies of the weights rotate so that what one launch reads has left
// L2 before it is read again; launches are replayed from CUDA graphs; outputs are checked against float64.
#ifndef SPMMD_KERNELS_BENCH_CUDA_SPMM_H_
#define SPMMD_KERNELS_BENCH_CUDA_SPMM_H_

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/format/packed_layer.h"

namespace spmmd::bench {

struct CudaSpmmOptions {
  std::vector<Format> formats = {Format::kBitmapGpu};
  std::vector<std::pair<int64_t, int64_t>> shapes;  // M, K
  std::vector<int64_t> tokens;
  std::vector<double> sparsities;
  DType dtype = DType::kF16;
  double mask_sigma = 0;  // log-normal column scale of the pruning score; 0: uniform mask
  bool chain = false;     // one more row a kernel: launched with programmatic dependent launch
  int rounds = 9;         // graph replays a configuration, dense and sparse alternating
  std::string library;    // path of libspmmd_cuda.so, empty: the usual places
};

// Writes the header and one row a (shape, sparsity, N, format, kernel) in the columns of the design, section 6. Stops
// at the first error.
absl::Status RunCudaSpmm(const CudaSpmmOptions& options, std::FILE* csv);

}  // namespace spmmd::bench

#endif  // SPMMD_KERNELS_BENCH_CUDA_SPMM_H_
