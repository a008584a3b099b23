// Decoding of BITMAP_GPU chunks (kernels/format/bitmap_gpu_layout.h) from shared memory into tensor-core A fragments.
//
// Cost: 3.6 thread instructions an element: one test that compiles to a predicate move for eight elements (R2P), one
// predicated 16-bit load, one predicated cursor add, one zero, half a PRMT. Each lane reads from its own bank, so no
// access conflicts whatever the cursors are. The `if (mask & bit)` form matters: inline PTX predicates lose the R2P.
#ifndef SPMMD_KERNELS_CUDA_BITMAP_DECODE_CUH_
#define SPMMD_KERNELS_CUDA_BITMAP_DECODE_CUH_

#include <cstdint>

#include "kernels/cuda/ptx.cuh"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::cuda {

// The eight elements of one lane in one 16 x 16 step, whose mask bits start at `shift`: A fragment registers of
// mma.m16n8k16 and wgmma.m64nNk16. The cursors move past what was read.
__device__ __forceinline__ void DecodeStep(uint32_t mask, int shift, uint32_t& cursor_low, uint32_t& cursor_high,
                                           uint32_t (&a)[4]) {
  uint32_t v[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    v[j] = 0;
    if (mask & (1u << (shift + j))) {
      if (j < 4) {
        v[j] = LoadShared16(cursor_low);
        cursor_low += bitmap_gpu::kRowBytes;
      } else {
        v[j] = LoadShared16(cursor_high);
        cursor_high += bitmap_gpu::kRowBytes;
      }
    }
  }
  a[0] = __byte_perm(v[0], v[1], 0x5410);
  a[1] = __byte_perm(v[4], v[5], 0x5410);
  a[2] = __byte_perm(v[2], v[3], 0x5410);
  a[3] = __byte_perm(v[6], v[7], 0x5410);
}

// As DecodeStep, but stops at the loaded values, so that the next step's loads can be under way while CombineStep waits
// for these. One instruction an element more: a cursor is never advanced in the register that a load still has to read,
// which costs a wait an element. For few warps that have issue slots to spare.
__device__ __forceinline__ void LoadStep(uint32_t mask, int shift, uint32_t& cursor_low, uint32_t& cursor_high,
                                         uint32_t (&v)[8]) {
  const uint32_t bits = mask >> shift;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    v[j] = 0;
    const uint32_t bit = bits & (1u << j);
    uint32_t& cursor = j < 4 ? cursor_low : cursor_high;
    if (bit != 0) v[j] = LoadShared16(cursor);
    cursor += bit * static_cast<uint32_t>(bitmap_gpu::kRowBytes >> j);
  }
}
__device__ __forceinline__ void CombineStep(const uint32_t (&v)[8], uint32_t (&a)[4]) {
  a[0] = __byte_perm(v[0], v[1], 0x5410);
  a[1] = __byte_perm(v[4], v[5], 0x5410);
  a[2] = __byte_perm(v[2], v[3], 0x5410);
  a[3] = __byte_perm(v[6], v[7], 0x5410);
}

// One lane's walk through one chunk. Steps must be decoded in order.
template <int kChunkCols>
class ChunkDecoder {
 public:
  static constexpr int kSteps = bitmap_gpu::Steps(kChunkCols);

  __device__ __forceinline__ ChunkDecoder(uint32_t chunk, int lane) {
    constexpr int kMaskBytes = bitmap_gpu::MaskBytes(kChunkCols);
    if constexpr (kSteps == 16) {
      const uint4 words = LoadShared128(chunk + lane * 16);
      mask_[0] = words.x;
      mask_[1] = words.y;
      mask_[2] = words.z;
      mask_[3] = words.w;
    } else {
      const uint2 words = LoadShared64(chunk + lane * 8);
      mask_[0] = words.x;
      mask_[1] = words.y;
    }
    const uint32_t descriptor = LoadShared32(chunk + kMaskBytes + lane * 4);
    const uint32_t values = chunk + bitmap_gpu::HeaderBytes(kChunkCols);
    low_ = values + lane * 4;
    high_ = low_ + 2;
    jump_low_ = descriptor & 7u;
    jump_high_ = descriptor >> 16 & 7u;
    // Row * 128 + column * 2: the descriptor's fields already lie in that order.
    tail_low_ = values + (descriptor >> 2 & 0x3ffeu);
    tail_high_ = values + (descriptor >> 18 & 0x3ffeu);
  }

  // `step` must be a compile-time constant after unrolling.
  __device__ __forceinline__ void Step(int step, uint32_t (&a)[4]) {
    Jump(step);
    DecodeStep(mask_[step / 4], step % 4 * 8, low_, high_, a);
  }
  // As Step, for CombineStep.
  __device__ __forceinline__ void Load(int step, uint32_t (&v)[8]) {
    Jump(step);
    LoadStep(mask_[step / 4], step % 4 * 8, low_, high_, v);
  }

 private:
  __device__ __forceinline__ void Jump(int step) {
    if (step >= kSteps / 2 && step <= bitmap_gpu::LastJumpStep(kChunkCols)) {
      if (jump_low_ == static_cast<uint32_t>(step - kSteps / 2)) low_ = tail_low_;
      if (jump_high_ == static_cast<uint32_t>(step - kSteps / 2)) high_ = tail_high_;
    }
  }

  uint32_t mask_[kSteps / 4];
  uint32_t low_, high_;
  uint32_t tail_low_, tail_high_;
  uint32_t jump_low_, jump_high_;
};

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_BITMAP_DECODE_CUH_
