// A GPU as a device: layers in its memory, kernels from libspmmd_cuda.so.
#ifndef SPMMD_SERVER_DEVICE_CUDA_DEVICE_H_
#define SPMMD_SERVER_DEVICE_CUDA_DEVICE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/dispatch/cuda_library.h"
#include "server/device/cuda_context.h"
#include "server/device/device.h"
#include "server/shm/region.h"

namespace spmmd::server {

class CudaDispatch;
class CudaRunner;
class DenseShadows;

class CudaDevice final : public Device {
 public:
  // How often the monitor asks the device whether it is still there.
  static constexpr absl::Duration kProbeInterval = absl::Milliseconds(250);

  // GPU `index` in the driver's order. `metrics` must outlive the device. UNIMPLEMENTED when the library has no kernels
  // for it, RESOURCE_EXHAUSTED when not even the staging buffers fit.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Open(std::shared_ptr<const CudaLibrary> library, int index,
                                                          const DeviceOptions& options, Metrics* metrics);
  ~CudaDevice() override;

  bool healthy() const override { return !context_->lost(); }
  void OnLost(std::function<void()> callback) override { context_->OnLost(std::move(callback)); }

  bool CanExecute(Format format) const override;
  Format Layout(Format format) const override;
  bool CanStore(DType dtype) const override { return dtype != DType::kF32; }
  FormatChoice ChooseFormat(const FormatQuery& query) const override;
  void Tune(DType dtype, const ResidentLayer& layer) override;
  // With what padding masks without structure cost: a layer whose nonzeros crowd in few columns can take more.
  uint64_t EstimateBytes(Format format, DType dtype, int64_t m, int64_t k, int64_t max_nnz) const override;
  absl::StatusOr<std::unique_ptr<ResidentLayer>> Load(PackedLayer packed, std::vector<float> bias,
                                                      MemoryBudget::Reservation weights) override;
  absl::StatusOr<StoredLayer> Save(const ResidentLayer& layer) const override;
  absl::StatusOr<DenseMatrix> ReadBack(const ResidentLayer& layer) const override;
  // Memory of this GPU that another process has exported (a CUDA IPC handle); the device must outlive it.
  // INVALID_ARGUMENT naming cuda_ipc for a bad handle.
  absl::StatusOr<std::unique_ptr<DeviceMapping>> OpenMemory(const std::string& handle);

 protected:
  absl::Status Run(absl::Span<Job* const> jobs) override;

 private:
  CudaDevice(std::unique_ptr<CudaContext> context, const DeviceOptions& options, Metrics* metrics);
  absl::Status Init(const std::shared_ptr<const CudaLibrary>& library, const DeviceOptions& options);
  // Reads memory over and over; bytes a second, or 0 when there is no room for it.
  absl::StatusOr<double> MeasureReadBandwidth();
  void Monitor();

  const std::shared_ptr<CudaContext> context_;
  std::unique_ptr<CudaDispatch> dispatch_;
  std::unique_ptr<DenseShadows> shadows_;
  std::unique_ptr<CudaRunner> runner_;
  bool started_ = false;

  absl::Mutex mutex_;
  absl::CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread monitor_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_CUDA_DEVICE_H_
