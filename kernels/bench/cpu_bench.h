// The CPU side of spmm_bench: our kernels beside OpenBLAS fp32, turn by turn in one process.
//
// Weights rotate over copies that together are larger than the last-level cache, ours and the baseline's alike, both on
// huge pages. The baseline is the fastest of the ways in which OpenBLAS can compute the same product.
#ifndef SPMMD_KERNELS_BENCH_CPU_BENCH_H_
#define SPMMD_KERNELS_BENCH_CPU_BENCH_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/bench/report.h"
#include "kernels/bench/workload.h"
#include "kernels/format/packed_layer.h"

namespace spmmd::bench {

struct BenchOptions {
  std::string op = "spmm";  // spmm, spmv, spmspv
  DType dtype = DType::kF16;
  std::vector<DType> x_dtypes;  // CPU only; y is fp32
  Mask mask;
  std::vector<Format> formats;
  std::vector<std::pair<int64_t, int64_t>> shapes;  // M, K
  std::vector<int64_t> tokens;                      // spmm only
  std::vector<double> sparsity;
  std::vector<double> activation_sparsity;  // spmspv only
  int rounds = 9;                           // turns of either side
  bool automatic = false;                   // cuda: also what dispatch takes, once it has measured the shape
  int variants = 0;                         // of each CUDA kernel, timed beside the one that it would choose
  int calls = 5;                            // timed calls a turn
  uint64_t seed = 1;
};

// The core type that OpenBLAS must be told (OPENBLAS_CORETYPE) because it is older than this CPU and would run kernels
// without AVX-512, an unfair baseline; null when its own choice is right.
const char* BlasCoreType();

// What was measured where, for the head of a summary.
std::vector<std::string> CpuNotes();

// Calls `emit` for every configuration as it is done. Stops at the first error.
absl::Status RunCpu(const BenchOptions& options, const std::function<void(const Row&)>& emit);

}  // namespace spmmd::bench

#endif  // SPMMD_KERNELS_BENCH_CPU_BENCH_H_
