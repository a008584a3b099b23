// The dense matrix of a BITMAP_GPU layer, made on the GPU.
#ifndef SPMMD_KERNELS_CUDA_BITMAP_GPU_UNPACK_H_
#define SPMMD_KERNELS_CUDA_BITMAP_GPU_UNPACK_H_

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

// Writes the matrix to `to`: m rows of DensePitch(k) elements, 16-byte aligned, the padding zero. Asynchronous. `layer`
// is BITMAP_GPU and its device current.
Status LaunchUnpackBitmapGpu(const spmmd_cuda_layer& layer, void* to, cudaStream_t stream);

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_BITMAP_GPU_UNPACK_H_
