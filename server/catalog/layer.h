// A registered layer: a name and a version over content that is on devices, or was evicted from them.
#ifndef SPMMD_SERVER_CATALOG_LAYER_H_
#define SPMMD_SERVER_CATALOG_LAYER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/catalog/residency.h"
#include "server/device/device.h"
#include "server/metrics/metrics.h"
#include "server/pb.h"
#include "spmm/v1/layer_catalog.pb.h"

namespace spmmd::server {

// Packed weights, on their devices or evicted from them. Shared by every layer that was registered with the same
// content and packing options. All but the residence is immutable.
struct LayerContent {
  struct Copy {
    Device* device = nullptr;
    int64_t row_begin = 0;
    int64_t row_end = 0;
    uint64_t bytes = 0;  // on the device
  };

  LayerContent() = default;
  ~LayerContent();
  LayerContent(const LayerContent&) = delete;
  LayerContent& operator=(const LayerContent&) = delete;

  std::string key;  // ContentKey()
  int64_t m = 0;
  int64_t k = 0;
  int64_t nnz = 0;
  DType dtype = DType::kF16;
  Format format = Format::kDense;
  std::string format_reason;
  bool has_bias = false;
  std::vector<pb::LayerSection> sections;
  uint64_t bytes = 0;  // sum of the sections
  std::string xxh3;    // 32 hex digits
  double pack_seconds = 0;
  std::vector<Copy> copies;

  mutable Residence residence;
  // Set once it has copies.
  Residency* residency = nullptr;

  // Rows are split over the devices; else every copy is whole.
  bool sharded() const { return copies.size() > 1 && copies.front().row_end < m; }
  // What differs from device to device: each shard's rows, or one matrix.
  int64_t parts() const { return sharded() ? static_cast<int64_t>(copies.size()) : 1; }
  // Of all parts, in host memory.
  uint64_t stored_bytes() const { return bytes; }
  // Of `resident`, the layer on a device; null when there is none.
  const ResidentLayer* On(const ResidentCopies& resident, const Device* device) const;
};

class ServedLayer {
 public:
  // `spec` is normalised. Counts itself in the metrics until it is destroyed.
  ServedLayer(const pb::LayerSpec& spec, int64_t version, std::shared_ptr<const LayerContent> content,
              absl::Time created, Metrics* metrics);
  // Frees the content when this was its last user, then notifies freed().
  ~ServedLayer();
  ServedLayer(const ServedLayer&) = delete;
  ServedLayer& operator=(const ServedLayer&) = delete;

  const std::string& name() const { return name_; }
  int64_t version() const { return version_; }
  const LayerContent& content() const { return *content_; }
  const std::shared_ptr<const LayerContent>& shared_content() const { return content_; }
  const std::optional<float>& activation_threshold() const { return activation_threshold_; }
  bool deterministic() const { return deterministic_; }
  bool pinned() const { return pinned_.load(std::memory_order_relaxed); }
  void set_pinned(bool pinned) const;
  // Replaces the measured table.
  void SetSpeeds(std::vector<pb::LayerSpeed> speeds) const;
  // The message; `full` adds sections and speeds.
  void Describe(bool full, pb::Layer* out) const;
  // Notified at the end of the destructor.
  const std::shared_ptr<absl::Notification>& freed() const { return freed_; }

 private:
  const std::string name_;
  const int64_t version_;
  const pb::Placement placement_;
  const std::optional<float> activation_threshold_;
  const bool deterministic_;
  const absl::Time created_;
  Metrics* const metrics_;
  std::shared_ptr<const LayerContent> content_;
  mutable std::atomic<bool> pinned_;
  mutable absl::Mutex mutex_;
  mutable std::vector<pb::LayerSpeed> speeds_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<absl::Notification> freed_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_CATALOG_LAYER_H_
