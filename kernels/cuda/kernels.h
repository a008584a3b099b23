// The table of kernels and formats, the checks that hold for every call, and the automatic choice.
#ifndef SPMMD_KERNELS_CUDA_KERNELS_H_
#define SPMMD_KERNELS_CUDA_KERNELS_H_

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

// Tokens of one call. Keeps n * M and n * K inside int64 with room to spare, and launch dimensions in range.
inline constexpr int64_t kMaxTokens = int64_t{1} << 20;
// Elements between rows of x and y: the last row's address must not wrap around.
inline constexpr int64_t kMaxStride = int64_t{1} << 40;

int32_t KernelCount();
// Null when out of range.
const Kernel* KernelAt(int32_t index);
const FormatHooks* FindFormat(int32_t format);
// UNIMPLEMENTED, saying why, for a format that no kernel of the device reads.
Status CheckFormat(const spmmd_cuda_device& device, int32_t format);

// Shapes, dtypes, strides and alignments that hold for every kernel. Null pointers pass: only a launch needs them.
Status CheckCall(const spmmd_cuda_layer& layer, const Call& call);
// `call` has passed CheckCall.
Status CheckKernel(const spmmd_cuda_layer& layer, const Kernel& kernel, const Call& call);
Status SelectKernel(const spmmd_cuda_layer& layer, const Call& call, int32_t* index);

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_KERNELS_H_
