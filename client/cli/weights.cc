#include "client/cli/weights.h"

#include <cstddef>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/npy.h"
#include "kernels/format/safetensors.h"

namespace spmmd::cli {
namespace {

v1::DataType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return v1::DATA_TYPE_F16;
    case DType::kBf16:
      return v1::DATA_TYPE_BF16;
    case DType::kF32:
      return v1::DATA_TYPE_F32;
  }
  return v1::DATA_TYPE_UNSPECIFIED;
}

absl::StatusOr<DType> FromProto(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_F16:
      return DType::kF16;
    case v1::DATA_TYPE_BF16:
      return DType::kBf16;
    case v1::DATA_TYPE_F32:
      return DType::kF32;
    default:
      return absl::InternalError(absl::StrCat("the server answered with element type ", static_cast<int>(dtype)));
  }
}

// "a, b, c, ..." of the file's matrices.
absl::StatusOr<std::vector<std::string>> SomeMatrices(SafetensorsCheckpoint& checkpoint) {
  constexpr size_t kListed = 10;
  std::vector<std::string> matrices;
  for (const std::string& name : checkpoint.TensorNames()) {
    if (matrices.size() == kListed) {
      matrices.emplace_back("...");
      break;
    }
    SPMMD_ASSIGN_OR_RETURN(const SafetensorsTensor tensor, checkpoint.Find(name));
    if (tensor.shape.size() == 2) matrices.push_back(name);
  }
  return matrices;
}

}  // namespace

absl::StatusOr<DenseMatrix> ReadMatrix(const FileAndTensor& file) {
  if (file.is_npy) return ReadNpy(file.path);
  SPMMD_ASSIGN_OR_RETURN(SafetensorsCheckpoint checkpoint, SafetensorsCheckpoint::Open(file.path));
  if (!file.tensor.empty() && checkpoint.Contains(file.tensor)) return checkpoint.ReadMatrix(file.tensor);
  SPMMD_ASSIGN_OR_RETURN(const std::vector<std::string> matrices, SomeMatrices(checkpoint));
  if (!file.tensor.empty()) {
    return absl::NotFoundError(
        absl::StrCat(file.path, ": no tensor '", file.tensor, "'; it has ", absl::StrJoin(matrices, ", ")));
  }
  if (matrices.empty()) return absl::InvalidArgumentError(absl::StrCat(file.path, ": has no matrix"));
  if (matrices.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat(file.path, ": has several matrices, name one as ", file.path,
                                                   ":TENSOR: ", absl::StrJoin(matrices, ", ")));
  }
  return checkpoint.ReadMatrix(matrices[0]);
}

absl::StatusOr<std::vector<float>> ReadBias(const std::string& bias, const FileAndTensor& weights, int64_t m) {
  FileAndTensor file{weights.path, bias, false};
  if (absl::StatusOr<FileAndTensor> own_file = ParseFile(bias); own_file.ok()) {
    file = *std::move(own_file);
  } else if (weights.is_npy) {
    return absl::InvalidArgumentError(
        absl::StrCat("--bias: '", bias, "' is no file, and ", weights.path, " has no named tensors"));
  }
  SPMMD_ASSIGN_OR_RETURN(const DenseMatrix matrix, ReadMatrix(file));
  // A vector is read as one row; a column is as good.
  if (matrix.rows() * matrix.cols() != m || (matrix.rows() != 1 && matrix.cols() != 1)) {
    return absl::InvalidArgumentError(absl::StrCat("--bias: ", bias, " has shape [", matrix.rows(), ", ", matrix.cols(),
                                                   "], needs the ", m, " elements of one output row"));
  }
  std::vector<float> elements(static_cast<size_t>(m));
  const MutableDenseView fp32{reinterpret_cast<std::byte*>(elements.data()), DType::kF32, matrix.rows(), matrix.cols(),
                              matrix.cols()};
  SPMMD_RETURN_IF_ERROR(ConvertDense(matrix.view(), fp32));
  return elements;
}

client::DenseRows ToRows(const DenseMatrix& matrix) {
  return {ToProto(matrix.dtype()), matrix.rows(), matrix.cols(),
          absl::Span<const std::byte>(matrix.view().data, matrix.bytes())};
}

absl::Status WriteMatrix(const std::string& path, const client::Matrix& matrix) {
  SPMMD_ASSIGN_OR_RETURN(const DType dtype, FromProto(matrix.dtype));
  return WriteNpy(
      path, {reinterpret_cast<const std::byte*>(matrix.bytes.data()), dtype, matrix.rows, matrix.cols, matrix.cols});
}

}  // namespace spmmd::cli
