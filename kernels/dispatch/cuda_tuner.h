// Measures a shape of layer on a GPU: how long its BITMAP_GPU kernels and cublasLt take for every number of tokens of
// kTunedTokens. Random weights of the shape stand for the layer, so that nothing of it need be there yet.
#ifndef SPMMD_KERNELS_DISPATCH_CUDA_TUNER_H_
#define SPMMD_KERNELS_DISPATCH_CUDA_TUNER_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/dispatch/cuda_library.h"
#include "kernels/dispatch/cuda_tuning.h"

namespace spmmd {

class CudaTuner {
 public:
  // Runs a piece of work, a few milliseconds long, during which nothing else should use the GPU.
  using Exclusively = std::function<void(const std::function<void()>& work)>;

  // `device` must outlive the tuner.
  CudaTuner(std::shared_ptr<const CudaLibrary> cuda, spmmd_cuda_device* device, Exclusively exclusively);

  // Device memory that Measure takes, at most; given back when it returns.
  static uint64_t MemoryBytes(const CudaShape& shape);
  // Times for the shape; `sparse` false leaves the BITMAP_GPU kernels out. Takes 30 to 300 ms. RESOURCE_EXHAUSTED
  // without MemoryBytes(); INTERNAL or UNAVAILABLE when the GPU fails.
  absl::StatusOr<CudaWidths> Measure(const CudaShape& shape, bool sparse) const;

 private:
  const std::shared_ptr<const CudaLibrary> cuda_;
  spmmd_cuda_device* const device_;
  const Exclusively exclusively_;
};

}  // namespace spmmd

#endif  // SPMMD_KERNELS_DISPATCH_CUDA_TUNER_H_
