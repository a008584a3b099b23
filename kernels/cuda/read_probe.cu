#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/read_probe.h"

namespace spmmd::cuda {
namespace {

constexpr int kPieceBytes = 16 * 1024;
constexpr int kStages = 12;

__global__ __launch_bounds__(32, 1) void ReadProbe(const uint8_t* data, int64_t pieces) {
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
}

}  // namespace

Status LaunchReadProbe(const spmmd_cuda_device& device, const void* pointer, uint64_t bytes, cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return InvalidArgument("pointer: not 16-byte aligned");
  constexpr int kSharedBytes = kStages * kPieceBytes;
  SPMMD_CUDA_CHECK(cudaFuncSetAttribute(ReadProbe, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  ReadProbe<<<static_cast<unsigned>(device.multiprocessors), 32, kSharedBytes, stream>>>(
      static_cast<const uint8_t*>(pointer), static_cast<int64_t>(bytes / kPieceBytes));
  SPMMD_CUDA_CHECK(cudaGetLastError());
  return {};
}

}  // namespace spmmd::cuda
