// Proof that no kernel can leave a THREE_LAYER layer's bytes, before they reach a device.
#include <algorithm>
#include <atomic>
#include <string>

#include "kernels/cuda/internal.h"
#include "kernels/cuda/parallel.h"
#include "kernels/cuda/three_layer_spmm.h"
#include "kernels/format/three_layer_layout.h"

namespace spmmd::cuda {
namespace {

Status Corrupt(const std::string& what) { return DataLoss("THREE_LAYER " + what); }

// A section of the wanted size whose data can be read as T, or an error that names it.
template <typename T>
Status FindTyped(const LayerDesc& desc, uint32_t id, const char* name, uint64_t bytes, const T** data) {
  const spmmd_cuda_section* section = FindSection(desc, id);
  if (section == nullptr || section->size != bytes) {
    return Corrupt("section " + std::string(name) + ": missing or not " + std::to_string(bytes) + " bytes");
  }
  if (reinterpret_cast<uintptr_t>(section->data) % alignof(T) != 0) {
    return InvalidArgument("sections: " + std::string(name) + " of THREE_LAYER is not aligned to its element type");
  }
  *data = static_cast<const T*>(section->data);
  return {};
}

// Whether offsets[0..tiles] start at 0 and ascend.
template <typename T>
bool Ascend(const T* offsets, int64_t tiles) {
  return offsets[0] == 0 && std::is_sorted(offsets, offsets + tiles + 1);
}

}  // namespace

Status ValidateThreeLayer(const LayerDesc& desc) {
  using namespace three_layer;  // NOLINT(google-build-using-namespace): the layout's names, in this function only
  if (desc.layout_version != kLayoutVersion) {
    return Corrupt("layout version " + std::to_string(desc.layout_version) + ", expected " +
                   std::to_string(kLayoutVersion));
  }
  if (desc.dtype == kF32) return Corrupt("dtype: fp32");
  if (desc.params[kParamTileRows] != kTileRows || desc.params[kParamTileCols] != kTileCols ||
      desc.params[kParamThreads] != kThreads) {
    return Corrupt("params: unknown tile size or number of threads");
  }
  const int64_t col_tiles = CeilDiv(desc.k, kTileCols);
  const int64_t tiles = CeilDiv(desc.m, kTileRows) * col_tiles;
  const auto count = static_cast<uint64_t>(tiles);
  Tile all = {};
  const uint32_t* code_offsets = nullptr;
  const uint64_t* residual_offsets = nullptr;
  SPMMD_CUDA_TRY(FindTyped(desc, kValues, "values", count * kTileValueBytes, &all.values));
  SPMMD_CUDA_TRY(FindTyped(desc, kMetadata, "metadata", count * kTileMetadataBytes, &all.metadata));
  SPMMD_CUDA_TRY(FindTyped(desc, kCodeOffsets, "code_offsets", (count + 1) * 4, &code_offsets));
  SPMMD_CUDA_TRY(FindTyped(desc, kResidualOffsets, "residual_offsets", (count + 1) * 8, &residual_offsets));
  if (!Ascend(code_offsets, tiles)) return Corrupt("section code_offsets: must ascend from 0");
  if (!Ascend(residual_offsets, tiles) || residual_offsets[tiles] > static_cast<uint64_t>(desc.nnz)) {
    return Corrupt("section residual_offsets: must ascend from 0 to at most nnz");
  }
  SPMMD_CUDA_TRY(FindTyped(desc, kCodes, "codes", code_offsets[tiles] * kCodeGranule, &all.codes));
  const uint64_t residual_bytes = residual_offsets[tiles] * 2;
  SPMMD_CUDA_TRY(FindTyped(desc, kResidualPositions, "residual_positions", residual_bytes, &all.residual_positions));
  SPMMD_CUDA_TRY(FindTyped(desc, kResidualValues, "residual_values", residual_bytes, &all.residual_values));

  std::atomic<int64_t> bad_tile{-1};
  std::atomic<int64_t> nnz{0};
  std::atomic<int64_t> most_codes{0};
  const int64_t row_tiles = tiles / col_tiles;
  ParallelFor(row_tiles, [&](int64_t row_tile) {
    int64_t found = 0;
    int64_t most = 0;
    for (int64_t col_tile = 0; col_tile < col_tiles; ++col_tile) {
      const int64_t index = row_tile * col_tiles + col_tile;
      const size_t code_begin = code_offsets[index] * kCodeGranule;
      const uint64_t residual_begin = residual_offsets[index];
      const Tile tile = {all.values + index * kTileSlots,
                         all.metadata + index * kTileMetadataWords,
                         all.codes + code_begin,
                         code_offsets[index + 1] * kCodeGranule - code_begin,
                         all.residual_positions + residual_begin,
                         all.residual_values + residual_begin,
                         residual_offsets[index + 1] - residual_begin};
      most = std::max(most, static_cast<int64_t>(tile.code_bytes));
      if (!CheckTile(tile, desc.m - row_tile * kTileRows, desc.k - col_tile * kTileCols, &found)) bad_tile = index;
    }
    nnz += found;
    for (int64_t seen = most_codes; seen < most && !most_codes.compare_exchange_weak(seen, most);) {
    }
  });
  if (bad_tile >= 0) return Corrupt("tile " + std::to_string(bad_tile) + ": would be decoded out of bounds");
  if (most_codes != desc.params[kParamMaxCodeBytes]) {
    return Corrupt("params: the largest tile's code bytes are not those of code_offsets");
  }
  if (nnz != desc.nnz) {
    return Corrupt("nnz: the tiles hold " + std::to_string(nnz) + ", the header says " + std::to_string(desc.nnz));
  }
  return {};
}

}  // namespace spmmd::cuda
