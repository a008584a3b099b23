// SpMM for THREE_LAYER weights on the sparse tensor cores.
#ifndef SPMMD_KERNELS_CUDA_THREE_LAYER_SPMM_H_
#define SPMMD_KERNELS_CUDA_THREE_LAYER_SPMM_H_

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

extern const Kernel kThreeLayerSpmm;

Status ValidateThreeLayer(const LayerDesc& desc);

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_THREE_LAYER_SPMM_H_
