// BITMAP_GPU to dense: one warp a chunk, every lane its two value streams, as in the SpMM kernels but at leisure.
//
// A lane writes pairs of neighbouring columns, 4 bytes; four lanes fill half a sector and the other half follows in the
// next store, so that L2 sees whole sectors. Bound by the write: 2 bytes an element, beside the 1.2 read at 50 %.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/bitmap_gpu_unpack.h"
#include "kernels/cuda/layer.h"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::cuda {
namespace {

using namespace bitmap_gpu;  // NOLINT(google-build-using-namespace): all of this file is about that layout

constexpr int kUnpackThreads = 256;

struct UnpackParams {
  const uint8_t* chunks;
  const uint32_t* offsets;
  uint16_t* out;
  int64_t pitch;  // elements, even
  int64_t m;
  int64_t col_blocks;
  int64_t count;
};

template <int kChunkCols>
__global__ __launch_bounds__(kUnpackThreads) void UnpackChunks(const __grid_constant__ UnpackParams p) {
  constexpr int kWords = MaskWords(kChunkCols);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kUnpackThreads / 32);
  for (int64_t c = static_cast<int64_t>(blockIdx.x) * (kUnpackThreads / 32) + threadIdx.x / 32; c < p.count;
       c += stride) {
    const uint64_t begin = uint64_t{p.offsets[c]} * 16;
    const uint8_t* const chunk = p.chunks + begin;
    const auto* const values = reinterpret_cast<const uint16_t*>(chunk + HeaderBytes(kChunkCols));
    // Validated layers stay below it; a damaged one reads nothing beyond its chunk.
    const int limit =
        (static_cast<int>(uint64_t{p.offsets[c + 1]} * 16 - begin) - HeaderBytes(kChunkCols)) / kRowBytes * kStreams;
    uint32_t mask[kWords];
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      mask[word] = reinterpret_cast<const uint32_t*>(chunk)[lane * kWords + word];
    }
    const uint32_t descriptor = reinterpret_cast<const uint32_t*>(chunk + MaskBytes(kChunkCols))[lane];
    const int64_t row0 = c / p.col_blocks * kChunkRows;
    const int64_t col0 = c % p.col_blocks * kChunkCols;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = row0 + ElementRow(lane, half);
      const Jump jump = DecodeJump(descriptor, half, kChunkCols);
      int at = 2 * lane + half;
#pragma unroll
      for (int step = 0; step < Steps(kChunkCols); ++step) {
        if (step == jump.step) at = jump.row * kStreams + jump.column;
        const uint32_t bits = mask[step / 4] >> (step % 4 * 8 + half * 4);
        uint32_t element[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool set = (bits >> e & 1u) != 0;
          element[e] = set && at < limit ? values[at] : 0u;
          at += set ? kStreams : 0;
        }
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const int64_t col = col0 + step * kStepCols + ElementCol(lane, 2 * pair);
          if (row < p.m && col < p.pitch) {
            *reinterpret_cast<uint32_t*>(p.out + row * p.pitch + col) = element[2 * pair] | element[2 * pair + 1] << 16;
          }
        }
      }
    }
  }
}

}  // namespace

Status LaunchUnpackBitmapGpu(const spmmd_cuda_layer& layer, void* to, cudaStream_t stream) {
  const auto chunk_cols = static_cast<int>(layer.params[kParamChunkCols]);
  UnpackParams p = {};
  p.chunks = layer.SectionData(kChunkSection);
  p.offsets = reinterpret_cast<const uint32_t*>(layer.SectionData(kOffsetSection));
  p.out = static_cast<uint16_t*>(to);
  p.pitch = static_cast<int64_t>(DensePitch(layer.k));
  p.m = layer.m;
  p.col_blocks = CeilDiv(layer.k, chunk_cols);
  p.count = CeilDiv(layer.m, kChunkRows) * p.col_blocks;
  const int64_t blocks =
      std::min<int64_t>(CeilDiv(p.count, kUnpackThreads / 32), int64_t{layer.device->multiprocessors} * 8);
  const auto kernel = chunk_cols == 256 ? UnpackChunks<256> : UnpackChunks<128>;
  kernel<<<static_cast<unsigned>(blocks), kUnpackThreads, 0, stream>>>(p);
  return FromCuda(cudaGetLastError(), "UnpackChunks");
}

}  // namespace spmmd::cuda
