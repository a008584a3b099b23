// Small kernels around a matmul that cannot do it itself: activations into the weights' dtype and alignment, bias and
// activation behind cublasLt.
#ifndef SPMMD_KERNELS_CUDA_ELEMENTWISE_H_
#define SPMMD_KERNELS_CUDA_ELEMENTWISE_H_

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

// to[n][pitch] (fp16 or bf16) = x[n][k] rounded to nearest even, columns k..pitch-1 zero. pitch is a multiple of 8 and
// `to` 16-byte aligned.
Status LaunchConvertActivations(const Call& call, int64_t k, int32_t to_dtype, int64_t pitch, void* to,
                                cudaStream_t stream);

// y = activation(accumulators[n][m] + bias), accumulators fp32 and contiguous.
Status LaunchEpilogue(const Call& call, int64_t m, const float* accumulators, cudaStream_t stream);

// A step of a program that is no matmul. INVALID_ARGUMENT naming the field.
Status LaunchElementwise(const spmmd_cuda_elementwise_call& call, cudaStream_t stream);

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_ELEMENTWISE_H_
