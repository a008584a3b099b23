// What GPU tests share: the library, one device, device memory that cleans up after itself.
//
// Without a usable GPU every test is skipped with the reason; with SPMMD_REQUIRE_GPU set in the environment that is a
// failure instead, so that a GPU machine cannot pass by skipping.
#ifndef SPMMD_TESTS_KERNELS_CUDA_GPU_H_
#define SPMMD_TESTS_KERNELS_CUDA_GPU_H_

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/dispatch/cuda_library.h"

namespace spmmd::gpu_test {

// Set for tools that slow a kernel down a hundredfold (compute-sanitizer): the same code paths, fewer repetitions.
inline bool FewCases() { return std::getenv("SPMMD_TEST_FEW_CASES") != nullptr; }

// The process's library and device 0; `why` says what is missing when there is none.
struct Gpu {
  std::shared_ptr<const CudaLibrary> cuda;
  spmmd_cuda_device* device = nullptr;
  spmmd_cuda_stream stream = nullptr;
  std::string why;

  static const Gpu& Get() {
    static const Gpu* const gpu = new Gpu(Open());
    return *gpu;
  }

 private:
  static Gpu Open() {
    Gpu gpu;
    auto library = CudaLibrary::Load();
    if (!library.ok()) {
      gpu.why = std::string(library.status().message());
      return gpu;
    }
    int32_t count = 0;
    if ((*library)->device_count(&count) != SPMMD_CUDA_OK || count == 0) {
      gpu.why = "no GPU";
      return gpu;
    }
    spmmd_cuda_device* device = nullptr;
    spmmd_cuda_stream stream = nullptr;
    if ((*library)->device_open(0, &device) != SPMMD_CUDA_OK ||
        (*library)->stream_create(device, &stream) != SPMMD_CUDA_OK) {
      gpu.why = (*library)->last_error();
      return gpu;
    }
    gpu.cuda = *library;
    gpu.device = device;
    gpu.stream = stream;
    return gpu;
  }
};

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (gpu().device != nullptr) return;
    if (std::getenv("SPMMD_REQUIRE_GPU") != nullptr) FAIL() << gpu().why;
    GTEST_SKIP() << gpu().why;
  }
  static const Gpu& gpu() { return Gpu::Get(); }
};

#define GPU_OK(call)                                                                      \
  do {                                                                                    \
    const auto gpu_code = (call);                                                         \
    ASSERT_EQ(gpu_code, SPMMD_CUDA_OK) << #call << ": " << Gpu::Get().cuda->last_error(); \
  } while (false)

class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) : bytes_(bytes) {
    const Gpu& gpu = Gpu::Get();
    EXPECT_EQ(gpu.cuda->malloc(gpu.device, bytes == 0 ? 1 : bytes, &data_), SPMMD_CUDA_OK) << gpu.cuda->last_error();
  }
  ~DeviceBuffer() {
    const Gpu& gpu = Gpu::Get();
    EXPECT_EQ(gpu.cuda->free(gpu.device, data_), SPMMD_CUDA_OK) << gpu.cuda->last_error();
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t bytes() const { return bytes_; }

  void Upload(const void* from, size_t bytes, size_t offset = 0) {
    const Gpu& gpu = Gpu::Get();
    EXPECT_EQ(gpu.cuda->memcpy_async(gpu.device, data() + offset, from, bytes, gpu.stream), SPMMD_CUDA_OK);
    EXPECT_EQ(gpu.cuda->stream_synchronize(gpu.device, gpu.stream), SPMMD_CUDA_OK) << gpu.cuda->last_error();
  }
  void Fill(int byte) {
    const Gpu& gpu = Gpu::Get();
    EXPECT_EQ(gpu.cuda->memset_async(gpu.device, data_, byte, bytes_, gpu.stream), SPMMD_CUDA_OK);
  }
  std::vector<std::byte> Download() const {
    const Gpu& gpu = Gpu::Get();
    std::vector<std::byte> host(bytes_);
    EXPECT_EQ(gpu.cuda->memcpy_async(gpu.device, host.data(), data_, bytes_, gpu.stream), SPMMD_CUDA_OK);
    EXPECT_EQ(gpu.cuda->stream_synchronize(gpu.device, gpu.stream), SPMMD_CUDA_OK) << gpu.cuda->last_error();
    return host;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// A workspace that grows and keeps its counters zero between launches.
class Workspace {
 public:
  void Reserve(size_t bytes) {
    if (buffer_ != nullptr && buffer_->bytes() >= bytes) return;
    buffer_ = std::make_unique<DeviceBuffer>(bytes);
    const Gpu& gpu = Gpu::Get();
    buffer_->Fill(0xff);  // what is not a counter may hold anything
    EXPECT_EQ(gpu.cuda->workspace_init(gpu.device, buffer_->data(), bytes, gpu.stream), SPMMD_CUDA_OK);
  }
  void* data() const { return buffer_->data(); }
  size_t bytes() const { return buffer_->bytes(); }

 private:
  std::unique_ptr<DeviceBuffer> buffer_;
};

using LayerPtr = std::unique_ptr<spmmd_cuda_layer, void (*)(spmmd_cuda_layer*)>;

// Null (and a test failure) when the upload fails.
inline LayerPtr Upload(const PackedLayer& packed) {
  const Gpu& gpu = Gpu::Get();
  spmmd_cuda_layer* layer = nullptr;
  const CudaLayerDesc desc(packed);
  EXPECT_EQ(gpu.cuda->layer_upload(gpu.device, &desc.desc, &layer), SPMMD_CUDA_OK) << gpu.cuda->last_error();
  return {layer, gpu.cuda->layer_free};
}

}  // namespace spmmd::gpu_test

#endif  // SPMMD_TESTS_KERNELS_CUDA_GPU_H_
