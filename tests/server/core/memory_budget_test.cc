#include "server/device/memory_budget.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

constexpr MemoryKind kWeights = MemoryKind::kWeights;

// Reservations of equal size that a reclaimer gives back, one a call.
class Pool {
 public:
  Pool(MemoryBudget* budget, uint64_t piece) : budget_(budget), piece_(piece) {}

  void Fill(int pieces) {
    for (int i = 0; i < pieces; ++i) {
      auto reservation = budget_->ReserveSpare(kWeights, piece_);
      if (!reservation.ok()) return;
      absl::MutexLock lock(&mutex_);
      held_.push_back(*std::move(reservation));
    }
  }

  uint64_t Reclaim(uint64_t /*bytes*/) {
    MemoryBudget::Reservation last;  // given back without the lock
    absl::MutexLock lock(&mutex_);
    ++calls_;
    if (held_.empty()) return 0;
    last = std::move(held_.back());
    held_.pop_back();
    return last.bytes();
  }

  int held() const {
    absl::MutexLock lock(&mutex_);
    return static_cast<int>(held_.size());
  }
  int calls() const {
    absl::MutexLock lock(&mutex_);
    return calls_;
  }

 private:
  MemoryBudget* const budget_;
  const uint64_t piece_;
  mutable absl::Mutex mutex_;
  std::vector<MemoryBudget::Reservation> held_ ABSL_GUARDED_BY(mutex_);
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;
};

TEST(MemoryBudgetTest, CountsByKindAndNamesWhatIsMissing) {
  MemoryBudget budget("device cpu:0", reason::kDeviceMemory, 1000);
  auto weights = budget.Reserve(kWeights, 600);
  auto staging = budget.Reserve(MemoryKind::kStaging, 100);
  ASSERT_TRUE(weights.ok() && staging.ok());
  EXPECT_EQ(budget.used(kWeights), 600u);
  EXPECT_EQ(budget.used(), 700u);
  EXPECT_EQ(budget.free(), 300u);
  const absl::Status refused = budget.Reserve(kWeights, 301).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_NE(refused.message().find("301"), std::string::npos) << refused;
  EXPECT_NE(refused.message().find("300"), std::string::npos) << refused;
  EXPECT_NE(refused.message().find("1000"), std::string::npos) << refused;
  weights->ShrinkTo(200);
  EXPECT_TRUE(budget.Grow(*staging, 600).ok());
  EXPECT_FALSE(budget.Grow(*staging, 101).ok());
  EXPECT_EQ(budget.used(MemoryKind::kStaging), 700u);
  weights->Release();
  staging->Release();
  EXPECT_EQ(budget.used(), 0u);
}

TEST(MemoryBudgetTest, ReclaimsInOrderAndNoMoreThanNeeded) {
  MemoryBudget budget("device cpu:0", reason::kDeviceMemory, 1000);
  Pool copies(&budget, 100);
  Pool layers(&budget, 100);
  // Added in the wrong order.
  budget.AddReclaimer(kReclaimLayers, [&](uint64_t bytes) { return layers.Reclaim(bytes); });
  budget.AddReclaimer(kReclaimCopies, [&](uint64_t bytes) { return copies.Reclaim(bytes); });
  layers.Fill(5);
  copies.Fill(5);
  auto small = budget.Reserve(kWeights, 150);
  ASSERT_TRUE(small.ok()) << small.status();
  EXPECT_EQ(copies.held(), 3);
  EXPECT_EQ(layers.held(), 5);
  auto large = budget.Reserve(MemoryKind::kWorkspace, 500);
  ASSERT_TRUE(large.ok()) << large.status();
  EXPECT_EQ(copies.held(), 0);
  EXPECT_EQ(layers.held(), 3);
  EXPECT_EQ(budget.used(), 950u);
  // Grow reclaims too.
  EXPECT_TRUE(budget.Grow(*large, 100).ok());
  EXPECT_EQ(layers.held(), 2);
}

TEST(MemoryBudgetTest, FreesNothingForWhatCouldNeverFitOrCanDoWithout) {
  MemoryBudget budget("device cpu:0", reason::kDeviceMemory, 1000);
  Pool pool(&budget, 100);
  budget.AddReclaimer(kReclaimCopies, [&](uint64_t bytes) { return pool.Reclaim(bytes); });
  pool.Fill(10);
  EXPECT_TRUE(absl::IsResourceExhausted(budget.Reserve(kWeights, 1001).status()));
  EXPECT_TRUE(absl::IsResourceExhausted(budget.ReserveSpare(kWeights, 1).status()));
  EXPECT_EQ(pool.calls(), 0);
  EXPECT_EQ(pool.held(), 10);
}

TEST(MemoryBudgetTest, WhatIsGivenBackMeanwhileCounts) {
  MemoryBudget budget("device cpu:0", reason::kDeviceMemory, 1000);
  auto all = budget.Reserve(kWeights, 1000);
  ASSERT_TRUE(all.ok());
  // Frees nothing of its own, but somebody else gives back at that moment.
  budget.AddReclaimer(kReclaimCopies, [&](uint64_t /*bytes*/) {
    all->Release();
    return uint64_t{0};
  });
  EXPECT_TRUE(budget.Reserve(kWeights, 400).ok());
}

TEST(MemoryBudgetTest, RemovalWaitsForTheReclaimerThatRuns) {
  MemoryBudget budget("device cpu:0", reason::kDeviceMemory, 100);
  auto all = budget.Reserve(kWeights, 100);
  ASSERT_TRUE(all.ok());
  absl::Notification running;
  absl::Notification go_on;
  std::atomic<bool> ended{false};
  const int64_t id = budget.AddReclaimer(kReclaimCopies, [&](uint64_t /*bytes*/) {
    running.Notify();
    go_on.WaitForNotification();
    ended = true;
    return uint64_t{0};
  });
  std::thread reserving([&] { EXPECT_FALSE(budget.Reserve(kWeights, 1).ok()); });
  running.WaitForNotification();
  // The budget answers others while a reclaimer runs.
  EXPECT_EQ(budget.free(), 0u);
  EXPECT_FALSE(budget.ReserveSpare(kWeights, 1).ok());
  std::thread removing([&] {
    budget.RemoveReclaimer(id);
    EXPECT_TRUE(ended.load());
  });
  go_on.Notify();
  removing.join();
  reserving.join();
  EXPECT_FALSE(budget.Reserve(kWeights, 1).ok());  // a second call would notify twice, and abort
}

// Many threads over a budget that holds little more than each needs: what fits is never refused, because what one
// thread frees another may take but cannot lose.
TEST(MemoryBudgetTest, ManyThreadsReserveAndReclaim) {
  constexpr uint64_t kPiece = 64;
  constexpr int kThreads = 6;
  constexpr int kRounds = 400;
  MemoryBudget budget("device cpu:0", reason::kDeviceMemory, kPiece * (kThreads + 2));
  Pool copies(&budget, kPiece);
  Pool layers(&budget, kPiece);
  budget.AddReclaimer(kReclaimCopies, [&](uint64_t bytes) { return copies.Reclaim(bytes); });
  budget.AddReclaimer(kReclaimLayers, [&](uint64_t bytes) { return layers.Reclaim(bytes); });
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Pool& pool = t % 2 == 0 ? copies : layers;
      for (int round = 0; round < kRounds; ++round) {
        if (!budget.Reserve(MemoryKind::kWorkspace, kPiece).ok()) ++refused;
        EXPECT_LE(budget.used(), budget.limit());
        pool.Fill(1 + round % 3);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused, 0);
  EXPECT_EQ(budget.used(MemoryKind::kWorkspace), 0u);
  EXPECT_EQ(budget.used(), kPiece * static_cast<uint64_t>(copies.held() + layers.held()));
}

}  // namespace
}  // namespace spmmd::server
