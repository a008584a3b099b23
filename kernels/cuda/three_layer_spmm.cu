// SpMM for up to 64 tokens a launch on the sparse tensor cores, after "Accelerating GPU Inference of Large Language
// Models with Moderately Unstructured Sparse Weight Matrices", section 4: THREE_LAYER tiles, W_t as it lies in memory,
// W_r built on the chip by the CUDA cores, both multiplied by mma.sp.
//
// Work. A team of two warps takes whole tiles of 64 x 128. A CTA (one an SM) has up to seven teams, `height` of them
// along M and `depth` along K, and up to four warps that fetch: each team's tiles into its ring of bulk copies, and X,
// by TMA, 128-byte swizzled, into a ring of boxes for each place along K. The CTAs share all units (one tile a team)
// evenly. Teams along K add up in shared memory; a block of rows that several CTAs have parts of is added up from
// partial sums by a second small kernel, launched early. Always in the same order, and nobody ever waits for another
// CTA.
//
// A tile. The team's 64 lanes walk a decoding thread's codes each and move parked values from W_t to W_r in shared
// memory. The paper multiplies the residual layer separately; here it is stored into places of W_r that no move goes
// to, which costs one store an element and no second reduction. Then each warp multiplies two strips of 16 rows of both
// with the same B fragments; W_r is zeroed for the next tile as it is read. A tile without surplus skips all of that:
// for 2:4 masks the kernel is a stream of 128-bit loads and mma.sp.
//
// The paper lets two warpgroups alternate between decoding and multiplying, with wgmma. Here every warp does both and
// the scheduler overlaps them; with mma.sp W_t and W_r share B fragments that wgmma would read from shared memory for
// each.
//
// Bytes an element: the format's (1.27 at 50 %, 1.126 for 2:4) and partial sums. At 50 % and N = 16 a tile takes about
// 1190 warp instructions, of which decoding 480, and 450 shared-memory wavefronts (of 840 clocks). Limiter: the latency
// of those steps with the three decoding warps that a quarter of an SM has room for (issue slots 41 % busy, memory 64
// %); from N = 64 on mma.sp, of which a warp issues one in 14 clocks and a quarter of an SM one in 8.
#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

#include "kernels/cuda/activation_map.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/internal.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/three_layer_schedule.h"
#include "kernels/cuda/three_layer_spmm.h"
#include "kernels/format/three_layer_layout.h"

namespace spmmd::cuda {
namespace {

using three_layer::kFirstBytes;
using three_layer::kNoMove;
using three_layer_plan::kMaxBoxes;
using three_layer_plan::kMaxStages;
using three_layer_plan::kMaxTeams;
using three_layer_plan::kMaxWarps;
using three_layer_plan::kPartialsPerCta;
using three_layer_plan::Plan;

constexpr int kTeam = 2;        // warps that share a tile
constexpr int kStrips = 4;      // of 16 rows a tile
constexpr int kWarpStrips = 2;  // of them a warp
constexpr int kSteps = 4;       // of 32 columns a tile
constexpr int kValueBytes = three_layer::kTileValueBytes;
constexpr int kMetadataBytes = three_layer::kTileMetadataBytes;
constexpr int kUnitBytes = static_cast<int>(three_layer::kCodeGranule);
constexpr int kDynamicAlignment = 1024;
// Named barriers: one a team, then one for the teams of each row.
constexpr int kTeamBarrier = 1;
constexpr int kRowBarrier = kTeamBarrier + kMaxTeams;
// Warps that fetch have made the barriers of their rings; those that multiply wait for that.
constexpr int kStartBarrier = kRowBarrier + kMaxTeams;
static_assert(kStartBarrier < 16);

struct ThreeLayerParams {
  Plan plan;
  const uint8_t* values;
  const uint8_t* metadata;
  const uint8_t* codes;
  const uint32_t* code_offsets;
  const uint64_t* residual_offsets;
  const uint16_t* residual_positions;
  const uint16_t* residual_values;
  int tokens;
  int m;
  float4* partials;  // [CTA][kPartialsPerCta][row of tiles][strip][token tile][lane]
  Epilogue epilogue;
};

// What a stage holds, from the warp that filled it.
struct alignas(16) TileInfo {
  uint32_t code_bytes;
  uint32_t residual;        // entries
  uint32_t code_begin;      // in units of codes
  uint32_t residual_begin;  // the lower half
};

// 16-byte windows of the residual's positions and values in a stage; a tile with more reads them from L2.
constexpr int kResidualBytes = static_cast<int>(three_layer_plan::kResidualBytes) / 2;

struct ThreeLayerShared {
  uint64_t tile_full[kMaxTeams * kMaxStages];
  uint64_t tile_empty[kMaxTeams * kMaxStages];
  uint64_t box_full[kMaxTeams * kMaxBoxes];
  uint64_t box_empty[kMaxTeams * kMaxBoxes];
  TileInfo infos[kMaxTeams * kMaxStages];
};

// ---- PTX

__device__ __forceinline__ void StoreShared16(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(value)) : "memory");
}
__device__ __forceinline__ void ZeroShared128(uint32_t address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}
__device__ __forceinline__ void StoreShared128(uint32_t address, const float4& v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
// Whether the phase of `parity` is complete, without waiting.
__device__ __forceinline__ bool BarrierTest(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred done;\n mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// What this thread wrote to shared memory is ordered before later bulk copies into it.
__device__ __forceinline__ void AsyncProxyFence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// D[16x8] += A[16x32] * B[32x8], A 2:4 sparse. Selector 0 or 1, a constant after unrolling: which lanes of each four
// hold the metadata.
#define SPMMD_MMA_SPARSE(type, selector)                                                                  \
  asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." type "." type                         \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, " selector ";" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                    \
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata))
template <bool kIsBf16>
__device__ __forceinline__ void MmaSparse(float (&d)[4], const uint4& a, const uint32_t (&b)[4], uint32_t metadata,
                                          int selector) {
  if constexpr (kIsBf16) {
    if (selector == 0) {
      SPMMD_MMA_SPARSE("bf16", "0x0");
    } else {
      SPMMD_MMA_SPARSE("bf16", "0x1");
    }
  } else {
    if (selector == 0) {
      SPMMD_MMA_SPARSE("f16", "0x0");
    } else {
      SPMMD_MMA_SPARSE("f16", "0x1");
    }
  }
}
#undef SPMMD_MMA_SPARSE

// The metadata of W_r from that of W_t (three_layer_layout.h).
__device__ __forceinline__ uint32_t ComplementMetadata(uint32_t x) {
  const uint32_t e = (x >> 3 ^ x >> 1) & 0x11111111u;
  return x ^ (e * 5 | (e ^ 0x11111111u) * 10);
}

// ---- decoding

// A code number n with its two halves of 6 bits in a register such that a step is one multiply-add and the byte offset
// of the slot, 128 (n % 64) + 2 (n / 64), one shift and one mask: n's lower half in bits 26-31 and its upper in bits
// 20-25. The offset stays inside the tile whatever was added.
constexpr uint32_t kPlace = (1u << 26) + (1u << 14);
__device__ __forceinline__ uint32_t SlotOffset(uint32_t place) { return place >> 19 & 0x1ffeu; }

// 16 bits at `offset` of a tile's codes: at `staged` in shared memory, or where they do not fit there at `global`.
template <bool kStaged>
__device__ __forceinline__ uint32_t LoadCodes(uint32_t staged, const uint8_t* global, uint32_t offset) {
  if constexpr (kStaged) return LoadShared16(staged + offset);
  return __ldg(reinterpret_cast<const uint16_t*>(global + offset));
}

// Carries out the codes of kUnits units, as far as they move values: all loads, then all stores.
template <int kUnits>
__device__ __forceinline__ void Move(const uint32_t (&pairs)[kUnits], uint32_t& from, uint32_t& to, uint32_t kept,
                                     uint32_t moved) {
  uint32_t source[kUnits * 2];
  uint32_t target[kUnits * 2];
  uint32_t value[kUnits * 2];
  bool live[kUnits * 2];
#pragma unroll
  for (int i = 0; i < kUnits * 2; ++i) {
    // The nibbles stay where they are; their weight is divided out of the multiplier.
    const int shift = i % 2 * 8;
    const uint32_t from_step = pairs[i / 2] & (0xfu << shift);
    const uint32_t to_step = pairs[i / 2] & (0xf0u << shift);
    from += from_step * (kPlace >> shift);
    to += to_step * (kPlace >> (shift + 4));
    live[i] = from_step != 0 && to_step != 0;
    source[i] = kept + SlotOffset(from);
    target[i] = moved + SlotOffset(to);
    asm("" : "=r"(value[i]));  // used only where it is loaded
  }
#pragma unroll
  for (int i = 0; i < kUnits * 2; ++i) {
    if (live[i]) value[i] = LoadShared16(source[i]);
  }
#pragma unroll
  for (int i = 0; i < kUnits * 2; ++i) {
    if (live[i]) StoreShared16(source[i], 0);
  }
#pragma unroll
  for (int i = 0; i < kUnits * 2; ++i) {
    if (live[i]) StoreShared16(target[i], value[i]);
  }
}

// Moves the parked values of a tile from W_t to W_r: what decoding thread `thread` does.
template <bool kStaged>
__device__ __forceinline__ void MoveParked(uint32_t staged, const uint8_t* global, int units, uint32_t kept,
                                           uint32_t moved, int thread) {
  const uint32_t at_first = static_cast<uint32_t>(thread * 4);
  const uint32_t first =
      kStaged ? LoadShared32(staged + at_first) : __ldg(reinterpret_cast<const uint32_t*>(global + at_first));
  uint32_t from = (first & 0xffffu) * kPlace;
  uint32_t to = (first >> 16) * kPlace;
  if (first != kNoMove) {
    const uint32_t value = LoadShared16(kept + SlotOffset(from));
    StoreShared16(kept + SlotOffset(from), 0);
    StoreShared16(moved + SlotOffset(to), value);
  }
  uint32_t at = kFirstBytes + static_cast<uint32_t>(thread * 2);
#pragma unroll 1
  for (; units >= 3; units -= 3, at += 3 * kUnitBytes) {
    uint32_t pairs[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) pairs[i] = LoadCodes<kStaged>(staged, global, at + i * kUnitBytes);
    Move<3>(pairs, from, to, kept, moved);
  }
#pragma unroll 1
  for (; units > 0; --units, at += kUnitBytes) {
    const uint32_t pairs[1] = {LoadCodes<kStaged>(staged, global, at)};
    Move<1>(pairs, from, to, kept, moved);
  }
}

// Stores an element of the residual into its place in W_r.
__device__ __forceinline__ void PlaceResidual(uint32_t position, uint32_t value, uint32_t metadata, uint32_t moved) {
  const uint32_t row = position >> 7 & 63u;
  const uint32_t quad = position >> 2 & 31u;
  const uint32_t column = position & 3u;
  const uint32_t lane = (row % 8) * 4 + quad % 4;
  const uint32_t group = ((row / 16 * 4 + quad / 8) * 32 + lane) * 4 + quad % 8 / 4 * 2 + row % 16 / 8;
  const uint32_t holder = (row % 8) * 4 + quad / 8 % 2 * 2 + quad % 8 / 4;  // the lane that has the metadata
  const uint32_t word = LoadShared32(metadata + ((row / 16 * 32 + holder) * 2 + quad / 16) * 4);
  const uint32_t nibble = word >> (row % 16 / 8 * 16 + quad % 4 * 4) & 15u;
  // Slot 1 of W_r has the higher column of the two: the other one is what 0 + 1 + 2 + 3 leaves.
  const uint32_t other = 6 - (nibble & 3u) - (nibble >> 2) - column;
  const uint32_t slot = group * 2 + (static_cast<int>(column) > static_cast<int>(other) ? 1 : 0);
  StoreShared16(moved + slot * 2, value);
}

// ---- the kernel

__device__ __forceinline__ int64_t TileIndex(const Plan& plan, int block, int unit_in_block, int row, int place) {
  return static_cast<int64_t>(block * plan.height + row) * plan.col_tiles + unit_in_block * plan.depth + place;
}

// Two strips of a tile: `kept`, `moved` and `metadata` are where they begin.
template <bool kIsBf16, int kTokens, bool kSurplus>
__device__ __forceinline__ void MultiplyStrips(float (&sum)[kWarpStrips][kTokens / 8][4], uint32_t kept, uint32_t moved,
                                               uint32_t metadata, uint32_t x_box, int lane) {
  constexpr int kTiles = kTokens / 8;
  constexpr int kTilesAtOnce = kTiles < 4 ? kTiles : 4;
  uint32_t words[kWarpStrips][2];
  uint32_t complements[kWarpStrips][2];
#pragma unroll
  for (int strip = 0; strip < kWarpStrips; ++strip) {
    const uint2 pair = LoadShared64(metadata + strip * 256 + lane * 8);
    words[strip][0] = pair.x;
    words[strip][1] = pair.y;
#pragma unroll
    for (int i = 0; i < 2; ++i) complements[strip][i] = kSurplus ? ComplementMetadata(words[strip][i]) : 0;
  }
  // Few tokens leave registers for the next step's fragments, which then arrive during this one's multiplications.
  constexpr int kAhead = kTokens <= 16 ? 1 : 0;
  constexpr int kSets = kAhead + 1;
  uint4 a[kSets][kWarpStrips];
  uint4 r[kSets][kWarpStrips];
  uint32_t b[kSets][kTilesAtOnce][4];
  const auto load_a = [&](int step) {
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip) {
      const uint32_t at = static_cast<uint32_t>(strip * kSteps + step) * 512 + lane * 16;
      a[step % kSets][strip] = LoadShared128(kept + at);
      if constexpr (kSurplus) {
        r[step % kSets][strip] = LoadShared128(moved + at);
        ZeroShared128(moved + at);
      }
    }
  };
  const auto load_b = [&](int step, int tile0) {
#pragma unroll
    for (int i = 0; i < kTilesAtOnce; ++i) {
      const uint32_t at = x_box + step / 2 * (kTokens * 128) + (tile0 + i) * 1024;
      LoadMatrixX4(step % 2 == 0 ? at : at ^ 64u, b[step % kSets][i]);
    }
  };
  if constexpr (kAhead > 0) {
    load_a(0);
    load_b(0, 0);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int set = step % kSets;
    if constexpr (kAhead > 0) {
      if (step + 1 < kSteps) {
        load_a(step + 1);
        load_b(step + 1, 0);
      }
    } else {
      load_a(step);
    }
#pragma unroll
    for (int tile0 = 0; tile0 < kTiles; tile0 += kTilesAtOnce) {
      if constexpr (kAhead == 0) load_b(step, tile0);
#pragma unroll
      for (int strip = 0; strip < kWarpStrips; ++strip) {
#pragma unroll
        for (int i = 0; i < kTilesAtOnce; ++i) {
          MmaSparse<kIsBf16>(sum[strip][tile0 + i], a[set][strip], b[set][i], words[strip][step / 2], step % 2);
        }
      }
      if constexpr (kSurplus) {
#pragma unroll
        for (int strip = 0; strip < kWarpStrips; ++strip) {
#pragma unroll
          for (int i = 0; i < kTilesAtOnce; ++i) {
            MmaSparse<kIsBf16>(sum[strip][tile0 + i], r[set][strip], b[set][i], complements[strip][step / 2], step % 2);
          }
        }
      }
    }
  }
}

template <bool kIsBf16, int kTokens>
__global__ __launch_bounds__(kMaxWarps * 32, 1) void SpmmThreeLayer(const __grid_constant__ CUtensorMap x_map,
                                                                    const __grid_constant__ ThreeLayerParams p) {
  constexpr int kTiles = kTokens / 8;
  constexpr int kBoxBytes = kTokens * 256;
  // Strips of a warp whose sums pass through scratch at a time.
  constexpr int kRoundStrips = kTokens == 64 ? 1 : kWarpStrips;
  constexpr int kRoundFragments = kTeam * kRoundStrips * kTiles;
  extern __shared__ __align__(kDynamicAlignment) uint8_t dynamic[];
  __shared__ ThreeLayerShared shared;
  const Plan& plan = p.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int team = warp / kTeam;
  const int role = warp % kTeam;
  const int teams = plan.teams();
  const int place = team / plan.height;
  const int row = team - place * plan.height;
  const int block_units = plan.block_units;
  const int cta = static_cast<int>(blockIdx.x);
  const int begin = plan.Begin(cta);
  const int end = plan.Begin(cta + 1);
  TriggerDependents();

  // Dynamic shared memory: X, values, scratch, metadata, residuals, codes.
  const uint32_t x_shared = SharedAddress(dynamic);
  const uint32_t values = x_shared + static_cast<uint32_t>(plan.depth * plan.boxes * kBoxBytes);
  const uint32_t all_scratch = values + static_cast<uint32_t>(teams * plan.stages * kValueBytes);
  const uint32_t all_metadata = all_scratch + static_cast<uint32_t>(teams * plan.scratch);
  const uint32_t residuals = all_metadata + static_cast<uint32_t>(teams * plan.stages * kMetadataBytes);
  const uint32_t all_codes = residuals + static_cast<uint32_t>(teams * plan.stages * plan.residual_bytes);
  const uint32_t tile_full = SharedAddress(shared.tile_full);
  const uint32_t tile_empty = SharedAddress(shared.tile_empty);
  const uint32_t box_full = SharedAddress(shared.box_full);
  const uint32_t box_empty = SharedAddress(shared.box_empty);

  if (team >= teams) {
    // The warps that fetch: lanes 0 to 15 the tiles of a team each, lanes 16 to 31 X for a place along K each; those of
    // one warp are `helpers` apart. Every lane goes its own way; none waits for another.
    const int helpers = plan.helpers;
    const bool feeds_x = lane >= 16;
    const int whose = lane % 16 * helpers + warp - teams * kTeam;
    const bool active = whose < (feeds_x ? plan.depth : teams);
    const int my_place = feeds_x ? whose : whose / plan.height;
    const int my_row = feeds_x ? 0 : whose - my_place * plan.height;
    const int ring_size = feeds_x ? plan.boxes : plan.stages;
    const uint32_t ring = static_cast<uint32_t>(whose * (feeds_x ? kMaxBoxes : kMaxStages)) * 8;
    const uint32_t full0 = (feeds_x ? box_full : tile_full) + ring;
    const uint32_t empty0 = (feeds_x ? box_empty : tile_empty) + ring;
    int unit = active ? begin : end;
    int block = begin / block_units;
    int unit_in_block = begin - block * block_units;
    int slot = 0;
    uint32_t parity = 1;
    int64_t tile = -1;  // the next one; -1: there is none at that place
    uint32_t code_begin = 0;
    uint32_t code_end = 0;
    uint64_t residual_begin = 0;
    uint32_t residual_end = 0;
    const auto tile_at = [&](int of_block, int of_unit) -> int64_t {
      return of_block * plan.height + my_row < plan.row_tiles && of_unit * plan.depth + my_place < plan.col_tiles
                 ? TileIndex(plan, of_block, of_unit, my_row, my_place)
                 : -1;
    };
    // What is known about the next tile arrives before its stage is free.
    const auto look_up = [&] {
      tile = feeds_x || unit >= end ? -1 : tile_at(block, unit_in_block);
      if (tile < 0 || plan.surplus == 0) return;
      code_begin = __ldg(p.code_offsets + tile);
      code_end = __ldg(p.code_offsets + tile + 1);
      residual_begin = __ldg(p.residual_offsets + tile);
      residual_end = __ldg(reinterpret_cast<const uint32_t*>(p.residual_offsets + tile + 1));
    };
    // Needs nothing that has to be looked up; the stage's barrier hears of these bytes later, which it allows.
    const auto fetch_values = [&](int64_t from, int to_slot) {
      if (from < 0) return;
      const uint32_t full = full0 + static_cast<uint32_t>(to_slot) * 8;
      const uint32_t at = static_cast<uint32_t>(whose * plan.stages + to_slot);
      BulkLoad(values + at * kValueBytes, p.values + from * kValueBytes, kValueBytes, full);
      BulkLoad(all_metadata + at * kMetadataBytes, p.metadata + from * kMetadataBytes, kMetadataBytes, full);
    };
    const auto fetch_rest = [&] {
      const uint32_t full = full0 + static_cast<uint32_t>(slot) * 8;
      TileInfo& info = shared.infos[whose * kMaxStages + slot];
      if (tile < 0) {
        info = {};
        BarrierArrive(full);
        return;
      }
      const uint32_t code_bytes = (code_end - code_begin) * kUnitBytes;
      const uint32_t residual = residual_end - static_cast<uint32_t>(residual_begin);
      info = {code_bytes, residual, code_begin, static_cast<uint32_t>(residual_begin)};
      const uint32_t at = static_cast<uint32_t>(whose * plan.stages + slot);
      const bool stage_codes = code_bytes > 0 && code_bytes <= static_cast<uint32_t>(plan.code_bytes);
      const uint64_t window = residual_begin & ~uint64_t{7};
      const uint32_t window_bytes = ((static_cast<uint32_t>(residual_begin) & 7u) + residual + 7) / 8 * 16;
      const bool stage_residual = residual > 0 && window_bytes <= kResidualBytes;
      BarrierArriveExpect(full, kValueBytes + kMetadataBytes + (stage_codes ? code_bytes : 0) +
                                    (stage_residual ? 2 * window_bytes : 0));
      if (stage_codes) {
        BulkLoad(all_codes + at * static_cast<uint32_t>(plan.code_bytes), p.codes + uint64_t{code_begin} * kUnitBytes,
                 code_bytes, full);
      }
      if (stage_residual) {
        const uint32_t to = residuals + at * static_cast<uint32_t>(plan.residual_bytes);
        BulkLoad(to, p.residual_positions + window, window_bytes, full);
        BulkLoad(to + kResidualBytes, p.residual_values + window, window_bytes, full);
      }
    };
    const auto fetch_box = [&] {
      const uint32_t full = full0 + static_cast<uint32_t>(slot) * 8;
      const uint32_t to = x_shared + static_cast<uint32_t>((whose * plan.boxes + slot) * kBoxBytes);
      const int column = (unit_in_block * plan.depth + my_place) * 128;
      BarrierArriveExpect(full, kBoxBytes);
      TensorLoad2d(to, &x_map, column, 0, full);
      TensorLoad2d(to + kTokens * 128, &x_map, column + kActivationBoxCols, 0, full);
    };
    const auto advance = [&] {
      ++unit;
      if (++unit_in_block == block_units) {
        unit_in_block = 0;
        ++block;
      }
      if (++slot == ring_size) {
        slot = 0;
        parity ^= 1;
      }
      look_up();
    };
    look_up();
    if (active) {
      for (int i = 0; i < ring_size; ++i) {
        BarrierInit(full0 + static_cast<uint32_t>(i) * 8, 1);
        BarrierInit(empty0 + static_cast<uint32_t>(i) * 8, feeds_x ? static_cast<uint32_t>(plan.height) : 1u);
      }
      BarrierInitFence();
      if (feeds_x) {
        PrefetchTensorMap(&x_map);
      } else {
        // The weights do not depend on earlier kernels: start them before anything else.
        int first_block = block;
        int first_unit = unit_in_block;
        for (int i = 0; i < plan.stages && begin + i < end; ++i) {
          fetch_values(tile_at(first_block, first_unit), i);
          if (++first_unit == block_units) {
            first_unit = 0;
            ++first_block;
          }
        }
      }
    }
    __syncwarp();
    NamedArrive(kStartBarrier, static_cast<int>(blockDim.x));
    if (feeds_x) {
      WaitForPrerequisites();
    } else {
      for (int i = 0; i < plan.stages && unit < end; ++i) {
        fetch_rest();
        advance();
      }
    }
    while (__any_sync(~0u, unit < end)) {
      if (unit < end && BarrierTest(empty0 + static_cast<uint32_t>(slot) * 8, parity)) {
        if (feeds_x) {
          fetch_box();
        } else {
          fetch_values(tile, slot);
          fetch_rest();
        }
        advance();
      } else {
        __nanosleep(64);
      }
    }
    return;
  }

  const uint32_t scratch = all_scratch + static_cast<uint32_t>(team * plan.scratch);
  // Zeroes this warp's half of the first `bytes` of scratch.
  const auto zero_scratch = [&](int bytes) {
    for (int i = role * bytes / 2 + lane * 16; i < (role + 1) * bytes / 2; i += 512) {
      ZeroShared128(scratch + static_cast<uint32_t>(i));
    }
  };
  if (plan.surplus != 0) zero_scratch(kValueBytes);
  NamedBarrier(kStartBarrier, static_cast<int>(blockDim.x));

  float sum[kWarpStrips][kTiles][4];
#pragma unroll
  for (int strip = 0; strip < kWarpStrips; ++strip) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[strip][tile][e] = 0.f;
    }
  }
  // ldmatrix: lane l addresses row l % 8 of unit l / 8.
  const uint32_t x_lane = x_shared + static_cast<uint32_t>(place * plan.boxes * kBoxBytes + lane % 8 * 128 +
                                                           (((lane / 8) ^ (lane % 8)) * 16));
  const uint32_t tile_barrier = static_cast<uint32_t>(team * kMaxStages) * 8;
  const uint32_t box_barrier = static_cast<uint32_t>(place * kMaxBoxes) * 8;
  const uint32_t half = static_cast<uint32_t>(role * kWarpStrips);  // the first of this warp's strips
  const int thread = 2 * lane + role;                               // even and odd threads: 32 banks each
  const auto index = static_cast<uint32_t>(role * 32 + lane);
  int stage = 0;
  uint32_t stage_parity = 0;
  int slot = 0;
  uint32_t slot_parity = 0;
  int block = begin / block_units;
  int unit_in_block = begin - block * block_units;
  bool from_start = unit_in_block == 0;  // the segment begins where the block does
#pragma unroll 1
  for (int unit = begin; unit < end; ++unit) {
    const uint32_t ring = static_cast<uint32_t>(team * plan.stages + stage);
    const uint32_t kept = values + ring * kValueBytes;
    const uint32_t metadata = all_metadata + ring * kMetadataBytes;
    const bool present =
        block * plan.height + row < plan.row_tiles && unit_in_block * plan.depth + place < plan.col_tiles;
    BarrierWait(tile_full + tile_barrier + static_cast<uint32_t>(stage) * 8, stage_parity);
    bool surplus = false;
    if (plan.surplus != 0) {
      const TileInfo info = shared.infos[team * kMaxStages + stage];
      surplus = (info.code_bytes | info.residual) != 0;
      if (info.code_bytes > 0) {
        const int units = (static_cast<int>(info.code_bytes) - static_cast<int>(kFirstBytes)) / kUnitBytes;
        if (info.code_bytes <= static_cast<uint32_t>(plan.code_bytes)) {
          MoveParked<true>(all_codes + ring * static_cast<uint32_t>(plan.code_bytes), nullptr, units, kept, scratch,
                           thread);
        } else {
          MoveParked<false>(0, p.codes + uint64_t{info.code_begin} * kUnitBytes, units, kept, scratch, thread);
        }
        AsyncProxyFence();
      }
      if (info.residual > 0) {
        const uint32_t skip = info.residual_begin & 7u;
        if (skip + info.residual <= kResidualBytes / 2) {
          const uint32_t from = residuals + ring * static_cast<uint32_t>(plan.residual_bytes) + skip * 2;
#pragma unroll 1
          for (uint32_t i = index; i < info.residual; i += kTeam * 32) {
            PlaceResidual(LoadShared16(from + i * 2), LoadShared16(from + kResidualBytes + i * 2), metadata, scratch);
          }
        } else {
          const uint64_t from = __ldg(p.residual_offsets + TileIndex(plan, block, unit_in_block, row, place));
#pragma unroll 1
          for (uint32_t i = index; i < info.residual; i += kTeam * 32) {
            PlaceResidual(__ldg(p.residual_positions + from + i), __ldg(p.residual_values + from + i), metadata,
                          scratch);
          }
        }
      }
      if (surplus) NamedBarrier(kTeamBarrier + team, kTeam * 32);  // W_t and W_r are complete
    }
    BarrierWait(box_full + box_barrier + static_cast<uint32_t>(slot) * 8, slot_parity);
    if (present) {
      const uint32_t x_box = x_lane + static_cast<uint32_t>(slot * kBoxBytes);
      const uint32_t at = half * (kSteps * 512);
      if (surplus) {
        MultiplyStrips<kIsBf16, kTokens, true>(sum, kept + at, scratch + at, metadata + half * 256, x_box, lane);
      } else {
        MultiplyStrips<kIsBf16, kTokens, false>(sum, kept + at, scratch + at, metadata + half * 256, x_box, lane);
      }
    }
    NamedBarrier(kTeamBarrier + team, kTeam * 32);  // the team is done with the stage, the box and W_r
    if (role == 0 && lane == 0) {
      BarrierArrive(tile_empty + tile_barrier + static_cast<uint32_t>(stage) * 8);
      BarrierArrive(box_empty + box_barrier + static_cast<uint32_t>(slot) * 8);
    }
    if (++stage == plan.stages) {
      stage = 0;
      stage_parity ^= 1;
    }
    if (++slot == plan.boxes) {
      slot = 0;
      slot_parity ^= 1;
    }
    ++unit_in_block;
    if (unit_in_block < block_units && unit + 1 < end) continue;

    // The end of a segment: the teams of a row add up, each warp some of the fragments.
    const bool whole = from_start && unit_in_block == block_units;
    const int tile_row = block * plan.height + row;
    if (tile_row < plan.row_tiles) {
      float4* const partial =
          p.partials + (static_cast<int64_t>(plan.Partial(cta, block)) * plan.height + row) * kStrips * kTiles * 32;
      const int members = plan.depth * kTeam;
      const auto* const first = reinterpret_cast<const float*>(dynamic + (all_scratch - x_shared) + row * plan.scratch);
#pragma unroll
      for (int round = 0; round < kWarpStrips / kRoundStrips; ++round) {
        if (round > 0) NamedBarrier(kRowBarrier + row, members * 32);
#pragma unroll
        for (int i = 0; i < kRoundStrips; ++i) {
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            const float(&v)[4] = sum[round * kRoundStrips + i][tile];
            StoreShared128(
                scratch + static_cast<uint32_t>(((role * kRoundStrips + i) * kTiles + tile) * 512 + lane * 16),
                make_float4(v[0], v[1], v[2], v[3]));
          }
        }
        NamedBarrier(kRowBarrier + row, members * 32);
#pragma unroll 1
        for (int fragment = place * kTeam + role; fragment < kRoundFragments; fragment += members) {
          const int tile = fragment % kTiles;
          const int round_strip = fragment / kTiles;
          const int strip =
              round_strip / kRoundStrips * kWarpStrips + round * kRoundStrips + round_strip % kRoundStrips;
          float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
          for (int from = 0; from < plan.depth; ++from) {
            AddQuad(total, LoadQuad(first + from * plan.height * plan.scratch / 4 + fragment * 128 + QuadOffset(lane)));
          }
          if (whole) {
            StoreTileQuad(p.epilogue, p.tokens, p.m, tile_row * kStrips + strip, tile, lane, total);
          } else {
            __stcg(partial + (strip * kTiles + tile) * 32 + lane, total);
          }
        }
      }
      NamedBarrier(kRowBarrier + row, members * 32);
      if (plan.surplus != 0) {
        zero_scratch(kRoundFragments * 512);
        NamedBarrier(kTeamBarrier + team, kTeam * 32);
      }
    }
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[strip][tile][e] = 0.f;
      }
    }
    if (unit_in_block == block_units) {
      unit_in_block = 0;
      ++block;
    }
    from_start = true;
  }
}

// Adds up the blocks that several CTAs have parts of: one warp 16 rows and 8 tokens.
template <int kTokens>
__global__ __launch_bounds__(256) void ThreeLayerFinish(const __grid_constant__ ThreeLayerParams p) {
  constexpr int kTiles = kTokens / 8;
  const Plan& plan = p.plan;
  TriggerDependents();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  const int tile = static_cast<int>(item % kTiles);
  const int64_t row_block = item / kTiles;
  const auto tile_row = static_cast<int>(row_block / kStrips);
  const int block = tile_row / plan.height;
  const bool inside = tile_row < plan.row_tiles;
  const IntPair owners = inside ? plan.Owners(block) : IntPair{0, 0};
  WaitForPrerequisites();
  if (owners.x == owners.y) return;
  const int64_t at = ((tile_row - block * plan.height) * kStrips + row_block % kStrips) * kTiles + tile;
  const int64_t fragments = int64_t{plan.height} * kStrips * kTiles;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  // Only the first owner can have begun with another block.
  int64_t partial = plan.Partial(owners.x, block);
#pragma unroll 4
  for (int cta = owners.x; cta <= owners.y; ++cta) {
    AddQuad(sum, __ldcg(p.partials + (partial * fragments + at) * 32 + lane));
    partial = (cta + 1) * kPartialsPerCta;
  }
  StoreTileQuad(p.epilogue, p.tokens, p.m, static_cast<int>(row_block), tile, lane, sum);
}

// ---- host

using MainKernel = void (*)(CUtensorMap, ThreeLayerParams);
using FinishKernel = void (*)(ThreeLayerParams);

template <bool kIsBf16>
MainKernel KernelForTokens(int tokens) {
  return tokens == 8    ? SpmmThreeLayer<kIsBf16, 8>
         : tokens == 16 ? SpmmThreeLayer<kIsBf16, 16>
         : tokens == 32 ? SpmmThreeLayer<kIsBf16, 32>
                        : SpmmThreeLayer<kIsBf16, 64>;
}

FinishKernel FindFinish(int tokens) {
  return tokens == 8    ? ThreeLayerFinish<8>
         : tokens == 16 ? ThreeLayerFinish<16>
         : tokens == 32 ? ThreeLayerFinish<32>
                        : ThreeLayerFinish<64>;
}

constexpr int64_t kTokensPerLaunch = 64;

int PaddedTokens(int64_t tokens) { return tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64; }

// Cuts of a launch that benchmarks may choose.
int Variant(const Call& call) { return static_cast<int>(call.flags >> SPMMD_CUDA_FLAG_VARIANT_SHIFT & 15u); }

bool HasSurplus(const spmmd_cuda_layer& layer) {
  return std::any_of(layer.sections.begin(), layer.sections.end(), [](const spmmd_cuda_layer::Section& section) {
    return (section.id == three_layer::kCodes || section.id == three_layer::kResidualValues) && section.size > 0;
  });
}

int64_t MaxDynamicShared(const spmmd_cuda_device& device) {
  constexpr int64_t kStatic =
      (sizeof(ThreeLayerShared) + kDynamicAlignment - 1) / kDynamicAlignment * kDynamicAlignment;
  return static_cast<int64_t>(device.max_shared_bytes) - kStatic;
}

Plan PlanFor(const spmmd_cuda_layer& layer, int tokens, int variant) {
  return three_layer_plan::MakePlan(layer.device->multiprocessors, MaxDynamicShared(*layer.device),
                                    CeilDiv(layer.m, three_layer::kTileRows), CeilDiv(layer.k, three_layer::kTileCols),
                                    tokens, layer.params[three_layer::kParamMaxCodeBytes], HasSurplus(layer), variant);
}

uint64_t PartialBytes(const Plan& plan, int tokens) {
  return static_cast<uint64_t>(plan.ctas) * kPartialsPerCta * plan.height * kStrips * (tokens / 8) * 512;
}

Status CanImplement(const spmmd_cuda_layer& /*layer*/, const Call& /*call*/) { return {}; }

uint64_t ScratchBytes(const spmmd_cuda_layer& layer, const Call& call) {
  uint64_t partials = 0;
  for (const int64_t tokens : {std::min(call.n, kTokensPerLaunch), call.n % kTokensPerLaunch}) {
    if (tokens == 0) continue;
    const int padded = PaddedTokens(tokens);
    partials = std::max(partials, PartialBytes(PlanFor(layer, padded, Variant(call)), padded));
  }
  // Room for converted activations always: whether they are needed depends on pointers that may not be known yet.
  return RoundUp(partials, 256) + static_cast<uint64_t>(call.n) * ConvertedPitch(layer) * 2;
}

Status LaunchPart(const spmmd_cuda_layer& layer, const Call& call, const void* x, int64_t x_stride, int64_t first_token,
                  int64_t tokens, cudaStream_t stream) {
  const int padded = PaddedTokens(tokens);
  const bool is_bf16 = layer.dtype == kBf16;
  ThreeLayerParams p = {};
  p.plan = PlanFor(layer, padded, Variant(call));
  p.values = layer.SectionData(three_layer::kValues);
  p.metadata = layer.SectionData(three_layer::kMetadata);
  p.codes = layer.SectionData(three_layer::kCodes);
  p.code_offsets = reinterpret_cast<const uint32_t*>(layer.SectionData(three_layer::kCodeOffsets));
  p.residual_offsets = reinterpret_cast<const uint64_t*>(layer.SectionData(three_layer::kResidualOffsets));
  p.residual_positions = reinterpret_cast<const uint16_t*>(layer.SectionData(three_layer::kResidualPositions));
  p.residual_values = reinterpret_cast<const uint16_t*>(layer.SectionData(three_layer::kResidualValues));
  p.tokens = static_cast<int>(tokens);
  p.m = static_cast<int>(layer.m);
  p.partials = reinterpret_cast<float4*>(static_cast<uint8_t*>(call.workspace) + kCounterBytes);
  p.epilogue = MakeEpilogue(call);
  p.epilogue.y =
      static_cast<uint8_t*>(call.y) + static_cast<uint64_t>(first_token * call.y_stride) * ElementSize(call.y_dtype);
  CUtensorMap map;
  SPMMD_CUDA_TRY(EncodeActivations(static_cast<const uint16_t*>(x) + first_token * x_stride, layer.k, tokens,
                                   tokens == 1 ? static_cast<int64_t>(ConvertedPitch(layer)) : x_stride, padded,
                                   is_bf16, &map));

  const MainKernel kernel = is_bf16 ? KernelForTokens<true>(padded) : KernelForTokens<false>(padded);
  const auto shared_bytes = static_cast<int>(three_layer_plan::SharedBytes(p.plan, padded));
  SPMMD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.plan.ctas));
  config.blockDim = dim3(static_cast<unsigned>((p.plan.teams() * kTeam + p.plan.helpers) * 32));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = (call.flags & SPMMD_CUDA_FLAG_CHAIN) != 0 ? 1 : 0;
  SPMMD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, map, p));
  // Parts of blocks are left unless every CTA ends where a block does.
  if (p.plan.extra != 0 || p.plan.share % p.plan.block_units != 0) {
    const int64_t items = int64_t{p.plan.row_tiles} * kStrips * (padded / 8);
    config.gridDim = dim3(static_cast<unsigned>(CeilDiv(items, 8)));
    config.blockDim = dim3(256);
    config.dynamicSmemBytes = 0;
    config.numAttrs = 1;
    SPMMD_CUDA_CHECK(cudaLaunchKernelEx(&config, FindFinish(padded), p));
  }
  return {};
}

Status Launch(const spmmd_cuda_layer& layer, const Call& call, cudaStream_t stream) {
  const void* x = call.x;
  int64_t x_stride = call.x_stride;
  if (NeedsConversion(layer, call)) {
    const uint64_t pitch = ConvertedPitch(layer);
    const uint64_t offset = kCounterBytes + ScratchBytes(layer, call) - static_cast<uint64_t>(call.n) * pitch * 2;
    void* converted = static_cast<uint8_t*>(call.workspace) + offset;
    SPMMD_CUDA_TRY(
        LaunchConvertActivations(call, layer.k, layer.dtype, static_cast<int64_t>(pitch), converted, stream));
    x = converted;
    x_stride = static_cast<int64_t>(pitch);
  }
  for (int64_t token = 0; token < call.n; token += kTokensPerLaunch) {
    SPMMD_CUDA_TRY(LaunchPart(layer, call, x, x_stride, token, std::min(call.n - token, kTokensPerLaunch), stream));
  }
  return {};
}

}  // namespace

const Kernel kThreeLayerSpmm = {.name = "three_layer_spmm",
                                .format = kFormatThreeLayer,
                                .sparse_input = false,
                                .can_implement = CanImplement,
                                .scratch_bytes = ScratchBytes,
                                .launch = Launch};

}  // namespace spmmd::cuda
