// Where a warp's BITMAP_GPU chunks lie, read well before they are fetched.
#ifndef SPMMD_KERNELS_CUDA_CHUNK_OFFSETS_CUH_
#define SPMMD_KERNELS_CUDA_CHUNK_OFFSETS_CUH_

#include <cstdint>

#include "kernels/cuda/ptx.cuh"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::cuda {

// A warp's chunks in the order in which it fetches them. Offsets are read 32 chunks at a time, a lane a chunk, and one
// batch ahead, so that only the first batch is waited for.
//
// `find(i)`, called by one lane each, returns where chunk i (0 <= i < count) begins and ends in units of 16 bytes; both
// equal where the matrix has none.
template <typename Find>
class ChunkOffsets {
 public:
  __device__ __forceinline__ ChunkOffsets(int count, const Find &find) : find_(find), left_(count), count_(count) {
    now_ = Read();
  }

  __device__ __forceinline__ bool done() const { return left_ == 0; }
  // This lane's chunk of the first batch.
  __device__ __forceinline__ uint2 Mine() const { return now_; }
  // Passes over the first `chunks` chunks and starts reading the second batch.
  __device__ __forceinline__ void Skip(int chunks) {
    left_ -= chunks;
    at_ = chunks;
    Prefetch();
  }
  __device__ __forceinline__ uint2 Next() {
    const uint2 chunk = make_uint2(__shfl_sync(~0u, now_.x, at_), __shfl_sync(~0u, now_.y, at_));
    --left_;
    if (++at_ == 32) {
      at_ = 0;
      now_ = next_;
      Prefetch();
    }
    return chunk;
  }

 private:
  __device__ __forceinline__ uint2 Read() const {
    const int i = first_ + static_cast<int>(threadIdx.x) % 32;
    return i < count_ ? find_(i) : make_uint2(0, 0);
  }
  __device__ __forceinline__ void Prefetch() {
    first_ += 32;
    next_ = Read();
  }

  const Find &find_;
  int left_, count_;
  int first_ = 0;  // chunk of the batch read last
  int at_ = 0;
  uint2 now_, next_ = {};
};

// A chunk into a stage, by one lane.
__device__ __forceinline__ void FetchChunk(const uint8_t *chunks, uint2 chunk, uint32_t to, uint32_t full) {
  const uint32_t bytes = (chunk.y - chunk.x) * 16;
  BarrierArriveExpect(full, bytes);
  BulkLoad(to, chunks + uint64_t{chunk.x} * 16, bytes, full);
}

__device__ __forceinline__ void StoreShared32(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
// Orders this thread's ordinary accesses to shared memory before later ones of the copy engine and the tensor cores.
__device__ __forceinline__ void ProxyFence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The empty chunk into a stage, where the matrix has none: each lane its own masks. Decoding goes on as ever.
template <int kChunkCols>
__device__ __forceinline__ void ClearChunk(uint32_t to, uint32_t full, int lane) {
  for (int word = 0; word < bitmap_gpu::MaskWords(kChunkCols); ++word) {
    StoreShared32(to + static_cast<uint32_t>((lane * bitmap_gpu::MaskWords(kChunkCols) + word) * 4), 0);
  }
  ProxyFence();  // a bulk copy will overwrite them
  __syncwarp();
  if (lane == 0) BarrierArrive(full);
}

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_CHUNK_OFFSETS_CUH_
