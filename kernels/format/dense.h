// Dense matrices: the input of every packer, the output of every unpacker, activations and outputs.
#ifndef SPMMD_KERNELS_FORMAT_DENSE_H_
#define SPMMD_KERNELS_FORMAT_DENSE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"

namespace spmmd {

// Largest M or K of a layer, and largest M * K. They keep every byte offset and bit index of every format inside
// int64 with room to spare, and refuse a request for absurd memory before anything is allocated.
inline constexpr int64_t kMaxDim = int64_t{1} << 24;
inline constexpr int64_t kMaxElements = int64_t{1} << 36;

// Non-owning row-major view of [rows, cols] elements. Row r starts at data + r * row_stride * SizeOf(dtype); rows need
// only element alignment.
struct DenseView {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // elements, >= cols

  const std::byte* row(int64_t r) const { return data + static_cast<size_t>(r * row_stride) * SizeOf(dtype); }
};

// As DenseView, writable.
struct MutableDenseView {
  std::byte* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;

  std::byte* row(int64_t r) const { return data + static_cast<size_t>(r * row_stride) * SizeOf(dtype); }
  DenseView Const() const { return {data, dtype, rows, cols, row_stride}; }
};

// INVALID_ARGUMENT naming the field ("M", "K" or "M*K") and the limit unless 1 <= m, k <= kMaxDim and
// m * k <= kMaxElements.
absl::Status CheckShape(int64_t m, int64_t k);

// Owning, contiguous (row_stride == cols), zero-filled at creation.
class DenseMatrix {
 public:
  DenseMatrix() = default;
  // Errors of CheckShape and Buffer::Allocate.
  static absl::StatusOr<DenseMatrix> Create(DType dtype, int64_t rows, int64_t cols);

  DType dtype() const { return dtype_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  DenseView view() const { return {buffer_.data(), dtype_, rows_, cols_, cols_}; }
  MutableDenseView mutable_view() { return {buffer_.mutable_data(), dtype_, rows_, cols_, cols_}; }
  size_t bytes() const { return buffer_.size(); }

 private:
  Buffer buffer_;
  DType dtype_ = DType::kF32;
  int64_t rows_ = 0;
  int64_t cols_ = 0;
};

// One element widened to double (exact). No bounds check.
double ElementAsDouble(const DenseView& view, int64_t row, int64_t col);

// What a packer keeps of a stored element: everything but zeros of either sign. -0.0 is a zero (design, section 3).
constexpr bool IsNonzeroBits(uint16_t bits) { return (bits & 0x7fffu) != 0; }
constexpr bool IsNonzeroBits(uint32_t bits) { return (bits & 0x7fffffffu) != 0; }

struct DenseStats {
  int64_t nnz = 0;
  int64_t nonfinite = 0;             // NaN and infinities
  int64_t first_nonfinite_row = -1;  // position of the first one in row-major order, -1 when there is none
  int64_t first_nonfinite_col = -1;
};
// One parallel pass over the matrix.
DenseStats ScanDense(const DenseView& w);

// INVALID_ARGUMENT with the position of the first NaN or infinity, OK when there is none.
absl::Status CheckFinite(const DenseView& w);

// Copy with conversion: round to nearest even when narrowing. A finite fp32 value that does not fit fp16 becomes
// infinity. Shapes must agree (INVALID_ARGUMENT).
absl::Status ConvertDense(const DenseView& from, const MutableDenseView& to);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_FORMAT_DENSE_H_
