#include <algorithm>
#include <string>

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

__device__ __forceinline__ float LoadFp32(const void* from, int32_t dtype, int64_t at) {
  if (dtype == kF32) return __ldg(static_cast<const float*>(from) + at);
  if (dtype == kF16) return __half2float(__ldg(static_cast<const __half*>(from) + at));
  return __bfloat162float(__ldg(static_cast<const __nv_bfloat16*>(from) + at));
}

__global__ __launch_bounds__(kThreads) void Elementwise(spmmd_cuda_elementwise_call call) {
  const Epilogue epilogue = {call.y, nullptr, call.y_stride, call.y_dtype, call.activation};
  const int64_t items = call.rows * call.cols;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < items; i += step) {
    const int64_t row = i / call.cols;
    const int64_t col = i % call.cols;
    float v = LoadFp32(call.left, call.left_dtype, row * call.left_stride + col);
    if (call.op == SPMMD_CUDA_OP_COPY) {
      if (fabsf(v) <= call.threshold) v = 0.f;
    } else {
      const float right = LoadFp32(call.right, call.right_dtype, row * call.right_stride + col);
      v = call.op == SPMMD_CUDA_OP_ADD ? v + right : v * right;
    }
    StoreOutput(epilogue, row, col, v);
  }
}

Status CheckOperand(const char* name, const void* pointer, int32_t dtype, int64_t stride,
                    const spmmd_cuda_elementwise_call& call) {
  const std::string field = name;
  if (dtype < kF16 || dtype > kF32) return InvalidArgument(field + "_dtype: unknown value " + std::to_string(dtype));
  if (pointer == nullptr) return InvalidArgument(field + ": null");
  if (reinterpret_cast<uintptr_t>(pointer) % ElementSize(dtype) != 0) {
    return InvalidArgument(field + ": not aligned to its element type");
  }
  if (call.rows > 1 && stride < call.cols) {
    return InvalidArgument(field + "_stride: " + std::to_string(stride) +
                           " is less than cols = " + std::to_string(call.cols));
  }
  return {};
}

}  // namespace

Status LaunchElementwise(const spmmd_cuda_elementwise_call& call, cudaStream_t stream) {
  constexpr int64_t kMaxExtent = int64_t{1} << 31;
  if (call.rows < 0 || call.rows > kMaxExtent) return InvalidArgument("rows: out of range");
  if (call.cols < 0 || call.cols > kMaxExtent) return InvalidArgument("cols: out of range");
  if (call.op < SPMMD_CUDA_OP_COPY || call.op > SPMMD_CUDA_OP_MUL) {
    return InvalidArgument("op: unknown value " + std::to_string(call.op));
  }
  if (call.activation < 0 || call.activation >= kActivationCount) {
    return InvalidArgument("activation: unknown value " + std::to_string(call.activation));
  }
  if (!(call.threshold >= 0)) return InvalidArgument("threshold: negative or NaN");
  if (call.rows == 0 || call.cols == 0) return {};
  SPMMD_CUDA_TRY(CheckOperand("left", call.left, call.left_dtype, call.left_stride, call));
  if (call.op != SPMMD_CUDA_OP_COPY) {
    SPMMD_CUDA_TRY(CheckOperand("right", call.right, call.right_dtype, call.right_stride, call));
  }
  SPMMD_CUDA_TRY(CheckOperand("y", call.y, call.y_dtype, call.y_stride, call));
  Elementwise<<<Blocks(call.rows * call.cols), kThreads, 0, stream>>>(call);
  SPMMD_CUDA_CHECK(cudaGetLastError());
  return {};
}

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
