// Names of kernels with the instruction set that runs them, for metrics and GetLayer.
#ifndef SPMMD_KERNELS_CPU_KERNEL_NAMES_H_
#define SPMMD_KERNELS_CPU_KERNEL_NAMES_H_

#include <cstdint>
#include <string_view>

namespace spmmd::cpu {

enum class Kernel : uint8_t {
  kBitmapSpmv,
  kBitmapSpmm,
  kBitmapSpmspv,
  // With Decode::kBf16Dot.
  kBitmapSpmvDot,
  kBitmapSpmmDot,
  kBitmapSpmspvDot,
  kDenseDot,
  kDenseSgemm
};

// E.g. "bitmap_spmv_avx3_dl", "bitmap_spmv_avx3_dl_bf16", "dense_sgemm_openblas": static storage.
std::string_view KernelName(Kernel kernel);

}  // namespace spmmd::cpu

#endif  // SPMMD_KERNELS_CPU_KERNEL_NAMES_H_
