#include "server/device/cuda_context.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "server/errors.h"

namespace spmmd::server {

CudaContext::CudaContext(std::shared_ptr<const CudaLibrary> library, int index)
    : library_(std::move(library)), id_(absl::StrCat("cuda:", index)) {}

absl::StatusOr<std::unique_ptr<CudaContext>> CudaContext::Open(std::shared_ptr<const CudaLibrary> library, int index) {
  std::unique_ptr<CudaContext> context(new CudaContext(std::move(library), index));
  const CudaLibrary& cuda = context->cuda();
  SPMMD_RETURN_IF_ERROR(cuda.ToStatus(cuda.get_device_info(index, &context->info_)));
  SPMMD_RETURN_IF_ERROR(cuda.ToStatus(cuda.device_open(index, &context->device_)));
  return context;
}

CudaContext::~CudaContext() { library_->device_close(device_); }

absl::Status CudaContext::Check(spmmd_cuda_status code) {
  if (code == SPMMD_CUDA_OK) return absl::OkStatus();
  absl::Status status = library_->ToStatus(code);
  if (lost()) return LostError();
  if (code == SPMMD_CUDA_RESOURCE_EXHAUSTED) {
    return MakeError(absl::StatusCode::kResourceExhausted, reason::kDeviceMemory,
                     absl::StrCat("device ", id_, ": ", status.message()), {{"device", id_}});
  }
  if (code != SPMMD_CUDA_INTERNAL && code != SPMMD_CUDA_UNAVAILABLE) return status;
  if (library_->memory_info(device_, nullptr, nullptr) != SPMMD_CUDA_OK) {
    MarkLost(std::string(status.message()));
    return LostError();
  }
  return absl::InternalError(absl::StrCat("device ", id_, ": ", status.message()));
}

absl::Status CudaContext::Probe() {
  if (lost()) return LostError();
  return Check(library_->memory_info(device_, nullptr, nullptr));
}

absl::Status CudaContext::LostError() const {
  absl::MutexLock lock(&mutex_);
  return MakeError(absl::StatusCode::kUnavailable, reason::kDeviceLost,
                   absl::StrCat("device ", id_, " is lost: ", lost_message_), {{"device", id_}});
}

void CudaContext::MarkLost(const std::string& message) {
  {
    absl::MutexLock lock(&mutex_);
    if (lost()) return;
    lost_message_ = message;
    lost_.store(true, std::memory_order_release);
  }
  absl::MutexLock lock(&callback_mutex_);
  if (on_lost_ != nullptr) std::exchange(on_lost_, nullptr)();
}

void CudaContext::OnLost(std::function<void()> callback) {
  absl::MutexLock lock(&callback_mutex_);
  if (callback != nullptr && lost()) {
    callback();
    return;
  }
  on_lost_ = std::move(callback);
}

CudaMemory& CudaMemory::operator=(CudaMemory&& other) noexcept {
  if (this != &other) {
    Free();
    context_ = std::exchange(other.context_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    reservation_ = std::move(other.reservation_);
  }
  return *this;
}

absl::StatusOr<CudaMemory> CudaMemory::Allocate(CudaContext* context, MemoryBudget* budget, MemoryKind kind,
                                                uint64_t bytes) {
  CudaMemory memory;
  if (budget != nullptr) {
    SPMMD_ASSIGN_OR_RETURN(memory.reservation_, budget->Reserve(kind, bytes));
  }
  void* data = nullptr;
  SPMMD_RETURN_IF_ERROR(context->Check(context->cuda().malloc(context->device(), bytes, &data)));
  memory.context_ = context;
  memory.data_ = static_cast<std::byte*>(data);
  return memory;
}

void CudaMemory::Free() {
  // On a lost device it fails, and the memory is gone with the device.
  if (data_ != nullptr) context_->cuda().free(context_->device(), data_);
  data_ = nullptr;
  reservation_.Release();
}

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
  std::swap(context_, other.context_);
  std::swap(data_, other.data_);
  return *this;
}

PinnedMemory::~PinnedMemory() {
  if (data_ != nullptr) context_->cuda().host_free(context_->device(), data_);
}

absl::StatusOr<PinnedMemory> PinnedMemory::Allocate(CudaContext* context, uint64_t bytes) {
  PinnedMemory memory;
  void* data = nullptr;
  SPMMD_RETURN_IF_ERROR(context->Check(context->cuda().host_malloc(context->device(), bytes, &data)));
  memory.context_ = context;
  memory.data_ = static_cast<std::byte*>(data);
  return memory;
}

}  // namespace spmmd::server
