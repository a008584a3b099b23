// For code that is the same on the host and on the device and that a plain C++ compiler must be able to test.
#ifndef SPMMD_KERNELS_CUDA_HOST_DEVICE_H_
#define SPMMD_KERNELS_CUDA_HOST_DEVICE_H_

#include <cstdint>

#ifdef __CUDACC__
#define SPMMD_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SPMMD_HOST_DEVICE inline
#endif

namespace spmmd::cuda {

// std::min and std::max are not for device code, CUDA's min and max not for the host.
SPMMD_HOST_DEVICE int Min(int a, int b) {
#ifdef __CUDA_ARCH__
  return min(a, b);
#else
  return a < b ? a : b;
#endif
}
SPMMD_HOST_DEVICE int Max(int a, int b) {
#ifdef __CUDA_ARCH__
  return max(a, b);
#else
  return a > b ? a : b;
#endif
}

struct IntPair {
  int x;
  int y;
};

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_HOST_DEVICE_H_
