// The server's side of a ring (proto/ring/ring_layout.h): a thread that takes entries out of a caller's shared memory
// and runs them like requests that came over gRPC.
//
// An entry is copied before it is looked at, becomes an ExecuteRequest whose tensors are slices of the ring's region,
// and goes through Engine::Execute: the same checks, limits, batching, deadlines and errors. What the engine does on
// the calling thread it does on the ring's. When more entries wait, they are handed to the device's queue instead,
// where they can share a launch.
//
// The thread looks for entries for `spin` after the last one, giving way to other threads, and then sleeps on a futex.
#ifndef SPMMD_SERVER_RING_RING_H_
#define SPMMD_SERVER_RING_RING_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/ring/ring_layout.h"
#include "server/engine/engine.h"
#include "server/metrics/metrics.h"
#include "server/pb.h"
#include "server/shm/region.h"
#include "spmm/v1/sparse_matmul.pb.h"

namespace spmmd::server {

class Ring {
 public:
  struct Options {
    uint64_t offset = 0;  // of the header, in the region
    uint32_t entries = 0;
    std::vector<std::string> program_ids;
    absl::Duration spin;
    // Whether an entry may be run now; every OK is followed by one `ended`.
    std::function<absl::Status()> admit;
    std::function<void()> ended;
    std::function<void(const absl::Status&)> log_failure;
  };

  // Checks offset, entries and programs and writes the header. INVALID_ARGUMENT naming the field of OpenRingRequest,
  // NOT_FOUND for a program. The engine and the metrics must outlive the ring, and the pool the region.
  static absl::StatusOr<std::shared_ptr<Ring>> Create(Options options, std::shared_ptr<const Region> region,
                                                      RegionPool* pool, Engine* engine, RpcMetrics* metrics);
  ~Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // The ring's thread: returns when the ring is over and nothing is in flight any more. Called once.
  void Run();
  // Takes nothing more; what is in flight completes, or is cancelled with `cancel`. Does not wait.
  void Close(bool cancel);
  // Waits until Run() has returned.
  void AwaitEnd();

 private:
  // One entry in flight; reused, messages and all.
  struct Item {
    uint32_t program = UINT32_MAX;  // that `request` is made for
    pb::ExecuteRequest request;
    pb::ExecuteResponse response;
    uint64_t user_data = 0;
    absl::Time started;
    bool admitted = false;
    bool running = false;  // not completed yet
    Engine::Call call;
  };

  Ring(Options options, std::shared_ptr<const Region> region, RegionPool* pool, Engine* engine, RpcMetrics* metrics);

  // Takes and starts one entry. False when there is none, or no room for its completion.
  bool TakeOne();
  // Entries that wait, at most those for which there is room; fails the ring when the caller's counters cannot be.
  uint32_t Ready();
  void Sleep();
  // Fills in the item's request, or says what is wrong with the entry.
  absl::Status MakeRequest(const ring::Submission& entry, Item* item) const;
  absl::Status Place(const ring::Tensor& tensor, uint32_t rows, const std::string& path, pb::RegionSlice* slice) const;
  void Complete(Item* item, const absl::Status& status);
  void Fail(const std::string& why);

  const Options options_;
  const std::shared_ptr<const Region> region_;
  RegionSet regions_;  // the ring's own region, whatever becomes of its name
  Engine* const engine_;
  RpcMetrics* const metrics_;
  std::vector<pb::ExecuteRequest> templates_;  // by position in program_ids
  std::byte* const base_;
  ring::Header& header_;

  // Of the ring's thread.
  uint32_t taken_ = 0;

  std::atomic<bool> stopping_{false};
  std::atomic<bool> failed_{false};
  absl::Mutex mutex_;
  uint32_t completed_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<Item>> items_ ABSL_GUARDED_BY(mutex_);
  std::vector<Item*> free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RING_RING_H_
