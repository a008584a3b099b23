// Vectorised passes over single rows of dense matrices, dispatched at run time to the best instruction set. What
// dense.h and the packers are made of; x and y of the CPU kernels are converted with them too.
#ifndef SPMMD_KERNELS_FORMAT_DENSE_ROWS_H_
#define SPMMD_KERNELS_FORMAT_DENSE_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"

namespace spmmd {

struct RowStats {
  int64_t nnz = 0;        // elements other than +0 and -0
  int64_t nonfinite = 0;  // NaN and infinities
  int64_t tiny = 0;       // bf16 only: nonzero and below kTinyMagnitude
};

// Far above the subnormals of bf16 and far below trained weights: see Decode::kBf16Dot of the CPU kernels.
inline constexpr float kTinyMagnitude = 0x1p-48f;

// Statistics of `count` elements at `row` (element-aligned).
RowStats ScanRow(DType dtype, const std::byte* row, int64_t count);

// Exact widening to fp32. `to` and `from` do not overlap.
void WidenRow(DType from_type, const std::byte* from, float* to, int64_t count);

// Round to nearest even; what overflows fp16 becomes infinity; NaN stays NaN.
void NarrowRow(const float* from, DType to_type, std::byte* to, int64_t count);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_FORMAT_DENSE_ROWS_H_
