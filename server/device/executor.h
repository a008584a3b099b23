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

// CANCELLED or DEADLINE_EXCEEDED when the job is not worth running any more. Looked at before a job runs and between
// its launches.
absl::Status CheckWanted(const Job& job, absl::Time now);

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

  // Waits until nothing waits or runs and every `done` has returned. Not from within a `done`.
  void Drain();
  // Ends waiting jobs with UNAVAILABLE, waits for the running one and joins the thread. Idempotent.
  void Stop();

  const Options& options() const { return options_; }
  int64_t depth() const;
  uint64_t bytes() const;

 private:
  void Loop();
  // Runs the job that holds the device, gives the device back and ends the job.
  void RunOne(const std::shared_ptr<Job>& job) ABSL_LOCKS_EXCLUDED(mutex_);
  void Finish(Job& job, absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Why the job must not wait, or OK.
  absl::Status Admit(const Job& job) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // When a refused caller may expect a place: the time that the jobs waiting will take.
  absl::Duration RetryAfter() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const std::function<absl::Status(Job&)> run_;
  Metrics* const metrics_;

  mutable absl::Mutex mutex_;
  absl::CondVar work_;  // for the thread: a job waits and the device is free
  absl::CondVar idle_;  // for Drain and Stop: the last job ended
  std::list<std::shared_ptr<Job>> waiting_ ABSL_GUARDED_BY(mutex_);
  uint64_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t unfinished_ ABSL_GUARDED_BY(mutex_) = 0;  // taken, `done` not returned yet
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Duration average_run_ ABSL_GUARDED_BY(mutex_) = absl::ZeroDuration();
  std::thread thread_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_EXECUTOR_H_
