#include "server/catalog/residency.h"

#include <algorithm>
#include <optional>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/status_macros.h"
#include "server/catalog/layer.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

constexpr absl::Duration kFirstPause = absl::Microseconds(500);
constexpr absl::Duration kLongestPause = absl::Milliseconds(20);

PackedCache::Key KeyOf(const LayerContent& content, int64_t part) {
  return {content.key, content.copies.front().device->backend(), part, content.parts()};
}

const LayerContent::Copy* CopyOn(const LayerContent& content, const Device* device) {
  const auto copy = std::find_if(content.copies.begin(), content.copies.end(),
                                 [device](const LayerContent::Copy& c) { return c.device == device; });
  return copy == content.copies.end() ? nullptr : &*copy;
}

}  // namespace

std::shared_ptr<const ResidentCopies> Residence::Use() const {
  last_use_.store(absl::GetCurrentTimeNanos(), std::memory_order_relaxed);
  absl::MutexLock lock(&mutex_);
  return copies_;
}

pb::LayerState Residence::StateLocked() const {
  if (copies_ != nullptr) return pb::LAYER_STATE_READY;
  return error_.empty() ? pb::LAYER_STATE_EVICTED : pb::LAYER_STATE_FAILED;
}

pb::LayerState Residence::state() const {
  absl::MutexLock lock(&mutex_);
  return StateLocked();
}

std::string Residence::error() const {
  absl::MutexLock lock(&mutex_);
  return error_;
}

uint64_t Residence::bytes() const {
  absl::MutexLock lock(&mutex_);
  uint64_t bytes = host_memory_.bytes();
  if (copies_ == nullptr) return bytes;
  for (const auto& layer : copies_->layers) bytes += layer->bytes();
  return bytes;
}

void Residence::AddServed(int change, Metrics* metrics) {
  absl::MutexLock lock(&mutex_);
  served_ += change;
  const pb::LayerState none = pb::LAYER_STATE_UNSPECIFIED;
  metrics->LayerStateChanged(change > 0 ? none : StateLocked(), change > 0 ? StateLocked() : none);
}

Residency::Residency(const Options& options, const std::vector<Device*>& devices, PackedCache* cache, Metrics* metrics)
    : options_(options),
      devices_(devices),
      cache_(cache),
      metrics_(metrics),
      host_budget_("host memory for evicted layers", reason::kHostMemory, options.host_limit_bytes) {
  metrics_->SetSource(Metrics::Gauge::kHostLayerBytes, [this] { return host_budget_.used(); });
  if (!options_.evict) return;
  host_budget_.AddReclaimer(kReclaimLayers, [this](uint64_t /*bytes*/) { return ReclaimHost(); });
  for (Device* device : devices_) {
    reclaimers_.emplace_back(device, device->budget().AddReclaimer(kReclaimLayers, [this, device](uint64_t bytes) {
      return Reclaim(device, bytes);
    }));
  }
}

Residency::~Residency() {
  for (const auto& [device, id] : reclaimers_) device->budget().RemoveReclaimer(id);
  metrics_->SetSource(Metrics::Gauge::kHostLayerBytes, nullptr);
}

void Residency::Add(const LayerContent* content, ResidentCopies copies) {
  Residence& residence = content->residence;
  residence.Use();
  {
    absl::MutexLock lock(&residence.mutex_);
    residence.copies_ = std::make_shared<const ResidentCopies>(std::move(copies));
  }
  absl::MutexLock lock(&mutex_);
  contents_.insert(content);
}

void Residency::Remove(const LayerContent* content) {
  {
    absl::MutexLock lock(&mutex_);
    while (moving_.contains(content)) moved_.Wait(&mutex_);
    contents_.erase(content);
  }
  Residence& residence = content->residence;
  bool on_disk = false;
  {
    absl::MutexLock lock(&residence.mutex_);
    residence.copies_.reset();
    residence.host_.clear();
    residence.host_memory_.Release();
    on_disk = std::exchange(residence.on_disk_, false);
  }
  if (on_disk) ReleaseFiles(*content);
}

bool Residency::TryBeginMove(const LayerContent* content) {
  absl::MutexLock lock(&mutex_);
  return contents_.contains(content) && moving_.insert(content).second;
}

void Residency::EndMove(const LayerContent& content) {
  absl::MutexLock lock(&mutex_);
  moving_.erase(&content);
  moved_.SignalAll();
}

uint64_t Residency::Reclaim(const Device* device, uint64_t bytes) {
  struct Candidate {
    int64_t last_use;
    uint64_t bytes;
    const LayerContent* content;
  };
  std::vector<Candidate> candidates;
  uint64_t available = 0;
  {
    absl::MutexLock lock(&mutex_);
    for (const LayerContent* content : contents_) {
      const LayerContent::Copy* const copy = CopyOn(*content, device);
      if (copy == nullptr || moving_.contains(content)) continue;
      const Residence& residence = content->residence;
      if (residence.pins_.load(std::memory_order_relaxed) > 0) continue;
      absl::MutexLock content_lock(&residence.mutex_);
      if (residence.copies_ == nullptr || residence.copies_.use_count() > 1) continue;
      candidates.push_back({residence.last_use_.load(std::memory_order_relaxed), copy->bytes, content});
      available += copy->bytes;
    }
  }
  // Nothing leaves for what does not fit anyway.
  if (available < bytes) return 0;
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.last_use < b.last_use; });
  uint64_t freed = 0;
  for (const Candidate& candidate : candidates) {
    if (freed >= bytes) break;
    if (!TryBeginMove(candidate.content)) continue;
    if (Evict(*candidate.content)) freed += candidate.bytes;
    EndMove(*candidate.content);
  }
  return freed;
}

bool Residency::Evict(const LayerContent& content) {
  const absl::Time start = absl::Now();
  Residence& residence = content.residence;
  std::shared_ptr<const ResidentCopies> copies;
  {
    absl::MutexLock lock(&residence.mutex_);
    copies = residence.copies_;
  }
  if (copies == nullptr) return false;
  MemoryBudget::Reservation host_memory;
  std::vector<StoredLayer> parts;
  bool to_host = false;
  if (!content.copies.front().device->in_host_memory()) {
    absl::StatusOr<MemoryBudget::Reservation> reserved =
        host_budget_.Reserve(MemoryKind::kWeights, content.stored_bytes());
    if (reserved.ok()) {
      host_memory = *std::move(reserved);
      absl::StatusOr<std::vector<StoredLayer>> saved = Save(content, *copies);
      if (!saved.ok()) return false;
      parts = *std::move(saved);
      to_host = true;
    }
  }
  if (!to_host) {
    if (cache_ == nullptr) return false;
    if (!HoldFiles(content)) {
      absl::StatusOr<std::vector<StoredLayer>> saved = Save(content, *copies);
      if (!saved.ok() || !WriteAndHold(content, *saved).ok()) return false;
    }
  }
  bool in_use = false;
  {
    absl::MutexLock lock(&residence.mutex_);
    // One of the two is ours.
    in_use = residence.copies_.use_count() > 2 || residence.pins_.load(std::memory_order_relaxed) > 0;
    if (!in_use) {
      residence.copies_.reset();
      residence.host_ = std::move(parts);
      residence.host_memory_ = std::move(host_memory);
      residence.on_disk_ = !to_host;
      for (int i = 0; i < residence.served_; ++i) {
        metrics_->LayerStateChanged(pb::LAYER_STATE_READY, pb::LAYER_STATE_EVICTED);
      }
    }
  }
  if (in_use) {
    if (!to_host) ReleaseFiles(content);
    return false;
  }
  copies.reset();  // frees the devices' memory
  metrics_->LayerEvicted(to_host ? "host" : "cache", absl::Now() - start);
  return true;
}

uint64_t Residency::ReclaimHost() {
  if (cache_ == nullptr) return 0;
  while (true) {
    const LayerContent* oldest = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      int64_t last_use = 0;
      for (const LayerContent* content : contents_) {
        if (moving_.contains(content)) continue;
        const Residence& residence = content->residence;
        const int64_t used = residence.last_use_.load(std::memory_order_relaxed);
        if (oldest != nullptr && used >= last_use) continue;
        absl::MutexLock content_lock(&residence.mutex_);
        if (residence.host_.empty()) continue;
        oldest = content;
        last_use = used;
      }
      if (oldest == nullptr) return 0;
      moving_.insert(oldest);
    }
    const absl::Cleanup end = [&] { EndMove(*oldest); };
    Residence& residence = oldest->residence;
    std::vector<StoredLayer> parts;
    {
      absl::MutexLock lock(&residence.mutex_);
      parts = residence.host_;  // shares the bytes
    }
    if (!HoldFiles(*oldest) && !WriteAndHold(*oldest, parts).ok()) return 0;
    parts.clear();
    absl::MutexLock lock(&residence.mutex_);
    const uint64_t freed = residence.host_memory_.bytes();
    residence.host_.clear();
    residence.host_memory_.Release();
    residence.on_disk_ = true;
    return freed;
  }
}

bool Residency::WorthWaiting(Device* device, uint64_t bytes, Held held) const {
  if (!options_.evict || bytes > device->budget().limit()) return false;
  uint64_t leaving = 0;
  bool in_use = false;
  {
    absl::MutexLock lock(&mutex_);
    for (const LayerContent* content : contents_) {
      const LayerContent::Copy* const copy = CopyOn(*content, device);
      if (copy == nullptr) continue;
      const Residence& residence = content->residence;
      if (residence.pins_.load(std::memory_order_relaxed) > 0) continue;
      absl::MutexLock content_lock(&residence.mutex_);
      if (residence.copies_ == nullptr) continue;
      if (std::find(held.begin(), held.end(), residence.copies_) != held.end()) continue;
      leaving += copy->bytes;
      in_use = in_use || moving_.contains(content) || residence.copies_.use_count() > 1;
    }
  }
  if (cache_ == nullptr) leaving = device->in_host_memory() ? 0 : std::min(leaving, host_budget_.free());
  return in_use && device->budget().free() + leaving >= bytes;
}

absl::StatusOr<MemoryBudget::Reservation> Residency::Reserve(Device* device, uint64_t bytes, Wanted wanted, Held held) {
  const absl::Time end = absl::Now() + kPatience;
  for (absl::Duration pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    absl::StatusOr<MemoryBudget::Reservation> reserved = device->budget().Reserve(MemoryKind::kWeights, bytes);
    if (reserved.ok() || absl::Now() >= end || !WorthWaiting(device, bytes, held)) return reserved;
    SPMMD_RETURN_IF_ERROR(wanted());
    absl::SleepFor(pause);
  }
}

absl::StatusOr<std::shared_ptr<const ResidentCopies>> Residency::Load(const LayerContent& content, Wanted wanted,
                                                                      Held held) {
  const absl::Time start = absl::Now();
  Residence& residence = content.residence;
  {
    absl::MutexLock lock(&mutex_);
    while (moving_.contains(&content)) moved_.Wait(&mutex_);
    moving_.insert(&content);
  }
  const absl::Cleanup end = [&] { EndMove(content); };
  if (std::shared_ptr<const ResidentCopies> copies = residence.Use(); copies != nullptr) return copies;
  SPMMD_RETURN_IF_ERROR(wanted());
  std::vector<StoredLayer> host;
  {
    absl::MutexLock lock(&residence.mutex_);
    host = std::move(residence.host_);
    residence.host_.clear();
    residence.host_memory_.Release();
  }
  absl::StatusOr<ResidentCopies> loaded = LoadCopies(content, host, wanted, held);
  const char* const source = host.empty() ? "cache" : "host";
  MemoryBudget::Reservation host_memory;
  if (!loaded.ok() && !host.empty()) {
    // Back it goes. What has taken its place is evicted further; if that cannot be, this one stays beyond the limit:
    // nothing is lost.
    auto reserved = host_budget_.Reserve(MemoryKind::kWeights, content.stored_bytes());
    if (reserved.ok()) host_memory = *std::move(reserved);
  }
  bool was_on_disk = false;
  std::shared_ptr<const ResidentCopies> copies;
  {
    absl::MutexLock lock(&residence.mutex_);
    const pb::LayerState before = residence.StateLocked();
    if (loaded.ok()) {
      copies = std::make_shared<const ResidentCopies>(*std::move(loaded));
      residence.copies_ = copies;
      residence.error_.clear();
      was_on_disk = std::exchange(residence.on_disk_, false);
    } else if (!host.empty()) {
      residence.host_ = std::move(host);
      residence.host_memory_ = std::move(host_memory);
    } else if (absl::IsDataLoss(loaded.status())) {  // NOLINT(bugprone-use-after-move): moved from in the other branch
      residence.error_ = std::string(loaded.status().message());
      was_on_disk = std::exchange(residence.on_disk_, false);
    }
    for (int i = 0; i < residence.served_; ++i) metrics_->LayerStateChanged(before, residence.StateLocked());
  }
  if (was_on_disk) ReleaseFiles(content);
  SPMMD_RETURN_IF_ERROR(loaded.status());
  metrics_->LayerReloaded(source, absl::Now() - start);
  return copies;
}

absl::StatusOr<ResidentCopies> Residency::LoadCopies(const LayerContent& content, const std::vector<StoredLayer>& host,
                                                     Wanted wanted, Held held) {
  std::vector<MemoryBudget::Reservation> memory;
  for (const LayerContent::Copy& copy : content.copies) {
    SPMMD_ASSIGN_OR_RETURN(memory.emplace_back(), Reserve(copy.device, copy.bytes, wanted, held));
  }
  std::vector<StoredLayer> files;
  if (host.empty()) {
    SPMMD_ASSIGN_OR_RETURN(files, ReadFiles(content));
  }
  const std::vector<StoredLayer>& parts = host.empty() ? files : host;
  ResidentCopies copies;
  for (size_t i = 0; i < content.copies.size(); ++i) {
    const StoredLayer& part = parts[parts.size() > 1 ? i : 0];
    SPMMD_ASSIGN_OR_RETURN(copies.layers.emplace_back(),
                           content.copies[i].device->Load(part.packed, part.bias, std::move(memory[i])));
  }
  return copies;
}

absl::StatusOr<std::vector<StoredLayer>> Residency::Save(const LayerContent& content,
                                                         const ResidentCopies& copies) const {
  std::vector<StoredLayer> parts;
  for (size_t part = 0; part < static_cast<size_t>(content.parts()); ++part) {
    SPMMD_ASSIGN_OR_RETURN(parts.emplace_back(), content.copies[part].device->Save(*copies.layers[part]));
  }
  return parts;
}

bool Residency::HoldFiles(const LayerContent& content) const {
  for (int64_t part = 0; part < content.parts(); ++part) {
    if (cache_->Hold(KeyOf(content, part))) continue;
    while (--part >= 0) cache_->Release(KeyOf(content, part));
    return false;
  }
  return true;
}

void Residency::ReleaseFiles(const LayerContent& content) const {
  for (int64_t part = 0; part < content.parts(); ++part) cache_->Release(KeyOf(content, part));
}

absl::Status Residency::WriteAndHold(const LayerContent& content, const std::vector<StoredLayer>& parts) const {
  int64_t held = 0;
  absl::Status status;
  for (; status.ok() && held < content.parts(); ++held) {
    const PackedCache::Key key = KeyOf(content, held);
    if (cache_->Hold(key)) continue;
    status = cache_->Store(key, parts[static_cast<size_t>(held)], content.format_reason);
    // Between the two others may have needed the room.
    if (status.ok() && !cache_->Hold(key)) status = absl::ResourceExhaustedError("packed cache: no room");
    if (!status.ok()) break;
  }
  if (status.ok()) return status;
  while (--held >= 0) cache_->Release(KeyOf(content, held));
  return status;
}

absl::StatusOr<std::vector<StoredLayer>> Residency::ReadFiles(const LayerContent& content) const {
  std::vector<StoredLayer> parts;
  for (int64_t part = 0; part < content.parts(); ++part) {
    std::optional<PackedCache::Entry> entry;
    if (cache_ != nullptr) entry = cache_->Find(KeyOf(content, part));
    const LayerContent::Copy& copy = content.copies[static_cast<size_t>(part)];
    if (!entry.has_value() || entry->part.packed.m != copy.row_end - copy.row_begin ||
        entry->part.packed.k != content.k || entry->part.packed.format != content.format ||
        entry->part.bias.empty() == content.has_bias) {
      return MakeError(absl::StatusCode::kDataLoss, reason::kCorruptFile,
                       "the file that an evicted layer's packed bytes were in is damaged or gone: register it again");
    }
    parts.push_back(std::move(entry->part));
  }
  return parts;
}

}  // namespace spmmd::server
