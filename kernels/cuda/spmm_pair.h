// SpMM for small matrices and few tokens.
#ifndef SPMMD_KERNELS_CUDA_SPMM_PAIR_H_
#define SPMMD_KERNELS_CUDA_SPMM_PAIR_H_

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

extern const Kernel kSpmmPair;

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_SPMM_PAIR_H_
