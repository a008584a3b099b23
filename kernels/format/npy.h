// NumPy's .npy files: fp16 ('<f2'), fp32 ('<f4') and bf16 ('<V2', as ml_dtypes writes it), format versions 1 to 3.
#ifndef SPMMD_KERNELS_FORMAT_NPY_H_
#define SPMMD_KERNELS_FORMAT_NPY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/format/dense.h"

namespace spmmd {

// A checked header and the elements behind it, which need no alignment.
struct NpyArray {
  DType dtype = DType::kF32;
  bool fortran_order = false;
  std::vector<int64_t> shape;        // every dimension >= 0; the product times SizeOf(dtype) is data.size()
  absl::Span<const std::byte> data;  // borrows the input
};

// INVALID_ARGUMENT saying what is wrong: not a .npy file, another dtype (big-endian named as such), a malformed header,
// a size that disagrees with the shape.
absl::StatusOr<NpyArray> ParseNpy(absl::Span<const std::byte> bytes);

// The array as a matrix, in row-major order whatever the file's: two dimensions as they are, one dimension as one row.
// INVALID_ARGUMENT for other ranks, empty arrays and shapes beyond the limits of CheckShape.
absl::StatusOr<DenseMatrix> NpyToMatrix(const NpyArray& array);

// ParseNpy and NpyToMatrix on a file; errors name the path.
absl::StatusOr<DenseMatrix> ReadNpy(const std::string& path);

// Version 1 header, C order, written atomically. A bf16 matrix gets '<V2': `numpy.load(p).view(ml_dtypes.bfloat16)`.
absl::Status WriteNpy(const std::string& path, const DenseView& matrix);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_FORMAT_NPY_H_
