// One GPU through libspmmd_cuda.so: the library's functions bound to a device, its errors as statuses, and the memory
// that the server takes there.
//
// A CUDA error that comes back from every later call ("sticky": an illegal address, an ECC error, a GPU that fell off
// the bus) means that the process has lost the device for good. Check() finds out which kind an error is.
#ifndef SPMMD_SERVER_DEVICE_CUDA_CONTEXT_H_
#define SPMMD_SERVER_DEVICE_CUDA_CONTEXT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/dispatch/cuda_library.h"
#include "server/device/memory_budget.h"

namespace spmmd::server {

class CudaContext {
 public:
  // UNIMPLEMENTED when the library has no kernels for the GPU.
  static absl::StatusOr<std::unique_ptr<CudaContext>> Open(std::shared_ptr<const CudaLibrary> library, int index);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  const CudaLibrary& cuda() const { return *library_; }
  spmmd_cuda_device* device() const { return device_; }
  const spmmd_cuda_device_info& info() const { return info_; }
  const std::string& id() const { return id_; }  // "cuda:0"

  // The status of a library call that this thread has just made: UNAVAILABLE with DEVICE_LOST when the device is lost,
  // INTERNAL for an error that it survived.
  absl::Status Check(spmmd_cuda_status code);
  // Asks the device for something trivial; marks it lost when even that fails.
  absl::Status Probe();
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  absl::Status LostError() const;
  // `callback` runs once, on the thread that finds the device lost; at once when it is lost already. Null: nobody any
  // more, and the one set before is not running when this returns.
  void OnLost(std::function<void()> callback);

 private:
  CudaContext(std::shared_ptr<const CudaLibrary> library, int index);
  void MarkLost(const std::string& message);

  const std::shared_ptr<const CudaLibrary> library_;
  const std::string id_;
  spmmd_cuda_device* device_ = nullptr;
  spmmd_cuda_device_info info_ = {};
  std::atomic<bool> lost_{false};
  mutable absl::Mutex mutex_;
  std::string lost_message_ ABSL_GUARDED_BY(mutex_);
  absl::Mutex callback_mutex_;  // held while the callback runs
  std::function<void()> on_lost_ ABSL_GUARDED_BY(callback_mutex_);
};

// Device memory with the reservation that it is under.
class CudaMemory {
 public:
  CudaMemory() = default;
  CudaMemory(CudaMemory&& other) noexcept { *this = std::move(other); }
  CudaMemory& operator=(CudaMemory&& other) noexcept;
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  ~CudaMemory() { Free(); }

  // RESOURCE_EXHAUSTED when the budget or the device has no room. Without a budget the bytes are under a reservation of
  // the caller's.
  static absl::StatusOr<CudaMemory> Allocate(CudaContext* context, MemoryBudget* budget, MemoryKind kind,
                                             uint64_t bytes);
  // Nothing that uses the memory may be pending.
  void Free();
  std::byte* data() const { return data_; }
  uint64_t bytes() const { return reservation_.bytes(); }

 private:
  CudaContext* context_ = nullptr;
  std::byte* data_ = nullptr;
  MemoryBudget::Reservation reservation_;
};

// Page-locked host memory.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  PinnedMemory(PinnedMemory&& other) noexcept { *this = std::move(other); }
  PinnedMemory& operator=(PinnedMemory&& other) noexcept;
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  ~PinnedMemory();

  static absl::StatusOr<PinnedMemory> Allocate(CudaContext* context, uint64_t bytes);
  std::byte* data() const { return data_; }

 private:
  CudaContext* context_ = nullptr;
  std::byte* data_ = nullptr;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_CUDA_CONTEXT_H_
