#include <string>

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // a sticky error stays; a per-call one must not surface in the next call
  std::string message = std::string(what) + ": " + cudaGetErrorString(error);
  switch (error) {
    case cudaErrorMemoryAllocation:
      return {SPMMD_CUDA_RESOURCE_EXHAUSTED, std::move(message)};
    case cudaErrorInvalidValue:
    case cudaErrorInvalidDevice:
      return InvalidArgument(std::move(message));
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorDevicesUnavailable:
      return {SPMMD_CUDA_UNAVAILABLE, std::move(message)};
    default:
      return {SPMMD_CUDA_INTERNAL, std::move(message)};
  }
}

Status FromCublas(cublasStatus_t error, const char* what) {
  if (error == CUBLAS_STATUS_SUCCESS) return {};
  std::string message = std::string(what) + ": " + cublasLtGetStatusString(error);
  switch (error) {
    case CUBLAS_STATUS_ALLOC_FAILED:
      return {SPMMD_CUDA_RESOURCE_EXHAUSTED, std::move(message)};
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return Unimplemented(std::move(message));
    default:
      return {SPMMD_CUDA_INTERNAL, std::move(message)};
  }
}

ScopedDevice::ScopedDevice(int index) {
  int current = -1;
  status_ = FromCuda(cudaGetDevice(&current), "cudaGetDevice");
  if (!status_.ok() || current == index) return;
  status_ = FromCuda(cudaSetDevice(index), "cudaSetDevice");
  if (status_.ok()) previous_ = current;
}

ScopedDevice::~ScopedDevice() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace spmmd::cuda
