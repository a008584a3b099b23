// Weights read from a file of the model repository.
#ifndef SPMMD_SERVER_CATALOG_FILE_SOURCE_H_
#define SPMMD_SERVER_CATALOG_FILE_SOURCE_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/format/container.h"
#include "kernels/format/dense.h"
#include "kernels/format/safetensors.h"
#include "server/pb.h"
#include "spmm/v1/layer_catalog.pb.h"

namespace spmmd::server {

// An opened file and the tensors chosen in it. Reading is left for later.
class FileSource {
 public:
  // Opens the file of `spec` and fills in what the spec leaves open: shape, dtype, has_bias. "P.weight" finds the
  // bitmask forms of compressed-tensors checkpoints too. FAILED_PRECONDITION
  // without a repository, NOT_FOUND, INVALID_ARGUMENT ("spec.file.path", "spec.file.tensor", "spec.m", ...).
  static absl::StatusOr<std::unique_ptr<FileSource>> Open(const std::string& repository, pb::LayerSpec* spec);

  // Tells this source, as its files are now, from others and from what they were: paths, sizes, times of change, tensor
  // names. As the file system had it when the source was opened.
  const std::string& Identity() const { return identity_; }
  absl::StatusOr<DenseMatrix> ReadWeights();
  // Empty when the spec names no bias; converted to fp32.
  absl::StatusOr<std::vector<float>> ReadBias();

 private:
  FileSource() = default;
  void Identify();
  absl::Status OpenSafetensors(pb::LayerSpec* spec);
  absl::Status OpenNpy(pb::LayerSpec* spec);
  absl::Status OpenPacked(pb::LayerSpec* spec);
  // An error of the file readers as one of the caller's field, without this host's directories.
  absl::Status AtFileField(absl::string_view field, const absl::Status& status) const;

  std::string repository_;  // absolute
  std::string path_;        // absolute
  std::string tensor_;
  std::string bias_tensor_;
  std::string identity_;
  std::optional<SafetensorsCheckpoint> checkpoint_;
  std::optional<LayerFile> packed_;  // with neither: .npy
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_CATALOG_FILE_SOURCE_H_
