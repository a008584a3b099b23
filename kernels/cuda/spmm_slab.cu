// SpMM for few tokens (N <= 32 a launch): BITMAP_GPU weights, mma.sync, X
// resident in shared memory.
//
// Work. K is cut into `splits` equal ranges such that X's part of a range stays
// in shared memory for the whole kernel: W is then the only thing that streams,
// and no warp ever waits for X. A CTA (one an SM, 8 to 16 warps, all alike)
// owns one range. In each of its rounds it takes a slab of `height` row blocks
// (16 rows each), warps / height warps to a row block, which take turns along
// K. Row blocks left over by whole rounds come first, shared evenly by all
// CTAs. Each warp fetches its own chunks through a private ring of bulk copies,
// decodes them into A fragments and multiplies.
//
// Reduction. Always in the same order, so results do not depend on timing. The
// warps of a row block leave their fragments in one of two shared-memory
// buffers; whoever of them needs the buffer next (the one that is furthest
// ahead) adds up what is in it. With one range of K the sum is the output. The
// leftovers, which several CTAs share, are added up by the last CTA to arrive,
// long before the kernel ends. With several ranges of K every sum is partial,
// and a second small kernel, launched early, adds them up. Nobody ever waits
// for another CTA, so launches that share the device cannot deadlock.
//
// Bytes an element: the format's, plus N * 8 * splits / K for partial sums.
// Instructions an element: about 4.2. Limiter: memory at 50 % sparsity,
// decoding (shared-memory wavefronts, issue) from 60 % on.
#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

#include "kernels/cuda/bitmap_decode.cuh"
#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/internal.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/slab_schedule.h"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::cuda {
namespace {

using slab::kGenerations;
using slab::kLeftoverGroup;
using slab::kMaxPieces;
using slab::kMaxStages;
using slab::kMaxWarps;

constexpr int kMaxTokenTiles = 4;  // of 8 tokens
constexpr int kBoxCols = 64;       // X lies in boxes of 8 tokens x 64 columns, 128 bytes a row
constexpr int kBoxBytes = 8 * kBoxCols * 2;
constexpr int kDynamicAlignment = 1024;

struct SlabParams {
  slab::Plan plan;
  const uint8_t *chunks;
  const uint32_t *offsets;
  const void *x;
  int64_t x_stride;
  int32_t x_dtype;
  int32_t x_vectors;  // 16-byte loads of X are aligned and need no conversion
  int tokens;
  int m;
  int k;
  int stage_bytes;
  uint32_t *counters;      // one a row block
  float4 *share_partials;  // [CTA][kMaxPieces] of the leftovers
  float4 *split_partials;  // [row block][split], splits > 1
  Epilogue epilogue;
};

// X's columns [k_begin, k_begin + cols) into shared memory, in the weights'
// dtype, zero beyond N and K. Row r of box b and token tile t is at (b * tiles
// + t) * 1024 + r * 128, its 16-byte unit u at u ^ r: ldmatrix meets no
// conflict.
template <bool kIsBf16, int kTiles>
__device__ __forceinline__ void StageActivations(const SlabParams &p, uint32_t x_shared, int k_begin, int cols) {
  const int boxes = cols / kBoxCols;
  const auto threads = static_cast<int>(blockDim.x);
  // Eight threads a row of a box; consecutive boxes are consecutive in memory.
  const int unit = static_cast<int>(threadIdx.x) % 8;
  for (int token = 0; token < kTiles * 8; ++token)
    for (int box = static_cast<int>(threadIdx.x) / 8; box < boxes; box += threads / 8) {
      const int k = k_begin + box * kBoxCols + unit * 8;
      const int row = token % 8;
      const uint32_t to =
          x_shared + static_cast<uint32_t>((box * kTiles + token / 8) * kBoxBytes + row * 128 + (unit ^ row) * 16);
      const int64_t at = token * p.x_stride + k;
      if (p.x_vectors != 0 && k + 8 <= p.k) {
        const bool inside = token < p.tokens;
        CopyAsync16(to, static_cast<const uint16_t *>(p.x) + (inside ? at : 0), inside);
        continue;
      }
      uint32_t words[4] = {};
      if (token < p.tokens) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (k + e < p.k) words[e / 2] |= uint32_t{LoadAs16<kIsBf16>(p.x, p.x_dtype, at + e)} << (e % 2 * 16);
        }
      }
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                   "r"(words[3])
                   : "memory");
    }
  CopyAsyncWait();
}

// A partial sum in the workspace is kTiles x 32 quads, lane by lane.
__device__ __forceinline__ void StoreSum(const SlabParams &p, int block, int tile, int lane, const float4 &sum) {
  StoreTileQuad(p.epilogue, p.tokens, p.m, block, tile, lane, sum);
}

// All partial sums of a row block, in order.
template <int kTiles>
__device__ __forceinline__ float4 SumPartials(const SlabParams &p, int block, int tile, int lane) {
  const slab::Plan &plan = p.plan;
  const int leftover = block - plan.FirstLeftover();
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int split = 0; split < plan.splits; ++split) {
    if (leftover < 0) {
      const int64_t slot = static_cast<int64_t>(block) * plan.splits + split;
      AddQuad(sum, __ldcg(p.split_partials + (slot * kTiles + tile) * 32 + lane));
      continue;
    }
    const IntPair sharers = slab::Sharers(plan, split, leftover);
    for (int cta = sharers.x; cta <= sharers.y; ++cta) {
      const int piece = leftover - plan.ShareBegin(split, cta) / plan.SplitCols(split);
      const int64_t slot = static_cast<int64_t>(split * plan.groups + cta) * kMaxPieces + piece;
      AddQuad(sum, __ldcg(p.share_partials + (slot * kTiles + tile) * 32 + lane));
    }
  }
  return sum;
}

// What adding up a segment takes. Member i of the group is warp i * stride +
// offset.
struct Segment {
  int index;
  int block;
  int stride;
  int offset;
  int members;
  int first;         // member with the segment's first chunk; the others follow in
                     // order
  int contributors;  // members that have chunks of it
};

// Hand-over of a group's segments, by generation.
struct HandOver {
  uint32_t announced;  // segments that `segment` has described so far
  uint32_t arrived;    // members whose fragments of the current segment are in place
  uint32_t claimed;    // segments that a warp has taken on
  uint32_t finished;   // segments that are done with
  Segment segment;
};

struct SlabShared {
  uint64_t full[kMaxWarps * kMaxStages];
  HandOver hand_overs[kMaxWarps + 1][kGenerations];
};

// Adds up a segment whose fragments are all in place, and stores the sum where
// it belongs. Out of line, like all code that runs rarely: what the instruction
// cache holds should be the decoding loop.
template <int kTiles>
__device__ __noinline__ void FinishSegment(const SlabParams &p, const Segment &segment, const float *fragments,
                                           int split, int cta, int lane) {
  const slab::Plan &plan = p.plan;
  const int block = segment.block;
  const int leftover = block - plan.FirstLeftover();
  const bool partial = leftover >= 0 || plan.splits > 1;
  float4 *const slot =
      leftover >= 0 ? p.share_partials +
                          (static_cast<int64_t>(split * plan.groups + cta) * kMaxPieces + segment.index) * kTiles * 32
                    : p.split_partials + (static_cast<int64_t>(block) * plan.splits + split) * kTiles * 32;
  fragments += QuadOffset(lane);
#pragma unroll 1
  for (int tile = 0; tile < kTiles; ++tile) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    int member = segment.first;
#pragma unroll 4
    for (int i = 0; i < segment.contributors; ++i) {
      const int warp = member * segment.stride + segment.offset;
      AddQuad(sum, LoadQuad(fragments + (warp * kTiles + tile) * 128));
      if (++member == segment.members) member = 0;
    }
    if (partial) {
      __stcg(slot + tile * 32 + lane, sum);
    } else {
      StoreSum(p, block, tile, lane, sum);
    }
  }
  if (plan.splits > 1 || leftover < 0) return;
  __threadfence();
  __syncwarp();
  uint32_t arrived = 0;
  if (lane == 0) arrived = atomicAdd(p.counters + block, 1u) + 1;
  const IntPair sharers = slab::Sharers(plan, 0, leftover);
  if (__shfl_sync(~0u, arrived, 0) != static_cast<uint32_t>(sharers.y - sharers.x + 1)) return;
  if (lane == 0) p.counters[block] = 0;  // as the next launch expects it
  __threadfence();
#pragma unroll 1
  for (int tile = 0; tile < kTiles; ++tile) {
    StoreSum(p, block, tile, lane, SumPartials<kTiles>(p, block, tile, lane));
  }
}

// Makes sure that a group's segment, which all of its members have walked
// through or will, is added up: one does it.
template <int kTiles>
__device__ __noinline__ void Finish(const SlabParams &p, SlabShared &shared, const float *fragments, int group,
                                    int index, int split, int cta, int lane) {
  const int generation = index % kGenerations;
  HandOver &hand_over = shared.hand_overs[group][generation];
  const auto count = static_cast<uint32_t>(index / kGenerations);
  uint32_t claimed = 0;
  if (lane == 0) claimed = CompareAndSwap(SharedAddress(&hand_over.claimed), count, count + 1);
  if (__shfl_sync(~0u, claimed, 0) != count) {
    while (LoadAcquire(SharedAddress(&hand_over.finished)) <= count) {
      PollPause();
    }
    __syncwarp();
    return;
  }
  while (LoadAcquire(SharedAddress(&hand_over.announced)) <= count) {
    PollPause();
  }
  const Segment segment = hand_over.segment;
  while (LoadAcquire(SharedAddress(&hand_over.arrived)) != static_cast<uint32_t>(segment.contributors)) {
    PollPause();
  }
  __syncwarp();
  FinishSegment<kTiles>(p, segment, fragments + generation * p.plan.warps * kTiles * 128, split, cta, lane);
  __syncwarp();
  if (lane == 0) {
    StoreRelease(SharedAddress(&hand_over.arrived), 0);
    StoreRelease(SharedAddress(&hand_over.finished), count + 1);
  }
}

// kTiles: tiles of 8 tokens.
template <bool kIsBf16, int kTiles, int kChunkCols>
__global__ __launch_bounds__(kMaxWarps * 32, 1) void SpmmSlab(const __grid_constant__ SlabParams p) {
  extern __shared__ __align__(kDynamicAlignment) uint8_t dynamic[];
  __shared__ SlabShared shared;
  const slab::Plan &plan = p.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int warps = plan.warps;
  const int stages = plan.stages;
  const int split = static_cast<int>(blockIdx.x) / plan.groups;
  const int cta = static_cast<int>(blockIdx.x) - split * plan.groups;
  TriggerDependents();

  // Dynamic shared memory: X, reduction buffers, chunk stages.
  const int k_begin = split * plan.cols_per_split * kChunkCols;
  const int split_cols = plan.SplitCols(split) * kChunkCols;
  const uint32_t x_shared = SharedAddress(dynamic);
  float4 *const fragments = reinterpret_cast<float4 *>(dynamic + plan.cols_per_split * kChunkCols * kTiles * 16);
  const uint32_t stage0 = SharedAddress(fragments) +
                          static_cast<uint32_t>(kGenerations * warps * kTiles * 512 + warp * stages * p.stage_bytes);
  const uint32_t full0 = SharedAddress(shared.full) + static_cast<uint32_t>(warp * stages * 8);

  // The weights do not depend on earlier kernels: start them before anything
  // else. Lane s fetches the warp's chunk s.
  slab::Walk ahead(plan, split, cta, warp);  // the next chunk to fetch
  {
    uint32_t begin = 0;
    uint32_t end = 0;
    for (int s = 0; s < stages && !ahead.done(); ++s, ahead.Next()) {
      if (lane == s) {
        begin = __ldg(p.offsets + ahead.chunk());
        end = __ldg(p.offsets + ahead.chunk() + 1);
      }
    }
    if (lane < stages) BarrierInit(full0 + lane * 8, 1);
    BarrierInitFence();
    __syncwarp();
    if (end != begin) {
      BarrierArriveExpect(full0 + lane * 8, (end - begin) * 16);
      BulkLoad(stage0 + static_cast<uint32_t>(lane * p.stage_bytes), p.chunks + uint64_t{begin} * 16,
               (end - begin) * 16, full0 + lane * 8);
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < (kMaxWarps + 1) * kGenerations; i += static_cast<int>(blockDim.x)) {
    HandOver &hand_over = shared.hand_overs[i / kGenerations][i % kGenerations];
    hand_over.announced = hand_over.arrived = hand_over.claimed = hand_over.finished = 0;
  }
  WaitForPrerequisites();
  StageActivations<kIsBf16, kTiles>(p, x_shared, k_begin, split_cols);
  __syncthreads();

  float sum[kTiles][4] = {};
  slab::Walk walk(plan, split, cta, warp);
  // ldmatrix: lane l addresses row l % 8 of unit l / 8.
  const uint32_t x_lane = x_shared + static_cast<uint32_t>(lane % 8 * 128 + (((lane / 8) ^ (lane % 8)) * 16));
  const auto finish = [&](int group, int index) {
    Finish<kTiles>(p, shared, reinterpret_cast<const float *>(fragments), group, index, split, cta, lane);
  };
  const int pieces = walk.Pieces();
  bool leftovers_pending = pieces > 0;
  int stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  while (!walk.done()) {
    // The offsets of the chunk that will refill this stage arrive while it is
    // being decoded.
    const bool refill = !ahead.done();
    uint32_t next_begin = 0;
    uint32_t next_end = 0;
    if (refill) {
      next_begin = __ldg(p.offsets + ahead.chunk());
      next_end = __ldg(p.offsets + ahead.chunk() + 1);
      ahead.Next();
    }
    const uint32_t chunk = stage0 + static_cast<uint32_t>(stage * p.stage_bytes);
    const uint32_t full = full0 + static_cast<uint32_t>(stage * 8);
    const uint32_t x_chunk =
        x_lane + static_cast<uint32_t>((walk.col() * kChunkCols - k_begin) / kBoxCols * kTiles * kBoxBytes);
    BarrierWait(full, parity);
    ChunkDecoder<kChunkCols> decoder(chunk, lane);
#pragma unroll
    for (int step = 0; step < ChunkDecoder<kChunkCols>::kSteps; step += 2) {
      uint32_t b[kTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint32_t box = x_chunk + static_cast<uint32_t>((step / 4 * kTiles + tile) * kBoxBytes);
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
    if (refill && ElectOne()) {
      BarrierArriveExpect(full, (next_end - next_begin) * 16);
      BulkLoad(chunk, p.chunks + uint64_t{next_begin} * 16, (next_end - next_begin) * 16, full);
    }
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }

    const int group = walk.group();
    const int index = walk.segment();
    const int block = walk.block();
    walk.Next();
    if (!walk.done() && walk.segment() == index && walk.group() == group) continue;

    // The warp's last chunk of this segment: hand over the fragments.
    const bool leftover = group == kLeftoverGroup;
    if (!leftover && leftovers_pending) {  // they use the same buffers
      for (int i = max(0, pieces - kGenerations); i < pieces; ++i) finish(kLeftoverGroup, i);
      leftovers_pending = false;
    }
    if (index >= kGenerations) finish(group, index - kGenerations);
    const int generation = index % kGenerations;
    float4 *const to = fragments + (generation * warps + warp) * kTiles * 32 + lane;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      to[tile * 32] = make_float4(sum[tile][0], sum[tile][1], sum[tile][2], sum[tile][3]);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[tile][e] = 0.f;
    }
    const IntPair contributors = walk.Contributors(group, index, block);
    const int stride_log2 = leftover ? 0 : plan.height_log2;
    const int member = warp >> stride_log2;
    HandOver &hand_over = shared.hand_overs[group][generation];
    if (member == contributors.x && lane == 0) {  // its first chunk was mine: announce it
      hand_over.segment = {index,          block,         1 << stride_log2, leftover ? 0 : group, warps >> stride_log2,
                           contributors.x, contributors.y};
      StoreRelease(SharedAddress(&hand_over.announced), static_cast<uint32_t>(index / kGenerations + 1));
    }
    __syncwarp();
    if (lane == 0) AddRelease(SharedAddress(&hand_over.arrived), 1);
  }
  // What is still in the buffers.
  __syncthreads();
  const auto finish_last = [&](int group, int segments) {
    for (int i = max(0, segments - kGenerations); i < segments; ++i) finish(group, i);
  };
  if (warp < plan.height()) finish_last(warp, plan.rounds);
  if (warp == warps - 1) finish_last(kLeftoverGroup, pieces);
}

// Adds up the partial sums of a launch with several ranges of K: one warp a row
// block and tile.
template <int kTiles>
__global__ __launch_bounds__(256) void SlabFinish(const __grid_constant__ SlabParams p) {
  TriggerDependents();
  const int item = static_cast<int>(blockIdx.x * 8 + threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  WaitForPrerequisites();
  if (item >= p.plan.row_blocks * kTiles) return;
  StoreSum(p, item / kTiles, item % kTiles, lane, SumPartials<kTiles>(p, item / kTiles, item % kTiles, lane));
}

// ---- host

using SlabKernel = void (*)(SlabParams);

template <bool kIsBf16, int kChunkCols>
SlabKernel KernelForTiles(int tiles) {
  return tiles == 1   ? SpmmSlab<kIsBf16, 1, kChunkCols>
         : tiles == 2 ? SpmmSlab<kIsBf16, 2, kChunkCols>
                      : SpmmSlab<kIsBf16, 4, kChunkCols>;
}

SlabKernel FindFinish(int tiles) { return tiles == 1 ? SlabFinish<1> : tiles == 2 ? SlabFinish<2> : SlabFinish<4>; }

SlabKernel FindKernel(bool is_bf16, int tiles, int chunk_cols) {
  if (is_bf16) return chunk_cols == 256 ? KernelForTiles<true, 256>(tiles) : KernelForTiles<true, 128>(tiles);
  return chunk_cols == 256 ? KernelForTiles<false, 256>(tiles) : KernelForTiles<false, 128>(tiles);
}

int TokenTiles(int64_t tokens) { return tokens <= 8 ? 1 : tokens <= 16 ? 2 : 4; }

int64_t MaxDynamicShared(const spmmd_cuda_device &device) {
  // Static shared memory comes first, padded to the alignment of the dynamic
  // part.
  constexpr int64_t kStatic = (sizeof(SlabShared) + kDynamicAlignment - 1) / kDynamicAlignment * kDynamicAlignment;
  return static_cast<int64_t>(device.max_shared_bytes) - kStatic;
}

// One launch serves this many row blocks (a counter each) and tokens; larger
// calls take several.
constexpr int64_t kRowBlocksPerLaunch = kMaxCounters;
constexpr int64_t kTokensPerLaunch = kMaxTokenTiles * 8;

uint64_t SharePartialBytes(const spmmd_cuda_device &device, int tiles) {
  return static_cast<uint64_t>(device.multiprocessors) * kMaxPieces * tiles * 512;
}

// Plans are made once for each kind of launch: trying all cuts takes longer
// than a launch.
slab::Plan PlanFor(const spmmd_cuda_layer &layer, int64_t row_blocks, int tiles) {
  const auto chunk_cols = static_cast<int>(layer.params[bitmap_gpu::kParamChunkCols]);
  static std::mutex mutex;
  static auto *const plans = new std::map<std::tuple<int, int64_t, int64_t, int, int, int64_t>, slab::Plan>();
  const std::tuple key(layer.device->index, row_blocks, CeilDiv(layer.k, chunk_cols), tiles, chunk_cols,
                       layer.params[bitmap_gpu::kParamMaxChunkBytes]);
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = plans->find(key); found != plans->end()) return found->second;
  return (*plans)[key] = slab::MakePlan(layer.device->multiprocessors, MaxDynamicShared(*layer.device), row_blocks,
                                        CeilDiv(layer.k, chunk_cols), tiles, chunk_cols,
                                        layer.params[bitmap_gpu::kParamMaxChunkBytes]);
}

Status CanImplement(const spmmd_cuda_layer & /*layer*/, const Call & /*call*/) { return {}; }

uint64_t ScratchBytes(const spmmd_cuda_layer &layer, const Call &call) {
  const int64_t row_blocks = std::min(CeilDiv(layer.m, 16), kRowBlocksPerLaunch);
  uint64_t bytes = 0;
  for (const int64_t tokens : {std::min(call.n, kTokensPerLaunch), call.n % kTokensPerLaunch}) {
    if (tokens == 0) continue;
    const int tiles = TokenTiles(tokens);
    const slab::Plan plan = PlanFor(layer, row_blocks, tiles);
    uint64_t need = SharePartialBytes(*layer.device, tiles);
    if (plan.splits > 1) need += static_cast<uint64_t>(row_blocks) * plan.splits * tiles * 512;
    bytes = std::max(bytes, need);
  }
  return bytes;
}

Status LaunchPart(const spmmd_cuda_layer &layer, const Call &call, int64_t first_block, int64_t row_blocks,
                  int64_t first_token, int64_t tokens, cudaStream_t stream) {
  const auto chunk_cols = static_cast<int>(layer.params[bitmap_gpu::kParamChunkCols]);
  const int64_t col_blocks = CeilDiv(layer.k, chunk_cols);
  const int tiles = TokenTiles(tokens);
  SlabParams p = {};
  p.plan = PlanFor(layer, row_blocks, tiles);
  p.chunks = layer.SectionData(bitmap_gpu::kChunkSection);
  p.offsets =
      reinterpret_cast<const uint32_t *>(layer.SectionData(bitmap_gpu::kOffsetSection)) + first_block * col_blocks;
  p.x_stride = call.x_stride;
  p.x_dtype = call.x_dtype;
  p.x = static_cast<const uint8_t *>(call.x) +
        static_cast<uint64_t>(first_token * call.x_stride) * ElementSize(call.x_dtype);
  p.x_vectors = call.x_dtype == layer.dtype && reinterpret_cast<uintptr_t>(p.x) % 16 == 0 &&
                (tokens == 1 || call.x_stride % 8 == 0);
  p.tokens = static_cast<int>(tokens);
  p.m = static_cast<int>(std::min(layer.m - first_block * 16, row_blocks * 16));
  p.k = static_cast<int>(layer.k);
  p.stage_bytes = static_cast<int>(layer.params[bitmap_gpu::kParamMaxChunkBytes]);
  uint8_t *workspace = static_cast<uint8_t *>(call.workspace);
  p.counters = reinterpret_cast<uint32_t *>(workspace);
  p.share_partials = reinterpret_cast<float4 *>(workspace + kCounterBytes);
  p.split_partials = reinterpret_cast<float4 *>(workspace + kCounterBytes + SharePartialBytes(*layer.device, tiles));
  p.epilogue = MakeEpilogue(call);
  const int64_t y_offset = first_token * call.y_stride + first_block * 16;
  p.epilogue.y = static_cast<uint8_t *>(call.y) + static_cast<uint64_t>(y_offset) * ElementSize(call.y_dtype);
  if (call.bias != nullptr) p.epilogue.bias = call.bias + first_block * 16;

  const SlabKernel kernel = FindKernel(layer.dtype == kBf16, tiles, chunk_cols);
  const auto shared_bytes = static_cast<int>(slab::SharedBytes(p.plan, tiles, chunk_cols, p.stage_bytes));
  SPMMD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.plan.splits * p.plan.groups));
  config.blockDim = dim3(static_cast<unsigned>(p.plan.warps * 32));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = (call.flags & SPMMD_CUDA_FLAG_CHAIN) != 0 ? 1 : 0;
  SPMMD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, p));
  if (p.plan.splits > 1) {
    config.gridDim = dim3(static_cast<unsigned>(CeilDiv(int64_t{p.plan.row_blocks} * tiles, 8)));
    config.blockDim = dim3(256);
    config.dynamicSmemBytes = 0;
    config.numAttrs = 1;
    SPMMD_CUDA_CHECK(cudaLaunchKernelEx(&config, FindFinish(tiles), p));
  }
  return {};
}

Status Launch(const spmmd_cuda_layer &layer, const Call &call, cudaStream_t stream) {
  const int64_t row_blocks = CeilDiv(layer.m, 16);
  for (int64_t token = 0; token < call.n; token += kTokensPerLaunch) {
    for (int64_t block = 0; block < row_blocks; block += kRowBlocksPerLaunch) {
      SPMMD_CUDA_TRY(LaunchPart(layer, call, block, std::min(row_blocks - block, kRowBlocksPerLaunch), token,
                                std::min(call.n - token, kTokensPerLaunch), stream));
    }
  }
  return {};
}

// Measured on an H200: it beats spmm_tile where one round of slabs covers the
// matrix and nothing has to be added up between CTAs.
bool Preferred(const spmmd_cuda_layer &layer, const Call &call) {
  if (call.n > 8) return false;
  const slab::Plan plan = PlanFor(layer, std::min(CeilDiv(layer.m, 16), kRowBlocksPerLaunch), 1);
  return plan.splits == 1 && plan.leftovers == 0 && plan.rounds <= 1;
}

}  // namespace

const Kernel kSpmmSlab = {.name = "spmm_slab",
                          .format = kFormatBitmapGpu,
                          .sparse_input = false,
                          .can_implement = CanImplement,
                          .scratch_bytes = ScratchBytes,
                          .launch = Launch,
                          .preferred = Preferred};

}  // namespace spmmd::cuda
