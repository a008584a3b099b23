#include "server/device/dense_shadows.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "kernels/base/status_macros.h"

namespace spmmd::server {

DenseShadows::DenseShadows(CudaContext* context, MemoryBudget* budget, Options options)
    : context_(context), budget_(budget), options_(options) {
  reclaimer_ = budget_->AddReclaimer(kReclaimCopies, [this](uint64_t bytes) { return Reclaim(bytes); });
}

DenseShadows::~DenseShadows() {
  budget_->RemoveReclaimer(reclaimer_);
  absl::MutexLock lock(&mutex_);
  for (auto& [layer, shadow] : shadows_) Free(std::move(shadow));
}

bool DenseShadows::With(uint64_t layer, absl::FunctionRef<absl::Status(const spmmd_cuda_layer*, uint64_t)> use,
                        absl::Status* status) {
  absl::MutexLock lock(&mutex_);
  const auto found = shadows_.find(layer);
  if (found == shadows_.end()) return false;
  *status = use(found->second.layer, found->second.serial);
  return true;
}

absl::Status DenseShadows::Want(uint64_t layer, const spmmd_cuda_layer* handle, spmmd_cuda_stream stream) {
  if (!options_.enabled) return absl::OkStatus();
  {
    absl::MutexLock lock(&mutex_);
    if (shadows_.contains(layer) || ++wanted_[layer] < kWantedRuns || absl::Now() < not_before_) {
      return absl::OkStatus();
    }
  }
  const CudaLibrary& cuda = context_->cuda();
  uint64_t bytes = 0;
  if (cuda.layer_unpacked_bytes(handle, &bytes) != SPMMD_CUDA_OK) return absl::OkStatus();
  if (budget_->free() < bytes + budget_->limit() / kSpareShare) return absl::OkStatus();
  absl::StatusOr<MemoryBudget::Reservation> memory = budget_->ReserveSpare(MemoryKind::kShadow, bytes);
  if (!memory.ok()) return absl::OkStatus();
  Shadow shadow;
  shadow.memory = *std::move(memory);
  const absl::Status made = context_->Check(cuda.layer_unpack(handle, stream, &shadow.layer));
  absl::MutexLock lock(&mutex_);
  if (!made.ok()) {
    // Another process may have taken the memory. Not at every run.
    not_before_ = absl::Now() + options_.quiet;
    return context_->lost() ? made : absl::OkStatus();
  }
  shadow.serial = next_serial_++;
  shadow.last_use = ++clock_;
  shadows_.emplace(layer, std::move(shadow));
  return absl::OkStatus();
}

bool DenseShadows::Hold(absl::Span<const uint64_t> layers) {
  absl::MutexLock lock(&mutex_);
  if (!std::all_of(layers.begin(), layers.end(), [&](uint64_t layer) {
        mutex_.AssertHeld();
        return shadows_.contains(layer);
      })) {
    return false;
  }
  for (const uint64_t layer : layers) {
    Shadow& shadow = shadows_.find(layer)->second;
    shadow.held = true;
    shadow.last_use = ++clock_;
  }
  holding_ = true;
  return true;
}

void DenseShadows::Release() {
  absl::MutexLock lock(&mutex_);
  if (!holding_) return;
  holding_ = false;
  for (auto& [layer, shadow] : shadows_) shadow.held = false;
  released_.SignalAll();
}

void DenseShadows::Forget(uint64_t layer) {
  Shadow shadow;
  {
    absl::MutexLock lock(&mutex_);
    wanted_.erase(layer);
    const auto found = shadows_.find(layer);
    if (found == shadows_.end()) return;
    shadow = std::move(found->second);
    shadows_.erase(found);
  }
  Free(std::move(shadow));
}

uint64_t DenseShadows::BytesOf(uint64_t layer) const {
  absl::MutexLock lock(&mutex_);
  const auto found = shadows_.find(layer);
  return found == shadows_.end() ? 0 : found->second.memory.bytes();
}

uint64_t DenseShadows::Reclaim(uint64_t bytes) {
  uint64_t freed = 0;
  while (freed < bytes) {
    Shadow shadow;
    {
      absl::MutexLock lock(&mutex_);
      not_before_ = absl::Now() + options_.quiet;
      auto oldest = shadows_.end();
      for (auto it = shadows_.begin(); it != shadows_.end(); ++it) {
        if (!it->second.held && (oldest == shadows_.end() || it->second.last_use < oldest->second.last_use)) {
          oldest = it;
        }
      }
      if (oldest == shadows_.end()) {
        if (shadows_.empty()) break;
        while (holding_) released_.Wait(&mutex_);
        continue;
      }
      wanted_.erase(oldest->first);
      shadow = std::move(oldest->second);
      shadows_.erase(oldest);
    }
    freed += shadow.memory.bytes();
    Free(std::move(shadow));
  }
  return freed;
}

void DenseShadows::Free(Shadow shadow) {
  context_->cuda().layer_free(shadow.layer);
  shadow.memory.Release();
}

}  // namespace spmmd::server
