// The CPU as a device: layers stay in host memory, kernels come from kernels/cpu.
#ifndef SPMMD_SERVER_DEVICE_CPU_DEVICE_H_
#define SPMMD_SERVER_DEVICE_CPU_DEVICE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/base/thread_pool.h"
#include "server/device/device.h"

namespace spmmd::server {

class CpuRunner;

class CpuDevice : public Device {
 public:
  // `metrics` must outlive the device. Kernels run on `pool`, the process-wide one by default. A server has one; tests
  // make several, "cpu:0", "cpu:1" and so on.
  CpuDevice(const DeviceOptions& options, Metrics* metrics, ThreadPool* pool = nullptr, int index = 0);
  ~CpuDevice() override;

  bool CanExecute(Format format) const override;
  FormatChoice ChooseFormat(const FormatQuery& query) const override;
  uint64_t EstimateBytes(Format format, DType dtype, int64_t m, int64_t k, int64_t max_nnz) const override;
  absl::StatusOr<std::unique_ptr<ResidentLayer>> Load(PackedLayer packed, std::vector<float> bias,
                                                      MemoryBudget::Reservation weights) override;
  bool in_host_memory() const override { return true; }
  absl::StatusOr<StoredLayer> Save(const ResidentLayer& layer) const override;
  absl::StatusOr<DenseMatrix> ReadBack(const ResidentLayer& layer) const override;

 protected:
  absl::Status Run(absl::Span<Job* const> jobs) override;

 private:
  ThreadPool& pool_;
  std::unique_ptr<CpuRunner> runner_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_CPU_DEVICE_H_
