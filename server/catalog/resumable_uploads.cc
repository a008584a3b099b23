#include "server/catalog/resumable_uploads.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"

namespace spmmd::server {

ResumableUploads::ResumableUploads(absl::Duration keep, MemoryBudget* budget) : keep_(keep), budget_(budget) {
  if (keep_ <= absl::ZeroDuration()) return;
  reclaimer_ = budget_->AddReclaimer(kReclaimCopies, [this](uint64_t /*bytes*/) { return Drop(); });
  thread_ = std::thread([this] { Expire(); });
}

ResumableUploads::~ResumableUploads() {
  if (!thread_.joinable()) return;
  budget_->RemoveReclaimer(reclaimer_);
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.Signal();
  }
  thread_.join();
}

std::list<ResumableUploads::Entry> ResumableUploads::TakeLocked(const std::string& key) {
  std::list<Entry> taken;
  const auto entry = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.key == key; });
  if (entry != entries_.end()) taken.splice(taken.end(), entries_, entry);
  return taken;
}

void ResumableUploads::Keep(const std::string& key, Kept kept) {
  if (keep_ <= absl::ZeroDuration()) return;
  std::list<Entry> dropped;  // freed without the lock
  absl::MutexLock lock(&mutex_);
  dropped = TakeLocked(key);
  if (entries_.size() >= kMaxKept) dropped.splice(dropped.end(), entries_, entries_.begin());
  entries_.push_back({key, absl::Now() + keep_, std::move(kept)});
  changed_.Signal();
}

std::optional<ResumableUploads::Kept> ResumableUploads::Take(const std::string& key) {
  absl::MutexLock lock(&mutex_);
  std::list<Entry> taken = TakeLocked(key);
  if (taken.empty()) return std::nullopt;
  return std::move(taken.front().kept);
}

uint64_t ResumableUploads::Drop() {
  std::list<Entry> dropped;
  {
    absl::MutexLock lock(&mutex_);
    if (entries_.empty()) return 0;
    dropped.splice(dropped.end(), entries_, entries_.begin());
  }
  return dropped.front().kept.memory.bytes();
}

void ResumableUploads::Expire() {
  while (true) {
    std::list<Entry> dropped;  // freed without the lock
    absl::MutexLock lock(&mutex_);
    if (stopping_) return;
    const absl::Time now = absl::Now();
    while (!entries_.empty() && entries_.front().until <= now) {
      dropped.splice(dropped.end(), entries_, entries_.begin());
    }
    if (!dropped.empty()) continue;
    if (entries_.empty()) {
      changed_.Wait(&mutex_);
    } else {
      changed_.WaitWithTimeout(&mutex_, entries_.front().until - now);
    }
  }
}

}  // namespace spmmd::server
