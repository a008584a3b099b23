#include "kernels/format/safetensors.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/file_io.h"
#include "kernels/format/import.h"

namespace spmmd {
namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's limit
constexpr size_t kMaxRank = 16;
constexpr size_t kMaxIndexBytes = size_t{16} << 20;

struct RawTensor {
  std::string dtype;
  std::vector<uint64_t> shape;
  std::vector<uint64_t> offsets;
  bool has_dtype = false;
  bool has_shape = false;
  bool has_offsets = false;
};

// Bits an element; nullopt for a dtype this reader does not know, whose size is then not checked.
std::optional<uint64_t> BitsOf(absl::string_view dtype) {
  static constexpr std::pair<absl::string_view, uint64_t> kBits[] = {
      {"BOOL", 8}, {"U8", 8},    {"I8", 8},   {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"I16", 16}, {"U16", 16},
      {"F16", 16}, {"BF16", 16}, {"I32", 32}, {"U32", 32},    {"F32", 32},    {"F64", 64},    {"I64", 64}, {"U64", 64}};
  for (const auto& [name, bits] : kBits) {
    if (name == dtype) return bits;
  }
  return std::nullopt;
}

// Accepts exactly the shape of a safetensors header and refuses everything else where it stands, so that a hostile
// header cannot make a tree of it. Depth 0 is outside, 1 the header, 2 a tensor or the metadata, 3 an array of numbers.
class HeaderSax : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::map<std::string, RawTensor, std::less<>> tensors;
  std::map<std::string, std::string> metadata;
  std::string error;

  bool start_object(size_t /*elements*/) override {
    if (depth_ == 0 || (depth_ == 1 && !key_.empty())) {
      ++depth_;
      return true;
    }
    return Fail("an object where none is due");
  }
  bool end_object() override {
    --depth_;
    return true;
  }
  bool start_array(size_t /*elements*/) override {
    if (depth_ != 2 || in_metadata_) return Fail("an array where none is due");
    bool& seen = key_ == "shape" ? tensor_->has_shape : tensor_->has_offsets;
    if ((key_ != "shape" && key_ != "data_offsets") || seen) return Fail(absl::StrCat("'", key_, "' is no array"));
    seen = true;
    numbers_ = key_ == "shape" ? &tensor_->shape : &tensor_->offsets;
    ++depth_;
    return true;
  }
  bool end_array() override {
    numbers_ = nullptr;
    --depth_;
    return true;
  }
  bool key(string_t& text) override {
    key_ = text;
    if (depth_ != 1) return true;
    if (text.empty()) return Fail("a tensor without a name");
    in_metadata_ = text == "__metadata__";
    if (in_metadata_) {
      if (std::exchange(metadata_seen_, true)) return Fail("__metadata__ comes twice");
      return true;
    }
    const auto [position, inserted] = tensors.try_emplace(text);
    if (!inserted) return Fail(absl::StrCat("tensor '", text, "' comes twice"));
    tensor_ = &position->second;
    return true;
  }
  bool string(string_t& text) override {
    if (depth_ != 2) return Fail("a string where none is due");
    if (in_metadata_) {
      metadata[key_] = text;
      return true;
    }
    if (key_ != "dtype" || std::exchange(tensor_->has_dtype, true)) {
      return Fail(absl::StrCat("'", key_, "' is no string"));
    }
    tensor_->dtype = text;
    return true;
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (numbers_ == nullptr || numbers_->size() >= kMaxRank) return Fail("a number where none is due");
    numbers_->push_back(value);
    return true;
  }
  bool null() override { return Fail("a null"); }
  bool boolean(bool /*value*/) override { return Fail("a boolean"); }
  bool number_integer(number_integer_t /*value*/) override { return Fail("a negative number"); }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) override { return Fail("a fraction"); }
  bool binary(binary_t& /*value*/) override { return Fail("a binary value"); }
  bool parse_error(size_t position, const std::string& /*token*/, const nlohmann::json::exception& /*e*/) override {
    return Fail(absl::StrCat("no valid JSON at byte ", position));
  }

 private:
  bool Fail(std::string what) {
    if (error.empty()) error = std::move(what);
    return false;
  }

  int depth_ = 0;
  bool in_metadata_ = false;
  bool metadata_seen_ = false;
  std::string key_;
  RawTensor* tensor_ = nullptr;
  std::vector<uint64_t>* numbers_ = nullptr;
};

absl::Status InvalidTensor(absl::string_view name, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("safetensors tensor '", name, "': ", what));
}

// The tensor's place in the data area, checked against its own shape and the area's size.
absl::StatusOr<SafetensorsTensor> CheckTensor(const std::string& name, const RawTensor& raw,
                                              absl::Span<const std::byte> area) {
  if (!raw.has_dtype || !raw.has_shape || raw.offsets.size() != 2) {
    return InvalidTensor(name, "'dtype', 'shape' or two 'data_offsets' are missing");
  }
  const uint64_t begin = raw.offsets[0];
  const uint64_t end = raw.offsets[1];
  if (begin > end || end > area.size()) {
    return InvalidTensor(name, absl::StrCat("data_offsets [", begin, ", ", end, "] leave the file"));
  }
  SafetensorsTensor tensor{raw.dtype, {}, area.subspan(begin, end - begin)};
  uint64_t elements = 1;
  for (const uint64_t dimension : raw.shape) {
    if (dimension > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ||
        __builtin_mul_overflow(elements, dimension, &elements)) {
      return InvalidTensor(name, "shape overflows");
    }
    tensor.shape.push_back(static_cast<int64_t>(dimension));
  }
  if (const std::optional<uint64_t> bits = BitsOf(raw.dtype); bits.has_value()) {
    uint64_t bytes = 0;
    if (__builtin_mul_overflow(elements, *bits / 8, &bytes) || bytes != end - begin) {
      return InvalidTensor(name, absl::StrCat("data_offsets span ", end - begin, " bytes where ", elements,
                                              " elements of ", raw.dtype, " are due"));
    }
  }
  return tensor;
}

absl::Status WithPath(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

absl::Status CheckShardName(absl::string_view name) {
  const auto fail = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat("safetensors index: file name '", name, "' is empty or leaves the index's directory"));
  };
  if (name.empty() || absl::StrContains(name, '\\') || absl::StrContains(name, '\0')) return fail();
  for (const absl::string_view part : absl::StrSplit(name, '/')) {
    if (part.empty() || part == "." || part == "..") return fail();  // an absolute path starts with an empty part
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SafetensorsFile> SafetensorsFile::Parse(absl::Span<const std::byte> bytes,
                                                       std::shared_ptr<const void> owner) {
  uint64_t header_bytes = 0;
  if (bytes.size() < sizeof(header_bytes)) return absl::InvalidArgumentError("safetensors header: file is cut off");
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  if (header_bytes > kMaxHeaderBytes || header_bytes > bytes.size() - sizeof(header_bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("safetensors header: length ", header_bytes, " exceeds the file or ", kMaxHeaderBytes, " bytes"));
  }
  const absl::string_view json(reinterpret_cast<const char*>(bytes.data()) + sizeof(header_bytes), header_bytes);
  HeaderSax sax;
  if (!nlohmann::json::sax_parse(json, &sax) || !sax.error.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("safetensors header: ", sax.error));
  }
  const absl::Span<const std::byte> area = bytes.subspan(sizeof(header_bytes) + header_bytes);
  SafetensorsFile file;
  file.owner_ = std::move(owner);
  file.metadata_ = std::move(sax.metadata);
  for (const auto& [name, raw] : sax.tensors) {
    SPMMD_ASSIGN_OR_RETURN(SafetensorsTensor tensor, CheckTensor(name, raw, area));
    file.tensors_.emplace(name, std::move(tensor));
  }
  // Tensors tile the area: nothing hides in gaps, nothing is shared.
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  ranges.reserve(sax.tensors.size());
  for (const auto& [name, raw] : sax.tensors) ranges.emplace_back(raw.offsets[0], raw.offsets[1]);
  std::sort(ranges.begin(), ranges.end());
  uint64_t expected = 0;
  for (const auto& [begin, end] : ranges) {
    if (begin != expected) {
      return absl::InvalidArgumentError(
          absl::StrCat("safetensors data: tensors overlap or leave a gap at byte ", std::min(begin, expected)));
    }
    expected = end;
  }
  if (expected != area.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("safetensors data: ", area.size(), " bytes where the header accounts for ", expected));
  }
  return file;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  SPMMD_ASSIGN_OR_RETURN(const std::shared_ptr<const MappedFile> mapped, MappedFile::Open(path));
  absl::StatusOr<SafetensorsFile> file = Parse(mapped->bytes(), mapped);
  if (!file.ok()) return WithPath(path, file.status());
  return file;
}

absl::StatusOr<std::map<std::string, std::string, std::less<>>> ParseSafetensorsIndex(absl::string_view json) {
  if (json.size() > kMaxIndexBytes) {
    return absl::InvalidArgumentError(absl::StrCat("safetensors index: larger than ", kMaxIndexBytes, " bytes"));
  }
  const nlohmann::json root = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) return absl::InvalidArgumentError("safetensors index: no JSON object");
  const auto weight_map = root.find("weight_map");
  if (weight_map == root.end() || !weight_map->is_object()) {
    return absl::InvalidArgumentError("safetensors index: 'weight_map' is missing or no object");
  }
  std::map<std::string, std::string, std::less<>> result;
  for (const auto& [tensor, file] : weight_map->items()) {
    if (!file.is_string()) {
      return absl::InvalidArgumentError(absl::StrCat("safetensors index: the file of '", tensor, "' is no string"));
    }
    const auto& name = file.get_ref<const std::string&>();
    SPMMD_RETURN_IF_ERROR(CheckShardName(name));
    result.emplace(tensor, name);
  }
  return result;
}

absl::StatusOr<SafetensorsCheckpoint> SafetensorsCheckpoint::Open(const std::string& path, const std::string& root) {
  SafetensorsCheckpoint checkpoint;
  checkpoint.root_ = root;
  checkpoint.directory_ = std::filesystem::path(path).parent_path().string();
  if (!root.empty()) SPMMD_RETURN_IF_ERROR(CheckInsideDirectory(path, root));
  if (absl::EndsWith(path, ".json")) {
    SPMMD_ASSIGN_OR_RETURN(const std::shared_ptr<const MappedFile> mapped, MappedFile::Open(path));
    auto index = ParseSafetensorsIndex({reinterpret_cast<const char*>(mapped->bytes().data()), mapped->bytes().size()});
    if (!index.ok()) return WithPath(path, index.status());
    for (const auto& [tensor, file] : *index) {
      checkpoint.shard_of_.emplace(tensor, (std::filesystem::path(checkpoint.directory_) / file).string());
    }
    return checkpoint;
  }
  if (!absl::EndsWith(path, ".safetensors")) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": neither a .safetensors file nor an .index.json"));
  }
  SPMMD_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(path));
  return FromFile(std::move(file));
}

SafetensorsCheckpoint SafetensorsCheckpoint::FromFile(SafetensorsFile file) {
  SafetensorsCheckpoint checkpoint;
  const std::string path;  // nothing is opened any more: any key will do
  for (const auto& [name, tensor] : file.tensors()) checkpoint.shard_of_.emplace(name, path);
  checkpoint.open_.emplace(path, std::move(file));
  return checkpoint;
}

std::vector<std::string> SafetensorsCheckpoint::TensorNames() const {
  std::vector<std::string> names;
  names.reserve(shard_of_.size());
  for (const auto& [name, path] : shard_of_) names.push_back(name);
  return names;
}

std::vector<std::string> SafetensorsCheckpoint::ShardPaths() const {
  std::set<std::string> paths;
  for (const auto& [name, path] : shard_of_) {
    if (!path.empty()) paths.insert(path);
  }
  return {paths.begin(), paths.end()};
}

bool SafetensorsCheckpoint::Contains(absl::string_view name) const { return shard_of_.find(name) != shard_of_.end(); }

namespace {

// Names that contain `name` or the other way round, and those that begin and end like it; the most alike first.
std::vector<absl::string_view> NamesLike(absl::string_view name,
                                         const std::map<std::string, std::string, std::less<>>& names) {
  std::vector<std::pair<size_t, absl::string_view>> scored;
  for (const auto& [known, path] : names) {
    const size_t shorter = std::min(known.size(), name.size());
    const auto begin =
        static_cast<size_t>(std::mismatch(name.begin(), name.begin() + shorter, known.begin()).first - name.begin());
    const auto end = static_cast<size_t>(std::mismatch(name.rbegin(), name.rbegin() + shorter, known.rbegin()).first -
                                         name.rbegin());
    const bool contained = absl::StrContains(known, name) || absl::StrContains(name, known);
    const size_t alike = contained ? shorter : std::min(begin + end, shorter);
    if (2 * alike > shorter) scored.emplace_back(alike, known);
  }
  std::stable_sort(scored.begin(), scored.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  constexpr size_t kMaxShown = 5;
  std::vector<absl::string_view> best;
  for (const auto& [alike, known] : scored) {
    if (best.size() == kMaxShown) break;
    best.push_back(known);
  }
  return best;
}

}  // namespace

absl::StatusOr<SafetensorsTensor> SafetensorsCheckpoint::Find(absl::string_view name) {
  const auto shard = shard_of_.find(name);
  if (shard == shard_of_.end()) {
    const std::vector<absl::string_view> close = NamesLike(name, shard_of_);
    return absl::NotFoundError(absl::StrCat(
        "no tensor '", name, "'", close.empty() ? "" : absl::StrCat("; near it: ", absl::StrJoin(close, ", "))));
  }
  const std::string& path = shard->second;
  auto file = open_.find(path);
  if (file == open_.end()) {
    if (!root_.empty()) SPMMD_RETURN_IF_ERROR(CheckInsideDirectory(path, root_));
    SPMMD_ASSIGN_OR_RETURN(SafetensorsFile opened, SafetensorsFile::Open(path));
    file = open_.emplace(path, std::move(opened)).first;
  }
  const auto tensor = file->second.tensors().find(name);
  if (tensor == file->second.tensors().end()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": holds no tensor '", name, "', which its index places there"));
  }
  return tensor->second;
}

absl::StatusOr<DenseMatrix> SafetensorsCheckpoint::ReadMatrix(absl::string_view name) {
  SPMMD_ASSIGN_OR_RETURN(const SafetensorsTensor tensor, Find(name));
  return SafetensorsToMatrix(name, tensor);
}

absl::StatusOr<DenseMatrix> SafetensorsToMatrix(absl::string_view name, const SafetensorsTensor& tensor) {
  DType dtype = DType::kF32;
  if (tensor.dtype == "F16") {
    dtype = DType::kF16;
  } else if (tensor.dtype == "BF16") {
    dtype = DType::kBf16;
  } else if (tensor.dtype != "F32") {
    return InvalidTensor(name, absl::StrCat("dtype ", tensor.dtype, " is not supported: F16, BF16 and F32 are"));
  }
  if (tensor.shape.empty() || tensor.shape.size() > 2) {
    return InvalidTensor(name, absl::StrCat(tensor.shape.size(), " dimensions where a matrix or a vector is needed"));
  }
  absl::StatusOr<DenseMatrix> matrix =
      ImportDense(dtype, tensor.shape.size() == 1 ? 1 : tensor.shape[0], tensor.shape.back(), tensor.data);
  if (!matrix.ok()) return InvalidTensor(name, matrix.status().message());
  return matrix;
}

}  // namespace spmmd
