// Activations as a TMA tensor.
#ifndef SPMMD_KERNELS_CUDA_ACTIVATION_MAP_H_
#define SPMMD_KERNELS_CUDA_ACTIVATION_MAP_H_

#include <cuda.h>

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

// Columns of a box: 128 bytes, the width of the swizzle.
inline constexpr int kActivationBoxCols = 64;

// Whether x must be copied before TMA can read it: another dtype than the weights', or rows not 16-byte aligned.
bool NeedsConversion(const spmmd_cuda_layer& layer, const Call& call);
// Row pitch, in elements, of such a copy.
uint64_t ConvertedPitch(const spmmd_cuda_layer& layer);

// Activations that TMA can read.
struct Activations {
  const uint16_t* data;
  int64_t stride;  // elements
};

// Workspace for a copy. Always to be asked for: whether one is made depends on pointers that may not be known yet.
uint64_t ConvertedBytes(const spmmd_cuda_layer& layer, const Call& call);
// The call's activations, copied into `workspace` if they must be.
Status PrepareActivations(const spmmd_cuda_layer& layer, const Call& call, void* workspace, cudaStream_t stream,
                          Activations* activations);

// A map of x[tokens][k] (fp16 or bf16, 16-byte aligned, row stride in elements, a multiple of 8) whose boxes are
// `padded` tokens x 64 columns, 128-byte swizzled; rows and columns outside are zero. UNAVAILABLE without a driver.
Status EncodeActivations(const void* x, int64_t k, int64_t tokens, int64_t stride, int padded, bool is_bf16,
                         CUtensorMap* map);

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_ACTIVATION_MAP_H_
