#include "server/device/memory_budget.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "kernels/base/status_macros.h"
#include "server/errors.h"

namespace spmmd::server {

MemoryBudget::Reservation& MemoryBudget::Reservation::operator=(Reservation&& other) noexcept {
  if (this == &other) return *this;
  Release();
  budget_ = std::exchange(other.budget_, nullptr);
  kind_ = other.kind_;
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

void MemoryBudget::Reservation::ShrinkTo(uint64_t bytes) {
  if (budget_ == nullptr || bytes >= bytes_) return;
  budget_->GiveBack(kind_, bytes_ - bytes);
  bytes_ = bytes;
}

MemoryBudget::MemoryBudget(std::string name, absl::string_view reason, uint64_t limit_bytes)
    : name_(std::move(name)), reason_(reason), limit_(limit_bytes) {}

MemoryBudget::Reservation MemoryBudget::Made(MemoryKind kind, uint64_t bytes) {
  Reservation reservation;
  reservation.budget_ = this;
  reservation.kind_ = kind;
  reservation.bytes_ = bytes;
  return reservation;
}

absl::StatusOr<MemoryBudget::Reservation> MemoryBudget::Reserve(MemoryKind kind, uint64_t bytes) {
  SPMMD_RETURN_IF_ERROR(Take(kind, bytes));
  return Made(kind, bytes);
}

absl::StatusOr<MemoryBudget::Reservation> MemoryBudget::ReserveSpare(MemoryKind kind, uint64_t bytes) {
  if (!reclaim_mutex_.TryLock()) return DoesNotFit(bytes);
  const uint64_t missing = TryTake(kind, bytes);
  reclaim_mutex_.Unlock();
  if (missing > 0) return DoesNotFit(bytes);
  return Made(kind, bytes);
}

absl::Status MemoryBudget::Grow(Reservation& reservation, uint64_t extra_bytes) {
  if (reservation.budget_ != this) return absl::InternalError("a reservation of another budget");
  SPMMD_RETURN_IF_ERROR(Take(reservation.kind_, extra_bytes));
  reservation.bytes_ += extra_bytes;
  return absl::OkStatus();
}

uint64_t MemoryBudget::used(MemoryKind kind) const {
  absl::MutexLock lock(&mutex_);
  return used_[static_cast<size_t>(kind)];
}

uint64_t MemoryBudget::used() const {
  absl::MutexLock lock(&mutex_);
  return std::accumulate(used_.begin(), used_.end(), uint64_t{0});
}

uint64_t MemoryBudget::free() const { return limit_ - used(); }

int64_t MemoryBudget::AddReclaimer(int order, Reclaimer reclaimer) {
  absl::MutexLock lock(&reclaim_mutex_);
  const int64_t id = next_reclaimer_++;
  reclaimers_.emplace(std::pair(order, id), std::move(reclaimer));
  return id;
}

void MemoryBudget::RemoveReclaimer(int64_t id) {
  absl::MutexLock lock(&reclaim_mutex_);
  const auto it = std::find_if(reclaimers_.begin(), reclaimers_.end(),
                               [id](const auto& entry) { return entry.first.second == id; });
  if (it != reclaimers_.end()) reclaimers_.erase(it);
}

uint64_t MemoryBudget::TryTake(MemoryKind kind, uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const uint64_t free = limit_ - std::accumulate(used_.begin(), used_.end(), uint64_t{0});
  if (bytes > free) return bytes - free;
  used_[static_cast<size_t>(kind)] += bytes;
  return 0;
}

absl::Status MemoryBudget::Take(MemoryKind kind, uint64_t bytes) {
  uint64_t missing = TryTake(kind, bytes);
  if (missing == 0) return absl::OkStatus();
  // Nothing is freed for what could never fit.
  if (bytes > limit_) return DoesNotFit(bytes);
  // One thread after the other: what one is about to free, another must not miss.
  absl::MutexLock lock(&reclaim_mutex_);
  missing = TryTake(kind, bytes);
  for (auto it = reclaimers_.begin(); missing > 0 && it != reclaimers_.end();) {
    const uint64_t freed = it->second(missing);
    // Others may have taken what was freed; then more is needed.
    missing = TryTake(kind, bytes);
    if (freed == 0) ++it;
  }
  return missing == 0 ? absl::OkStatus() : DoesNotFit(bytes);
}

absl::Status MemoryBudget::DoesNotFit(uint64_t bytes) const {
  return OutOfMemory(reason_, name_, bytes, free(), limit_);
}

void MemoryBudget::GiveBack(MemoryKind kind, uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  used_[static_cast<size_t>(kind)] -= bytes;
}

}  // namespace spmmd::server
