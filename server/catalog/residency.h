// Which layers are in their devices' memory, and how they leave it and come back.
//
// A content is resident, or evicted: then its packed bytes are in host memory, or in a file of the packed cache. When a
// device's budget has no room for a reservation, the contents there that were used least recently leave it, but for
// those that are pinned or that somebody uses right now. They go to host memory, under a budget of its own; when that
// is full, its least recently used go to the packed cache; without a cache they cannot go, and the reservation is
// refused. A device whose memory is the host's (the CPU) gains nothing from the first step: its layers go straight to
// the cache. Of a replicated or sharded content all copies leave together.
//
// Load() brings a content back, once for however many callers want it. On its way from host memory it does not count
// there, so that what has to make room for it on the device can take its place.
#ifndef SPMMD_SERVER_CATALOG_RESIDENCY_H_
#define SPMMD_SERVER_CATALOG_RESIDENCY_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/catalog/packed_cache.h"
#include "server/device/device.h"
#include "server/device/memory_budget.h"
#include "server/metrics/metrics.h"
#include "server/pb.h"
#include "spmm/v1/layer_catalog.pb.h"

namespace spmmd::server {

struct LayerContent;

// The copies of a content, by LayerContent::copies: in memory for as long as this is held.
struct ResidentCopies {
  std::vector<std::unique_ptr<ResidentLayer>> layers;
};

// The part of a content that changes.
class Residence {
 public:
  // The copies; null when the content is evicted. Counts as a use.
  std::shared_ptr<const ResidentCopies> Use() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The same for a look, which counts as none.
  std::shared_ptr<const ResidentCopies> Peek() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return copies_;
  }
  pb::LayerState state() const ABSL_LOCKS_EXCLUDED(mutex_);
  bool resident() const { return state() == pb::LAYER_STATE_READY; }
  // Why the content is lost; empty unless it is.
  std::string error() const ABSL_LOCKS_EXCLUDED(mutex_);
  // On devices and in host memory.
  uint64_t bytes() const ABSL_LOCKS_EXCLUDED(mutex_);

  // A layer that serves the content came (+1) or went (-1): counted in spmmd_layers under the content's state.
  void AddServed(int change, Metrics* metrics) ABSL_LOCKS_EXCLUDED(mutex_);
  // Pinned while there is a pin.
  void AddPin(int change) { pins_.fetch_add(change, std::memory_order_relaxed); }

 private:
  friend class Residency;

  pb::LayerState StateLocked() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  std::atomic<int> pins_{0};
  mutable std::atomic<int64_t> last_use_{0};  // of a clock that ticks with every use

  mutable absl::Mutex mutex_;
  std::shared_ptr<const ResidentCopies> copies_ ABSL_GUARDED_BY(mutex_);
  // When evicted to host memory: what each part's device had.
  std::vector<StoredLayer> host_ ABSL_GUARDED_BY(mutex_);
  MemoryBudget::Reservation host_memory_ ABSL_GUARDED_BY(mutex_);
  bool on_disk_ ABSL_GUARDED_BY(mutex_) = false;  // when evicted to the cache: its files are held
  std::string error_ ABSL_GUARDED_BY(mutex_);
  int served_ ABSL_GUARDED_BY(mutex_) = 0;
};

class Residency {
 public:
  struct Options {
    // Off: nothing is evicted, and what does not fit is refused.
    bool evict = true;
    // Host memory for evicted layers.
    uint64_t host_limit_bytes = 0;
  };
  // Whether the caller still wants to wait.
  using Wanted = absl::FunctionRef<absl::Status()>;
  using Held = absl::Span<const std::shared_ptr<const ResidentCopies>>;
  // How long Load and Reserve wait for layers that others use.
  static constexpr absl::Duration kPatience = absl::Seconds(30);

  // All must outlive this object; `cache` may be null. All contents must be gone before it.
  Residency(const Options& options, const std::vector<Device*>& devices, PackedCache* cache, Metrics* metrics);
  ~Residency();
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  // A content whose copies have been loaded; from now on until Remove() it can be evicted.
  void Add(const LayerContent* content, ResidentCopies copies) ABSL_LOCKS_EXCLUDED(mutex_);
  // The content is about to be destroyed. Frees what it has everywhere but in the cache.
  void Remove(const LayerContent* content) ABSL_LOCKS_EXCLUDED(mutex_);

  // Brings the content to its devices unless it is there. Blocks. RESOURCE_EXHAUSTED when it does not fit beside what
  // is pinned, or stays in use; DATA_LOSS when its bytes are lost; the error of `wanted`. `held` are copies that the
  // caller does not let go of meanwhile.
  absl::StatusOr<std::shared_ptr<const ResidentCopies>> Load(const LayerContent& content, Wanted wanted, Held held = {})
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Device memory for weights. Where it would fit if layers in use could leave, waits for them.
  absl::StatusOr<MemoryBudget::Reservation> Reserve(Device* device, uint64_t bytes, Wanted wanted, Held held = {});

 private:
  // Evicts from `device`; the bytes freed there. Nothing, when all that can leave would not free `bytes`.
  uint64_t Reclaim(const Device* device, uint64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Moves one evicted content from host memory to the cache.
  uint64_t ReclaimHost() ABSL_LOCKS_EXCLUDED(mutex_);
  // False when it was in use after all or its bytes have nowhere to go.
  bool Evict(const LayerContent& content) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether `bytes` would be free if nothing were in use that is now, and something is.
  bool WorthWaiting(Device* device, uint64_t bytes, Held held) const ABSL_LOCKS_EXCLUDED(mutex_);

  // The packed bytes of every part, from the devices.
  absl::StatusOr<std::vector<StoredLayer>> Save(const LayerContent& content, const ResidentCopies& copies) const;
  // All parts' files are there, and held.
  bool HoldFiles(const LayerContent& content) const;
  void ReleaseFiles(const LayerContent& content) const;
  // HoldFiles, after writing those that are not there.
  absl::Status WriteAndHold(const LayerContent& content, const std::vector<StoredLayer>& parts) const;
  absl::StatusOr<std::vector<StoredLayer>> ReadFiles(const LayerContent& content) const;
  // From `host`, or from the cache when that is empty.
  absl::StatusOr<ResidentCopies> LoadCopies(const LayerContent& content, const std::vector<StoredLayer>& host,
                                            Wanted wanted, Held held);

  // Takes the content for a move, or does not when somebody else moves it or it is gone.
  bool TryBeginMove(const LayerContent* content) ABSL_LOCKS_EXCLUDED(mutex_);
  void EndMove(const LayerContent& content) ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;
  const std::vector<Device*> devices_;
  PackedCache* const cache_;
  Metrics* const metrics_;
  MemoryBudget host_budget_;
  std::vector<std::pair<Device*, int64_t>> reclaimers_;

  // Before every Residence::mutex_.
  mutable absl::Mutex mutex_;
  absl::CondVar moved_;
  absl::flat_hash_set<const LayerContent*> contents_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_set<const LayerContent*> moving_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_CATALOG_RESIDENCY_H_
