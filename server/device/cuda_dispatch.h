// What a GPU's AUTO goes by: times measured on that GPU, kept between starts, and what follows from them for a layer's
// format. Which kernel then runs at which number of tokens is the runner's, from the same table.
#ifndef SPMMD_SERVER_DEVICE_CUDA_DISPATCH_H_
#define SPMMD_SERVER_DEVICE_CUDA_DISPATCH_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/synchronization/mutex.h"
#include "kernels/dispatch/cuda_tuner.h"
#include "kernels/dispatch/cuda_tuning.h"
#include "server/device/cuda_context.h"
#include "server/device/device.h"
#include "server/device/memory_budget.h"

namespace spmmd::server {

class CudaDispatch {
 public:
  // Upper bound of the device bytes of a layer in a format.
  using Bytes = std::function<uint64_t(Format)>;

  // Reads what was measured before. With `tune` false nothing is measured, and what is not known is guessed.
  // `exclusively`: as CudaTuner has it.
  CudaDispatch(std::shared_ptr<const CudaLibrary> library, CudaContext* context, MemoryBudget* budget,
               const DeviceOptions& options, CudaTuner::Exclusively exclusively);

  const CudaTuningTable& table() const { return table_; }

  // The format for a layer, and why. `bandwidth`: bytes a second that the GPU reads, 0 if not known.
  FormatChoice Choose(const FormatQuery& query, double bandwidth, const Bytes& bytes);
  // The times of a shape; measured now when they are not known (or `again`) and the device has memory to spare for it.
  // Null when they stay unknown. Not on a thread that runs programs.
  std::shared_ptr<const CudaWidths> Times(const CudaShape& shape, bool sparse, bool again = false);

 private:
  const std::shared_ptr<const CudaLibrary> library_;
  CudaContext* const context_;
  MemoryBudget* const budget_;
  const bool tune_;
  const bool shadows_;
  const std::string file_;  // empty: none
  CudaTuningTable table_;
  CudaTuner tuner_;
  absl::Mutex measuring_;  // one shape at a time
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_CUDA_DISPATCH_H_
