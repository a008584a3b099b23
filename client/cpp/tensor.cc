#include "client/cpp/tensor.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace spmmd::client {
namespace {

// rows * cols * element size, or nullopt-like -1 when a number is out of range or the product overflows.
int64_t ByteSize(v1::DataType dtype, int64_t rows, int64_t cols) {
  int64_t elements = 0;
  int64_t bytes = 0;
  if (rows < 0 || cols < 0 || __builtin_mul_overflow(rows, cols, &elements) ||
      __builtin_mul_overflow(elements, static_cast<int64_t>(ElementSize(dtype)), &bytes)) {
    return -1;
  }
  return bytes;
}

absl::Status CheckTypeAndShape(v1::DataType dtype, int64_t rows, int64_t cols) {
  if (ElementSize(dtype) == 0) {
    return absl::InvalidArgumentError(absl::StrCat("dtype: ", static_cast<int>(dtype), " is no element type"));
  }
  if (rows < 0 || cols < 1) {
    return absl::InvalidArgumentError(absl::StrCat("shape: [", rows, ", ", cols, "] needs rows >= 0 and columns >= 1"));
  }
  return absl::OkStatus();
}

std::string ToString(absl::Span<const std::byte> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

}  // namespace

size_t ElementSize(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_F16:
    case v1::DATA_TYPE_BF16:
      return 2;
    case v1::DATA_TYPE_F32:
      return 4;
    default:
      return 0;
  }
}

absl::Status Check(const DenseRows& rows) {
  if (absl::Status status = CheckTypeAndShape(rows.dtype, rows.rows, rows.cols); !status.ok()) return status;
  if (const int64_t expected = ByteSize(rows.dtype, rows.rows, rows.cols);
      expected < 0 || static_cast<uint64_t>(expected) != rows.bytes.size()) {
    return absl::InvalidArgumentError(absl::StrCat("data: ", rows.bytes.size(), " bytes do not fill shape [", rows.rows,
                                                   ", ", rows.cols, "] of ", v1::DataType_Name(rows.dtype)));
  }
  return absl::OkStatus();
}

absl::Status Check(const SparseRows& rows) {
  if (absl::Status status = CheckTypeAndShape(rows.dtype, rows.rows, rows.cols); !status.ok()) return status;
  if (rows.values.size() != rows.indices.size() * ElementSize(rows.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("values: ", rows.values.size(), " bytes for ", rows.indices.size(),
                                                   " indices of ", v1::DataType_Name(rows.dtype)));
  }
  const bool offsets_implied = rows.rows == 1 && rows.row_offsets.empty();
  if (!offsets_implied && rows.row_offsets.size() != static_cast<uint64_t>(rows.rows) + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("row_offsets: ", rows.row_offsets.size(), " offsets for ", rows.rows, " rows, needs rows + 1"));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::NamedInput> MakeInput(std::string_view name, const DenseRows& rows) {
  if (absl::Status status = Check(rows); !status.ok()) return status;
  v1::NamedInput input;
  input.set_name(std::string(name));
  v1::Tensor& tensor = *input.mutable_dense();
  tensor.set_dtype(rows.dtype);
  tensor.add_shape(rows.rows);
  tensor.add_shape(rows.cols);
  tensor.set_data(ToString(rows.bytes));
  return input;
}

absl::StatusOr<v1::NamedInput> MakeInput(std::string_view name, const SparseRows& rows) {
  if (absl::Status status = Check(rows); !status.ok()) return status;
  v1::NamedInput input;
  input.set_name(std::string(name));
  v1::SparseTensor& tensor = *input.mutable_sparse();
  tensor.set_dtype(rows.dtype);
  tensor.add_shape(rows.rows);
  tensor.add_shape(rows.cols);
  tensor.set_row_offsets(ToString(AsBytes(rows.row_offsets)));
  tensor.set_indices(ToString(AsBytes(rows.indices)));
  tensor.set_values(ToString(rows.values));
  return input;
}

absl::StatusOr<Matrix> TakeOutput(v1::ExecuteResponse& response, std::string_view step) {
  const std::string name(step);
  for (v1::NamedOutput& output : *response.mutable_outputs()) {
    if (output.name() != name) continue;
    v1::Tensor& tensor = *output.mutable_tensor();
    if (tensor.has_region()) {
      return absl::FailedPreconditionError(
          absl::StrCat("output '", name, "' is in shared memory, not in the response"));
    }
    if (tensor.shape_size() != 2) {
      return absl::InternalError(absl::StrCat("output '", name, "' has ", tensor.shape_size(), " dimensions, not 2"));
    }
    Matrix matrix{tensor.dtype(), tensor.shape(0), tensor.shape(1), std::move(*tensor.mutable_data())};
    if (const absl::Status status =
            Check(DenseRows{matrix.dtype, matrix.rows, matrix.cols,
                            AsBytes(absl::Span<const char>(matrix.bytes.data(), matrix.bytes.size()))});
        !status.ok()) {
      return absl::InternalError(absl::StrCat("output '", name, "' is malformed: ", status.message()));
    }
    return matrix;
  }
  return absl::NotFoundError(absl::StrCat("the response has no output '", name, "'"));
}

}  // namespace spmmd::client
