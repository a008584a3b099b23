// Counts and times of models.
#include "server/oip/statistics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "tests/server/core/core_harness.h"

namespace spmmd::server::testing {
namespace {

pb::ExecuteTiming Timing(int64_t queue_ns, int64_t kernel_ns, int64_t total_ns, int requests, int64_t tokens) {
  pb::ExecuteTiming timing;
  timing.mutable_queue()->set_nanos(static_cast<int32_t>(queue_ns));
  timing.mutable_kernel()->set_nanos(static_cast<int32_t>(kernel_ns));
  timing.mutable_total()->set_nanos(static_cast<int32_t>(total_ns));
  timing.set_batch_requests(requests);
  timing.set_batch_tokens(tokens);
  return timing;
}

TEST(StatisticsTest, RequestsThatShareALaunchAreOneExecution) {
  ModelNumbers numbers;
  for (int i = 0; i < 3; ++i) {
    numbers.Succeeded(Timing(100, 600, 1000, 3, 6), 2, absl::Nanoseconds(10), absl::Nanoseconds(20));
  }
  numbers.Succeeded(Timing(0, 50, 60, 1, 1), 1, absl::Nanoseconds(1), absl::Nanoseconds(2));
  numbers.Failed(absl::Nanoseconds(7));
  inference::ModelStatistics out;
  numbers.Describe(&out);
  EXPECT_EQ(out.inference_count(), 7u);  // rows
  EXPECT_EQ(out.execution_count(), 2u);
  const inference::InferStatistics& stats = out.inference_stats();
  EXPECT_EQ(stats.success().count(), 4u);
  EXPECT_EQ(stats.success().ns(), 3u * 1030 + 63);
  EXPECT_EQ(stats.fail().count(), 1u);
  EXPECT_EQ(stats.fail().ns(), 7u);
  EXPECT_EQ(stats.queue().ns(), 300u);
  EXPECT_EQ(stats.compute_input().ns(), 3u * 310 + 11);
  EXPECT_EQ(stats.compute_infer().ns(), 3u * 600 + 50);
  EXPECT_EQ(stats.compute_output().ns(), 3u * 20 + 2);
  ASSERT_EQ(out.batch_stats_size(), 2);
  EXPECT_EQ(out.batch_stats(0).batch_size(), 1u);
  EXPECT_EQ(out.batch_stats(1).batch_size(), 6u);
  EXPECT_EQ(out.batch_stats(1).compute_infer().count(), 1u);
  EXPECT_EQ(out.batch_stats(1).compute_infer().ns(), 600u);
}

TEST(StatisticsTest, BatchSizesAreBounded) {
  ModelNumbers numbers;
  for (int tokens = 1; tokens <= 1000; ++tokens) {
    numbers.Succeeded(Timing(0, 1, 1, 1, tokens), tokens, absl::ZeroDuration(), absl::ZeroDuration());
  }
  inference::ModelStatistics out;
  numbers.Describe(&out);
  EXPECT_EQ(out.execution_count(), 1000u);
  EXPECT_LE(out.batch_stats_size(), 64);
}

TEST(StatisticsTest, NumbersGoWithTheirModel) {
  StatisticsTable table;
  Model model;
  model.name = "m";
  EXPECT_EQ(table.Find(model), nullptr);
  auto first = std::make_shared<int>(1);
  model.identity = first;
  const auto numbers = table.Of(model);
  EXPECT_EQ(table.Of(model), numbers);
  EXPECT_EQ(table.Find(model), numbers);
  auto second = std::make_shared<int>(2);
  model.identity = second;
  EXPECT_EQ(table.Find(model), nullptr);
  EXPECT_NE(table.Of(model), numbers);
}

// What the engine tells about launches is what was launched.
TEST(StatisticsTest, TheEngineSaysHowManySharedALaunch) {
  Core core;
  const DenseMatrix w = RandomMatrix(DType::kF16, 24, 40, 0.5, 1);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  const DenseMatrix x = RandomMatrix(DType::kF16, 3, 40, 0, 2);
  const pb::ExecuteRequest request = MatmulRequest("w", x.view());
  core.device.Hold();
  std::vector<pb::ExecuteResponse> responses(5);
  absl::BlockingCounter ended(5);
  Engine::Caller elsewhere;
  elsewhere.hand_off = true;
  for (size_t i = 0; i < responses.size(); ++i) {
    core.engine.Execute(request, &responses[i], absl::InfiniteFuture(), elsewhere, [&](const absl::Status& status) {
      EXPECT_TRUE(status.ok()) << status;
      ended.DecrementCount();
    });
    if (i == 0) core.device.AwaitRuns(1);
  }
  core.device.Release();
  ended.Wait();
  EXPECT_EQ(responses[0].timing().batch_requests(), 1);
  EXPECT_EQ(responses[0].timing().batch_tokens(), 3);
  for (size_t i = 1; i < responses.size(); ++i) {
    EXPECT_EQ(responses[i].timing().batch_requests(), 4) << i;
    EXPECT_EQ(responses[i].timing().batch_tokens(), 12) << i;
  }
}

}  // namespace
}  // namespace spmmd::server::testing
