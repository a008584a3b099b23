// The active columns of a thread block of column_piece_spmspv.cu, as a list in shared memory.
#ifndef SPMMD_KERNELS_CUDA_COLUMN_PIECE_LIST_CUH_
#define SPMMD_KERNELS_CUDA_COLUMN_PIECE_LIST_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/internal.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/format/column_piece_layout.h"

namespace spmmd::cuda::column_piece_kernel {

inline constexpr int kWarps = 8;
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kMaxSplitColumns = 8 * kThreads;  // what a block's list holds

// Dense activations, or ascending indices and fp32 values.
struct Activations {
  const void* x;
  const uint32_t* indices;
  const float* values;
  int32_t nnz;
  int32_t dtype;
  float threshold;
  int32_t k;
};

// Zero unless the predicate holds.
__device__ __forceinline__ uint32_t LoadIf32(const void* p, bool predicate) {
  uint32_t v;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n mov.u32 %0, 0;\n @p ld.global.u32 %0, [%1];\n}"
               : "=r"(v)
               : "l"(p), "r"(static_cast<uint32_t>(predicate)));
  return v;
}
__device__ __forceinline__ uint2 LoadIf64(const void* p, bool predicate) {
  uint2 v;
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n mov.u32 %0, 0;\n mov.u32 %1, 0;\n"
      " @p ld.global.v2.u32 {%0, %1}, [%2];\n}"
      : "=r"(v.x), "=r"(v.y)
      : "l"(p), "r"(static_cast<uint32_t>(predicate)));
  return v;
}
__device__ __forceinline__ uint32_t LoadIf16(const void* p, bool predicate) {
  uint32_t v;
  asm volatile(
      "{\n .reg .pred p;\n .reg .u16 h;\n setp.ne.u32 p, %2, 0;\n mov.u16 h, 0;\n @p ld.global.u16 h, [%1];\n"
      " cvt.u32.u16 %0, h;\n}"
      : "=r"(v)
      : "l"(p), "r"(static_cast<uint32_t>(predicate)));
  return v;
}

// x as the weights' type, and what that rounding lost in the same type, in the two halves of a word.
template <bool kIsBf16>
__device__ __forceinline__ uint32_t SplitActivation(float x) {
  if constexpr (kIsBf16) {
    const __nv_bfloat16 high = __float2bfloat16_rn(x);
    const float rest = x - __bfloat162float(high);
    const uint32_t low = isfinite(rest) ? __bfloat16_as_ushort(__float2bfloat16_rn(rest)) : 0u;
    return __bfloat16_as_ushort(high) | low << 16;
  } else {
    const __half high = __float2half_rn(x);
    const float rest = x - __half2float(high);
    const uint32_t low = isfinite(rest) ? __half_as_ushort(__float2half_rn(rest)) : 0u;
    return __half_as_ushort(high) | low << 16;
  }
}

// First position in [0, n) of the ascending `indices` that is >= key, by all threads of the block together: one
// device-memory latency for every factor of 256.
__device__ inline int LowerBound(const uint32_t* indices, int n, uint32_t key) {
  int low = 0;
  int length = n;
  while (length > 0) {
    const int step = (length + kThreads - 1) / kThreads;
    const int at = low + static_cast<int>(threadIdx.x) * step;
    const bool less = at < low + length && __ldg(indices + at) < key;
    const int count = __syncthreads_count(less ? 1 : 0);
    if (count == 0) break;
    const int end = low + length;
    low += (count - 1) * step + 1;
    length = min(step - 1, end - low);
  }
  return low;
}

// An entry of the list, in shared memory.
struct __align__(16) Active {
  uint32_t piece;    // Descriptor::piece
  uint32_t lenders;  // Descriptor::lenders << 2
  uint32_t x;        // SplitActivation
  uint32_t unused;
};
// Empty entries behind the list: what a warp asks for beyond its last group.
inline constexpr int kListPadding = 4 * kWarps + 4;

// The active columns of [first, last), in any order that is the same every time. Returns their number; `*exponent` is
// what sums must be multiplied by as a power of two (fp16 weights cannot hold every activation).
template <bool kIsBf16, bool kIndexed, int kColumnsPerThread>
__device__ int BuildList(const Activations& args, const column_piece::Descriptor* descriptors, int first, int last,
                         Active* list, uint32_t* scratch, int* exponent) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & 31;
  const int warp = thread >> 5;
  uint2 descriptor[kColumnsPerThread];
  float x[kColumnsPerThread];
  if constexpr (kIndexed) {
    WaitForPrerequisites();
    const int begin = LowerBound(args.indices, args.nnz, static_cast<uint32_t>(first));
    int end = LowerBound(args.indices, args.nnz, static_cast<uint32_t>(last));
    end = min(end, begin + kMaxSplitColumns);  // holds for ascending indices; keeps others inside the list
#pragma unroll
    for (int s = 0; s < kColumnsPerThread; ++s) {
      const int at = begin + s * kThreads + thread;
      descriptor[s] = make_uint2(0, 0);
      x[s] = 0.f;
      if (at < end) {
        const uint32_t column = __ldg(args.indices + at);
        if (column < static_cast<uint32_t>(args.k)) {
          descriptor[s] = __ldg(reinterpret_cast<const uint2*>(descriptors + column));
          x[s] = __ldg(args.values + at);
        }
      }
    }
  } else {
#pragma unroll
    for (int s = 0; s < kColumnsPerThread; ++s) {
      const int column = first + s * kThreads + thread;
      descriptor[s] = LoadIf64(descriptors + column, column < last);
    }
    WaitForPrerequisites();
    // Raw words first: a conversion behind each load would make their latencies add up.
    uint32_t raw[kColumnsPerThread];
    if (args.dtype == kF32) {
#pragma unroll
      for (int s = 0; s < kColumnsPerThread; ++s) {
        const int column = first + s * kThreads + thread;
        raw[s] = LoadIf32(static_cast<const float*>(args.x) + column, column < last);
      }
#pragma unroll
      for (int s = 0; s < kColumnsPerThread; ++s) x[s] = __uint_as_float(raw[s]);
    } else {
#pragma unroll
      for (int s = 0; s < kColumnsPerThread; ++s) {
        const int column = first + s * kThreads + thread;
        raw[s] = LoadIf16(static_cast<const uint16_t*>(args.x) + column, column < last);
      }
      const bool half = args.dtype == kF16;
#pragma unroll
      for (int s = 0; s < kColumnsPerThread; ++s) {
        x[s] = half ? __half2float(__ushort_as_half(static_cast<uint16_t>(raw[s]))) : __uint_as_float(raw[s] << 16);
      }
    }
  }
  // Counts of warp and step in scratch[s * kWarps + warp], the total behind them, the largest |x| behind that.
  constexpr int kCounts = kColumnsPerThread * kWarps;
  const bool scaled = !kIsBf16 && (kIndexed || args.dtype != kF16);
  int position[kColumnsPerThread];
  uint32_t largest = 0;
#pragma unroll
  for (int s = 0; s < kColumnsPerThread; ++s) {
    const bool active = column_piece::PlaceUnits(descriptor[s].x) != 0 && !(fabsf(x[s]) <= args.threshold);
    const uint32_t ballot = __ballot_sync(~0u, active);
    position[s] = active ? __popc(ballot & ((1u << lane) - 1)) : -1;
    if (lane == 0) scratch[s * kWarps + warp] = static_cast<uint32_t>(__popc(ballot));
    if (scaled && active) largest = max(largest, __float_as_uint(fabsf(x[s])));
  }
  if (scaled) {
    largest = __reduce_max_sync(~0u, largest);
    if (lane == 0) scratch[kCounts + 1 + warp] = largest;
  }
  __syncthreads();
  if (warp == 0) {
    constexpr int kEach = (kCounts + 31) / 32;  // counts a lane adds up
    uint32_t count[kEach];
    uint32_t inclusive = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = lane * kEach + i;
      count[i] = at < kCounts ? scratch[at] : 0u;
      inclusive += count[i];
    }
    const uint32_t own = inclusive;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const uint32_t other = __shfl_up_sync(~0u, inclusive, o);
      if (lane >= o) inclusive += other;
    }
    uint32_t before = inclusive - own;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = lane * kEach + i;
      if (at < kCounts) scratch[at] = before;
      before += count[i];
    }
    if (lane == 31) scratch[kCounts] = inclusive;
  }
  __syncthreads();
  *exponent = 0;
  if (scaled) {
    largest = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) largest = max(largest, scratch[kCounts + 1 + w]);
    const int top = static_cast<int>(largest >> 23);  // biased exponent; bring it to 2^14
    if (top > 0 && top < 255) *exponent = top - 127 - 14;
  }
#pragma unroll
  for (int s = 0; s < kColumnsPerThread; ++s) {
    if (position[s] < 0) continue;
    const float value = scaled ? ldexpf(x[s], -*exponent) : x[s];
    list[scratch[s * kWarps + warp] + static_cast<uint32_t>(position[s])] = {descriptor[s].x, descriptor[s].y << 2,
                                                                             SplitActivation<kIsBf16>(value), 0};
  }
  const int count = static_cast<int>(scratch[kCounts]);
  if (thread < kListPadding) list[count + thread] = {0, 0, 0, 0};
  __syncthreads();
  return count;
}

}  // namespace spmmd::cuda::column_piece_kernel

#endif  // SPMMD_KERNELS_CUDA_COLUMN_PIECE_LIST_CUH_
