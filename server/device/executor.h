// The bounded queue in front of a device and the thread that empties it.
//
// A job submitted while the device is idle runs on the submitting thread: a single small request pays no hand-off at
// all. Otherwise it waits its turn; the executor thread takes over as soon as the running job ends. At most one job
// runs at a time. Deadlines and cancellation are checked when a job is submitted and again before it runs; a cancelled
// job leaves the queue at once.
#ifndef SPMMD_SERVER_DEVICE_EXECUTOR_H_
#define SPMMD_SERVER_DEVICE_EXECUTOR_H_

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/plan.h"
#include "server/metrics/metrics.h"

namespace spmmd::server {

class Executor {
 public:
  struct Options {
    int64_t max_depth = 1024;                          // jobs waiting; >= 0 (0: nothing may wait)
    uint64_t max_bytes = uint64_t{256} * 1024 * 1024;  // of all jobs waiting
    bool run_inline = true;                            // on the submitting thread when idle
  };

  // `run` executes one job and returns its status. `metrics` must outlive this object.
  Executor(Options options, std::function<absl::Status(Job&)> run, Metrics* metrics);
  // Stops: see Stop().
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Takes the job; its `done` is called exactly once, possibly before Submit returns (run inline, refused, expired).
  // Refusals: RESOURCE_EXHAUSTED (QUEUE_FULL, QUEUE_BYTES) with RetryInfo, DEADLINE_EXCEEDED, CANCELLED, UNAVAILABLE
  // after Stop().
  void Submit(std::shared_ptr<Job> job);

  // Takes a waiting job out of the queue and ends it with `status`; a running one stops before its next launch. No
  // effect on a job that has ended.
  void Cancel(const std::shared_ptr<Job>& job, const absl::Status& status);

  // Waits until nothing waits or runs.
  void Drain();
  // Runs `body` while no job runs, for measurements that need the device to themselves; jobs wait meanwhile.
  void RunExclusive(const std::function<void()>& body);
  // Ends waiting jobs with UNAVAILABLE, waits for the running one and joins the thread. Idempotent.
  void Stop();

  int64_t depth() const;
  uint64_t bytes() const;

 private:
  void Loop();
  // Runs the job that holds the device, then finishes it.
  void RunOne(const std::shared_ptr<Job>& job);

  const Options options_;
  const std::function<absl::Status(Job&)> run_;
  Metrics* const metrics_;

  mutable absl::Mutex mutex_;
  std::list<std::shared_ptr<Job>> waiting_ ABSL_GUARDED_BY(mutex_);
  uint64_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  int exclusive_waiters_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_EXECUTOR_H_
