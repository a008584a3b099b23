// A whole server on the fake library's GPUs.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/dispatch/cuda_library.h"
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

// With a thread of the device that stays awake, calls and streams are taken over by it, cancelled ones too.
TEST(CudaServerTest, AnAwakeDeviceThreadAnswersEveryCall) {
  TestServer server([](Options* options) {
    OnFakeGpu(options);
    options->device_spin = absl::Seconds(1);
  });
  const TestLayer layer = TestLayer::Random(40, 56, 1);
  ASSERT_TRUE(RegisterHalf(server, "w", layer).ok());
  const std::vector<float> x = RandomVector(56, 2);
  const pb::ExecuteRequest request = MatmulRequest("w", x, 1, 56);
  std::atomic<int> cancelled{0};
  const auto unary = [&] {
    for (int i = 0; i < 150; ++i) {
      grpc::ClientContext context;
      std::thread canceller;
      if (i % 5 == 4) canceller = std::thread([&context] { context.TryCancel(); });
      pb::ExecuteResponse response;
      const grpc::Status status = server.matmul().Execute(&context, request, &response);
      if (canceller.joinable()) canceller.join();
      if (status.error_code() == grpc::StatusCode::CANCELLED) cancelled.fetch_add(1);
      EXPECT_TRUE(status.ok() || i % 5 == 4) << status.error_message();
      EXPECT_EQ(response.outputs_size(), status.ok() ? 1 : 0);
    }
  };
  const auto streams = [&] {
    for (int i = 0; i < 15; ++i) {
      grpc::ClientContext context;
      auto stream = server.matmul().ExecuteStream(&context);
      pb::ExecuteStreamRequest message;
      *message.mutable_request() = request;
      for (uint64_t id = 1; id <= 10; ++id) {
        message.set_request_id(id);
        pb::ExecuteStreamResponse response;
        EXPECT_TRUE(stream->Write(message));
        EXPECT_TRUE(stream->Read(&response));
        EXPECT_EQ(response.request_id(), id);
        EXPECT_TRUE(response.has_response()) << response.error().message();
      }
      if (i % 2 == 0) {
        stream->Write(message);
        context.TryCancel();
        EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
      } else {
        stream->WritesDone();
        EXPECT_TRUE(stream->Finish().ok());
      }
    }
  };
  unary();  // one caller alone: what the thread is for
  streams();
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i) {
    callers.emplace_back(unary);
    callers.emplace_back(streams);
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_GT(cancelled, 0);
  for (const char* rpc : {"Execute", "ExecuteStream"}) {
    EXPECT_TRUE(TestServer::Eventually([&] {
      return server.Metric(std::string("spmmd_requests_running{rpc=\"spmm.v1.SparseMatmul/") + rpc + "\"}") == 0;
    })) << rpc;
  }
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

// Device memory of "another process": the fake library's handles work within one.
class IpcMemory {
 public:
  explicit IpcMemory(uint64_t bytes) : bytes_(bytes) {
    library_ = *CudaLibrary::Load(SPMMD_FAKE_CUDA_LIBRARY);
    EXPECT_EQ(library_->device_open(0, &device_), SPMMD_CUDA_OK);
    void* data = nullptr;
    EXPECT_EQ(library_->malloc(device_, bytes, &data), SPMMD_CUDA_OK);
    data_ = static_cast<std::byte*>(data);
  }
  ~IpcMemory() {
    library_->free(device_, data_);
    library_->device_close(device_);
  }
  std::string Handle() {
    uint8_t handle[64];
    EXPECT_EQ(library_->ipc_export(device_, data_, handle), SPMMD_CUDA_OK);
    return {reinterpret_cast<const char*>(handle), sizeof(handle)};
  }
  float* floats(uint64_t offset) { return reinterpret_cast<float*>(data_ + offset); }

 private:
  const uint64_t bytes_;
  std::shared_ptr<const CudaLibrary> library_;
  spmmd_cuda_device* device_ = nullptr;
  std::byte* data_ = nullptr;
};

int64_t OpenHandles() {
  void* library = dlopen(SPMMD_FAKE_CUDA_LIBRARY, RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<decltype(&fake_cuda_open_handles)>(dlsym(library, "fake_cuda_open_handles"))();
}

TEST(CudaServerTest, DeviceMemoryOfCallersIsReadAndWrittenInPlace) {
  TestServer server([](Options* options) {
    OnFakeGpu(options);
    options->shared_memory = true;
  });
  constexpr int64_t kRows = 3;
  const TestLayer layer = TestLayer::Random(40, 56, 1);
  ASSERT_TRUE(RegisterHalf(server, "w", layer).ok());
  grpc::ClientContext devices_context;
  pb::DeviceInfoResponse devices;
  ASSERT_TRUE(server.matmul().DeviceInfo(&devices_context, {}, &devices).ok());
  const std::string uuid = devices.devices(0).uuid();
  ASSERT_FALSE(uuid.empty());

  IpcMemory memory(1 << 20);
  const auto open = [&](const std::string& name, const std::string& handle, const std::string& device, uint64_t offset,
                        uint64_t size) {
    pb::RegisterRegionRequest request;
    request.set_name(name);
    request.set_cuda_ipc(handle);
    request.set_device_uuid(device);
    request.set_offset(offset);
    request.set_size(size);
    grpc::ClientContext context;
    pb::RegisterRegionResponse response;
    return Explain(server.matmul().RegisterRegion(&context, request, &response));
  };
  EXPECT_EQ(open("r", "short", uuid, 0, 1).field, "cuda_ipc");
  EXPECT_EQ(open("r", std::string(64, 'x'), uuid, 0, 1).field, "cuda_ipc");
  EXPECT_EQ(open("r", memory.Handle(), uuid, 0, (1 << 20) + 1).field, "size") << "more than the allocation has";
  EXPECT_EQ(open("r", memory.Handle(), uuid, 1 << 20, 1).field, "size");
  const auto elsewhere = open("r", memory.Handle(), "GPU-of-another-host", 0, 1);
  EXPECT_EQ(elsewhere.code, grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(elsewhere.message, ::testing::HasSubstr("GPU-of-another-host"));
  EXPECT_THAT(elsewhere.message, ::testing::HasSubstr(uuid));
  EXPECT_EQ(OpenHandles(), 0) << "what was refused is closed again";
  EXPECT_EQ(open("r", memory.Handle(), uuid, 4096, 1 << 18).code, grpc::StatusCode::OK);
  EXPECT_EQ(OpenHandles(), 1);
  EXPECT_EQ(server.Metric("spmmd_shm_regions{kind=\"cuda\"}"), 1);

  const std::vector<double> reference = layer.Reference(RandomVector(kRows * 56, 2), kRows);
  // In place where kernels can, through a copy on the device where the memory is not aligned for them.
  for (const uint64_t x_offset : {0, 4}) {
    for (const uint64_t y_offset : {65536, 65540}) {
      const std::vector<float> x = RandomVector(kRows * 56, 2);
      std::copy(x.begin(), x.end(), memory.floats(4096 + x_offset));
      pb::ExecuteRequest request = MatmulRequest("w", x, kRows, 56);
      pb::RegionSlice* in = request.mutable_inputs(0)->mutable_dense()->mutable_region();
      in->set_region("r");
      in->set_offset(x_offset);
      in->set_size(x.size() * sizeof(float));
      pb::RegionSlice* out = request.mutable_program()->mutable_outputs(0)->mutable_region();
      out->set_region("r");
      out->set_offset(y_offset);
      out->set_size(reference.size() * sizeof(float));
      for (int repeat = 0; repeat < 3; ++repeat) {
        std::fill_n(memory.floats(4096 + y_offset), reference.size(), -1.0f);
        pb::ExecuteResponse response;
        const auto failure = Explain(server.Execute(request, &response));
        ASSERT_EQ(failure.code, grpc::StatusCode::OK) << failure.message;
        for (size_t i = 0; i < reference.size(); ++i) {
          ASSERT_NEAR(memory.floats(4096 + y_offset)[i], reference[i], 0.02) << x_offset << " " << y_offset << " " << i;
        }
      }
      // From the device into the response, and the other way round.
      request.mutable_program()->mutable_outputs(0)->clear_region();
      pb::ExecuteResponse response;
      ASSERT_TRUE(server.Execute(request, &response).ok());
      EXPECT_NEAR(testing::AsFloats(response.outputs(0).tensor().data())[5], reference[5], 0.02);
    }
  }
  grpc::ClientContext context;
  pb::UnregisterRegionResponse removed;
  ASSERT_TRUE(server.matmul().UnregisterRegion(&context, {}, &removed).ok());
  EXPECT_EQ(OpenHandles(), 0);
  EXPECT_EQ(server.Metric("spmmd_shm_bytes{"), 0);
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
