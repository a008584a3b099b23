#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/read_probe.h"

namespace spmmd::cuda {
namespace {

constexpr int kPieceBytes = 16 * 1024;
constexpr int kStages = 12;

// Through the bulk copy engine, which only Hopper code has.
__global__ __launch_bounds__(32, 1) void ReadProbe(const uint8_t* data, int64_t pieces) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ __align__(8) uint64_t barriers[kStages];
  if (threadIdx.x != 0) return;
  const int64_t begin = pieces * blockIdx.x / gridDim.x;
  const int64_t end = pieces * (blockIdx.x + 1) / gridDim.x;
  for (int s = 0; s < kStages; ++s) BarrierInit(SharedAddress(barriers + s), 1);
  BarrierInitFence();
  const auto load = [&](int64_t piece, int stage) {
    const uint32_t barrier = SharedAddress(barriers + stage);
    BarrierArriveExpect(barrier, kPieceBytes);
    BulkLoad(SharedAddress(stages + stage * kPieceBytes), data + piece * kPieceBytes, kPieceBytes, barrier);
  };
  for (int s = 0; s < kStages && begin + s < end; ++s) load(begin + s, s);
  int stage = 0;
  uint32_t parity = 0;
  for (int64_t piece = begin; piece < end; ++piece) {
    BarrierWait(SharedAddress(barriers + stage), parity);
    if (piece + kStages < end) load(piece + kStages, stage);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
#endif
}

// Everywhere else: each thread kLoads loads of 16 bytes at a time.
constexpr int kThreads = 256;
constexpr int kLoads = 8;
__global__ __launch_bounds__(kThreads) void ReadProbePortable(const uint8_t* data, int64_t pieces) {
  constexpr int kBlockBytes = kThreads * 16;
  const int64_t blocks = pieces * (kPieceBytes / kBlockBytes);
  uint32_t sum = 0;
  for (int64_t first = int64_t{blockIdx.x} * kLoads; first < blocks; first += int64_t{gridDim.x} * kLoads) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first + i < blocks) {
        const uint4 v = __ldcs(reinterpret_cast<const uint4*>(data + (first + i) * kBlockBytes) + threadIdx.x);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
      }
    }
  }
  if (sum == 0x9e3779b9u) __nanosleep(1);  // loads whose result nobody uses would not be made
}

}  // namespace

Status LaunchReadProbe(const spmmd_cuda_device& device, const void* pointer, uint64_t bytes, cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return InvalidArgument("pointer: not 16-byte aligned");
  if (!device.hopper) {
    ReadProbePortable<<<static_cast<unsigned>(device.multiprocessors) * 8, kThreads, 0, stream>>>(
        static_cast<const uint8_t*>(pointer), static_cast<int64_t>(bytes / kPieceBytes));
    return FromCuda(cudaGetLastError(), "ReadProbePortable");
  }
  constexpr int kSharedBytes = kStages * kPieceBytes;
  SPMMD_CUDA_CHECK(cudaFuncSetAttribute(ReadProbe, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  ReadProbe<<<static_cast<unsigned>(device.multiprocessors), 32, kSharedBytes, stream>>>(
      static_cast<const uint8_t*>(pointer), static_cast<int64_t>(bytes / kPieceBytes));
  SPMMD_CUDA_CHECK(cudaGetLastError());
  return {};
}

}  // namespace spmmd::cuda
