#include "server/catalog/file_source.h"

#include <sys/stat.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/compressed_tensors.h"
#include "kernels/format/file_io.h"
#include "kernels/format/npy.h"
#include "server/catalog/types.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

absl::Status CheckRelative(const std::string& path) {
  if (path.find('\0') != std::string::npos) return FieldError("spec.file.path", "has a NUL character");
  if (path.front() == '/') return FieldError("spec.file.path", "must be relative to the model repository");
  for (const absl::string_view component : absl::StrSplit(path, '/')) {
    if (component == "..") return FieldError("spec.file.path", "must not leave the model repository");
  }
  return absl::OkStatus();
}

// What the file has against what the spec says, if it says anything.
absl::Status Reconcile(DType dtype, const std::vector<int64_t>& shape, pb::LayerSpec* spec) {
  if (shape.size() != 2) {
    return FieldError("spec.file.tensor", absl::StrCat("has ", shape.size(), " dimensions, a layer has 2"));
  }
  if (spec->m() != 0 && spec->m() != shape[0]) {
    return FieldError("spec.m", absl::StrCat(spec->m(), ", but the file has ", shape[0]));
  }
  if (spec->k() != 0 && spec->k() != shape[1]) {
    return FieldError("spec.k", absl::StrCat(spec->k(), ", but the file has ", shape[1]));
  }
  if (spec->dtype() != pb::DATA_TYPE_UNSPECIFIED && spec->dtype() != ToProto(dtype)) {
    return FieldError("spec.dtype", absl::StrCat(pb::DataType_Name(spec->dtype()), ", but the file has ",
                                                 pb::DataType_Name(ToProto(dtype))));
  }
  spec->set_m(shape[0]);
  spec->set_k(shape[1]);
  spec->set_dtype(ToProto(dtype));
  return absl::OkStatus();
}

std::optional<DType> SafetensorsType(absl::string_view name) {
  if (name == "F16") return DType::kF16;
  if (name == "BF16") return DType::kBf16;
  if (name == "F32") return DType::kF32;
  return std::nullopt;
}

// The directory in full, so that it is found in messages and nothing else is.
absl::StatusOr<std::string> AbsoluteDirectory(const std::string& path) {
  std::error_code error;
  std::string absolute = std::filesystem::absolute(path, error).lexically_normal().string();
  if (error) return absl::InternalError(absl::StrCat("model repository: ", error.message()));
  while (absolute.size() > 1 && absolute.back() == '/') absolute.pop_back();
  return absolute;
}

}  // namespace

absl::Status FileSource::AtFileField(absl::string_view field, const absl::Status& status) const {
  // The readers name files in full. A caller learns of them what he knows: where they are in the repository.
  std::string message(status.message());
  if (repository_ != "/") {
    message =
        absl::StrReplaceAll(message, {{absl::StrCat(repository_, "/"), ""}, {repository_, "of the model repository"}});
  }
  if (status.code() == absl::StatusCode::kNotFound) {
    return MakeError(absl::StatusCode::kNotFound, reason::kFileNotFound, absl::StrCat(field, ": ", message));
  }
  return AtField(field, absl::Status(status.code(), message));
}

absl::StatusOr<std::unique_ptr<FileSource>> FileSource::Open(const std::string& repository, pb::LayerSpec* spec) {
  if (repository.empty()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kNoModelRepository,
                     "spec.file: the server has no model repository (--model-repository)");
  }
  SPMMD_RETURN_IF_ERROR(CheckRelative(spec->file().path()));
  auto source = std::unique_ptr<FileSource>(new FileSource());
  SPMMD_ASSIGN_OR_RETURN(source->repository_, AbsoluteDirectory(repository));
  source->path_ = absl::StrCat(source->repository_, "/", spec->file().path());
  source->tensor_ = spec->file().tensor();
  source->bias_tensor_ = spec->file().bias_tensor();
  if (const absl::Status inside = CheckInsideDirectory(source->path_, source->repository_); !inside.ok()) {
    if (inside.code() == absl::StatusCode::kNotFound) {
      return MakeError(absl::StatusCode::kNotFound, reason::kFileNotFound,
                       absl::StrCat("spec.file.path: no file ", spec->file().path(), " in the model repository"));
    }
    return FieldError("spec.file.path", "must not leave the model repository");
  }
  absl::Status opened;
  if (absl::EndsWith(source->path_, ".npy")) {
    opened = source->OpenNpy(spec);
  } else if (absl::EndsWith(source->path_, ".spmmpk")) {
    opened = source->OpenPacked(spec);
  } else {
    opened = source->OpenSafetensors(spec);
  }
  if (!opened.ok()) return opened;
  source->Identify();
  return source;
}

void FileSource::Identify() {
  // One line a field: neither names in a file nor paths that a spec can give have line breaks that could fake one,
  // because their lengths stand before them.
  identity_ = absl::StrCat(tensor_.size(), " ", tensor_, "\n", bias_tensor_.size(), " ", bias_tensor_, "\n");
  std::vector<std::string> paths = {path_};
  if (checkpoint_.has_value()) {
    for (std::string& shard : checkpoint_->ShardPaths()) paths.push_back(std::move(shard));
  }
  for (const std::string& path : paths) {
    struct stat info = {};
    // A shard that is not there is no tensor's of this source.
    if (stat(path.c_str(), &info) != 0) continue;
    absl::StrAppend(&identity_, path.size(), " ", path, " ", info.st_dev, " ", info.st_ino, " ", info.st_size, " ",
                    info.st_mtim.tv_sec, ".", info.st_mtim.tv_nsec, " ", info.st_ctim.tv_sec, ".", info.st_ctim.tv_nsec,
                    "\n");
  }
}

absl::Status FileSource::OpenSafetensors(pb::LayerSpec* spec) {
  if (!absl::EndsWith(path_, ".safetensors") && !absl::EndsWith(path_, ".json")) {
    return FieldError("spec.file.path", "must end in .safetensors, .safetensors.index.json, .npy or .spmmpk");
  }
  if (tensor_.empty()) return FieldError("spec.file.tensor", "must name a tensor of the .safetensors file");
  absl::StatusOr<SafetensorsCheckpoint> checkpoint = SafetensorsCheckpoint::Open(path_, repository_);
  if (!checkpoint.ok()) return AtFileField("spec.file.path", checkpoint.status());
  checkpoint_ = *std::move(checkpoint);
  const absl::StatusOr<WeightDescription> tensor = DescribeCheckpointWeight(&*checkpoint_, tensor_);
  if (!tensor.ok()) return AtFileField("spec.file.tensor", tensor.status());
  const std::optional<DType> dtype = SafetensorsType(tensor->dtype);
  if (!dtype.has_value()) {
    return FieldError("spec.file.tensor", absl::StrCat("has dtype ", tensor->dtype, "; F16, BF16 and F32 are read"));
  }
  SPMMD_RETURN_IF_ERROR(Reconcile(*dtype, tensor->shape, spec));
  if (bias_tensor_.empty()) {
    if (spec->has_bias()) return FieldError("spec.has_bias", "is set, but spec.file.bias_tensor names no tensor");
    return absl::OkStatus();
  }
  const absl::StatusOr<SafetensorsTensor> bias = checkpoint_->Find(bias_tensor_);
  if (!bias.ok()) return AtFileField("spec.file.bias_tensor", bias.status());
  if (!SafetensorsType(bias->dtype).has_value() || bias->shape.size() != 1 || bias->shape[0] != spec->m()) {
    return FieldError("spec.file.bias_tensor",
                      absl::StrCat("must have one dimension of M = ", spec->m(), " and dtype F16, BF16 or F32"));
  }
  spec->set_has_bias(true);
  return absl::OkStatus();
}

absl::Status FileSource::OpenNpy(pb::LayerSpec* spec) {
  if (!tensor_.empty()) return FieldError("spec.file.tensor", "must be empty for a .npy file");
  if (!bias_tensor_.empty()) return FieldError("spec.file.bias_tensor", "must be empty for a .npy file");
  if (spec->has_bias()) return FieldError("spec.has_bias", "a .npy file has no bias");
  const absl::StatusOr<std::shared_ptr<const MappedFile>> file = MappedFile::Open(path_);
  if (!file.ok()) return AtFileField("spec.file.path", file.status());
  const absl::StatusOr<NpyArray> array = ParseNpy((*file)->bytes());
  if (!array.ok()) return AtFileField("spec.file.path", array.status());
  return Reconcile(array->dtype, array->shape, spec);
}

absl::Status FileSource::OpenPacked(pb::LayerSpec* spec) {
  if (!tensor_.empty()) return FieldError("spec.file.tensor", "must be empty for a .spmmpk file");
  if (!bias_tensor_.empty()) return FieldError("spec.file.bias_tensor", "must be empty for a .spmmpk file");
  absl::StatusOr<LayerFile> file = ReadLayerFile(path_);
  if (!file.ok()) return AtFileField("spec.file.path", file.status());
  packed_ = *std::move(file);
  const PackedLayer& layer = packed_->layer;
  if (spec->has_bias() && packed_->bias.empty()) return FieldError("spec.has_bias", "is set, but the file has no bias");
  SPMMD_RETURN_IF_ERROR(Reconcile(layer.dtype, {layer.m, layer.k}, spec));
  spec->set_has_bias(!packed_->bias.empty());
  return absl::OkStatus();
}

absl::StatusOr<DenseMatrix> FileSource::ReadWeights() {
  absl::StatusOr<DenseMatrix> weights;
  if (packed_.has_value()) {
    weights = Unpack(packed_->layer);
  } else if (checkpoint_.has_value()) {
    weights = ReadCheckpointWeight(&*checkpoint_, tensor_);
  } else {
    weights = ReadNpy(path_);
  }
  if (!weights.ok()) return AtFileField("spec.file.path", weights.status());
  return weights;
}

absl::StatusOr<std::vector<float>> FileSource::ReadBias() {
  if (packed_.has_value()) return packed_->bias;
  if (bias_tensor_.empty()) return std::vector<float>();
  const absl::StatusOr<DenseMatrix> matrix = checkpoint_->ReadMatrix(bias_tensor_);
  if (!matrix.ok()) return AtFileField("spec.file.bias_tensor", matrix.status());
  std::vector<float> bias(static_cast<size_t>(matrix->cols()));
  for (int64_t i = 0; i < matrix->cols(); ++i) {
    bias[static_cast<size_t>(i)] = static_cast<float>(ElementAsDouble(matrix->view(), 0, i));
  }
  return bias;
}

}  // namespace spmmd::server
