// SpMM for few tokens, X streamed.
#ifndef SPMMD_KERNELS_CUDA_SPMM_STREAM_H_
#define SPMMD_KERNELS_CUDA_SPMM_STREAM_H_

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

extern const Kernel kSpmmStream;

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_SPMM_STREAM_H_
