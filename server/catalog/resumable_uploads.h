// What uploads that were cut off had received, kept for a while so that their callers can go on where they were. It
// stays under its reservation of upload memory, and goes early when another registration needs that.
#ifndef SPMMD_SERVER_CATALOG_RESUMABLE_UPLOADS_H_
#define SPMMD_SERVER_CATALOG_RESUMABLE_UPLOADS_H_

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/catalog/content.h"
#include "server/device/memory_budget.h"

namespace spmmd::server {

class ResumableUploads {
 public:
  // Of them, beside what memory allows.
  static constexpr size_t kMaxKept = 1024;

  struct Kept {
    std::unique_ptr<Content> content;
    MemoryBudget::Reservation memory;
  };

  // Keeps for `keep`, zero: not at all. `budget` is that of the reservations, and must outlive this object.
  ResumableUploads(absl::Duration keep, MemoryBudget* budget);
  ~ResumableUploads();
  ResumableUploads(const ResumableUploads&) = delete;
  ResumableUploads& operator=(const ResumableUploads&) = delete;

  // Under a content key; replaces what was kept under it.
  void Keep(const std::string& key, Kept kept) ABSL_LOCKS_EXCLUDED(mutex_);
  // What was kept, which is then the caller's.
  std::optional<Kept> Take(const std::string& key) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::string key;
    absl::Time until;
    Kept kept;
  };

  std::list<Entry> TakeLocked(const std::string& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops the oldest; its bytes.
  uint64_t Drop() ABSL_LOCKS_EXCLUDED(mutex_);
  void Expire() ABSL_LOCKS_EXCLUDED(mutex_);

  const absl::Duration keep_;
  MemoryBudget* const budget_;
  int64_t reclaimer_ = 0;
  absl::Mutex mutex_;
  absl::CondVar changed_;
  std::list<Entry> entries_ ABSL_GUARDED_BY(mutex_);  // oldest first
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_CATALOG_RESUMABLE_UPLOADS_H_
