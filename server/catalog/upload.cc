#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/import.h"
#include "kernels/format/prune.h"
#include "server/catalog/catalog.h"
#include "server/catalog/spec.h"
#include "server/catalog/types.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

absl::Status SourceLost() {
  return MakeError(absl::StatusCode::kAborted, reason::kContentSourceLost,
                   "the registration that was bringing the same content ended without it: try again");
}

pb::LayerSection DescribeSection(const PackedLayer& packed, const Section& section) {
  pb::LayerSection out;
  out.set_name(std::string(SectionName(packed.format, section.id)));
  out.set_bytes(section.data.size());
  out.set_padding_bytes(section.padding);
  return out;
}

}  // namespace

Upload::Upload(LayerCatalog* catalog, pb::LayerSpec spec)
    : catalog_(catalog), spec_(std::move(spec)), created_(absl::Now()) {}

Upload::~Upload() {
  KeepForResumption();
  EndLead(SourceLost());
  SetState(pb::LAYER_STATE_UNSPECIFIED);
}

void Upload::KeepForResumption() {
  if (content_ == nullptr || file_ != nullptr || spec_.content_xxh3().empty() || content_->received() == 0) return;
  catalog_->resumable_.Keep(key_, {std::move(content_), std::move(host_memory_)});
}

void Upload::SetState(pb::LayerState state) {
  catalog_->metrics_->LayerStateChanged(state_.exchange(state, std::memory_order_relaxed), state);
}

void Upload::EndLead(absl::StatusOr<std::shared_ptr<const LayerContent>> result) {
  if (!leads_) return;
  leads_ = false;
  // Those who joined brought no bytes of their own and must not answer for this caller's: only what follows from the
  // content that they named, or from the memory that it needs, is their error too.
  if (!result.ok() && !absl::IsResourceExhausted(result.status()) &&
      (!verified_ || absl::IsCancelled(result.status()))) {
    result = SourceLost();
  }
  catalog_->EndConversion(key_, conversion_.get(), std::move(result));
}

absl::Status Upload::Start() {
  SPMMD_RETURN_IF_ERROR(CheckSpec(spec_, /*complete=*/false));
  SPMMD_RETURN_IF_ERROR(catalog_->CheckLayerCount());
  if (spec_.has_file()) {
    SPMMD_ASSIGN_OR_RETURN(file_, FileSource::Open(catalog_->options_.model_repository, &spec_));
  }
  NormalizeSpec(&spec_);
  SPMMD_RETURN_IF_ERROR(CheckSpec(spec_, /*complete=*/true));
  SPMMD_ASSIGN_OR_RETURN(devices_, catalog_->DevicesFor(spec_.placement()));
  SPMMD_RETURN_IF_ERROR(CheckFormat(spec_, *devices_.front()));
  const int64_t shards = PartCount();
  if (spec_.m() < shards) {
    return FieldError("spec.placement", absl::StrCat(spec_.m(), " rows cannot be split over ", shards, " devices"));
  }

  uint64_t content_bytes = 0;
  for (const PartSize& part : PartsOf(spec_)) content_bytes += part.bytes;
  const uint64_t device_bytes = EstimateDeviceBytes(spec_, *devices_.front(), shards);
  accepted_.set_content_bytes(content_bytes);
  accepted_.set_estimated_device_bytes(device_bytes);

  xxh3_ = spec_.content_xxh3();
  PackedCache* const cache = catalog_->cache_.get();
  // What the file had when it was last read.
  if (xxh3_.empty() && file_ != nullptr && cache != nullptr) {
    xxh3_ = cache->FindSource(file_->Identity()).value_or("");
    if (!xxh3_.empty()) key_ = ContentKey(spec_, xxh3_);
    if (!IsContentHash(xxh3_) || !IsCached()) xxh3_.clear();
  }
  if (!xxh3_.empty()) {
    key_ = ContentKey(spec_, xxh3_);
    LayerCatalog::Lookup lookup = catalog_->JoinOrLead(key_);
    ready_ = std::move(lookup.content);
    conversion_ = std::move(lookup.conversion);
    leads_ = lookup.lead;
    if (!leads_) {
      SetState(pb::LAYER_STATE_PACKING);
      return absl::OkStatus();
    }
  }
  // Then nothing is to be sent, read or packed.
  const bool cached = !xxh3_.empty() && IsCached();
  const auto reserve = [&]() -> absl::Status {
    for (Device* device : devices_) {
      SPMMD_ASSIGN_OR_RETURN(device_memory_.emplace_back(),
                             catalog_->residency_.Reserve(device, device_bytes, [this] { return CheckCancelled(); }));
    }
    if (cached) return absl::OkStatus();
    if (file_ == nullptr && !xxh3_.empty()) {
      if (std::optional<ResumableUploads::Kept> kept = catalog_->resumable_.Take(key_); kept.has_value()) {
        content_ = std::move(kept->content);
        host_memory_ = std::move(kept->memory);
        resumed_ = true;
        return absl::OkStatus();
      }
    }
    SPMMD_ASSIGN_OR_RETURN(host_memory_,
                           catalog_->host_budget_.Reserve(MemoryKind::kStaging, EstimateHostBytes(spec_)));
    return absl::OkStatus();
  };
  if (absl::Status status = reserve(); !status.ok()) {
    device_memory_.clear();
    // Whoever joined in the meantime does not fit either.
    EndLead(status);
    return status;
  }
  if (!cached) {
    if (content_ == nullptr) content_ = std::make_unique<Content>(spec_);
    accepted_.set_content_needed(file_ == nullptr);
    for (const PartSize& part : content_->ReceivedParts()) {
      pb::PartReceived& received = *accepted_.add_received();
      received.set_part(part.part);
      received.set_bytes(part.bytes);
    }
    received_.store(content_->received(), std::memory_order_relaxed);
  }
  SetState(cached ? pb::LAYER_STATE_PACKING : pb::LAYER_STATE_UPLOADING);
  return absl::OkStatus();
}

absl::Status Upload::Append(const pb::ContentChunk& chunk) {
  if (!accepted_.content_needed() || content_ == nullptr) {
    return FieldError("chunk", "no content is needed: RegisterAccepted.content_needed was false");
  }
  SPMMD_RETURN_IF_ERROR(content_->Append(chunk, catalog_->options_.max_chunk_bytes, resumed_));
  received_.store(content_->received(), std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::StatusOr<pb::Layer> Upload::Finish() {
  absl::StatusOr<std::shared_ptr<const LayerContent>> content = GuardHostMemory([this] { return Resolve(); });
  // A connection that breaks can look like the end of the caller's stream.
  if (!content.ok() && content_ != nullptr && !content_->CheckComplete().ok()) KeepForResumption();
  EndLead(content);
  // Content that was here may have been evicted; what is held here stays until the layer is published, and pinned.
  std::shared_ptr<const ResidentCopies> copies;
  if (content.ok()) {
    // What this upload set aside is for this.
    device_memory_.clear();
    auto loaded =
        GuardHostMemory([&] { return catalog_->residency_.Load(**content, [this] { return CheckCancelled(); }); });
    if (loaded.ok()) {
      copies = *std::move(loaded);
    } else {
      content = loaded.status();
    }
  }
  // Everything that only the registration needed goes before the answer.
  content_.reset();
  file_.reset();
  host_memory_.Release();
  device_memory_.clear();
  ready_.reset();
  conversion_.reset();
  SetState(pb::LAYER_STATE_UNSPECIFIED);
  SPMMD_RETURN_IF_ERROR(content.status());
  pb::Layer layer;
  catalog_->Publish(spec_, *std::move(content), created_)->Describe(/*full=*/true, &layer);
  return layer;
}

void Upload::Cancel() { cancelled_.store(true, std::memory_order_relaxed); }

absl::Status Upload::CheckCancelled() const {
  if (!cancelled_.load(std::memory_order_relaxed)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kCancelled, reason::kCancelled, "the registration was cancelled");
}

absl::Status Upload::ReadFile() {
  SPMMD_ASSIGN_OR_RETURN(DenseMatrix weights, file_->ReadWeights());
  SPMMD_ASSIGN_OR_RETURN(const std::vector<float> bias, file_->ReadBias());
  return content_->SetDense(std::move(weights), bias);
}

absl::StatusOr<std::shared_ptr<const LayerContent>> Upload::FromCache() {
  const absl::Time start = absl::Now();
  SPMMD_RETURN_IF_ERROR(CheckCancelled());
  std::string format_reason;
  std::vector<StoredLayer> parts = CachedParts(&format_reason);
  if (parts.empty()) return nullptr;
  return MakeContent(xxh3_, std::move(parts), std::move(format_reason), "cache", absl::Now() - start);
}

absl::StatusOr<std::shared_ptr<const LayerContent>> Upload::Resolve() {
  if (ready_ != nullptr) return ready_;
  if (content_ == nullptr && leads_) {
    SPMMD_ASSIGN_OR_RETURN(std::shared_ptr<const LayerContent> content, FromCache());
    if (content != nullptr) return content;
    // Its files are damaged, or just went to make room: the content is needed after all.
    if (file_ == nullptr) return SourceLost();
    EndLead(SourceLost());
    SPMMD_ASSIGN_OR_RETURN(host_memory_,
                           catalog_->host_budget_.Reserve(MemoryKind::kStaging, EstimateHostBytes(spec_)));
    content_ = std::make_unique<Content>(spec_);
  }
  if (content_ == nullptr) {
    if (conversion_ == nullptr) return absl::FailedPreconditionError("the registration has ended");
    return catalog_->Await(*conversion_, cancelled_);
  }
  if (file_ != nullptr) SPMMD_RETURN_IF_ERROR(ReadFile());
  SPMMD_RETURN_IF_ERROR(content_->CheckComplete());
  const std::string xxh3 = content_->Hash();
  if (!spec_.content_xxh3().empty() && spec_.content_xxh3() != xxh3) {
    // Bytes of somebody who named a hash that they do not have: not this caller's error.
    if (resumed_) return SourceLost();
    return MakeError(
        absl::StatusCode::kDataLoss, reason::kContentHashMismatch,
        absl::StrCat("spec.content_xxh3: the content's hash is ", xxh3, ", expected ", spec_.content_xxh3()),
        {{"expected", spec_.content_xxh3()}, {"actual", xxh3}});
  }
  if (file_ != nullptr && catalog_->cache_ != nullptr) catalog_->cache_->StoreSource(file_->Identity(), xxh3);
  verified_ = true;
  SetState(pb::LAYER_STATE_PACKING);
  while (!leads_) {
    // The hash was not known before. Somebody else may have, or be bringing, the same content.
    key_ = ContentKey(spec_, xxh3);
    LayerCatalog::Lookup lookup = catalog_->JoinOrLead(key_);
    if (lookup.content != nullptr) return lookup.content;
    conversion_ = std::move(lookup.conversion);
    leads_ = lookup.lead;
    if (leads_) break;
    absl::StatusOr<std::shared_ptr<const LayerContent>> content = catalog_->Await(*conversion_, cancelled_);
    // If he does not make it, this upload still has the bytes.
    if (content.ok() || absl::IsCancelled(CheckCancelled())) return content;
  }
  return Convert(xxh3);
}

absl::StatusOr<std::shared_ptr<const LayerContent>> Upload::Convert(const std::string& xxh3) {
  const absl::Time start = absl::Now();
  SPMMD_RETURN_IF_ERROR(CheckCancelled());
  SPMMD_ASSIGN_OR_RETURN(const std::vector<float> bias, content_->TakeBias());
  std::string format_reason;
  std::vector<StoredLayer> parts = CachedParts(&format_reason);
  const bool cached = !parts.empty();
  if (!cached) {
    SPMMD_ASSIGN_OR_RETURN(parts, PackParts(bias, &format_reason));
  }
  content_.reset();
  const absl::Duration took = absl::Now() - start;
  SPMMD_ASSIGN_OR_RETURN(std::shared_ptr<const LayerContent> content,
                         MakeContent(xxh3, std::move(parts), std::move(format_reason),
                                     cached             ? "cache"
                                     : spec_.has_file() ? "file"
                                                        : "upload",
                                     took));
  if (!cached) catalog_->metrics_->LayerPacked(std::string(Name(content->format)), took);
  return content;
}

absl::StatusOr<std::shared_ptr<const LayerContent>> Upload::MakeContent(const std::string& xxh3,
                                                                        std::vector<StoredLayer> parts,
                                                                        std::string format_reason, const char* source,
                                                                        absl::Duration took) {
  auto content = std::make_shared<LayerContent>();
  content->key = key_;
  content->format_reason = std::move(format_reason);
  content->k = parts.front().packed.k;
  content->dtype = parts.front().packed.dtype;
  content->format = parts.front().packed.format;
  uint64_t bias_bytes = 0;
  for (const StoredLayer& stored : parts) {
    const PackedLayer& part = stored.packed;
    bias_bytes += stored.bias.size() * sizeof(float);
    content->m += part.m;
    content->nnz += part.nnz;
    for (const Section& packed_section : part.sections) {
      const pb::LayerSection section = DescribeSection(part, packed_section);
      const auto sum = std::find_if(content->sections.begin(), content->sections.end(),
                                    [&](const pb::LayerSection& s) { return s.name() == section.name(); });
      if (sum == content->sections.end()) {
        content->sections.push_back(section);
      } else {
        sum->set_bytes(sum->bytes() + section.bytes());
        sum->set_padding_bytes(sum->padding_bytes() + section.padding_bytes());
      }
    }
  }
  content->has_bias = bias_bytes > 0;
  if (bias_bytes > 0) {
    pb::LayerSection section;
    section.set_name("bias");
    section.set_bytes(bias_bytes);
    content->sections.push_back(std::move(section));
  }
  for (const pb::LayerSection& section : content->sections) content->bytes += section.bytes();
  content->xxh3 = xxh3;
  content->pack_seconds = absl::ToDoubleSeconds(took);
  SPMMD_ASSIGN_OR_RETURN(ResidentCopies copies, LoadParts(std::move(parts), content.get()));
  content->residency = &catalog_->residency_;
  content->residency->Add(content.get(), std::move(copies));
  catalog_->metrics_->LayerLoaded(source);
  return std::shared_ptr<const LayerContent>(std::move(content));
}

int64_t Upload::PartCount() const {
  return spec_.placement() == pb::PLACEMENT_SHARDED ? static_cast<int64_t>(devices_.size()) : 1;
}

PackedCache::Key Upload::CacheKey(int64_t part) const { return {key_, devices_.front()->backend(), part, PartCount()}; }

bool Upload::IsCached() const {
  if (catalog_->cache_ == nullptr) return false;
  for (int64_t part = 0; part < PartCount(); ++part) {
    if (!catalog_->cache_->Contains(CacheKey(part))) return false;
  }
  return true;
}

std::vector<StoredLayer> Upload::CachedParts(std::string* format_reason) const {
  std::vector<StoredLayer> parts;
  PackedCache* const cache = catalog_->cache_.get();
  if (cache == nullptr) return parts;
  for (int64_t part = 0; part < PartCount(); ++part) {
    std::optional<PackedCache::Entry> entry = cache->Find(CacheKey(part));
    if (!entry.has_value() || !devices_.front()->CanExecute(entry->part.packed.format)) return {};
    // A file of an earlier release has no bias.
    if (entry->part.bias.empty() == spec_.has_bias()) return {};
    *format_reason = std::move(entry->format_reason);
    parts.push_back(std::move(entry->part));
  }
  return parts;
}

absl::StatusOr<std::vector<StoredLayer>> Upload::PackParts(const std::vector<float>& bias, std::string* format_reason) {
  SPMMD_ASSIGN_OR_RETURN(DenseMatrix weights, content_->TakeWeights());
  content_.reset();
  SPMMD_RETURN_IF_ERROR(CheckCancelled());
  if (spec_.store_dtype() != spec_.dtype()) {
    absl::StatusOr<DenseMatrix> converted = ConvertToDType(weights.view(), *FromProto(spec_.store_dtype()));
    if (!converted.ok()) return AtField("spec.store_dtype", converted.status());
    weights = *std::move(converted);
  }
  if (spec_.has_magnitude()) {
    SPMMD_RETURN_IF_ERROR(
        AtField("spec.magnitude", PruneMagnitude(weights.mutable_view(), spec_.magnitude().sparsity())));
  } else if (spec_.has_nm()) {
    SPMMD_RETURN_IF_ERROR(AtField("spec.nm", PruneNm(weights.mutable_view(), spec_.nm().n(), spec_.nm().m())));
  }
  SPMMD_RETURN_IF_ERROR(CheckCancelled());

  FormatChoice choice;
  if (spec_.format() == pb::FORMAT_UNSPECIFIED) {
    FormatQuery query;
    query.dtype = weights.dtype();
    query.m = weights.rows();
    query.k = weights.cols();
    query.nnz = ScanDense(weights.view()).nnz;
    query.sparse_activations = spec_.has_activation_threshold();
    query.two_of_four = IsTwoOfFour(weights.view());
    query.may_measure = true;
    choice = devices_.front()->ChooseFormat(query);
  } else {
    choice = {devices_.front()->Layout(*FromProto(spec_.format())), "Chosen by the caller."};
  }
  PackOptions options;
  options.allow_nonfinite = spec_.allow_nonfinite();
  std::vector<StoredLayer> parts;
  for (int64_t part = 0; part < PartCount(); ++part) {
    const auto [begin, end] = ShareOf(weights.rows(), part, PartCount());
    DenseView rows = weights.view();
    rows.data = weights.view().row(begin);
    rows.rows = end - begin;
    absl::StatusOr<PackedLayer> packed = Pack(choice.format, rows, options);
    if (!packed.ok()) return AtField("content", packed.status());
    SPMMD_RETURN_IF_ERROR(CheckCancelled());
    StoredLayer& stored = parts.emplace_back();
    stored.packed = *std::move(packed);
    if (!bias.empty()) stored.bias.assign(bias.begin() + begin, bias.begin() + end);
    if (catalog_->cache_ != nullptr) {
      // Without it the next start packs again: no reason to refuse the layer.
      catalog_->cache_->Store(CacheKey(part), stored, choice.reason).IgnoreError();
    }
  }
  *format_reason = std::move(choice.reason);
  return parts;
}

absl::StatusOr<ResidentCopies> Upload::LoadParts(std::vector<StoredLayer> parts, LayerContent* content) {
  ResidentCopies copies;
  int64_t begin = 0;
  for (size_t part = 0; part < parts.size(); ++part) {
    const int64_t end = begin + parts[part].packed.m;
    // A part goes to its device; the only one, to all devices.
    const size_t first = parts.size() > 1 ? part : 0;
    const size_t last = parts.size() > 1 ? part : devices_.size() - 1;
    for (size_t d = first; d <= last; ++d) {
      StoredLayer stored = d == last ? std::move(parts[part]) : parts[part];
      SPMMD_ASSIGN_OR_RETURN(
          copies.layers.emplace_back(),
          devices_[d]->Load(std::move(stored.packed), std::move(stored.bias), std::move(device_memory_[d])));
      content->copies.push_back({devices_[d], begin, end, copies.layers.back()->bytes()});
    }
    begin = end;
  }
  return copies;
}

}  // namespace spmmd::server
