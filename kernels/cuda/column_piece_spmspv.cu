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
// that the pair of elements (d, d+1) is E[number of nonzeros up to d], less the values whose elements are zero: one
// dp4a an address, one byte permute a pair that takes its bytes or zero, no branch, no bank conflict; 10 instructions
// for 4 elements. Lanes load 16 bytes of one stream, coalesced, one group of columns ahead, and hand them to the
// decoding lanes through the staging. What a long stream has lent (column_piece_layout.h) is copied behind its own
// values there, 6 words whether it has or not.
//
// Sums of the 8 warps meet in shared memory; those of a row block's column ranges either in fp32 reductions on y
// (accumulate) or in slabs that some of its thread blocks wait for and add up in order (overwrite: deterministic,
// nothing to clear).
// A group of four columns costs a warp 300 (70 %) to 325 (50 %) instructions, 4.7 to 5.1 a dense element of an active
// column. Limiter: no one pipe (docs/kernels.md): issue slots are half busy with 16 warps a multiprocessor, a quarter
// of the stalls is waiting for pieces, the rest dependences and full pipes. At 4096x4096 the fixed cost: launch, list,
// first pieces, both reductions.
#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>

#include "kernels/cuda/column_piece_list.cuh"
#include "kernels/cuda/column_piece_spmspv.h"
#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/parallel.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/format/column_piece_layout.h"

namespace spmmd::cuda {
namespace {

using column_piece::kBlockRows;
using column_piece::kStreamRows;
using column_piece::kStreams;
using column_piece_kernel::Activations;
using column_piece_kernel::Active;
using column_piece_kernel::BuildList;
using column_piece_kernel::kMaxSplitColumns;
using column_piece_kernel::kThreads;
using column_piece_kernel::kWarps;

constexpr int kColumnsAtOnce = 4;  // of a warp: the K dimension of the mma
constexpr int kMmas = kStreamRows / 8;
// Rows of places that are staged without asking whether the longest of four columns has so many.
constexpr int UsualRows(int rows) { return rows - 2; }

// Layers of one launch that share their activations (q, k and v; gate and up).
constexpr int kMaxGroup = 4;

struct SpmspvLayer {
  const uint8_t* pieces;
  const column_piece::Descriptor* descriptors;
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
  Activations x;
  int32_t layers;
  int32_t stage_words;   // E[] of a lane
  int32_t list_columns;  // room in the list
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
// Byte permute by a selector whose nibbles are below 8: __byte_perm would mask it to make sure.
__device__ __forceinline__ uint32_t Permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
}

__device__ __forceinline__ void ReduceAdd4(float* to, float4 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
#else
  atomicAdd(to, v.x);
  atomicAdd(to + 1, v.y);
  atomicAdd(to + 2, v.z);
  atomicAdd(to + 3, v.w);
#endif
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

// Four columns of a warp on their way from device memory.
template <int kRows>
struct Group {
  // As loaded.
  uint4 row[kRows];
  uint2 fours;
  uint32_t load_units;
  // As decoded.
  uint2 bits;
  uint32_t x;
  uint32_t units;
  uint32_t lender;  // lane
};

// kRows: rows of eight places a stream that a piece may have, from the layer's longest piece.
template <bool kIsBf16, int kRows, bool kIndexed, int kColumnsPerThread>
__global__ void __launch_bounds__(kThreads, 2) ColumnPieceSpmspv(const __grid_constant__ SpmspvArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint32_t scratch[kColumnsPerThread * kWarps + 1 + kWarps];
  __shared__ bool is_last;

  const int lane = static_cast<int>(threadIdx.x & 31);
  const int warp = static_cast<int>(threadIdx.x >> 5);
  const int g = lane >> 2;  // stream
  const int t = lane & 3;   // column of the group
  const uint32_t longer = static_cast<uint32_t>(args.longer_blocks * args.splits[0].count);
  const bool is_longer = blockIdx.x < longer;
  const SplitsArgs& splits = args.splits[is_longer ? 0 : 1];
  const uint32_t index = blockIdx.x - (is_longer ? 0u : longer);
  const uint32_t quotient = splits.count == 1 ? index : __umulhi(index, splits.reciprocal);
  const int split = static_cast<int>(index - quotient * static_cast<uint32_t>(splits.count));
  const int block = static_cast<int>(quotient) + (is_longer ? 0 : args.longer_blocks);
  const int first = min(split * splits.columns, args.x.k);
  const int last = min(first + splits.columns, args.x.k);
  int of = 0;
  while (of + 1 < args.layers && block >= args.layer[of + 1].first_block) ++of;
  const SpmspvLayer& layer = args.layer[of];
  const int layer_block = block - layer.first_block;
  const uint64_t first_unit = __ldg(layer.block_units + layer_block);  // not used before the list is there
  TriggerDependents();  // the grid is one wave: what follows takes the places of blocks that are done

  // Shared memory: E[] of every lane, behind it the list.
  const uint32_t stage_bytes = static_cast<uint32_t>(args.stage_words * 128);
  const uint32_t stage =
      SharedAddress(shared) + static_cast<uint32_t>(warp) * stage_bytes + 128;  // E[-1] is never used
  const bool wide = kIndexed || args.x.dtype != (kIsBf16 ? kBf16 : kF16);
  Active* const list = reinterpret_cast<Active*>(shared + kWarps * stage_bytes);

  int exponent;
  const int active = BuildList<kIsBf16, kIndexed, kColumnsPerThread>(
      args.x, layer.descriptors + static_cast<int64_t>(layer_block) * args.x.k, first, last, list, scratch, &exponent);
  const uint8_t* const pieces = layer.pieces + first_unit * column_piece::kUnitBytes;
  const uint32_t own = stage + static_cast<uint32_t>(lane * 4);
  const int load_column = lane >> 3;  // loads: a quarter of a warp a column, coalesced
  const int load_stream = lane & 7;
  const uint32_t load_own = stage + static_cast<uint32_t>((load_stream * 4 + load_column) * 4);
  // Where this lane's part of a piece begins, but for the piece's own place: bits, rows of eight places, row of four.
  // Opaque, or nvcc adds their parts up again for every load.
  const uint8_t* bits_of = pieces + g * 8;
  const uint8_t* eights_of = pieces + column_piece::kBitmapBytes + load_stream * 16;
  const uint8_t* fours_of = pieces + column_piece::kBitmapBytes + load_stream * 8;
  asm("" : "+l"(bits_of), "+l"(eights_of), "+l"(fours_of));
  uint32_t load_entry = SharedAddress(list + kColumnsAtOnce * warp + load_column);
  uint32_t entry = SharedAddress(list + kColumnsAtOnce * warp + t);
  // B[.][n]: rows n = 0..3 take x, 4..7 what its rounding lost, as byte permutes of SplitActivation.
  const uint32_t x_bytes = g < 4 ? 0x10u : 0x32u;
  const uint32_t select0 = (g & 3) == 0 ? 0x4400u | x_bytes : (g & 3) == 1 ? 0x44u | x_bytes << 8 : 0x4444u;
  const uint32_t select1 = (g & 3) == 2 ? 0x4400u | x_bytes : (g & 3) == 3 ? 0x44u | x_bytes << 8 : 0x4444u;
  float sum[kMmas][4] = {};
  Group<kRows> group = {};  // on its way

  // The warp's next group.
  const auto fetch = [&](Group<kRows>& to) {
    const auto address = [](const uint8_t* base, uint32_t unit) {
      return base + static_cast<uint64_t>(unit) * column_piece::kUnitBytes;
    };
    {
      const uint32_t piece = LoadShared32(load_entry);
      const uint32_t unit = column_piece::PieceUnit(piece);
      to.load_units = static_cast<uint32_t>(column_piece::PlaceUnits(piece));
      const uint8_t* const eights = address(eights_of, unit);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        LoadPiece128(to.row[i], eights + i * 128, to.load_units > static_cast<uint32_t>(2 * i + 1));
      }
      LoadPiece64(to.fours, address(fours_of, unit + (to.load_units & ~1u)), (to.load_units & 1) != 0);
    }
    {
      const uint4 column = LoadShared128(entry);
      to.units = static_cast<uint32_t>(column_piece::PlaceUnits(column.x));
      to.lender = (column.y >> (3 * g) & 0x1cu) | static_cast<uint32_t>(t);
      to.x = column.z;
      to.bits = make_uint2(0, 0);
      LoadPiece64(to.bits, address(bits_of, column_piece::PieceUnit(column.x)), to.units != 0);
    }
    load_entry += kColumnsAtOnce * kWarps * sizeof(Active);
    entry += kColumnsAtOnce * kWarps * sizeof(Active);
  };

  const auto consume = [&](Group<kRows>& from) {
    const uint2 bits = from.bits;
    const uint32_t b0 = Permute(from.x, 0u, select0);
    const uint32_t b1 = Permute(from.x, 0u, select1);
    const uint32_t most = __reduce_max_sync(~0u, from.load_units);
    constexpr int kUsual = UsualRows(kRows);
    __syncwarp();
    // Staged as E[i] = (v[i-1], v[i]). Rows behind a column's own hold what was left in the registers, and are
    // overwritten or never read.
    uint32_t previous = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i < kUsual || most > static_cast<uint32_t>(2 * i + 1)) {
        const uint32_t to = load_own + static_cast<uint32_t>(i * 1024);
        const uint4 v = from.row[i];
        StoreShared32(to, __byte_perm(previous, v.x, 0x5432));
        StoreShared32(to + 128, v.x);
        StoreShared32(to + 256, __byte_perm(v.x, v.y, 0x5432));
        StoreShared32(to + 384, v.y);
        StoreShared32(to + 512, __byte_perm(v.y, v.z, 0x5432));
        StoreShared32(to + 640, v.z);
        StoreShared32(to + 768, __byte_perm(v.z, v.w, 0x5432));
        StoreShared32(to + 896, v.w);
        previous = v.w;
      }
    }
    {
      const uint32_t to = load_own + from.load_units / 2 * 1024;
      const uint32_t before = LoadShared32(to - 128);  // the last of the rows; no matter what if there is none
      StoreShared32(to + 128, from.fours.x);
      StoreShared32(to + 256, __byte_perm(from.fours.x, from.fours.y, 0x5432));
      StoreShared32(to + 384, from.fours.y);
      StoreShared32(to + 512, from.fours.y >> 16);
      StoreShared32(to, __byte_perm(before, from.fours.x, 0x5432));
    }
    const int length = __popc(bits.x) + __popc(bits.y);
    const auto lent = static_cast<uint32_t>(__shfl_sync(~0u, length, static_cast<int>(from.lender)));
    const uint32_t tail = stage + from.lender * 4 + lent * 128;
    const uint32_t end = own + from.units * (column_piece::kUnitValues * 128);
    __syncwarp();
    fetch(from);
    // A tail follows the stream's own values; lanes without one copy what is never read.
    {
      uint32_t borrowed[column_piece::kMaxBorrowed + 1];
#pragma unroll
      for (int i = 0; i <= column_piece::kMaxBorrowed; ++i) {
        borrowed[i] = LoadShared32(tail + static_cast<uint32_t>(i * 128));
      }
      const uint32_t last = LoadShared32(end);
      __syncwarp();
      StoreShared32(end, __byte_perm(last, borrowed[0], 0x7610));
#pragma unroll
      for (int i = 1; i <= column_piece::kMaxBorrowed; ++i) {
        StoreShared32(end + static_cast<uint32_t>(i * 128), borrowed[i]);
      }
    }
    uint32_t cursor = own;
#pragma unroll
    for (int i = 0; i < kMmas; ++i) {
      uint32_t a[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // Four elements are bit j of the word's four bytes; at most bit 2 once the word is shifted.
        const int j = (2 * i + h) % 8;
        const uint32_t word = (i < 4 ? bits.x : bits.y) >> (j / 3 * 3);
        const uint32_t ones = word & 0x01010101u << (j % 3);
        const uint32_t row = 0x80u >> (j % 3);  // 128 bytes a nonzero
        const uint32_t low = LoadShared32(__dp4a(ones, row, cursor));
        const uint32_t high = LoadShared32(__dp4a(ones, row * 0x00010101u, cursor));
        cursor = __dp4a(ones, row * 0x01010101u, cursor);
        // Nibble k selects byte k of the pair if its element is there, else of zero.
        const uint32_t select = ones * (0x11u << (2 - j % 3)) + 0x32103210u;
        a[2 * h] = Permute(0u, low, select);
        a[2 * h + 1] = Permute(0u, high, select >> 16);
      }
      MmaM16N8K16<kIsBf16>(sum[i], a, b0, b1);
    }
  };

  fetch(group);
#pragma unroll 1
  for (int at = kColumnsAtOnce * warp; at < active; at += kColumnsAtOnce * kWarps) {
    consume(group);
  }
  // What x lost, from lanes t = 2, 3 to t = 0, 1.
  if (wide) {
#pragma unroll
    for (int i = 0; i < kMmas; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[i][c] += __shfl_down_sync(~0u, sum[i][c], 2);
        if (exponent != 0) sum[i][c] = ldexpf(sum[i][c], exponent);
      }
    }
  }
  __syncthreads();  // the stages become the sums of the warps
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
  int rows;
};

// `few_columns`: at most two a thread. The list's code is then short, and a kernel of a few microseconds runs it cold.
template <bool kIsBf16, int kRows, bool kIndexed>
Choice Pick(bool few_columns) {
  return {few_columns ? reinterpret_cast<const void*>(&ColumnPieceSpmspv<kIsBf16, kRows, kIndexed, 2>)
                      : reinterpret_cast<const void*>(&ColumnPieceSpmspv<kIsBf16, kRows, kIndexed, 8>),
          kRows};
}

template <bool kIsBf16, bool kIndexed>
Choice PickRows(int rows, bool few_columns) {
  if (rows <= 3) return Pick<kIsBf16, 3, kIndexed>(few_columns);
  if (rows <= 4) return Pick<kIsBf16, 4, kIndexed>(few_columns);
  if (rows <= 5) return Pick<kIsBf16, 5, kIndexed>(few_columns);
  if (rows <= 6) return Pick<kIsBf16, 6, kIndexed>(few_columns);
  return Pick<kIsBf16, 8, kIndexed>(few_columns);
}

Choice PickKernel(bool bf16, int rows, bool indexed, bool few_columns) {
  if (bf16) return indexed ? PickRows<true, true>(rows, few_columns) : PickRows<true, false>(rows, few_columns);
  return indexed ? PickRows<false, true>(rows, few_columns) : PickRows<false, false>(rows, few_columns);
}

// E[] of a lane: rows are written whether all streams have them or not, and tails as long as the longest allowed.
int StageWords(int max_units, int kernel_rows) {
  return 1 + std::max(8 * std::max(max_units / 2, UsualRows(kernel_rows)) + 5,
                      max_units * column_piece::kUnitValues + column_piece::kMaxBorrowed + 1);
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
  args.x = {call.x,
            call.x_indices,
            call.x_values,
            static_cast<int32_t>(call.x_nnz),
            call.x_dtype,
            call.x_threshold,
            static_cast<int32_t>(first.k)};
  args.layers = count;
  args.splits[0] = splits.Args(splits.count + 1);
  args.splits[1] = splits.Args(splits.count);
  args.longer_blocks = static_cast<int32_t>(splits.longer_blocks);
  args.accumulate = Accumulates(call);
  args.meeting = MeetingOf(splits, call);
  args.counters = static_cast<uint32_t*>(call.workspace);
  args.slab = reinterpret_cast<float*>(static_cast<uint8_t*>(call.workspace) +
                                       (args.meeting == Meeting::kPolled ? 0 : kCounterBytes));
  int max_units = 0;
  int64_t first_block = 0;
  for (int i = 0; i < count; ++i) {
    const spmmd_cuda_layer& layer = *layers[i];
    args.layer[i] = {
        layer.SectionData(column_piece::kPieceSection),
        reinterpret_cast<const column_piece::Descriptor*>(layer.SectionData(column_piece::kDescriptorSection)),
        reinterpret_cast<const uint64_t*>(layer.SectionData(column_piece::kBlockSection)),
        MakeEpilogue(calls[i]),
        static_cast<int32_t>(layer.m),
        static_cast<int32_t>(first_block)};
    first_block += CeilDiv(layer.m, kBlockRows);
    max_units = std::max(max_units, static_cast<int>(layer.params[column_piece::kParamMaxUnits]));
  }

  const Choice choice = PickKernel(first.dtype == kBf16, max_units / 2, indexed, splits.most_columns() <= 2 * kThreads);
  args.list_columns = static_cast<int32_t>(std::min<int64_t>(splits.most_columns(), kMaxSplitColumns)) +
                      column_piece_kernel::kListPadding;
  args.stage_words = StageWords(max_units, choice.rows);
  constexpr uint64_t kSumBytes = uint64_t{2} * kWarps * kBlockRows * 4;
  const uint64_t shared =
      std::max(kSumBytes, static_cast<uint64_t>(kWarps * args.stage_words * 128 + args.list_columns * sizeof(Active)));
  if (shared + 1024 > first.device->max_shared_bytes) {
    return Unimplemented("column_piece_spmspv: needs " + std::to_string(shared + 1024) +
                         " bytes of shared memory, a block of the device has " +
                         std::to_string(first.device->max_shared_bytes));
  }
  {
    // The limit of dynamic shared memory, raised once a kernel and device.
    static std::mutex mutex;
    static std::map<std::pair<const void*, int>, bool> raised;
    const std::lock_guard<std::mutex> lock(mutex);
    bool& done = raised[{choice.kernel, first.device->index}];
    if (!done) {
      SPMMD_CUDA_CHECK(cudaFuncSetAttribute(choice.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(first.device->max_shared_bytes) - 1024));
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
      args.x.x = static_cast<const uint8_t*>(call.x) +
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
  if (!ok) return DataLoss("COLUMN_PIECE: a piece or a tail is out of place, or has too many bits");
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
