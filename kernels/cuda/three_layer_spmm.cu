// SpMM for up to 64 tokens a launch on the sparse tensor cores, after "Accelerating GPU Inference of Large Language
// Models with Moderately Unstructured Sparse Weight Matrices", section 4: THREE_LAYER tiles, W_t as it lies in memory,
// W_r built on the chip by the CUDA cores, both multiplied by mma.sp.
//
// Work. A warp takes whole tiles of 64 x 128. A CTA (one an SM) has as many warps along M as shared memory allows,
// which go through K together, and one more that feeds X: a ring of boxes, by TMA, 128-byte swizzled. The CTAs share
// all units (one tile a warp) evenly; a block of rows that several CTAs have parts of is added up from partial sums by
// a second small kernel, launched early, always in the same order.
//
// A tile. Values, metadata and codes arrive through a private ring of bulk copies. Each lane then walks its codes and
// moves parked values from W_t to W_r in shared memory. The paper multiplies the residual layer separately; here it is
// stored into the unused places of W_t and W_r, which costs one store an element and no second reduction. Then both
// are multiplied with the same B fragments; W_r is zeroed for the next tile as it is read. A tile without surplus skips
// all of that: for 2:4 masks the kernel is a stream of 128-bit loads and mma.sp.
//
// The paper lets two warpgroups alternate between decoding and multiplying, with wgmma. Here every warp does both and
// the scheduler overlaps them; mma.sp lets W_t and W_r share the B fragments of four strips, which wgmma would read
// from shared memory once for each, and shared memory is what limits the kernel.
//
// Bytes an element: the format's (1.23 at 50 %, 1.125 for 2:4) and partial sums. Shared-memory wavefronts a tile at N
// tokens, 50 %: copies in 80, fragments of W_t 64, of W_r 64 and zeroing it 64, decoding about 3 x 26 without
// conflicts, X 2 N.
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
using three_layer_plan::kPartialsPerCta;
using three_layer_plan::Plan;

constexpr int kStrips = 4;  // of 16 rows a tile
constexpr int kSteps = 4;   // of 32 columns a tile
constexpr int kValueBytes = three_layer::kTileValueBytes;
constexpr int kMetadataBytes = three_layer::kTileMetadataBytes;
constexpr int kUnitBytes = static_cast<int>(three_layer::kCodeGranule);
constexpr int kDynamicAlignment = 1024;
// With the one that feeds X, 2 or 3 warps a quarter of an SM: 255 and 168 registers a thread. Accumulators take kTokens
// of them.
constexpr int kMostWarps = 11;
constexpr int MaxWarps(int tokens) { return tokens == 64 ? 7 : kMostWarps; }

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
  float4* partials;  // [CTA][kPartialsPerCta][warp][strip][token tile][lane]
  Epilogue epilogue;
};

// What a tile has besides its Sparse-TC layer.
struct alignas(16) TileInfo {
  uint32_t code_begin;  // in units of 64 bytes
  uint32_t code_units;
  uint32_t residual;
  uint32_t pad;
  uint64_t residual_begin;
  uint64_t pad64;
};

struct ThreeLayerShared {
  uint64_t tile_full[kMostWarps * kMaxStages];
  uint64_t box_full[kMaxBoxes];
  uint64_t box_empty[kMaxBoxes];
  TileInfo infos[kMostWarps * kMaxStages];
};

// ---- PTX

__device__ __forceinline__ void StoreShared16(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(value)) : "memory");
}
__device__ __forceinline__ void ZeroShared128(uint32_t address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}
// What this thread wrote to shared memory is ordered before later bulk copies into it.
__device__ __forceinline__ void AsyncProxyFence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// D[16x8] += A[16x32] * B[32x8], A 2:4 sparse; kSelector: which lanes of each four hold the metadata.
template <bool kIsBf16, int kSelector>
__device__ __forceinline__ void MmaSparse(float (&d)[4], const uint4& a, const uint32_t (&b)[4], uint32_t metadata) {
  if constexpr (kIsBf16) {
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(kSelector));
  } else {
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(kSelector));
  }
}

// The metadata of W_r from that of W_t (three_layer_layout.h).
__device__ __forceinline__ uint32_t ComplementMetadata(uint32_t x) {
  const uint32_t e = (x >> 3 ^ x >> 1) & 0x11111111u;
  return x ^ (e * 5 | (e ^ 0x11111111u) * 10);
}

// ---- decoding

// Byte offset of a slot from its code number. Stays inside the tile whatever the number.
__device__ __forceinline__ uint32_t SlotOffset(uint32_t number) {
  return (number << 7 & 0x1f80u) | (number >> 5 & 0x7eu);
}

// Moves the parked values of a tile from W_t to W_r. `codes` may be shared or global memory.
__device__ __forceinline__ void MoveParked(const uint8_t* codes, int units, uint32_t kept, uint32_t moved, int lane) {
  constexpr int kBatch = 3;  // units whose loads are under way at a time
  const uint32_t first = *reinterpret_cast<const uint32_t*>(codes + lane * 4);
  uint32_t from = first & 0xffffu;
  uint32_t to = first >> 16;
  if (first != kNoMove) {
    const uint32_t value = LoadShared16(kept + SlotOffset(from));
    StoreShared16(kept + SlotOffset(from), 0);
    StoreShared16(moved + SlotOffset(to), value);
  }
  const uint8_t* unit = codes + kFirstBytes + lane * 2;
#pragma unroll 1
  for (; units > 0; units -= kBatch, unit += kBatch * kUnitBytes) {
    uint32_t source[kBatch * 2];
    uint32_t target[kBatch * 2];
    uint32_t value[kBatch * 2];
    bool live[kBatch * 2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t pair = i < units ? *reinterpret_cast<const uint16_t*>(unit + i * kUnitBytes) : 0u;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t from_step = pair >> (8 * j) & 15u;
        const uint32_t to_step = pair >> (8 * j + 4) & 15u;
        from += from_step;
        to += to_step;
        live[2 * i + j] = from_step != 0 && to_step != 0;
        source[2 * i + j] = kept + SlotOffset(from);
        target[2 * i + j] = moved + SlotOffset(to);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch * 2; ++i) {
      value[i] = 0;
      if (live[i]) value[i] = LoadShared16(source[i]);
    }
#pragma unroll
    for (int i = 0; i < kBatch * 2; ++i) {
      if (live[i]) StoreShared16(source[i], 0);
    }
#pragma unroll
    for (int i = 0; i < kBatch * 2; ++i) {
      if (live[i]) StoreShared16(target[i], value[i]);
    }
  }
}

// Stores an element of the residual into the slot that is its place in W_t or W_r: empty, or it would not be here.
__device__ __forceinline__ void PlaceResidual(uint32_t position, uint32_t value, uint32_t metadata, uint32_t kept,
                                              uint32_t moved) {
  const uint32_t row = position >> 7 & 63u;
  const uint32_t quad = position >> 2 & 31u;
  const uint32_t column = position & 3u;
  const uint32_t lane = (row % 8) * 4 + quad % 4;
  const uint32_t group = ((row / 16 * 4 + quad / 8) * 32 + lane) * 4 + quad % 8 / 4 * 2 + row % 16 / 8;
  const uint32_t holder = (row % 8) * 4 + quad / 8 % 2 * 2 + quad % 8 / 4;  // the lane that has the metadata
  const uint32_t word = LoadShared32(metadata + ((row / 16 * 32 + holder) * 2 + quad / 16) * 4);
  const uint32_t nibble = word >> (row % 16 / 8 * 16 + quad % 4 * 4) & 15u;
  const uint32_t p = nibble & 3u;
  const uint32_t q = nibble >> 2;
  const bool is_kept = column == p || column == q;
  // Of the pair that the column is in, slot 1 has the higher column: the other one is the pair's sum less this.
  const uint32_t other = (is_kept ? p + q : 6 - p - q) - column;
  const uint32_t slot = group * 2 + (column > other ? 1 : 0);
  StoreShared16((is_kept ? kept : moved) + slot * 2, value);
}

// ---- the kernel

template <bool kIsBf16, int kTokens, bool kSurplus>
__device__ __forceinline__ void MultiplyTile(float (&sum)[kStrips][kTokens / 8][4], uint32_t kept, uint32_t moved,
                                             uint32_t metadata, uint32_t x_box, int lane) {
  constexpr int kTiles = kTokens / 8;
  constexpr int kStripsAtOnce = kTokens == 64 ? 2 : 4;
  uint2 words[kStrips];
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) words[strip] = LoadShared64(metadata + strip * 256 + lane * 8);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t b[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint32_t at = x_box + step / 2 * (kTokens * 128) + tile * 1024;
      LoadMatrixX4(step % 2 == 0 ? at : at ^ 64u, b[tile]);
    }
#pragma unroll
    for (int strip0 = 0; strip0 < kStrips; strip0 += kStripsAtOnce) {
      uint4 a[kStripsAtOnce];
      uint4 r[kStripsAtOnce];
#pragma unroll
      for (int i = 0; i < kStripsAtOnce; ++i) {
        const uint32_t at = static_cast<uint32_t>((strip0 + i) * kSteps + step) * 512 + lane * 16;
        a[i] = LoadShared128(kept + at);
        if constexpr (kSurplus) {
          r[i] = LoadShared128(moved + at);
          ZeroShared128(moved + at);
        }
      }
#pragma unroll
      for (int i = 0; i < kStripsAtOnce; ++i) {
        const uint32_t word = step < 2 ? words[strip0 + i].x : words[strip0 + i].y;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          if (step % 2 == 0) {
            MmaSparse<kIsBf16, 0>(sum[strip0 + i][tile], a[i], b[tile], word);
          } else {
            MmaSparse<kIsBf16, 1>(sum[strip0 + i][tile], a[i], b[tile], word);
          }
        }
      }
      if constexpr (kSurplus) {
#pragma unroll
        for (int i = 0; i < kStripsAtOnce; ++i) {
          const uint32_t word = ComplementMetadata(step < 2 ? words[strip0 + i].x : words[strip0 + i].y);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            if (step % 2 == 0) {
              MmaSparse<kIsBf16, 0>(sum[strip0 + i][tile], r[i], b[tile], word);
            } else {
              MmaSparse<kIsBf16, 1>(sum[strip0 + i][tile], r[i], b[tile], word);
            }
          }
        }
      }
    }
  }
}

// Turns a fragment into the quad that this lane stores, through 512 bytes of shared memory.
__device__ __forceinline__ float4 TurnFragment(float4* turn, const float4& fragment, int lane) {
  __syncwarp();
  turn[lane] = fragment;
  __syncwarp();
  return LoadQuad(reinterpret_cast<const float*>(turn) + QuadOffset(lane));
}

template <bool kIsBf16, int kTokens>
__global__ __launch_bounds__((MaxWarps(kTokens) + 1) * 32,
                             1) void SpmmThreeLayer(const __grid_constant__ CUtensorMap x_map,
                                                    const __grid_constant__ ThreeLayerParams p) {
  constexpr int kTiles = kTokens / 8;
  constexpr int kBoxBytes = kTokens * 256;
  extern __shared__ __align__(kDynamicAlignment) uint8_t dynamic[];
  __shared__ ThreeLayerShared shared;
  const Plan& plan = p.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int cta = static_cast<int>(blockIdx.x);
  const int warps = plan.warps;
  const int begin = plan.Begin(cta);
  const int end = plan.Begin(cta + 1);
  TriggerDependents();

  // Dynamic shared memory: X, values, W_r, metadata, codes, turns.
  const uint32_t x_shared = SharedAddress(dynamic);
  const uint32_t values_at = static_cast<uint32_t>(plan.boxes * kBoxBytes);
  const uint32_t moved_at = values_at + static_cast<uint32_t>(warps * plan.stages * kValueBytes);
  const uint32_t metadata_at = moved_at + static_cast<uint32_t>(plan.surplus * warps * kValueBytes);
  const uint32_t codes_at = metadata_at + static_cast<uint32_t>(warps * plan.stages * kMetadataBytes);
  const uint32_t turns_at = codes_at + static_cast<uint32_t>(warps * plan.stages * plan.code_bytes);
  const uint32_t full0 = SharedAddress(shared.tile_full) + static_cast<uint32_t>(warp * kMaxStages * 8);
  const int ring0 = warp * plan.stages;

  const auto info_of = [&](int stage) -> TileInfo& { return shared.infos[warp * kMaxStages + stage]; };
  // The warp's tile of a unit, or -1.
  const auto tile_of = [&](int block, int col) -> int64_t {
    const int row = block * warps + warp;
    return row < plan.row_tiles ? static_cast<int64_t>(row) * plan.col_tiles + col : -1;
  };
  const auto read_info = [&](int64_t tile) {
    TileInfo info = {};
    if (tile >= 0 && plan.surplus != 0) {
      info.code_begin = __ldg(p.code_offsets + tile);
      info.code_units = __ldg(p.code_offsets + tile + 1) - info.code_begin;
      info.residual_begin = __ldg(p.residual_offsets + tile);
      info.residual = static_cast<uint32_t>(__ldg(p.residual_offsets + tile + 1) - info.residual_begin);
    }
    return info;
  };
  // One lane: a tile into a stage. One that is not there completes its barrier at once, so that every unit does.
  const auto fetch = [&](int64_t tile, const TileInfo& info, int stage) {
    const uint32_t full = full0 + static_cast<uint32_t>(stage * 8);
    if (tile < 0) {
      BarrierArrive(full);
      return;
    }
    const uint32_t code_bytes = info.code_units * kUnitBytes;
    const bool staged = code_bytes > 0 && code_bytes <= static_cast<uint32_t>(plan.code_bytes);
    const uint32_t at = static_cast<uint32_t>(ring0 + stage);
    BarrierArriveExpect(full, kValueBytes + kMetadataBytes + (staged ? code_bytes : 0));
    BulkLoad(x_shared + values_at + at * kValueBytes, p.values + tile * kValueBytes, kValueBytes, full);
    BulkLoad(x_shared + metadata_at + at * kMetadataBytes, p.metadata + tile * kMetadataBytes, kMetadataBytes, full);
    if (staged) {
      BulkLoad(x_shared + codes_at + at * static_cast<uint32_t>(plan.code_bytes),
               p.codes + uint64_t{info.code_begin} * kUnitBytes, code_bytes, full);
    }
  };

  // The unit that the warp fetches next.
  int ahead = begin;
  int ahead_block = begin / plan.col_tiles;
  int ahead_col = begin - ahead_block * plan.col_tiles;
  const auto advance = [&] {
    ++ahead;
    if (++ahead_col == plan.col_tiles) {
      ahead_col = 0;
      ++ahead_block;
    }
  };
  if (warp < warps) {
    // The weights do not depend on earlier kernels: start them before anything else. Lane s fetches unit s.
    int64_t tile = -1;
    int fetched = 0;
    for (; fetched < plan.stages && ahead < end; ++fetched, advance()) {
      if (lane == fetched) tile = tile_of(ahead_block, ahead_col);
    }
    if (lane < plan.stages) BarrierInit(full0 + lane * 8, 1);
    BarrierInitFence();
    __syncwarp();
    if (lane < fetched) {
      const TileInfo info = read_info(tile);
      fetch(tile, info, lane);
      info_of(lane) = info;
    }
    if (plan.surplus != 0) {
      for (int i = lane; i < kValueBytes / 16; i += 32) {
        ZeroShared128(x_shared + moved_at + static_cast<uint32_t>(warp * kValueBytes + i * 16));
      }
    }
    __syncwarp();
  } else if (lane == 0) {
    PrefetchTensorMap(&x_map);
    for (int i = 0; i < plan.boxes; ++i) {
      BarrierInit(SharedAddress(shared.box_full + i), 1);
      BarrierInit(SharedAddress(shared.box_empty + i), static_cast<uint32_t>(warps));
    }
    BarrierInitFence();
  }
  __syncthreads();

  if (warp == warps) {
    if (lane != 0) return;
    WaitForPrerequisites();
    int slot = 0;
    uint32_t parity = 1;
    int column = ahead_col * 128;
#pragma unroll 1
    for (int unit = begin; unit < end; ++unit) {
      const uint32_t full = SharedAddress(shared.box_full + slot);
      const uint32_t to = x_shared + static_cast<uint32_t>(slot * kBoxBytes);
      BarrierWait(SharedAddress(shared.box_empty + slot), parity);
      BarrierArriveExpect(full, kBoxBytes);
      TensorLoad2d(to, &x_map, column, 0, full);
      TensorLoad2d(to + kTokens * 128, &x_map, column + kActivationBoxCols, 0, full);
      column += 128;
      if (column == plan.col_tiles * 128) column = 0;
      if (++slot == plan.boxes) {
        slot = 0;
        parity ^= 1;
      }
    }
    return;
  }

  float sum[kStrips][kTiles][4];
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[strip][tile][e] = 0.f;
    }
  }
  const uint32_t moved = x_shared + moved_at + static_cast<uint32_t>(warp * kValueBytes);
  // ldmatrix: lane l addresses row l % 8 of unit l / 8.
  const uint32_t x_lane = x_shared + static_cast<uint32_t>(lane % 8 * 128 + (((lane / 8) ^ (lane % 8)) * 16));
  float4* const turn = reinterpret_cast<float4*>(dynamic + turns_at) + warp * 32;
  int stage = 0;
  uint32_t stage_parity = 0;
  int slot = 0;
  uint32_t slot_parity = 0;
  int block = begin / plan.col_tiles;
  int col = begin - block * plan.col_tiles;
  bool from_start = col == 0;  // the segment begins where the block does
#pragma unroll 1
  for (int unit = begin; unit < end; ++unit) {
    // What is known about the tile that will refill this stage arrives while this one is being worked on.
    const bool refill = ahead < end;
    int64_t next_tile = -1;
    TileInfo next = {};
    if (refill) {
      next_tile = tile_of(ahead_block, ahead_col);
      next = read_info(next_tile);
      advance();
    }
    const bool present = block * warps + warp < plan.row_tiles;
    const uint32_t ring = static_cast<uint32_t>(ring0 + stage);
    const uint32_t kept = x_shared + values_at + ring * kValueBytes;
    const uint32_t metadata = x_shared + metadata_at + ring * kMetadataBytes;
    const TileInfo& info = info_of(stage);
    const int code_bytes = static_cast<int>(info.code_units) * kUnitBytes;
    const uint32_t residual = info.residual;
    const bool surplus = code_bytes > 0 || residual > 0;
    uint32_t position = 0;
    uint32_t value = 0;
    if (lane < residual) {  // the first round of the residual arrives early
      position = __ldg(p.residual_positions + info.residual_begin + lane);
      value = __ldg(p.residual_values + info.residual_begin + lane);
    }
    BarrierWait(full0 + static_cast<uint32_t>(stage * 8), stage_parity);
    if (code_bytes > 0) {
      const uint8_t* codes = code_bytes <= plan.code_bytes
                                 ? dynamic + codes_at + ring * static_cast<uint32_t>(plan.code_bytes)
                                 : p.codes + uint64_t{info.code_begin} * kUnitBytes;
      MoveParked(codes, (code_bytes - static_cast<int>(kFirstBytes)) / kUnitBytes, kept, moved, lane);
      __syncwarp();
    }
    if (residual > 0) {
      if (lane < residual) PlaceResidual(position, value, metadata, kept, moved);
#pragma unroll 1
      for (uint32_t i = 32 + lane; i < residual; i += 32) {
        PlaceResidual(__ldg(p.residual_positions + info.residual_begin + i),
                      __ldg(p.residual_values + info.residual_begin + i), metadata, kept, moved);
      }
      __syncwarp();
    }
    BarrierWait(SharedAddress(shared.box_full + slot), slot_parity);
    if (present) {
      const uint32_t x_box = x_lane + static_cast<uint32_t>(slot * kBoxBytes);
      if (surplus) {
        MultiplyTile<kIsBf16, kTokens, true>(sum, kept, moved, metadata, x_box, lane);
        AsyncProxyFence();
      } else {
        MultiplyTile<kIsBf16, kTokens, false>(sum, kept, moved, metadata, x_box, lane);
      }
    }
    __syncwarp();  // every lane is done with the stage and the box
    if (lane == 0) {
      BarrierArrive(SharedAddress(shared.box_empty + slot));
      if (refill) {
        fetch(next_tile, next, stage);
        info_of(stage) = next;
      }
    }
    __syncwarp();
    if (++stage == plan.stages) {
      stage = 0;
      stage_parity ^= 1;
    }
    if (++slot == plan.boxes) {
      slot = 0;
      slot_parity ^= 1;
    }
    ++col;
    if (col < plan.col_tiles && unit + 1 < end) continue;

    // The end of a segment.
    const bool whole = from_start && col == plan.col_tiles;
    if (present) {
      float4* const partial =
          p.partials + (static_cast<int64_t>(plan.Partial(cta, block)) * warps + warp) * kStrips * kTiles * 32 + lane;
      const int row_block = (block * warps + warp) * kStrips;
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          float(&s)[4] = sum[strip][tile];
          const float4 fragment = make_float4(s[0], s[1], s[2], s[3]);
          if (whole) {
            StoreTileQuad(p.epilogue, p.tokens, p.m, row_block + strip, tile, lane, TurnFragment(turn, fragment, lane));
          } else {
            __stcg(partial + (strip * kTiles + tile) * 32, fragment);
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) s[e] = 0.f;
        }
      }
    }
    if (col == plan.col_tiles) {
      col = 0;
      ++block;
    }
    from_start = true;
  }
}

// Adds up the blocks that several CTAs have parts of: one warp 16 rows and 8 tokens.
template <int kTokens>
__global__ __launch_bounds__(256) void ThreeLayerFinish(const __grid_constant__ ThreeLayerParams p) {
  constexpr int kTiles = kTokens / 8;
  __shared__ float4 turns[8][32];
  const Plan& plan = p.plan;
  TriggerDependents();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  const int tile = static_cast<int>(item % kTiles);
  const int64_t row_block = item / kTiles;
  const auto row_tile = static_cast<int>(row_block / kStrips);
  WaitForPrerequisites();
  if (row_tile >= plan.row_tiles) return;
  const int block = row_tile / plan.warps;
  const IntPair owners = plan.Owners(block);
  if (owners.x == owners.y) return;
  const int64_t inside = ((row_tile - block * plan.warps) * kStrips + row_block % kStrips) * kTiles + tile;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int cta = owners.x; cta <= owners.y; ++cta) {
    const int64_t slot = static_cast<int64_t>(plan.Partial(cta, block)) * plan.warps * kStrips * kTiles;
    AddQuad(sum, __ldcg(p.partials + (slot + inside) * 32 + lane));
  }
  StoreTileQuad(p.epilogue, p.tokens, p.m, static_cast<int>(row_block), tile, lane,
                TurnFragment(turns[threadIdx.x / 32], sum, lane));
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
                                    tokens, layer.params[three_layer::kParamMaxCodeBytes], HasSurplus(layer),
                                    MaxWarps(tokens), variant);
}

uint64_t PartialBytes(const Plan& plan, int tokens) {
  return static_cast<uint64_t>(plan.ctas) * kPartialsPerCta * plan.warps * kStrips * (tokens / 8) * 512;
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
  config.blockDim = dim3(static_cast<unsigned>((p.plan.warps + 1) * 32));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = (call.flags & SPMMD_CUDA_FLAG_CHAIN) != 0 ? 1 : 0;
  SPMMD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, map, p));
  // Parts of blocks are left unless every CTA ends where a block does.
  if (p.plan.units() % p.plan.ctas != 0 || p.plan.units() / p.plan.ctas % p.plan.col_tiles != 0) {
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
