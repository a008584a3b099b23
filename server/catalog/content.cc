#include "server/catalog/content.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/import.h"
#include "server/catalog/types.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

std::string PartName(pb::ContentPart part) { return pb::ContentPart_Name(part).substr(sizeof("CONTENT_PART_") - 1); }

}  // namespace

Content::Content(const pb::LayerSpec& spec) : spec_(spec), hash_(XXH3_createState()) {
  XXH3_128bits_reset(hash_);
  for (const PartSize& size : PartsOf(spec)) {
    Part part;
    part.id = size.part;
    part.bytes = size.bytes;
    parts_.push_back(std::move(part));
    bytes_ += size.bytes;
  }
}

Content::~Content() { XXH3_freeState(hash_); }

absl::Status Content::Allocate(Part* part) {
  if (part->id == pb::CONTENT_PART_VALUES && spec_.encoding() == pb::SOURCE_ENCODING_DENSE) {
    SPMMD_ASSIGN_OR_RETURN(dense_, DenseMatrix::Create(*FromProto(spec_.dtype()), spec_.m(), spec_.k()));
    part->data = dense_.mutable_view().data;
    return absl::OkStatus();
  }
  SPMMD_ASSIGN_OR_RETURN(part->buffer, Buffer::Allocate(part->bytes));
  part->data = part->buffer.mutable_data();
  return absl::OkStatus();
}

std::vector<PartSize> Content::ReceivedParts() const {
  std::vector<PartSize> received;
  for (const Part& part : parts_) {
    if (part.received > 0) received.push_back({part.id, part.received});
  }
  return received;
}

absl::Status Content::Append(const pb::ContentChunk& chunk, uint64_t max_chunk_bytes, bool resumed) {
  const auto part = std::find_if(parts_.begin(), parts_.end(), [&](const Part& p) { return p.id == chunk.part(); });
  if (part == parts_.end()) {
    return FieldError("chunk.part", pb::ContentPart_IsValid(chunk.part())
                                        ? absl::StrCat(PartName(chunk.part()), " is not a part of this upload")
                                        : absl::StrCat("unknown value ", static_cast<int>(chunk.part())));
  }
  if (chunk.data().size() > max_chunk_bytes) {
    return FieldError("chunk.data", absl::StrCat(chunk.data().size(), " bytes, the limit is ", max_chunk_bytes));
  }
  absl::string_view data = chunk.data();
  uint64_t offset = chunk.offset();
  if (resumed && offset < part->received) {
    const uint64_t known = std::min<uint64_t>(part->received - offset, data.size());
    data.remove_prefix(known);
    offset += known;
    if (data.empty()) return absl::OkStatus();
  }
  if (offset != part->received) {
    return FieldError("chunk.offset", absl::StrCat(chunk.offset(), ", but ", part->received, " bytes of ",
                                                   PartName(part->id), " have been received"));
  }
  const uint64_t left = part->bytes - part->received;
  if (data.size() > left) {
    return FieldError("chunk.data",
                      absl::StrCat(chunk.data().size(), " bytes at offset ", chunk.offset(), " go past the end of ",
                                   PartName(part->id), ": expected ", part->bytes, " bytes in all"));
  }
  if (data.empty()) return absl::OkStatus();
  if (part->data == nullptr) SPMMD_RETURN_IF_ERROR(Allocate(&*part));
  std::memcpy(part->data + part->received, data.data(), data.size());
  part->received += data.size();
  received_ += data.size();
  AdvanceHash();
  return absl::OkStatus();
}

absl::Status Content::SetDense(DenseMatrix weights, const std::vector<float>& bias) {
  const uint64_t expected_bias = spec_.has_bias() ? static_cast<uint64_t>(spec_.m()) : 0;
  if (ToProto(weights.dtype()) != spec_.dtype() || weights.rows() != spec_.m() || weights.cols() != spec_.k() ||
      bias.size() != expected_bias) {
    return FieldError("spec.file", "the file changed while it was read");
  }
  for (Part& part : parts_) {
    const uint64_t bytes = part.bytes;
    if (part.id == pb::CONTENT_PART_BIAS) {
      SPMMD_RETURN_IF_ERROR(Allocate(&part));
      std::memcpy(part.data, bias.data(), bytes);
    } else {
      dense_ = std::move(weights);  // NOLINT(bugprone-use-after-move,clang-analyzer-cplusplus.Move): one part has them
      part.data = dense_.mutable_view().data;
    }
    part.received = bytes;
    received_ += bytes;
  }
  AdvanceHash();
  return absl::OkStatus();
}

void Content::AdvanceHash() {
  for (; hash_part_ < parts_.size(); ++hash_part_, hash_offset_ = 0) {
    const Part& part = parts_[hash_part_];
    if (part.received > hash_offset_) {
      XXH3_128bits_update(hash_, part.data + hash_offset_, part.received - hash_offset_);
      hash_offset_ = part.received;
    }
    if (part.received < part.bytes) return;
  }
}

absl::Status Content::CheckComplete() const {
  for (const Part& part : parts_) {
    if (part.received == part.bytes) continue;
    return FieldError(
        "chunk.data",
        absl::StrCat("the upload ended with ", part.received, " of ", part.bytes, " bytes of ", PartName(part.id)),
        reason::kTruncatedUpload,
        {{"part", PartName(part.id)},
         {"received", absl::StrCat(part.received)},
         {"expected", absl::StrCat(part.bytes)}});
  }
  return absl::OkStatus();
}

std::string Content::Hash() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(hash_);
  return absl::StrFormat("%016x%016x", hash.high64, hash.low64);
}

absl::Span<const std::byte> Content::BytesOf(pb::ContentPart id) const {
  for (const Part& part : parts_) {
    if (part.id == id) return {part.data, part.bytes};
  }
  return {};
}

absl::StatusOr<DenseMatrix> Content::TakeWeights() {
  const DType dtype = *FromProto(spec_.dtype());
  absl::StatusOr<DenseMatrix> weights;
  switch (spec_.encoding()) {
    case pb::SOURCE_ENCODING_CSR:
      weights = ImportCsr(dtype, spec_.m(), spec_.k(), BytesOf(pb::CONTENT_PART_ROW_OFFSETS),
                          BytesOf(pb::CONTENT_PART_COLUMN_INDICES), BytesOf(pb::CONTENT_PART_VALUES));
      break;
    case pb::SOURCE_ENCODING_COO:
      weights = ImportCoo(dtype, spec_.m(), spec_.k(), BytesOf(pb::CONTENT_PART_ROW_INDICES),
                          BytesOf(pb::CONTENT_PART_COLUMN_INDICES), BytesOf(pb::CONTENT_PART_VALUES));
      break;
    case pb::SOURCE_ENCODING_BITMAP_UPLOAD:
      weights =
          ImportBitmap(dtype, spec_.m(), spec_.k(), BytesOf(pb::CONTENT_PART_BITMAP), BytesOf(pb::CONTENT_PART_VALUES));
      break;
    default:
      weights = std::move(dense_);
      break;
  }
  for (Part& part : parts_) {
    if (part.id == pb::CONTENT_PART_BIAS) continue;
    part.buffer = Buffer();
    part.data = nullptr;
  }
  if (!weights.ok()) return AtField("content", weights.status());
  return weights;
}

absl::StatusOr<std::vector<float>> Content::TakeBias() {
  const absl::Span<const std::byte> bytes = BytesOf(pb::CONTENT_PART_BIAS);
  std::vector<float> bias(bytes.size() / sizeof(float));
  if (bias.empty()) return bias;
  std::memcpy(bias.data(), bytes.data(), bytes.size());
  if (spec_.allow_nonfinite()) return bias;
  for (size_t i = 0; i < bias.size(); ++i) {
    if (!std::isfinite(bias[i])) {
      return FieldError("content", absl::StrCat("BIAS[", i, "] is not finite; set spec.allow_nonfinite to keep it"));
    }
  }
  return bias;
}

}  // namespace spmmd::server
