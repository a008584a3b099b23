// Layers that leave a GPU's memory and come back.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/device/cuda_harness.h"

namespace spmmd::server {
namespace {

using testing::CudaCore;
using testing::DenseSpec;
using testing::MatmulRequest;
using testing::RandomMatrix;
using testing::Series;
using testing::Unmeasured;

class CudaResidencyTest : public testing::CudaTest {};

TEST_F(CudaResidencyTest, EvictedLayersComeBackAsTheyWere) {
  constexpr int64_t kRows = 512;
  constexpr int64_t kCols = 256;
  // Dense and sparse formats, with padding inside (K is no multiple of a pitch), with and without a bias.
  const std::vector<pb::Format> formats = {pb::FORMAT_DENSE, pb::FORMAT_BITMAP, pb::FORMAT_THREE_LAYER,
                                           pb::FORMAT_ROW_STREAM, pb::FORMAT_RLC_CSC};
  const auto spec_of = [](const std::string& name, pb::Format format, const DenseView& w) {
    pb::LayerSpec spec = DenseSpec(name, w);
    spec.set_format(format);
    return spec;
  };
  const auto run = [](CudaCore& core, const std::string& name, int64_t cols) -> std::string {
    const DenseMatrix x = RandomMatrix(DType::kF16, 3, cols, 0, 2);
    pb::ExecuteResponse response;
    const absl::Status status = core.Execute(MatmulRequest(name, x.view()), &response);
    EXPECT_TRUE(status.ok()) << name << ": " << status;
    return status.ok() ? response.outputs(0).tensor().data() : "";
  };
  // Registers and runs one of each format, so that the device has what runs need, and keeps it.
  const auto prepare = [&](CudaCore& core) {
    const DenseMatrix w = RandomMatrix(DType::kF16, kRows, kCols + 3, 0.5, 1);
    for (const pb::Format format : formats) {
      ASSERT_TRUE(core.Register(spec_of("w", format, w.view()), w.view()).ok());
      run(core, "w", kCols + 3);
      ASSERT_TRUE(testing::UnregisterFrom(core.catalog, "w").ok());
    }
  };
  DeviceOptions options = Unmeasured();
  uint64_t largest = 0;
  uint64_t kept = 0;
  {
    CudaCore core(library_, options);
    prepare(core);
    kept = core.device->budget().used();
    const DenseMatrix w = RandomMatrix(DType::kF16, kRows, kCols + 3, 0.5, 1);
    // Its upper bound is the largest.
    largest =
        (*core.catalog.Begin(spec_of("w", pb::FORMAT_THREE_LAYER, w.view())))->accepted().estimated_device_bytes();
  }
  // Two or three of them, beside what the runs need.
  options.memory_limit_bytes = kept + 2 * largest + (uint64_t{1} << 20);
  CudaCore core(library_, options, {}, {.evict = true, .host_limit_bytes = uint64_t{64} << 20});
  prepare(core);
  std::map<std::string, std::string> expected;
  std::map<std::string, int64_t> cols;
  // Until the first have had to leave.
  for (int copy = 0; copy < 8; ++copy) {
    for (const pb::Format format : formats) {
      const std::string name = absl::StrCat(pb::Format_Name(format), copy);
      cols[name] = kCols + (copy % 2 == 0 ? 0 : 3);
      const DenseMatrix w = RandomMatrix(DType::kF16, kRows, cols[name], 0.5, static_cast<uint32_t>(copy));
      pb::LayerSpec spec = spec_of(name, format, w.view());
      spec.set_has_bias(copy % 2 == 0);
      const std::vector<float> bias(copy % 2 == 0 ? kRows : 0, 0.5f);
      const auto layer = core.Register(spec, w.view(), bias);
      ASSERT_TRUE(layer.ok()) << name << ": " << layer.status();
      expected[name] = run(core, name, cols[name]);
    }
  }
  const auto evictions = [&] { return Series(core.metrics, "spmmd_layer_evictions_total{to=\"host\"}").value_or(0); };
  ASSERT_GT(evictions(), 10);
  for (int round = 0; round < 3; ++round) {
    for (const auto& [name, y] : expected) EXPECT_EQ(run(core, name, cols[name]), y) << name;
  }
  EXPECT_GT(Series(core.metrics, "spmmd_layer_loads_total{source=\"host\"}").value_or(0), 30);
  // From many threads, in different orders.
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      int turn = 0;
      for (const auto& [name, y] : expected) {
        if (++turn % 4 == t) {
          EXPECT_EQ(run(core, name, cols[name]), y) << name;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  core.engine.Drain();
  EXPECT_LE(core.device->budget().used(), core.device->budget().limit());
  for (const auto& [name, y] : expected) ASSERT_TRUE(testing::UnregisterFrom(core.catalog, name).ok());
  EXPECT_EQ(core.device->budget().used(MemoryKind::kWeights), 0);
  EXPECT_EQ(Series(core.metrics, "spmmd_host_layer_bytes"), 0);
}

}  // namespace
}  // namespace spmmd::server
