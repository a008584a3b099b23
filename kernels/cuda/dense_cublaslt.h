// DENSE on a GPU: cublasLt, the baseline of every other kernel and the fallback for what is not sparse enough.
#ifndef SPMMD_KERNELS_CUDA_DENSE_CUBLASLT_H_
#define SPMMD_KERNELS_CUDA_DENSE_CUBLASLT_H_

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

// Times the candidates of cublasLt's heuristic on this call's operands and keeps the fastest for calls of its shape.
// Synchronises.
Status TuneDense(const spmmd_cuda_layer& layer, const Call& call, cudaStream_t stream);

// Candidate `index` of the heuristic for calls of this shape; NOT_FOUND past the last one.
Status UseDenseCandidate(const spmmd_cuda_layer& layer, const Call& call, int index);

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_DENSE_CUBLASLT_H_
