#include "kernels/cuda/device_memory.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace spmmd::cuda {
namespace {

// Calls copy(offset on the device side of the piece, offset in host memory, bytes) for each run of bytes that device
// bytes [begin, end) of the shape share with its rows.
template <typename Copy>
void ForRows(const HostTransfer::Shape& shape, uint64_t begin, uint64_t end, const Copy& copy) {
  for (uint64_t row = begin / shape.pitch; row < shape.rows && row * shape.pitch < end; ++row) {
    const uint64_t start = row * shape.pitch;
    const uint64_t from = std::max(begin, start);
    const uint64_t to = std::min(end, start + shape.row_bytes);
    if (from < to) copy(from - begin, row * shape.row_bytes + (from - start), to - from);
  }
}

}  // namespace

LayerPool::~LayerPool() {
  if (before_ != nullptr) cudaEventDestroy(before_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
  if (pool_ != nullptr) cudaMemPoolDestroy(pool_);
}

Status LayerPool::Open(int device) {
  cudaMemPoolProps props = {};
  props.allocType = cudaMemAllocationTypePinned;
  props.handleTypes = cudaMemHandleTypeNone;
  props.location.type = cudaMemLocationTypeDevice;
  props.location.id = device;
  SPMMD_CUDA_CHECK(cudaMemPoolCreate(&pool_, &props));
  // Free() trims; left to the threshold, any synchronisation would.
  uint64_t threshold = UINT64_MAX;
  SPMMD_CUDA_CHECK(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &threshold));
  SPMMD_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  SPMMD_CUDA_CHECK(cudaEventCreateWithFlags(&before_, cudaEventDisableTiming));
  return {};
}

Status LayerPool::Allocate(uint64_t bytes, uint8_t** pointer) {
  void* allocated = nullptr;
  cudaError_t error = cudaMallocFromPoolAsync(&allocated, bytes, pool_, stream_);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    SPMMD_CUDA_TRY(Trim());
    error = cudaMallocFromPoolAsync(&allocated, bytes, pool_, stream_);
  }
  SPMMD_CUDA_TRY(FromCuda(error, "cudaMallocFromPoolAsync"));
  if (Status status = FromCuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); !status.ok()) {
    cudaFreeAsync(allocated, stream_);
    return status;
  }
  *pointer = static_cast<uint8_t*>(allocated);
  return {};
}

Status LayerPool::FreeAfter(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  SPMMD_CUDA_CHECK(cudaEventRecord(before_, stream));
  SPMMD_CUDA_CHECK(cudaStreamWaitEvent(stream_, before_, 0));
  return {};
}

void LayerPool::Free(void* pointer) {
  if (pointer == nullptr) return;
  // What fails here fails because the device is lost, and the next call that returns a status says so.
  if (cudaFreeAsync(pointer, stream_) != cudaSuccess || cudaStreamSynchronize(stream_) != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  uint64_t unused = 0;
  if (Unused(&unused).ok() && unused > kKeptBytes) static_cast<void>(TrimTo(kKeptBytes).ok());
}

Status LayerPool::Zero(void* pointer, uint64_t bytes) {
  SPMMD_CUDA_CHECK(cudaMemsetAsync(pointer, 0, bytes, stream_));
  SPMMD_CUDA_CHECK(cudaStreamSynchronize(stream_));
  return {};
}

Status LayerPool::Copy(void* to, const void* from, uint64_t bytes) {
  SPMMD_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
  SPMMD_CUDA_CHECK(cudaStreamSynchronize(stream_));
  return {};
}

Status LayerPool::Trim() { return TrimTo(0); }

Status LayerPool::TrimTo(uint64_t kept) {
  uint64_t used = 0;
  SPMMD_CUDA_CHECK(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrUsedMemCurrent, &used));
  SPMMD_CUDA_CHECK(cudaMemPoolTrimTo(pool_, used + kept));
  return {};
}

Status LayerPool::Unused(uint64_t* bytes) const {
  uint64_t used = 0;
  uint64_t reserved = 0;
  SPMMD_CUDA_CHECK(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrUsedMemCurrent, &used));
  SPMMD_CUDA_CHECK(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemCurrent, &reserved));
  *bytes = reserved > used ? reserved - used : 0;
  return {};
}

// One transfer. The pieces of a layer are taken by whichever lane is free.
struct HostTransfer::Job {
  uint8_t* to_device = nullptr;  // one of the two directions is set
  const uint8_t* from_host = nullptr;
  uint8_t* to_host = nullptr;
  const uint8_t* from_device = nullptr;
  Shape shape;
  mutable std::atomic<uint64_t> next{0};
  std::mutex mutex;
  Status status;  // the first failure

  uint64_t bytes() const { return shape.rows * shape.pitch; }
  // The next piece's bytes [begin, end); false when there is none.
  bool Take(uint64_t* begin, uint64_t* end) const {
    *begin = next.fetch_add(kPieceBytes);
    *end = std::min(*begin + kPieceBytes, bytes());
    return *begin < bytes();
  }
};

HostTransfer::~HostTransfer() {
  for (const Lane& lane : lanes_) {
    for (cudaEvent_t done : lane.done) {
      if (done != nullptr) cudaEventDestroy(done);
    }
    if (lane.stream != nullptr) cudaStreamDestroy(lane.stream);
  }
  if (pinned_ != nullptr) cudaFreeHost(pinned_);
}

Status HostTransfer::Open(int device) {
  device_ = device;
  SPMMD_CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&pinned_), kPinnedBytes, cudaHostAllocPortable));
  uint8_t* piece = pinned_;
  for (Lane& lane : lanes_) {
    SPMMD_CUDA_CHECK(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking));
    for (int i = 0; i < 2; ++i, piece += kPieceBytes) {
      lane.piece[i] = piece;
      SPMMD_CUDA_CHECK(cudaEventCreateWithFlags(&lane.done[i], cudaEventDisableTiming));
    }
  }
  return {};
}

Status HostTransfer::ToDevice(uint8_t* device, const uint8_t* host, const Shape& shape) {
  Job job;
  job.to_device = device;
  job.from_host = host;
  job.shape = shape;
  return Run(job);
}

Status HostTransfer::ToHost(uint8_t* host, const uint8_t* device, const Shape& shape) {
  Job job;
  job.to_host = host;
  job.from_device = device;
  job.shape = shape;
  return Run(job);
}

Status HostTransfer::Run(Job& job) {
  if (job.bytes() == 0) return {};
  // Without padding between rows it is one run of bytes.
  if (job.shape.pitch == job.shape.row_bytes) job.shape = {1, job.bytes(), job.bytes()};
  const std::lock_guard<std::mutex> lock(mutex_);
  // A thread takes some 20 us to start, a piece some 100 to copy.
  const uint64_t pieces = (job.bytes() + kPieceBytes - 1) / kPieceBytes;
  const auto workers = static_cast<int>(std::clamp<uint64_t>(pieces / 2, 1, kLanes));
  std::vector<std::thread> threads;
  threads.reserve(kLanes);
  try {
    for (int i = 1; i < workers; ++i) {
      threads.emplace_back([this, &job, i] {
        const ScopedDevice scope(device_);
        Work(job, lanes_[i]);
      });
    }
  } catch (const std::system_error&) {
    // No thread to be had: those there are do it all.
  }
  Work(job, lanes_[0]);
  for (std::thread& thread : threads) thread.join();
  return job.status;
}

void HostTransfer::Work(Job& job, const Lane& lane) const {
  Status status = job.to_device != nullptr ? Fill(job, lane) : Drain(job, lane);
  // Also after a failure: the pieces must be free for the next transfer, and `host` for its owner.
  Status end = FromCuda(cudaStreamSynchronize(lane.stream), "cudaStreamSynchronize of a transfer");
  if (status.ok()) status = std::move(end);
  if (status.ok()) return;
  job.next = job.bytes();  // the other lanes stop
  const std::lock_guard<std::mutex> lock(job.mutex);
  if (job.status.ok()) job.status = std::move(status);
}

Status HostTransfer::Fill(const Job& job, const Lane& lane) {
  uint64_t begin = 0;
  uint64_t end = 0;
  for (int i = 0; job.Take(&begin, &end); i ^= 1) {
    uint8_t* const piece = lane.piece[i];
    SPMMD_CUDA_CHECK(cudaEventSynchronize(lane.done[i]));  // at once when it was never recorded
    if (job.shape.rows > 1) std::memset(piece, 0, end - begin);
    ForRows(job.shape, begin, end,
            [&](uint64_t at, uint64_t host, uint64_t bytes) { std::memcpy(piece + at, job.from_host + host, bytes); });
    SPMMD_CUDA_CHECK(cudaMemcpyAsync(job.to_device + begin, piece, end - begin, cudaMemcpyHostToDevice, lane.stream));
    SPMMD_CUDA_CHECK(cudaEventRecord(lane.done[i], lane.stream));
  }
  return {};
}

Status HostTransfer::Drain(const Job& job, const Lane& lane) {
  struct Pending {
    uint64_t begin = 0;
    uint64_t end = 0;  // equal to begin: nothing is
  };
  std::array<Pending, 2> pending;
  const auto finish = [&](int i) -> Status {
    if (pending[i].begin == pending[i].end) return {};
    SPMMD_CUDA_CHECK(cudaEventSynchronize(lane.done[i]));
    ForRows(job.shape, pending[i].begin, pending[i].end, [&](uint64_t at, uint64_t host, uint64_t bytes) {
      std::memcpy(job.to_host + host, lane.piece[i] + at, bytes);
    });
    pending[i] = {};
    return {};
  };
  int i = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
  for (; job.Take(&begin, &end); i ^= 1) {
    SPMMD_CUDA_TRY(finish(i));
    SPMMD_CUDA_CHECK(
        cudaMemcpyAsync(lane.piece[i], job.from_device + begin, end - begin, cudaMemcpyDeviceToHost, lane.stream));
    SPMMD_CUDA_CHECK(cudaEventRecord(lane.done[i], lane.stream));
    pending[i] = {begin, end};
  }
  SPMMD_CUDA_TRY(finish(i));
  return finish(i ^ 1);
}

Status DeviceMalloc(spmmd_cuda_device* device, uint64_t bytes, void** pointer) {
  cudaError_t error = cudaMalloc(pointer, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    SPMMD_CUDA_TRY(Opened(device).pool.Trim());
    error = cudaMalloc(pointer, bytes);
  }
  return FromCuda(error, "cudaMalloc");
}

}  // namespace spmmd::cuda
