// Dot products of dense rows with a few tokens: the DENSE path for small batches. Vectorised, dispatched at run time.
#ifndef SPMMD_KERNELS_CPU_DENSE_KERNELS_H_
#define SPMMD_KERNELS_CPU_DENSE_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"

namespace spmmd::cpu {

// x rows are padded with zeros to a multiple of this many elements.
inline constexpr int64_t kDensePadding = 16;

// out[n * out_stride + r] = sum over k of w[r][k] * x[n][k], fp32 accumulation. w: [rows, k] of `dtype`, contiguous,
// with 64 readable bytes behind it; x: [tokens] rows of x_stride fp32 elements (a multiple of kDensePadding, >= k,
// zeros behind k). The order of the additions depends on k alone.
void DenseRows(DType dtype, const std::byte* w, int64_t rows, int64_t k, const float* x, int64_t x_stride,
               int64_t tokens, float* out, int64_t out_stride);

}  // namespace spmmd::cpu

#endif  // SPMMD_KERNELS_CPU_DENSE_KERNELS_H_
