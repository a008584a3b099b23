// SpMM for any number of tokens on GPUs without Hopper's copy engine and clusters (compute capability 8.0 and later):
// BITMAP_GPU weights, mma.sync, cp.async.
//
// Work. A CTA has up to 8 warps, each with a row block (16 rows of W) of its own, over one part of K and one tile of up
// to 64 tokens. A warp copies its chunks into a private ring (cp.async, one mbarrier a stage), decodes them into A
// fragments and multiplies. X passes through a ring of boxes (all tokens x 64 or 128 columns) that the whole CTA fills
// and reads, in the order of TMA's 128-byte swizzle; columns and tokens outside arrive as zeros. Several CTAs a
// multiprocessor hide each other's waits.
//
// Reduction. Where K is cut, each CTA leaves its sums in the workspace, and the last one to arrive at a tile adds them
// up, always in the same order.
//
// Bytes an element: the format's, plus partial sums. Instructions an element: about 5.5, half of one for jumps that a
// decoder knows at compile time elsewhere: columns of a chunk are no template parameter, which halves what is compiled.
// Limiter: measured on an H200 through PTX only, see docs/measurements.md.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/activation_map.h"
#include "kernels/cuda/bitmap_decode.cuh"
#include "kernels/cuda/chunk_offsets.cuh"
#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/internal.h"
#include "kernels/cuda/portable_schedule.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/spmm_portable.h"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::cuda {
namespace {

using portable::kBoxStages;
using portable::kChunkStages;
using portable::kMaxWarps;

struct PortableParams {
  portable::Plan plan;
  const uint8_t* chunks;
  const uint32_t* offsets;
  int chunk_cols;
  int stage_bytes;
  const uint16_t* x;
  int64_t x_stride;  // elements, a multiple of 8
  int64_t k;
  int tokens;
  int m;
  float4* partials;    // [tile][split][row block of the tile][token tile of 8][lane]
  uint32_t* arrivals;  // [tile]
  Epilogue epilogue;
};

// The first `bytes` (0..16) of 16, the others zero.
__device__ __forceinline__ void CopyAsyncPart(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// One of the barrier's arrivals, once all copies that this thread has begun are there.
__device__ __forceinline__ void ArriveAfterCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// BarrierWait without try_wait, which is Hopper's.
__device__ __forceinline__ void SpinWait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (done == 0);
}

// A lane's walk through one chunk, 64 columns (a mask word) at a time: ChunkDecoder for columns known at run time.
struct WordDecoder {
  uint32_t masks;
  uint32_t low, high;
  uint32_t tail_low, tail_high;
  int jump_low, jump_high;  // steps from the next word's first

  __device__ __forceinline__ WordDecoder(uint32_t chunk, int chunk_cols, int lane) {
    const auto words = static_cast<uint32_t>(bitmap_gpu::MaskWords(chunk_cols));
    masks = chunk + static_cast<uint32_t>(lane) * words * 4;
    const uint32_t descriptor =
        LoadShared32(chunk + static_cast<uint32_t>(bitmap_gpu::MaskBytes(chunk_cols) + lane * 4));
    const uint32_t values = chunk + static_cast<uint32_t>(bitmap_gpu::HeaderBytes(chunk_cols));
    low = values + static_cast<uint32_t>(lane) * 4;
    high = low + 2;
    // Row * 128 + column * 2: the descriptor's fields already lie in that order.
    tail_low = values + (descriptor >> 2 & 0x3ffeu);
    tail_high = values + (descriptor >> 18 & 0x3ffeu);
    const auto step = [&](uint32_t code) {
      return code == bitmap_gpu::kNoJump ? -1 : static_cast<int>(code) + bitmap_gpu::Steps(chunk_cols) / 2;
    };
    jump_low = step(descriptor & 7u);
    jump_high = step(descriptor >> 16 & 7u);
  }

  __device__ __forceinline__ uint32_t NextMask() {
    const uint32_t mask = LoadShared32(masks);
    masks += 4;
    return mask;
  }
  // `step` of the word, a compile-time constant after unrolling.
  __device__ __forceinline__ void Step(uint32_t mask, int step, uint32_t (&a)[4]) {
    if (jump_low == step) low = tail_low;
    if (jump_high == step) high = tail_high;
    DecodeStep(mask, step * 8, low, high, a);
  }
  __device__ __forceinline__ void EndWord() {
    jump_low -= 4;
    jump_high -= 4;
  }
};

// kTiles: tiles of 8 tokens.
template <bool kIsBf16, int kTiles>
__global__ __launch_bounds__(kMaxWarps * 32, 2) void SpmmPortable(const __grid_constant__ PortableParams p) {
  constexpr int kTokens = kTiles * 8;
  constexpr int kBoxCols = portable::BoxCols(kTokens);
  constexpr int kBoxBytes = kTokens * kBoxCols * 2;
  constexpr int kBoxUnits = kTokens * kBoxCols / 8;  // of 16 bytes
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ uint64_t chunk_full[kMaxWarps * kChunkStages];
  __shared__ uint64_t box_full[kBoxStages];
  __shared__ bool last;
  const portable::Plan& plan = p.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int threads = plan.warps * 32;
  // Token tiles of the same rows are neighbours, so that the weights are read from L2 from the second one on.
  const auto tile = static_cast<int>(blockIdx.x);
  const int row_tile = tile / plan.token_tiles;
  const int first_token = (tile - row_tile * plan.token_tiles) * kTokens;
  const auto split = static_cast<int>(blockIdx.y);
  const int begin = plan.FirstCol(split);
  const int count = plan.FirstCol(split + 1) - begin;
  const int block = row_tile * plan.warps + warp;
  const bool active = block < plan.row_blocks;

  const uint32_t x_shared = SharedAddress(dynamic);
  uint8_t* const stages = dynamic + kBoxStages * kBoxBytes + warp * kChunkStages * p.stage_bytes;
  const uint32_t stage0 = SharedAddress(stages);
  const uint32_t full0 = SharedAddress(chunk_full + warp * kChunkStages);
  const uint32_t x_full = SharedAddress(box_full);
  if (lane < kChunkStages) InitBarrier(full0 + static_cast<uint32_t>(lane * 8), 32);
  if (threadIdx.x < kBoxStages) InitBarrier(x_full + threadIdx.x * 8, static_cast<uint32_t>(threads));

  const uint32_t* const first_offset = p.offsets + (static_cast<int64_t>(block) * plan.col_blocks + begin);
  const auto find = [&](int i) { return make_uint2(__ldg(first_offset + i), __ldg(first_offset + i + 1)); };
  ChunkOffsets offsets(active ? count : 0, find);
  const auto fetch = [&](uint2 chunk, int stage) {
    const uint8_t* const from = p.chunks + uint64_t{chunk.x} * 16;
    const uint32_t bytes = min((chunk.y - chunk.x) * 16, static_cast<uint32_t>(p.stage_bytes));
    const uint32_t to = stage0 + static_cast<uint32_t>(stage * p.stage_bytes);
    for (auto at = static_cast<uint32_t>(lane * 16); at < bytes; at += 512) CopyAsyncPart(to + at, from + at, 16);
    ArriveAfterCopies(full0 + static_cast<uint32_t>(stage * 8));
  };
  const int boxes_per_chunk = p.chunk_cols / kBoxCols;
  const int boxes = count * boxes_per_chunk;
  const auto load_box = [&](int box, int slot) {
    const uint32_t to = x_shared + static_cast<uint32_t>(slot * kBoxBytes);
    const int64_t first_col = static_cast<int64_t>(begin) * p.chunk_cols + static_cast<int64_t>(box) * kBoxCols;
#pragma unroll 1
    for (auto unit = static_cast<int>(threadIdx.x); unit < kBoxUnits; unit += threads) {
      const int token = unit / (kBoxCols / 8);
      const int place = unit % (kBoxCols / 8);
      const int64_t col = first_col + place * 8;
      const int64_t left = first_token + token < p.tokens ? p.k - col : 0;
      const int bytes = static_cast<int>(left >= 8 ? 16 : left > 0 ? left * 2 : 0);
      const uint16_t* const from = bytes > 0 ? p.x + (first_token + token) * p.x_stride + col : p.x;
      CopyAsyncPart(
          to + static_cast<uint32_t>(place / 8 * (kTokens * 128) + token * 128 + ((place % 8) ^ (token % 8)) * 16),
          from, bytes);
    }
    ArriveAfterCopies(x_full + static_cast<uint32_t>(slot * 8));
  };

  __syncthreads();  // the barriers are made
  int fetched = 0;
#pragma unroll 1
  for (; fetched < kChunkStages && !offsets.done(); ++fetched) fetch(offsets.Next(), fetched);
#pragma unroll 1
  for (int box = 0; box < kBoxStages - 1 && box < boxes; ++box) load_box(box, box);

  float sum[kTiles][4] = {};
  // ldmatrix: lane l addresses row l % 8 of unit l / 8.
  const uint32_t x_lane = x_shared + static_cast<uint32_t>(lane % 8 * 128 + (((lane / 8) ^ (lane % 8)) * 16));
  int stage = 0;
  uint32_t parity = 0;
  int slot = 0;
  uint32_t slot_parity = 0;
  int box = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const uint32_t full = full0 + static_cast<uint32_t>(stage * 8);
    if (active) SpinWait(full, parity);
    WordDecoder decoder(stage0 + static_cast<uint32_t>(stage * p.stage_bytes), p.chunk_cols, lane);
#pragma unroll 1
    for (int of_chunk = 0; of_chunk < boxes_per_chunk; ++of_chunk, ++box) {
      __syncthreads();  // all warps are done with the box before
      if (box + kBoxStages - 1 < boxes) load_box(box + kBoxStages - 1, slot == 0 ? kBoxStages - 1 : slot - 1);
      SpinWait(x_full + static_cast<uint32_t>(slot * 8), slot_parity);
      if (active) {
#pragma unroll 1
        for (int word = 0; word < kBoxCols / 64; ++word) {
          const uint32_t x_word = x_lane + static_cast<uint32_t>(slot * kBoxBytes + word * (kTokens * 128));
          const uint32_t mask = decoder.NextMask();
#pragma unroll
          for (int step = 0; step < 4; step += 2) {
            uint32_t b[kTiles][4];
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
              const uint32_t at = x_word + static_cast<uint32_t>(t * 1024);
              LoadMatrixX4(step == 0 ? at : at ^ 64u, b[t]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              uint32_t a[4];
              decoder.Step(mask, step + half, a);
#pragma unroll
              for (int t = 0; t < kTiles; ++t) {
                MmaM16N8K16<kIsBf16>(sum[t], a, b[t][half * 2], b[t][half * 2 + 1]);
              }
            }
          }
          decoder.EndWord();
        }
      }
      if (++slot == kBoxStages) {
        slot = 0;
        slot_parity ^= 1;
      }
    }
    __syncwarp();  // every lane is done with the stage
    if (!offsets.done()) fetch(offsets.Next(), stage);
    if (++stage == kChunkStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // Fragments become rows of Y in the warp's own stages, which nothing is on its way to.
  const auto store = [&](int t, const float4& v) {
    reinterpret_cast<float4*>(stages)[lane] = v;
    __syncwarp();
    const float4 quad = LoadQuad(reinterpret_cast<const float*>(stages) + QuadOffset(lane));
    __syncwarp();
    StoreTileQuad(p.epilogue, p.tokens, p.m, block, first_token / 8 + t, lane, quad);
  };
  if (plan.splits == 1) {
    if (!active) return;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) store(t, make_float4(sum[t][0], sum[t][1], sum[t][2], sum[t][3]));
    return;
  }

  const int64_t part = int64_t{plan.warps} * kTiles * 32;  // of one CTA
  float4* const of_tile = p.partials + static_cast<int64_t>(tile) * plan.splits * part + warp * kTiles * 32 + lane;
  if (active) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      of_tile[split * part + t * 32] = make_float4(sum[t][0], sum[t][1], sum[t][2], sum[t][3]);
    }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(p.arrivals + tile, 1u) + 1 == static_cast<uint32_t>(plan.splits);
    if (last) p.arrivals[tile] = 0;
  }
  __syncthreads();
  if (!last || !active) return;
  __threadfence();
#pragma unroll 1
  for (int t = 0; t < kTiles; ++t) {
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int from = 0; from < plan.splits; ++from) AddQuad(total, __ldcg(of_tile + from * part + t * 32));
    store(t, total);
  }
}

// ---- host

using PortableKernel = void (*)(PortableParams);

template <bool kIsBf16>
PortableKernel FindKernel(int tokens) {
  return tokens == 8    ? SpmmPortable<kIsBf16, 1>
         : tokens == 16 ? SpmmPortable<kIsBf16, 2>
         : tokens == 32 ? SpmmPortable<kIsBf16, 4>
                        : SpmmPortable<kIsBf16, 8>;
}

// What one launch takes: a tile's number must stay an int.
constexpr int64_t kTokensPerLaunch = 1 << 14;

int ChunkCols(const spmmd_cuda_layer& layer) { return static_cast<int>(layer.params[bitmap_gpu::kParamChunkCols]); }

portable::Plan PlanFor(const spmmd_cuda_layer& layer, int64_t n) {
  constexpr int64_t kStatic = 1024;
  const spmmd_cuda_device& device = *layer.device;
  const portable::Limits limits = {device.multiprocessors, static_cast<int64_t>(device.max_shared_bytes) - kStatic,
                                   static_cast<int64_t>(device.shared_bytes_per_multiprocessor)};
  return portable::MakePlan(limits, CeilDiv(layer.m, bitmap_gpu::kChunkRows), CeilDiv(layer.k, ChunkCols(layer)), n,
                            layer.params[bitmap_gpu::kParamMaxChunkBytes], kMaxCounters);
}

uint64_t PartialBytes(const portable::Plan& plan) {
  if (plan.splits <= 1) return 0;
  return static_cast<uint64_t>(plan.row_tiles) * static_cast<uint64_t>(plan.token_tiles) *
         static_cast<uint64_t>(plan.splits * plan.warps * (plan.tokens / 8)) * 512;
}

Status CanImplement(const spmmd_cuda_layer& layer, const Call& call) {
  if (PlanFor(layer, std::min(call.n, kTokensPerLaunch)).warps == 0) {
    return Unimplemented("spmm_portable: the layer's largest chunk does not fit the device's shared memory");
  }
  return {};
}

uint64_t ScratchBytes(const spmmd_cuda_layer& layer, const Call& call) {
  uint64_t partials = 0;
  for (const int64_t tokens : {std::min(call.n, kTokensPerLaunch), call.n % kTokensPerLaunch}) {
    if (tokens > 0) partials = std::max(partials, PartialBytes(PlanFor(layer, tokens)));
  }
  return RoundUp(partials, 256) + ConvertedBytes(layer, call);
}

Status LaunchPart(const spmmd_cuda_layer& layer, const Call& call, const Activations& x, int64_t first_token,
                  int64_t tokens, cudaStream_t stream) {
  PortableParams p = {};
  p.plan = PlanFor(layer, tokens);
  p.chunks = layer.SectionData(bitmap_gpu::kChunkSection);
  p.offsets = reinterpret_cast<const uint32_t*>(layer.SectionData(bitmap_gpu::kOffsetSection));
  p.chunk_cols = ChunkCols(layer);
  p.stage_bytes = static_cast<int>(layer.params[bitmap_gpu::kParamMaxChunkBytes]);
  p.x = x.data + first_token * x.stride;
  p.x_stride = x.stride;
  p.k = layer.k;
  p.tokens = static_cast<int>(tokens);
  p.m = static_cast<int>(layer.m);
  p.arrivals = static_cast<uint32_t*>(call.workspace);
  p.partials = reinterpret_cast<float4*>(static_cast<uint8_t*>(call.workspace) + kCounterBytes);
  p.epilogue = MakeEpilogue(call);
  p.epilogue.y =
      static_cast<uint8_t*>(call.y) + static_cast<uint64_t>(first_token * call.y_stride) * ElementSize(call.y_dtype);
  const PortableKernel kernel =
      layer.dtype == kBf16 ? FindKernel<true>(p.plan.tokens) : FindKernel<false>(p.plan.tokens);
  const auto shared = static_cast<size_t>(portable::SharedBytes(p.plan.tokens, p.plan.warps, p.stage_bytes));
  SPMMD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  const dim3 grid(static_cast<unsigned>(p.plan.row_tiles) * static_cast<unsigned>(p.plan.token_tiles),
                  static_cast<unsigned>(p.plan.splits));
  kernel<<<grid, static_cast<unsigned>(p.plan.warps * 32), shared, stream>>>(p);
  return FromCuda(cudaGetLastError(), "SpmmPortable");
}

Status Launch(const spmmd_cuda_layer& layer, const Call& call, cudaStream_t stream) {
  const uint64_t offset = kCounterBytes + ScratchBytes(layer, call) - ConvertedBytes(layer, call);
  Activations x;
  SPMMD_CUDA_TRY(PrepareActivations(layer, call, static_cast<uint8_t*>(call.workspace) + offset, stream, &x));
  for (int64_t token = 0; token < call.n; token += kTokensPerLaunch) {
    SPMMD_CUDA_TRY(LaunchPart(layer, call, x, token, std::min(call.n - token, kTokensPerLaunch), stream));
  }
  return {};
}

}  // namespace

const Kernel kSpmmPortable = {.name = "spmm_portable",
                              .format = kFormatBitmapGpu,
                              .sparse_input = false,
                              .can_implement = CanImplement,
                              .scratch_bytes = ScratchBytes,
                              .launch = Launch};

}  // namespace spmmd::cuda
