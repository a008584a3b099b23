#include "server/rpc/blocking_runner.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "absl/synchronization/barrier.h"
#include "absl/synchronization/blocking_counter.h"

namespace spmmd::server {
namespace {

TEST(BlockingRunnerTest, TasksThatWaitForEachOtherAllGetAThread) {
  BlockingRunner runner;
  constexpr int kTasks = 40;
  auto* const barrier = new absl::Barrier(kTasks);  // deleted by the last task through it
  absl::BlockingCounter done(kTasks);
  for (int i = 0; i < kTasks; ++i) {
    runner.Run([&] {
      if (barrier->Block()) delete barrier;
      done.DecrementCount();
    });
  }
  done.Wait();
}

TEST(BlockingRunnerTest, DestructorWaitsForEveryTask) {
  std::atomic<int> ran{0};
  {
    BlockingRunner runner;
    for (int i = 0; i < 100; ++i) {
      runner.Run([&ran] { ran.fetch_add(1); });
    }
  }
  EXPECT_EQ(ran.load(), 100);
}

TEST(BlockingRunnerTest, WhatATaskHoldsIsFreedWithIt) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  {
    BlockingRunner runner;
    runner.Run([held = std::move(held)] {});
  }
  EXPECT_TRUE(watch.expired());
}

}  // namespace
}  // namespace spmmd::server
