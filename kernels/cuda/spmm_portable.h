// SpMM with BITMAP_GPU weights for every GPU from compute capability 8.0 on: see spmm_portable.cu.
#ifndef SPMMD_KERNELS_CUDA_SPMM_PORTABLE_H_
#define SPMMD_KERNELS_CUDA_SPMM_PORTABLE_H_

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

extern const Kernel kSpmmPortable;

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_SPMM_PORTABLE_H_
