#include "server/device/executor.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/device/batch.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

absl::Status Stopped() {
  return MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "the server is shutting down");
}

// The job itself may live on in a handle for Cancel(): what it holds goes now.
void End(Job& job, absl::Status status) {
  job.layers.clear();
  job.copies.clear();
  job.leases.clear();
  job.buffers.clear();
  job.done(std::move(status));
  job.done = nullptr;
}

}  // namespace

absl::Status CheckWanted(const Job& job, absl::Time now) {
  if (job.deadline <= now) {
    return MakeError(absl::StatusCode::kDeadlineExceeded, reason::kDeadline, "deadline passed before the request ran");
  }
  if (job.cancelled.load(std::memory_order_relaxed)) {
    return MakeError(absl::StatusCode::kCancelled, reason::kCancelled, "cancelled before the request ran");
  }
  return absl::OkStatus();
}

Executor::Executor(Options options, Run run, Metrics* metrics)
    : options_(options), run_(std::move(run)), metrics_(metrics) {
  for (std::thread& thread : threads_) thread = std::thread([this] { Loop(); });
}

Executor::~Executor() { Stop(); }

void Executor::Submit(std::shared_ptr<Job> job) {
  job->submitted = absl::Now();
  bool run_now = false;
  absl::Status refusal;
  {
    absl::MutexLock lock(&mutex_);
    refusal = Admit(*job);
    if (refusal.ok()) {
      ++unfinished_;
      const bool may_wait = options_.max_delay > absl::ZeroDuration() && job->joinable;
      if (options_.run_inline && !busy_ && (!looking_ || job->stay) && waiting_ == 0 && !may_wait && !job->hand_off) {
        busy_ = true;
        run_now = true;
      } else {
        Enqueue(std::move(job));
        if (looking_) {
          found_.store(true, std::memory_order_release);
        } else if (!busy_) {
          work_.Signal();
        }
      }
    }
  }
  if (run_now) {
    const bool stay = job->stay;
    if (RunBatch({std::move(job)}) && !stay) {  // NOLINT(bugprone-use-after-move): enqueued only when not to run now
      absl::MutexLock lock(&mutex_);
      StartLook();
    }
  } else if (!refusal.ok()) {
    metrics_->Rejected(ReasonOf(refusal));
    End(*job, std::move(refusal));
  }
}

absl::Status Executor::Admit(const Job& job) const {
  if (stopping_) return Stopped();
  if (absl::Status wanted = CheckWanted(job, job.submitted); !wanted.ok()) return wanted;
  if (!busy_ && waiting_ == 0) return absl::OkStatus();
  if (waiting_ >= options_.max_depth) {
    return Exhausted(reason::kQueueFull,
                     absl::StrCat("queue full: ", waiting_, " requests wait, limit ", options_.max_depth), RetryAfter(),
                     {{"limit", absl::StrCat(options_.max_depth)}});
  }
  if (waiting_bytes_ + job.bytes > options_.max_bytes) {
    return Exhausted(reason::kQueueBytes,
                     absl::StrCat("queue full: ", waiting_bytes_, " bytes wait and the request has ", job.bytes,
                                  ", limit ", options_.max_bytes),
                     RetryAfter(),
                     {{"needed", absl::StrCat(job.bytes)},
                      {"free", absl::StrCat(options_.max_bytes - waiting_bytes_)},
                      {"limit", absl::StrCat(options_.max_bytes)}});
  }
  return absl::OkStatus();
}

absl::Duration Executor::RetryAfter() const {
  const absl::Duration wait = average_run_ * (waiting_ + 1);
  return std::clamp(wait, absl::Milliseconds(1), absl::Seconds(5));
}

void Executor::Enqueue(std::shared_ptr<Job> job) {
  ++waiting_;
  waiting_bytes_ += job->bytes;
  Queue& queue = QueueOf(*job);
  JobList& flow = queue.flows[job->flow];
  if (flow.empty()) queue.turns.push_back(job->flow);
  flow.push_back(std::move(job));
}

void Executor::Took(const Job& job) {
  --waiting_;
  waiting_bytes_ -= job.bytes;
}

absl::Time Executor::DueAt(const JobList& flow) const {
  const Job& first = *flow.front();
  if (options_.max_delay <= absl::ZeroDuration() || !first.joinable) return absl::InfinitePast();
  int64_t tokens = 0;
  for (const std::shared_ptr<Job>& job : flow) {
    tokens += job->rows;
    if (tokens >= options_.max_batch_tokens) return absl::InfinitePast();
  }
  // Not so late that the deadline passes while it waits.
  return std::min(first.submitted + options_.max_delay, first.deadline - 2 * average_run_);
}

std::vector<std::shared_ptr<Job>> Executor::TakeBatch(absl::Time now, absl::Time* due) {
  std::vector<std::shared_ptr<Job>> batch;
  *due = absl::InfiniteFuture();
  const bool background_first = foreground_turns_ >= kForegroundTurns;
  for (const size_t priority : {background_first ? size_t{1} : size_t{0}, background_first ? size_t{0} : size_t{1}}) {
    Queue& queue = queues_[priority];
    for (auto turn = queue.turns.begin(); turn != queue.turns.end(); ++turn) {
      JobList& flow = queue.flows.find(*turn)->second;
      if (const absl::Time at = DueAt(flow); at > now) {
        *due = std::min(*due, at);
        continue;
      }
      int64_t tokens = 0;
      for (auto job = flow.begin(); job != flow.end();) {
        const bool joins =
            batch.empty() || (tokens + (*job)->rows <= options_.max_batch_tokens && CanJoin(*batch.front(), **job));
        if (!joins) {
          ++job;
          continue;
        }
        tokens += (*job)->rows;
        Took(**job);
        batch.push_back(std::move(*job));
        job = flow.erase(job);
        if (!batch.front()->joinable || tokens >= options_.max_batch_tokens) break;
      }
      if (flow.empty()) {
        queue.flows.erase(*turn);
        queue.turns.erase(turn);
      } else {
        queue.turns.splice(queue.turns.end(), queue.turns, turn);
      }
      foreground_turns_ = priority == 1 || queues_[1].turns.empty() ? 0 : foreground_turns_ + 1;
      return batch;
    }
  }
  return batch;
}

bool Executor::RunBatch(const std::vector<std::shared_ptr<Job>>& jobs) {
  const absl::Time started = absl::Now();
  std::vector<Job*> wanted;
  std::vector<absl::Status> results(jobs.size());
  wanted.reserve(jobs.size());
  for (size_t i = 0; i < jobs.size(); ++i) {
    Job& job = *jobs[i];
    job.queue_time = started - job.submitted;
    results[i] = CheckWanted(job, started);
    if (results[i].ok()) {
      metrics_->RequestQueued(job.queue_time);
      wanted.push_back(&job);
    } else {
      metrics_->Rejected(ReasonOf(results[i]));
    }
  }
  int64_t rows = 0;
  for (const Job* job : wanted) rows += job->rows;
  for (Job* job : wanted) {
    job->batch_jobs = static_cast<int32_t>(wanted.size());
    job->batch_rows = rows;
  }
  absl::Status status;
  bool alone = false;
  if (!wanted.empty()) status = run_(wanted);
  if (!status.ok() && wanted.size() > 1 && !absl::IsUnavailable(status)) alone = true;
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (!results[i].ok()) continue;
    if (alone) {
      Job* const job[] = {jobs[i].get()};
      job[0]->kernel_time = absl::ZeroDuration();
      job[0]->batch_jobs = 1;
      job[0]->batch_rows = job[0]->rows;
      results[i] = CheckWanted(*job[0], absl::Now());
      if (results[i].ok()) results[i] = run_(job);
    } else {
      results[i] = status;
    }
  }
  const absl::Duration took = absl::Now() - started;
  bool soon = false;
  {
    absl::MutexLock lock(&mutex_);
    average_run_ += (took / static_cast<int64_t>(jobs.size()) - average_run_) / 8;
    busy_ = false;
    soon = options_.look > absl::ZeroDuration() && started - last_run_ < options_.look;
    last_run_ = started + took;
    if (waiting_ > 0) work_.Signal();
  }
  for (size_t i = 0; i < jobs.size(); ++i) Finish(*jobs[i], std::move(results[i]));
  return soon;
}

void Executor::Finish(Job& job, absl::Status status) {
  End(job, std::move(status));
  absl::MutexLock lock(&mutex_);
  if (--unfinished_ == 0) idle_.SignalAll();
}

void Executor::Cancel(const std::shared_ptr<Job>& job, const absl::Status& status) {
  job->cancelled.store(true, std::memory_order_relaxed);
  {
    absl::MutexLock lock(&mutex_);
    Queue& queue = QueueOf(*job);
    const auto flow = queue.flows.find(job->flow);
    if (flow == queue.flows.end()) return;
    const auto it = std::find(flow->second.begin(), flow->second.end(), job);
    if (it == flow->second.end()) return;
    flow->second.erase(it);
    Took(*job);
    if (flow->second.empty()) {
      queue.turns.remove(flow->first);
      queue.flows.erase(flow);
    }
  }
  metrics_->Rejected(ReasonOf(status));
  job->queue_time = absl::Now() - job->submitted;
  Finish(*job, status);
}

void Executor::Drain() {
  absl::MutexLock lock(&mutex_);
  while (unfinished_ > 0 || offered_ != nullptr || will_look_) idle_.Wait(&mutex_);
}

void Executor::Stop() {
  JobList dropped;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    for (Queue& queue : queues_) {
      for (auto& [key, flow] : queue.flows) dropped.splice(dropped.end(), flow);
      queue.flows.clear();
      queue.turns.clear();
    }
    waiting_ = 0;
    waiting_bytes_ = 0;
    found_.store(true, std::memory_order_release);
    work_.SignalAll();
    idle_.SignalAll();
  }
  for (const std::shared_ptr<Job>& job : dropped) {
    metrics_->Rejected(reason::kDraining);
    Finish(*job, Stopped());
  }
  {
    absl::MutexLock lock(&mutex_);
    while (unfinished_ > 0) idle_.Wait(&mutex_);
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

int64_t Executor::depth() const {
  absl::MutexLock lock(&mutex_);
  return waiting_;
}

uint64_t Executor::bytes() const {
  absl::MutexLock lock(&mutex_);
  return waiting_bytes_;
}

int64_t Executor::unfinished() const {
  absl::MutexLock lock(&mutex_);
  return unfinished_;
}

bool Executor::Offer(absl::AnyInvocable<void()>& task) {
  if (options_.look <= absl::ZeroDuration()) return false;
  absl::MutexLock lock(&mutex_);
  if (!looking_ || busy_ || waiting_ > 0 || offered_ != nullptr || stopping_) return false;
  offered_ = std::move(task);
  found_.store(true, std::memory_order_release);
  return true;
}

void Executor::StartLook() {
  if (looking_ || will_look_ || start_look_ || busy_ || stopping_) return;
  start_look_ = true;
  work_.Signal();
}

void Executor::Look() {
  constexpr int kLooksBetweenYields = 64;
  looking_ = true;
  mutex_.Unlock();
  const absl::Time end = absl::Now() + options_.look;
  for (int looks = 1; !found_.load(std::memory_order_acquire); ++looks) {
    if (looks % kLooksBetweenYields == 0) {
      if (absl::Now() >= end) break;
      sched_yield();  // somebody may want the core
    }
    Pause();
  }
  mutex_.Lock();
  found_.store(false, std::memory_order_relaxed);
  looking_ = false;
  if (offered_ == nullptr) return;
  absl::AnyInvocable<void()> task = std::exchange(offered_, nullptr);
  will_look_ = true;
  // Left to this thread while it looked; the task may run on another device for long.
  if (waiting_ > 0 && !busy_) work_.Signal();
  mutex_.Unlock();
  task();
  task = nullptr;
  mutex_.Lock();
  will_look_ = false;
  start_look_ = true;  // for this very thread
  idle_.SignalAll();
}

void Executor::Loop() {
  bool look = false;
  while (true) {
    std::vector<std::shared_ptr<Job>> batch;
    {
      absl::MutexLock lock(&mutex_);
      while (true) {
        if (stopping_) return;
        absl::Time due = absl::InfiniteFuture();
        if (!busy_ && waiting_ > 0) batch = TakeBatch(absl::Now(), &due);
        if (!batch.empty()) break;
        look = look || start_look_;
        start_look_ = false;
        if (std::exchange(look, false) && !looking_) {
          Look();
          continue;
        }
        if (due == absl::InfiniteFuture()) {
          work_.Wait(&mutex_);
        } else {
          work_.WaitWithTimeout(&mutex_, due - absl::Now());
        }
      }
      busy_ = true;
    }
    look = RunBatch(batch);
  }
}

}  // namespace spmmd::server
