// SpMV over row streams.
//
// A thread block of W warps computes one tile of R rows. Thread t owns piece t / R of row t % R and walks its slots in
// lockstep with the other lanes of its warp: 16 slots a lane from one block, whose loads are 16, 8 or 4 bytes a lane
// and coalesced. Activations are staged in shared memory once a tile; four run lengths become four shared-memory
// addresses with one dp4a each, so a slot costs one dp4a, one 16-bit load, a conversion and an FFMA beside its share of
// the decode: 6.0-6.4 instructions a slot verbatim, 7.2-7.8 coded. Partial sums of a row's pieces meet in shared
// memory. No atomics, one launch, the same result every time.
//
// Bytes: the format's, plus K activations a tile from L2. Limiter: device memory at large shapes; at small ones the
// fixed cost of a launch and of staging x before the first FFMA, which the first loads of the stream overlap.
//
// Coded bfloat16: a rebased word is a valid bfloat16 of tiny magnitude (exponent fields 0..3 or 0..7), so decoding is
// byte permutes only. Activations are scaled by 2^64 while staged, row sums by 2^(base - 64) at the end; both exact.
// Activations of 2^62 and more would overflow: a tile that meets one stages them unscaled instead.
#ifndef SPMMD_KERNELS_CUDA_ROW_STREAM_SPMV_CUH_
#define SPMMD_KERNELS_CUDA_ROW_STREAM_SPMV_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/row_stream_spmv.h"

namespace spmmd::cuda::row_stream_kernel {

using row_stream::Coding;
using row_stream::kBlockSlots;
using row_stream::kWarpLanes;

inline constexpr int kMaxThreads = row_stream::kMaxWarps * kWarpLanes;
// Rounds of the escape list that travel to shared memory while the main loop runs; later rounds are read directly.
inline constexpr int kEscapeRounds = 8;

// The stream is read once: keep it out of L1.
__device__ __forceinline__ uint4 LoadStream128(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 LoadStream64(const uint8_t* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint32_t LoadStream32(const uint8_t* p) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ uint32_t LoadStream16(const uint8_t* p) {
  uint16_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}

// Loads under a predicate, all of them in flight before the first is used: from an `if` nvcc makes a branch and a wait
// for each. The register keeps its value otherwise.
__device__ __forceinline__ void LoadIf128(uint4& v, const void* p, bool predicate) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(p), "r"(static_cast<uint32_t>(predicate)));
}
__device__ __forceinline__ void LoadIf32(uint32_t& v, const void* p, bool predicate) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p ld.global.nc.u32 %0, [%1];\n}"
               : "+r"(v)
               : "l"(p), "r"(static_cast<uint32_t>(predicate)));
}
__device__ __forceinline__ void LoadIf16(uint32_t& v, const void* p, bool predicate) {
  asm volatile(
      "{\n .reg .pred p;\n .reg .u16 h;\n setp.ne.u32 p, %2, 0;\n mov.u16 h, 0;\n @p ld.global.nc.u16 h, [%1];\n"
      " cvt.u32.u16 %0, h;\n}"
      : "=r"(v)
      : "l"(p), "r"(static_cast<uint32_t>(predicate)));
}

template <Coding kCoding, bool kBf16Weights, int kRunBits, int kTokens, bool kWideX>
struct Traits {
  static constexpr bool kCoded = kCoding != Coding::kVerbatim;
  static constexpr int kBlockBytes = row_stream::BlockBytes(kCoding, kRunBits);
  static constexpr int kElementBytes = kWideX ? 4 : 2;
  // Tokens of one column lie side by side, three padded to four.
  static constexpr int kSlotsPerColumn = kTokens == 3 ? 4 : kTokens;
  static constexpr int kColumnBytes = kElementBytes * kSlotsPerColumn;
};

// What a lane holds of a block between its load and its use. Unused members cost nothing.
struct LaneWords {
  uint4 low;   // coded: 16 low bytes; verbatim: values 0..7
  uint4 high;  // verbatim: values 8..15
  uint32_t runs0;
  uint32_t runs1;  // run_bits 4
  uint32_t planes;
  uint32_t third;
};

template <Coding kCoding, int kRunBits>
__device__ __forceinline__ LaneWords LoadBlock(const uint8_t* block, int lane) {
  LaneWords words;
  words.low = LoadStream128(block + lane * 16);
  if constexpr (kCoding == Coding::kVerbatim) {
    words.high = LoadStream128(block + 512 + lane * 16);
    if constexpr (kRunBits == 2) {
      words.runs0 = LoadStream32(block + row_stream::RunOffset(kCoding, kRunBits, 0) + lane * 4);
    } else {
      const uint2 runs = LoadStream64(block + row_stream::RunOffset(kCoding, kRunBits, 0) + lane * 8);
      words.runs0 = runs.x;
      words.runs1 = runs.y;
    }
  } else {
    if constexpr (kRunBits == 2) {
      const uint2 both = LoadStream64(block + row_stream::PlaneOffset(kRunBits, 0) + lane * 8);
      words.planes = both.x;
      words.runs0 = both.y;
    } else {
      words.planes = LoadStream32(block + row_stream::PlaneOffset(kRunBits, 0) + lane * 4);
      const uint2 runs = LoadStream64(block + row_stream::RunOffset(kCoding, kRunBits, 0) + lane * 8);
      words.runs0 = runs.x;
      words.runs1 = runs.y;
    }
    if constexpr (kCoding == Coding::kCode3) {
      words.third = LoadStream16(block + row_stream::ThirdBitOffset(kRunBits, 0) + lane * 2);
    }
  }
  return words;
}

template <bool kBf16>
__device__ __forceinline__ float2 Widen2(uint32_t pair) {
  if constexpr (kBf16) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}
template <bool kBf16>
__device__ __forceinline__ float Widen(uint32_t bits) {
  if constexpr (kBf16) {
    return __uint_as_float(bits << 16);
  } else {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  }
}

// x[token] of the column at `address` (shared memory), widened.
template <bool kBf16, int kTokens, bool kWideX>
__device__ __forceinline__ void LoadX(uint32_t address, float (&x)[kTokens]) {
  if constexpr (kWideX) {
    if constexpr (kTokens == 1) {
      x[0] = __uint_as_float(LoadShared32(address));
    } else if constexpr (kTokens == 2) {
      const uint2 v = LoadShared64(address);
      x[0] = __uint_as_float(v.x);
      x[1] = __uint_as_float(v.y);
    } else {
      const uint4 v = LoadShared128(address);
      x[0] = __uint_as_float(v.x);
      x[1] = __uint_as_float(v.y);
      x[2] = __uint_as_float(v.z);
    }
  } else {
    if constexpr (kTokens == 1) {
      x[0] = Widen<kBf16>(LoadShared16(address));
    } else if constexpr (kTokens == 2) {
      const float2 v = Widen2<kBf16>(LoadShared32(address));
      x[0] = v.x;
      x[1] = v.y;
    } else {
      const uint2 v = LoadShared64(address);
      const float2 low = Widen2<kBf16>(v.x);
      x[0] = low.x;
      x[1] = low.y;
      x[2] = Widen<kBf16>(v.y);
    }
  }
}

// Sixteen slots. `cursor` is the shared-memory address of the first column not yet passed. Two sums when there is one
// token, so that its FFMAs do not wait for each other.
template <typename T, Coding kCoding, bool kBf16, int kRunBits, int kTokens, bool kWideX>
__device__ __forceinline__ void Accumulate(const LaneWords& words, uint32_t& cursor, float (&sum)[2][kTokens]) {
  constexpr uint32_t kStep = T::kColumnBytes;
  const uint32_t value[8] = {words.low.x,  words.low.y,  words.low.z,  words.low.w,
                             words.high.x, words.high.y, words.high.z, words.high.w};
  uint32_t third = 0;
  if constexpr (kCoding == Coding::kCode3) third = words.third * 0x00100001u;  // bits 0..15 again at 20..31
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint32_t runs;
    if constexpr (kRunBits == 2) {
      runs = (words.runs0 >> (2 * q)) & 0x03030303u;
    } else {
      const uint32_t half = q < 2 ? words.runs0 : words.runs1;
      runs = ((q & 1) != 0 ? half >> 4 : half) & 0x0f0f0f0fu;
    }
    uint32_t address[4];
    address[0] = __dp4a(runs, kStep, cursor);
    address[1] = __dp4a(runs, kStep * 0x0101u, cursor);
    address[2] = __dp4a(runs, kStep * 0x010101u, cursor);
    address[3] = __dp4a(runs, kStep * 0x01010101u, cursor);
    uint32_t pair[2];
    if constexpr (kCoding == Coding::kVerbatim) {
      pair[0] = value[2 * q];
      pair[1] = value[2 * q + 1];
    } else {
      uint32_t high = __funnelshift_r(words.planes, words.planes, 2 * q) & 0x81818181u;
      if constexpr (kCoding == Coding::kCode3) high |= (third >> (3 + q)) & 0x02020202u;
      pair[0] = __byte_perm(value[q], high, 0x5140);
      pair[1] = __byte_perm(value[q], high, 0x7362);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 w = Widen2<kBf16>(pair[half]);
      float x[2][kTokens];
      LoadX<kBf16, kTokens, kWideX>(address[2 * half] + (2 * half) * kStep, x[0]);
      LoadX<kBf16, kTokens, kWideX>(address[2 * half + 1] + (2 * half + 1) * kStep, x[1]);
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
        sum[0][n] = fmaf(w.x, x[0][n], sum[0][n]);
        sum[kTokens == 1 ? 1 : 0][n] = fmaf(w.y, x[1][n], sum[kTokens == 1 ? 1 : 0][n]);
      }
    }
    cursor = address[3] + 4 * kStep;
  }
}

// Four bytes from device to shared memory, without a register in between.
__device__ __forceinline__ void CopyAsync4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void WaitCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// v * 2^e for e in [-252, 252], in two steps because 2^e itself may not be a float.
__device__ __forceinline__ float ScaleByPowerOfTwo(float v, int e) {
  const int half = e >> 1;
  return v * __int_as_float((half + 127) << 23) * __int_as_float((e - half + 127) << 23);
}

inline constexpr float kStagedScale = 0x1p64f;
inline constexpr int kStagedExponent = 64;
inline constexpr float kLargestScaled = 0x1p62f;
inline constexpr uint32_t kLargestScaledBf16 = (127 + 62) << 7;

// The first activations of a thread, asked for before the stream. Behind a stream's worth of loads they would arrive
// last, and until they do no block is used and no further one asked for: device memory would idle. Worth 1-2 % with
// verbatim values, nothing with coded ones, whose stream is shorter.
struct EarlyX {
  static constexpr int kVectors = 4;
  uint4 v[kVectors];
};
__device__ __forceinline__ void LoadEarlyX(const void* x, int columns, EarlyX& early) {
#pragma unroll
  for (int b = 0; b < EarlyX::kVectors; ++b) {
    const int i = static_cast<int>(threadIdx.x) + b * static_cast<int>(blockDim.x);
    LoadIf128(early.v[b], static_cast<const uint4*>(x) + i, i < columns / 8);
  }
}

// Copies `columns` activations of every token, from column `first`, to shared memory and zeroes the padding behind
// them. Coded layers get them times 2^64 when `scaled`; returns whether one was too large for that.
// `early`: what EarlyX has loaded, when `loaded`.
template <typename T, bool kBf16, int kTokens, bool kWideX, typename Args>
__device__ __forceinline__ bool StageX(const Args& args, int first, int columns, uint8_t* staged, bool scaled,
                                       EarlyX& early, bool loaded) {
  bool too_large = false;
  if constexpr (!kWideX && kTokens == 1) {
    const uint16_t* x = static_cast<const uint16_t*>(args.x) + first;
    int k = 0;
    if ((reinterpret_cast<uintptr_t>(x) & 15) == 0) {
      const int vectors = columns / 8;
      constexpr int kBatch = EarlyX::kVectors;
#pragma unroll 1
      for (int i0 = static_cast<int>(threadIdx.x); i0 < vectors; i0 += kBatch * static_cast<int>(blockDim.x)) {
        uint4(&v)[kBatch] = early.v;
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int i = i0 + b * static_cast<int>(blockDim.x);
          LoadIf128(v[b], reinterpret_cast<const uint4*>(x) + i, !loaded && i < vectors);
        }
        loaded = false;
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int i = i0 + b * static_cast<int>(blockDim.x);
          if constexpr (T::kCoded) {
            auto* pairs = reinterpret_cast<__nv_bfloat162*>(&v[b]);
#pragma unroll
            for (int p = 0; p < 4; ++p) {
              const uint32_t bits = *reinterpret_cast<const uint32_t*>(&pairs[p]);
              too_large |= (bits & 0x7fffu) >= kLargestScaledBf16 || (bits >> 16 & 0x7fffu) >= kLargestScaledBf16;
              if (scaled) pairs[p] = __hmul2(pairs[p], __float2bfloat162_rn(kStagedScale));
            }
          }
          if (i < vectors) reinterpret_cast<uint4*>(staged)[i] = v[b];
        }
      }
      k = vectors * 8;
    }
    for (k += static_cast<int>(threadIdx.x); k < args.staged_columns; k += static_cast<int>(blockDim.x)) {
      uint16_t bits = k < columns ? __ldg(x + k) : uint16_t{0};
      if constexpr (T::kCoded) {
        too_large |= (bits & 0x7fffu) >= kLargestScaledBf16;
        if (scaled) bits = __bfloat16_as_ushort(__hmul(__ushort_as_bfloat16(bits), __float2bfloat16_rn(kStagedScale)));
      }
      reinterpret_cast<uint16_t*>(staged)[k] = bits;
    }
  } else {
    int done = 0;
    if constexpr (!kWideX) {
      const uint16_t* x = static_cast<const uint16_t*>(args.x) + first;
      if ((reinterpret_cast<uintptr_t>(x) & 15) == 0 && (args.x_stride & 7) == 0) {
        done = columns / 8 * 8;
        constexpr int kBatch = 2;
#pragma unroll 1
        for (int i0 = static_cast<int>(threadIdx.x); i0 < columns / 8; i0 += kBatch * static_cast<int>(blockDim.x)) {
          uint4 v[kBatch][kTokens] = {};
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            const int i = i0 + b * static_cast<int>(blockDim.x);
#pragma unroll
            for (int n = 0; n < kTokens; ++n) {
              LoadIf128(v[b][n], reinterpret_cast<const uint4*>(x + n * args.x_stride) + i, i < columns / 8);
            }
          }
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            const int i = i0 + b * static_cast<int>(blockDim.x);
            if (i >= columns / 8) break;
            uint32_t pairs[kTokens][4];  // [token][two columns]
#pragma unroll
            for (int n = 0; n < kTokens; ++n) {
              pairs[n][0] = v[b][n].x;
              pairs[n][1] = v[b][n].y;
              pairs[n][2] = v[b][n].z;
              pairs[n][3] = v[b][n].w;
            }
            if constexpr (T::kCoded) {
#pragma unroll
              for (int n = 0; n < kTokens; ++n) {
#pragma unroll
                for (int p = 0; p < 4; ++p) {
                  const uint32_t bits = pairs[n][p];
                  too_large |= (bits & 0x7fffu) >= kLargestScaledBf16 || (bits >> 16 & 0x7fffu) >= kLargestScaledBf16;
                  if (scaled) {
                    const __nv_bfloat162 product =
                        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), __float2bfloat162_rn(kStagedScale));
                    pairs[n][p] = *reinterpret_cast<const uint32_t*>(&product);
                  }
                }
              }
            }
            // Columns side by side become tokens side by side.
            if constexpr (kTokens == 2) {
              uint4* to = reinterpret_cast<uint4*>(staged) + 2 * i;
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                to[h] = make_uint4(__byte_perm(pairs[0][2 * h], pairs[1][2 * h], 0x5410),
                                   __byte_perm(pairs[0][2 * h], pairs[1][2 * h], 0x7632),
                                   __byte_perm(pairs[0][2 * h + 1], pairs[1][2 * h + 1], 0x5410),
                                   __byte_perm(pairs[0][2 * h + 1], pairs[1][2 * h + 1], 0x7632));
              }
            } else if constexpr (kTokens == 3) {
              uint4* to = reinterpret_cast<uint4*>(staged) + 4 * i;
#pragma unroll
              for (int p = 0; p < 4; ++p) {
                to[p] = make_uint4(__byte_perm(pairs[0][p], pairs[1][p], 0x5410), pairs[2][p] & 0xffffu,
                                   __byte_perm(pairs[0][p], pairs[1][p], 0x7632), pairs[2][p] >> 16);
              }
            }
          }
        }
      }
    }
    constexpr int kBatch = kTokens == 1 ? 8 : 4;
#pragma unroll 1
    for (int k0 = done + static_cast<int>(threadIdx.x); k0 < args.staged_columns;
         k0 += kBatch * static_cast<int>(blockDim.x)) {
      uint32_t raw[kBatch][kTokens] = {};
      const bool wide = args.x_dtype == kF32;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int k = k0 + b * static_cast<int>(blockDim.x);
#pragma unroll
        for (int n = 0; n < kTokens; ++n) {
          const int64_t at = n * args.x_stride + first + k;
          if (wide) {
            LoadIf32(raw[b][n], static_cast<const float*>(args.x) + at, k < columns);
          } else {
            LoadIf16(raw[b][n], static_cast<const uint16_t*>(args.x) + at, k < columns);
          }
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int k = k0 + b * static_cast<int>(blockDim.x);
        if (k >= args.staged_columns) break;
        float value[T::kSlotsPerColumn] = {};
#pragma unroll
        for (int n = 0; n < kTokens; ++n) {
          value[n] = wide                   ? __uint_as_float(raw[b][n])
                     : args.x_dtype == kF16 ? Widen<false>(raw[b][n])
                                            : Widen<true>(raw[b][n]);
          if constexpr (T::kCoded) {
            too_large |= !(fabsf(value[n]) < kLargestScaled);
            if (scaled) value[n] *= kStagedScale;
          }
        }
        if constexpr (kWideX) {
          if constexpr (kTokens == 1) {
            reinterpret_cast<float*>(staged)[k] = value[0];
          } else if constexpr (kTokens == 2) {
            reinterpret_cast<float2*>(staged)[k] = make_float2(value[0], value[1]);
          } else {
            reinterpret_cast<float4*>(staged)[k] = make_float4(value[0], value[1], value[2], 0.f);
          }
        } else {
          uint16_t bits[T::kSlotsPerColumn] = {};
#pragma unroll
          for (int n = 0; n < kTokens; ++n) {  // exact: the value came from this type, or is a power of two times it
            bits[n] = kBf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value[n]))
                            : __half_as_ushort(__float2half_rn(value[n]));
          }
          if constexpr (kTokens == 2) {
            reinterpret_cast<uint32_t*>(staged)[k] = bits[0] | static_cast<uint32_t>(bits[1]) << 16;
          } else {
            reinterpret_cast<uint2*>(staged)[k] =
                make_uint2(bits[0] | static_cast<uint32_t>(bits[1]) << 16, bits[2 % T::kSlotsPerColumn]);
          }
        }
      }
    }
  }
  return too_large;
}

// Shared memory of a launch, in bytes from its start; the host sizes it with Total().
struct SharedLayout {
  int partial;  // float [token][thread]; a thread's own slot of token 0 holds its exponents during the main loop
  int out_row;  // int [row]: row of W, or -1
  int bias;     // float [row]
  int staged;   // activations
  int escapes;  // uint32 [round][thread]
  int total;

  __host__ __device__ SharedLayout(int threads, int rows, int tokens, int column_bytes, int staged_columns, bool coded)
      : partial(0),
        out_row(threads * tokens * 4),
        bias(out_row + rows * 4),
        staged((bias + rows * 4 + 15) / 16 * 16),
        escapes(staged + staged_columns * column_bytes),
        total(escapes + (coded ? threads * kEscapeRounds * 4 : 0)) {}
};

// kCompact trades the last percent of the steady state for code: one copy of the decode a block in flight, instead of a
// second and third for the tail. A kernel of a few microseconds runs its instructions cold, so it wins at small shapes.
template <Coding kCoding, bool kBf16, int kRunBits, int kTokens, bool kWideX, RowStreamMode kMode, int kDepth,
          int kOccupancy, bool kCompact>
__global__ void __launch_bounds__(kMaxThreads, kOccupancy)
    RowStreamSpmv(const __grid_constant__ RowStreamArgsOf<kMode == RowStreamMode::kGrouped ? kMaxGroup : 1> args) {
  using T = Traits<kCoding, kBf16, kRunBits, kTokens, kWideX>;
  extern __shared__ __align__(16) uint8_t shared[];
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = static_cast<int>(threadIdx.x % kWarpLanes);
  const int warp = static_cast<int>(threadIdx.x / kWarpLanes);
  const int warps = static_cast<int>(blockDim.x / kWarpLanes);
  constexpr bool kSegmented = kMode == RowStreamMode::kSegmented;
  int g = 0;
  if constexpr (kMode != RowStreamMode::kSingle) {
    while (g + 1 < args.layers && blockIdx.x >= args.layer[g + 1].first_tile) ++g;
  }
  const RowStreamLayerArgs& layer = args.layer[g];
  const uint32_t row_tile = blockIdx.x - layer.first_tile;
  const int rows = layer.rows_per_tile;
  const SharedLayout at(threads, rows, kTokens, T::kColumnBytes, args.staged_columns, T::kCoded);
  float* const partial = reinterpret_cast<float*>(shared + at.partial);
  const uint32_t x_base = SharedAddress(shared + at.staged);

  float total[kTokens] = {};
  const int segments = kSegmented ? args.segments : 1;
#pragma unroll 1
  for (int segment = 0; segment < segments; ++segment) {
    const int64_t tile = static_cast<int64_t>(row_tile) * segments + segment;
    const bool uniform = layer.uniform_blocks != 0;
    const int blocks = uniform ? layer.uniform_blocks : static_cast<int>(__ldg(&layer.tiles[tile].blocks));
    // A layer has fewer than 2^32 blocks.
    const uint32_t first_block = uniform ? static_cast<uint32_t>(tile) * static_cast<uint32_t>(warps * blocks)
                                         : __ldg(&layer.tiles[tile].first_block);
    const uint8_t* block =
        layer.stream + static_cast<uint64_t>(first_block + static_cast<uint32_t>(warp * blocks)) * T::kBlockBytes;
    EarlyX early = {};
    constexpr bool kMayLoadEarly = kTokens == 1 && !kWideX && !kSegmented && !T::kCoded;
    if (kMayLoadEarly && args.x_early != 0) LoadEarlyX(args.x, args.k, early);
    LaneWords words[kDepth];
#pragma unroll
    for (int j = 0; j < kDepth; ++j) {
      if (j < blocks) words[j] = LoadBlock<kCoding, kRunBits>(block + j * T::kBlockBytes, lane);
    }
    // Everything else the tile needs from device memory is asked for here and used behind the staging of x: one
    // latency.
    const uint32_t start = __ldg(layer.starts + tile * threads + thread);
    int base = 0;
    uint2 escapes = {0, 0};  // TileHeader::first_escape_unit, escape_units
    if constexpr (T::kCoded) {
      const uint32_t piece = static_cast<uint32_t>(thread) * layer.row_reciprocal >> kReciprocalBits;
      base = __ldg(layer.bases + tile * rows + (static_cast<uint32_t>(thread) - piece * static_cast<uint32_t>(rows)));
      escapes = __ldg(reinterpret_cast<const uint2*>(&layer.tiles[tile].first_escape_unit));
    }
    int out_row = -1;
    if (segment == 0 && thread < rows) {
      const uint32_t position = row_tile * static_cast<uint32_t>(rows) + static_cast<uint32_t>(thread);
      if (position < static_cast<uint32_t>(layer.m)) {
        out_row = layer.row_order != nullptr ? static_cast<int>(__ldg(layer.row_order + position))
                                             : static_cast<int>(position);
      }
    }
    const int first = kSegmented ? segment * args.segment_columns : 0;
    const int columns = kSegmented ? min(args.segment_columns, args.k - first) : args.k;
    if (segment == 0) {
      WaitForPrerequisites();
    } else {
      __syncthreads();  // every warp is done with the last segment's activations
    }
    bool too_large = StageX<T, kBf16, kTokens, kWideX>(args, first, columns, shared + at.staged, T::kCoded, early,
                                                       kMayLoadEarly && args.x_early != 0);
    if (segment == 0 && thread < rows) {
      reinterpret_cast<int*>(shared + at.out_row)[thread] = out_row;
      float* const bias = reinterpret_cast<float*>(shared + at.bias) + thread;
      if (layer.bias != nullptr && out_row >= 0) {
        CopyAsync4(SharedAddress(bias), layer.bias + out_row);
      } else {
        *bias = 0.f;
      }
    }
    if constexpr (T::kCoded) {
      const uint32_t slot = SharedAddress(shared + at.escapes) + static_cast<uint32_t>(thread * 4);
      const uint32_t* entries = layer.escapes + static_cast<int64_t>(escapes.x) * kWarpLanes + thread;
#pragma unroll 1
      for (int round = 0; round < kEscapeRounds; ++round) {
        if (static_cast<uint32_t>(round * warps + warp) >= escapes.y) break;
        CopyAsync4(slot + static_cast<uint32_t>(round * threads * 4), entries + round * threads);
      }
      int exponent = kStagedExponent;
      if (__syncthreads_or(too_large)) {
        exponent = 0;
        StageX<T, kBf16, kTokens, kWideX>(args, first, columns, shared + at.staged, false, early, false);
        __syncthreads();
      }
      reinterpret_cast<int*>(partial)[thread] = base << 8 | exponent;
    } else {
      (void)too_large;
      __syncthreads();
    }
    uint32_t cursor = x_base + start * T::kColumnBytes;
    float sum[2][kTokens] = {};
    block += kDepth * T::kBlockBytes;
    if constexpr (kCompact) {
#pragma unroll 1
      for (int i = 0; i < blocks; i += kDepth) {
#pragma unroll
        for (int j = 0; j < kDepth; ++j) {
          if (j == 0 || i + j < blocks) {
            Accumulate<T, kCoding, kBf16, kRunBits, kTokens, kWideX>(words[j], cursor, sum);
            if (i + j + kDepth < blocks) words[j] = LoadBlock<kCoding, kRunBits>(block + j * T::kBlockBytes, lane);
          }
        }
        block += kDepth * T::kBlockBytes;
      }
    } else {
      int left = blocks - 2 * kDepth;
      // Whole rounds carry no predicates: use block j, refill it.
#pragma unroll 1
      for (; left >= 0; left -= kDepth) {
#pragma unroll
        for (int j = 0; j < kDepth; ++j) {
          Accumulate<T, kCoding, kBf16, kRunBits, kTokens, kWideX>(words[j], cursor, sum);
          words[j] = LoadBlock<kCoding, kRunBits>(block + j * T::kBlockBytes, lane);
        }
        block += kDepth * T::kBlockBytes;
      }
      left += 2 * kDepth;  // blocks not yet used, the first kDepth of them loaded
#pragma unroll
      for (int j = 0; j < kDepth; ++j) {
        if (j < left) {
          Accumulate<T, kCoding, kBf16, kRunBits, kTokens, kWideX>(words[j], cursor, sum);
          if (kDepth + j < left) words[j] = LoadBlock<kCoding, kRunBits>(block + j * T::kBlockBytes, lane);
        }
      }
#pragma unroll
      for (int j = 0; j < kDepth - 1; ++j) {
        if (kDepth + j < left) Accumulate<T, kCoding, kBf16, kRunBits, kTokens, kWideX>(words[j], cursor, sum);
      }
    }
    // Not earlier: blocks of the next kernel that wait for this one would take the places of blocks still to come.
    if (segment + 1 == segments) TriggerDependents();
    WaitCopies();

    if constexpr (T::kCoded) {
      const int packed = reinterpret_cast<const int*>(partial)[thread];
      const int exponent = packed & 0xff;
      float escaped[kTokens] = {};
      const float unscale = exponent == 0 ? 1.f : 1.f / kStagedScale;
      const auto apply = [&](uint32_t entry) {
        float x[kTokens];
        LoadX<kBf16, kTokens, kWideX>(x_base + (entry >> 16) * T::kColumnBytes, x);
        const float w = __uint_as_float(entry << 16);
#pragma unroll
        for (int n = 0; n < kTokens; ++n) escaped[n] = fmaf(w, x[n] * unscale, escaped[n]);
      };
      const uint32_t slot = SharedAddress(shared + at.escapes) + static_cast<uint32_t>(thread * 4);
#pragma unroll 1
      for (int round = 0; round < kEscapeRounds; ++round) {
        if (static_cast<uint32_t>(round * warps + warp) >= escapes.y) break;
        apply(LoadShared32(slot + static_cast<uint32_t>(round * threads * 4)));
      }
      const uint32_t* entries = layer.escapes + static_cast<int64_t>(escapes.x) * kWarpLanes + thread;
#pragma unroll 1
      for (int round = kEscapeRounds; static_cast<uint32_t>(round * warps + warp) < escapes.y; round += 4) {
        uint32_t entry[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const bool in = static_cast<uint32_t>((round + j) * warps + warp) < escapes.y;
          entry[j] = in ? __ldg(entries + static_cast<int64_t>(round + j) * threads) : 0u;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) apply(entry[j]);
      }
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
        const float row_sum = kTokens == 1 ? sum[0][n] + sum[1][n] : sum[0][n];
        total[n] += ScaleByPowerOfTwo(row_sum, (packed >> 8) - exponent) + escaped[n];
      }
    } else {
#pragma unroll
      for (int n = 0; n < kTokens; ++n) total[n] += kTokens == 1 ? sum[0][n] + sum[1][n] : sum[0][n];
    }
  }

#pragma unroll
  for (int n = 0; n < kTokens; ++n) partial[n * threads + thread] = total[n];
  __syncthreads();
  if (thread >= rows) return;
  const int row = reinterpret_cast<const int*>(shared + at.out_row)[thread];
  if (row < 0) return;
  const float bias = reinterpret_cast<const float*>(shared + at.bias)[thread];
#pragma unroll
  for (int n = 0; n < kTokens; ++n) {
    const float* column = partial + n * threads + thread;
    float part[4] = {bias, 0.f, 0.f, 0.f};  // in an order that depends on the number of pieces alone
    int p = 0;
#pragma unroll 2
    for (; p + 4 <= layer.pieces; p += 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) part[i] += column[(p + i) * rows];
    }
    for (; p < layer.pieces; ++p) part[0] += column[p * rows];
    const float y = (part[0] + part[1]) + (part[2] + part[3]);
    if (layer.y_dtype == kF32 && layer.activation == 0) {  // straight on: other code costs a miss a line
      static_cast<float*>(layer.y)[n * layer.y_stride + row] = y;
      continue;
    }
    const Epilogue epilogue = {layer.y, nullptr, layer.y_stride, layer.y_dtype, layer.activation};
    StoreOutput(epilogue, n, row, y);
  }
}

template <Coding kCoding, bool kBf16, int kRunBits, int kTokens, bool kWideX>
const void* PickVariant(const RowStreamKernelKey& key) {
  constexpr auto kSingle = RowStreamMode::kSingle;
  if (key.mode == RowStreamMode::kSegmented) {
    return reinterpret_cast<const void*>(
        &RowStreamSpmv<kCoding, kBf16, kRunBits, kTokens, kWideX, RowStreamMode::kSegmented, 2, 2, true>);
  }
  if (key.mode == RowStreamMode::kGrouped) {
    return reinterpret_cast<const void*>(
        &RowStreamSpmv<kCoding, kBf16, kRunBits, kTokens, kWideX, RowStreamMode::kGrouped, 2, 2, true>);
  }
  if constexpr (kTokens == 1 && !kWideX) {
    if (key.variant == 0) {
      return reinterpret_cast<const void*>(&RowStreamSpmv<kCoding, kBf16, kRunBits, 1, false, kSingle, 2, 3, false>);
    }
    return reinterpret_cast<const void*>(&RowStreamSpmv<kCoding, kBf16, kRunBits, 1, false, kSingle, 3, 2, true>);
  } else {
    return reinterpret_cast<const void*>(
        &RowStreamSpmv<kCoding, kBf16, kRunBits, kTokens, kWideX, kSingle, 2, 2, true>);
  }
}

template <Coding kCoding, bool kBf16>
const void* PickKernel(const RowStreamKernelKey& key) {
  if (key.coding != kCoding || key.bf16 != kBf16) return nullptr;
  const auto by_width = [&]<int kRunBits, int kTokens>() {
    return key.wide_x ? PickVariant<kCoding, kBf16, kRunBits, kTokens, true>(key)
                      : PickVariant<kCoding, kBf16, kRunBits, kTokens, false>(key);
  };
  const auto by_tokens = [&]<int kRunBits>() -> const void* {
    switch (key.tokens) {
      case 1:
        return by_width.template operator()<kRunBits, 1>();
      case 2:
        return by_width.template operator()<kRunBits, 2>();
      case 3:
        return by_width.template operator()<kRunBits, 3>();
      default:
        return nullptr;
    }
  };
  return key.run_bits == 2 ? by_tokens.template operator()<2>() : by_tokens.template operator()<4>();
}

}  // namespace spmmd::cuda::row_stream_kernel

#endif  // SPMMD_KERNELS_CUDA_ROW_STREAM_SPMV_CUH_
