// SpMM for few tokens (N <= 32 a launch): BITMAP_GPU weights, mma.sync, X resident in shared memory.
//
// Work. A slab is a row block (16 rows) times one of `splits` equal ranges of K, chosen so that X's part of the range
// stays in shared memory for the whole kernel: W is then the only thing that streams, and no warp ever waits for X.
// A CTA (one an SM, 12 or 16 warps, all alike) owns one range of K. It first takes an even share of the row blocks left
// over by whole rounds, then whole slabs. Its chunks, in order, go round-robin to its warps; each warp fetches its own
// chunks through a private ring of bulk copies, decodes them into A fragments and multiplies.
//
// Reduction. Fixed order, so results do not depend on timing. Warps leave their fragments in shared memory, the last
// one to arrive adds them up. Where several CTAs share a row block they leave partial sums in the workspace, and again
// the last one to arrive adds them up and stores. Nobody ever waits for another CTA: no deadlock when CTAs of several
// launches share the device.
//
// Bytes an element: the format's, plus N * 8 * splits / K for partial sums. Instructions an element: about 4.2.
// Limiter: memory at 50 % sparsity, decoding (shared-memory wavefronts, issue) from 60 % on.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/bitmap_decode.cuh"
#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/internal.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::cuda {
namespace {

constexpr int kMaxWarps = 16;
constexpr int kMaxStages = 4;
constexpr int kMaxTokenTiles = 4;  // of 8 tokens
constexpr int kGenerations = 2;    // slabs whose reduction may be in progress at once
constexpr int kBoxCols = 64;       // X lies in boxes of 8 tokens x 64 columns, 128 bytes a row
constexpr int kBoxBytes = 8 * kBoxCols * 2;
constexpr int kDynamicAlignment = 1024;

// How a launch is cut; the same numbers on host and device.
struct SlabPlan {
  int row_blocks;
  int col_blocks;
  int splits;
  int cols_per_split;  // column blocks; the last split may have fewer, never none
  int groups;          // CTAs a split
  int rounds;          // whole slabs a CTA
  int leftovers;       // row blocks behind the whole rounds, shared by all CTAs of a split
  int warps;
  int stages;

  __host__ __device__ int SplitCols(int split) const {
    const int left = col_blocks - split * cols_per_split;
    return left < cols_per_split ? left : cols_per_split;
  }
  // CTAs of a split that take part in its leftovers: each gets at least one chunk.
  __host__ __device__ int Sharers(int split) const {
    const int64_t chunks = static_cast<int64_t>(leftovers) * SplitCols(split);
    return chunks < groups ? static_cast<int>(chunks) : groups;
  }
  // First leftover chunk of sharer c; leftover chunks are numbered row block by row block.
  __host__ __device__ int ShareBegin(int split, int c) const {
    return static_cast<int>(static_cast<int64_t>(leftovers) * SplitCols(split) * c / Sharers(split));
  }
};

struct SlabParams {
  SlabPlan plan;
  const uint8_t* chunks;
  const uint32_t* offsets;
  const void* x;
  int64_t x_stride;
  int32_t x_dtype;
  int32_t x_vectors;  // 16-byte loads of X are aligned and need no conversion
  int tokens;
  int m;
  int k;
  int stage_bytes;
  uint32_t* counters;      // one a row block
  float4* share_partials;  // [CTA][2] of the leftovers
  float4* split_partials;  // [row block][split], splits > 1
  Epilogue epilogue;
};

// A CTA's chunks in order: at most two pieces of leftover row blocks, then whole slabs.
class Walk {
 public:
  __device__ Walk(const SlabPlan& plan, int split, int cta)
      : plan_(plan), split_(split), cta_(cta), cols_(plan.SplitCols(split)), base_(split * plan.cols_per_split) {
    if (cta < plan.Sharers(split)) {
      share_ = plan.ShareBegin(split, cta);
      share_end_ = plan.ShareBegin(split, cta + 1);
    }
  }

  // Moves to chunk `position` of the CTA (positions only grow). False past the end.
  __device__ __forceinline__ bool MoveTo(int position) {
    while (position >= segment_end_) {
      segment_begin_ = segment_end_;
      ++segment_;
      if (share_ < share_end_) {
        const int leftover = share_ / cols_;
        const int first = share_ - leftover * cols_;
        const int length = min(cols_ - first, share_end_ - share_);
        block_ = plan_.rounds * plan_.groups + leftover;
        first_col_ = base_ + first;
        segment_end_ += length;
        share_ += length;
      } else if (round_ < plan_.rounds) {
        block_ = round_ * plan_.groups + cta_;
        first_col_ = base_;
        segment_end_ += cols_;
        ++round_;
      } else {
        return false;
      }
    }
    col_ = first_col_ + position - segment_begin_;
    return true;
  }

  __device__ int segment() const { return segment_; }
  __device__ int segment_begin() const { return segment_begin_; }
  __device__ int segment_end() const { return segment_end_; }
  __device__ int block() const { return block_; }
  __device__ int col() const { return col_; }  // absolute column block
  __device__ int64_t chunk() const { return static_cast<int64_t>(block_) * plan_.col_blocks + col_; }

 private:
  const SlabPlan& plan_;
  int split_, cta_, cols_, base_;
  int share_ = 0, share_end_ = 0, round_ = 0;
  int segment_ = -1, segment_begin_ = 0, segment_end_ = 0;
  int block_ = 0, first_col_ = 0, col_ = 0;
};

// X's columns [k_begin, k_begin + cols) into shared memory, in the weights' dtype, zero beyond N and K. Row r of box b
// and token tile t is at (b * tiles + t) * 1024 + r * 128, its 16-byte unit u at u ^ r: ldmatrix meets no conflict.
template <bool kIsBf16, int kTiles>
__device__ __forceinline__ void StageActivations(const SlabParams& p, uint32_t x_shared, int k_begin, int cols) {
  const int units = cols / 8;
  const int total = units * kTiles * 8;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < total; i += static_cast<int>(blockDim.x)) {
    const int token = i / units;
    const int unit = i - token * units;
    const int k = k_begin + unit * 8;
    const int64_t at = token * p.x_stride + k;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (token < p.tokens) {
      if (p.x_vectors != 0 && k + 8 <= p.k) {
        value = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.x) + at));
      } else {
        uint32_t words[4] = {};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (k + e < p.k) words[e / 2] |= uint32_t{LoadAs16<kIsBf16>(p.x, p.x_dtype, at + e)} << (e % 2 * 16);
        }
        value = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    const int row = token % 8;
    const uint32_t to = x_shared + static_cast<uint32_t>(((unit / 8) * kTiles + token / 8) * kBoxBytes + row * 128 +
                                                         ((unit % 8) ^ row) * 16);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
  }
}

template <int kTiles>
__device__ __forceinline__ void AddTo(float (&sum)[kTiles][4], int tile, const float4& v) {
  sum[tile][0] += v.x;
  sum[tile][1] += v.y;
  sum[tile][2] += v.z;
  sum[tile][3] += v.w;
}

template <int kTiles>
__device__ __forceinline__ void StoreFragment(const SlabParams& p, int block, int lane, const float (&sum)[kTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = tile * 8 + lane % 4 * 2 + e % 2;
      const int64_t row = static_cast<int64_t>(block) * 16 + lane / 4 + e / 2 * 8;
      if (token < p.tokens && row < p.m) StoreOutput(p.epilogue, token, row, sum[tile][e]);
    }
  }
}

// One row block's sum over this CTA's part of K, held by one warp: store it, or leave it for the last CTA to arrive.
template <int kTiles>
__device__ __forceinline__ void FinishSegment(const SlabParams& p, int split, int cta, int segment, int block, int lane,
                                              float (&sum)[kTiles][4]) {
  const SlabPlan& plan = p.plan;
  const int leftover = block - plan.rounds * plan.groups;
  if (leftover < 0 && plan.splits == 1) {
    StoreFragment<kTiles>(p, block, lane, sum);
    return;
  }
  constexpr int kSlot = kTiles * 32;  // float4s of one partial sum
  float4* slot = leftover >= 0
                     ? p.share_partials + (static_cast<int64_t>(split * plan.groups + cta) * 2 + segment) * kSlot
                     : p.split_partials + (static_cast<int64_t>(block) * plan.splits + split) * kSlot;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    __stcg(slot + tile * 32 + lane, make_float4(sum[tile][0], sum[tile][1], sum[tile][2], sum[tile][3]));
  }
  // Sharers of leftover i in split s are CTAs first..last: those whose range of chunks meets the row block's.
  const auto first_sharer = [&](int s) {
    const int64_t chunks = static_cast<int64_t>(plan.leftovers) * plan.SplitCols(s);
    const int64_t begin = static_cast<int64_t>(leftover) * plan.SplitCols(s);
    return static_cast<int>(((begin + 1) * plan.Sharers(s) + chunks - 1) / chunks) - 1;
  };
  const auto last_sharer = [&](int s) {
    const int64_t chunks = static_cast<int64_t>(plan.leftovers) * plan.SplitCols(s);
    const int64_t end = static_cast<int64_t>(leftover + 1) * plan.SplitCols(s);
    return static_cast<int>((end * plan.Sharers(s) + chunks - 1) / chunks) - 1;
  };
  uint32_t expected = static_cast<uint32_t>(plan.splits);
  if (leftover >= 0) {
    expected = 0;
    for (int s = 0; s < plan.splits; ++s) expected += static_cast<uint32_t>(last_sharer(s) - first_sharer(s) + 1);
  }
  __threadfence();
  __syncwarp();
  uint32_t arrived = 0;
  if (lane == 0) arrived = atomicAdd(p.counters + block, 1u) + 1;
  if (__shfl_sync(~0u, arrived, 0) != expected) return;
  if (lane == 0) p.counters[block] = 0;  // as the next launch expects it
  __threadfence();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[tile][e] = 0.f;
  }
  const auto add = [&](const float4* part) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) AddTo<kTiles>(sum, tile, __ldcg(part + tile * 32 + lane));
  };
  if (leftover < 0) {
    for (int s = 0; s < plan.splits; ++s) {
      add(p.split_partials + (static_cast<int64_t>(block) * plan.splits + s) * kSlot);
    }
  } else {
    for (int s = 0; s < plan.splits; ++s) {
      for (int c = first_sharer(s); c <= last_sharer(s); ++c) {
        const int piece = leftover - plan.ShareBegin(s, c) / plan.SplitCols(s);
        add(p.share_partials + (static_cast<int64_t>(s * plan.groups + c) * 2 + piece) * kSlot);
      }
    }
  }
  StoreFragment<kTiles>(p, block, lane, sum);
}

struct SlabShared {
  uint64_t full[kMaxWarps * kMaxStages];
  uint32_t arrived[kGenerations];   // warps whose fragments of the generation's slab are in place
  uint32_t finished[kGenerations];  // slabs of the generation that have been added up
};

// kTiles: tiles of 8 tokens.
template <bool kIsBf16, int kTiles, int kChunkCols>
__global__ __launch_bounds__(kMaxWarps * 32, 1) void SpmmSlab(const __grid_constant__ SlabParams p) {
  extern __shared__ __align__(kDynamicAlignment) uint8_t dynamic[];
  __shared__ SlabShared shared;
  const SlabPlan& plan = p.plan;
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
  float4* const partials = reinterpret_cast<float4*>(dynamic + plan.cols_per_split * kChunkCols * kTiles * 16);
  const uint32_t stage0 = SharedAddress(partials) +
                          static_cast<uint32_t>(kGenerations * warps * kTiles * 512 + warp * stages * p.stage_bytes);
  const uint32_t full0 = SharedAddress(shared.full) + static_cast<uint32_t>(warp * stages * 8);

  // The weights do not depend on earlier kernels: start them before anything else. Lane s fetches the warp's chunk s.
  Walk ahead(plan, split, cta);
  int fetched = warp;  // position of the next chunk to fetch
  {
    uint32_t begin = 0;
    uint32_t end = 0;
    for (int s = 0; s < stages && ahead.MoveTo(fetched); ++s, fetched += warps) {
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
  if (threadIdx.x < kGenerations) {
    shared.arrived[threadIdx.x] = 0;
    shared.finished[threadIdx.x] = 0;
  }
  WaitForPrerequisites();
  StageActivations<kIsBf16, kTiles>(p, x_shared, k_begin, split_cols);
  __syncthreads();

  float sum[kTiles][4] = {};
  Walk walk(plan, split, cta);
  // ldmatrix: lane l addresses row l % 8 of unit l / 8.
  const uint32_t x_lane = x_shared + static_cast<uint32_t>(lane % 8 * 128 + (((lane / 8) ^ (lane % 8)) * 16));
  int stage = 0;
  uint32_t parity = 0;
  bool more = walk.MoveTo(warp);
#pragma unroll 1
  for (int position = warp; more; position += warps) {
    // The offsets of the chunk that will refill this stage arrive while it is being decoded.
    const bool refill = ahead.MoveTo(fetched);
    uint32_t next_begin = 0;
    uint32_t next_end = 0;
    if (refill) {
      next_begin = __ldg(p.offsets + ahead.chunk());
      next_end = __ldg(p.offsets + ahead.chunk() + 1);
      fetched += warps;
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

    const int segment = walk.segment();
    const int block = walk.block();
    const int begin = walk.segment_begin();
    const int end = walk.segment_end();
    more = walk.MoveTo(position + warps);
    if (more && walk.segment() == segment) continue;

    // The warp's last chunk of this segment: hand over the fragments.
    const int contributors = min(warps, end - begin);
    const int generation = segment % kGenerations;
    volatile uint32_t* finished = shared.finished + generation;
    while (*finished < static_cast<uint32_t>(segment / kGenerations)) {
    }
    __syncwarp();
    float4* const slots = partials + generation * warps * kTiles * 32;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      slots[(warp * kTiles + tile) * 32 + lane] = make_float4(sum[tile][0], sum[tile][1], sum[tile][2], sum[tile][3]);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[tile][e] = 0.f;
    }
    __threadfence_block();
    __syncwarp();
    uint32_t arrived = 0;
    if (lane == 0) arrived = atomicAdd(shared.arrived + generation, 1u) + 1;
    if (__shfl_sync(~0u, arrived, 0) != static_cast<uint32_t>(contributors)) continue;
    __threadfence_block();
    float total[kTiles][4] = {};
    int from = begin % warps;
    for (int i = 0; i < contributors; ++i) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) AddTo<kTiles>(total, tile, slots[(from * kTiles + tile) * 32 + lane]);
      if (++from == warps) from = 0;
    }
    __threadfence_block();
    __syncwarp();
    if (lane == 0) {
      shared.arrived[generation] = 0;
      __threadfence_block();
      *finished = static_cast<uint32_t>(segment / kGenerations + 1);
    }
    FinishSegment<kTiles>(p, split, cta, segment, block, lane, total);
  }
}

// ---- host

using SlabKernel = void (*)(SlabParams);

template <bool kIsBf16, int kChunkCols>
SlabKernel KernelForTiles(int tiles) {
  return tiles == 1   ? SpmmSlab<kIsBf16, 1, kChunkCols>
         : tiles == 2 ? SpmmSlab<kIsBf16, 2, kChunkCols>
                      : SpmmSlab<kIsBf16, 4, kChunkCols>;
}

SlabKernel FindKernel(bool is_bf16, int tiles, int chunk_cols) {
  if (is_bf16) return chunk_cols == 256 ? KernelForTiles<true, 256>(tiles) : KernelForTiles<true, 128>(tiles);
  return chunk_cols == 256 ? KernelForTiles<false, 256>(tiles) : KernelForTiles<false, 128>(tiles);
}

int TokenTiles(int64_t tokens) { return tokens <= 8 ? 1 : tokens <= 16 ? 2 : 4; }

int64_t SharedBytes(const SlabPlan& plan, int tiles, int chunk_cols, int64_t stage_bytes) {
  return int64_t{plan.cols_per_split} * chunk_cols * tiles * 16 + kGenerations * plan.warps * tiles * 512 +
         plan.warps * plan.stages * stage_bytes;
}

int64_t MaxDynamicShared(const spmmd_cuda_device& device) {
  // Static shared memory comes first, padded to the alignment of the dynamic part.
  static_assert(sizeof(SlabShared) <= kDynamicAlignment);
  return static_cast<int64_t>(device.max_shared_bytes) - kDynamicAlignment;
}

// The cut with the lowest estimated time. There always is one: with one column block a split, X, the reduction buffers
// and two stages of a dense chunk for 8 warps take 186 KiB at most.
SlabPlan MakePlan(const spmmd_cuda_device& device, int64_t row_blocks, int64_t col_blocks, int tiles, int chunk_cols,
                  int64_t stage_bytes) {
  // us: what a CTA streams at its share of the read ceiling, partial sums through L2, and their fixed latency.
  constexpr double kBytesPerUsPerSm = 34e3;
  constexpr double kPartialBytesPerUs = 4e6;
  constexpr double kFixupUs = 1.0;
  constexpr int64_t kWantedInFlight = 96 * 1024;
  SlabPlan best = {};
  double best_us = 0;
  const int64_t max_splits = std::min<int64_t>(col_blocks, device.multiprocessors);
  for (int64_t wanted = 1; wanted <= max_splits; ++wanted) {
    SlabPlan plan = {};
    plan.row_blocks = static_cast<int>(row_blocks);
    plan.col_blocks = static_cast<int>(col_blocks);
    plan.cols_per_split = static_cast<int>(CeilDiv(col_blocks, wanted));
    plan.splits = static_cast<int>(CeilDiv(col_blocks, plan.cols_per_split));
    plan.groups =
        static_cast<int>(std::min<int64_t>(device.multiprocessors / plan.splits, row_blocks * plan.cols_per_split));
    plan.rounds = static_cast<int>(row_blocks / plan.groups);
    plan.leftovers = static_cast<int>(row_blocks % plan.groups);
    for (const int warps : {16, 12, 8}) {
      plan.warps = warps;
      for (plan.stages = kMaxStages; plan.stages >= 2; --plan.stages) {
        if (SharedBytes(plan, tiles, chunk_cols, stage_bytes) <= MaxDynamicShared(device)) break;
      }
      if (plan.stages < 2) continue;
      const double chunks = static_cast<double>(row_blocks) * plan.cols_per_split / plan.groups;
      double us = chunks * static_cast<double>(stage_bytes) / kBytesPerUsPerSm;
      const int64_t in_flight = warps * plan.stages * stage_bytes;
      if (in_flight < kWantedInFlight) us *= 1.0 + 0.3 * (1.0 - static_cast<double>(in_flight) / kWantedInFlight);
      if (warps < 16) us *= 1.02;
      if (plan.splits > 1) {
        us += kFixupUs + static_cast<double>(row_blocks) * plan.splits * tiles * 1024 / kPartialBytesPerUs;
      } else if (plan.leftovers > 0) {
        us += kFixupUs / 4;
      }
      if (best.splits == 0 || us < best_us) {
        best = plan;
        best_us = us;
      }
    }
  }
  return best;
}

// One launch serves this many row blocks (a counter each) and tokens; larger calls take several.
constexpr int64_t kRowBlocksPerLaunch = kMaxCounters;
constexpr int64_t kTokensPerLaunch = kMaxTokenTiles * 8;

uint64_t SharePartialBytes(const spmmd_cuda_device& device, int tiles) {
  return static_cast<uint64_t>(device.multiprocessors) * 2 * tiles * 512;
}

SlabPlan PlanFor(const spmmd_cuda_layer& layer, int64_t row_blocks, int tiles) {
  const auto chunk_cols = static_cast<int>(layer.params[bitmap_gpu::kParamChunkCols]);
  return MakePlan(*layer.device, row_blocks, CeilDiv(layer.k, chunk_cols), tiles, chunk_cols,
                  layer.params[bitmap_gpu::kParamMaxChunkBytes]);
}

Status CanImplement(const spmmd_cuda_layer& /*layer*/, const Call& /*call*/) { return {}; }

uint64_t ScratchBytes(const spmmd_cuda_layer& layer, const Call& call) {
  const int64_t row_blocks = std::min(CeilDiv(layer.m, 16), kRowBlocksPerLaunch);
  uint64_t bytes = 0;
  for (const int64_t tokens : {std::min(call.n, kTokensPerLaunch), call.n % kTokensPerLaunch}) {
    if (tokens == 0) continue;
    const int tiles = TokenTiles(tokens);
    const SlabPlan plan = PlanFor(layer, row_blocks, tiles);
    uint64_t need = SharePartialBytes(*layer.device, tiles);
    if (plan.splits > 1) need += static_cast<uint64_t>(row_blocks) * plan.splits * tiles * 512;
    bytes = std::max(bytes, need);
  }
  return bytes;
}

Status LaunchPart(const spmmd_cuda_layer& layer, const Call& call, int64_t first_block, int64_t row_blocks,
                  int64_t first_token, int64_t tokens, cudaStream_t stream) {
  const auto chunk_cols = static_cast<int>(layer.params[bitmap_gpu::kParamChunkCols]);
  const int64_t col_blocks = CeilDiv(layer.k, chunk_cols);
  const int tiles = TokenTiles(tokens);
  SlabParams p = {};
  p.plan = PlanFor(layer, row_blocks, tiles);
  p.chunks = layer.SectionData(bitmap_gpu::kChunkSection);
  p.offsets =
      reinterpret_cast<const uint32_t*>(layer.SectionData(bitmap_gpu::kOffsetSection)) + first_block * col_blocks;
  p.x_stride = call.x_stride;
  p.x_dtype = call.x_dtype;
  p.x = static_cast<const uint8_t*>(call.x) +
        static_cast<uint64_t>(first_token * call.x_stride) * ElementSize(call.x_dtype);
  p.x_vectors = call.x_dtype == layer.dtype && reinterpret_cast<uintptr_t>(p.x) % 16 == 0 &&
                (tokens == 1 || call.x_stride % 8 == 0);
  p.tokens = static_cast<int>(tokens);
  p.m = static_cast<int>(std::min(layer.m - first_block * 16, row_blocks * 16));
  p.k = static_cast<int>(layer.k);
  p.stage_bytes = static_cast<int>(layer.params[bitmap_gpu::kParamMaxChunkBytes]);
  uint8_t* workspace = static_cast<uint8_t*>(call.workspace);
  p.counters = reinterpret_cast<uint32_t*>(workspace);
  p.share_partials = reinterpret_cast<float4*>(workspace + kCounterBytes);
  p.split_partials = reinterpret_cast<float4*>(workspace + kCounterBytes + SharePartialBytes(*layer.device, tiles));
  p.epilogue = MakeEpilogue(call);
  const int64_t y_offset = first_token * call.y_stride + first_block * 16;
  p.epilogue.y = static_cast<uint8_t*>(call.y) + static_cast<uint64_t>(y_offset) * ElementSize(call.y_dtype);
  if (call.bias != nullptr) p.epilogue.bias = call.bias + first_block * 16;

  const SlabKernel kernel = FindKernel(layer.dtype == kBf16, tiles, chunk_cols);
  const auto shared_bytes = static_cast<int>(SharedBytes(p.plan, tiles, chunk_cols, p.stage_bytes));
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
  return {};
}

Status Launch(const spmmd_cuda_layer& layer, const Call& call, cudaStream_t stream) {
  const int64_t row_blocks = CeilDiv(layer.m, 16);
  for (int64_t token = 0; token < call.n; token += kTokensPerLaunch) {
    for (int64_t block = 0; block < row_blocks; block += kRowBlocksPerLaunch) {
      SPMMD_CUDA_TRY(LaunchPart(layer, call, block, std::min(row_blocks - block, kRowBlocksPerLaunch), token,
                                std::min(call.n - token, kTokensPerLaunch), stream));
    }
  }
  return {};
}

}  // namespace

const Kernel kSpmmSlab = {"spmm_slab", kFormatBitmapGpu, false, CanImplement, ScratchBytes, Launch};

}  // namespace spmmd::cuda
