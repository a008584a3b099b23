// SpMM for any number of tokens: BITMAP_GPU weights decoded straight into the register operand of wgmma, X by TMA.
//
// Work. A tile is `height` x 64 rows of W; a CTA (one an SM) has four warpgroups that decode and multiply (three for
// tiles of 128 tokens, two for 256), `height` of them along M and the others along K, and one more that feeds X. A unit
// is one chunk a warp: a tile's rows times the warpgroups along K. Tiles left over by whole rounds come first, cut
// along K into equal shares; then each CTA takes whole tiles. Or, where that divides better, pairs of CTAs (clusters)
// take whole tiles, each of the two one half of K. Each warp fetches its own chunks through a private ring of bulk
// copies, one barrier a chunk. X passes through a ring of 64-column boxes in shared memory, 128-byte swizzled, as wgmma
// wants its B operand.
//
// Reduction. Warpgroups along K add up in shared memory, the CTAs of a pair through distributed shared memory, half of
// the sums each (with 128 tokens and more in the rings of X, between tiles). Of leftover tiles each CTA leaves a
// partial sum in the workspace, which a second small kernel, launched early, adds up (the last CTA to arrive doing it
// was no faster). Always in the same order, and nobody ever waits for a CTA that may not be running.
//
// Bytes an element: the format's, plus partial sums of the leftovers. Instructions an element: about 5.5. Limiter:
// memory at 50 % sparsity and N <= 32; shared memory (decoding, and wgmma reading X again for every 64 rows) from N =
// 64 or 60 % on.
#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

#include "kernels/cuda/activation_map.h"
#include "kernels/cuda/bitmap_decode.cuh"
#include "kernels/cuda/chunk_offsets.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/internal.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/spmm_tile.h"
#include "kernels/cuda/tile_schedule.h"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::cuda {
namespace {

using tile::kBoxCols;
using tile::kMaxBoxes;
using tile::kMaxPieces;

constexpr int kMaxStages = 4;
constexpr int kDynamicAlignment = 1024;
// Registers a thread, for 4, 3 and 2 consumer warpgroups beside the one that feeds X.
constexpr int ConsumerRegisters(int groups) { return groups == 4 ? 112 : groups == 3 ? 160 : 240; }
constexpr int ProducerRegisters(int groups) { return groups == 4 ? 32 : 24; }
constexpr int kStepsPerCommit = 2;
// Named barriers: one at which the warps that multiply wait for the barriers of the X rings to be made, then one for
// each row of warpgroups.
constexpr int kStartBarrier = 0;
constexpr int kRowBarrier = 1;
// Of the second kernel: one CTA of it, with 32 registers a thread and no shared memory but the system's, fits beside
// one of four warpgroups of the first, so that it waits on the SM instead of being launched at the end.
constexpr int kFinishThreads = 128;
constexpr int kSystemShared = 1024;

struct TileParams {
  tile::Plan plan;
  const uint8_t *chunks;
  const uint32_t *offsets;
  int tokens;
  int m;
  int stage_bytes;
  float4 *partials;  // [CTA][kMaxPieces][row block of the tile][token tile][lane]
  Epilogue epilogue;
};

struct TileShared {
  uint64_t chunk_full[tile::kMaxGroups * 4 * kMaxStages];
  uint64_t box_full[kMaxBoxes];
  uint64_t box_empty[kMaxBoxes];
  uint64_t sums_full[2];     // from the other CTA of a pair
  uint64_t partner_drained;  // the other CTA is done with its rings, where sums may now go to
  uint64_t drained;          // so is this one with the sums there
  uint64_t nobody;
};

template <int kTokens>
constexpr int BoxBytes() {
  return kTokens * kBoxCols * 2;
}

// Shared memory behind the chunk stages: accumulators on their way between
// warps, kTokens / 8 x 512 bytes a slot, tile::ExchangeSlots a row block, and
// 512 bytes a row block for turning fragments into rows.
template <int kTokens>
constexpr int SlotBytes() {
  return kTokens / 8 * 512;
}

template <bool kIsBf16, int kTokens, int kChunkCols>
__global__ __launch_bounds__((tile::GroupsFor(kTokens) + 1) * 128,
                             1) void SpmmTile(const __grid_constant__ CUtensorMap x_map,
                                              const __grid_constant__ TileParams p) {
  constexpr int kGroups = tile::GroupsFor(kTokens);
  constexpr int kWarps = kGroups * 4;
  constexpr int kTiles = kTokens / 8;
  constexpr int kBoxesPerChunk = kChunkCols / kBoxCols;
  constexpr int kSteps = ChunkDecoder<kChunkCols>::kSteps;
  extern __shared__ __align__(kDynamicAlignment) uint8_t dynamic[];
  __shared__ TileShared shared;
  const tile::Plan &plan = p.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int cta = static_cast<int>(blockIdx.x);
  const int depth = plan.depth;
  const int boxes = plan.boxes;
  const uint32_t x_shared = SharedAddress(dynamic);
  constexpr bool kMayDrain = kTokens >= 128;
  const bool draining = kMayDrain && plan.draining;
  const int ring_bytes = depth * boxes * BoxBytes<kTokens>();
  uint8_t *const stages_begin =
      dynamic + (draining ? max(ring_bytes, tile::ExchangeBytes(plan) + tile::InboxBytes(plan)) : ring_bytes);
  TriggerDependents();

  if (threadIdx.x == kWarps * 32) {
    PrefetchTensorMap(&x_map);
    for (int i = 0; i < depth * boxes; ++i) {
      BarrierInit(SharedAddress(shared.box_full + i), 1);
      BarrierInit(SharedAddress(shared.box_empty + i), static_cast<uint32_t>(plan.height * 4));
    }
    for (uint64_t &full : shared.sums_full) BarrierInit(SharedAddress(&full), 1);
    BarrierInit(SharedAddress(&shared.partner_drained), 1);
    BarrierInit(SharedAddress(&shared.drained), kWarps);
    BarrierInit(SharedAddress(&shared.nobody), kWarps);
    BarrierInitFence();
  }

  // Consumers: warpgroup g takes row group g % height of the tile and chunk g /
  // height of the unit.
  const int group = warp / 4;
  const int group_col = plan.depth == 1 ? 0 : plan.height == 1 ? group : group / 2;  // group / height
  const int group_row = group - group_col * plan.height;
  const int row_block_in_tile = group_row * 4 + warp % 4;
  const uint32_t stage0 = SharedAddress(stages_begin) + static_cast<uint32_t>(warp * plan.stages * p.stage_bytes);
  const uint32_t full0 = SharedAddress(shared.chunk_full) + static_cast<uint32_t>(warp * plan.stages * 8);
  const tile::Plan::Units units = plan.UnitsOf(cta);
  // A warp's chunks: unit by unit, its row block of the tile and its place along K.
  const auto find = [&](int i) {
    const IntPair at = plan.Locate(cta, units, i);
    const int block = plan.RowTile(at.x) * plan.height * 4 + row_block_in_tile;
    if (at.y >= plan.Limit(block, group_col)) return make_uint2(0, 0);
    const uint32_t *offset =
        p.offsets + (static_cast<int64_t>(block) * plan.col_blocks + at.y * plan.depth + group_col);
    return make_uint2(__ldg(offset), __ldg(offset + 1));
  };
  ChunkOffsets offsets(warp < kWarps ? units.count : 0, find);
  if (warp < kWarps) {
    // The weights do not depend on earlier kernels: start them before anything else. Lane s fetches chunk s.
    const uint2 chunk = offsets.Mine();
    if (lane < plan.stages) BarrierInit(full0 + lane * 8, 1);
    BarrierInitFence();
    __syncwarp();
    if (lane == 0 && chunk.x != chunk.y) FetchChunk(p.chunks, chunk, stage0, full0);
  }
  __syncwarp();
  if (plan.paired) ClusterArrive();  // this CTA runs, its shared memory may be written to
  if (warp >= kWarps) {
    NamedArrive(kStartBarrier, (kWarps + 4) * 32);
    ShrinkRegisters<ProducerRegisters(kGroups)>();
    if (warp == kWarps && ElectOne()) {
      WaitForPrerequisites();
      int slot = 0;
      uint32_t parity = 1;
      tile::Segments segments(plan, cta);
      uint32_t drained_parity = 1;
      for (tile::Segment segment; segments.Next(segment);) {
        if (draining) {
          BarrierWait(SharedAddress(&shared.drained), drained_parity);
          drained_parity ^= 1;
        }
        const int token = plan.TokenTile(segment.tile) * kTokens;
        int column = segment.begin * depth * kChunkCols;
        for (int unit = segment.begin; unit < segment.end; ++unit, column += (depth - 1) * kChunkCols) {
#pragma unroll 1
          for (int box = 0; box < kBoxesPerChunk; ++box, column += kBoxCols) {
            for (int ring = 0; ring < depth; ++ring) {
              const int at = ring * boxes + slot;
              const uint32_t full = SharedAddress(shared.box_full + at);
              BarrierWait(SharedAddress(shared.box_empty + at), parity);
              BarrierArriveExpect(full, BoxBytes<kTokens>());
              TensorLoad2d(x_shared + static_cast<uint32_t>(at * BoxBytes<kTokens>()), &x_map,
                           column + ring * kChunkCols, token, full);
            }
            if (++slot == boxes) {
              slot = 0;
              parity ^= 1;
            }
          }
        }
      }
    }
    __syncwarp();
    if (plan.paired) ClusterWait();
    return;
  }

  NamedBarrier(kStartBarrier, (kWarps + 4) * 32);
  GrowRegisters<ConsumerRegisters(kGroups)>();
  {
    // Only now, so that every warp's first chunk was asked for before any warp's second.
    const int first = min(plan.stages, units.count);
    const uint2 chunk = offsets.Mine();
    const bool present = chunk.x != chunk.y;
    if (lane > 0 && lane < first && present) {
      FetchChunk(p.chunks, chunk, stage0 + static_cast<uint32_t>(lane * p.stage_bytes), full0 + lane * 8);
    }
    const uint32_t absent = __ballot_sync(~0u, lane < first && !present);
    for (int s = 0; absent != 0 && s < first; ++s) {
      if ((absent >> s & 1u) != 0) {
        ClearChunk<kChunkCols>(stage0 + static_cast<uint32_t>(s * p.stage_bytes), full0 + s * 8, lane);
      }
    }
    // Before more loads are under way, for all of which it would wait.
    if (plan.paired) ClusterWait();
    offsets.Skip(first);
  }
  const uint32_t box_full = SharedAddress(shared.box_full + group_col * boxes);
  const uint32_t box_empty = SharedAddress(shared.box_empty + group_col * boxes);
  const uint32_t x_low = WgmmaLowWord(x_shared + static_cast<uint32_t>(group_col * boxes * BoxBytes<kTokens>()));
  // Behind the stages: sums between warpgroups, 512 bytes a row block for turning fragments into rows, sums from the
  // other CTA. Draining: the first and the last in the rings.
  uint8_t *const behind = stages_begin + kWarps * plan.stages * p.stage_bytes;
  uint8_t *const exchange = draining ? dynamic : behind;
  uint8_t *const turns = draining ? behind : behind + tile::ExchangeBytes(plan);
  float4 *const turn = reinterpret_cast<float4 *>(turns) + row_block_in_tile * 32;
  const int inbox = draining ? tile::ExchangeBytes(plan) : static_cast<int>(turns - dynamic) + plan.height * 4 * 512;
  // This warp touches the rings no more; the copy engine may.
  const auto drain = [&] {
    ProxyFence();
    __syncwarp();
    if (lane == 0) BarrierArrive(SharedAddress(&shared.drained));
  };
  const int rank = cta % 2;
  int round = 0;
  // The next steps' values are on their way while these are combined: 6 % fewer cycles at 128 tokens. At 256 the tensor
  // cores hide it, and its extra instructions only cost power; with four warpgroups it takes too many registers.
  constexpr bool kLoadsAhead = kTokens == 128;
  uint32_t a[2][kStepsPerCommit][4];
  uint32_t loaded[2][kStepsPerCommit][8];
  int stage = 0;
  uint32_t stage_parity = 0;
  int slot = 0;
  // Whose wgmmas are done once the current batch is the only one running. At first a barrier that nobody waits for.
  uint32_t used_box = SharedAddress(&shared.nobody);
  uint32_t slot_parity = 0;
  tile::Segments segments(plan, cta);
#pragma unroll 1
  for (tile::Segment segment; segments.Next(segment);) {
    float sum[kTokens / 2];
#pragma unroll
    for (float &v : sum) v = 0.f;
#pragma unroll 1
    for (int unit = segment.begin; unit < segment.end; ++unit) {
      const uint32_t chunk = stage0 + static_cast<uint32_t>(stage * p.stage_bytes);
      const uint32_t full = full0 + static_cast<uint32_t>(stage * 8);
      BarrierWait(full, stage_parity);
      ChunkDecoder<kChunkCols> decoder(chunk, lane);
      if constexpr (kLoadsAhead) {
#pragma unroll
        for (int i = 0; i < kStepsPerCommit; ++i) decoder.Load(i, loaded[0][i]);
      }
#pragma unroll
      for (int step = 0; step < kSteps; step += kStepsPerCommit) {
        uint32_t(&set)[kStepsPerCommit][4] = a[step / kStepsPerCommit % 2];
#pragma unroll
        for (int i = 0; i < kStepsPerCommit; ++i) {
          if constexpr (kLoadsAhead) {
            if (step + kStepsPerCommit < kSteps) {
              decoder.Load(step + kStepsPerCommit + i, loaded[(step / kStepsPerCommit + 1) % 2][i]);
            }
          } else {
            decoder.Step(step + i, set[i]);
          }
        }
        if constexpr (kLoadsAhead) {
#pragma unroll
          for (int i = 0; i < kStepsPerCommit; ++i) CombineStep(loaded[step / kStepsPerCommit % 2][i], set[i]);
        }
        if (step % 4 == 0) BarrierWait(box_full + static_cast<uint32_t>(slot * 8), slot_parity);
        const uint32_t low = x_low + static_cast<uint32_t>(slot * (BoxBytes<kTokens>() / 16) + step % 4 * 2);
#pragma unroll
        for (int i = 0; i < kStepsPerCommit; ++i) WgmmaPin(set[i]);
        WgmmaFence();
#pragma unroll
        for (int i = 0; i < kStepsPerCommit; ++i) {
          Wgmma<kTokens, kIsBf16>(sum, set[i], WgmmaDescriptor(low + static_cast<uint32_t>(i * 2)));
        }
        WgmmaCommit();
        WgmmaWait<1>();
        if (step % 4 == 0) {
          if (lane == 0) BarrierArrive(used_box);
          used_box = box_empty + static_cast<uint32_t>(slot * 8);
        }
        if (step % 4 == 4 - kStepsPerCommit && ++slot == boxes) {
          slot = 0;
          slot_parity ^= 1;
        }
      }
      __syncwarp();  // every lane is done with the stage
      if (!offsets.done()) {
        const uint2 next = offsets.Next();
        if (next.x == next.y) {
          ClearChunk<kChunkCols>(chunk, full, lane);
        } else if (ElectOne()) {
          FetchChunk(p.chunks, next, chunk, full);
        }
      }
      if (++stage == plan.stages) {
        stage = 0;
        stage_parity ^= 1;
      }
    }
    WgmmaWait<0>();
#pragma unroll
    for (float &v : sum) WgmmaPin(v);

    if (draining) {
      NamedBarrier(kStartBarrier, kWarps * 32);  // nobody reads the rings any more
      if (threadIdx.x == 0) {
        BarrierArriveCluster(ClusterAddress(SharedAddress(&shared.partner_drained), static_cast<uint32_t>(rank ^ 1)));
      }
    }
    // Along K: of the warpgroups of a row that still have sums, the last ones give theirs to the first, until the first
    // has them all.
    if (depth > 1) {
      int keep = depth;
      for (int adding = depth; adding > 1; adding = keep) {
        keep = (adding + 1) / 2;
        float4 *const part =
            reinterpret_cast<float4 *>(
                exchange + ((group_col < keep ? group_col : group_col - keep) * plan.height * 4 + row_block_in_tile) *
                               SlotBytes<kTokens>()) +
            lane;
        NamedBarrier(kRowBarrier + group_row, depth * 128);  // what was there before has been read
        if (group_col >= keep && group_col < adding) {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            part[t * 32] = make_float4(sum[t * 4], sum[t * 4 + 1], sum[t * 4 + 2], sum[t * 4 + 3]);
          }
        }
        NamedBarrier(kRowBarrier + group_row, depth * 128);
        if (group_col < adding - keep) {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            const float4 v = part[t * 32];
            sum[t * 4] += v.x;
            sum[t * 4 + 1] += v.y;
            sum[t * 4 + 2] += v.z;
            sum[t * 4 + 3] += v.w;
          }
        }
      }
      if (group_col > 0) {
        if (draining) drain();
        continue;
      }
    }
    // Between the CTAs of a pair: unit u = row block * kTiles + token tile is stored by rank u % 2. The other's sums of
    // the round after next cannot come before it has got this round's from here.
    if (plan.paired) {
      const int at = inbox + (draining ? 0 : round % 2 * tile::InboxBytes(plan)) + lane * 16;
      const uint32_t full = SharedAddress(shared.sums_full + round % 2);
      const uint32_t partner = ClusterAddress(x_shared + static_cast<uint32_t>(at), static_cast<uint32_t>(rank ^ 1));
      const uint32_t partner_full = ClusterAddress(full, static_cast<uint32_t>(rank ^ 1));
      if (draining) {
        BarrierWaitCluster(SharedAddress(&shared.partner_drained), static_cast<uint32_t>(round % 2));
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int unit = row_block_in_tile * kTiles + t;
        if (unit % 2 == rank) continue;
        ClusterStore128(partner + static_cast<uint32_t>(unit / 2 * 512),
                        make_float4(sum[t * 4], sum[t * 4 + 1], sum[t * 4 + 2], sum[t * 4 + 3]), partner_full);
      }
      if (row_block_in_tile == 0 && lane == 0) {
        BarrierArriveExpect(full, static_cast<uint32_t>(tile::InboxBytes(plan)));
      }
      BarrierWaitCluster(full, static_cast<uint32_t>(round / 2 % 2));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int unit = row_block_in_tile * kTiles + t;
        if (unit % 2 != rank) continue;
        const float4 v = *reinterpret_cast<const float4 *>(dynamic + at + unit / 2 * 512);
        sum[t * 4] += v.x;
        sum[t * 4 + 1] += v.y;
        sum[t * 4 + 2] += v.z;
        sum[t * 4 + 3] += v.w;
      }
      ++round;
      if (draining) drain();
    }
    const int block = plan.RowTile(segment.tile) * plan.height * 4 + row_block_in_tile;
    const int first_tile = plan.TokenTile(segment.tile) * kTiles;
    float4 *const partial =
        p.partials +
        ((static_cast<int64_t>(cta) * kMaxPieces + segment.piece) * plan.height * 4 + row_block_in_tile) * kTiles * 32;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (plan.paired && (row_block_in_tile * kTiles + t) % 2 != rank) continue;
      __syncwarp();
      turn[lane] = make_float4(sum[t * 4], sum[t * 4 + 1], sum[t * 4 + 2], sum[t * 4 + 3]);
      __syncwarp();
      const float4 quad = LoadQuad(reinterpret_cast<const float *>(turn) + QuadOffset(lane));
      if (segment.piece >= 0) {
        __stcg(partial + t * 32 + lane, quad);
      } else {
        StoreTileQuad(p.epilogue, p.tokens, p.m, block, first_tile + t, lane, quad);
      }
    }
  }
}

// Adds up the shares of the leftover tiles: one warp a row block and token
// tile.
template <int kTokens>
__global__ __launch_bounds__(kFinishThreads, 16) void TileFinish(const __grid_constant__ TileParams p) {
  constexpr int kTiles = kTokens / 8;
  const tile::Plan &plan = p.plan;
  TriggerDependents();
  const int item = static_cast<int>(blockIdx.x * (kFinishThreads / 32) + threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int blocks = plan.height * 4;
  const int tile = item % kTiles;
  const int row_block = item / kTiles % blocks;
  const int leftover = item / kTiles / blocks;
  if (leftover >= plan.leftovers) return;
  const int first = plan.Sharer(leftover * plan.units);
  const int sharers = plan.Sharer((leftover + 1) * plan.units - 1) - first + 1;
  // Only the first of them may have had a share of the tile before; for the others this is their first piece.
  const int piece = leftover - plan.DivideByUnits(plan.ShareBegin(first));
  const int64_t part = int64_t{blocks} * kTiles * 32;
  const int64_t within = (row_block * kTiles + tile) * 32 + lane;
  const float4 *partial = p.partials + int64_t{first} * kMaxPieces * part + within;
  const int number = plan.FirstLeftover() + leftover;
  const int block = plan.RowTile(number) * blocks + row_block;
  const int token_tile = plan.TokenTile(number) * kTiles + tile;
  WaitForPrerequisites();
  float4 sum = __ldcg(partial + piece * part);
#pragma unroll 8
  for (int i = 1; i < sharers; ++i) AddQuad(sum, __ldcg(partial + i * kMaxPieces * part));
  StoreTileQuad(p.epilogue, p.tokens, p.m, block, token_tile, lane, sum);
}

// ---- host

using TileKernel = void (*)(CUtensorMap, TileParams);
using FinishKernel = void (*)(TileParams);

template <bool kIsBf16, int kChunkCols>
TileKernel KernelForTokens(int tokens) {
  return tokens == 8     ? SpmmTile<kIsBf16, 8, kChunkCols>
         : tokens == 16  ? SpmmTile<kIsBf16, 16, kChunkCols>
         : tokens == 32  ? SpmmTile<kIsBf16, 32, kChunkCols>
         : tokens == 64  ? SpmmTile<kIsBf16, 64, kChunkCols>
         : tokens == 128 ? SpmmTile<kIsBf16, 128, kChunkCols>
                         : SpmmTile<kIsBf16, 256, kChunkCols>;
}

TileKernel FindKernel(bool is_bf16, int tokens, int chunk_cols) {
  if (is_bf16) return chunk_cols == 256 ? KernelForTokens<true, 256>(tokens) : KernelForTokens<true, 128>(tokens);
  return chunk_cols == 256 ? KernelForTokens<false, 256>(tokens) : KernelForTokens<false, 128>(tokens);
}

FinishKernel FindFinish(int tokens) {
  return tokens == 8     ? TileFinish<8>
         : tokens == 16  ? TileFinish<16>
         : tokens == 32  ? TileFinish<32>
         : tokens == 64  ? TileFinish<64>
         : tokens == 128 ? TileFinish<128>
                         : TileFinish<256>;
}

int64_t MaxDynamicShared(const spmmd_cuda_device &device) {
  constexpr int64_t kStatic = (sizeof(TileShared) + kDynamicAlignment - 1) / kDynamicAlignment * kDynamicAlignment;
  return static_cast<int64_t>(device.max_shared_bytes) - kStatic - kSystemShared;
}

// Plans are made once for each kind of launch.
tile::Plan PlanFor(const spmmd_cuda_layer &layer, const Call &call, int64_t n) {
  const auto chunk_cols = static_cast<int>(layer.params[bitmap_gpu::kParamChunkCols]);
  const int64_t row_blocks = CeilDiv(layer.m, 16);
  const int64_t col_blocks = CeilDiv(layer.k, chunk_cols);
  const int64_t stage_bytes = layer.params[bitmap_gpu::kParamMaxChunkBytes];
  // Token counts that are padded to the same tiles share a plan.
  const int64_t tokens = n <= 8    ? 8
                         : n <= 16 ? 16
                         : n <= 32 ? 32
                         : n <= 64 ? 64
                                   : RoundUp(static_cast<uint64_t>(n), 128);
  const auto only = static_cast<int>(call.flags >> SPMMD_CUDA_FLAG_VARIANT_SHIFT & 15u);
  static std::mutex mutex;
  static auto *const plans = new std::map<std::tuple<int, int64_t, int64_t, int64_t, int, int64_t, int>, tile::Plan>();
  const std::tuple key(layer.device->index, row_blocks, col_blocks, tokens, chunk_cols, stage_bytes, only);
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = plans->find(key); found != plans->end()) return found->second;
  return (*plans)[key] = tile::MakePlan(layer.device->multiprocessors, MaxDynamicShared(*layer.device), row_blocks,
                                        col_blocks, tokens, chunk_cols, stage_bytes, only);
}

uint64_t PartialBytes(const tile::Plan &plan) {
  if (plan.leftovers == 0) return 0;
  return static_cast<uint64_t>(plan.ctas) * kMaxPieces * plan.height * 4 * static_cast<uint64_t>(plan.tokens / 8) * 512;
}

// What one launch takes: a tile's number must stay an int.
constexpr int64_t kTokensPerLaunch = 1 << 14;

Status CanImplement(const spmmd_cuda_layer &layer, const Call &call) {
  for (const int64_t tokens : {std::min(call.n, kTokensPerLaunch), call.n % kTokensPerLaunch}) {
    if (tokens > 0 && PlanFor(layer, call, tokens).ctas == 0) {
      return Unimplemented("spmm_tile: no cut, or the layer's largest chunk leaves no shared memory for activations");
    }
  }
  return {};
}

uint64_t ScratchBytes(const spmmd_cuda_layer &layer, const Call &call) {
  uint64_t partials = 0;
  for (const int64_t tokens : {std::min(call.n, kTokensPerLaunch), call.n % kTokensPerLaunch}) {
    if (tokens > 0) partials = std::max(partials, PartialBytes(PlanFor(layer, call, tokens)));
  }
  return RoundUp(partials, 256) + ConvertedBytes(layer, call);
}

Status LaunchPart(const spmmd_cuda_layer &layer, const Call &call, const Activations &x, int64_t first_token,
                  int64_t tokens, cudaStream_t stream) {
  const auto chunk_cols = static_cast<int>(layer.params[bitmap_gpu::kParamChunkCols]);
  TileParams p = {};
  p.plan = PlanFor(layer, call, tokens);
  p.chunks = layer.SectionData(bitmap_gpu::kChunkSection);
  p.offsets = reinterpret_cast<const uint32_t *>(layer.SectionData(bitmap_gpu::kOffsetSection));
  p.tokens = static_cast<int>(tokens);
  p.m = static_cast<int>(layer.m);
  p.stage_bytes = static_cast<int>(layer.params[bitmap_gpu::kParamMaxChunkBytes]);
  p.partials = reinterpret_cast<float4 *>(static_cast<uint8_t *>(call.workspace) + kCounterBytes);
  p.epilogue = MakeEpilogue(call);
  p.epilogue.y =
      static_cast<uint8_t *>(call.y) + static_cast<uint64_t>(first_token * call.y_stride) * ElementSize(call.y_dtype);
  CUtensorMap map;
  SPMMD_CUDA_TRY(EncodeActivations(x.data + first_token * x.stride, layer.k, tokens, x.stride, p.plan.tokens,
                                   layer.dtype == kBf16, &map));

  const TileKernel kernel = FindKernel(layer.dtype == kBf16, p.plan.tokens, chunk_cols);
  const auto shared_bytes = static_cast<int>(tile::SharedBytes(p.plan, p.stage_bytes));
  SPMMD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.plan.ctas));
  config.blockDim = dim3(static_cast<unsigned>((p.plan.groups + 1) * 128));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  cudaLaunchAttribute &early = attributes[0];
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = (call.flags & SPMMD_CUDA_FLAG_CHAIN) != 0 ? 1 : 0;
  cudaLaunchAttribute &cluster = attributes[1];
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = 2;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = p.plan.paired ? 2 : 1;
  SPMMD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, map, p));
  if (p.plan.leftovers > 0) {
    config.gridDim = dim3(static_cast<unsigned>(
        CeilDiv(int64_t{p.plan.leftovers} * p.plan.height * 4 * (p.plan.tokens / 8), kFinishThreads / 32)));
    config.blockDim = dim3(kFinishThreads);
    config.dynamicSmemBytes = 0;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.numAttrs = 1;
    SPMMD_CUDA_CHECK(cudaLaunchKernelEx(&config, FindFinish(p.plan.tokens), p));
  }
  return {};
}

Status Launch(const spmmd_cuda_layer &layer, const Call &call, cudaStream_t stream) {
  const uint64_t offset = kCounterBytes + ScratchBytes(layer, call) - ConvertedBytes(layer, call);
  Activations x;
  SPMMD_CUDA_TRY(PrepareActivations(layer, call, static_cast<uint8_t *>(call.workspace) + offset, stream, &x));
  for (int64_t token = 0; token < call.n; token += kTokensPerLaunch) {
    SPMMD_CUDA_TRY(LaunchPart(layer, call, x, token, std::min(call.n - token, kTokensPerLaunch), stream));
  }
  return {};
}

}  // namespace

double EstimateSpmmTile(const spmmd_cuda_layer &layer, const Call &call) { return PlanFor(layer, call, call.n).us; }

const Kernel kSpmmTile = {"spmm_tile", kFormatBitmapGpu, false, CanImplement, ScratchBytes, Launch};

}  // namespace spmmd::cuda
