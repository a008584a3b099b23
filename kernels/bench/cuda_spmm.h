// `spmm_bench --backend=cuda --op=spmm`: SpMM kernels beside cublasLt on one GPU, turn by turn in one process.
//
// The dense baseline multiplies the same pruned matrix with the fastest of cublasLt's candidates. Copies of the weights
// rotate so that what one launch reads has left L2 before it is read again; launches are replayed from CUDA graphs;
// outputs are poisoned, then checked against double precision. Each kernel also gets a row "+chain": launched with
// programmatic dependent launch.
#ifndef SPMMD_KERNELS_BENCH_CUDA_SPMM_H_
#define SPMMD_KERNELS_BENCH_CUDA_SPMM_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/bench/cpu_bench.h"
#include "kernels/bench/report.h"

namespace spmmd::bench {

// What was measured where, for the head of a summary.
std::vector<std::string> CudaNotes();

// Calls `emit` for the dense baseline and for every kernel that executes one of options.formats (BITMAP stands for its
// GPU layout). Stops at the first error; UNAVAILABLE without a GPU. options.calls is not used: a graph holds at least 8
// launches.
absl::Status RunCudaSpmm(const BenchOptions& options, const std::function<void(const Row&)>& emit);

}  // namespace spmmd::bench

#endif  // SPMMD_KERNELS_BENCH_CUDA_SPMM_H_
