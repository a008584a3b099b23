// Matrices as callers hold them: views for what goes to the server, an owning one for what comes back.
#ifndef SPMMD_CLIENT_CPP_TENSOR_H_
#define SPMMD_CLIENT_CPP_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "spmm/v1/sparse_matmul.pb.h"
#include "spmm/v1/types.pb.h"

namespace spmmd::client {

namespace v1 = ::spmm::v1;

// Bytes of an element; 0 for a value that is not one of the three types.
size_t ElementSize(v1::DataType dtype);

// The bytes behind any span.
template <typename T>
absl::Span<const std::byte> AsBytes(absl::Span<const T> elements) {
  return {reinterpret_cast<const std::byte*>(elements.data()), elements.size() * sizeof(T)};
}

// View of [rows, cols] elements, row-major, no padding between rows. The memory stays the caller's and must live until
// the call that takes the view returns.
struct DenseRows {
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  int64_t rows = 0;
  int64_t cols = 0;
  absl::Span<const std::byte> bytes;

  static DenseRows F32(absl::Span<const float> elements, int64_t rows, int64_t cols) {
    return {v1::DATA_TYPE_F32, rows, cols, AsBytes(elements)};
  }
  // Bit patterns of fp16 or bf16.
  static DenseRows F16(absl::Span<const uint16_t> elements, int64_t rows, int64_t cols) {
    return {v1::DATA_TYPE_F16, rows, cols, AsBytes(elements)};
  }
  static DenseRows Bf16(absl::Span<const uint16_t> elements, int64_t rows, int64_t cols) {
    return {v1::DATA_TYPE_BF16, rows, cols, AsBytes(elements)};
  }
};

// View of [rows, cols] given by its nonzeros (CSR), for SpMspV. As for DenseRows, the memory stays the caller's.
struct SparseRows {
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  int64_t rows = 0;
  int64_t cols = 0;
  // rows + 1 offsets into indices; may be empty when rows == 1.
  absl::Span<const uint64_t> row_offsets;
  // Column of each nonzero, strictly ascending within a row.
  absl::Span<const uint32_t> indices;
  // Elements of `dtype`, as many as indices.
  absl::Span<const std::byte> values;
};

// INVALID_ARGUMENT naming what disagrees: type, shape, byte counts. The server checks the same and the indices besides.
absl::Status Check(const DenseRows& rows);
absl::Status Check(const SparseRows& rows);

// A program input of a request. Copies the bytes; the errors of Check.
absl::StatusOr<v1::NamedInput> MakeInput(std::string_view name, const DenseRows& rows);
absl::StatusOr<v1::NamedInput> MakeInput(std::string_view name, const SparseRows& rows);

// A result: [rows, cols] elements of `dtype`, row-major.
struct Matrix {
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  int64_t rows = 0;
  int64_t cols = 0;
  std::string bytes;

  // The elements as float (F32) or as bit patterns in uint16_t (F16, BF16); empty when T has another size than `dtype`.
  template <typename T>
  absl::Span<const T> As() const {
    if (sizeof(T) != ElementSize(dtype)) return {};
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
};

// Moves the output of a step out of a response. NOT_FOUND when there is none of that name, INTERNAL when its shape and
// bytes disagree, FAILED_PRECONDITION when it went to shared memory.
absl::StatusOr<Matrix> TakeOutput(v1::ExecuteResponse& response, std::string_view step);

}  // namespace spmmd::client

#endif  // SPMMD_CLIENT_CPP_TENSOR_H_
