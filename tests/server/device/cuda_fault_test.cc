// What a CUDA device does when calls fail: over the fake library alone.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "tests/server/device/cuda_harness.h"
#include "tests/server/device/fake_cuda.h"

namespace spmmd::server {
namespace {

using testing::CudaCore;
using ::testing::HasSubstr;
using testing::MatmulRequest;
using testing::RandomMatrix;
using testing::Series;
using testing::Unmeasured;

template <typename Function>
Function* Control(const char* name) {
  void* library = dlopen(testing::CudaLibraryPath().c_str(), RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<Function*>(dlsym(library, name));
}

class CudaFaultTest : public testing::CudaTest {
 protected:
  void Break() { Control<decltype(fake_cuda_break)>("fake_cuda_break")(0); }
  void TearDown() override { Control<decltype(fake_cuda_repair)>("fake_cuda_repair")(0); }
  uint64_t Allocated() { return Control<decltype(fake_cuda_allocated)>("fake_cuda_allocated")(0); }
};

TEST_F(CudaFaultTest, AStickyErrorLosesTheDeviceForGood) {
  CudaCore core(library_, Unmeasured());
  const DenseMatrix w = RandomMatrix(DType::kF16, 32, 32, 0.5, 1);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  const DenseMatrix x = RandomMatrix(DType::kF16, 1, 32, 0, 2);
  pb::ExecuteResponse response;
  ASSERT_TRUE(core.Execute(MatmulRequest("w", x.view()), &response).ok());
  int lost = 0;
  core.device->OnLost([&] { ++lost; });
  Break();
  const absl::Status first = core.Execute(MatmulRequest("w", x.view()), &response);
  EXPECT_EQ(first.code(), absl::StatusCode::kUnavailable) << first;
  EXPECT_EQ(ReasonOf(first), reason::kDeviceLost);
  EXPECT_FALSE(core.device->healthy());
  core.device->OnLost(nullptr);
  EXPECT_EQ(lost, 1);
  EXPECT_EQ(Series(core.metrics, "spmmd_device_healthy{device=\"cuda:0\"}"), 0);
  const absl::Status second = core.Execute(MatmulRequest("w", x.view()), &response);
  EXPECT_EQ(second.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.message()), HasSubstr("cuda:0"));
  const DenseMatrix other = RandomMatrix(DType::kF16, 32, 32, 0.5, 3);
  EXPECT_EQ(core.Register("other", other.view()).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(CudaFaultTest, ALostDeviceIsNoticedWithoutARequest) {
  CudaCore core(library_, Unmeasured());
  absl::Notification lost;
  core.device->OnLost([&] { lost.Notify(); });
  const absl::Time broken = absl::Now();
  Break();
  ASSERT_TRUE(lost.WaitForNotificationWithTimeout(absl::Seconds(30)));
  // Within a second on a machine that is not overloaded; the interval of the probes is what bounds it.
  EXPECT_LE(CudaDevice::kProbeInterval, absl::Milliseconds(500));
  std::printf("noticed after %s\n", absl::FormatDuration(absl::Now() - broken).c_str());
  core.device->OnLost(nullptr);
}

TEST_F(CudaFaultTest, AFailedLaunchFailsItsRequestAlone) {
  CudaCore core(library_, Unmeasured());
  const DenseMatrix w = RandomMatrix(DType::kF16, 32, 32, 0.5, 1);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  const DenseMatrix x = RandomMatrix(DType::kF16, 1, 32, 0, 2);
  pb::ExecuteResponse response;
  ASSERT_TRUE(core.Execute(MatmulRequest("w", x.view()), &response).ok());
  Control<decltype(fake_cuda_fail_launches)>("fake_cuda_fail_launches")(1);
  EXPECT_EQ(core.Execute(MatmulRequest("w", x.view()), &response).code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(core.device->healthy());
  // The counters that the failed launch left are cleared.
  const absl::Status status = core.Execute(MatmulRequest("w", x.view()), &response);
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(CudaFaultTest, RepeatedRequestsAreReplayedAndNeverStale) {
  const auto replays = Control<decltype(fake_cuda_replays)>("fake_cuda_replays");
  CudaCore core(library_, Unmeasured());
  const DenseMatrix x = RandomMatrix(DType::kF16, 2, 48, 0, 2);
  const DenseMatrix other_x = RandomMatrix(DType::kF16, 2, 48, 0, 3);
  const DenseMatrix one = RandomMatrix(DType::kF16, 1, 48, 0, 4);
  // A layer that is registered again may lie where the old one lay.
  for (uint32_t version = 1; version <= 3; ++version) {
    const DenseMatrix w = RandomMatrix(DType::kF16, 40, 48, 0.5, version);
    ASSERT_TRUE(core.Register("w", w.view()).ok());
    const int64_t before = replays();
    for (int i = 0; i < 4; ++i) {
      for (const DenseMatrix* input : {&x, &other_x, &one}) {
        pb::ExecuteResponse response;
        ASSERT_TRUE(core.Execute(MatmulRequest("w", input->view()), &response).ok());
        EXPECT_TRUE(CompareToReference(testing::ViewOf(response.outputs(0).tensor()),
                                       ReferenceMatmul(w.view(), input->view()), DefaultTolerance(DType::kF32, 48))
                        .ok());
        EXPECT_GT(response.timing().kernel().nanos(), 0);
      }
    }
    EXPECT_EQ(replays() - before, 10);  // all but the first of two rows and the first of one
    ASSERT_TRUE(testing::UnregisterFrom(core.catalog, "w").ok());
  }
}

struct SharedLaunch {
  pb::Format format;
  int64_t tokens;
};

class CudaGroupTest : public CudaFaultTest, public ::testing::WithParamInterface<SharedLaunch> {};

TEST_P(CudaGroupTest, LayersOfOneInputShareALaunch) {
  const auto groups = Control<decltype(fake_cuda_groups)>("fake_cuda_groups");
  const auto launches = Control<decltype(fake_cuda_launches)>("fake_cuda_launches");
  CudaCore core(library_, Unmeasured());
  const DenseMatrix x = RandomMatrix(DType::kF16, GetParam().tokens, 48, 0, 2);
  pb::ExecuteRequest request = MatmulRequest("q", x.view());
  std::vector<DenseMatrix> weights;
  for (const char* name : {"q", "k", "v"}) {
    weights.push_back(RandomMatrix(DType::kF16, 40 + static_cast<int64_t>(weights.size()), 48, 0.5, 7));
    pb::LayerSpec spec = testing::DenseSpec(name, weights.back().view());
    spec.set_format(GetParam().format);
    ASSERT_TRUE(core.Register(spec, weights.back().view()).ok());
    if (weights.size() == 1) continue;
    testing::AddMatmul(request.mutable_program(), name, name, "x");
    request.mutable_program()->add_outputs()->set_step(name);
  }
  for (int round = 0; round < 3; ++round) {  // the last ones are replayed
    const int64_t groups_before = groups();
    const int64_t launches_before = launches();
    pb::ExecuteResponse response;
    const absl::Status status = core.Execute(request, &response);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(launches() - launches_before, 3);
    EXPECT_EQ(groups() - groups_before, round == 0 ? 1 : 0);
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(CompareToReference(testing::ViewOf(response.outputs(i).tensor()),
                                     ReferenceMatmul(weights[static_cast<size_t>(i)].view(), x.view()),
                                     DefaultTolerance(DType::kF32, 48))
                      .ok());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, CudaGroupTest,
                         ::testing::Values(SharedLaunch{pb::FORMAT_ROW_STREAM, 1}, SharedLaunch{pb::FORMAT_BITMAP, 1},
                                           SharedLaunch{pb::FORMAT_BITMAP, 8}));

TEST_F(CudaFaultTest, WithoutGraphsRequestsRunAsTheyAre) {
  Control<decltype(fake_cuda_fail_graphs)>("fake_cuda_fail_graphs")(1);
  CudaCore core(library_, Unmeasured());
  const DenseMatrix w = RandomMatrix(DType::kF16, 32, 32, 0.5, 1);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  const DenseMatrix x = RandomMatrix(DType::kF16, 1, 32, 0, 2);
  for (int i = 0; i < 4; ++i) {
    pb::ExecuteResponse response;
    const absl::Status status = core.Execute(MatmulRequest("w", x.view()), &response);
    EXPECT_TRUE(status.ok()) << status;
  }
  Control<decltype(fake_cuda_fail_graphs)>("fake_cuda_fail_graphs")(0);
}

TEST_F(CudaFaultTest, NothingIsLeftOnTheDevice) {
  const uint64_t before = Allocated();
  {
    CudaCore core(library_, Unmeasured());
    const DenseMatrix w = RandomMatrix(DType::kF16, 64, 64, 0.5, 1);
    pb::LayerSpec spec = testing::DenseSpec("w", w.view());
    spec.set_has_bias(true);
    ASSERT_TRUE(core.Register(spec, w.view(), std::vector<float>(64, 1.0f)).ok());
    // What the budget says is what the device holds.
    EXPECT_EQ(Allocated() - before, core.device->budget().used());
    const DenseMatrix x = RandomMatrix(DType::kF16, 3, 64, 0, 2);
    pb::ExecuteResponse response;
    ASSERT_TRUE(core.Execute(MatmulRequest("w", x.view()), &response).ok());
    EXPECT_EQ(Allocated() - before, core.device->budget().used());
  }
  EXPECT_EQ(Allocated(), before);
}

}  // namespace
}  // namespace spmmd::server
