#include "server/metrics/metrics.h"

#include <gtest/gtest.h>

#include <set>

#include "tests/server/core/core_harness.h"

namespace spmmd::server {
namespace {

using testing::Series;

TEST(MetricsTest, RequestsCountByCodeAndRunningReturnsToZero) {
  Metrics metrics;
  RpcMetrics& rpc = metrics.Rpc("spmm.v1.SparseMatmul/Execute");
  EXPECT_EQ(&rpc, &metrics.Rpc("spmm.v1.SparseMatmul/Execute"));
  rpc.Started();
  rpc.Started();
  EXPECT_EQ(Series(metrics, R"(spmmd_requests_running{rpc="spmm.v1.SparseMatmul/Execute"})"), 2);
  rpc.Finished(absl::StatusCode::kOk, absl::Microseconds(20));
  rpc.Finished(static_cast<absl::StatusCode>(1234), absl::Microseconds(20));
  EXPECT_EQ(Series(metrics, R"(spmmd_requests_running{rpc="spmm.v1.SparseMatmul/Execute"})"), 0);
  EXPECT_EQ(Series(metrics, R"(spmmd_requests_total{code="OK",rpc="spmm.v1.SparseMatmul/Execute"})"), 1);
  EXPECT_EQ(Series(metrics, R"(spmmd_requests_total{code="UNKNOWN",rpc="spmm.v1.SparseMatmul/Execute"})"), 1);
  EXPECT_EQ(Series(metrics, R"(spmmd_request_duration_seconds_bucket{rpc="spmm.v1.SparseMatmul/Execute",le="1e-05"})"),
            0);
  EXPECT_EQ(
      Series(metrics, R"(spmmd_request_duration_seconds_bucket{rpc="spmm.v1.SparseMatmul/Execute",le="2.5e-05"})"), 2);
}

TEST(MetricsTest, BandwidthComesFromBytesAndKernelTime) {
  Metrics metrics({.layer_label_cap = 10, .bandwidth_window = absl::ZeroDuration()});
  metrics.AddDevice("cpu:0", [] {
    DeviceSample sample;
    sample.measured_bandwidth = 4e9;
    sample.limit_bytes = 100;
    sample.weights_bytes = 30;
    return sample;
  });
  KernelMetrics& kernel = metrics.Kernel("cpu:0", "k", "BITMAP");
  EXPECT_EQ(Series(metrics, R"(spmmd_hbm_bandwidth_bytes_per_second{device="cpu:0"})"), 0);
  kernel.Launched(absl::Milliseconds(2), 2'000'000, 500);
  kernel.Launched(absl::Milliseconds(2), 2'000'000, 500);
  EXPECT_EQ(Series(metrics, R"(spmmd_hbm_bandwidth_bytes_per_second{device="cpu:0"})"), 1e9);
  kernel.Launched(absl::Milliseconds(1), 2'000'000, 500);
  EXPECT_EQ(Series(metrics, R"(spmmd_hbm_bandwidth_ratio{device="cpu:0"})"), 0.5);
  // Nothing ran since.
  EXPECT_EQ(Series(metrics, R"(spmmd_hbm_bandwidth_ratio{device="cpu:0"})"), 0);
  EXPECT_EQ(Series(metrics, R"(spmmd_kernel_bytes_total{device="cpu:0",kernel="k"})"), 6'000'000);
  EXPECT_EQ(Series(metrics, R"(spmmd_kernel_flops_total{device="cpu:0",kernel="k"})"), 1500);
  EXPECT_EQ(Series(metrics, R"(spmmd_device_memory_bytes{device="cpu:0",kind="free"})"), 70);
  EXPECT_EQ(Series(metrics, R"(spmmd_device_healthy{device="cpu:0"})"), 1);
  metrics.RemoveDevice("cpu:0");
  EXPECT_EQ(Series(metrics, R"(spmmd_device_memory_bytes{device="cpu:0",kind="free"})"), std::nullopt);
  EXPECT_EQ(Series(metrics, R"(spmmd_queue_depth{device="cpu:0"})"), std::nullopt);
}

TEST(MetricsTest, LayerSeriesAreCappedAndGoWithTheirLayers) {
  Metrics metrics({.layer_label_cap = 2, .bandwidth_window = absl::ZeroDuration()});
  metrics.AddLayerBytes("a", "BITMAP", 10);
  metrics.AddLayerBytes("a", "BITMAP", 5);  // a second version
  metrics.AddLayerBytes("b", "BITMAP", 20);
  metrics.AddLayerBytes("c", "BITMAP", 40);
  metrics.AddLayerBytes("d", "BITMAP", 80);
  EXPECT_EQ(Series(metrics, R"(spmmd_layer_bytes{format="BITMAP",layer="a"})"), 15);
  EXPECT_EQ(Series(metrics, R"(spmmd_layer_bytes{format="BITMAP",layer="b"})"), 20);
  EXPECT_EQ(Series(metrics, R"(spmmd_layer_bytes{format="BITMAP",layer="c"})"), std::nullopt);
  EXPECT_EQ(Series(metrics, R"(spmmd_layer_bytes{format="BITMAP",layer="_other"})"), 120);
  metrics.AddLayerBytes("a", "BITMAP", -15);
  EXPECT_EQ(Series(metrics, R"(spmmd_layer_bytes{format="BITMAP",layer="a"})"), std::nullopt);
  metrics.AddLayerBytes("e", "BITMAP", 1);  // takes the label that became free
  EXPECT_EQ(Series(metrics, R"(spmmd_layer_bytes{format="BITMAP",layer="e"})"), 1);
  metrics.AddLayerBytes("c", "BITMAP", -40);
  metrics.AddLayerBytes("d", "BITMAP", -80);
  EXPECT_EQ(Series(metrics, R"(spmmd_layer_bytes{format="BITMAP",layer="_other"})"), 0);
}

TEST(MetricsTest, LayersAreComparedWithDenseOnes) {
  testing::Core core;
  const DenseMatrix w = testing::RandomMatrix(DType::kF16, 64, 32, 0.5, 1);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  EXPECT_EQ(Series(core.metrics, R"(spmmd_layer_dense_bytes{format="BITMAP"})"), 64 * 32 * 2);
  pb::UnregisterLayerRequest request;
  request.mutable_layer()->set_name("w");
  pb::UnregisterLayerResponse response;
  ASSERT_TRUE(core.catalog.Unregister(request, &response).ok());
  EXPECT_EQ(Series(core.metrics, R"(spmmd_layer_dense_bytes{format="BITMAP"})"), 0);
}

TEST(MetricsTest, EveryContractNameIsThereAfterOneRequest) {
  testing::Core core;
  core.metrics.SetBuildInfo("0.1.0", "abc", "cpu");
  core.metrics.Rpc("spmm.v1.SparseMatmul/Execute").Started();
  core.metrics.Rpc("spmm.v1.SparseMatmul/Execute").Finished(absl::StatusCode::kOk, absl::Milliseconds(1));
  core.metrics.Rejected(reason::kQueueFull);
  const DenseMatrix w = testing::RandomMatrix(DType::kF16, 64, 32, 0.5, 1);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  const DenseMatrix x = testing::RandomMatrix(DType::kF32, 1, 32, 0, 2);
  pb::ExecuteResponse response;
  ASSERT_TRUE(core.Execute(testing::MatmulRequest("w", x.view()), &response).ok());
  core.metrics.SetShard(2, 5);
  const std::string text = core.metrics.Serialize();
  EXPECT_TRUE(absl::StrContains(text, "\nspmmd_shard_count{shard=\"2\"} 5\n"));
  for (const char* name :
       {"spmmd_build_info", "spmmd_requests_total", "spmmd_request_duration_seconds",
        "spmmd_request_queue_duration_seconds", "spmmd_batch_tokens", "spmmd_kernel_duration_seconds",
        "spmmd_kernel_bytes_total", "spmmd_kernel_flops_total", "spmmd_hbm_bandwidth_bytes_per_second",
        "spmmd_hbm_bandwidth_ratio", "spmmd_device_memory_bytes", "spmmd_layers", "spmmd_layer_bytes",
        "spmmd_layer_evictions_total", "spmmd_layer_loads_total", "spmmd_pack_duration_seconds", "spmmd_queue_depth",
        "spmmd_rejected_total"}) {
    EXPECT_TRUE(absl::StrContains(text, absl::StrCat("# TYPE ", name, " "))) << name;
    EXPECT_TRUE(absl::StrContains(text, absl::StrCat("\n", name))) << name << " has no series";
  }
}

}  // namespace
}  // namespace spmmd::server
