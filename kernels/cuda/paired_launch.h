// What spmm_pair and spmm_stream share on the host: layers that one launch multiplies, the checks of such a group, and
// the launch of pairs of CTAs. A group's layers share x and K; each takes whole pairs, so that a pair works as if its
// layer were alone.
#ifndef SPMMD_KERNELS_CUDA_PAIRED_LAUNCH_H_
#define SPMMD_KERNELS_CUDA_PAIRED_LAUNCH_H_

#include <algorithm>
#include <climits>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/activation_map.h"
#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/internal.h"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::cuda {

inline constexpr int kMaxPairedLayers = 4;

struct PairedLayer {
  const uint8_t* chunks;
  const uint32_t* offsets;
  Epilogue epilogue;
  int m;
  int row_blocks;
  int first_pair;  // INT_MAX: none
};

struct PairedLayers {
  PairedLayer layer[kMaxPairedLayers];

  __device__ __forceinline__ const PairedLayer& OfPair(int pair) const {
    int at = 0;
#pragma unroll
    for (int i = 1; i < kMaxPairedLayers; ++i) at += pair >= layer[i].first_pair ? 1 : 0;
    return layer[at];
  }
};

inline int BitmapChunkCols(const spmmd_cuda_layer& layer) {
  return static_cast<int>(layer.params[bitmap_gpu::kParamChunkCols]);
}
inline int64_t BitmapRowBlocks(const spmmd_cuda_layer& layer) { return CeilDiv(layer.m, bitmap_gpu::kChunkRows); }
inline int64_t BitmapColBlocks(const spmmd_cuda_layer& layer) { return CeilDiv(layer.k, BitmapChunkCols(layer)); }

// Row blocks of each layer, and of the largest chunk of all.
inline std::vector<int64_t> RowBlocksOf(const spmmd_cuda_layer* const* layers, int count) {
  std::vector<int64_t> blocks;
  for (int i = 0; i < count; ++i) blocks.push_back(BitmapRowBlocks(*layers[i]));
  return blocks;
}
inline int64_t LargestChunk(const spmmd_cuda_layer* const* layers, int count) {
  int64_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes = std::max(bytes, layers[i]->params[bitmap_gpu::kParamMaxChunkBytes]);
  return bytes;
}

// Beyond what holds for each call on its own.
inline Status CheckPairedGroup(const spmmd_cuda_layer* const* layers, const Call* calls, int count) {
  if (count > kMaxPairedLayers) {
    return InvalidArgument("count: " + std::to_string(count) + " layers, at most " + std::to_string(kMaxPairedLayers));
  }
  for (int i = 1; i < count; ++i) {
    if (layers[i]->device != layers[0]->device || layers[i]->dtype != layers[0]->dtype ||
        layers[i]->k != layers[0]->k || BitmapChunkCols(*layers[i]) != BitmapChunkCols(*layers[0])) {
      return InvalidArgument("layers: a group needs one device and equal K, dtype and columns of a chunk");
    }
    if (calls[i].x != calls[0].x || calls[i].n != calls[0].n || calls[i].x_dtype != calls[0].x_dtype ||
        (calls[0].n > 1 && calls[i].x_stride != calls[0].x_stride)) {
      return InvalidArgument("x: a group shares its activations");
    }
  }
  return {};
}

// `rows`: row blocks a pair.
inline PairedLayers MakePairedLayers(const spmmd_cuda_layer* const* layers, const Call* calls, int count, int rows) {
  PairedLayers paired = {};
  int pair = 0;
  for (int i = 0; i < kMaxPairedLayers; ++i) {
    PairedLayer& out = paired.layer[i];
    out.first_pair = i < count ? pair : INT_MAX;
    if (i >= count) continue;
    const spmmd_cuda_layer& layer = *layers[i];
    out.chunks = layer.SectionData(bitmap_gpu::kChunkSection);
    out.offsets = reinterpret_cast<const uint32_t*>(layer.SectionData(bitmap_gpu::kOffsetSection));
    out.epilogue = MakeEpilogue(calls[i]);
    out.m = static_cast<int>(layer.m);
    out.row_blocks = static_cast<int>(BitmapRowBlocks(layer));
    pair += static_cast<int>(CeilDiv(out.row_blocks, rows));
  }
  return paired;
}

// Launches `pairs` clusters of two CTAs with a map of x in boxes of `padded` tokens. x and the workspace are the first
// call's.
template <typename Params>
Status LaunchPairs(void (*kernel)(CUtensorMap, Params), const Params& params, int pairs, int threads, int shared_bytes,
                   int padded, const spmmd_cuda_layer& layer, const Call& call, cudaStream_t stream) {
  Activations x;
  SPMMD_CUDA_TRY(PrepareActivations(layer, call, static_cast<uint8_t*>(call.workspace) + kCounterBytes, stream, &x));
  CUtensorMap map;
  SPMMD_CUDA_TRY(EncodeActivations(x.data, layer.k, call.n, x.stride, padded, layer.dtype == kBf16, &map));
  SPMMD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(pairs * 2));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = 2;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = (call.flags & SPMMD_CUDA_FLAG_CHAIN) != 0 ? 2 : 1;
  SPMMD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, map, params));
  return {};
}

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_PAIRED_LAUNCH_H_
