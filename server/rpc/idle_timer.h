// Tells when something awaited has not come for too long.
#ifndef SPMMD_SERVER_RPC_IDLE_TIMER_H_
#define SPMMD_SERVER_RPC_IDLE_TIMER_H_

#include <functional>
#include <memory>

#include "absl/time/time.h"

namespace spmmd::server {

// Thread-safe. Start() and Stop() cost a lock, not a timer: at most one alarm is set at a time, and it goes off once in
// `timeout`, however often the countdown is started anew.
class IdleTimer {
 public:
  // `expired` is called once at most, on a thread of gRPC's, when a countdown ran out. It must not block and not call
  // this object. A `timeout` of zero never expires.
  IdleTimer(absl::Duration timeout, std::function<void()> expired);
  // `expired` is not called, nor still running, after this.
  ~IdleTimer();
  IdleTimer(const IdleTimer&) = delete;
  IdleTimer& operator=(const IdleTimer&) = delete;

  // Starts the countdown, from its beginning.
  void Start();
  // Stops it. False when it had run out: `expired` was called, and what came now came too late.
  bool Stop();

 private:
  class State;
  const std::shared_ptr<State> state_;  // shared with the alarm's callback
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_IDLE_TIMER_H_
