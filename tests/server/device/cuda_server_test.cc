// A whole server on the fake library's GPUs.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <string>
#include <vector>

#include "server/app.h"
#include "server/rpc/server.h"
#include "tests/server/device/fake_cuda.h"
#include "tests/server/testing/server_harness.h"

namespace spmmd::server {
namespace {

using testing::Explain;
using testing::MatmulRequest;
using testing::RandomVector;
using testing::TestLayer;
using testing::TestServer;

void OnFakeGpu(Options* options) {
  options->backend = BackendChoice::kAuto;
  options->cuda_library = SPMMD_FAKE_CUDA_LIBRARY;
  options->tune_kernels = false;  // loops of the CPU stand in for kernels
}

void SetBroken(bool broken) {
  void* library = dlopen(SPMMD_FAKE_CUDA_LIBRARY, RTLD_NOW | RTLD_NOLOAD);
  const char* name = broken ? "fake_cuda_break" : "fake_cuda_repair";
  reinterpret_cast<decltype(fake_cuda_break)*>(dlsym(library, name))(0);
}

grpc::Status RegisterHalf(TestServer& server, const std::string& name, const TestLayer& layer) {
  pb::LayerSpec spec = testing::DenseSpec(name, layer.m, layer.k);
  spec.set_store_dtype(pb::DATA_TYPE_F16);
  return server.Register(spec, {testing::Chunk(pb::CONTENT_PART_VALUES, 0, layer.Bytes())});
}

TEST(CudaServerTest, AutoTakesTheGpuAndServes) {
  TestServer server(OnFakeGpu);
  grpc::ClientContext info_context;
  pb::ServerInfoResponse info;
  ASSERT_TRUE(server.matmul().ServerInfo(&info_context, {}, &info).ok());
  EXPECT_EQ(info.backend(), "cuda");
  EXPECT_THAT(info.formats(), ::testing::Contains(pb::FORMAT_BITMAP));
  const TestLayer layer = TestLayer::Random(40, 56, 1);
  const grpc::Status registered = RegisterHalf(server, "w", layer);
  ASSERT_TRUE(registered.ok()) << registered.error_message();
  const std::vector<float> x = RandomVector(3 * 56, 2);
  pb::ExecuteResponse response;
  ASSERT_TRUE(server.Execute(MatmulRequest("w", x, 3, 56), &response).ok());
  const std::vector<float> y = testing::AsFloats(response.outputs(0).tensor().data());
  const std::vector<double> reference = layer.Reference(x, 3);
  ASSERT_EQ(y.size(), reference.size());
  for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], reference[i], 0.02) << i;
  EXPECT_GT(server.Metric("spmmd_kernel_bytes_total{device=\"cuda:0\""), 0);
  EXPECT_EQ(server.Metric("spmmd_device_healthy{device=\"cuda:0\"}"), 1);
}

TEST(CudaServerTest, ALostGpuShowsInHealthAndFailsCalls) {
  TestServer server(OnFakeGpu);
  const TestLayer layer = TestLayer::Random(16, 24, 1);
  ASSERT_TRUE(RegisterHalf(server, "w", layer).ok());
  ASSERT_TRUE(ProbeHealth(server.address(), absl::Seconds(30)).ok());
  SetBroken(true);
  // Nobody calls: the device's own probe finds it.
  EXPECT_TRUE(TestServer::Eventually([&] { return !ProbeHealth(server.address(), absl::Seconds(30)).ok(); }));
  pb::ExecuteResponse response;
  const auto failure = Explain(server.Execute(MatmulRequest("w", RandomVector(24, 2), 1, 24), &response));
  EXPECT_EQ(failure.code, grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(failure.reason, "DEVICE_LOST");
  EXPECT_TRUE(server.app().device_failed());
  EXPECT_EQ(server.Metric("spmmd_device_healthy{device=\"cuda:0\"}"), 0);
  SetBroken(false);
}

TEST(CudaServerTest, ADeviceThatIsNotThereIsAClearError) {
  auto options = MakeOptions({});
  ASSERT_TRUE(options.ok());
  OnFakeGpu(&*options);
  options->cuda_devices = {3};
  const auto app = App::Start(*options);
  EXPECT_EQ(app.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(app.status().message()), ::testing::HasSubstr("cuda:3"));
}

}  // namespace
}  // namespace spmmd::server
