// SpMspV over column pieces, with accumulation in the tensor core's registers.
//
// A thread block of 8 warps owns one row block (512 rows) and one range of columns. It compacts the range's active
// columns into a list in shared memory; a warp then takes four of them at a time and treats them as the K dimension of
// an mma.m16n8k16: lane (g, t) of a group of four holds the elements of column t that stream g stores, two a register,
// and B carries x on a diagonal pattern,
//     B[2t][0] = B[2t+1][1] = B[2t+8][2] = B[2t+9][3] = x_t,
// so that the eight elements a lane feeds into one instruction land in eight different sums: C accumulates in fp32
// without a conversion, an FFMA or a shared-memory atomic. It is the register accumulation that the Celty paper
// (section 4) asks of new hardware. Columns 4..7 of B carry what x lost when it was rounded to the weights' type, so
// activations of any type cost nothing more.
//
// Expanding a compressed column: its values are staged as E[i] = (v[i-1], v[i]) in shared memory, one bank a lane, so
// that the pair of elements (d, d+1) is E[number of nonzeros up to d] under the two elements' masks: one dp4a an
// address, one byte permute a mask, no branch, no bank conflict; 12 instructions for 4 elements. Lanes load 16 bytes of
// one stream, coalesced, one group of columns ahead, and hand them to the decoding lanes through the staging.
//
// Sums of the 8 warps meet in shared memory; those of a row block's column ranges either in fp32 reductions on y
// (accumulate) or in slabs that some of its thread blocks wait for and add up in order (overwrite: deterministic,
// nothing to clear).
// Limiter: at 28672x7168 device memory keeps 80 % of the time busy at 30 %, 56 % at 70 %; the rest is waiting for
// pieces one group ahead, with 5.5-6 instructions a dense element of an active column close behind. At 4096x4096,
// .5/.5, a block's clock says: list 0.6 us, first group there and used 2.4 us later, second and last group 1.1 us, both
// reductions 0.9 us, launch 1.2 us.
#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>

#include "kernels/cuda/column_piece_spmspv.h"
#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/parallel.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/format/column_piece_layout.h"

namespace spmmd::cuda {
namespace {

using column_piece::kBlockRows;
using column_piece::kMaxChunks;
using column_piece::kStreamRows;
using column_piece::kStreams;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kMaxSplitColumns = 8 * kThreads;  // what a block's list holds
constexpr int kColumnsAtOnce = 4;               // of a warp: the K dimension of the mma
constexpr int kMmas = kStreamRows / 8;

// Layers of one launch that share their activations (q, k and v; gate and up).
constexpr int kMaxGroup = 4;

struct SpmspvLayer {
  const uint8_t* pieces;
  const uint32_t* descriptors;
  const uint64_t* block_units;
  Epilogue epilogue;
  int32_t m;
  int32_t first_block;  // of this layer among the launch's row blocks
};

// How the sums of a row block's column ranges meet.
enum class Meeting : int32_t {
  kReduce,  // fp32 reductions on y, in any order
  // Slabs that are zero between launches: a word that is not has arrived. The last kFinishers ranges of a row block
  // wait for all of them, each for its share of the rows. Blocks start in the order of their indices, so what a
  // finisher waits for has started, save at most kFinishers - 1 blocks, for which the device always has room.
  kPolled,
  kTicket,  // slabs, and the last block to finish adds them up: three trips to L2 one behind the other
};
constexpr int kFinishers = 4;
constexpr uint64_t kPolledBytes = kCounterBytes;  // the part of the workspace that is zero between launches

// Column ranges of a row block.
struct SplitsArgs {
  int32_t count;
  int32_t columns;
  uint32_t reciprocal;  // i / count == i * reciprocal >> 32 when count > 1
};

struct SpmspvArgs {
  // Dense activations, or ascending indices and fp32 values.
  const void* x;
  const uint32_t* x_indices;
  const float* x_values;
  int32_t x_nnz;
  int32_t x_dtype;
  float threshold;
  int32_t k;
  int32_t layers;
  SplitsArgs splits[2];  // of the first `longer_blocks` row blocks, and of the others
  int32_t longer_blocks;
  bool accumulate;  // y += W x in fp32
  Meeting meeting;
  float* slab;  // [block][split][512]
  uint32_t* counters;
  SpmspvLayer layer[kMaxGroup];
};

__device__ __forceinline__ void StoreShared32(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Loads under a predicate, without the branch that nvcc would make of an `if`. The registers keep their value
// otherwise.
__device__ __forceinline__ void LoadPiece128(uint4& v, const uint8_t* p, bool predicate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
      " @p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(p), "r"(static_cast<uint32_t>(predicate)));
}
__device__ __forceinline__ void LoadPiece64(uint2& v, const uint8_t* p, bool predicate) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n @p ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n}"
               : "+r"(v.x), "+r"(v.y)
               : "l"(p), "r"(static_cast<uint32_t>(predicate)));
}

// Byte permute whose selector may replicate signs (bit 3 of a nibble); __byte_perm masks that bit away.
__device__ __forceinline__ uint32_t SignPermute(uint32_t v, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(out) : "r"(v), "r"(selector));
  return out;
}

__device__ __forceinline__ void ReduceAdd4(float* to, float4 v) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

__device__ __forceinline__ void StoreVolatile4(float* to, float4 v) {
  asm volatile("st.volatile.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
__device__ __forceinline__ float4 LoadVolatile4(const float* from) {
  float4 v;
  asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

// Zero unless the predicate holds.
__device__ __forceinline__ uint32_t LoadIf32(const void* p, bool predicate) {
  uint32_t v;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n mov.u32 %0, 0;\n @p ld.global.u32 %0, [%1];\n}"
               : "=r"(v)
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
__device__ int LowerBound(const uint32_t* indices, int n, uint32_t key) {
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

// Four columns of a warp on their way from device memory.
template <int kPairs>
struct Group {
  uint4 pair[kPairs];
  uint2 tail;
  uint2 bits;
  int pairs;
  uint32_t x;
};

struct Active {
  uint32_t descriptor;
  uint32_t x;  // SplitActivation
};

// The active columns of [first, last), in any order that is the same every time. Returns their number; `*exponent` is
// what sums must be multiplied by as a power of two (fp16 weights cannot hold every activation).
template <bool kIsBf16, bool kIndexed, int kColumnsPerThread>
__device__ int BuildList(const SpmspvArgs& args, const uint32_t* descriptors, int first, int last, Active* list,
                         uint32_t* scratch, int* exponent) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & 31;
  const int warp = thread >> 5;
  uint32_t descriptor[kColumnsPerThread];
  float x[kColumnsPerThread];
  if constexpr (kIndexed) {
    WaitForPrerequisites();
    const int begin = LowerBound(args.x_indices, args.x_nnz, static_cast<uint32_t>(first));
    int end = LowerBound(args.x_indices, args.x_nnz, static_cast<uint32_t>(last));
    end = min(end, begin + kMaxSplitColumns);  // holds for ascending indices; keeps others inside the list
#pragma unroll
    for (int s = 0; s < kColumnsPerThread; ++s) {
      const int at = begin + s * kThreads + thread;
      descriptor[s] = 0;
      x[s] = 0.f;
      if (at < end) {
        const uint32_t column = __ldg(args.x_indices + at);
        if (column < static_cast<uint32_t>(args.k)) {
          descriptor[s] = __ldg(descriptors + column);
          x[s] = __ldg(args.x_values + at);
        }
      }
    }
  } else {
#pragma unroll
    for (int s = 0; s < kColumnsPerThread; ++s) {
      const int column = first + s * kThreads + thread;
      descriptor[s] = LoadIf32(descriptors + column, column < last);
    }
    WaitForPrerequisites();
    // Raw words first: a conversion behind each load would make their latencies add up.
    uint32_t raw[kColumnsPerThread];
    if (args.x_dtype == kF32) {
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
      const bool half = args.x_dtype == kF16;
#pragma unroll
      for (int s = 0; s < kColumnsPerThread; ++s) {
        x[s] = half ? __half2float(__ushort_as_half(static_cast<uint16_t>(raw[s]))) : __uint_as_float(raw[s] << 16);
      }
    }
  }
  // Counts of warp and step in scratch[s * kWarps + warp], the total behind them, the largest |x| behind that.
  constexpr int kCounts = kColumnsPerThread * kWarps;
  const bool scaled = !kIsBf16 && (kIndexed || args.x_dtype != kF16);
  int position[kColumnsPerThread];
  uint32_t largest = 0;
#pragma unroll
  for (int s = 0; s < kColumnsPerThread; ++s) {
    const bool active = column_piece::DescriptorChunks(descriptor[s]) != 0 && !(fabsf(x[s]) <= args.threshold);
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
    list[scratch[s * kWarps + warp] + static_cast<uint32_t>(position[s])] = {descriptor[s],
                                                                             SplitActivation<kIsBf16>(value)};
  }
  const int count = static_cast<int>(scratch[kCounts]);
  __syncthreads();
  return count;
}

// kPairs: 16-byte rows of a piece a lane may have to load, from the layer's longest piece.
template <bool kIsBf16, int kPairs, bool kIndexed, int kColumnsPerThread>
__global__ void __launch_bounds__(kThreads, 2) ColumnPieceSpmspv(const __grid_constant__ SpmspvArgs args) {
  constexpr int kStageWords = kPairs * 8 + 5;  // E[] of one lane
  constexpr int kStageBytes = kStageWords * 128;
  constexpr int kUnionBytes = kWarps * (kStageBytes > kBlockRows * 4 ? kStageBytes : kBlockRows * 4);
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ uint32_t scratch[kColumnsPerThread * kWarps + 1 + kWarps];
  __shared__ bool is_last;
  Active* const list = reinterpret_cast<Active*>(shared + kUnionBytes);

  const int lane = static_cast<int>(threadIdx.x & 31);
  const int warp = static_cast<int>(threadIdx.x >> 5);
  const int g = lane >> 2;  // decoding: stream
  const int t = lane & 3;   //           column of the group
  const int load_column = lane >> 3;
  const int load_stream = lane & 7;
  const uint32_t longer = static_cast<uint32_t>(args.longer_blocks * args.splits[0].count);
  const bool is_longer = blockIdx.x < longer;
  const SplitsArgs& splits = args.splits[is_longer ? 0 : 1];
  const uint32_t index = blockIdx.x - (is_longer ? 0u : longer);
  const uint32_t quotient = splits.count == 1 ? index : __umulhi(index, splits.reciprocal);
  const int split = static_cast<int>(index - quotient * static_cast<uint32_t>(splits.count));
  const int block = static_cast<int>(quotient) + (is_longer ? 0 : args.longer_blocks);
  const int first = min(split * splits.columns, args.k);
  const int last = min(first + splits.columns, args.k);
  int of = 0;
  while (of + 1 < args.layers && block >= args.layer[of + 1].first_block) ++of;
  const SpmspvLayer& layer = args.layer[of];
  const int layer_block = block - layer.first_block;
  const uint64_t first_unit = __ldg(layer.block_units + layer_block);  // not used before the list is there
  TriggerDependents();  // the grid is one wave: what follows takes the places of blocks that are done

  int exponent;
  const int active = BuildList<kIsBf16, kIndexed, kColumnsPerThread>(
      args, layer.descriptors + static_cast<int64_t>(layer_block) * args.k, first, last, list, scratch, &exponent);
  const uint8_t* const pieces = layer.pieces + first_unit * column_piece::kUnitBytes;
  const uint32_t stage = SharedAddress(shared) + static_cast<uint32_t>(warp * kStageBytes);
  const uint32_t read_base = stage + static_cast<uint32_t>(lane * 4);
  const uint32_t write_base = stage + static_cast<uint32_t>((load_stream * 4 + load_column) * 4);
  float sum[kMmas][4] = {};
  Group<kPairs> group = {};  // being fetched

  const auto fetch = [&](Group<kPairs>& to, int at) {
    {
      const int entry = at + load_column;
      const uint32_t descriptor = entry < active ? list[entry].descriptor : 0u;
      const int chunks = column_piece::DescriptorChunks(descriptor);
      to.pairs = chunks >> 1;
      const uint8_t* p = pieces +
                         static_cast<uint64_t>(column_piece::DescriptorOffset(descriptor)) * column_piece::kUnitBytes +
                         column_piece::kBitmapBytes;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) LoadPiece128(to.pair[i], p + i * 128 + load_stream * 16, i < to.pairs);
      LoadPiece64(to.tail, p + to.pairs * 128 + load_stream * 8, (chunks & 1) != 0);
    }
    {
      const int entry = at + t;
      const Active column = entry < active ? list[entry] : Active{0, 0};
      to.x = column.x;
      to.bits = make_uint2(0, 0);
      LoadPiece64(
          to.bits,
          pieces + static_cast<uint64_t>(column_piece::DescriptorOffset(column.descriptor)) * column_piece::kUnitBytes +
              g * 8,
          entry < active);
    }
  };

  const auto consume = [&](Group<kPairs>& from, int at) {
    const uint2 now = from.bits;
    // Rows n = 0..3 of B take x, 4..7 what its rounding lost.
    const uint32_t half = g < 4 ? from.x & 0xffffu : from.x >> 16;
    const uint32_t b0 = (g & 3) == 0 ? half : (g & 3) == 1 ? half << 16 : 0u;
    const uint32_t b1 = (g & 3) == 2 ? half : (g & 3) == 3 ? half << 16 : 0u;
    const int most = __reduce_max_sync(~0u, from.pairs);
    uint32_t previous = 0;
    uint32_t before_tail = 0;
    __syncwarp();
    constexpr int kUsual = kPairs > 3 ? kPairs - 3 : kPairs;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (i < kUsual || most > i) {
        const uint32_t to = write_base + static_cast<uint32_t>(i * 1024);
        StoreShared32(to, __byte_perm(previous, from.pair[i].x, 0x5432));
        StoreShared32(to + 128, from.pair[i].x);
        StoreShared32(to + 256, __byte_perm(from.pair[i].x, from.pair[i].y, 0x5432));
        StoreShared32(to + 384, from.pair[i].y);
        StoreShared32(to + 512, __byte_perm(from.pair[i].y, from.pair[i].z, 0x5432));
        StoreShared32(to + 640, from.pair[i].z);
        StoreShared32(to + 768, __byte_perm(from.pair[i].z, from.pair[i].w, 0x5432));
        StoreShared32(to + 896, from.pair[i].w);
        previous = from.pair[i].w;
        before_tail = i == from.pairs - 1 ? previous : before_tail;
      }
    }
    {
      const uint32_t to = write_base + static_cast<uint32_t>(from.pairs * 1024);
      StoreShared32(to, __byte_perm(before_tail, from.tail.x, 0x5432));
      StoreShared32(to + 128, from.tail.x);
      StoreShared32(to + 256, __byte_perm(from.tail.x, from.tail.y, 0x5432));
      StoreShared32(to + 384, from.tail.y);
      StoreShared32(to + 512, from.tail.y >> 16);
    }
    __syncwarp();
    fetch(from, at + kColumnsAtOnce * kWarps);
    uint32_t cursor = read_base;
#pragma unroll
    for (int i = 0; i < kMmas; ++i) {
      uint32_t a[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = (2 * i + h) % 8;
        const uint32_t word = i < 4 ? now.x : now.y;
        const uint32_t signs = j == 7 ? word : word << (7 - j);
        const uint32_t steps = signs & 0x80808080u;  // 128 bytes a nonzero
        const uint32_t low = LoadShared32(__dp4a(steps, 0x00000001u, cursor));
        const uint32_t high = LoadShared32(__dp4a(steps, 0x00010101u, cursor));
        cursor = __dp4a(steps, 0x01010101u, cursor);
        a[2 * h] = low & SignPermute(signs, 0x9988u);
        a[2 * h + 1] = high & SignPermute(signs, 0xbbaau);
      }
      MmaM16N8K16<kIsBf16>(sum[i], a, b0, b1);
    }
  };

  fetch(group, kColumnsAtOnce * warp);
#pragma unroll 1
  for (int at = kColumnsAtOnce * warp; at < active; at += kColumnsAtOnce * kWarps) {
    consume(group, at);
  }
  // What x lost, from lanes t = 2, 3 to t = 0, 1.
  if (kIndexed || args.x_dtype != (kIsBf16 ? kBf16 : kF16)) {
#pragma unroll
    for (int i = 0; i < kMmas; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[i][c] += __shfl_down_sync(~0u, sum[i][c], 2);
        if (exponent != 0) sum[i][c] = ldexpf(sum[i][c], exponent);
      }
    }
  }
  __syncthreads();  // the staging becomes
  // the sums of the warps
  float* const partial = reinterpret_cast<float*>(shared);
  if (t < 2) {
#pragma unroll
    for (int i = 0; i < kMmas; ++i) {
      float* to = partial + warp * kBlockRows + i * 64 + g * 4 + 2 * t;
      *reinterpret_cast<float2*>(to) = make_float2(sum[i][0], sum[i][1]);
      *reinterpret_cast<float2*>(to + 32) = make_float2(sum[i][2], sum[i][3]);
    }
  }
  __syncthreads();
  const int quad = static_cast<int>(threadIdx.x) * 4;
  float4 total = make_float4(0, 0, 0, 0);
  if (quad < kBlockRows) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 part = *reinterpret_cast<const float4*>(partial + w * kBlockRows + quad);
      total.x += part.x;
      total.y += part.y;
      total.z += part.z;
      total.w += part.w;
    }
  }
  const int row = layer_block * kBlockRows + quad;
  float* const meet = partial + kWarps * kBlockRows;
  float* const y = static_cast<float*>(layer.epilogue.y);
  if (args.meeting == Meeting::kReduce) {
    if (quad >= kBlockRows || row >= layer.m) return;
    if (row + 3 < layer.m && (reinterpret_cast<uintptr_t>(y + row) & 15) == 0) {
      ReduceAdd4(y + row, total);
    } else {
      const float values[4] = {total.x, total.y, total.z, total.w};
      for (int i = 0; i < 4 && row + i < layer.m; ++i) atomicAdd(y + row + i, values[i]);
    }
    return;
  }
  if (splits.count > 1 && args.meeting == Meeting::kPolled) {
    float* const slabs = args.slab + static_cast<int64_t>(blockIdx.x - split) * kBlockRows;
    if (quad < kBlockRows) {
      // -0 stands for a sum that is 0.
      const float4 sent = make_float4(total.x == 0.f ? -0.f : total.x, total.y == 0.f ? -0.f : total.y,
                                      total.z == 0.f ? -0.f : total.z, total.w == 0.f ? -0.f : total.w);
      StoreVolatile4(slabs + static_cast<int64_t>(split) * kBlockRows + quad, sent);
    }
    const int finishers = splits.count >= kFinishers ? kFinishers : 1;
    const int finisher = split - (splits.count - finishers);
    if (finisher < 0) return;
    // Eight warps take every eighth slab of this finisher's rows, a quad a lane, always in the same order.
    const int share = kBlockRows / 4 / finishers;  // quads, at most a warp's for four finishers
    for (int q = lane; q < share; q += 32) {
      float* const from = slabs + (finisher * share + q) * 4;
      float4 part_total = make_float4(0, 0, 0, 0);
      constexpr int kBatch = 5;
      for (int s0 = warp; s0 < splits.count; s0 += kWarps * kBatch) {
        float4 part[kBatch];
        bool arrived;
        do {
          arrived = true;
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            part[i] = make_float4(-0.f, -0.f, -0.f, -0.f);
            const int s = s0 + i * kWarps;
            if (s < splits.count) part[i] = LoadVolatile4(from + static_cast<int64_t>(s) * kBlockRows);
          }
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            arrived &= __float_as_uint(part[i].x) != 0u && __float_as_uint(part[i].y) != 0u &&
                       __float_as_uint(part[i].z) != 0u && __float_as_uint(part[i].w) != 0u;
          }
        } while (!arrived);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int s = s0 + i * kWarps;
          if (s < splits.count) {
            __stcg(reinterpret_cast<float4*>(from + static_cast<int64_t>(s) * kBlockRows), make_float4(0, 0, 0, 0));
          }
          part_total.x += part[i].x;
          part_total.y += part[i].y;
          part_total.z += part[i].z;
          part_total.w += part[i].w;
        }
      }
      // Read by the threads that summed `quad` above, all behind the barrier.
      *reinterpret_cast<float4*>(meet + (warp * share + q) * 4) = part_total;
    }
    __syncthreads();
    const int mine = static_cast<int>(threadIdx.x);
    if (mine >= share * 4) return;
    float value = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value += meet[w * share * 4 + mine];
    const int out = layer_block * kBlockRows + finisher * share * 4 + mine;
    if (out >= layer.m) return;
    if (args.accumulate) {
      y[out] += value;
    } else {
      StoreOutput(layer.epilogue, 0, out, value);
    }
    return;
  }
  if (splits.count > 1) {
    float* const slab = args.slab + static_cast<int64_t>(blockIdx.x) * kBlockRows;
    if (quad < kBlockRows) __stcg(reinterpret_cast<float4*>(slab + quad), total);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = atomicAdd(args.counters + block, 1u) == static_cast<uint32_t>(splits.count - 1);
      if (is_last) args.counters[block] = 0;  // as the next launch expects it
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    // Two halves of the block add up alternate slabs, always in the same order.
    const int half = static_cast<int>(threadIdx.x) >> 7;  // 2 and more: idle
    const int mine = (static_cast<int>(threadIdx.x) & 127) * 4;
    const float* from = args.slab + static_cast<int64_t>(blockIdx.x - split) * kBlockRows + mine;
    total = make_float4(0, 0, 0, 0);
    constexpr int kBatch = 8;  // loads in flight: one latency for 16 splits
    for (int s = half; half < 2 && s < splits.count; s += 2 * kBatch) {
      float4 part[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        part[i] = make_float4(0, 0, 0, 0);
        if (s + 2 * i < splits.count) {
          part[i] = __ldcg(reinterpret_cast<const float4*>(from + static_cast<int64_t>(s + 2 * i) * kBlockRows));
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        total.x += part[i].x;
        total.y += part[i].y;
        total.z += part[i].z;
        total.w += part[i].w;
      }
    }
    if (half == 1) *reinterpret_cast<float4*>(partial + mine) = total;
    __syncthreads();
    if (half >= 1) return;
    const float4 other = *reinterpret_cast<const float4*>(partial + mine);
    total.x += other.x;
    total.y += other.y;
    total.z += other.z;
    total.w += other.w;
  }
  if (quad >= kBlockRows) return;
  const float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (row + i >= layer.m) break;
    if (args.accumulate) {
      y[row + i] += values[i];
    } else {
      StoreOutput(layer.epilogue, 0, row + i, values[i]);
    }
  }
}

struct Choice {
  const void* kernel;
  uint64_t stage_bytes;
};

// `few_columns`: at most two a thread. The list's code is then short, and a kernel of a few microseconds runs it cold.
template <bool kIsBf16, int kPairs, bool kIndexed>
Choice Pick(bool few_columns) {
  const void* kernel = few_columns ? reinterpret_cast<const void*>(&ColumnPieceSpmspv<kIsBf16, kPairs, kIndexed, 2>)
                                   : reinterpret_cast<const void*>(&ColumnPieceSpmspv<kIsBf16, kPairs, kIndexed, 8>);
  return {kernel, std::max<uint64_t>((kPairs * 8 + 5) * 128, kBlockRows * 4) * kWarps};
}

template <bool kIsBf16, bool kIndexed>
Choice PickPairs(int max_chunks, bool few_columns) {
  if (max_chunks <= 9) return Pick<kIsBf16, 4, kIndexed>(few_columns);
  if (max_chunks <= 11) return Pick<kIsBf16, 5, kIndexed>(few_columns);
  if (max_chunks <= 13) return Pick<kIsBf16, 6, kIndexed>(few_columns);
  return Pick<kIsBf16, 8, kIndexed>(few_columns);
}

Choice PickKernel(bool bf16, int max_chunks, bool indexed, bool few_columns) {
  if (bf16) {
    return indexed ? PickPairs<true, true>(max_chunks, few_columns) : PickPairs<true, false>(max_chunks, few_columns);
  }
  return indexed ? PickPairs<false, true>(max_chunks, few_columns) : PickPairs<false, false>(max_chunks, few_columns);
}

// How a launch cuts the columns: `longer_blocks` row blocks into `count` + 1 ranges, the others into `count`.
struct Splits {
  int64_t blocks = 0;
  int64_t longer_blocks = 0;
  int64_t count = 0;
  int64_t k = 0;

  int64_t total() const { return blocks * count + longer_blocks; }
  int64_t columns(int64_t of) const { return CeilDiv(k, of); }
  int64_t most_columns() const { return columns(longer_blocks == blocks ? count + 1 : count); }
  SplitsArgs Args(int64_t of) const {
    return {static_cast<int32_t>(of), static_cast<int32_t>(columns(of)),
            static_cast<uint32_t>(of == 1 ? 0 : ((uint64_t{1} << 32) + static_cast<uint64_t>(of) - 1) / of)};
  }
};

// Variants, for benchmarks and tests.
constexpr int kTicketVariant = 4;  // no polling
constexpr int kVariants = 5;

// Enough ranges for one wave of two blocks a multiprocessor and, as far as row blocks allow, no fewer: a wave that
// fills 85 % of the places takes as long as a full one. No range beyond what a block's list holds. Variants 1..3 ask
// for 2, 1.5 and 0.5 waves.
Splits ChooseSplits(int64_t blocks, int64_t k, int multiprocessors, int variant) {
  constexpr int kWaveQuarters[kVariants] = {4, 8, 6, 2, 4};
  const int64_t slots = int64_t{2} * multiprocessors * kWaveQuarters[variant < 0 ? 0 : variant] / 4;
  const int64_t most = CeilDiv(k, 32);
  const int64_t least = CeilDiv(k, kMaxSplitColumns);
  Splits splits;
  splits.blocks = blocks;
  splits.k = k;
  splits.count = std::max(std::clamp<int64_t>(slots / blocks, 1, most), least);
  if (splits.count < most && splits.count * blocks < slots) splits.longer_blocks = slots - splits.count * blocks;
  return splits;
}

int VariantOf(const Call& call) { return static_cast<int>(call.flags >> SPMMD_CUDA_FLAG_VARIANT_SHIFT & 15u) - 1; }
bool Accumulates(const Call& call) { return (call.flags & SPMMD_CUDA_FLAG_ACCUMULATE) != 0; }

Meeting MeetingOf(const Splits& splits, const Call& call) {
  if (Accumulates(call) && (call.flags & SPMMD_CUDA_FLAG_DETERMINISTIC) == 0) return Meeting::kReduce;
  const auto slab_bytes = static_cast<uint64_t>(splits.total()) * kBlockRows * 4;
  return slab_bytes <= kPolledBytes && VariantOf(call) != kTicketVariant ? Meeting::kPolled : Meeting::kTicket;
}

Splits SplitsOf(const spmmd_cuda_layer& layer, const Call& call) {
  return ChooseSplits(CeilDiv(layer.m, kBlockRows), layer.k, layer.device->multiprocessors, VariantOf(call));
}

Status CheckGrid(const Splits& splits, const Call& call) {
  if (MeetingOf(splits, call) == Meeting::kTicket && splits.blocks > kMaxCounters) {
    return Unimplemented("M: more than " + std::to_string(kMaxCounters * kBlockRows) + " rows");
  }
  if (splits.total() >= 1 << 24) return Unimplemented("M * K: too many thread blocks");
  return {};
}

Status CanImplement(const spmmd_cuda_layer& layer, const Call& call) {
  if (VariantOf(call) >= kVariants) return InvalidArgument("flags: no such variant of column_piece_spmspv");
  if (Accumulates(call) && (call.y_dtype != kF32 || call.bias != nullptr || call.activation != 0)) {
    return InvalidArgument("flags: accumulation needs an fp32 y, no bias and no activation");
  }
  return CheckGrid(SplitsOf(layer, call), call);
}

// Slabs behind the part of the workspace that is zero between launches.
uint64_t SlabBytes(const Splits& splits, const Call& call) {
  if (splits.total() == splits.blocks || MeetingOf(splits, call) != Meeting::kTicket) return 0;
  return static_cast<uint64_t>(splits.total()) * kBlockRows * 4;
}

uint64_t ScratchBytes(const spmmd_cuda_layer& layer, const Call& call) {
  return SlabBytes(SplitsOf(layer, call), call);
}

// What layers of one launch must agree on, beyond what LaunchGroup's callers have checked of each.
Status CheckGroup(const spmmd_cuda_layer* const* layers, const Call* calls, int count) {
  if (count < 1 || count > kMaxGroup) {
    return InvalidArgument("count: " + std::to_string(count) + " layers, at most " + std::to_string(kMaxGroup));
  }
  for (int i = 1; i < count; ++i) {
    if (layers[i]->dtype != layers[0]->dtype || layers[i]->k != layers[0]->k ||
        layers[i]->device != layers[0]->device) {
      return InvalidArgument("layers: a group needs one device and equal K and dtype");
    }
    if (calls[i].x != calls[0].x || calls[i].n != calls[0].n || calls[i].x_dtype != calls[0].x_dtype ||
        calls[i].x_stride != calls[0].x_stride || calls[i].x_indices != calls[0].x_indices ||
        calls[i].x_values != calls[0].x_values || calls[i].x_nnz != calls[0].x_nnz ||
        calls[i].x_threshold != calls[0].x_threshold || calls[i].flags != calls[0].flags) {
      return InvalidArgument("x: a group shares its activations and flags");
    }
  }
  return {};
}

Splits GroupSplits(const spmmd_cuda_layer* const* layers, const Call* calls, int count) {
  int64_t blocks = 0;
  for (int i = 0; i < count; ++i) blocks += CeilDiv(layers[i]->m, kBlockRows);
  return ChooseSplits(blocks, layers[0]->k, layers[0]->device->multiprocessors, VariantOf(calls[0]));
}

uint64_t GroupScratchBytes(const spmmd_cuda_layer* const* layers, const Call* calls, int count) {
  return SlabBytes(GroupSplits(layers, calls, count), calls[0]);
}

Status LaunchGroup(const spmmd_cuda_layer* const* layers, const Call* calls, int count, cudaStream_t stream) {
  SPMMD_CUDA_TRY(CheckGroup(layers, calls, count));
  const spmmd_cuda_layer& first = *layers[0];
  const Call& call = calls[0];
  const bool indexed = call.x_indices != nullptr;
  const Splits splits = GroupSplits(layers, calls, count);
  SPMMD_CUDA_TRY(CheckGrid(splits, call));
  SpmspvArgs args = {};
  args.x_indices = call.x_indices;
  args.x_values = call.x_values;
  args.x_nnz = static_cast<int32_t>(call.x_nnz);
  args.x_dtype = call.x_dtype;
  args.threshold = call.x_threshold;
  args.k = static_cast<int32_t>(first.k);
  args.layers = count;
  args.splits[0] = splits.Args(splits.count + 1);
  args.splits[1] = splits.Args(splits.count);
  args.longer_blocks = static_cast<int32_t>(splits.longer_blocks);
  args.accumulate = Accumulates(call);
  args.meeting = MeetingOf(splits, call);
  args.counters = static_cast<uint32_t*>(call.workspace);
  args.slab = reinterpret_cast<float*>(static_cast<uint8_t*>(call.workspace) +
                                       (args.meeting == Meeting::kPolled ? 0 : kCounterBytes));
  int max_chunks = 0;
  int64_t first_block = 0;
  for (int i = 0; i < count; ++i) {
    const spmmd_cuda_layer& layer = *layers[i];
    args.layer[i] = {layer.SectionData(column_piece::kPieceSection),
                     reinterpret_cast<const uint32_t*>(layer.SectionData(column_piece::kDescriptorSection)),
                     reinterpret_cast<const uint64_t*>(layer.SectionData(column_piece::kBlockSection)),
                     MakeEpilogue(calls[i]),
                     static_cast<int32_t>(layer.m),
                     static_cast<int32_t>(first_block)};
    first_block += CeilDiv(layer.m, kBlockRows);
    max_chunks = std::max(max_chunks, static_cast<int>(layer.params[column_piece::kParamMaxChunks]));
  }

  const Choice choice = PickKernel(first.dtype == kBf16, max_chunks, indexed, splits.most_columns() <= 2 * kThreads);
  const uint64_t shared =
      choice.stage_bytes + static_cast<uint64_t>(std::min<int64_t>(splits.most_columns(), kMaxSplitColumns)) * 8;
  {
    // The limit of dynamic shared memory, raised once a kernel and device.
    static std::mutex mutex;
    static std::map<std::pair<const void*, int>, bool> raised;
    const std::lock_guard<std::mutex> lock(mutex);
    bool& done = raised[{choice.kernel, first.device->index}];
    if (!done) {
      SPMMD_CUDA_CHECK(cudaFuncSetAttribute(choice.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(choice.stage_bytes) + kMaxSplitColumns * 8));
      done = true;
    }
  }
  cudaLaunchAttribute chain = {};
  chain.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  chain.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(splits.total()));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &chain;
  config.numAttrs = (call.flags & SPMMD_CUDA_FLAG_CHAIN) != 0 ? 1 : 0;
  for (int64_t token = 0; token < call.n; ++token) {
    if (!indexed) {
      args.x = static_cast<const uint8_t*>(call.x) +
               static_cast<uint64_t>(token * call.x_stride) * ElementSize(call.x_dtype);
    }
    for (int i = 0; i < count; ++i) {
      args.layer[i].epilogue.y = static_cast<uint8_t*>(calls[i].y) +
                                 static_cast<uint64_t>(token * calls[i].y_stride) * ElementSize(calls[i].y_dtype);
    }
    void* parameters[] = {&args};
    SPMMD_CUDA_CHECK(cudaLaunchKernelExC(&config, choice.kernel, parameters));
  }
  return {};
}

Status Launch(const spmmd_cuda_layer& layer, const Call& call, cudaStream_t stream) {
  const spmmd_cuda_layer* layers[] = {&layer};
  return LaunchGroup(layers, &call, 1, stream);
}

}  // namespace

Status ValidateColumnPiece(const LayerDesc& desc) {
  if (desc.layout_version != column_piece::kLayoutVersion) return DataLoss("COLUMN_PIECE: unknown layout version");
  if (desc.dtype == kF32) return DataLoss("COLUMN_PIECE: dtype is neither fp16 nor bf16");
  const spmmd_cuda_section* pieces = FindSection(desc, column_piece::kPieceSection);
  const spmmd_cuda_section* descriptors = FindSection(desc, column_piece::kDescriptorSection);
  const spmmd_cuda_section* blocks = FindSection(desc, column_piece::kBlockSection);
  if (pieces == nullptr || descriptors == nullptr || blocks == nullptr) {
    return DataLoss("COLUMN_PIECE: a section is missing");
  }
  column_piece::View view;
  if (const char* error = column_piece::Open(desc.m, desc.k, desc.nnz, desc.params, pieces->data, pieces->size,
                                             descriptors->data, descriptors->size, blocks->data, blocks->size, &view)) {
    return DataLoss(std::string("COLUMN_PIECE: ") + error);
  }
  std::atomic<int64_t> nnz{0};
  std::atomic<bool> ok{true};
  ParallelFor(view.blocks, [&](int64_t block) {
    int64_t count = 0;
    if (!column_piece::DecodeBlock(view, block, &count, [](int64_t, int64_t, uint16_t) {})) ok = false;
    nnz += count;
  });
  if (!ok) return DataLoss("COLUMN_PIECE: a piece is out of place or has too many bits");
  if (nnz != view.nnz) return DataLoss("COLUMN_PIECE: the number of nonzeros differs from the header's");
  return {};
}

const Kernel kColumnPieceSpmspv = {
    "column_piece_spmspv", kFormatColumnPiece, false, CanImplement, ScratchBytes, Launch, true,
    LaunchGroup,           GroupScratchBytes};
const Kernel kColumnPieceSpmspvIndexed = {"column_piece_spmspv_indexed",
                                          kFormatColumnPiece,
                                          true,
                                          CanImplement,
                                          ScratchBytes,
                                          Launch,
                                          true,
                                          LaunchGroup,
                                          GroupScratchBytes};

}  // namespace spmmd::cuda
