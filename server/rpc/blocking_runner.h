// Threads for calls that block (packing, waiting for a layer's last request), so that the threads that gRPC polls with
// never do.
#ifndef SPMMD_SERVER_RPC_BLOCKING_RUNNER_H_
#define SPMMD_SERVER_RPC_BLOCKING_RUNNER_H_

#include <deque>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace spmmd::server {

// Every task gets a thread at once, a new one when none is idle: one registration may wait for another that is still to
// finish, so a fixed number of threads could be used up by those that wait. Callers bound how many tasks there are.
class BlockingRunner {
 public:
  BlockingRunner() = default;
  // Waits for all tasks.
  ~BlockingRunner();
  BlockingRunner(const BlockingRunner&) = delete;
  BlockingRunner& operator=(const BlockingRunner&) = delete;

  void Run(absl::AnyInvocable<void()> task);

 private:
  void Loop();

  absl::Mutex mutex_;
  std::deque<absl::AnyInvocable<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  int threads_ ABSL_GUARDED_BY(mutex_) = 0;
  int idle_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_BLOCKING_RUNNER_H_
