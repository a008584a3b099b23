// A thread block takes 512 rows and a range of columns: it compacts the range's active columns into shared memory,
// reads each 16 bytes a thread with eight columns in flight, and adds its sums to y. One wave of two blocks a
// multiprocessor.
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/bench/dense_column_skip.h"

namespace spmmd {
namespace {

constexpr int kThreads = 256;
constexpr int kBlockRows = 512;
constexpr int kLanes = kBlockRows / 8;      // threads across the rows
constexpr int kGroups = kThreads / kLanes;  // columns read at once
constexpr int kInFlight = 8;                // of a group
constexpr int kMaxColumns = 4096;           // of a range

struct Active {
  int column;
  float x;
};

__global__ void __launch_bounds__(kThreads, 2)
    DenseColumnSkip(const uint16_t* __restrict__ columns, const uint16_t* __restrict__ x, float* y, int m, int k,
                    int range) {
  extern __shared__ Active list[];
  __shared__ int count;
  __shared__ float sums[kGroups][kBlockRows];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int first = static_cast<int>(blockIdx.x) * range;
  const int last = min(first + range, k);
  if (thread == 0) count = 0;
  __syncthreads();
  for (int c0 = first; c0 < last; c0 += kThreads) {
    const int c = c0 + thread;
    const float value = c < last ? __half2float(__ushort_as_half(__ldg(x + c))) : 0.f;
    const unsigned active = __ballot_sync(~0u, value != 0.f);
    int base = 0;
    if (lane == 0) base = atomicAdd(&count, __popc(active));
    base = __shfl_sync(~0u, base, 0);
    if (value != 0.f) list[base + __popc(active & ((1u << lane) - 1))] = {c, value};
  }
  __syncthreads();
  const int row = static_cast<int>(blockIdx.y) * kBlockRows + thread % kLanes * 8;
  const int group = thread / kLanes;
  const bool inside = row < m;
  float sum[8] = {};
  for (int i0 = group; i0 < count; i0 += kGroups * kInFlight) {
    uint4 v[kInFlight] = {};
    float weight[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int i = i0 + j * kGroups;
      const Active entry = i < count ? list[i] : Active{0, 0.f};
      weight[j] = entry.x;
      const uint16_t* from = columns + static_cast<int64_t>(entry.column) * m + row;
      asm volatile(
          "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
          " @p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
          : "+r"(v[j].x), "+r"(v[j].y), "+r"(v[j].z), "+r"(v[j].w)
          : "l"(from), "r"(static_cast<unsigned>(inside && i < count)));
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const unsigned word[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word[w]));
        sum[2 * w] = fmaf(pair.x, weight[j], sum[2 * w]);
        sum[2 * w + 1] = fmaf(pair.y, weight[j], sum[2 * w + 1]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[group][thread % kLanes * 8 + i] = sum[i];
  __syncthreads();
  const int quad = thread * 4;
  const int to = static_cast<int>(blockIdx.y) * kBlockRows + quad;
  if (quad >= kBlockRows || to >= m) return;
  float total[4] = {};
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] += sums[g][quad + i];
  }
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(y + to), "f"(total[0]), "f"(total[1]),
               "f"(total[2]), "f"(total[3])
               : "memory");
}

}  // namespace

void LaunchDenseColumnSkip(const uint16_t* columns, const uint16_t* x, float* y, int m, int k, int multiprocessors,
                           cudaStream_t stream) {
  const int blocks = (m + kBlockRows - 1) / kBlockRows;
  int splits = std::max(1, 2 * multiprocessors / blocks);
  splits = std::max(splits, (k + kMaxColumns - 1) / kMaxColumns);
  const int range = (k + splits - 1) / splits;
  const dim3 grid(static_cast<unsigned>((k + range - 1) / range), static_cast<unsigned>(blocks));
  DenseColumnSkip<<<grid, kThreads, static_cast<size_t>(range) * sizeof(Active), stream>>>(columns, x, y, m, k, range);
}

}  // namespace spmmd
