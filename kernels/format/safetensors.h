// Reader of .safetensors files and of checkpoints sharded over several of them (Hugging Face's
// *.safetensors.index.json). Own code because no C++ library of it is packaged; the rules are the reference
// implementation's: the header is at most 100 MB of JSON, names are unique, and tensors tile the data area without gap
// or overlap.
#ifndef SPMMD_KERNELS_FORMAT_SAFETENSORS_H_
#define SPMMD_KERNELS_FORMAT_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/format/dense.h"

namespace spmmd {

struct SafetensorsTensor {
  std::string dtype;                 // as in the file: "F16", "BF16", "F32", "I64", "U8", ...
  std::vector<int64_t> shape;        // empty for a scalar
  absl::Span<const std::byte> data;  // no alignment promised
};

// One file. Tensors borrow its bytes.
class SafetensorsFile {
 public:
  // NOT_FOUND; INVALID_ARGUMENT naming the path and what is wrong with the file.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);
  // As Open on bytes in memory that live as long as `owner`.
  static absl::StatusOr<SafetensorsFile> Parse(absl::Span<const std::byte> bytes, std::shared_ptr<const void> owner);

  const std::map<std::string, SafetensorsTensor, std::less<>>& tensors() const { return tensors_; }
  // The file's "__metadata__".
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  std::map<std::string, SafetensorsTensor, std::less<>> tensors_;
  std::map<std::string, std::string> metadata_;
  std::shared_ptr<const void> owner_;
};

// The "weight_map" of an index file: tensor name -> file name. INVALID_ARGUMENT for anything malformed and for a file
// name that is empty, absolute, or has "..", "." or a backslash in it: no shard lies outside the index's directory.
absl::StatusOr<std::map<std::string, std::string, std::less<>>> ParseSafetensorsIndex(absl::string_view json);

// A .safetensors file or an .index.json with its shards behind one name space. Shards open on first use; not
// thread-safe.
class SafetensorsCheckpoint {
 public:
  // `path` ends in .safetensors or .json. With a non-empty `root`, every file opened, shards included, must lie inside
  // that directory with symbolic links resolved (INVALID_ARGUMENT). Errors as SafetensorsFile::Open.
  static absl::StatusOr<SafetensorsCheckpoint> Open(const std::string& path, const std::string& root = "");

  // One file that is open already.
  static SafetensorsCheckpoint FromFile(SafetensorsFile file);

  // Names in ascending order.
  std::vector<std::string> TensorNames() const;
  bool Contains(absl::string_view name) const;
  // The shards that an index names, in ascending order; nothing for a single file.
  std::vector<std::string> ShardPaths() const;
  // NOT_FOUND when unknown (the message lists close names); INVALID_ARGUMENT when the index names a shard without it.
  absl::StatusOr<SafetensorsTensor> Find(absl::string_view name);
  // A tensor of dtype F16, BF16 or F32 as a matrix: two dimensions as they are, one dimension as one row.
  absl::StatusOr<DenseMatrix> ReadMatrix(absl::string_view name);

 private:
  std::string directory_;
  std::string root_;
  std::map<std::string, std::string, std::less<>> shard_of_;  // tensor -> file path
  std::map<std::string, SafetensorsFile> open_;               // file path -> file
};

// The tensor as a matrix; `name` is for messages.
absl::StatusOr<DenseMatrix> SafetensorsToMatrix(absl::string_view name, const SafetensorsTensor& tensor);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_FORMAT_SAFETENSORS_H_
