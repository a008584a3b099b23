// Exact accounting of one memory (a device's, or the host's for uploads) under a limit: a reservation is made before
// the allocation it stands for and given back after the memory is freed, so `used` is never below what is really held.
//
// What holds memory that others may need more registers a reclaimer. A reservation that does not fit calls them in
// ascending order, on its own thread and without the budget's lock, until it fits or they have nothing left.
#ifndef SPMMD_SERVER_DEVICE_MEMORY_BUDGET_H_
#define SPMMD_SERVER_DEVICE_MEMORY_BUDGET_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace spmmd::server {

// kShadow: dense copies of layers, given back as soon as anything else needs the memory.
enum class MemoryKind : uint8_t { kWeights = 0, kWorkspace = 1, kStaging = 2, kShadow = 3 };

// Who gives memory back first.
inline constexpr int kReclaimCopies = 0;  // copies that only make something faster
inline constexpr int kReclaimLayers = 1;  // layers that nobody uses now

class MemoryBudget {
 public:
  // Frees memory of the budget, `bytes` of it if it can, and returns how much it freed; 0 when it can free nothing. It
  // is called again while bytes are missing. It may block, but not on a reservation from the same budget, nor on
  // somebody who waits for one: only one thread at a time runs reclaimers.
  using Reclaimer = std::function<uint64_t(uint64_t bytes)>;

  // Bytes set aside; gives them back when destroyed. Must not outlive its budget.
  class Reservation {
   public:
    Reservation() = default;
    Reservation(Reservation&& other) noexcept { *this = std::move(other); }
    Reservation& operator=(Reservation&& other) noexcept;
    Reservation(const Reservation&) = delete;
    Reservation& operator=(const Reservation&) = delete;
    ~Reservation() { Release(); }

    uint64_t bytes() const { return bytes_; }
    // Gives back all but `bytes` (<= bytes()).
    void ShrinkTo(uint64_t bytes);
    void Release() { ShrinkTo(0); }

   private:
    friend class MemoryBudget;
    MemoryBudget* budget_ = nullptr;
    MemoryKind kind_ = MemoryKind::kWeights;
    uint64_t bytes_ = 0;
  };

  // `name` appears in errors ("device cpu:0", "host memory for uploads"); `reason` is errors.h's kDeviceMemory or
  // kHostMemory.
  MemoryBudget(std::string name, absl::string_view reason, uint64_t limit_bytes);

  // RESOURCE_EXHAUSTED naming needed, free and limit when it does not fit, after all reclaimers have been asked. Zero
  // bytes always fit. Not from within a reclaimer.
  absl::StatusOr<Reservation> Reserve(MemoryKind kind, uint64_t bytes);
  // Takes only what is free, and nothing while memory is being reclaimed for somebody else: for what can do without.
  absl::StatusOr<Reservation> ReserveSpare(MemoryKind kind, uint64_t bytes);
  // As Reserve, but adds to an existing reservation of the same budget and kind.
  absl::Status Grow(Reservation& reservation, uint64_t extra_bytes);

  // Adds a reclaimer; those of one order are called in the order in which they came. Returns its id.
  int64_t AddReclaimer(int order, Reclaimer reclaimer);
  // It is not called again, and does not run when this returns. Not from within a reclaimer.
  void RemoveReclaimer(int64_t id);

  uint64_t limit() const { return limit_; }
  uint64_t used(MemoryKind kind) const;
  uint64_t used() const;
  uint64_t free() const;

 private:
  Reservation Made(MemoryKind kind, uint64_t bytes);
  // Takes the bytes and returns 0, or returns how many are missing.
  uint64_t TryTake(MemoryKind kind, uint64_t bytes);
  // TryTake, with reclaimers.
  absl::Status Take(MemoryKind kind, uint64_t bytes);
  absl::Status DoesNotFit(uint64_t bytes) const;
  void GiveBack(MemoryKind kind, uint64_t bytes);

  const std::string name_;
  const std::string reason_;
  const uint64_t limit_;
  // Held while reclaimers run, before `mutex_`.
  absl::Mutex reclaim_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  // By order, then id.
  std::map<std::pair<int, int64_t>, Reclaimer> reclaimers_ ABSL_GUARDED_BY(reclaim_mutex_);
  int64_t next_reclaimer_ ABSL_GUARDED_BY(reclaim_mutex_) = 1;
  mutable absl::Mutex mutex_;
  std::array<uint64_t, 4> used_ ABSL_GUARDED_BY(mutex_){};
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_MEMORY_BUDGET_H_
