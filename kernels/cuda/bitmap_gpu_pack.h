// Packing BITMAP_GPU where the weights already are.
#ifndef SPMMD_KERNELS_CUDA_BITMAP_GPU_PACK_H_
#define SPMMD_KERNELS_CUDA_BITMAP_GPU_PACK_H_

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

// spmmd_cuda_pack_bitmap_gpu, with the device current and no pointer null.
Status PackBitmapGpu(spmmd_cuda_device* device, const spmmd_cuda_dense_weights& weights, cudaStream_t stream,
                     spmmd_cuda_packed_info* info, spmmd_cuda_layer** layer);

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_BITMAP_GPU_PACK_H_
