// What is served: layers by name and version, and how they come to be.
//
// A registration is an Upload: Begin() checks the spec completely and sets memory aside, Append() takes content,
// Finish() verifies, prunes, packs, loads and publishes. Destroying an Upload that has not finished leaves nothing
// behind. Content that is already here (same hash, same packing options, under any name), or on its way in another
// registration that named the same hash, is neither uploaded nor packed again.
//
// Thread-safe. Find() is the hot path: a reader lock and one hash lookup.
#ifndef SPMMD_SERVER_CATALOG_CATALOG_H_
#define SPMMD_SERVER_CATALOG_CATALOG_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/catalog/content.h"
#include "server/catalog/file_source.h"
#include "server/catalog/layer.h"
#include "server/catalog/packed_cache.h"
#include "server/catalog/residency.h"
#include "server/catalog/resumable_uploads.h"
#include "server/device/device.h"
#include "server/metrics/metrics.h"
#include "server/pb.h"
#include "spmm/v1/layer_catalog.pb.h"

namespace spmmd::server {

class Upload;

class LayerCatalog {
 public:
  struct Options {
    // Root of file sources; empty refuses them (FAILED_PRECONDITION).
    std::string model_repository;
    // Host memory for all registrations in progress together; 0 takes a quarter of what the process may use.
    uint64_t upload_limit_bytes = 0;
    // Largest ContentChunk.data.
    uint64_t max_chunk_bytes = uint64_t{4} * 1024 * 1024;
    // Which of how many shards this server is: layers of others are refused (FAILED_PRECONDITION naming their shard).
    int shard_index = 0;
    int shard_count = 1;
    // How long what an upload that was cut off had received is kept; zero: not at all.
    absl::Duration upload_resume_timeout = absl::ZeroDuration();
    // Layers, all versions counted. A tiny layer costs the host more than the device bytes that its budget counts.
    int64_t max_layers = 100'000;
    // Where packed layers are kept for the next start, and evicted ones; empty: nowhere. The directory exists.
    std::string cache_dir = "";
    // Of all files there; 0: no limit.
    uint64_t cache_limit_bytes = 0;
    Residency::Options residency;
  };

  // At least one device. Devices and metrics must outlive the catalog; every Upload must be gone before it.
  LayerCatalog(Options options, std::vector<Device*> devices, Metrics* metrics);
  ~LayerCatalog();
  LayerCatalog(const LayerCatalog&) = delete;
  LayerCatalog& operator=(const LayerCatalog&) = delete;

  // FAILED_PRECONDITION naming the shard that holds the layer when it is not this server's.
  absl::Status CheckShard(absl::string_view name) const;
  // Starts a registration. Field paths in errors start with "spec.". Allocates nothing before every check has passed.
  // Blocks while layers are evicted to make room; a file source is opened and its header read here.
  absl::StatusOr<std::shared_ptr<Upload>> Begin(const pb::LayerSpec& spec);

  // A lease: the layer stays registered as long as it is held, and in memory as long as its Residence::Use() is.
  // Version 0 is the newest. NOT_FOUND naming the layer.
  absl::StatusOr<std::shared_ptr<const ServedLayer>> Find(absl::string_view name, int64_t version) const;
  // Changes whenever Find() could answer differently.
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }

  absl::Status List(const pb::ListLayersRequest& request, pb::ListLayersResponse* response) const;
  absl::Status Get(const pb::GetLayerRequest& request, pb::GetLayerResponse* response) const;
  // Removes the layer from view at once, then blocks until the requests in flight on it have ended and its memory is
  // free.
  absl::Status Unregister(const pb::UnregisterLayerRequest& request, pb::UnregisterLayerResponse* response);
  // Pinning brings the layer to its devices first; blocks.
  absl::Status Pin(const pb::PinLayerRequest& request, pb::PinLayerResponse* response);
  Residency& residency() { return residency_; }

  const std::vector<Device*>& devices() const { return devices_; }
  const Options& options() const { return options_; }

 private:
  friend class Upload;

  // One content on its way from bytes to LayerContent: led by one registration, joined by others that bring the same.
  struct Conversion {
    bool ended = false;
    absl::Status status;
    std::shared_ptr<const LayerContent> content;
  };
  struct Name {
    int64_t last_version = 0;
    std::map<int64_t, std::shared_ptr<const ServedLayer>, std::greater<>> versions;  // newest first
  };

  // What is known under a content key.
  struct Lookup {
    std::shared_ptr<const LayerContent> content;  // here already
    std::shared_ptr<Conversion> conversion;       // on its way; led by the caller when `lead`
    bool lead = false;
  };
  Lookup JoinOrLead(const std::string& key) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends a conversion that the caller leads.
  void EndConversion(const std::string& key, Conversion* conversion,
                     absl::StatusOr<std::shared_ptr<const LayerContent>> result) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for somebody else's conversion; CANCELLED when `cancelled` becomes true.
  absl::StatusOr<std::shared_ptr<const LayerContent>> Await(const Conversion& conversion,
                                                            const std::atomic<bool>& cancelled)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Makes the layer visible. An identical newest version of the same name is returned instead of a new one.
  std::shared_ptr<const ServedLayer> Publish(const pb::LayerSpec& spec, std::shared_ptr<const LayerContent> content,
                                             absl::Time created) ABSL_LOCKS_EXCLUDED(mutex_);
  // RESOURCE_EXHAUSTED when no more layers may be registered.
  absl::Status CheckLayerCount() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Where a new layer goes; UNAVAILABLE when every device is lost.
  absl::StatusOr<std::vector<Device*>> DevicesFor(pb::Placement placement) const;
  absl::StatusOr<std::shared_ptr<const ServedLayer>> FindLocked(absl::string_view name, int64_t version) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const std::vector<Device*> devices_;
  Metrics* const metrics_;
  const std::unique_ptr<PackedCache> cache_;  // null without a cache directory
  MemoryBudget host_budget_;
  ResumableUploads resumable_;
  Residency residency_;
  std::atomic<uint64_t> generation_{1};

  mutable absl::Mutex mutex_;
  absl::CondVar conversion_ended_;
  absl::flat_hash_map<std::string, Name> names_ ABSL_GUARDED_BY(mutex_);
  int64_t layer_count_ ABSL_GUARDED_BY(mutex_) = 0;
  // By content key. Entries leave with their last user.
  absl::flat_hash_map<std::string, std::weak_ptr<const LayerContent>> contents_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, std::shared_ptr<Conversion>> conversions_ ABSL_GUARDED_BY(mutex_);
};

// One registration in progress. Append and Finish must not be called concurrently; received_bytes() and state() may be
// called from any thread.
class Upload {
 public:
  ~Upload();  // aborts what has not finished
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  // The event to send first.
  const pb::RegisterAccepted& accepted() const { return accepted_; }

  // Takes the next bytes of a part. INVALID_ARGUMENT ("chunk.part", "chunk.offset", "chunk.data") for an unexpected
  // part, an offset other than the bytes received so far, bytes past the end, a chunk above the limit, or content that
  // is not needed.
  absl::Status Append(const pb::ContentChunk& chunk);

  // All content is here: verifies and converts it, and publishes the layer. Blocks for as long as packing takes (or as
  // the registration that brings the same content takes); call it off the network threads. INVALID_ARGUMENT (incomplete
  // or bad content), DATA_LOSS (hash), RESOURCE_EXHAUSTED, ABORTED with CONTENT_SOURCE_LOST (the registration that was
  // bringing the content failed: try again).
  absl::StatusOr<pb::Layer> Finish();
  // Makes Finish() return CANCELLED soon, if it has not published the layer yet. From any thread.
  void Cancel();

  uint64_t received_bytes() const { return received_.load(std::memory_order_relaxed); }
  pb::LayerState state() const { return state_.load(std::memory_order_relaxed); }

 private:
  friend class LayerCatalog;

  Upload(LayerCatalog* catalog, pb::LayerSpec spec);
  absl::Status Start();
  void SetState(pb::LayerState state);
  absl::StatusOr<std::shared_ptr<const LayerContent>> Resolve();
  // Parts are what devices hold: the whole matrix, or each device's rows of a sharded layer.
  int64_t PartCount() const;
  PackedCache::Key CacheKey(int64_t part) const;
  // The cache has a file of every part.
  bool IsCached() const;
  // All parts from the packed cache, or none.
  std::vector<StoredLayer> CachedParts(std::string* format_reason) const;
  // Converts, prunes and packs the content.
  absl::StatusOr<std::vector<StoredLayer>> PackParts(const std::vector<float>& bias, std::string* format_reason);
  absl::StatusOr<ResidentCopies> LoadParts(std::vector<StoredLayer> parts, LayerContent* content);
  // Checks, prunes, packs and loads the content that has arrived; takes the packed parts from the cache if they are
  // there.
  absl::StatusOr<std::shared_ptr<const LayerContent>> Convert(const std::string& xxh3);
  // Loads packed parts.
  absl::StatusOr<std::shared_ptr<const LayerContent>> MakeContent(const std::string& xxh3,
                                                                  std::vector<StoredLayer> parts,
                                                                  std::string format_reason, const char* source,
                                                                  absl::Duration took);
  // What the cache has of a content that has not been sent; null when it turns out to be damaged.
  absl::StatusOr<std::shared_ptr<const LayerContent>> FromCache();
  absl::Status ReadFile();
  // Keeps what has arrived for another try, if the content has a name by which it can be found.
  void KeepForResumption();
  absl::Status CheckCancelled() const;
  // Ends the conversion that this upload leads, if it leads one.
  void EndLead(absl::StatusOr<std::shared_ptr<const LayerContent>> result);

  LayerCatalog* const catalog_;
  pb::LayerSpec spec_;  // normalised: shape, types and encoding filled in
  pb::RegisterAccepted accepted_;
  const absl::Time created_;
  std::vector<Device*> devices_;
  std::unique_ptr<FileSource> file_;
  std::unique_ptr<Content> content_;  // null when the content is not needed
  MemoryBudget::Reservation host_memory_;
  std::vector<MemoryBudget::Reservation> device_memory_;  // by devices_
  std::string key_;                                       // once the hash is known
  std::string xxh3_;                                      // that hash, where it is known before the content
  std::shared_ptr<const LayerContent> ready_;
  std::shared_ptr<LayerCatalog::Conversion> conversion_;
  bool leads_ = false;
  bool verified_ = false;  // the content has the hash of `key_`
  bool resumed_ = false;   // some of the content came with an earlier upload
  std::atomic<uint64_t> received_{0};
  std::atomic<pb::LayerState> state_{pb::LAYER_STATE_UNSPECIFIED};
  std::atomic<bool> cancelled_{false};
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_CATALOG_CATALOG_H_
