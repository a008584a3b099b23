#include "server/catalog/catalog.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "kernels/base/status_macros.h"
#include "proto/shard/shard.h"
#include "server/catalog/spec.h"
#include "server/device/host_memory.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

constexpr int kMaxPageSize = 1000;
// Expired entries that the table of contents may keep.
constexpr int64_t kContentSlack = 64;
// How often a registration that waits for another one looks whether it was cancelled.
constexpr absl::Duration kCancelPoll = absl::Milliseconds(20);

uint64_t UploadLimit(const LayerCatalog::Options& options) {
  if (options.upload_limit_bytes != 0) return options.upload_limit_bytes;
  return UsableMemory() / 4;
}

// A page token says after which layer to go on: names are unique, versions fall within a name.
std::string PageToken(const std::string& name, int64_t version) {
  return absl::WebSafeBase64Escape(absl::StrCat("v1/", version, "/", name));
}

bool ParsePageToken(const std::string& token, std::string* name, int64_t* version) {
  std::string text;
  if (!absl::WebSafeBase64Unescape(token, &text)) return false;
  absl::string_view rest = text;
  if (!absl::ConsumePrefix(&rest, "v1/")) return false;
  const std::pair<absl::string_view, absl::string_view> fields = absl::StrSplit(rest, absl::MaxSplits('/', 1));
  if (!absl::SimpleAtoi(fields.first, version) || *version < 1 || fields.second.empty()) return false;
  *name = std::string(fields.second);
  return true;
}

absl::Status NotFound(absl::string_view name, int64_t version) {
  std::string text = absl::StrCat("layer ", name);
  if (version != 0) absl::StrAppend(&text, " version ", version);
  return MakeError(absl::StatusCode::kNotFound, reason::kLayerNotFound, absl::StrCat(text, " is not registered"),
                   {{"layer", std::string(name)}, {"version", absl::StrCat(version)}});
}

bool SameThreshold(const pb::LayerSpec& spec, const std::optional<float>& threshold) {
  if (!threshold.has_value()) return !spec.has_activation_threshold();
  return spec.has_activation_threshold() && spec.activation_threshold() == *threshold;
}

absl::Status CheckRef(const pb::LayerRef& ref) {
  if (ref.name().empty()) return FieldError("layer.name", "must not be empty");
  if (ref.version() < 0) return FieldError("layer.version", absl::StrCat(ref.version(), " is negative"));
  return absl::OkStatus();
}

}  // namespace

LayerCatalog::LayerCatalog(Options options, std::vector<Device*> devices, Metrics* metrics)
    : options_(std::move(options)),
      devices_(std::move(devices)),
      metrics_(metrics),
      cache_(options_.cache_dir.empty()
                 ? nullptr
                 : std::make_unique<PackedCache>(options_.cache_dir, options_.cache_limit_bytes, metrics)),
      host_budget_("host memory for registrations", reason::kHostMemory, UploadLimit(options_)),
      resumable_(options_.upload_resume_timeout, &host_budget_),
      residency_(options_.residency, devices_, cache_.get(), metrics) {
  metrics_->SetSource(Metrics::Gauge::kUploadBytes, [this] { return host_budget_.used(); });
}

LayerCatalog::~LayerCatalog() { metrics_->SetSource(Metrics::Gauge::kUploadBytes, nullptr); }

absl::Status LayerCatalog::CheckShard(absl::string_view name) const {
  if (options_.shard_count == 1 || name.empty()) return absl::OkStatus();
  const int shard = ShardOf({name.data(), name.size()}, options_.shard_count);
  if (shard == options_.shard_index) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kWrongShard,
                   absl::StrCat("layer ", name, " belongs to shard ", shard, " of ", options_.shard_count,
                                ", and this server is shard ", options_.shard_index),
                   {{"layer", std::string(name)},
                    {"shard", absl::StrCat(shard)},
                    {"shard_count", absl::StrCat(options_.shard_count)}});
}

absl::StatusOr<std::shared_ptr<Upload>> LayerCatalog::Begin(const pb::LayerSpec& spec) {
  SPMMD_RETURN_IF_ERROR(CheckShard(spec.name()));
  auto upload = std::shared_ptr<Upload>(new Upload(this, spec));
  SPMMD_RETURN_IF_ERROR(upload->Start());
  return upload;
}

absl::StatusOr<std::shared_ptr<const ServedLayer>> LayerCatalog::FindLocked(absl::string_view name,
                                                                            int64_t version) const {
  const auto entry = names_.find(name);
  if (entry == names_.end()) {
    SPMMD_RETURN_IF_ERROR(CheckShard(name));
    return NotFound(name, version);
  }
  const auto& versions = entry->second.versions;
  const auto layer = version == 0 ? versions.begin() : versions.find(version);
  if (layer == versions.end()) return NotFound(name, version);
  return layer->second;
}

absl::StatusOr<std::shared_ptr<const ServedLayer>> LayerCatalog::Find(absl::string_view name, int64_t version) const {
  absl::ReaderMutexLock lock(&mutex_);
  return FindLocked(name, version);
}

absl::Status LayerCatalog::List(const pb::ListLayersRequest& request, pb::ListLayersResponse* response) const {
  if (request.page_size() < 0 || request.page_size() > kMaxPageSize) {
    return FieldError("page_size", absl::StrCat(request.page_size(), " is not within 0 to ", kMaxPageSize));
  }
  std::string after_name;
  int64_t after_version = 0;
  if (!request.page_token().empty() && !ParsePageToken(request.page_token(), &after_name, &after_version)) {
    return FieldError("page_token", "is not one that this server gave out");
  }
  const size_t limit = request.page_size() == 0 ? kMaxPageSize : static_cast<size_t>(request.page_size());
  std::vector<std::shared_ptr<const ServedLayer>> layers;
  {
    absl::ReaderMutexLock lock(&mutex_);
    std::vector<const std::pair<const std::string, Name>*> names;
    for (const auto& entry : names_) {
      if (absl::StartsWith(entry.first, request.name_prefix()) && entry.first >= after_name) names.push_back(&entry);
    }
    std::sort(names.begin(), names.end(), [](const auto* a, const auto* b) { return a->first < b->first; });
    for (const auto* entry : names) {
      for (const auto& [version, layer] : entry->second.versions) {
        if (entry->first == after_name && version >= after_version) continue;
        layers.push_back(layer);
        if (layers.size() > limit) break;
      }
      if (layers.size() > limit) break;
    }
  }
  if (layers.size() > limit) {
    layers.pop_back();
    response->set_next_page_token(PageToken(layers.back()->name(), layers.back()->version()));
  }
  for (const auto& layer : layers) layer->Describe(/*full=*/false, response->add_layers());
  return absl::OkStatus();
}

absl::Status LayerCatalog::Get(const pb::GetLayerRequest& request, pb::GetLayerResponse* response) const {
  SPMMD_RETURN_IF_ERROR(CheckRef(request.layer()));
  SPMMD_ASSIGN_OR_RETURN(const auto layer, Find(request.layer().name(), request.layer().version()));
  layer->Describe(/*full=*/true, response->mutable_layer());
  return absl::OkStatus();
}

absl::Status LayerCatalog::Unregister(const pb::UnregisterLayerRequest& request,
                                      pb::UnregisterLayerResponse* response) {
  SPMMD_RETURN_IF_ERROR(CheckRef(request.layer()));
  std::vector<std::shared_ptr<const ServedLayer>> removed;
  {
    absl::MutexLock lock(&mutex_);
    SPMMD_RETURN_IF_ERROR(FindLocked(request.layer().name(), request.layer().version()).status());
    const auto entry = names_.find(request.layer().name());
    auto& versions = entry->second.versions;
    if (request.layer().version() == 0) {
      for (const auto& [version, layer] : versions) removed.push_back(layer);
      names_.erase(entry);
    } else {
      const auto layer = versions.find(request.layer().version());
      removed.push_back(layer->second);
      versions.erase(layer);
      if (versions.empty()) names_.erase(entry);
    }
    layer_count_ -= static_cast<int64_t>(removed.size());
    generation_.fetch_add(1, std::memory_order_release);
  }
  // Content shared with other layers stays; what goes away is known once all its users among the removed ones are gone.
  absl::flat_hash_map<std::string, std::pair<std::weak_ptr<const LayerContent>, uint64_t>> contents;
  for (std::shared_ptr<const ServedLayer>& layer : removed) {
    contents[layer->content().key] = {layer->shared_content(), layer->content().residence.bytes()};
    const std::shared_ptr<absl::Notification> freed = layer->freed();
    layer.reset();
    freed->WaitForNotification();
  }
  uint64_t freed_bytes = 0;
  for (const auto& [key, content] : contents) {
    if (content.first.expired()) freed_bytes += content.second;
  }
  {
    // A registration that shares content may have been its last user: sweep, but not at every call.
    absl::MutexLock lock(&mutex_);
    if (static_cast<int64_t>(contents_.size()) > 2 * layer_count_ + kContentSlack) {
      absl::erase_if(contents_, [](const auto& entry) { return entry.second.expired(); });
    }
  }
  response->set_removed_versions(static_cast<int32_t>(removed.size()));
  response->set_freed_bytes(freed_bytes);
  return absl::OkStatus();
}

absl::Status LayerCatalog::Pin(const pb::PinLayerRequest& request, pb::PinLayerResponse* response) {
  SPMMD_RETURN_IF_ERROR(CheckRef(request.layer()));
  SPMMD_ASSIGN_OR_RETURN(const auto layer, Find(request.layer().name(), request.layer().version()));
  const bool was_pinned = layer->pinned();
  // Before it is loaded, so that nothing evicts it in between.
  layer->set_pinned(request.pinned());
  if (request.pinned()) {
    absl::Status loaded = residency_.Load(layer->content(), [] { return absl::OkStatus(); }).status();
    if (!loaded.ok()) {
      layer->set_pinned(was_pinned);
      return loaded;
    }
  }
  layer->Describe(/*full=*/true, response->mutable_layer());
  return absl::OkStatus();
}

absl::Status LayerCatalog::CheckLayerCount() const {
  absl::ReaderMutexLock lock(&mutex_);
  if (layer_count_ < options_.max_layers) return absl::OkStatus();
  return Exhausted(reason::kTooManyLayers,
                   absl::StrCat(layer_count_, " layers are registered, the limit is ", options_.max_layers),
                   absl::ZeroDuration(), {{"limit", absl::StrCat(options_.max_layers)}});
}

absl::StatusOr<std::vector<Device*>> LayerCatalog::DevicesFor(pb::Placement placement) const {
  std::vector<Device*> devices;
  for (Device* device : devices_) {
    if (device->healthy()) devices.push_back(device);
  }
  if (devices.empty()) {
    return MakeError(absl::StatusCode::kUnavailable, reason::kDeviceLost,
                     absl::StrCat("device ", devices_.front()->id(), " is lost"), {{"device", devices_.front()->id()}});
  }
  if (placement == pb::PLACEMENT_SINGLE) {
    return std::vector<Device*>{*std::max_element(
        devices.begin(), devices.end(), [](Device* a, Device* b) { return a->budget().free() < b->budget().free(); })};
  }
  return devices;
}

LayerCatalog::Lookup LayerCatalog::JoinOrLead(const std::string& key) {
  std::shared_ptr<const LayerContent> lost;  // freed without the lock
  absl::MutexLock lock(&mutex_);
  Lookup result;
  if (const auto entry = contents_.find(key); entry != contents_.end()) result.content = entry->second.lock();
  // One whose bytes are lost is to be brought again.
  if (result.content != nullptr && result.content->residence.state() == pb::LAYER_STATE_FAILED) {
    lost = std::move(result.content);
    result.content = nullptr;
  }
  if (result.content != nullptr) return result;
  std::shared_ptr<Conversion>& conversion = conversions_[key];
  if (conversion == nullptr) {
    conversion = std::make_shared<Conversion>();
    result.lead = true;
  }
  result.conversion = conversion;
  return result;
}

void LayerCatalog::EndConversion(const std::string& key, Conversion* conversion,
                                 absl::StatusOr<std::shared_ptr<const LayerContent>> result) {
  absl::MutexLock lock(&mutex_);
  conversion->ended = true;
  conversion->status = result.status();
  if (result.ok()) {
    contents_[key] = *result;
    conversion->content = *std::move(result);
  }
  conversions_.erase(key);
  conversion_ended_.SignalAll();
}

absl::StatusOr<std::shared_ptr<const LayerContent>> LayerCatalog::Await(const Conversion& conversion,
                                                                        const std::atomic<bool>& cancelled) {
  absl::MutexLock lock(&mutex_);
  while (!conversion.ended) {
    if (cancelled.load(std::memory_order_relaxed)) {
      return MakeError(absl::StatusCode::kCancelled, reason::kCancelled, "the registration was cancelled");
    }
    conversion_ended_.WaitWithTimeout(&mutex_, kCancelPoll);
  }
  if (!conversion.status.ok()) return conversion.status;
  return conversion.content;
}

std::shared_ptr<const ServedLayer> LayerCatalog::Publish(const pb::LayerSpec& spec,
                                                         std::shared_ptr<const LayerContent> content,
                                                         absl::Time created) {
  absl::MutexLock lock(&mutex_);
  Name& name = names_[spec.name()];
  if (!name.versions.empty()) {
    const std::shared_ptr<const ServedLayer>& newest = name.versions.begin()->second;
    if (newest->shared_content() == content && SameThreshold(spec, newest->activation_threshold()) &&
        newest->deterministic() == spec.deterministic()) {
      if (spec.pin()) newest->set_pinned(true);
      return newest;
    }
  }
  auto layer = std::make_shared<const ServedLayer>(spec, ++name.last_version, std::move(content), created, metrics_);
  name.versions.emplace(layer->version(), layer);
  ++layer_count_;
  generation_.fetch_add(1, std::memory_order_release);
  return layer;
}

}  // namespace spmmd::server
