// The read ceiling: a kernel that does nothing but read.
#ifndef SPMMD_KERNELS_CUDA_READ_PROBE_H_
#define SPMMD_KERNELS_CUDA_READ_PROBE_H_

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

// Reads `bytes` (rounded down to whole 16 KiB pieces) once; through the bulk copy engine where there is one.
Status LaunchReadProbe(const spmmd_cuda_device& device, const void* pointer, uint64_t bytes, cudaStream_t stream);

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_READ_PROBE_H_
