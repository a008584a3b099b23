#include "server/catalog/spec.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kernels/format/dense.h"
#include "server/catalog/types.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

bool IsNameCharacter(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '/' || c == '-';
}

absl::Status CheckName(const std::string& name) {
  if (name.empty()) return FieldError("spec.name", "must not be empty");
  if (name.size() > kMaxLayerName) {
    return FieldError("spec.name", absl::StrCat(name.size(), " characters, the limit is ", kMaxLayerName));
  }
  for (size_t i = 0; i < name.size(); ++i) {
    if (!IsNameCharacter(name[i])) {
      return FieldError("spec.name", absl::StrCat("character ", i, " is not one of [A-Za-z0-9._/-]"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckDim(const char* field, int64_t value) {
  if (value >= 1 && value <= kMaxDim) return absl::OkStatus();
  return FieldError(field, absl::StrCat(value, " is not within 1 to ", kMaxDim));
}

absl::Status CheckNnz(const pb::LayerSpec& spec) {
  if (spec.encoding() == pb::SOURCE_ENCODING_DENSE) return absl::OkStatus();
  if (spec.nnz() >= 0 && spec.nnz() <= spec.m() * spec.k()) return absl::OkStatus();
  return FieldError("spec.nnz", absl::StrCat(spec.nnz(), " is not within 0 to M * K = ", spec.m() * spec.k()));
}

absl::Status CheckPruning(const pb::LayerSpec& spec) {
  if (spec.has_magnitude()) {
    const double sparsity = spec.magnitude().sparsity();
    // Written so that NaN fails.
    if (!(sparsity >= 0 && sparsity < 1)) {
      return FieldError("spec.magnitude.sparsity", absl::StrCat(sparsity, " is not within [0, 1)"));
    }
  }
  if (spec.has_nm()) {
    if (spec.nm().m() < 2 || spec.nm().m() > 64) {
      return FieldError("spec.nm.m", absl::StrCat(spec.nm().m(), " is not within 2 to 64"));
    }
    if (spec.nm().n() < 1 || spec.nm().n() >= spec.nm().m()) {
      return FieldError("spec.nm.n", absl::StrCat(spec.nm().n(), " is not within 1 to m - 1 = ", spec.nm().m() - 1));
    }
  }
  return absl::OkStatus();
}

absl::Status UnknownEnum(const char* field, int value) {
  return FieldError(field, absl::StrCat("unknown value ", value));
}

// Most nonzeros that the layer can have.
int64_t MaxNnz(const pb::LayerSpec& spec) {
  const int64_t elements = spec.m() * spec.k();
  int64_t nnz = spec.encoding() == pb::SOURCE_ENCODING_DENSE ? elements : spec.nnz();
  if (spec.has_magnitude()) {
    // PruneMagnitude leaves round(sparsity * elements) zeros; one element of slack covers the rounding.
    const auto zeros = static_cast<int64_t>(std::floor(spec.magnitude().sparsity() * static_cast<double>(elements)));
    nnz = std::min(nnz, elements - zeros + 1);
  } else if (spec.has_nm()) {
    const int64_t m = spec.nm().m();
    const int64_t tail = spec.k() % m;
    nnz = std::min(nnz, spec.m() * (spec.k() / m * spec.nm().n() + std::min<int64_t>(tail, spec.nm().n())));
  }
  return std::min(nnz, elements);
}

}  // namespace

absl::Status CheckSpec(const pb::LayerSpec& spec, bool complete) {
  if (absl::Status status = CheckName(spec.name()); !status.ok()) return status;
  const bool missing_allowed = spec.has_file() && !complete;
  if (!(missing_allowed && spec.m() == 0)) {
    if (absl::Status status = CheckDim("spec.m", spec.m()); !status.ok()) return status;
  }
  if (!(missing_allowed && spec.k() == 0)) {
    if (absl::Status status = CheckDim("spec.k", spec.k()); !status.ok()) return status;
  }
  if (spec.m() * spec.k() > kMaxElements) {
    return FieldError("spec.k", absl::StrCat("M * K = ", spec.m(), " * ", spec.k(), " exceeds ", kMaxElements));
  }
  if (!(missing_allowed && spec.dtype() == pb::DATA_TYPE_UNSPECIFIED)) {
    if (spec.dtype() == pb::DATA_TYPE_UNSPECIFIED) return FieldError("spec.dtype", "must be set");
    if (!FromProto(spec.dtype()).has_value()) return UnknownEnum("spec.dtype", spec.dtype());
  }
  if (spec.store_dtype() != pb::DATA_TYPE_UNSPECIFIED && !FromProto(spec.store_dtype()).has_value()) {
    return UnknownEnum("spec.store_dtype", spec.store_dtype());
  }
  if (!pb::SourceEncoding_IsValid(spec.encoding())) return UnknownEnum("spec.encoding", spec.encoding());
  if (spec.has_file()) {
    if (spec.encoding() != pb::SOURCE_ENCODING_UNSPECIFIED && spec.encoding() != pb::SOURCE_ENCODING_DENSE) {
      return FieldError("spec.encoding", "a file source is DENSE");
    }
    if (spec.file().path().empty()) return FieldError("spec.file.path", "must not be empty");
  } else if (spec.encoding() == pb::SOURCE_ENCODING_UNSPECIFIED) {
    return FieldError("spec.encoding", "must be set, unless spec.file names the weights");
  }
  if (complete || !spec.has_file()) {
    if (absl::Status status = CheckNnz(spec); !status.ok()) return status;
  }
  if (absl::Status status = CheckPruning(spec); !status.ok()) return status;
  if (spec.format() != pb::FORMAT_UNSPECIFIED && !FromProto(spec.format()).has_value()) {
    return UnknownEnum("spec.format", spec.format());
  }
  if (!pb::Placement_IsValid(spec.placement())) return UnknownEnum("spec.placement", spec.placement());
  if (spec.has_activation_threshold() &&
      !(spec.activation_threshold() >= 0 && std::isfinite(spec.activation_threshold()))) {
    return FieldError("spec.activation_threshold",
                      absl::StrCat(spec.activation_threshold(), " is not a finite number of 0 or more"));
  }
  if (!spec.content_xxh3().empty() && !IsContentHash(spec.content_xxh3())) {
    return FieldError("spec.content_xxh3", "must be 32 lower-case hex digits");
  }
  return absl::OkStatus();
}

absl::Status CheckFormat(const pb::LayerSpec& spec, const Device& device) {
  const std::optional<DType> stored = FromProto(spec.store_dtype());
  if (stored.has_value() && !device.CanStore(*stored)) {
    return FieldError("spec.store_dtype", absl::StrCat("backend ", device.backend(), " has no kernel for ",
                                                       std::string(Name(*stored)), " weights; set F16 or BF16"));
  }
  if (spec.format() == pb::FORMAT_UNSPECIFIED) return absl::OkStatus();
  const Format format = device.Layout(FromProto(spec.format()).value_or(Format::kDense));
  const bool holds_fp32 = format == Format::kDense || format == Format::kBitmap;
  if (spec.store_dtype() == pb::DATA_TYPE_F32 && !holds_fp32) {
    return FieldError("spec.format",
                      absl::StrCat(std::string(Name(format)), " does not hold fp32; set store_dtype to F16 or BF16"));
  }
  if (device.CanExecute(format)) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kUnimplemented, reason::kUnsupported,
      absl::StrCat("spec.format: backend ", device.backend(), " has no kernel for ", std::string(Name(format))));
}

void NormalizeSpec(pb::LayerSpec* spec) {
  if (spec->has_file()) spec->set_encoding(pb::SOURCE_ENCODING_DENSE);
  if (spec->store_dtype() == pb::DATA_TYPE_UNSPECIFIED) spec->set_store_dtype(spec->dtype());
  if (spec->placement() == pb::PLACEMENT_UNSPECIFIED) spec->set_placement(pb::PLACEMENT_SINGLE);
  if (spec->encoding() == pb::SOURCE_ENCODING_DENSE) spec->clear_nnz();
}

std::vector<PartSize> PartsOf(const pb::LayerSpec& spec) {
  const auto m = static_cast<uint64_t>(spec.m());
  const auto elements = m * static_cast<uint64_t>(spec.k());
  const auto nnz = static_cast<uint64_t>(spec.nnz());
  const uint64_t element_bytes = SizeOf(FromProto(spec.dtype()).value_or(DType::kF32));
  std::vector<PartSize> parts;
  switch (spec.encoding()) {
    case pb::SOURCE_ENCODING_CSR:
      parts = {{pb::CONTENT_PART_ROW_OFFSETS, (m + 1) * sizeof(uint64_t)},
               {pb::CONTENT_PART_COLUMN_INDICES, nnz * sizeof(uint32_t)},
               {pb::CONTENT_PART_VALUES, nnz * element_bytes}};
      break;
    case pb::SOURCE_ENCODING_COO:
      parts = {{pb::CONTENT_PART_ROW_INDICES, nnz * sizeof(uint32_t)},
               {pb::CONTENT_PART_COLUMN_INDICES, nnz * sizeof(uint32_t)},
               {pb::CONTENT_PART_VALUES, nnz * element_bytes}};
      break;
    case pb::SOURCE_ENCODING_BITMAP_UPLOAD:
      parts = {{pb::CONTENT_PART_BITMAP, (elements + 7) / 8}, {pb::CONTENT_PART_VALUES, nnz * element_bytes}};
      break;
    default:
      parts = {{pb::CONTENT_PART_VALUES, elements * element_bytes}};
      break;
  }
  if (spec.has_bias()) parts.push_back({pb::CONTENT_PART_BIAS, m * sizeof(float)});
  return parts;
}

uint64_t EstimateDeviceBytes(const pb::LayerSpec& spec, const Device& device, int64_t shards) {
  const DType dtype = FromProto(spec.store_dtype()).value_or(DType::kF32);
  const int64_t max_nnz = MaxNnz(spec);
  // AUTO picks the denser format only when it is no larger than what the bound on the nonzeros gives.
  const std::optional<Format> asked = FromProto(spec.format());
  const Format format =
      asked.has_value()
          ? device.Layout(*asked)
          : device.ChooseFormat({dtype, spec.m(), spec.k(), max_nnz, spec.has_activation_threshold()}).format;
  // The largest shard is at most a group of 64 rows above the mean.
  const int64_t rows = shards == 1 ? spec.m() : std::min(spec.m(), (spec.m() / shards / 64 + 1) * 64);
  const int64_t nnz = shards == 1 ? max_nnz : std::min(rows * spec.k(), max_nnz / shards + 64 * spec.k());
  const uint64_t bias = spec.has_bias() ? static_cast<uint64_t>(rows) * sizeof(float) : 0;
  return device.EstimateBytes(format, dtype, rows, spec.k(), nnz) + bias;
}

uint64_t EstimateHostBytes(const pb::LayerSpec& spec) {
  uint64_t bytes = 0;
  for (const PartSize& part : PartsOf(spec)) bytes += part.bytes;
  const auto elements = static_cast<uint64_t>(spec.m()) * static_cast<uint64_t>(spec.k());
  if (spec.encoding() != pb::SOURCE_ENCODING_DENSE) {
    bytes += elements * SizeOf(FromProto(spec.dtype()).value_or(DType::kF32));
  }
  if (spec.store_dtype() != spec.dtype()) {
    bytes += elements * SizeOf(FromProto(spec.store_dtype()).value_or(DType::kF32));
  }
  return bytes;
}

std::string ContentKey(const pb::LayerSpec& spec, absl::string_view xxh3) {
  pb::LayerSpec shared = spec;
  shared.clear_name();
  shared.clear_file();
  // AUTO may take another format for layers whose activations are sparse.
  if (spec.has_activation_threshold() && spec.format() == pb::FORMAT_UNSPECIFIED) {
    shared.set_activation_threshold(0);
  } else {
    shared.clear_activation_threshold();
  }
  shared.clear_pin();
  shared.clear_deterministic();
  shared.clear_content_xxh3();
  // No map fields, so that equal messages have equal bytes.
  return absl::StrCat(xxh3, shared.SerializeAsString());
}

bool IsContentHash(absl::string_view text) {
  return text.size() == 32 &&
         std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

}  // namespace spmmd::server
