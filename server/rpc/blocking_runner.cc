#include "server/rpc/blocking_runner.h"

#include <thread>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace spmmd::server {

BlockingRunner::~BlockingRunner() {
  absl::MutexLock lock(&mutex_);
  stopping_ = true;
  mutex_.Await(absl::Condition(
      +[](int* threads) { return *threads == 0; }, &threads_));
}

void BlockingRunner::Run(absl::AnyInvocable<void()> task) {
  absl::MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
  if (idle_ >= static_cast<int>(tasks_.size())) return;
  ++threads_;
  // Detached: an idle thread leaves by itself, and the destructor counts them out.
  std::thread([this] { Loop(); }).detach();
}

void BlockingRunner::Loop() {
  const auto wanted = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_ || !tasks_.empty(); };
  absl::MutexLock lock(&mutex_);
  while (true) {
    ++idle_;
    mutex_.AwaitWithTimeout(absl::Condition(&wanted), absl::Seconds(10));
    --idle_;
    if (tasks_.empty()) break;  // stopping, or nothing to do for long
    absl::AnyInvocable<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    mutex_.Unlock();
    task();
    task = nullptr;  // what it holds is freed outside the lock
    mutex_.Lock();
  }
  --threads_;
}

}  // namespace spmmd::server
