// A CUDA client of a server in another process: its device memory is read and written in place. Needs a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "kernels/dispatch/cuda_library.h"
#include "server/app.h"
#include "tests/server/testing/server_harness.h"

namespace spmmd::server::testing {
namespace {

constexpr int64_t kM = 512;
constexpr int64_t kK = 1024;
constexpr int64_t kRows = 4;
constexpr uint64_t kBytes = 1 << 20;
constexpr uint64_t kXBytes = kRows * kK * sizeof(float);
constexpr uint64_t kYBytes = kRows * kM * sizeof(float);

std::shared_ptr<const CudaLibrary> Library() {
  const char* const path = std::getenv("SPMMD_CUDA_LIBRARY");
  auto library = CudaLibrary::Load(path == nullptr ? "" : path);
  int32_t count = 0;
  if (!library.ok() || (*library)->device_count(&count) != SPMMD_CUDA_OK || count == 0) return nullptr;
  return *library;
}

// This program again, as a process of its own that runs one of the tests below.
pid_t Start(const std::string& test, const std::string& setting) {
  setenv("SPMMD_IPC_TEST", setting.c_str(), 1);
  const std::string filter = "--gtest_filter=" + test;
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "cuda_ipc_test", filter.c_str(), nullptr);
    _exit(127);
  }
  unsetenv("SPMMD_IPC_TEST");
  return child;
}

void Kill(pid_t child) {
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

class DeviceMemory {
 public:
  explicit DeviceMemory(std::shared_ptr<const CudaLibrary> library) : library_(std::move(library)) {
    EXPECT_EQ(library_->device_open(0, &device_), SPMMD_CUDA_OK);
    EXPECT_EQ(library_->malloc(device_, kBytes, &data_), SPMMD_CUDA_OK);
    EXPECT_EQ(library_->stream_create(device_, &stream_), SPMMD_CUDA_OK);
  }
  ~DeviceMemory() {
    library_->stream_destroy(device_, stream_);
    library_->free(device_, data_);
    library_->device_close(device_);
  }
  std::string Handle() {
    uint8_t handle[64];
    EXPECT_EQ(library_->ipc_export(device_, data_, handle), SPMMD_CUDA_OK) << library_->last_error();
    return {reinterpret_cast<const char*>(handle), sizeof(handle)};
  }
  void Write(uint64_t offset, const std::vector<float>& values) {
    Copy(static_cast<char*>(data_) + offset, values.data(), values.size() * sizeof(float));
  }
  std::vector<float> Read(uint64_t offset, size_t count) {
    std::vector<float> values(count);
    Copy(values.data(), static_cast<char*>(data_) + offset, count * sizeof(float));
    return values;
  }

 private:
  void Copy(void* to, const void* from, uint64_t bytes) {
    EXPECT_EQ(library_->memcpy_async(device_, to, from, bytes, stream_), SPMMD_CUDA_OK);
    EXPECT_EQ(library_->stream_synchronize(device_, stream_), SPMMD_CUDA_OK);
  }

  const std::shared_ptr<const CudaLibrary> library_;
  spmmd_cuda_device* device_ = nullptr;
  void* data_ = nullptr;
  spmmd_cuda_stream stream_ = nullptr;
};

Failure Register(pb::SparseMatmul::Stub& stub, const std::string& name, const std::string& handle,
                 const std::string& uuid, uint64_t size) {
  pb::RegisterRegionRequest request;
  request.set_name(name);
  request.set_cuda_ipc(handle);
  request.set_device_uuid(uuid);
  request.set_size(size);
  pb::RegisterRegionResponse response;
  grpc::ClientContext context;
  return Explain(stub.RegisterRegion(&context, request, &response));
}

std::string Uuid(pb::SparseMatmul::Stub& stub) {
  grpc::ClientContext context;
  pb::DeviceInfoResponse devices;
  EXPECT_TRUE(stub.DeviceInfo(&context, {}, &devices).ok());
  return devices.devices_size() == 0 ? "" : devices.devices(0).uuid();
}

pb::ExecuteRequest SharedRequest(const std::vector<float>& x, uint64_t x_offset, uint64_t y_offset) {
  pb::ExecuteRequest request = MatmulRequest("w", x, kRows, kK);
  pb::RegionSlice* in = request.mutable_inputs(0)->mutable_dense()->mutable_region();
  in->set_region("r");
  in->set_offset(x_offset);
  in->set_size(kXBytes);
  pb::RegionSlice* out = request.mutable_program()->mutable_outputs(0)->mutable_region();
  out->set_region("r");
  out->set_offset(y_offset);
  out->set_size(kYBytes);
  return request;
}

TEST(CudaIpc, AnotherProcessesTensorsAreReadAndWrittenInPlace) {
  const auto library = Library();
  if (library == nullptr) {
    ASSERT_EQ(std::getenv("SPMMD_REQUIRE_GPU"), nullptr) << "no GPU";
    GTEST_SKIP() << "no GPU";
  }
  TempDir directory;
  const std::string address = "unix:" + directory.File("s");
  const pid_t server = Start("CudaIpcProcess.Server", address);
  {
    auto client = *client::Client::Connect(address);
    ASSERT_TRUE(client->WaitUntilHealthy(absl::Seconds(60)).ok());
    const TestLayer layer = TestLayer::Random(kM, kK, 1);
    pb::LayerSpec spec;
    spec.set_name("w");
    spec.set_store_dtype(pb::DATA_TYPE_F16);
    ASSERT_TRUE(client->Register(spec, client::LayerContent::Dense(client::DenseRows::F32(layer.w, kM, kK))).ok());

    const auto stub = pb::SparseMatmul::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
    grpc::ClientContext lease;
    const auto stream = stub->ExecuteStream(&lease);
    stream->WaitForInitialMetadata();
    const std::string uuid = Uuid(*stub);
    DeviceMemory memory(library);
    const std::string handle = memory.Handle();
    EXPECT_EQ(Register(*stub, "big", handle, uuid, uint64_t{64} << 30).field, "size");
    EXPECT_EQ(Register(*stub, "other", handle, "GPU-elsewhere", kBytes).code, grpc::StatusCode::FAILED_PRECONDITION);
    const Failure registered = Register(*stub, "r", handle, uuid, kBytes);
    ASSERT_EQ(registered.code, grpc::StatusCode::OK) << registered.message;

    const std::vector<float> x = RandomVector(kRows * kK, 2);
    const std::vector<double> reference = layer.Reference(x, kRows);
    for (const uint64_t x_offset : {0, 4}) {
      for (const uint64_t y_offset : {65536, 65540}) {
        memory.Write(x_offset, x);
        for (int repeat = 0; repeat < 3; ++repeat) {
          memory.Write(y_offset, std::vector<float>(reference.size(), -1.0f));
          grpc::ClientContext context;
          pb::ExecuteResponse response;
          const Failure failure = Explain(stub->Execute(&context, SharedRequest(x, x_offset, y_offset), &response));
          ASSERT_EQ(failure.code, grpc::StatusCode::OK) << failure.message;
          const std::vector<float> y = memory.Read(y_offset, reference.size());
          for (size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(y[i], reference[i], 0.3) << x_offset << " " << i;
        }
      }
    }

    // An owner that is killed takes nothing of the others' with it.
    memory.Write(0, x);
    int fds[2];
    ASSERT_EQ(pipe(fds), 0);
    const pid_t owner = Start("CudaIpcProcess.Owner", address + "," + std::to_string(fds[1]));
    char ready = 0;
    ASSERT_EQ(read(fds[0], &ready, 1), 1);
    absl::SleepFor(absl::Milliseconds(100));
    Kill(owner);
    for (int repeat = 0; repeat < 20; ++repeat) {
      grpc::ClientContext context;
      pb::ExecuteResponse response;
      ASSERT_TRUE(stub->Execute(&context, SharedRequest(x, 0, 65536), &response).ok());
      absl::SleepFor(absl::Milliseconds(10));
    }
    const std::vector<float> y = memory.Read(65536, reference.size());
    for (size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(y[i], reference[i], 0.3) << i;
    EXPECT_TRUE(client->CheckHealth().ok());
    close(fds[0]);
    close(fds[1]);
    lease.TryCancel();
    stream->Finish();
  }
  Kill(server);
}

TEST(CudaIpcProcess, Server) {
  const char* const address = std::getenv("SPMMD_IPC_TEST");
  if (address == nullptr) GTEST_SKIP() << "run by CudaIpc";
  auto options = MakeOptions({});
  ASSERT_TRUE(options.ok());
  options->listen = {address};
  options->metrics_listen.clear();
  options->backend = BackendChoice::kCuda;
  if (const char* const path = std::getenv("SPMMD_CUDA_LIBRARY"); path != nullptr) options->cuda_library = path;
  options->shared_memory = true;
  options->tune_kernels = false;
  auto app = App::Start(*options);
  ASSERT_TRUE(app.ok()) << app.status();
  ASSERT_TRUE((*app)->LoadAndServe().ok());
  while (true) absl::SleepFor(absl::Seconds(1));  // until it is killed
}

TEST(CudaIpcProcess, Owner) {
  const char* const setting = std::getenv("SPMMD_IPC_TEST");
  if (setting == nullptr) GTEST_SKIP() << "run by CudaIpc";
  const std::string text = setting;
  const size_t comma = text.rfind(',');
  const auto stub =
      pb::SparseMatmul::NewStub(grpc::CreateChannel(text.substr(0, comma), grpc::InsecureChannelCredentials()));
  grpc::ClientContext lease;
  const auto stream = stub->ExecuteStream(&lease);
  stream->WaitForInitialMetadata();
  DeviceMemory memory(Library());
  const std::vector<float> x = RandomVector(kRows * kK, 3);
  memory.Write(0, x);
  ASSERT_EQ(Register(*stub, "r", memory.Handle(), Uuid(*stub), kBytes).code, grpc::StatusCode::OK);
  ASSERT_EQ(write(std::stoi(text.substr(comma + 1)), "r", 1), 1);
  while (true) {  // until it is killed
    grpc::ClientContext context;
    pb::ExecuteResponse response;
    ASSERT_TRUE(stub->Execute(&context, SharedRequest(x, 0, 65536), &response).ok());
  }
}

}  // namespace
}  // namespace spmmd::server::testing
