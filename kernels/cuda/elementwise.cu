#include <algorithm>

#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/epilogue.cuh"

namespace spmmd::cuda {
namespace {

constexpr int kThreads = 256;

// Grid-stride loops: any size fits a bounded grid.
unsigned Blocks(int64_t items) {
  return static_cast<unsigned>(std::clamp<int64_t>(CeilDiv(items, kThreads), 1, 132 * 8));
}

template <bool kIsBf16>
__global__ __launch_bounds__(kThreads) void ConvertActivations(const void* x, int32_t dtype, int64_t n, int64_t k,
                                                               int64_t stride, int64_t pitch, uint4* to) {
  const int64_t groups = pitch / 8;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n * groups; i += step) {
    const int64_t row = i / groups;
    const int64_t col = i % groups * 8;
    uint32_t words[4] = {};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (col + e < k) {
        words[e / 2] |= static_cast<uint32_t>(LoadAs16<kIsBf16>(x, dtype, row * stride + col + e)) << (e % 2 * 16);
      }
    }
    to[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

__global__ __launch_bounds__(kThreads) void ApplyEpilogue(Epilogue epilogue, int64_t n, int64_t m,
                                                          const float* accumulators) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n * m; i += step) {
    StoreOutput(epilogue, i / m, i % m, accumulators[i]);
  }
}

}  // namespace

Status LaunchConvertActivations(const Call& call, int64_t k, int32_t to_dtype, int64_t pitch, void* to,
                                cudaStream_t stream) {
  const auto kernel = to_dtype == kBf16 ? ConvertActivations<true> : ConvertActivations<false>;
  kernel<<<Blocks(call.n * pitch / 8), kThreads, 0, stream>>>(call.x, call.x_dtype, call.n, k, call.x_stride, pitch,
                                                              static_cast<uint4*>(to));
  SPMMD_CUDA_CHECK(cudaGetLastError());
  return {};
}

Status LaunchEpilogue(const Call& call, int64_t m, const float* accumulators, cudaStream_t stream) {
  ApplyEpilogue<<<Blocks(call.n * m), kThreads, 0, stream>>>(MakeEpilogue(call), call.n, m, accumulators);
  SPMMD_CUDA_CHECK(cudaGetLastError());
  return {};
}

}  // namespace spmmd::cuda
