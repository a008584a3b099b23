#include "kernels/base/thread_pool.h"

#include <atomic>
#include <cfenv>
#include <chrono>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace spmmd {
namespace {

TEST(ThreadPoolTest, EveryTaskOnceOnAValidWorker) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.size(), threads);
    for (const int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
      std::atomic<bool> bad_worker{false};
      pool.ParallelFor(tasks, [&](int64_t task, int worker) {
        runs[static_cast<size_t>(task)].fetch_add(1);
        if (worker < 0 || worker >= threads) bad_worker = true;
      });
      for (const std::atomic<int>& count : runs) EXPECT_EQ(count.load(), 1);
      EXPECT_FALSE(bad_worker.load());
    }
  }
}

TEST(ThreadPoolTest, NegativeTaskCountsDoNothing) {
  ThreadPool pool(2);
  pool.ParallelFor(-3, [](int64_t, int) { FAIL(); });
}

TEST(ThreadPoolTest, WorkersNeverShareANumberAtATime) {
  // Scratch memory is indexed by worker: two bodies at once with the same number would race.
  ThreadPool pool(4);
  std::vector<std::atomic<int>> inside(4);
  std::atomic<int> clashes{0};
  pool.ParallelFor(2000, [&](int64_t, int worker) {
    if (inside[static_cast<size_t>(worker)].fetch_add(1) != 0) clashes.fetch_add(1);
    inside[static_cast<size_t>(worker)].fetch_sub(1);
  });
  EXPECT_EQ(clashes.load(), 0);
}

TEST(ThreadPoolTest, WritesAreVisibleToTheCaller) {
  ThreadPool pool(4);
  std::vector<int64_t> values(5000);
  for (int64_t round = 1; round <= 50; ++round) {
    pool.ParallelFor(5000, [&](int64_t task, int) { values[static_cast<size_t>(task)] += task * round; });
  }
  for (int64_t i = 0; i < 5000; ++i) EXPECT_EQ(values[static_cast<size_t>(i)], i * 1275);
}

TEST(ThreadPoolTest, WakesUpAfterSleeping) {
  ThreadPool pool(3);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // far longer than the workers spin
    std::atomic<int> sum{0};
    pool.ParallelFor(100, [&](int64_t task, int) { sum.fetch_add(static_cast<int>(task)); });
    EXPECT_EQ(sum.load(), 4950);
  }
}

TEST(ThreadPoolTest, NestedCallsRunInlineOnTheirWorker) {
  ThreadPool pool(3);
  ThreadPool other(2);
  std::atomic<int> wrong{0};
  std::atomic<int> inner_runs{0};
  pool.ParallelFor(20, [&](int64_t, int worker) {
    const std::thread::id self = std::this_thread::get_id();
    pool.ParallelFor(5, [&](int64_t, int inner) {
      inner_runs.fetch_add(1);
      if (inner != worker || std::this_thread::get_id() != self) wrong.fetch_add(1);
    });
  });
  EXPECT_EQ(inner_runs.load(), 100);
  // Through another pool and back: must not wait for itself.
  pool.ParallelFor(4, [&](int64_t, int) {
    other.ParallelFor(1, [&](int64_t, int) { pool.ParallelFor(2, [&](int64_t, int) { inner_runs.fetch_add(1); }); });
  });
  EXPECT_EQ(inner_runs.load(), 108);
  EXPECT_EQ(wrong.load(), 0);
}

TEST(ThreadPoolTest, CallersAreSerialised) {
  ThreadPool pool(3);
  std::atomic<int> active{0};
  std::atomic<int> total{0};
  std::atomic<int> overlaps{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&, c] {
      for (int i = 0; i < 50; ++i) {
        pool.ParallelFor(8, [&](int64_t, int) {
          const int seen = active.exchange(c + 1);
          if (seen != 0 && seen != c + 1) overlaps.fetch_add(1);
          total.fetch_add(1);
          active.store(0);
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total.load(), 4 * 50 * 8);
  EXPECT_EQ(overlaps.load(), 0);
}

TEST(ThreadPoolTest, WorkersHaveTheDefaultFloatingPointMode) {
  ASSERT_EQ(std::fesetround(FE_UPWARD), 0);
  ThreadPool pool(4);
  std::fesetround(FE_TONEAREST);
  std::atomic<int> wrong{0};
  pool.ParallelFor(200, [&](int64_t, int) {
    if (std::fegetround() != FE_TONEAREST) wrong.fetch_add(1);
  });
  EXPECT_EQ(wrong.load(), 0);
}

TEST(ThreadPoolTest, CreatedAndDestroyedIdle) {
  for (int i = 0; i < 50; ++i) ThreadPool pool(4);
}

TEST(ThreadPoolTest, DefaultPool) {
  ThreadPool& pool = DefaultThreadPool();
  EXPECT_EQ(&pool, &DefaultThreadPool());
  EXPECT_GE(pool.size(), 1);
}

}  // namespace
}  // namespace spmmd
