#include "client/cli/weights.h"

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/compressed_tensors.h"
#include "kernels/format/container.h"
#include "kernels/format/file_io.h"
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
  for (const std::string& name : CheckpointWeightNames(checkpoint)) {
    if (matrices.size() == kListed) {
      matrices.emplace_back("...");
      break;
    }
    SPMMD_ASSIGN_OR_RETURN(const WeightDescription weight, DescribeCheckpointWeight(&checkpoint, name));
    if (weight.shape.size() == 2) matrices.push_back(name);
  }
  return matrices;
}

}  // namespace

absl::StatusOr<DenseMatrix> ReadMatrix(const FileAndTensor& file) {
  if (file.is_npy) return ReadNpy(file.path);
  if (file.is_packed) {
    SPMMD_ASSIGN_OR_RETURN(const LayerFile packed, ReadLayerFile(file.path));
    return Unpack(packed.layer);
  }
  SPMMD_ASSIGN_OR_RETURN(SafetensorsCheckpoint checkpoint, SafetensorsCheckpoint::Open(file.path));
  if (!file.tensor.empty()) {
    absl::StatusOr<DenseMatrix> matrix = ReadCheckpointWeight(&checkpoint, file.tensor);
    if (!absl::IsNotFound(matrix.status()) || checkpoint.Contains(file.tensor)) return matrix;
  }
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
  return ReadCheckpointWeight(&checkpoint, matrices[0]);
}

absl::StatusOr<DenseMatrix> ReadLayerWeights(const FileAndTensor& file) {
  SPMMD_ASSIGN_OR_RETURN(DenseMatrix w, ReadMatrix(file));
  if (w.rows() != 1 || file.is_packed) return w;
  size_t dimensions = 2;
  if (file.is_npy) {
    SPMMD_ASSIGN_OR_RETURN(const std::shared_ptr<const MappedFile> bytes, MappedFile::Open(file.path));
    SPMMD_ASSIGN_OR_RETURN(const NpyArray array, ParseNpy(bytes->bytes()));
    dimensions = array.shape.size();
  } else if (!file.tensor.empty()) {
    SPMMD_ASSIGN_OR_RETURN(SafetensorsCheckpoint checkpoint, SafetensorsCheckpoint::Open(file.path));
    SPMMD_ASSIGN_OR_RETURN(const WeightDescription weight, DescribeCheckpointWeight(&checkpoint, file.tensor));
    dimensions = weight.shape.size();
  }
  if (dimensions == 2) return w;
  return absl::InvalidArgumentError(absl::StrCat(file.path, file.tensor.empty() ? "" : ":", file.tensor,
                                                 ": has 1 dimension, a layer has 2 (--bias takes a vector)"));
}

absl::StatusOr<std::vector<float>> PackedBias(const FileAndTensor& file) {
  if (!file.is_packed) return std::vector<float>();
  SPMMD_ASSIGN_OR_RETURN(LayerFile packed, ReadLayerFile(file.path));
  return std::move(packed.bias);
}

absl::StatusOr<std::vector<float>> ReadBias(const std::string& bias, const FileAndTensor& weights, int64_t m) {
  FileAndTensor file{weights.path, bias, false, false};
  if (absl::StatusOr<FileAndTensor> own_file = ParseFile(bias); own_file.ok()) {
    file = *std::move(own_file);
  } else if (weights.is_npy || weights.is_packed) {
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
