// The bounded queue in front of a device and the threads that empty it.
//
// A job submitted while the device is idle runs on the submitting thread: a single small request pays no hand-off at
// all; when jobs come one soon after the other, a thread of the executor stays awake for the next one instead and takes
// it over: on a core that has just done the same, a run is shorter by more than that costs. Otherwise it waits its
// turn. At most one batch runs at a time; while it does, what waits becomes the next ones: jobs that can share a launch
// (batch.h) are joined up to a number of tokens. Deadlines and cancellation are checked when a job is submitted and
// again before it runs; a cancelled job leaves the queue at once.
//
// Fairness. Jobs wait by flow (the layers that they use); flows take turns, a batch each, and jobs of one flow keep
// their order but for those that join an earlier one. Background jobs run when no other waits, and every ninth turn.
#ifndef SPMMD_SERVER_DEVICE_EXECUTOR_H_
#define SPMMD_SERVER_DEVICE_EXECUTOR_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
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
    int64_t max_batch_tokens = 512;                    // rows of a batch of several jobs
    // How long a job that could share a launch may wait for others while the device is idle.
    absl::Duration max_delay = absl::ZeroDuration();
    // How long a thread stays awake for the next job, as long as jobs come that soon. Zero: not at all.
    absl::Duration look = absl::ZeroDuration();
  };
  // Executes jobs that can share a launch, or one.
  using Run = std::function<absl::Status(absl::Span<Job* const>)>;

  // Runs of the other jobs for one of the background jobs, while both wait.
  static constexpr int kForegroundTurns = 8;

  // `metrics` must outlive this object.
  Executor(Options options, Run run, Metrics* metrics);
  // Stops: see Stop().
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Takes the job; its `done` is called exactly once, possibly before Submit returns (run inline, refused, expired).
  // Refusals: RESOURCE_EXHAUSTED (QUEUE_FULL, QUEUE_BYTES) with RetryInfo, DEADLINE_EXCEEDED, CANCELLED, UNAVAILABLE
  // after Stop(). When a batch fails, its jobs run again, each alone, so that every one gets its own error; but for
  // UNAVAILABLE, which is the device's.
  void Submit(std::shared_ptr<Job> job);

  // Has the thread that is awake for the next job run `task`, which then makes and submits it: the whole way to the
  // device on a core that has just been there. False, and nothing happens, when none is awake or something waits. A
  // task must not block, nor outlive what it uses because of this: it runs soon, even after Stop().
  bool Offer(absl::AnyInvocable<void()>& task);

  // Takes a waiting job out of the queue and ends it with `status`; a running one stops before its next launch. No
  // effect on a job that has ended.
  void Cancel(const std::shared_ptr<Job>& job, const absl::Status& status);

  // Waits until nothing waits or runs and every `done` and every task has returned. Not from within one of them.
  void Drain();
  // Ends waiting jobs with UNAVAILABLE, waits for the running ones and joins the threads. Idempotent.
  void Stop();

  const Options& options() const { return options_; }
  int64_t depth() const;
  uint64_t bytes() const;
  // Jobs that wait or run: how busy the device is.
  int64_t unfinished() const;

 private:
  using JobList = std::list<std::shared_ptr<Job>>;
  // The waiting jobs of one priority.
  struct Queue {
    absl::flat_hash_map<const void*, JobList> flows;  // none of them empty
    std::list<const void*> turns;                     // every flow once
  };

  void Loop();
  // Looks for a job without the lock until one waits, or for `look`. Meanwhile Submit leaves jobs to it.
  void Look() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Has a thread look, unless one does or will.
  void StartLook() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Runs jobs that hold the device, gives the device back and ends them. True: the next ones may come soon.
  bool RunBatch(const std::vector<std::shared_ptr<Job>>& jobs) ABSL_LOCKS_EXCLUDED(mutex_);
  void Finish(Job& job, absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Why the job must not wait, or OK.
  absl::Status Admit(const Job& job) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Enqueue(std::shared_ptr<Job> job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Queue& QueueOf(const Job& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return queues_[job.background ? 1 : 0]; }
  // The next batch, taken out of the queue; empty when none is due before `*due`.
  std::vector<std::shared_ptr<Job>> TakeBatch(absl::Time now, absl::Time* due) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // When the first job of a flow has waited long enough for others to join it.
  absl::Time DueAt(const JobList& flow) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Took(const Job& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // When a refused caller may expect a place: the time that the jobs waiting will take.
  absl::Duration RetryAfter() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const Run run_;
  Metrics* const metrics_;

  mutable absl::Mutex mutex_;
  absl::CondVar work_;                                   // for the threads: a job waits and the device is free
  absl::CondVar idle_;                                   // for Drain and Stop: the last job ended
  std::array<Queue, 2> queues_ ABSL_GUARDED_BY(mutex_);  // the second: background
  int64_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t unfinished_ ABSL_GUARDED_BY(mutex_) = 0;    // taken, `done` not returned yet
  int foreground_turns_ ABSL_GUARDED_BY(mutex_) = 0;  // since a background job ran
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool looking_ ABSL_GUARDED_BY(mutex_) = false;    // a thread is awake and finds what waits
  bool will_look_ ABSL_GUARDED_BY(mutex_) = false;  // one that runs a task looks again afterwards
  absl::AnyInvocable<void()> offered_ ABSL_GUARDED_BY(mutex_);
  bool start_look_ ABSL_GUARDED_BY(mutex_) = false;  // the next thread to wake is to look
  std::atomic<bool> found_{false};                   // for the thread that looks: something waits, or it is the end
  absl::Time last_run_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();         // its end
  absl::Duration average_run_ ABSL_GUARDED_BY(mutex_) = absl::ZeroDuration();  // of one job
  // Two, so that one can start the next batch while the other still hands out the results of the last.
  std::array<std::thread, 2> threads_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_EXECUTOR_H_
