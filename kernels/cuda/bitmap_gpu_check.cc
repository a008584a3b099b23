// Proof that no kernel can leave a BITMAP_GPU layer's bytes, before they reach a device.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "kernels/cuda/internal.h"
#include "kernels/cuda/parallel.h"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::cuda {

Status ValidateBitmapGpu(const LayerDesc& desc) {
  using namespace bitmap_gpu;  // NOLINT(google-build-using-namespace): the layout's constants, in this function only
  const auto corrupt = [](const std::string& what) { return DataLoss("BITMAP_GPU " + what); };
  if (desc.layout_version != kLayoutVersion) {
    return corrupt("layout version " + std::to_string(desc.layout_version) + ", expected " +
                   std::to_string(kLayoutVersion));
  }
  if (desc.dtype == kF32) return corrupt("dtype: fp32");
  if (!IsChunkCols(desc.params[kParamChunkCols])) return corrupt("params: columns of a chunk are neither 128 nor 256");
  const int chunk_cols = static_cast<int>(desc.params[kParamChunkCols]);
  const int64_t max_bytes = desc.params[kParamMaxChunkBytes];
  if (max_bytes < HeaderBytes(chunk_cols) || max_bytes > ChunkBytes(chunk_cols, kMaxStreamRow)) {
    return corrupt("params: largest chunk of " + std::to_string(max_bytes) + " bytes is out of range");
  }
  const int64_t row_blocks = CeilDiv(desc.m, kChunkRows);
  const int64_t col_blocks = CeilDiv(desc.k, chunk_cols);
  const int64_t chunk_count = row_blocks * col_blocks;
  const spmmd_cuda_section* chunks = FindSection(desc, kChunkSection);
  const spmmd_cuda_section* offset_section = FindSection(desc, kOffsetSection);
  if (chunks == nullptr) return corrupt("section chunks: missing");
  if (offset_section == nullptr || offset_section->size != static_cast<uint64_t>(chunk_count + 1) * 4) {
    return corrupt("section offsets: missing or not " + std::to_string((chunk_count + 1) * 4) + " bytes");
  }
  if (reinterpret_cast<uintptr_t>(offset_section->data) % alignof(uint32_t) != 0) {
    return InvalidArgument("sections: the offsets of BITMAP_GPU are not aligned to 4 bytes");
  }
  const auto* offsets = static_cast<const uint32_t*>(offset_section->data);
  if (offsets[0] != 0 || uint64_t{offsets[chunk_count]} * 16 != chunks->size) {
    return corrupt("section offsets: do not span the chunks");
  }
  std::atomic<int64_t> total{0};
  std::atomic<int64_t> first_bad{chunk_count};  // the first, whichever thread meets one first
  ParallelFor(row_blocks, [&](int64_t row_block) {
    const auto rows = static_cast<int>(std::min<int64_t>(kChunkRows, desc.m - row_block * kChunkRows));
    int64_t block_nnz = 0;
    for (int64_t col_block = 0; col_block < col_blocks; ++col_block) {
      const int64_t c = row_block * col_blocks + col_block;
      const uint64_t begin = uint64_t{offsets[c]} * 16;
      const uint64_t end = uint64_t{offsets[c + 1]} * 16;
      const auto cols = static_cast<int>(std::min<int64_t>(chunk_cols, desc.k - col_block * chunk_cols));
      if (begin > end || end > chunks->size || end - begin > static_cast<uint64_t>(max_bytes) ||
          !CheckChunk(static_cast<const uint8_t*>(chunks->data) + begin, end - begin, chunk_cols, rows, cols,
                      &block_nnz)) {
        int64_t bad = first_bad.load();
        while (c < bad && !first_bad.compare_exchange_weak(bad, c)) {
        }
        return;
      }
    }
    total += block_nnz;
  });
  if (first_bad.load() < chunk_count) {
    return corrupt("chunk " + std::to_string(first_bad.load()) + ": would be decoded out of bounds");
  }
  const int64_t nnz = total.load();
  if (nnz != desc.nnz) {
    return corrupt("nnz: the chunks hold " + std::to_string(nnz) + ", the header says " + std::to_string(desc.nnz));
  }
  return {};
}

}  // namespace spmmd::cuda
