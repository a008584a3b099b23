#include "server/rpc/busy_poll.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <ctime>

namespace {

std::atomic<int64_t> window_nanoseconds{0};
// The events of the last wait came soon enough to have been worth looking for.
std::atomic<bool> pays{false};

int64_t MonotonicNanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

int Wait(int epoll, epoll_event* events, int max_events, int timeout) {
  return static_cast<int>(syscall(SYS_epoll_pwait, epoll, events, max_events, timeout, nullptr, 0));
}

}  // namespace

namespace spmmd::server {

void SetBusyPoll(absl::Duration window) {
  window_nanoseconds.store(absl::ToInt64Nanoseconds(window), std::memory_order_relaxed);
}

}  // namespace spmmd::server

extern "C" int epoll_wait(int epoll, epoll_event* events, int max_events, int timeout) {
  constexpr int kLooksBetweenYields = 32;  // about 10 us
  const int64_t window = window_nanoseconds.load(std::memory_order_relaxed);
  if (window == 0 || timeout == 0) return Wait(epoll, events, max_events, timeout);
  const int64_t start = MonotonicNanoseconds();
  // A timer that is due sooner is not kept waiting.
  const int64_t look = timeout < 0 || timeout * int64_t{1'000'000} > window ? window : 0;
  if (look > 0 && pays.load(std::memory_order_relaxed)) {
    for (int looks = 1; MonotonicNanoseconds() - start < look; ++looks) {
      if (const int count = Wait(epoll, events, max_events, 0); count != 0) return count;
      if (looks % kLooksBetweenYields == 0) sched_yield();  // somebody may want the core
    }
    pays.store(false, std::memory_order_relaxed);
    return Wait(epoll, events, max_events, timeout);
  }
  const int count = Wait(epoll, events, max_events, timeout);
  if (count > 0 && MonotonicNanoseconds() - start < window) pays.store(true, std::memory_order_relaxed);
  return count;
}
