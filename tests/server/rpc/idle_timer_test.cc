#include "server/rpc/idle_timer.h"

#include <grpc/grpc.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

namespace spmmd::server {
namespace {

constexpr absl::Duration kShort = absl::Milliseconds(20);

// A server keeps gRPC up for as long as it lives; timers alone would start and stop it again and again.
class IdleTimerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { grpc_init(); }
  static void TearDownTestSuite() { grpc_shutdown(); }
};

TEST_F(IdleTimerTest, ExpiresOnceAndSaysSo) {
  std::atomic<int> calls{0};
  absl::Notification expired;
  IdleTimer timer(kShort, [&] {
    if (calls.fetch_add(1) == 0) expired.Notify();
  });
  const absl::Time start = absl::Now();
  timer.Start();
  expired.WaitForNotification();
  EXPECT_GE(absl::Now() - start, kShort);
  EXPECT_FALSE(timer.Stop());
  absl::SleepFor(3 * kShort);
  EXPECT_EQ(calls.load(), 1);
}

TEST_F(IdleTimerTest, AStoppedOneStaysSilentAndCanStartAgain) {
  absl::Notification expired;
  IdleTimer timer(kShort, [&] { expired.Notify(); });
  timer.Start();
  ASSERT_TRUE(timer.Stop());
  absl::SleepFor(3 * kShort);  // the alarm goes off and finds nothing to do
  EXPECT_FALSE(expired.HasBeenNotified());
  timer.Start();
  expired.WaitForNotification();
}

TEST_F(IdleTimerTest, StartingAnewPutsTheEndOff) {
  absl::Notification expired;
  const absl::Duration timeout = absl::Milliseconds(300);
  IdleTimer timer(timeout, [&] { expired.Notify(); });
  timer.Start();
  absl::SleepFor(timeout / 3);
  timer.Start();
  const absl::Time restarted = absl::Now();
  expired.WaitForNotification();
  EXPECT_GE(absl::Now() - restarted, timeout - absl::Milliseconds(1));
}

TEST_F(IdleTimerTest, ZeroNeverExpires) {
  IdleTimer timer(absl::ZeroDuration(), [] { FAIL(); });
  timer.Start();
  absl::SleepFor(kShort);
  EXPECT_TRUE(timer.Stop());
}

TEST_F(IdleTimerTest, NothingIsCalledOnceItIsGone) {
  for (int i = 0; i < 200; ++i) {
    auto alive = std::make_unique<std::atomic<bool>>(true);
    {
      IdleTimer timer(absl::Microseconds(i * 10), [&alive] { alive->store(true); });
      timer.Start();
      if (i % 3 == 0) timer.Stop();
      if (i % 2 == 0) absl::SleepFor(absl::Microseconds(i * 10));
    }
    alive.reset();  // AddressSanitizer sees a late call
  }
}

}  // namespace
}  // namespace spmmd::server
