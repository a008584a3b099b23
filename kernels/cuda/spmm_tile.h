// SpMM for BITMAP_GPU layers and any number of tokens, on wgmma. The kernel's name is spmm_tile.
#ifndef SPMMD_KERNELS_CUDA_SPMM_TILE_H_
#define SPMMD_KERNELS_CUDA_SPMM_TILE_H_

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

// Microseconds that a plain launch for call.n <= 16384 tokens takes on an H200, as estimated when it is cut into work.
double EstimateSpmmTile(const spmmd_cuda_layer& layer, const Call& call);

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_SPMM_TILE_H_
