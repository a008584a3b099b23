// The yardstick of every test and benchmark: Y = X * W^T in double precision, and the tolerance rule
// |y - ref| <= atol + rtol * sum|w||x|.
#ifndef SPMMD_KERNELS_FORMAT_REFERENCE_H_
#define SPMMD_KERNELS_FORMAT_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/base/activation.h"
#include "kernels/format/dense.h"

namespace spmmd {

// Row-major [n, m]. `scale` is |bias| + sum|w||x| of each output: what an fp32 summation error is proportional to.
struct Reference {
  int64_t n = 0;
  int64_t m = 0;
  std::vector<double> y;
  std::vector<double> scale;
};

// w: [M, K], x: [N, K], any dtypes; bias: [M] or empty. Shapes must agree (they are the caller's own: unchecked).
Reference ReferenceMatmul(const DenseView& w, const DenseView& x, absl::Span<const float> bias = {},
                          Activation activation = Activation::kNone);

// As ReferenceMatmul for the rows of W named by `rows` only, in that order: affordable for large layers. The result's m
// is rows.size().
Reference ReferenceRows(const DenseView& w, absl::Span<const int64_t> rows, const DenseView& x,
                        absl::Span<const float> bias = {}, Activation activation = Activation::kNone);

// SpMspV: x given by its nonzeros. n is 1.
Reference ReferenceMatmulSparse(const DenseView& w, absl::Span<const uint32_t> indices, absl::Span<const float> values,
                                absl::Span<const float> bias = {}, Activation activation = Activation::kNone);

// rtol that any of our kernels must keep for an output of this dtype: fp32 accumulation over k products, plus the
// rounding of the output.
double DefaultTolerance(DType output, int64_t k);

// OK when every element of y [n, m] satisfies |y - ref| <= atol + rtol * scale; a NaN is a mismatch unless the
// reference is NaN too, and infinities must be equal. Otherwise INTERNAL with the position, both values and the number
// of mismatches.
absl::Status CompareToReference(const DenseView& y, const Reference& reference, double rtol, double atol = 1e-6);

// max |y - ref| / scale over all outputs with scale > 0: the benchmark's rel_error.
double MaxRelativeError(const DenseView& y, const Reference& reference);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_FORMAT_REFERENCE_H_
