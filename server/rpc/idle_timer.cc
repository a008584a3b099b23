#include "server/rpc/idle_timer.h"

#include <grpc/support/time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/alarm.h"

namespace spmmd::server {

using Clock = std::chrono::steady_clock;

class IdleTimer::State : public std::enable_shared_from_this<IdleTimer::State> {
 public:
  State(absl::Duration timeout, std::function<void()> expired)
      : timeout_(absl::ToChronoNanoseconds(timeout)), expired_(std::move(expired)) {}

  void Start() {
    if (timeout_ <= Clock::duration::zero()) return;
    absl::MutexLock lock(&mutex_);
    due_ = Clock::now() + timeout_;
    if (alarm_ == nullptr) Schedule(timeout_);
  }

  bool Stop() {
    absl::MutexLock lock(&mutex_);
    due_.reset();
    return !has_expired_;
  }

  void Close() {
    std::unique_ptr<grpc::Alarm> alarm;
    absl::MutexLock lock(&mutex_);
    closed_ = true;
    alarm = std::move(alarm_);  // cancelled
  }

 private:
  void Schedule(Clock::duration delay) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const int64_t nanoseconds = std::max<int64_t>(std::chrono::nanoseconds(delay).count(), 0);
    // The one that this may replace has gone off: its callback is what runs here.
    alarm_ = std::make_unique<grpc::Alarm>();
    alarm_->Set(gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_nanos(nanoseconds, GPR_TIMESPAN)),
                [self = shared_from_this()](bool /*ok*/) { self->OnAlarm(); });
  }

  void OnAlarm() {
    absl::MutexLock lock(&mutex_);
    if (closed_) return;
    if (!due_.has_value()) {
      alarm_ = nullptr;  // the next Start() sets another
      return;
    }
    const Clock::duration left = *due_ - Clock::now();
    if (left > Clock::duration::zero()) {
      Schedule(left);
      return;
    }
    due_.reset();
    has_expired_ = true;
    expired_();
  }

  const Clock::duration timeout_;
  const std::function<void()> expired_;
  absl::Mutex mutex_;
  std::optional<Clock::time_point> due_ ABSL_GUARDED_BY(mutex_);  // none: stopped
  std::unique_ptr<grpc::Alarm> alarm_ ABSL_GUARDED_BY(mutex_);    // null: none is set
  bool has_expired_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

IdleTimer::IdleTimer(absl::Duration timeout, std::function<void()> expired)
    : state_(std::make_shared<State>(timeout, std::move(expired))) {}

IdleTimer::~IdleTimer() { state_->Close(); }

void IdleTimer::Start() { state_->Start(); }

bool IdleTimer::Stop() { return state_->Stop(); }

}  // namespace spmmd::server
