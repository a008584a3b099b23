// The end of every kernel: bias, activation, conversion and store of fp32
// accumulators; and the conversion of activations on their way in.
#ifndef SPMMD_KERNELS_CUDA_EPILOGUE_CUH_
#define SPMMD_KERNELS_CUDA_EPILOGUE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

struct Epilogue {
  void *y;
  const float *bias;  // [M], or null
  int64_t stride;     // elements
  int32_t dtype;
  int32_t activation;
};

inline Epilogue MakeEpilogue(const Call &call) {
  return {call.y, call.bias, call.y_stride, call.y_dtype, call.activation};
}

// The Activation values of kernels/base/activation.h. NaN stays NaN.
__device__ __forceinline__ float Activate(int32_t activation, float v) {
  switch (activation) {
    case 1:
      return v < 0.f ? 0.f : v;
    case 2:
      return 0.5f * v * erfcf(-v * 0.70710678f);
    case 3:
      return 0.5f * v * (1.f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
    case 4:
      return v / (1.f + expf(-v));
    default:
      return v;
  }
}

__device__ __forceinline__ uint32_t Pack16(int32_t dtype, float low, float high) {
  if (dtype == kF16) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
  }
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t *>(&pair);
}

// Y[n][m] = activation(accumulator + bias[m]). The caller checks n < N and m <
// M.
__device__ __forceinline__ void StoreOutput(const Epilogue &epilogue, int64_t n, int64_t m, float accumulator) {
  float v = accumulator;
  if (epilogue.bias != nullptr) v += __ldg(epilogue.bias + m);
  if (epilogue.activation != 0) v = Activate(epilogue.activation, v);
  const int64_t at = n * epilogue.stride + m;
  if (epilogue.dtype == kF32) {
    static_cast<float *>(epilogue.y)[at] = v;
  } else {
    static_cast<uint16_t *>(epilogue.y)[at] = static_cast<uint16_t>(Pack16(epilogue.dtype, v, 0.f));
  }
}

// Any dtype, alignment, bias and activation. Out of line: the end of a kernel
// runs once, and code that is passed once costs a miss of the instruction cache
// for every line.
inline __device__ __noinline__ void StoreQuadGeneral(const Epilogue &epilogue, int64_t n, int64_t m, int valid,
                                                     float4 v) {
#pragma unroll 1
  for (int i = 0; i < valid; ++i) {
    StoreOutput(epilogue, n, m + i, v.x);
    v = make_float4(v.y, v.z, v.w, 0.f);
  }
}

// As StoreOutput for four rows m..m+3 (m % 4 == 0) of W, of which `valid` lie
// inside; one vector store in the common case.
__device__ __forceinline__ void StoreQuad(const Epilogue &epilogue, int64_t n, int64_t m, int valid, const float4 &v) {
  uint16_t *y = static_cast<uint16_t *>(epilogue.y) + n * epilogue.stride + m;
  if (valid == 4 && epilogue.bias == nullptr && epilogue.activation == 0 && epilogue.dtype != kF32 &&
      reinterpret_cast<uintptr_t>(y) % 8 == 0) {
    *reinterpret_cast<uint2 *>(y) = make_uint2(Pack16(epilogue.dtype, v.x, v.y), Pack16(epilogue.dtype, v.z, v.w));
    return;
  }
  StoreQuadGeneral(epilogue, n, m, valid, v);
}

// Sums of 16 rows x 8 tokens are stored in quads: lane l takes rows 4 * (l % 4)
// .. + 3 of token l / 4. This is the offset, in floats, of a lane's first row
// in a tensor-core accumulator that was written lane by lane, 4 floats each:
// element (row r, token n) is register r / 8 * 2 + n % 2 of lane r % 8 * 4 + n
// / 2. The other rows follow 16 apart.
__device__ __forceinline__ int QuadOffset(int lane) {
  const int row = lane % 4 * 4;
  const int token = lane / 4;
  return (row % 8 * 4 + token / 2) * 4 + row / 8 * 2 + token % 2;
}
__device__ __forceinline__ float4 LoadQuad(const float *accumulator) {
  return make_float4(accumulator[0], accumulator[16], accumulator[32], accumulator[48]);
}
__device__ __forceinline__ void AddQuad(float4 &sum, const float4 &v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}
// The quad of this lane in row block `block` (16 rows) and token tile `tile` (8
// tokens) of an n x m output.
__device__ __forceinline__ void StoreTileQuad(const Epilogue &epilogue, int n, int m, int block, int tile, int lane,
                                              const float4 &sum) {
  const int token = tile * 8 + lane / 4;
  const int row = block * 16 + lane % 4 * 4;
  if (token < n && row < m) StoreQuad(epilogue, token, row, min(4, m - row), sum);
}

// Bits of element `at` of an activation tensor converted to fp16 or bf16,
// rounded to nearest even.
template <bool kIsBf16>
__device__ __forceinline__ uint16_t LoadAs16(const void *x, int32_t dtype, int64_t at) {
  if (dtype == (kIsBf16 ? kBf16 : kF16)) return __ldg(static_cast<const uint16_t *>(x) + at);
  float v;
  if (dtype == kF32) {
    v = __ldg(static_cast<const float *>(x) + at);
  } else if (dtype == kF16) {
    v = __half2float(__ldg(static_cast<const __half *>(x) + at));
  } else {
    v = __bfloat162float(__ldg(static_cast<const __nv_bfloat16 *>(x) + at));
  }
  if constexpr (kIsBf16) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(v));
  } else {
    return __half_as_ushort(__float2half_rn(v));
  }
}

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_EPILOGUE_CUH_
