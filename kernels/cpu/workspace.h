// Scratch memory of a calling thread, kept between calls: a decode step makes thousands of short calls, which should
// not pay for allocation and page faults.
#ifndef SPMMD_KERNELS_CPU_WORKSPACE_H_
#define SPMMD_KERNELS_CPU_WORKSPACE_H_

#include <cstddef>
#include <cstdlib>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace spmmd::cpu {

class Workspace {
 public:
  // `count` uninitialised floats, 64-byte aligned, valid until the next call on the same object. RESOURCE_EXHAUSTED
  // when the host has not enough memory.
  absl::StatusOr<float*> Floats(size_t count) {
    if (count > capacity_) {
      constexpr size_t kAlignment = 64;
      const size_t bytes = (count * sizeof(float) + kAlignment - 1) / kAlignment * kAlignment;
      floats_.reset();
      capacity_ = 0;
      floats_.reset(static_cast<float*>(std::aligned_alloc(kAlignment, bytes)));
      if (floats_ == nullptr) {
        return absl::ResourceExhaustedError(
            absl::StrCat("host memory: cannot allocate ", bytes, " bytes of workspace"));
      }
      capacity_ = bytes / sizeof(float);
    }
    return floats_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> floats_;
  size_t capacity_ = 0;
};

}  // namespace spmmd::cpu

#endif  // SPMMD_KERNELS_CPU_WORKSPACE_H_
