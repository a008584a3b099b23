// What replaces epoll_wait answers as the system's does, whether it looks or sleeps.
#include "server/rpc/busy_poll.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace spmmd::server {
namespace {

class BusyPollTest : public ::testing::TestWithParam<absl::Duration> {
 protected:
  BusyPollTest() {
    SetBusyPoll(GetParam());
    EXPECT_EQ(pipe(pipe_), 0);
    epoll_ = epoll_create1(0);
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.u64 = 42;
    EXPECT_EQ(epoll_ctl(epoll_, EPOLL_CTL_ADD, pipe_[0], &event), 0);
  }
  ~BusyPollTest() override {
    SetBusyPoll(absl::ZeroDuration());
    for (const int descriptor : {pipe_[0], pipe_[1], epoll_}) close(descriptor);
  }
  void Write() { ASSERT_EQ(write(pipe_[1], "x", 1), 1); }
  // The number of events; checks them.
  int Wait(int timeout) {
    epoll_event events[4] = {};
    const int count = epoll_wait(epoll_, events, 4, timeout);
    if (count > 0) {
      EXPECT_EQ(events[0].data.u64, 42);
      EXPECT_EQ(events[0].events, EPOLLIN);
      char byte = 0;
      EXPECT_EQ(read(pipe_[0], &byte, 1), 1);
    }
    return count;
  }

  int pipe_[2] = {};
  int epoll_ = -1;
};

TEST_P(BusyPollTest, FindsEvents) {
  for (int i = 0; i < 100; ++i) {
    Write();
    EXPECT_EQ(Wait(-1), 1);
    EXPECT_EQ(Wait(0), 0);
  }
  // One that comes while it waits.
  for (const absl::Duration delay : {absl::Microseconds(1), absl::Microseconds(300), absl::Milliseconds(20)}) {
    std::thread writer([&] {
      absl::SleepFor(delay);
      Write();
    });
    EXPECT_EQ(Wait(-1), 1);
    writer.join();
  }
}

TEST_P(BusyPollTest, KeepsTimeouts) {
  Write();
  EXPECT_EQ(Wait(1000), 1);
  for (const int timeout : {0, 1, 30}) {
    const absl::Time start = absl::Now();
    EXPECT_EQ(Wait(timeout), 0);
    EXPECT_GE(absl::Now() - start, absl::Milliseconds(timeout));
  }
}

TEST_P(BusyPollTest, PassesErrorsOn) {
  epoll_event event = {};
  EXPECT_EQ(epoll_wait(-1, &event, 1, -1), -1);
  EXPECT_EQ(errno, EBADF);
}

INSTANTIATE_TEST_SUITE_P(Windows, BusyPollTest,
                         ::testing::Values(absl::ZeroDuration(), absl::Microseconds(200), absl::Milliseconds(10)));

}  // namespace
}  // namespace spmmd::server
