// SpMM for few tokens (N <= 32): BITMAP_GPU weights, mma.sync, no reduction through global memory.
//
// Work. A pair of CTAs (a cluster, one CTA an SM) owns some row blocks (16 rows each) over the whole of K; each of the
// two takes one half of K. In each of its rounds a CTA works on `height` row blocks, `depth` warps a row block, which
// take turns along K. So rows are dealt out in units of 16, and no matrix leaves more than a few per cent of the SMs
// idle. Each warp fetches its own chunks through a private ring of bulk copies, decodes them into A fragments and
// multiplies; X passes through rings of column blocks in shared memory, one ring a place along K, fed by one more warp.
//
// Reduction. The warps of a row block add up in shared memory; then half of the sums goes to the other CTA of the pair,
// straight into its shared memory, and at the end each CTA adds what it got to what it kept and stores. Always in the
// same order.
//
// Bytes an element: the format's. Instructions an element: about 5. Limiter: the launch, the latency of the first loads
// and the reduction at 4096x4096 (together about half of the time); memory where the matrix is large and N <= 16;
// shared memory (decoding, and every warp reading X for 16 rows alone) at N = 32.
#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/cuda/activation_map.h"
#include "kernels/cuda/bitmap_decode.cuh"
#include "kernels/cuda/chunk_offsets.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/internal.h"
#include "kernels/cuda/paired_launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/spmm_stream.h"
#include "kernels/cuda/spmm_tile.h"
#include "kernels/cuda/stream_schedule.h"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::cuda {
namespace {

using stream::kBoxCols;
using stream::kMaxRounds;
using stream::kMaxSlots;
using stream::kMaxStages;
using stream::kMaxWarps;

constexpr int kDynamicAlignment = 1024;
// Named barriers: one at which the warps that multiply wait for the barriers of the X rings to be made, then one for
// each row of warps.
constexpr int kStartBarrier = 0;
constexpr int kRowBarrier = 1;

struct StreamParams {
  stream::Plan plan;
  PairedLayers layers;
  int tokens;
  int stage_bytes;
};

struct StreamShared {
  uint64_t chunk_full[kMaxWarps * kMaxStages];
  uint64_t x_full[kMaxSlots];
  uint64_t x_empty[kMaxSlots];
  uint64_t sums_full[kMaxRounds];  // from the other CTA
};

// kTiles: tiles of 8 tokens.
template <bool kIsBf16, int kTiles, int kChunkCols>
__global__ __launch_bounds__((kMaxWarps + 1) * 32, 1) void SpmmStream(const __grid_constant__ CUtensorMap x_map,
                                                                      const __grid_constant__ StreamParams p) {
  constexpr int kBoxBytes = kTiles * 8 * kBoxCols * 2;
  constexpr int kSlotBytes = kTiles * 8 * kChunkCols * 2;
  extern __shared__ __align__(kDynamicAlignment) uint8_t dynamic[];
  __shared__ StreamShared shared;
  const stream::Plan &plan = p.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const PairedLayer &layer = p.layers.OfPair(static_cast<int>(blockIdx.x) / 2);
  const int own_pair = static_cast<int>(blockIdx.x) / 2 - layer.first_pair;
  const int rank = static_cast<int>(blockIdx.x) % 2;
  const int height = plan.height;
  const int depth = plan.depth;
  const int warps = height * depth;
  const int slots = plan.slots;
  const int rows = plan.Rows(layer.row_blocks, own_pair);
  int place = 0;
  int row = warp;
  while (row >= height) {
    row -= height;
    ++place;
  }

  // Dynamic shared memory: X rings, sums between the warps of a row block, this CTA's sums, sums from the other CTA,
  // chunk stages.
  const uint32_t x_shared = SharedAddress(dynamic);
  const int exchange = depth * slots * kSlotBytes;  // offsets
  const int kept = exchange + stream::ExchangeBytes(plan, kTiles);
  const int inbox = kept + stream::SumBytes(plan, kTiles);
  const uint32_t stage0 =
      x_shared + static_cast<uint32_t>(inbox + stream::SumBytes(plan, kTiles) + warp * plan.stages * p.stage_bytes);
  const uint32_t full0 = SharedAddress(shared.chunk_full) + static_cast<uint32_t>(warp * plan.stages * 8);
  const uint32_t x_full = SharedAddress(shared.x_full);
  const uint32_t x_empty = SharedAddress(shared.x_empty);

  // The weights do not depend on earlier kernels: start them before anything else. Lane s fetches chunk s.
  const stream::Share share = stream::ShareOf(plan, rows, rank, row, place);
  const uint32_t *const first_offset =
      layer.offsets +
      (static_cast<int64_t>(own_pair * plan.rows + row) * plan.col_blocks + plan.FirstCol(rank) + place);
  const auto find = [&](int i) {
    const IntPair at = stream::Find(share, i);
    const uint32_t *offset = first_offset + (static_cast<int64_t>(at.x * height) * plan.col_blocks + at.y * depth);
    return make_uint2(__ldg(offset), __ldg(offset + 1));
  };
  const int count = warp < warps ? share.rounds * share.steps : 0;
  ChunkOffsets offsets(count, find);
  const int first = min(plan.stages, count);
  const auto fetch_mine = [&] {
    FetchChunk(layer.chunks, offsets.Mine(), stage0 + static_cast<uint32_t>(lane * p.stage_bytes), full0 + lane * 8);
  };
  if (warp < warps) {
    if (lane < plan.stages) BarrierInit(full0 + lane * 8, 1);
    BarrierInitFence();
    __syncwarp();
    // Every warp's first chunk is asked for before any warp's second.
    if (lane == 0 && count > 0) fetch_mine();
    __syncwarp();
  } else {
    PrefetchTensorMap(&x_map);
    if (lane < depth * slots) {
      BarrierInit(x_full + lane * 8, 1);
      BarrierInit(x_empty + lane * 8, static_cast<uint32_t>(height));
    }
    if (lane < plan.rounds) BarrierInit(SharedAddress(shared.sums_full + lane), 1);
    BarrierInitFence();
    __syncwarp();
  }
  ClusterArrive();  // this CTA runs, its shared memory may be written to
  TriggerDependents();
  if (warp >= warps) {
    NamedArrive(kStartBarrier, (warps + 1) * 32);
    // Unit u = row * kTiles + token tile of a round is stored by rank u % 2.
    if (lane < plan.rounds) {
      const int units = max(0, min(height, rows - lane * height)) * kTiles;
      BarrierArriveExpect(SharedAddress(shared.sums_full + lane), static_cast<uint32_t>((units + 1 - rank) / 2 * 512));
    }
    // Lane l feeds the ring of place l.
    if (lane < depth) {
      WaitForPrerequisites();
      const int cols = plan.Cols(rank);
      int slot = 0;
      uint32_t parity = 1;
#pragma unroll 1
      for (int first_row = 0; first_row < rows; first_row += height) {
#pragma unroll 1
        for (int col = lane; col < cols; col += depth) {
          const int at = lane * slots + slot;
          const uint32_t full = x_full + static_cast<uint32_t>(at * 8);
          BarrierWait(x_empty + static_cast<uint32_t>(at * 8), parity);
          BarrierArriveExpect(full, kSlotBytes);
#pragma unroll
          for (int box = 0; box < kChunkCols / kBoxCols; ++box) {
            TensorLoad2d(x_shared + static_cast<uint32_t>(at * kSlotBytes + box * kBoxBytes), &x_map,
                         (plan.FirstCol(rank) + col) * kChunkCols + box * kBoxCols, 0, full);
          }
          if (++slot == slots) {
            slot = 0;
            parity ^= 1;
          }
        }
      }
    }
    __syncwarp();
    ClusterWait();
    return;
  }

  NamedBarrier(kStartBarrier, (warps + 1) * 32);
  if (lane > 0 && lane < first) fetch_mine();
  __syncwarp();
  ClusterWait();  // before more loads are under way, for all of which it would wait
  offsets.Skip(first);

  const uint32_t ring_full = x_full + static_cast<uint32_t>(place * slots * 8);
  const uint32_t ring_empty = x_empty + static_cast<uint32_t>(place * slots * 8);
  // ldmatrix: lane l addresses row l % 8 of unit l / 8.
  const uint32_t x_lane =
      x_shared + static_cast<uint32_t>(place * slots * kSlotBytes + lane % 8 * 128 + (((lane / 8) ^ (lane % 8)) * 16));
  const uint32_t partner = ClusterAddress(x_shared + static_cast<uint32_t>(inbox), static_cast<uint32_t>(rank ^ 1));
  const uint32_t partner_full = ClusterAddress(SharedAddress(shared.sums_full), static_cast<uint32_t>(rank ^ 1));
  const int round_sums = (height * kTiles + 1) / 2 * 512;
  int stage = 0;
  uint32_t stage_parity = 0;
  int slot = 0;
  uint32_t slot_parity = 0;
  const auto next_slot = [&] {
    if (++slot == slots) {
      slot = 0;
      slot_parity ^= 1;
    }
  };
#pragma unroll 1
  for (int round = 0; round < plan.rounds && round * height < rows; ++round) {
    if (round >= share.rounds) {  // no such row: let X pass
#pragma unroll 1
      for (int step = 0; step < share.steps; ++step) {
        BarrierWait(ring_full + static_cast<uint32_t>(slot * 8), slot_parity);
        if (lane == 0) BarrierArrive(ring_empty + static_cast<uint32_t>(slot * 8));
        next_slot();
      }
      continue;
    }
    float sum[kTiles][4] = {};
#pragma unroll 1
    for (int step = 0; step < share.steps; ++step) {
      const uint32_t chunk = stage0 + static_cast<uint32_t>(stage * p.stage_bytes);
      const uint32_t full = full0 + static_cast<uint32_t>(stage * 8);
      const uint32_t x_chunk = x_lane + static_cast<uint32_t>(slot * kSlotBytes);
      BarrierWait(ring_full + static_cast<uint32_t>(slot * 8), slot_parity);
      BarrierWait(full, stage_parity);
      ChunkDecoder<kChunkCols> decoder(chunk, lane);
#pragma unroll
      for (int s = 0; s < ChunkDecoder<kChunkCols>::kSteps; s += 2) {
        uint32_t b[kTiles][4];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint32_t box = x_chunk + static_cast<uint32_t>((s / 4 * kTiles + tile) * 1024);
          LoadMatrixX4(s % 4 == 0 ? box : box ^ 64u, b[tile]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t a[4];
          decoder.Step(s + half, a);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            MmaM16N8K16<kIsBf16>(sum[tile], a, b[tile][half * 2], b[tile][half * 2 + 1]);
          }
        }
      }
      __syncwarp();  // every lane is done with the stage and the slot
      if (lane == 0) BarrierArrive(ring_empty + static_cast<uint32_t>(slot * 8));
      if (!offsets.done()) {
        const uint2 next = offsets.Next();
        if (ElectOne()) FetchChunk(layer.chunks, next, chunk, full);
      }
      if (++stage == plan.stages) {
        stage = 0;
        stage_parity ^= 1;
      }
      next_slot();
    }

    // Along K.
    if (depth > 1) {
      float4 *const sums = reinterpret_cast<float4 *>(dynamic + exchange) + lane;
      if (round > 0) NamedBarrier(kRowBarrier + row, depth * 32);  // the sums of the round before have been read
      if (place > 0) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          sums[(((place - 1) * height + row) * kTiles + tile) * 32] =
              make_float4(sum[tile][0], sum[tile][1], sum[tile][2], sum[tile][3]);
        }
      }
      NamedBarrier(kRowBarrier + row, depth * 32);
      if (place > 0) continue;
#pragma unroll 1
      for (int from = 0; from < depth - 1; ++from) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const float4 v = sums[((from * height + row) * kTiles + tile) * 32];
          sum[tile][0] += v.x;
          sum[tile][1] += v.y;
          sum[tile][2] += v.z;
          sum[tile][3] += v.w;
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float4 v = make_float4(sum[tile][0], sum[tile][1], sum[tile][2], sum[tile][3]);
      const int unit = row * kTiles + tile;
      const int at = round * round_sums + unit / 2 * 512 + lane * 16;
      if (unit % 2 == rank) {
        *reinterpret_cast<float4 *>(dynamic + kept + at) = v;
      } else {
        ClusterStore128(partner + static_cast<uint32_t>(at), v, partner_full + static_cast<uint32_t>(round * 8));
      }
    }
  }
  if (place > 0 || share.rounds == 0) {
    return;
  }

  // What this CTA stores: its own half of K and the other's.
#pragma unroll 1
  for (int round = 0; round < share.rounds; ++round) {
    BarrierWaitCluster(SharedAddress(shared.sums_full + round), 0);
#pragma unroll 1
    for (int tile = 0; tile < kTiles; ++tile) {
      const int unit = row * kTiles + tile;
      if (unit % 2 != rank) continue;
      const int at = round * round_sums + unit / 2 * 512;
      float4 *const mine = reinterpret_cast<float4 *>(dynamic + kept + at);
      float4 total = mine[lane];
      AddQuad(total, reinterpret_cast<const float4 *>(dynamic + inbox + at)[lane]);
      mine[lane] = total;
      __syncwarp();
      const float4 quad = LoadQuad(reinterpret_cast<const float *>(mine) + QuadOffset(lane));
      StoreTileQuad(layer.epilogue, p.tokens, layer.m, own_pair * plan.rows + round * height + row, tile, lane, quad);
    }
  }
}

// ---- host

using StreamKernel = void (*)(CUtensorMap, StreamParams);

template <bool kIsBf16, int kChunkCols>
StreamKernel KernelForTokens(int tokens) {
  return tokens == 8    ? SpmmStream<kIsBf16, 1, kChunkCols>
         : tokens == 16 ? SpmmStream<kIsBf16, 2, kChunkCols>
                        : SpmmStream<kIsBf16, 4, kChunkCols>;
}

StreamKernel FindKernel(bool is_bf16, int tokens, int chunk_cols) {
  if (is_bf16) return chunk_cols == 256 ? KernelForTokens<true, 256>(tokens) : KernelForTokens<true, 128>(tokens);
  return chunk_cols == 256 ? KernelForTokens<false, 256>(tokens) : KernelForTokens<false, 128>(tokens);
}

constexpr int64_t kMaxTokens = 32;

int PaddedTokens(int64_t tokens) { return tokens <= 8 ? 8 : tokens <= 16 ? 16 : 32; }

// Plans are made once for each kind of launch.
stream::Plan PlanFor(const spmmd_cuda_layer *const *layers, const Call &call, int count) {
  constexpr int64_t kStatic = (sizeof(StreamShared) + kDynamicAlignment - 1) / kDynamicAlignment * kDynamicAlignment;
  const spmmd_cuda_layer &first = *layers[0];
  const auto only = static_cast<int>(call.flags >> SPMMD_CUDA_FLAG_VARIANT_SHIFT & 15u);
  const std::vector<int64_t> row_blocks = RowBlocksOf(layers, count);
  const int64_t col_blocks = BitmapColBlocks(first);
  const int64_t stage_bytes = LargestChunk(layers, count);
  const int tokens = PaddedTokens(call.n);
  static std::mutex mutex;
  static auto *const plans = new std::map<std::vector<int64_t>, stream::Plan>();
  std::vector<int64_t> key = {first.device->index, col_blocks, tokens, BitmapChunkCols(first), stage_bytes, only};
  key.insert(key.end(), row_blocks.begin(), row_blocks.end());
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = plans->find(key); found != plans->end()) return found->second;
  return (*plans)[std::move(key)] = stream::MakePlan(
             first.device->multiprocessors, static_cast<int64_t>(first.device->max_shared_bytes) - kStatic, row_blocks,
             col_blocks, tokens, BitmapChunkCols(first), stage_bytes, only);
}
stream::Plan PlanFor(const spmmd_cuda_layer &layer, const Call &call) {
  const spmmd_cuda_layer *layers[] = {&layer};
  return PlanFor(layers, call, 1);
}

Status CanImplement(const spmmd_cuda_layer &layer, const Call &call) {
  if (call.n > kMaxTokens) return Unimplemented("spmm_stream: more than 32 tokens");
  if (PlanFor(layer, call).pairs == 0) return Unimplemented("spmm_stream: no cut of the matrix fits");
  return {};
}

uint64_t ScratchBytes(const spmmd_cuda_layer &layer, const Call &call) { return ConvertedBytes(layer, call); }

Status CheckGroup(const spmmd_cuda_layer *const *layers, const Call *calls, int count) {
  SPMMD_CUDA_TRY(CheckPairedGroup(layers, calls, count));
  if (PlanFor(layers, calls[0], count).pairs == 0) {
    return InvalidArgument("layers: no cut of them together fits spmm_stream");
  }
  return {};
}

uint64_t GroupScratchBytes(const spmmd_cuda_layer *const *layers, const Call *calls, int) {
  return ConvertedBytes(*layers[0], calls[0]);
}

Status LaunchGroup(const spmmd_cuda_layer *const *layers, const Call *calls, int count, cudaStream_t stream) {
  const spmmd_cuda_layer &first = *layers[0];
  const int padded = PaddedTokens(calls[0].n);
  StreamParams p = {};
  p.plan = PlanFor(layers, calls[0], count);
  p.layers = MakePairedLayers(layers, calls, count, p.plan.rows);
  p.tokens = static_cast<int>(calls[0].n);
  p.stage_bytes = static_cast<int>(LargestChunk(layers, count));
  // More than half of an SM's, so that a launch that was chained to this one does not decode on the same SMs: 24 us
  // instead of 17 at 11008x4096, N = 8.
  const auto shared_bytes =
      static_cast<int>(std::max<int64_t>(stream::SharedBytes(p.plan, padded, BitmapChunkCols(first), p.stage_bytes),
                                         static_cast<int64_t>(first.device->max_shared_bytes) / 2 + 2048));
  return LaunchPairs(FindKernel(first.dtype == kBf16, padded, BitmapChunkCols(first)), p, p.plan.pairs,
                     (p.plan.warps() + 1) * 32, shared_bytes, padded, first, calls[0], stream);
}

Status Launch(const spmmd_cuda_layer &layer, const Call &call, cudaStream_t stream) {
  const spmmd_cuda_layer *layers[] = {&layer};
  return LaunchGroup(layers, &call, 1, stream);
}

// Measured on an H200: faster than spmm_tile for up to 16 tokens where the pairs fill the device (beyond, it depends on
// how the matrix is cut); spmm_pair, which is asked first, is faster still.
bool Preferred(const spmmd_cuda_layer &layer, const Call &call) {
  if (call.n > kMaxTokens) return false;
  const stream::Plan plan = PlanFor(layer, call);
  if (plan.pairs * 8 < layer.device->multiprocessors * 3) return false;
  if (call.n <= 16) return call.n <= 8 || layer.m * layer.k < int64_t{512} << 20;
  return plan.us < EstimateSpmmTile(layer, call);
}

}  // namespace

const Kernel kSpmmStream = {.name = "spmm_stream",
                            .format = kFormatBitmapGpu,
                            .sparse_input = false,
                            .can_implement = CanImplement,
                            .scratch_bytes = ScratchBytes,
                            .launch = Launch,
                            .launch_group = LaunchGroup,
                            .group_scratch_bytes = GroupScratchBytes,
                            .check_group = CheckGroup,
                            .preferred = Preferred};

}  // namespace spmmd::cuda
