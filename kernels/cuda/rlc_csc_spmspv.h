// The published Celty kernel (SpMspV on RLC-CSC with shared-memory accumulation), on an RLC_CSC layer.
#ifndef SPMMD_KERNELS_CUDA_RLC_CSC_SPMSPV_H_
#define SPMMD_KERNELS_CUDA_RLC_CSC_SPMSPV_H_

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

Status ValidateRlcCsc(const LayerDesc& desc);

extern const Kernel kRlcCscSpmspv;

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_RLC_CSC_SPMSPV_H_
