// The packer of kernels/format/bitmap_gpu.cc on the GPU, bit for bit: one warp a chunk, each lane its two streams.
//
// Two passes, as on the CPU: the chunks' sizes, then, with their offsets known, their bytes. A lane reads its elements
// where they lie (a warp's 32-byte pieces of eight rows come from L1) and keeps their mask in registers; finding room
// for tails is a warp-wide maximum (the longest tail) and minimum (the tightest room) a tail. Sizes are added up on the
// host: 4 bytes a chunk of 2048 or 4096 elements.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/bitmap_gpu_pack.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/layer.h"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::cuda {
namespace {

using namespace bitmap_gpu;  // NOLINT(google-build-using-namespace): all of this file is about that layout

constexpr int kPackThreads = 256;
constexpr uint32_t kNone = 0xffffffffu;

struct PackParams {
  const uint16_t* weights;
  int64_t stride;  // elements
  int64_t m;
  int64_t k;
  int64_t col_blocks;
  int64_t chunks;
  uint32_t exponent;  // bits that are all set in NaN and infinity
  uint32_t* sizes;    // [chunks], in 16 bytes
  uint64_t* counts;   // nonzeros, non-finite weights
  uint8_t* out;       // second pass
  const uint32_t* offsets;
};

template <int kChunkCols>
class WarpPacker {
 public:
  static constexpr int kSteps = Steps(kChunkCols);
  static constexpr int kWords = MaskWords(kChunkCols);

  __device__ __forceinline__ WarpPacker(const PackParams& p, int64_t chunk, int lane) : p_(p), lane_(lane) {
    row0_ = chunk / p.col_blocks * kChunkRows;
    col0_ = chunk % p.col_blocks * kChunkCols;
#pragma unroll
    for (int word = 0; word < kWords; ++word) mask_[word] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const uint32_t value = ValueAt(half, step, e);
          mask_[step / 4] |= ((value & 0x7fffu) != 0 ? 1u : 0u) << (step % 4 * 8 + half * 4 + e);
          nonfinite_ += (value & p.exponent) == p.exponent ? 1 : 0;
        }
      }
      total_[half] = 0;
#pragma unroll
      for (int word = 0; word < kWords; ++word) total_[half] += __popc(mask_[word] & (0x0f0f0f0fu << (4 * half)));
    }
    nnz_ = __reduce_add_sync(~0u, total_[0] + total_[1]);
    Balance();
  }

  __device__ __forceinline__ int nnz() const { return nnz_; }
  __device__ __forceinline__ int nonfinite() const { return __reduce_add_sync(~0u, nonfinite_); }
  __device__ __forceinline__ int bytes() const { return ChunkBytes(kChunkCols, value_rows_); }

  // Writes what is not zero of bytes() bytes.
  __device__ __forceinline__ void Write(uint8_t* out) const {
#pragma unroll
    for (int word = 0; word < kWords; ++word) reinterpret_cast<uint32_t*>(out)[lane_ * kWords + word] = mask_[word];
    reinterpret_cast<uint32_t*>(out + MaskBytes(kChunkCols))[lane_] =
        EncodeJump(jump_[0], kChunkCols) | EncodeJump(jump_[1], kChunkCols) << 16;
    auto* const values = reinterpret_cast<uint16_t*>(out + HeaderBytes(kChunkCols));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int at = 2 * lane_ + half;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step == jump_[half].step) at = jump_[half].row * kStreams + jump_[half].column;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if ((StepBits(half, step) >> e & 1u) == 0) continue;
          values[at] = static_cast<uint16_t>(ValueAt(half, step, e));
          at += kStreams;
        }
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t ValueAt(int half, int step, int e) const {
    const int64_t row = row0_ + ElementRow(lane_, half);
    const int64_t col = col0_ + step * kStepCols + ElementCol(lane_, e);
    return row < p_.m && col < p_.k ? __ldg(p_.weights + row * p_.stride + col) : 0u;
  }
  __device__ __forceinline__ uint32_t StepBits(int half, int step) const {
    return mask_[step / 4] >> (step % 4 * 8 + half * 4) & 0xfu;
  }

  // The fewest value rows for which every too long stream finds room for its tail, best fit, longest tail first.
  __device__ __forceinline__ void Balance() {
    const int longest = __reduce_max_sync(~0u, max(total_[0], total_[1]));
    for (value_rows_ = (nnz_ + kStreams - 1) / kStreams; value_rows_ < longest; ++value_rows_) {
      if (TryBalance()) return;
    }
    jump_[0] = jump_[1] = {};
  }

  __device__ __forceinline__ bool TryBalance() {
    int tail[2];
    int room[2];
    bool fits = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      jump_[half] = {};
      tail[half] = 0;
      room[half] = max(0, value_rows_ - total_[half]);
      if (total_[half] <= value_rows_) continue;
      int cut = 0;
      int head = 0;
      bool open = true;
#pragma unroll
      for (int step = 0; step < LastJumpStep(kChunkCols); ++step) {
        const int count = __popc(StepBits(half, step));
        open = open && head + count <= value_rows_;
        if (open) {
          head += count;
          cut = step + 1;
        }
      }
      fits = fits && cut >= kSteps / 2;
      jump_[half].step = cut;
      tail[half] = total_[half] - head;
    }
    if (!__all_sync(~0u, fits)) return false;
    while (true) {
      uint32_t key = 0;
      uint32_t place = kNone;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (tail[half] > 0) key = max(key, static_cast<uint32_t>(tail[half] << 6 | (63 - (2 * lane_ + half))));
      }
      key = __reduce_max_sync(~0u, key);
      if (key == 0) return true;
      const int length = static_cast<int>(key >> 6);
      const int stream = 63 - static_cast<int>(key & 63u);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (room[half] >= length) place = min(place, static_cast<uint32_t>(room[half] << 6 | (2 * lane_ + half)));
      }
      place = __reduce_min_sync(~0u, place);
      if (place == kNone) return false;
      const int column = static_cast<int>(place & 63u);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (stream == 2 * lane_ + half) {
          jump_[half].column = column;
          jump_[half].row = value_rows_ - static_cast<int>(place >> 6);
          tail[half] = 0;
        }
        if (column == 2 * lane_ + half) room[half] -= length;
      }
    }
  }

  const PackParams& p_;
  int lane_;
  int64_t row0_;
  int64_t col0_;
  uint32_t mask_[kWords];
  int total_[2];
  Jump jump_[2];
  int nnz_;
  int nonfinite_ = 0;
  int value_rows_;
};

template <int kChunkCols, bool kWrite>
__global__ __launch_bounds__(kPackThreads) void PackChunks(const __grid_constant__ PackParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kPackThreads / 32);
  uint64_t nnz = 0;
  uint64_t nonfinite = 0;
  for (int64_t chunk = static_cast<int64_t>(blockIdx.x) * (kPackThreads / 32) + threadIdx.x / 32; chunk < p.chunks;
       chunk += step) {
    const WarpPacker<kChunkCols> packer(p, chunk, lane);
    if constexpr (kWrite) {
      packer.Write(p.out + uint64_t{p.offsets[chunk]} * 16);
    } else {
      nnz += packer.nnz();
      nonfinite += packer.nonfinite();
      if (lane == 0) p.sizes[chunk] = static_cast<uint32_t>(packer.bytes() / 16);
    }
  }
  if constexpr (!kWrite) {
    if (lane == 0 && nnz != 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.counts), nnz);
    if (lane == 0 && nonfinite != 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.counts + 1), nonfinite);
  }
}

template <bool kWrite>
Status Run(const spmmd_cuda_device& device, const PackParams& p, int chunk_cols, cudaStream_t stream) {
  const int64_t blocks = std::min<int64_t>(CeilDiv(p.chunks, kPackThreads / 32), int64_t{device.multiprocessors} * 16);
  const auto kernel = chunk_cols == 256 ? PackChunks<256, kWrite> : PackChunks<128, kWrite>;
  kernel<<<static_cast<unsigned>(blocks), kPackThreads, 0, stream>>>(p);
  return FromCuda(cudaGetLastError(), "PackChunks");
}

// Back to the pool once the work on `stream` is done.
struct ScratchFree {
  LayerPool* pool;
  cudaStream_t stream;
  void operator()(uint8_t* pointer) const {
    if (pool->FreeAfter(stream).ok()) pool->Free(pointer);  // else the device is lost
  }
};

}  // namespace

Status PackBitmapGpu(spmmd_cuda_device* device, const spmmd_cuda_dense_weights& weights, cudaStream_t stream,
                     spmmd_cuda_packed_info* info, spmmd_cuda_layer** layer) {
  LayerDesc desc = {};
  desc.format = kFormatBitmapGpu;
  desc.dtype = weights.dtype;
  desc.m = weights.m;
  desc.k = weights.k;
  SPMMD_CUDA_TRY(CheckDesc(desc));
  if (weights.dtype == kF32) return InvalidArgument("dtype: BITMAP_GPU stores fp16 and bf16, not fp32");
  if (!IsChunkCols(weights.chunk_cols)) {
    return InvalidArgument("chunk_cols: " + std::to_string(weights.chunk_cols) + " is neither 128 nor 256");
  }
  if (weights.row_stride < weights.k) {
    return InvalidArgument("row_stride: " + std::to_string(weights.row_stride) +
                           " is less than K = " + std::to_string(weights.k));
  }
  if (reinterpret_cast<uintptr_t>(weights.data) % 2 != 0) {
    return InvalidArgument("data: not aligned to its element type");
  }
  PackParams p = {};
  p.weights = static_cast<const uint16_t*>(weights.data);
  p.stride = weights.row_stride;
  p.m = weights.m;
  p.k = weights.k;
  p.col_blocks = CeilDiv(weights.k, weights.chunk_cols);
  p.chunks = CeilDiv(weights.m, kChunkRows) * p.col_blocks;
  p.exponent = weights.dtype == kBf16 ? 0x7f80u : 0x7c00u;

  // First pass: the sizes.
  const uint64_t size_bytes = static_cast<uint64_t>(p.chunks) * 4;
  LayerPool& pool = Opened(device).pool;
  uint8_t* scratch = nullptr;
  SPMMD_CUDA_TRY(pool.Allocate(size_bytes + 16, &scratch));
  const std::unique_ptr<uint8_t, ScratchFree> scratch_owner(scratch, {&pool, stream});
  p.counts = reinterpret_cast<uint64_t*>(scratch);
  p.sizes = reinterpret_cast<uint32_t*>(p.counts + 2);
  SPMMD_CUDA_CHECK(cudaMemsetAsync(p.counts, 0, 16, stream));
  SPMMD_CUDA_TRY(Run<false>(*device, p, weights.chunk_cols, stream));
  uint64_t counts[2] = {};
  std::vector<uint32_t> offsets(static_cast<size_t>(p.chunks) + 1);
  SPMMD_CUDA_CHECK(cudaMemcpyAsync(counts, p.counts, 16, cudaMemcpyDeviceToHost, stream));
  SPMMD_CUDA_CHECK(cudaMemcpyAsync(offsets.data() + 1, p.sizes, size_bytes, cudaMemcpyDeviceToHost, stream));
  SPMMD_CUDA_CHECK(cudaStreamSynchronize(stream));
  if (counts[1] != 0 && weights.allow_nonfinite == 0) {
    return InvalidArgument("data: " + std::to_string(counts[1]) + " weights are NaN or infinite");
  }
  uint64_t end = 0;
  uint32_t largest = 0;
  for (size_t c = 1; c < offsets.size(); ++c) {
    largest = std::max(largest, offsets[c]);
    end += offsets[c];
    if (end > UINT32_MAX) {
      return InvalidArgument("m * k: the packed layer would exceed BITMAP_GPU's limit of 64 GiB");
    }
    offsets[c] = static_cast<uint32_t>(end);
  }

  // Second pass: the bytes.
  desc.nnz = static_cast<int64_t>(counts[0]);
  desc.params[kParamChunkCols] = weights.chunk_cols;
  desc.params[kParamMaxChunkBytes] = int64_t{largest} * 16;
  spmmd_cuda_layer* packed = nullptr;
  SPMMD_CUDA_TRY(AllocateLayer(device, desc, {{kChunkSection, end * 16}, {kOffsetSection, size_bytes + 4}}, &packed));
  const auto fill = [&]() -> Status {
    p.out = packed->block + packed->sections[0].offset;
    auto* to = reinterpret_cast<uint32_t*>(packed->block + packed->sections[1].offset);
    p.offsets = to;
    SPMMD_CUDA_CHECK(cudaMemsetAsync(packed->block, 0, packed->block_bytes, stream));
    SPMMD_CUDA_CHECK(cudaMemcpyAsync(to, offsets.data(), size_bytes + 4, cudaMemcpyHostToDevice, stream));
    SPMMD_CUDA_TRY(Run<true>(*device, p, weights.chunk_cols, stream));
    SPMMD_CUDA_CHECK(cudaStreamSynchronize(stream));
    return {};
  };
  if (Status status = fill(); !status.ok()) {
    cudaStreamSynchronize(stream);  // what was launched still writes
    FreeLayer(packed);
    return status;
  }
  *layer = packed;
  if (info != nullptr) {
    info->nnz = desc.nnz;
    info->max_chunk_bytes = desc.params[kParamMaxChunkBytes];
    info->chunk_bytes = end * 16;
    info->offset_bytes = size_bytes + 4;
  }
  return {};
}

}  // namespace spmmd::cuda
