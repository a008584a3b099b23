// Runs planned programs with the CPU kernels: values in a workspace that is kept between runs, one run at a time.
#ifndef SPMMD_SERVER_DEVICE_CPU_RUNNER_H_
#define SPMMD_SERVER_DEVICE_CPU_RUNNER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/buffer.h"
#include "kernels/base/thread_pool.h"
#include "kernels/cpu/matmul.h"
#include "kernels/format/packed_layer.h"
#include "server/device/device.h"
#include "server/device/memory_budget.h"
#include "server/device/thresholded_rows.h"
#include "server/engine/plan.h"
#include "server/metrics/metrics.h"

namespace spmmd::server {

class CpuLayer : public ResidentLayer {
 public:
  CpuLayer(PackedLayer packed, std::vector<float> bias, MemoryBudget::Reservation weights)
      : ResidentLayer(packed, std::move(weights)), packed_(std::move(packed)), bias_(std::move(bias)) {}

  const PackedLayer& packed() const { return packed_; }
  const std::vector<float>& bias() const { return bias_; }

 private:
  PackedLayer packed_;
  std::vector<float> bias_;
};

// fp32 buffers for intermediate values, reused from step to step and from run to run, accounted as workspace. Between
// runs it keeps at most kRetainedBytes.
class Workspace {
 public:
  static constexpr uint64_t kRetainedBytes = uint64_t{64} << 20;

  explicit Workspace(MemoryBudget* budget) : budget_(budget) {}

  // A block of at least `bytes`, uninitialised; RESOURCE_EXHAUSTED when the budget has no room. Its index stays valid
  // until Give().
  absl::StatusOr<int> Take(uint64_t bytes);
  void Give(int block) { blocks_[static_cast<size_t>(block)].taken = false; }
  std::byte* data(int block) { return blocks_[static_cast<size_t>(block)].buffer.mutable_data(); }
  // Gives all blocks back and frees what is too much to keep.
  void EndRun();

 private:
  struct Block {
    Buffer buffer;
    MemoryBudget::Reservation reservation;
    bool taken = false;
  };

  MemoryBudget* budget_;
  std::vector<Block> blocks_;
};

class CpuRunner {
 public:
  CpuRunner(std::string device, MemoryBudget* budget, ThreadPool* pool, Metrics* metrics)
      : device_(std::move(device)), pool_(*pool), metrics_(metrics), workspace_(budget), thresholded_(budget) {}

  // Not thread-safe: the executor runs one batch at a time.
  absl::Status Run(absl::Span<Job* const> jobs);

 private:
  struct Value {
    DenseView dense;                     // when sparse is null
    const SparseRows* sparse = nullptr;  // a sparse program input
    int block = -1;                      // of the workspace, or -1: memory of the request or the response
  };

  // Several jobs as one: gathers their inputs, runs, and hands out the rows of the outputs.
  absl::Status RunJoined(absl::Span<Job* const> jobs);
  absl::Status RunSteps(Job& job);
  absl::Status RunMatmul(const PlanStep& step, const Value& x, const MutableDenseView& y, Job& job);
  // Row by row through SpMspV.
  absl::Status RunSparseRows(const CpuLayer& layer, const Epilogue& epilogue, const SparseRows& x,
                             const MutableDenseView& y, Job& job);
  absl::Status Launch(const CpuLayer& layer, const DenseView& x, const Epilogue& epilogue, const MutableDenseView& y,
                      Job& job);
  void Record(const cpu::LaunchInfo& info, const char* format, absl::Duration took, Job& job);

  const std::string device_;
  ThreadPool& pool_;
  Metrics* const metrics_;
  Workspace workspace_;
  // Kernel names are static strings: their address is their identity.
  absl::flat_hash_map<std::pair<const char*, const char*>, KernelMetrics*> kernel_metrics_;
  ThresholdedRows thresholded_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_CPU_RUNNER_H_
