// Y = activation(W * x + bias), or y += W * x, for an activation vector with zeros, on a COLUMN_PIECE layer.
#ifndef SPMMD_KERNELS_CUDA_COLUMN_PIECE_SPMSPV_H_
#define SPMMD_KERNELS_CUDA_COLUMN_PIECE_SPMSPV_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

Status ValidateColumnPiece(const LayerDesc& desc);

// Dense activations, of which |x| <= x_threshold are skipped.
extern const Kernel kColumnPieceSpmspv;
// Activations given by their indices and values.
extern const Kernel kColumnPieceSpmspvIndexed;

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_COLUMN_PIECE_SPMSPV_H_
