// SpMM for small matrices and few tokens (N <= 16): BITMAP_GPU weights, mma.sync, no reduction through global memory.
//
// Work. A pair of CTAs (a cluster, one CTA an SM) owns some row blocks (16 rows each) over the whole of K; each of the
// two takes one half of K, whose part of X stays in shared memory. A CTA's chunks, row block by row block, are dealt
// out to its 16 warps in equal runs, so a warp works on two row blocks at most. Each warp fetches its own chunks
// through a private ring of bulk copies, decodes them into A fragments and multiplies; it waits for nobody but the copy
// engine.
//
// Reduction. Each warp leaves its sums in shared memory; after one barrier the CTA adds them up and sends them to the
// CTA of the pair that stores them, which adds its own. Always in the same order.
//
// Bytes an element: the format's. Instructions an element: about 5. Limiter: the launch, the latency of the first loads
// and the reduction, together about half of the time at 4096x4096.
#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/activation_map.h"
#include "kernels/cuda/bitmap_decode.cuh"
#include "kernels/cuda/chunk_offsets.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/internal.h"
#include "kernels/cuda/pair_schedule.h"
#include "kernels/cuda/paired_launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/spmm_pair.h"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::cuda {
namespace {

using pair::kBoxCols;
using pair::kGroupCols;
using pair::kMaxGroups;
using pair::kMaxStages;
using pair::kWarps;

constexpr int kDynamicAlignment = 1024;

struct PairParams {
  pair::Plan plan;
  PairedLayers layers;
  int tokens;
  int stage_bytes;
};

struct PairShared {
  uint64_t chunk_full[kWarps * kMaxStages];
  uint64_t x_full[kMaxGroups];
  uint64_t sums_full;              // from the other CTA
  int first_row[kWarps];           // of the pair's row blocks, the first a warp works on; -1 for a warp without work
  int first_warp[pair::kMaxRows];  // the warp with a row block's first chunk
};

// kTiles: tiles of 8 tokens.
template <bool kIsBf16, int kTiles, int kChunkCols>
__global__ __launch_bounds__(kWarps * 32, 1) void SpmmPair(const __grid_constant__ CUtensorMap x_map,
                                                           const __grid_constant__ PairParams p) {
  constexpr int kBoxBytes = kTiles * 8 * kBoxCols * 2;
  extern __shared__ __align__(kDynamicAlignment) uint8_t dynamic[];
  __shared__ PairShared shared;
  const pair::Plan &plan = p.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const PairedLayer &layer = p.layers.OfPair(static_cast<int>(blockIdx.x) / 2);
  const int own_pair = static_cast<int>(blockIdx.x) / 2 - layer.first_pair;
  const int rank = static_cast<int>(blockIdx.x) % 2;
  const int cols = plan.Cols(rank);
  const int rows = plan.Rows(layer.row_blocks, own_pair);
  const int items = rows * cols;
  const int begin = pair::FirstItem(items, warp);
  const int count = pair::FirstItem(items, warp + 1) - begin;

  // Dynamic shared memory: X, sums from both CTAs, chunk stages.
  const uint32_t x_shared = SharedAddress(dynamic);
  const uint32_t inbox = x_shared + static_cast<uint32_t>(plan.Cols(0) * kChunkCols * kTiles * 16);
  const uint32_t stage0 = inbox + static_cast<uint32_t>(plan.InboxBytes(kTiles) + warp * plan.stages * p.stage_bytes);
  const uint32_t full0 = SharedAddress(shared.chunk_full) + static_cast<uint32_t>(warp * plan.stages * 8);

  // The weights do not depend on earlier kernels: start them before anything else. Lane s fetches chunk s.
  const int first_row = plan.RowOf(rank, begin);
  const int first_col = begin - first_row * cols;
  const uint32_t *const first_offset =
      layer.offsets + (static_cast<int64_t>(own_pair) * plan.rows * plan.col_blocks + plan.FirstCol(rank));
  const auto find = [&](int i) {
    const int past = first_col + i >= cols ? cols : 0;  // in the second row block
    const uint32_t *offset = first_offset + (static_cast<int64_t>(first_row + (past > 0 ? 1 : 0)) * plan.col_blocks +
                                             (first_col + i - past));
    return make_uint2(__ldg(offset), __ldg(offset + 1));
  };
  ChunkOffsets offsets(count, find);
  const int first = min(plan.stages, count);
  if (lane < plan.stages) BarrierInit(full0 + lane * 8, 1);
  const int groups = (cols * kChunkCols + kGroupCols - 1) / kGroupCols;
  if (lane == 0) {
    for (int group = warp; group < groups; group += kWarps) BarrierInit(SharedAddress(shared.x_full + group), 1);
  }
  // Unit u = row block * kTiles + token tile is stored by rank u % 2.
  const int units = rows * kTiles;
  const int own_units = (units + 1 - rank) / 2;
  const uint32_t sums_full = SharedAddress(&shared.sums_full);
  if (threadIdx.x == 0) BarrierInit(sums_full, 1);
  BarrierInitFence();
  __syncwarp();
  // Every warp's first chunk is asked for before any warp's second.
  const auto fetch_mine = [&] {
    FetchChunk(layer.chunks, offsets.Mine(), stage0 + static_cast<uint32_t>(lane * p.stage_bytes), full0 + lane * 8);
  };
  if (lane == 0 && count > 0) fetch_mine();
  __syncwarp();
  if (warp < groups && ElectOne()) {
    WaitForPrerequisites();
    for (int group = warp; group < groups; group += kWarps) {
      const uint32_t full = SharedAddress(shared.x_full + group);
      const int boxes = min(kGroupCols, cols * kChunkCols - group * kGroupCols) / kBoxCols;
      BarrierArriveExpect(full, static_cast<uint32_t>(boxes * kBoxBytes));
#pragma unroll 1
      for (int box = group * (kGroupCols / kBoxCols); box < group * (kGroupCols / kBoxCols) + boxes; ++box) {
        TensorLoad2d(x_shared + static_cast<uint32_t>(box * kBoxBytes), &x_map,
                     plan.FirstCol(rank) * kChunkCols + box * kBoxCols, 0, full);
      }
    }
  }
  __syncwarp();
  const bool two = first_col + count > cols;  // row blocks
  if (lane == 0) {
    shared.first_row[warp] = count > 0 ? first_row : -1;
    if (count > 0 && first_col == 0) shared.first_warp[first_row] = warp;
    if (two) shared.first_warp[first_row + 1] = warp;
  }
  ClusterArrive();  // this CTA runs, its shared memory may be written to
  TriggerDependents();
  __syncthreads();
  if (threadIdx.x == 0) BarrierArriveExpect(sums_full, static_cast<uint32_t>(own_units * 512));
  if (lane > 0 && lane < first) fetch_mine();
  __syncwarp();
  offsets.Skip(first);

  float sum[kTiles][4] = {};
  float finished[kTiles][4];  // of the first row block, once the warp is at the second
  // ldmatrix: lane l addresses row l % 8 of unit l / 8.
  const uint32_t x_lane = x_shared + static_cast<uint32_t>(lane % 8 * 128 + (((lane / 8) ^ (lane % 8)) * 16));
  int col = first_col;
  int stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const uint32_t chunk = stage0 + static_cast<uint32_t>(stage * p.stage_bytes);
    const uint32_t full = full0 + static_cast<uint32_t>(stage * 8);
    const uint32_t x_chunk = x_lane + static_cast<uint32_t>(col * (kChunkCols / kBoxCols) * kBoxBytes);
    BarrierWait(SharedAddress(shared.x_full + col * kChunkCols / kGroupCols), 0);
    BarrierWait(full, parity);
    ChunkDecoder<kChunkCols> decoder(chunk, lane);
#pragma unroll
    for (int step = 0; step < ChunkDecoder<kChunkCols>::kSteps; step += 2) {
      uint32_t b[kTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint32_t box = x_chunk + static_cast<uint32_t>((step / 4 * kTiles + tile) * 1024);
        LoadMatrixX4(step % 4 == 0 ? box : box ^ 64u, b[tile]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4];
        decoder.Step(step + half, a);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          MmaM16N8K16<kIsBf16>(sum[tile], a, b[tile][half * 2], b[tile][half * 2 + 1]);
        }
      }
    }
    __syncwarp();  // every lane is done with the stage
    if (!offsets.done()) {
      const uint2 next = offsets.Next();
      if (ElectOne()) FetchChunk(layer.chunks, next, chunk, full);
    }
    if (++stage == plan.stages) {
      stage = 0;
      parity ^= 1;
    }
    if (++col == cols && i + 1 < count) {
      col = 0;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          finished[tile][e] = sum[tile][e];
          sum[tile][e] = 0.f;
        }
      }
    }
  }

  // The warp's sums where its chunks were: slot 0 is of its first row block.
  uint8_t *const slots = dynamic + (stage0 - x_shared);
  float4 *to = reinterpret_cast<float4 *>(slots) + lane;
  if (two) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      to[tile * 32] = make_float4(finished[tile][0], finished[tile][1], finished[tile][2], finished[tile][3]);
    }
    to += kTiles * 32;
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    to[tile * 32] = make_float4(sum[tile][0], sum[tile][1], sum[tile][2], sum[tile][3]);
  }
  __syncthreads();
  ClusterWait();

  // First what the other CTA stores, then what this one does.
  const uint32_t partner_inbox = ClusterAddress(inbox, static_cast<uint32_t>(rank ^ 1));
  const uint32_t partner_full = ClusterAddress(sums_full, static_cast<uint32_t>(rank ^ 1));
  uint8_t *const all_slots = slots - warp * plan.stages * p.stage_bytes;
#pragma unroll 1
  for (int i = warp; i < units; i += kWarps) {
    const bool own = i >= units - own_units;
    const int unit = own ? (i - (units - own_units)) * 2 + rank : i * 2 + (rank ^ 1);
    const int row = unit / kTiles;
    const int tile = unit % kTiles;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    if (cols > 0) {
#pragma unroll 1
      for (int from = shared.first_warp[row]; from < kWarps; ++from) {
        const int other = shared.first_row[from];
        if (other > row) break;
        if (other < 0) continue;
        const float4 *sums = reinterpret_cast<const float4 *>(all_slots + from * plan.stages * p.stage_bytes);
        AddQuad(total, sums[((row - other) * kTiles + tile) * 32 + lane]);
      }
    }
    const int place = unit / 2 * 512;
    if (!own) {
      ClusterStore128(partner_inbox + static_cast<uint32_t>(place + lane * 16), total, partner_full);
      continue;
    }
    float4 *const received = reinterpret_cast<float4 *>(dynamic + (inbox - x_shared) + place);
    BarrierWaitCluster(sums_full, 0);
    const float4 theirs = received[lane];
    AddQuad(total, theirs);
    received[lane] = total;
    __syncwarp();
    const float4 quad = LoadQuad(reinterpret_cast<const float *>(received) + QuadOffset(lane));
    StoreTileQuad(layer.epilogue, p.tokens, layer.m, own_pair * plan.rows + row, tile, lane, quad);
  }
}

// ---- host

using PairKernel = void (*)(CUtensorMap, PairParams);

template <bool kIsBf16, int kChunkCols>
PairKernel KernelForTokens(int tokens) {
  return tokens == 8 ? SpmmPair<kIsBf16, 1, kChunkCols> : SpmmPair<kIsBf16, 2, kChunkCols>;
}

PairKernel FindKernel(bool is_bf16, int tokens, int chunk_cols) {
  if (is_bf16) return chunk_cols == 256 ? KernelForTokens<true, 256>(tokens) : KernelForTokens<true, 128>(tokens);
  return chunk_cols == 256 ? KernelForTokens<false, 256>(tokens) : KernelForTokens<false, 128>(tokens);
}

constexpr int64_t kMaxTokens = 16;

int PaddedTokens(int64_t tokens) { return tokens <= 8 ? 8 : 16; }

pair::Plan PlanFor(const spmmd_cuda_layer *const *layers, const Call &call, int count) {
  constexpr int64_t kStatic = (sizeof(PairShared) + kDynamicAlignment - 1) / kDynamicAlignment * kDynamicAlignment;
  const spmmd_cuda_layer &first = *layers[0];
  const int variant = static_cast<int>(call.flags >> SPMMD_CUDA_FLAG_VARIANT_SHIFT & 15u);
  return pair::MakePlan(first.device->multiprocessors, static_cast<int64_t>(first.device->max_shared_bytes) - kStatic,
                        RowBlocksOf(layers, count), BitmapColBlocks(first), PaddedTokens(call.n),
                        BitmapChunkCols(first), LargestChunk(layers, count),
                        variant == 0 ? 2 : std::min(variant + 1, kMaxStages));
}
pair::Plan PlanFor(const spmmd_cuda_layer &layer, const Call &call) {
  const spmmd_cuda_layer *layers[] = {&layer};
  return PlanFor(layers, call, 1);
}

Status CanImplement(const spmmd_cuda_layer &layer, const Call &call) {
  if (call.n > kMaxTokens) return Unimplemented("spmm_pair: more than 16 tokens");
  if (PlanFor(layer, call).pairs == 0) return Unimplemented("spmm_pair: the matrix is too large");
  return {};
}

uint64_t ScratchBytes(const spmmd_cuda_layer &layer, const Call &call) { return ConvertedBytes(layer, call); }

Status CheckGroup(const spmmd_cuda_layer *const *layers, const Call *calls, int count) {
  SPMMD_CUDA_TRY(CheckPairedGroup(layers, calls, count));
  if (PlanFor(layers, calls[0], count).pairs == 0) {
    return InvalidArgument("layers: together they are too large for spmm_pair");
  }
  return {};
}

uint64_t GroupScratchBytes(const spmmd_cuda_layer *const *layers, const Call *calls, int) {
  return ConvertedBytes(*layers[0], calls[0]);
}

Status LaunchGroup(const spmmd_cuda_layer *const *layers, const Call *calls, int count, cudaStream_t stream) {
  const spmmd_cuda_layer &first = *layers[0];
  const int padded = PaddedTokens(calls[0].n);
  PairParams p = {};
  p.plan = PlanFor(layers, calls[0], count);
  p.layers = MakePairedLayers(layers, calls, count, p.plan.rows);
  p.tokens = static_cast<int>(calls[0].n);
  p.stage_bytes = static_cast<int>(LargestChunk(layers, count));
  const auto shared_bytes = static_cast<int>(pair::SharedBytes(p.plan, padded, BitmapChunkCols(first), p.stage_bytes));
  return LaunchPairs(FindKernel(first.dtype == kBf16, padded, BitmapChunkCols(first)), p, p.plan.pairs, kWarps * 32,
                     shared_bytes, padded, first, calls[0], stream);
}

Status Launch(const spmmd_cuda_layer &layer, const Call &call, cudaStream_t stream) {
  const spmmd_cuda_layer *layers[] = {&layer};
  return LaunchGroup(layers, &call, 1, stream);
}

// Measured on an H200: faster than the others wherever the pairs fill the device.
bool Preferred(const spmmd_cuda_layer &layer, const Call &call) {
  return call.n <= kMaxTokens && PlanFor(layer, call).pairs * 8 >= layer.device->multiprocessors * 3;
}

}  // namespace

const Kernel kSpmmPair = {.name = "spmm_pair",
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
