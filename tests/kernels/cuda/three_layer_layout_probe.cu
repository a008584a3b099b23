#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "tests/kernels/cuda/three_layer_layout_probe.h"

namespace spmmd::testing {
namespace {

constexpr int kSlots = 4096;
constexpr uint32_t kNoMove = 0xffffffffu;

// A code number's slot.
__device__ uint32_t SlotOf(uint32_t number) { return (number & 63u) << 6 | number >> 6; }

__device__ uint32_t Complement(uint32_t x) {
  const uint32_t e = (x >> 3 ^ x >> 1) & 0x11111111u;
  return x ^ (e * 5 | (e ^ 0x11111111u) * 10);
}

template <int kSelector>
__device__ void MmaSp(float* c, uint4 a, const uint32_t* b, uint32_t metadata) {
  asm volatile(
      "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
        "n"(kSelector));
}

template <int kSelector>
__device__ void WgmmaSp(float* c, uint4 a, uint64_t b_descriptor, uint32_t metadata) {
  asm volatile("wgmma.fence.sync.aligned;");
  asm volatile(
      "{ .reg .pred accumulate; setp.eq.u32 accumulate, 0, 0; "
      "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, %9, %10, accumulate, 1, 1, 0; }"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b_descriptor), "r"(metadata), "n"(kSelector));
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// One block of four warps a row of tiles.
template <bool kWgmma>
__global__ void __launch_bounds__(128) Probe(ThreeLayerSections w, int64_t m, int64_t k, const uint16_t* x, float* y) {
  __shared__ alignas(16) uint16_t kept[kSlots];
  __shared__ alignas(16) uint16_t moved[kSlots];
  __shared__ alignas(128) uint16_t b_tile[128 / 8][8][8];  // core matrices of 8 tokens x 8 columns, along K
  const int lane = threadIdx.x % 32;
  const int strip = threadIdx.x / 32;
  const int64_t col_tiles = (k + 127) / 128;
  float c[4] = {0, 0, 0, 0};
  for (int64_t tile_col = 0; tile_col < col_tiles; ++tile_col) {
    const int64_t tile = blockIdx.x * col_tiles + tile_col;
    for (int i = threadIdx.x; i < kSlots; i += 128) {
      kept[i] = w.values[tile * kSlots + i];
      moved[i] = 0;
    }
    for (int i = threadIdx.x; i < 8 * 128; i += 128) {
      const int token = i / 128;
      const int64_t col = tile_col * 128 + i % 128;
      b_tile[i % 128 / 8][token][i % 8] = col < k ? x[token * k + col] : 0;
    }
    __syncthreads();
    const uint64_t begin = w.code_offsets[tile] * uint64_t{128};
    const uint64_t end = w.code_offsets[tile + 1] * uint64_t{128};
    const int thread = threadIdx.x;
    if (thread < 64 && end > begin) {
      const uint8_t* codes = w.codes + begin;
      const uint32_t first = reinterpret_cast<const uint32_t*>(codes)[thread];
      if (first != kNoMove) {
        uint32_t from = first & 0xffff;
        uint32_t to = first >> 16;
        moved[SlotOf(to)] = kept[SlotOf(from)];
        kept[SlotOf(from)] = 0;
        for (uint64_t unit = 256; unit < end - begin; unit += 128) {
          for (int half = 0; half < 2; ++half) {
            const uint32_t code = codes[unit + 2 * thread + half];
            from += code & 15;
            to += code >> 4;
            if ((code & 15) != 0 && code >> 4 != 0) {
              moved[SlotOf(to)] = kept[SlotOf(from)];
              kept[SlotOf(from)] = 0;
            }
          }
        }
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const uint32_t* words = w.metadata + tile * 256 + (strip * 32 + lane) * 2;
    for (int step = 0; step < 4; ++step) {
      const int index = (4 * strip + step) * 32 + lane;
      const uint4 a = reinterpret_cast<const uint4*>(kept)[index];
      const uint4 r = reinterpret_cast<const uint4*>(moved)[index];
      const uint32_t word = words[step / 2];
      if (kWgmma) {
        // K-major, no swizzle: core matrices 128 bytes apart along K (leading offset); one group of 8 tokens only.
        const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(&b_tile[step * 4][0][0]));
        const uint64_t descriptor =
            uint64_t{(address & 0x3ffffu) >> 4} | uint64_t{128 >> 4} << 16 | uint64_t{128 >> 4} << 32;
        if (step % 2 == 0) {
          WgmmaSp<0>(c, a, descriptor, word);
          WgmmaSp<0>(c, r, descriptor, Complement(word));
        } else {
          WgmmaSp<1>(c, a, descriptor, word);
          WgmmaSp<1>(c, r, descriptor, Complement(word));
        }
      } else {
        uint32_t b[4];
        for (int i = 0; i < 4; ++i) {
          b[i] = *reinterpret_cast<const uint32_t*>(&b_tile[step * 4 + i][lane / 4][lane % 4 * 2]);
        }
        if (step % 2 == 0) {
          MmaSp<0>(c, a, b, word);
          MmaSp<0>(c, r, b, Complement(word));
        } else {
          MmaSp<1>(c, a, b, word);
          MmaSp<1>(c, r, b, Complement(word));
        }
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i) {
    const int64_t row = blockIdx.x * 64 + strip * 16 + lane / 4 + i / 2 * 8;
    const int token = lane % 4 * 2 + i % 2;
    if (row < m) y[token * m + row] = c[i];
  }
  __syncthreads();
  for (int64_t tile_col = 0; tile_col < col_tiles; ++tile_col) {
    const int64_t tile = blockIdx.x * col_tiles + tile_col;
    for (uint64_t i = w.residual_offsets[tile] + threadIdx.x; i < w.residual_offsets[tile + 1]; i += 128) {
      const int64_t row = blockIdx.x * 64 + (w.residual_positions[i] >> 7);
      const int64_t col = tile_col * 128 + (w.residual_positions[i] & 127);
      const float value = __half2float(__ushort_as_half(w.residual_values[i]));
      for (int token = 0; token < 8; ++token) {
        atomicAdd(&y[token * m + row], value * __half2float(__ushort_as_half(x[token * k + col])));
      }
    }
  }
}

template <typename T>
const T* Upload(const T* host, size_t count) {
  void* device = nullptr;
  cudaMalloc(&device, count * sizeof(T) + 16);
  cudaMemcpy(device, host, count * sizeof(T), cudaMemcpyHostToDevice);
  return static_cast<const T*>(device);
}

}  // namespace

bool HasHopperGpu() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return false;
  cudaDeviceProp properties;
  return cudaGetDeviceProperties(&properties, 0) == cudaSuccess && properties.major == 9;
}

const char* ProbeThreeLayer(const ThreeLayerSections& host, int64_t m, int64_t k, const uint16_t* x, float* y,
                            bool use_wgmma) {
  const auto row_tiles = static_cast<size_t>((m + 63) / 64);
  const size_t tiles = row_tiles * static_cast<size_t>((k + 127) / 128);
  ThreeLayerSections w = host;
  w.values = Upload(host.values, tiles * kSlots);
  w.metadata = Upload(host.metadata, tiles * 256);
  w.code_offsets = Upload(host.code_offsets, tiles + 1);
  w.codes = Upload(host.codes, host.code_bytes);
  w.residual_offsets = Upload(host.residual_offsets, tiles + 1);
  w.residual_positions = Upload(host.residual_positions, host.residual_entries);
  w.residual_values = Upload(host.residual_values, host.residual_entries);
  const uint16_t* device_x = Upload(x, static_cast<size_t>(kProbeTokens * k));
  const float* device_y = Upload(y, static_cast<size_t>(kProbeTokens * m));
  const auto kernel = use_wgmma ? Probe<true> : Probe<false>;
  kernel<<<static_cast<unsigned>(row_tiles), 128>>>(w, m, k, device_x, const_cast<float*>(device_y));
  const cudaError_t launched = cudaGetLastError();
  const cudaError_t copied =
      cudaMemcpy(y, device_y, static_cast<size_t>(kProbeTokens * m) * sizeof(float), cudaMemcpyDeviceToHost);
  for (const void* pointer :
       {static_cast<const void*>(w.values), static_cast<const void*>(w.metadata),
        static_cast<const void*>(w.code_offsets), static_cast<const void*>(w.codes),
        static_cast<const void*>(w.residual_offsets), static_cast<const void*>(w.residual_positions),
        static_cast<const void*>(w.residual_values), static_cast<const void*>(device_x),
        static_cast<const void*>(device_y)}) {
    cudaFree(const_cast<void*>(pointer));
  }
  if (launched != cudaSuccess) return cudaGetErrorString(launched);
  return copied == cudaSuccess ? nullptr : cudaGetErrorString(copied);
}

}  // namespace spmmd::testing
