// A copy made by a kernel instead of a copy engine.
#ifndef SPMMD_KERNELS_CUDA_SMALL_COPY_H_
#define SPMMD_KERNELS_CUDA_SMALL_COPY_H_

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

// Device or page-locked memory on either side, 16-byte aligned, a multiple of 16 bytes, without overlap.
Status LaunchSmallCopy(void* to, const void* from, uint64_t bytes, cudaStream_t stream);

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_SMALL_COPY_H_
