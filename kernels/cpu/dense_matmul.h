// Matmuls with DENSE layers: operands checked by the caller (matmul.cc).
#ifndef SPMMD_KERNELS_CPU_DENSE_MATMUL_H_
#define SPMMD_KERNELS_CPU_DENSE_MATMUL_H_

#include "absl/status/status.h"
#include "kernels/base/thread_pool.h"
#include "kernels/cpu/matmul.h"

namespace spmmd::cpu {

// Largest batch that own dot-product kernels multiply; larger ones go through OpenBLAS. Measured: up to here sgemm,
// which repacks the weights for every call, is slower.
inline constexpr int64_t kMaxDotTokens = 32;

absl::Status DenseMatmul(const PackedLayer& w, const DenseView& x, const Epilogue& epilogue, const MutableDenseView& y,
                         ThreadPool& pool);

}  // namespace spmmd::cpu

#endif  // SPMMD_KERNELS_CPU_DENSE_MATMUL_H_
