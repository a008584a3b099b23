// The end of every kernel: bias, activation, conversion and store of fp32 accumulators; and the conversion of
// activations on their way in.
#ifndef SPMMD_KERNELS_CUDA_EPILOGUE_CUH_
#define SPMMD_KERNELS_CUDA_EPILOGUE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

struct Epilogue {
  void* y;
  const float* bias;  // [M], or null
  int64_t stride;     // elements
  int32_t dtype;
  int32_t activation;
};

inline Epilogue MakeEpilogue(const Call& call) {
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

// Y[n][m] = activation(accumulator + bias[m]). The caller checks n < N and m < M.
__device__ __forceinline__ void StoreOutput(const Epilogue& epilogue, int64_t n, int64_t m, float accumulator) {
  float v = accumulator;
  if (epilogue.bias != nullptr) v += __ldg(epilogue.bias + m);
  if (epilogue.activation != 0) v = Activate(epilogue.activation, v);
  const int64_t at = n * epilogue.stride + m;
  if (epilogue.dtype == kF16) {
    static_cast<__half*>(epilogue.y)[at] = __float2half_rn(v);
  } else if (epilogue.dtype == kBf16) {
    static_cast<__nv_bfloat16*>(epilogue.y)[at] = __float2bfloat16_rn(v);
  } else {
    static_cast<float*>(epilogue.y)[at] = v;
  }
}

// Bits of element `at` of an activation tensor converted to fp16 or bf16, rounded to nearest even.
template <bool kIsBf16>
__device__ __forceinline__ uint16_t LoadAs16(const void* x, int32_t dtype, int64_t at) {
  if (dtype == (kIsBf16 ? kBf16 : kF16)) return __ldg(static_cast<const uint16_t*>(x) + at);
  float v;
  if (dtype == kF32) {
    v = __ldg(static_cast<const float*>(x) + at);
  } else if (dtype == kF16) {
    v = __half2float(__ldg(static_cast<const __half*>(x) + at));
  } else {
    v = __bfloat162float(__ldg(static_cast<const __nv_bfloat16*>(x) + at));
  }
  if constexpr (kIsBf16) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(v));
  } else {
    return __half_as_ushort(__float2half_rn(v));
  }
}

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_EPILOGUE_CUH_
