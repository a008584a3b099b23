#include "server/device/memory_budget.h"

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

absl::StatusOr<MemoryBudget::Reservation> MemoryBudget::Reserve(MemoryKind kind, uint64_t bytes) {
  SPMMD_RETURN_IF_ERROR(Take(kind, bytes));
  Reservation reservation;
  reservation.budget_ = this;
  reservation.kind_ = kind;
  reservation.bytes_ = bytes;
  return reservation;
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

absl::Status MemoryBudget::Take(MemoryKind kind, uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const uint64_t free = limit_ - std::accumulate(used_.begin(), used_.end(), uint64_t{0});
  if (bytes > free) return OutOfMemory(reason_, name_, bytes, free, limit_);
  used_[static_cast<size_t>(kind)] += bytes;
  return absl::OkStatus();
}

void MemoryBudget::GiveBack(MemoryKind kind, uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  used_[static_cast<size_t>(kind)] -= bytes;
}

}  // namespace spmmd::server
