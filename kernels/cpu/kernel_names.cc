#include "kernels/cpu/kernel_names.h"

#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/kernel_names.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// clang-format off
#undef SPMMD_ISA
#if HWY_TARGET == HWY_AVX3_DL
#define SPMMD_ISA "_avx3_dl"
#elif HWY_TARGET == HWY_AVX3
#define SPMMD_ISA "_avx3"
#elif HWY_TARGET == HWY_AVX2
#define SPMMD_ISA "_avx2"
#elif HWY_TARGET == HWY_SSE4
#define SPMMD_ISA "_sse4"
#elif HWY_TARGET == HWY_SSSE3
#define SPMMD_ISA "_ssse3"
#else
#define SPMMD_ISA "_scalar"
#endif
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace spmmd::cpu {
namespace HWY_NAMESPACE {
namespace {

std::string_view KernelNameImpl(Kernel kernel) {
  switch (kernel) {
    case Kernel::kBitmapSpmv:
      return "bitmap_spmv" SPMMD_ISA;
    case Kernel::kBitmapSpmm:
      return "bitmap_spmm" SPMMD_ISA;
    case Kernel::kBitmapSpmspv:
      return "bitmap_spmspv" SPMMD_ISA;
    case Kernel::kBitmapSpmvDot:
      return "bitmap_spmv" SPMMD_ISA "_bf16";
    case Kernel::kBitmapSpmmDot:
      return "bitmap_spmm" SPMMD_ISA "_bf16";
    case Kernel::kBitmapSpmspvDot:
      return "bitmap_spmspv" SPMMD_ISA "_bf16";
    case Kernel::kDenseDot:
      return "dense_dot" SPMMD_ISA;
    case Kernel::kDenseSgemm:
      return "dense_sgemm_openblas";
  }
  return "unknown";
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace spmmd::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spmmd::cpu {
namespace {
HWY_EXPORT(KernelNameImpl);
}  // namespace

std::string_view KernelName(Kernel kernel) { return HWY_DYNAMIC_DISPATCH(KernelNameImpl)(kernel); }
}  // namespace spmmd::cpu
#endif  // HWY_ONCE
