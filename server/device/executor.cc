#include "server/device/executor.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

absl::Status Stopped() {
  return MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "the server is shutting down");
}

// The job itself may live on in a handle for Cancel(): what it holds goes now.
void End(Job& job, absl::Status status) {
  job.layers.clear();
  job.leases.clear();
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

Executor::Executor(Options options, std::function<absl::Status(Job&)> run, Metrics* metrics)
    : options_(options), run_(std::move(run)), metrics_(metrics), thread_([this] { Loop(); }) {}

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
      if (options_.run_inline && !busy_ && waiting_.empty()) {
        busy_ = true;
        run_now = true;
      } else {
        waiting_bytes_ += job->bytes;
        waiting_.push_back(std::move(job));
        if (!busy_) work_.Signal();
      }
    }
  }
  if (run_now) {
    RunOne(job);
  } else if (!refusal.ok()) {
    metrics_->Rejected(ReasonOf(refusal));
    End(*job, std::move(refusal));
  }
}

absl::Status Executor::Admit(const Job& job) const {
  if (stopping_) return Stopped();
  if (absl::Status wanted = CheckWanted(job, job.submitted); !wanted.ok()) return wanted;
  if (!busy_ && waiting_.empty()) return absl::OkStatus();
  if (static_cast<int64_t>(waiting_.size()) >= options_.max_depth) {
    return Exhausted(reason::kQueueFull,
                     absl::StrCat("queue full: ", waiting_.size(), " requests wait, limit ", options_.max_depth),
                     RetryAfter(), {{"limit", absl::StrCat(options_.max_depth)}});
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
  const absl::Duration wait = average_run_ * static_cast<int64_t>(waiting_.size() + 1);
  return std::clamp(wait, absl::Milliseconds(1), absl::Seconds(5));
}

void Executor::RunOne(const std::shared_ptr<Job>& job) {
  const absl::Time started = absl::Now();
  job->queue_time = started - job->submitted;
  absl::Status status = CheckWanted(*job, started);
  if (status.ok()) {
    metrics_->RequestQueued(job->queue_time);
    status = run_(*job);
  } else {
    metrics_->Rejected(ReasonOf(status));
  }
  const absl::Duration took = absl::Now() - started;
  {
    absl::MutexLock lock(&mutex_);
    average_run_ += (took - average_run_) / 8;
    busy_ = false;
    if (!waiting_.empty()) work_.Signal();
  }
  Finish(*job, std::move(status));
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
    const auto it = std::find(waiting_.begin(), waiting_.end(), job);
    if (it == waiting_.end()) return;
    waiting_.erase(it);
    waiting_bytes_ -= job->bytes;
  }
  metrics_->Rejected(ReasonOf(status));
  job->queue_time = absl::Now() - job->submitted;
  Finish(*job, status);
}

void Executor::Drain() {
  absl::MutexLock lock(&mutex_);
  while (unfinished_ > 0) idle_.Wait(&mutex_);
}

void Executor::Stop() {
  std::list<std::shared_ptr<Job>> dropped;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    dropped.swap(waiting_);
    waiting_bytes_ = 0;
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
  if (thread_.joinable()) thread_.join();
}

int64_t Executor::depth() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(waiting_.size());
}

uint64_t Executor::bytes() const {
  absl::MutexLock lock(&mutex_);
  return waiting_bytes_;
}

void Executor::Loop() {
  while (true) {
    std::shared_ptr<Job> job;
    {
      absl::MutexLock lock(&mutex_);
      while (!stopping_ && (busy_ || waiting_.empty())) work_.Wait(&mutex_);
      if (stopping_) return;
      job = std::move(waiting_.front());
      waiting_.pop_front();
      waiting_bytes_ -= job->bytes;
      busy_ = true;
    }
    RunOne(job);
  }
}

}  // namespace spmmd::server
