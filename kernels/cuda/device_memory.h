// Memory of layers, and the way of their bytes between pageable host memory and the device.
#ifndef SPMMD_KERNELS_CUDA_DEVICE_MEMORY_H_
#define SPMMD_KERNELS_CUDA_DEVICE_MEMORY_H_

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

// A stream-ordered pool. cudaMalloc and cudaFree wait for everything the device does, so that a layer that comes or
// goes would hold up launches of every other; the pool keeps what is freed (up to kKeptBytes) and gives it out again.
// Allocations of a pool cannot be exported by CUDA IPC. The device is current in all calls.
class LayerPool {
 public:
  // Bytes that stay with the pool while no layer needs them.
  static constexpr uint64_t kKeptBytes = uint64_t{4} << 30;

  LayerPool() = default;
  ~LayerPool();
  LayerPool(const LayerPool&) = delete;
  LayerPool& operator=(const LayerPool&) = delete;
  Status Open(int device);
  // Ready for any stream on return. Gives what it keeps back to the device and tries once more when there is no room.
  Status Allocate(uint64_t bytes, uint8_t** pointer);
  // What the pool gets back from now on is not given out again before the work that is on `stream` now is done.
  Status FreeAfter(cudaStream_t stream);
  // Null is allowed. Work that FreeAfter was not told of must be done.
  void Free(void* pointer);
  // Zeroes, or copies between allocations of the device; done on return.
  Status Zero(void* pointer, uint64_t bytes);
  Status Copy(void* to, const void* from, uint64_t bytes);
  // Gives the device back what no layer needs.
  Status Trim();
  // Bytes that Trim would give back.
  Status Unused(uint64_t* bytes) const;

 private:
  Status TrimTo(uint64_t kept);

  cudaMemPool_t pool_ = nullptr;
  cudaStream_t stream_ = nullptr;  // orders the pool's work, nothing else
  std::mutex mutex_;
  cudaEvent_t before_ = nullptr;  // recorded and waited for under mutex_
};

// Moves bytes through page-locked pieces: up to kLanes threads, each with a stream and two pieces, so that the copy
// engine drains one while the thread fills the other. One transfer at a time. The device is current in all calls.
class HostTransfer {
 public:
  static constexpr int kLanes = 4;
  // Small, so that a request's own copy waits for little: 1 MiB takes about 20 us over PCIe 5.
  static constexpr uint64_t kPieceBytes = uint64_t{1} << 20;
  static constexpr uint64_t kPinnedBytes = kLanes * 2 * kPieceBytes;

  // `rows` rows of `row_bytes`: consecutive in host memory, `pitch` >= row_bytes apart on the device.
  struct Shape {
    uint64_t rows = 0;
    uint64_t row_bytes = 0;
    uint64_t pitch = 0;
  };

  HostTransfer() = default;
  ~HostTransfer();
  HostTransfer(const HostTransfer&) = delete;
  HostTransfer& operator=(const HostTransfer&) = delete;
  Status Open(int device);
  // The bytes are there on return. Bytes of the device between row_bytes and pitch become zero.
  Status ToDevice(uint8_t* device, const uint8_t* host, const Shape& shape);
  // Exactly rows * row_bytes bytes are written.
  Status ToHost(uint8_t* host, const uint8_t* device, const Shape& shape);

 private:
  struct Lane {
    cudaStream_t stream = nullptr;
    std::array<uint8_t*, 2> piece = {};
    std::array<cudaEvent_t, 2> done = {};
  };
  struct Job;

  Status Run(Job& job);
  void Work(Job& job, const Lane& lane) const;
  static Status Fill(const Job& job, const Lane& lane);
  static Status Drain(const Job& job, const Lane& lane);

  int device_ = 0;
  std::mutex mutex_;
  uint8_t* pinned_ = nullptr;
  std::array<Lane, kLanes> lanes_;
};

// The device as this library opens it; kernels see the base alone.
struct OpenDevice : spmmd_cuda_device {
  LayerPool pool;
  HostTransfer transfer;
};
inline OpenDevice& Opened(spmmd_cuda_device* device) { return *static_cast<OpenDevice*>(device); }

// cudaMalloc, which takes what the pool keeps when there is no other room. `device` is current.
Status DeviceMalloc(spmmd_cuda_device* device, uint64_t bytes, void** pointer);

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_DEVICE_MEMORY_H_
