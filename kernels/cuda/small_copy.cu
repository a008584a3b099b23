// Between two kernels of a graph a copy engine costs 2 to 3 us a copy, mostly in handing over; a kernel that reads or
// writes page-locked host memory itself costs one more launch of the same queue. 16 bytes a thread, all in flight at
// once.
#include <string>

#include "kernels/cuda/small_copy.h"

namespace spmmd::cuda {
namespace {

constexpr int kCopyThreads = 128;
constexpr uint64_t kMaxBytes = uint64_t{1} << 32;

__global__ __launch_bounds__(kCopyThreads) void SmallCopy(uint4* to, const uint4* from, uint32_t count) {
  const uint32_t i = blockIdx.x * kCopyThreads + threadIdx.x;
  if (i < count) to[i] = from[i];
}

}  // namespace

Status LaunchSmallCopy(void* to, const void* from, uint64_t bytes, cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    return InvalidArgument("to or from: not 16-byte aligned");
  }
  if (bytes % 16 != 0 || bytes > kMaxBytes) {
    return InvalidArgument("bytes: " + std::to_string(bytes) + " is not a multiple of 16 up to 2^32");
  }
  if (bytes == 0) return {};
  const auto count = static_cast<uint32_t>(bytes / 16);
  SmallCopy<<<(count + kCopyThreads - 1) / kCopyThreads, kCopyThreads, 0, stream>>>(
      static_cast<uint4*>(to), static_cast<const uint4*>(from), count);
  return FromCuda(cudaGetLastError(), "SmallCopy");
}

}  // namespace spmmd::cuda
