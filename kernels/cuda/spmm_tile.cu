// SpMM for 9 to 64 tokens a launch: BITMAP_GPU weights decoded straight into
// the register operand of wgmma, X by TMA.
//
// Work. A tile is `height` x 64 rows of W; a CTA (one an SM) has four
// warpgroups that decode and multiply, `height` of them along M and 4 / height
// along K, and a fifth that feeds X. A unit is one chunk a warp: a tile's rows
// times 4 / height chunks of K. Tiles left over by whole rounds come first, cut
// along K into equal shares; then each CTA takes whole tiles. Each warp fetches
// its own chunks through a private ring of bulk copies, one barrier a chunk. X
// passes through a ring of 64-column boxes in shared memory, 128-byte swizzled,
// as wgmma wants its B operand.
//
// Reduction. Warpgroups along K add up in shared memory. Of leftover tiles each
// CTA leaves a partial sum in the workspace, which a second small kernel,
// launched early, adds up (the last CTA to arrive doing it was no faster).
// Always in the same order, and nobody ever waits for another CTA.
//
// Bytes an element: the format's, plus partial sums of the leftovers.
// Instructions an element: about 5. Limiter: memory at 50 % sparsity and N <=
// 32; shared memory (decoding, and wgmma reading X again for every 64 rows)
// from N = 64 or 60 % on.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "kernels/cuda/bitmap_decode.cuh"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/internal.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/tile_schedule.h"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::cuda {
namespace {

using tile::kBoxCols;
using tile::kGroups;
using tile::kMaxBoxes;
using tile::kMaxPieces;
using tile::kWarps;

constexpr int kThreads = (kGroups + 1) * 128;
constexpr int kMaxStages = 4;
constexpr int kDynamicAlignment = 1024;
constexpr int kConsumerRegisters = 112;
constexpr int kProducerRegisters = 32;
constexpr int kStepsPerCommit = 2;

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
  uint64_t chunk_full[kWarps * kMaxStages];
  uint64_t box_full[kMaxBoxes];
  uint64_t box_empty[kMaxBoxes];
};

template <int kTokens>
constexpr int BoxBytes() {
  return kTokens * kBoxCols * 2;
}

// Shared memory behind the chunk stages: accumulators on their way between
// warps, kTokens / 8 x 512 bytes a slot. One slot a warp along K beyond the
// first, and 512 bytes a warp for turning fragments into rows.
template <int kTokens>
constexpr int SlotBytes() {
  return kTokens / 8 * 512;
}

// What one warp fetches, unit by unit: the chunks of its row block in the tile
// and its place along K.
class Fetches {
 public:
  __device__ __forceinline__ Fetches(const TileParams &p, int cta, int row_block_in_tile, int place)
      : p_(p), segments_(p.plan, cta), row_block_(row_block_in_tile), place_(place) {
    Enter();
  }

  __device__ __forceinline__ bool done() const { return done_; }
  // Where the chunk begins and ends in units of 16 bytes; begin == end where
  // the matrix has none.
  __device__ __forceinline__ void Offsets(uint32_t &begin, uint32_t &end) const {
    begin = 0;
    end = 0;
    if (segment_.begin < limit_) {
      begin = __ldg(offset_);
      end = __ldg(offset_ + 1);
    }
  }
  __device__ __forceinline__ void Next() {
    offset_ += p_.plan.depth();
    if (++segment_.begin == segment_.end) Enter();
  }

 private:
  __device__ __forceinline__ void Enter() {
    done_ = !segments_.Next(segment_);
    if (done_) return;
    limit_ = p_.plan.Limit(segment_.tile, row_block_, place_);
    offset_ = p_.offsets + static_cast<int64_t>(segment_.tile * p_.plan.height * 4 + row_block_) * p_.plan.col_blocks +
              segment_.begin * p_.plan.depth() + place_;
  }

  const TileParams &p_;
  tile::Segments segments_;
  tile::Segment segment_ = {};
  const uint32_t *offset_ = nullptr;
  int row_block_, place_;
  int limit_ = 0;
  bool done_ = false;
};

// A chunk into a stage. One that is not there (begin == end) completes its
// barrier at once, so that every unit does.
__device__ __forceinline__ void FetchChunk(const TileParams &p, uint32_t begin, uint32_t end, uint32_t to,
                                           uint32_t full) {
  if (begin == end) {
    BarrierArrive(full);
    return;
  }
  BarrierArriveExpect(full, (end - begin) * 16);
  BulkLoad(to, p.chunks + uint64_t{begin} * 16, (end - begin) * 16, full);
}

// A quad of a leftover tile: the sum of all partial sums of a row block and
// token tile.
template <int kTokens>
__device__ __forceinline__ float4 SumPartials(const TileParams &p, int leftover, int row_block, int tile, int lane) {
  const tile::Plan &plan = p.plan;
  const int first = plan.Sharer(leftover * plan.units);
  const int last = plan.Sharer((leftover + 1) * plan.units - 1);
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int cta = first; cta <= last; ++cta) {
    const int piece = leftover - plan.ShareBegin(cta) / plan.units;
    const int64_t slot = (static_cast<int64_t>(cta) * kMaxPieces + piece) * plan.height * 4 + row_block;
    AddQuad(sum, __ldcg(p.partials + (slot * (kTokens / 8) + tile) * 32 + lane));
  }
  return sum;
}

template <bool kIsBf16, int kTokens, int kChunkCols>
__global__ __launch_bounds__(kThreads, 1) void SpmmTile(const __grid_constant__ CUtensorMap x_map,
                                                        const __grid_constant__ TileParams p) {
  constexpr int kTiles = kTokens / 8;
  constexpr int kBoxesPerChunk = kChunkCols / kBoxCols;
  constexpr int kSteps = ChunkDecoder<kChunkCols>::kSteps;
  extern __shared__ __align__(kDynamicAlignment) uint8_t dynamic[];
  __shared__ TileShared shared;
  const tile::Plan &plan = p.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int cta = static_cast<int>(blockIdx.x);
  const int depth = plan.depth();
  const int boxes = plan.boxes;
  const uint32_t x_shared = SharedAddress(dynamic);
  uint8_t *const stages_begin = dynamic + depth * boxes * BoxBytes<kTokens>();
  TriggerDependents();

  if (threadIdx.x == kWarps * 32) {
    PrefetchTensorMap(&x_map);
    for (int i = 0; i < depth * boxes; ++i) {
      BarrierInit(SharedAddress(shared.box_full + i), 1);
      BarrierInit(SharedAddress(shared.box_empty + i), static_cast<uint32_t>(plan.height * 4));
    }
    BarrierInitFence();
  }

  // Consumers: warpgroup g takes row group g % height of the tile and chunk g /
  // height of the unit.
  const int group = warp / 4;
  const int group_row = group % plan.height;
  const int group_col = group / plan.height;
  const int row_block_in_tile = group_row * 4 + warp % 4;
  const uint32_t stage0 = SharedAddress(stages_begin) + static_cast<uint32_t>(warp * plan.stages * p.stage_bytes);
  const uint32_t full0 = SharedAddress(shared.chunk_full) + static_cast<uint32_t>(warp * plan.stages * 8);
  Fetches fetches(p, cta, row_block_in_tile, group_col);
  if (warp < kWarps) {
    // The weights do not depend on earlier kernels: start them before anything
    // else. Lane s fetches chunk s.
    int units = 0;
    uint32_t begin = 0;
    uint32_t end = 0;
    for (; units < plan.stages && !fetches.done(); ++units, fetches.Next()) {
      if (lane == units) fetches.Offsets(begin, end);
    }
    if (lane < plan.stages) BarrierInit(full0 + lane * 8, 1);
    BarrierInitFence();
    __syncwarp();
    if (lane < units) {
      FetchChunk(p, begin, end, stage0 + static_cast<uint32_t>(lane * p.stage_bytes), full0 + lane * 8);
    }
  }
  __syncthreads();

  if (warp >= kWarps) {
    ShrinkRegisters<kProducerRegisters>();
    if (warp == kWarps && ElectOne()) {
      WaitForPrerequisites();
      int slot = 0;
      uint32_t parity = 1;
      tile::Segments segments(plan, cta);
      for (tile::Segment segment; segments.Next(segment);) {
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
                           column + ring * kChunkCols, 0, full);
            }
            if (++slot == boxes) {
              slot = 0;
              parity ^= 1;
            }
          }
        }
      }
    }
    return;
  }

  GrowRegisters<kConsumerRegisters>();
  const uint32_t box_full = SharedAddress(shared.box_full + group_col * boxes);
  const uint32_t box_empty = SharedAddress(shared.box_empty + group_col * boxes);
  const uint32_t x_low = WgmmaLowWord(x_shared + static_cast<uint32_t>(group_col * boxes * BoxBytes<kTokens>()));
  uint8_t *const exchange = stages_begin + kWarps * plan.stages * p.stage_bytes;
  float4 *const turn =
      reinterpret_cast<float4 *>(exchange + (depth - 1) * plan.height * 4 * SlotBytes<kTokens>()) + warp * 32;
  uint32_t a[2][kStepsPerCommit][4];
  int stage = 0;
  uint32_t stage_parity = 0;
  int slot = 0;
  int used_slot = -1;  // whose wgmmas are done once the current batch is the
                       // only one running
  uint32_t slot_parity = 0;
  tile::Segments segments(plan, cta);
#pragma unroll 1
  for (tile::Segment segment; segments.Next(segment);) {
    float sum[kTokens / 2];
#pragma unroll
    for (float &v : sum) v = 0.f;
    const int limit = plan.Limit(segment.tile, row_block_in_tile, group_col);
#pragma unroll 1
    for (int unit = segment.begin; unit < segment.end; ++unit) {
      // The offsets of the chunk that will refill this stage arrive while it is
      // being decoded.
      const bool refill = !fetches.done();
      uint32_t next_begin = 0;
      uint32_t next_end = 0;
      if (refill) {
        fetches.Offsets(next_begin, next_end);
        fetches.Next();
      }
      const uint32_t chunk = stage0 + static_cast<uint32_t>(stage * p.stage_bytes);
      const uint32_t full = full0 + static_cast<uint32_t>(stage * 8);
      BarrierWait(full, stage_parity);
      ChunkDecoder<kChunkCols> decoder(chunk, lane, unit < limit);
#pragma unroll
      for (int step = 0; step < kSteps; step += kStepsPerCommit) {
        uint32_t(&set)[kStepsPerCommit][4] = a[step / kStepsPerCommit % 2];
#pragma unroll
        for (int i = 0; i < kStepsPerCommit; ++i) decoder.Step(step + i, set[i]);
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
          if (used_slot >= 0 && lane == 0) BarrierArrive(box_empty + static_cast<uint32_t>(used_slot * 8));
          used_slot = slot;
        }
        if (step % 4 == 4 - kStepsPerCommit && ++slot == boxes) {
          slot = 0;
          slot_parity ^= 1;
        }
      }
      __syncwarp();  // every lane is done with the stage
      if (refill && ElectOne()) FetchChunk(p, next_begin, next_end, chunk, full);
      if (++stage == plan.stages) {
        stage = 0;
        stage_parity ^= 1;
      }
    }
    WgmmaWait<0>();
#pragma unroll
    for (float &v : sum) WgmmaPin(v);

    // Along K: the first warpgroup of each row adds up the others.
    if (depth > 1) {
      NamedBarrier(1 + group_row, depth * 128);
      if (group_col > 0) {
        float4 *to = reinterpret_cast<float4 *>(exchange + ((group_col - 1) * plan.height * 4 + row_block_in_tile) *
                                                               SlotBytes<kTokens>()) +
                     lane;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          to[t * 32] = make_float4(sum[t * 4], sum[t * 4 + 1], sum[t * 4 + 2], sum[t * 4 + 3]);
        }
      }
      NamedBarrier(1 + group_row, depth * 128);
      if (group_col > 0) continue;
      for (int from = 0; from < depth - 1; ++from) {
        const float4 *part = reinterpret_cast<const float4 *>(exchange + (from * plan.height * 4 + row_block_in_tile) *
                                                                             SlotBytes<kTokens>()) +
                             lane;
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
    const int block = segment.tile * plan.height * 4 + row_block_in_tile;
    float4 *const partial =
        p.partials +
        ((static_cast<int64_t>(cta) * kMaxPieces + segment.piece) * plan.height * 4 + row_block_in_tile) * kTiles * 32;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      __syncwarp();
      turn[lane] = make_float4(sum[t * 4], sum[t * 4 + 1], sum[t * 4 + 2], sum[t * 4 + 3]);
      __syncwarp();
      const float4 quad = LoadQuad(reinterpret_cast<const float *>(turn) + QuadOffset(lane));
      if (segment.piece >= 0) {
        __stcg(partial + t * 32 + lane, quad);
      } else {
        StoreTileQuad(p.epilogue, p.tokens, p.m, block, t, lane, quad);
      }
    }
  }
}

// Adds up the shares of the leftover tiles: one warp a row block and token
// tile.
template <int kTokens>
__global__ __launch_bounds__(256) void TileFinish(const __grid_constant__ TileParams p) {
  constexpr int kTiles = kTokens / 8;
  const tile::Plan &plan = p.plan;
  TriggerDependents();
  const int item = static_cast<int>(blockIdx.x * 8 + threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int blocks = plan.height * 4;
  const int tile = item % kTiles;
  const int block = item / kTiles % blocks;
  const int leftover = item / kTiles / blocks;
  WaitForPrerequisites();
  if (leftover >= plan.leftovers) return;
  const float4 sum = SumPartials<kTokens>(p, leftover, block, tile, lane);
  StoreTileQuad(p.epilogue, p.tokens, p.m, (plan.FirstLeftover() + leftover) * blocks + block, tile, lane, sum);
}

// ---- host

using TileKernel = void (*)(CUtensorMap, TileParams);
using FinishKernel = void (*)(TileParams);

template <bool kIsBf16, int kChunkCols>
TileKernel KernelForTokens(int tokens) {
  return tokens == 16   ? SpmmTile<kIsBf16, 16, kChunkCols>
         : tokens == 32 ? SpmmTile<kIsBf16, 32, kChunkCols>
                        : SpmmTile<kIsBf16, 64, kChunkCols>;
}

TileKernel FindKernel(bool is_bf16, int tokens, int chunk_cols) {
  if (is_bf16) return chunk_cols == 256 ? KernelForTokens<true, 256>(tokens) : KernelForTokens<true, 128>(tokens);
  return chunk_cols == 256 ? KernelForTokens<false, 256>(tokens) : KernelForTokens<false, 128>(tokens);
}

FinishKernel FindFinish(int tokens) {
  return tokens == 16 ? TileFinish<16> : tokens == 32 ? TileFinish<32> : TileFinish<64>;
}

constexpr int64_t kTokensPerLaunch = 64;

int PaddedTokens(int64_t tokens) { return tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64; }

int64_t MaxDynamicShared(const spmmd_cuda_device &device) {
  constexpr int64_t kStatic = (sizeof(TileShared) + kDynamicAlignment - 1) / kDynamicAlignment * kDynamicAlignment;
  return static_cast<int64_t>(device.max_shared_bytes) - kStatic;
}

// Plans are made once for each kind of launch.
tile::Plan PlanFor(const spmmd_cuda_layer &layer, int tokens) {
  const auto chunk_cols = static_cast<int>(layer.params[bitmap_gpu::kParamChunkCols]);
  const int64_t row_blocks = CeilDiv(layer.m, 16);
  const int64_t col_blocks = CeilDiv(layer.k, chunk_cols);
  const int64_t stage_bytes = layer.params[bitmap_gpu::kParamMaxChunkBytes];
  static std::mutex mutex;
  static auto *const plans = new std::map<std::tuple<int, int64_t, int64_t, int, int64_t>, tile::Plan>();
  const std::tuple key(layer.device->index, row_blocks, col_blocks, tokens, stage_bytes);
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = plans->find(key); found != plans->end()) return found->second;
  return (*plans)[key] = tile::MakePlan(layer.device->multiprocessors, MaxDynamicShared(*layer.device), row_blocks,
                                        col_blocks, tokens, stage_bytes);
}

uint64_t PartialBytes(const tile::Plan &plan, int tokens) {
  if (plan.leftovers == 0) return 0;
  return static_cast<uint64_t>(plan.ctas) * kMaxPieces * plan.height * 4 * static_cast<uint64_t>(tokens / 8) * 512;
}

bool NeedsConversion(const spmmd_cuda_layer &layer, const Call &call) {
  return call.x_dtype != layer.dtype || reinterpret_cast<uintptr_t>(call.x) % 16 != 0 ||
         (call.n > 1 ? call.x_stride : 8) % 8 != 0;
}

uint64_t Pitch(const spmmd_cuda_layer &layer) { return RoundUp(static_cast<uint64_t>(layer.k), 8); }

Status CanImplement(const spmmd_cuda_layer &layer, const Call &call) {
  for (const int64_t tokens : {std::min(call.n, kTokensPerLaunch), call.n % kTokensPerLaunch}) {
    if (tokens > 0 && PlanFor(layer, PaddedTokens(tokens)).ctas == 0) {
      return Unimplemented(
          "spmm_tile: the layer's largest chunk leaves no "
          "shared memory for activations");
    }
  }
  return {};
}

uint64_t ScratchBytes(const spmmd_cuda_layer &layer, const Call &call) {
  uint64_t partials = 0;
  for (const int64_t tokens : {std::min(call.n, kTokensPerLaunch), call.n % kTokensPerLaunch}) {
    if (tokens == 0) continue;
    const int padded = PaddedTokens(tokens);
    partials = std::max(partials, PartialBytes(PlanFor(layer, padded), padded));
  }
  // Room for converted activations always: whether they are needed depends on
  // pointers that may not be known yet.
  return RoundUp(partials, 256) + static_cast<uint64_t>(call.n) * Pitch(layer) * 2;
}

Status EncodeActivations(const void *x, int64_t k, int64_t tokens, int64_t stride, int padded, bool is_bf16,
                         CUtensorMap *map) {
  static const auto encode = []() -> PFN_cuTensorMapEncodeTiled_v12000 {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      return nullptr;
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  if (encode == nullptr) return {SPMMD_CUDA_UNAVAILABLE, "the driver has no cuTensorMapEncodeTiled"};
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(tokens)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[2] = {kBoxCols, static_cast<cuuint32_t>(padded)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(map, is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
             const_cast<void *>(x), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return {SPMMD_CUDA_INTERNAL, "cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result))};
  }
  return {};
}

Status LaunchPart(const spmmd_cuda_layer &layer, const Call &call, const void *x, int64_t x_stride, int64_t first_token,
                  int64_t tokens, cudaStream_t stream) {
  const auto chunk_cols = static_cast<int>(layer.params[bitmap_gpu::kParamChunkCols]);
  const int padded = PaddedTokens(tokens);
  const bool is_bf16 = layer.dtype == kBf16;
  TileParams p = {};
  p.plan = PlanFor(layer, padded);
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
  SPMMD_CUDA_TRY(EncodeActivations(static_cast<const uint16_t *>(x) + first_token * x_stride, layer.k, tokens,
                                   tokens == 1 ? static_cast<int64_t>(Pitch(layer)) : x_stride, padded, is_bf16, &map));

  const TileKernel kernel = FindKernel(is_bf16, padded, chunk_cols);
  const auto shared_bytes = static_cast<int>(tile::SharedBytes(p.plan, padded, p.stage_bytes));
  SPMMD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.plan.ctas));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = (call.flags & SPMMD_CUDA_FLAG_CHAIN) != 0 ? 1 : 0;
  SPMMD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, map, p));
  if (p.plan.leftovers > 0) {
    config.gridDim =
        dim3(static_cast<unsigned>(CeilDiv(int64_t{p.plan.leftovers} * p.plan.height * 4 * (padded / 8), 8)));
    config.blockDim = dim3(256);
    config.dynamicSmemBytes = 0;
    config.numAttrs = 1;
    SPMMD_CUDA_CHECK(cudaLaunchKernelEx(&config, FindFinish(padded), p));
  }
  return {};
}

Status Launch(const spmmd_cuda_layer &layer, const Call &call, cudaStream_t stream) {
  const void *x = call.x;
  int64_t x_stride = call.x_stride;
  if (NeedsConversion(layer, call)) {
    uint64_t offset = kCounterBytes;
    const uint64_t pitch = Pitch(layer);
    offset += ScratchBytes(layer, call) - static_cast<uint64_t>(call.n) * pitch * 2;
    void *converted = static_cast<uint8_t *>(call.workspace) + offset;
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

const Kernel kSpmmTile = {"spmm_tile", kFormatBitmapGpu, false, CanImplement, ScratchBytes, Launch};

}  // namespace spmmd::cuda
