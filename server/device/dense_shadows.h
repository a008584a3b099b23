// Dense copies ("shadows") of sparse layers on one GPU, in memory that nothing else needs: at large batch widths DENSE
// is faster than any sparse kernel. A shadow is made by unpacking on the GPU once a layer has been wanted dense
// repeatedly, and freed as soon as a reservation does not fit without its memory.
//
// Any thread may reclaim, at any time: a run that uses shadows holds them from before its first launch until it has
// ended, and reclaiming waits for it. A run reserves no memory while it holds any, so that the two cannot wait for each
// other.
#ifndef SPMMD_SERVER_DEVICE_DENSE_SHADOWS_H_
#define SPMMD_SERVER_DEVICE_DENSE_SHADOWS_H_

#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/device/cuda_context.h"
#include "server/device/memory_budget.h"

namespace spmmd::server {

class DenseShadows {
 public:
  struct Options {
    bool enabled = true;
    // Since memory was last reclaimed, before another shadow is made.
    absl::Duration quiet = absl::Seconds(10);
  };
  // Runs of a layer that would have been faster dense, before it gets a shadow.
  static constexpr int kWantedRuns = 2;
  // A shadow leaves at least this share of the budget free.
  static constexpr uint64_t kSpareShare = 16;

  DenseShadows(CudaContext* context, MemoryBudget* budget, Options options);
  // Nothing may be pending on the device.
  ~DenseShadows();
  DenseShadows(const DenseShadows&) = delete;
  DenseShadows& operator=(const DenseShadows&) = delete;

  bool enabled() const { return options_.enabled; }
  // A layer is named by the serial number of its CudaLayer.
  //
  // Calls `use` with the layer's shadow and the shadow's own serial number; false when it has none. The shadow is not
  // freed while `use` runs, which must neither reserve memory nor call back.
  bool With(uint64_t layer, absl::FunctionRef<absl::Status(const spmmd_cuda_layer*, uint64_t)> use,
            absl::Status* status);
  // A run would have been faster with a shadow: makes one, with work on `stream`, when it is worth it and there is
  // room. An error only when the device is lost. On the thread that runs programs, while it holds nothing.
  absl::Status Want(uint64_t layer, const spmmd_cuda_layer* handle, spmmd_cuda_stream stream);
  // Keeps the shadows of these layers until Release; false, and nothing held, when one of them is gone.
  bool Hold(absl::Span<const uint64_t> layers);
  void Release();
  // The layer is going, nothing uses it: frees its shadow.
  void Forget(uint64_t layer);
  // Device memory of the layer's shadow; 0 when it has none.
  uint64_t BytesOf(uint64_t layer) const;

 private:
  struct Shadow {
    spmmd_cuda_layer* layer = nullptr;
    uint64_t serial = 0;
    uint64_t last_use = 0;
    bool held = false;
    MemoryBudget::Reservation memory;
  };

  // Frees shadows, those that were used last going last, until `bytes` are free; waits for a run that holds some.
  uint64_t Reclaim(uint64_t bytes);
  void Free(Shadow shadow);

  CudaContext* const context_;
  MemoryBudget* const budget_;
  const Options options_;
  int64_t reclaimer_ = 0;
  mutable absl::Mutex mutex_;
  absl::CondVar released_;
  bool holding_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_map<uint64_t, Shadow> shadows_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, int> wanted_ ABSL_GUARDED_BY(mutex_);
  uint64_t clock_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_serial_ ABSL_GUARDED_BY(mutex_) = 1;
  absl::Time not_before_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_DENSE_SHADOWS_H_
