// Exact accounting of one memory (a device's, or the host's for uploads) under a limit: a reservation is made before
// the allocation it stands for and given back after the memory is freed, so `used` is never below what is really held.
#ifndef SPMMD_SERVER_DEVICE_MEMORY_BUDGET_H_
#define SPMMD_SERVER_DEVICE_MEMORY_BUDGET_H_

#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace spmmd::server {

enum class MemoryKind : uint8_t { kWeights = 0, kWorkspace = 1, kStaging = 2 };

class MemoryBudget {
 public:
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

  // RESOURCE_EXHAUSTED naming needed, free and limit when it does not fit. Zero bytes always fit.
  absl::StatusOr<Reservation> Reserve(MemoryKind kind, uint64_t bytes);
  // As Reserve, but adds to an existing reservation of the same budget and kind.
  absl::Status Grow(Reservation& reservation, uint64_t extra_bytes);

  uint64_t limit() const { return limit_; }
  uint64_t used(MemoryKind kind) const;
  uint64_t used() const;
  uint64_t free() const;

 private:
  absl::Status Take(MemoryKind kind, uint64_t bytes);
  void GiveBack(MemoryKind kind, uint64_t bytes);

  const std::string name_;
  const std::string reason_;
  const uint64_t limit_;
  mutable absl::Mutex mutex_;
  std::array<uint64_t, 3> used_ ABSL_GUARDED_BY(mutex_){};
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_MEMORY_BUDGET_H_
