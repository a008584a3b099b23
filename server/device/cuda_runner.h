// Runs planned programs on one GPU: inputs go up through pinned staging, every step is a launch on one stream whose
// intermediates stay on the device, outputs come down, and the thread waits once. One run at a time.
//
// Small requests that come again and again (the same steps and layers, the same number of rows) are recorded as a CUDA
// graph, their copies included, and replayed with one call: at a few microseconds a kernel, what the host spends on
// each call would be most of the time.
//
// The time of each launch comes from CUDA events between the launches, read after that one wait. Of a replayed graph it
// is what the last timed replay took: events cost more than a small request's copies, so that one replay in kTimedEvery
// has them.
#ifndef SPMMD_SERVER_DEVICE_CUDA_RUNNER_H_
#define SPMMD_SERVER_DEVICE_CUDA_RUNNER_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/dispatch/cuda_tuning.h"
#include "kernels/format/packed_layer.h"
#include "server/device/cuda_context.h"
#include "server/device/cuda_staging.h"
#include "server/device/dense_shadows.h"
#include "server/device/device.h"
#include "server/device/memory_budget.h"
#include "server/engine/plan.h"
#include "server/metrics/metrics.h"

namespace spmmd::server {

class CudaLayer : public ResidentLayer {
 public:
  // `shell` is the packed layer without its sections' bytes. Takes `layer`. `shadows` must outlive it; null: none.
  CudaLayer(PackedLayer shell, spmmd_cuda_layer* layer, CudaMemory bias, CudaContext* context, DenseShadows* shadows,
            MemoryBudget::Reservation weights)
      : ResidentLayer(shell, std::move(weights)),
        shell_(std::move(shell)),
        layer_(layer),
        bias_(std::move(bias)),
        context_(context),
        shadows_(shadows),
        shape_(CudaShape::Of(shell_.dtype, shell_.m, shell_.k, shell_.nnz)),
        serial_(next_serial_.fetch_add(1, std::memory_order_relaxed)) {}
  ~CudaLayer() override {
    if (shadows_ != nullptr) shadows_->Forget(serial_);
    context_->cuda().layer_free(layer_);
  }

  const PackedLayer& shell() const { return shell_; }
  const spmmd_cuda_layer* handle() const { return layer_; }
  const float* bias() const { return reinterpret_cast<const float*>(bias_.data()); }
  const CudaShape& shape() const { return shape_; }
  uint64_t shadow_bytes() const override { return shadows_ == nullptr ? 0 : shadows_->BytesOf(serial_); }
  // No two layers of the process have the same, even one after the other at the same address.
  uint64_t serial() const { return serial_; }

 private:
  PackedLayer shell_;
  spmmd_cuda_layer* layer_;
  CudaMemory bias_;
  CudaContext* context_;
  DenseShadows* shadows_;
  const CudaShape shape_;
  const uint64_t serial_;
  static inline std::atomic<uint64_t> next_serial_{1};  // NOLINT(readability-identifier-naming): a member like others
};

// One block of device memory that grows to what a run needs and keeps at most kRetainedBytes of it afterwards.
class CudaArena {
 public:
  static constexpr uint64_t kRetainedBytes = uint64_t{256} << 20;

  CudaArena(CudaContext* context, MemoryBudget* budget, MemoryKind kind)
      : context_(context), budget_(budget), kind_(kind) {}
  // At least `bytes`; true when it is new memory. Between runs only: what was there is lost when it grows.
  absl::StatusOr<bool> Ensure(uint64_t bytes);
  void EndRun() {
    if (memory_.bytes() > kRetainedBytes) memory_.Free();
  }
  void Free() { memory_.Free(); }
  std::byte* data() const { return memory_.data(); }

 private:
  CudaContext* const context_;
  MemoryBudget* const budget_;
  const MemoryKind kind_;
  CudaMemory memory_;
};

class CudaRunner {
 public:
  // `tuning` and `shadows` must outlive the runner.
  static absl::StatusOr<std::unique_ptr<CudaRunner>> Create(CudaContext* context, MemoryBudget* budget,
                                                            const CudaTuningTable* tuning, DenseShadows* shadows,
                                                            Metrics* metrics);
  ~CudaRunner();
  CudaRunner(const CudaRunner&) = delete;
  CudaRunner& operator=(const CudaRunner&) = delete;

  // One batch at a time. When it returns, nothing is pending on the device.
  absl::Status Run(absl::Span<Job* const> jobs);
  // Runs `work` while no batch runs.
  void Exclusively(absl::FunctionRef<void()> work);
  // Gives all device memory back that is kept between runs.
  void Trim();

 private:
  // Where a value is on the device.
  enum class Block : uint8_t { kNone, kInputs, kWork, kOutputs, kCaller };
  struct Value {
    Block block = Block::kNone;
    uint64_t offset = 0;
    std::byte* at = nullptr;  // kCaller: device memory of the caller's, used where it lies
    DType dtype = DType::kF32;
    int64_t cols = 0;
    // Of a sparse input of one row, in the inputs' block: indices, then values. Its dense form is at `offset`.
    bool sparse = false;
    uint64_t indices_offset = 0;
    uint64_t values_offset = 0;
    int64_t nnz = 0;
  };
  // One launch, for the metrics.
  struct Launched {
    const char* kernel = nullptr;
    const char* format = nullptr;
    int64_t bytes = 0;
    int64_t flops = 0;
    absl::Duration took = absl::ZeroDuration();  // when it was last timed
  };
  // A step as it will be launched.
  struct Planned {
    Value y;
    spmmd_cuda_matmul call = {};  // without pointers
    int32_t kernel = -1;
    const spmmd_cuda_layer* layer = nullptr;  // what is multiplied: the layer or its shadow
    uint64_t shadow = 0;                      // serial number of the shadow; 0: the layer itself
    int group = 1;          // steps from this one on that share its launch; 0: launched with an earlier one
    bool filtered = false;  // x goes through a copy that drops what is under the threshold
    Value filter;
  };
  // What a recorded run depends on.
  struct GraphKey {
    int64_t rows = 0;
    std::vector<uint64_t> layers;
    std::vector<std::pair<int32_t, uint64_t>> kernels;  // of each step, and the shadow that it reads
    std::vector<PlanStep> steps;
    std::vector<PlanOutput> outputs;
    std::vector<int64_t> step_cols;
    std::vector<std::pair<DType, int64_t>> inputs;
    std::array<const std::byte*, 4> blocks{};  // where the arenas are
    uint64_t scratch_bytes = 0;

    bool operator==(const GraphKey&) const = default;
  };
  struct Graph {
    GraphKey key;
    spmmd_cuda_graph graph = nullptr;  // null: seen once
    spmmd_cuda_graph timed = nullptr;  // the same with events around every launch
    int64_t replays = 0;
    std::vector<Launched> launched;
  };
  static constexpr size_t kMaxGraphs = 64;
  static constexpr size_t kMaxGroup = 4;  // layers of one launch
  static constexpr int64_t kTimedEvery = 16;
  // Copies of up to this size are made by kernels.
  static constexpr uint64_t kKernelCopyBytes = uint64_t{64} << 10;
  // Inputs and outputs of a request that is worth recording, each.
  static constexpr uint64_t kMaxGraphBytes = uint64_t{1} << 20;
  // Offsets in the workspace: first fit among what earlier steps gave back.
  class Layout;

  CudaRunner(CudaContext* context, MemoryBudget* budget, const CudaTuningTable* tuning, DenseShadows* shadows,
             Metrics* metrics);
  absl::Status RunSteps(absl::Span<Job* const> jobs, int64_t rows);
  // Places everything and reserves its memory; then what shadows it uses are held.
  absl::Status Place(absl::Span<Job* const> jobs, int64_t rows, uint64_t* input_bytes, uint64_t* output_bytes);
  // Places the inputs and says what to copy there; returns the block's size.
  uint64_t PlaceInputs(absl::Span<Job* const> jobs, int64_t rows);
  // Places outputs and steps, chooses kernels, sizes the workspace and the kernels' scratch.
  absl::Status PlaceSteps(const Job& job, int64_t rows, bool use_shadows, uint64_t* output_bytes, uint64_t* work_bytes,
                          uint64_t* scratch_bytes);
  // Sets the kernel and the layer that it reads, by what was measured of layers of that shape.
  absl::Status ChooseKernel(const CudaLayer& layer, bool deterministic, bool use_shadows, Planned* planned,
                            uint64_t* scratch_bytes);
  // Finds neighbouring matmuls of one x (q, k and v; gate and up) whose kernel takes them in one launch.
  void GroupSteps(const Job& job, uint64_t* scratch_bytes);
  // Has cublasLt use the candidate that was the fastest.
  void UseCandidate(const spmmd_cuda_layer* dense, const CudaLayer& layer, const CudaWidth& width,
                    const spmmd_cuda_matmul& call);
  // The launches of all steps, without the copies of inputs and outputs.
  absl::Status LaunchSteps(const Job& job, int64_t rows);
  GraphKey KeyOf(const Job& job, int64_t rows) const;
  // The recorded run, most recently used first; null when this one is to run as it is.
  absl::StatusOr<Graph*> FindGraph(const Job& job, int64_t rows, uint64_t input_bytes, uint64_t output_bytes);
  absl::Status Replay(absl::Span<Job* const> jobs, Graph* graph, int64_t rows, uint64_t input_bytes,
                      uint64_t output_bytes);
  // `*exec` stays null when graphs do not work here.
  absl::Status Record(const Job& job, int64_t rows, bool timed, uint64_t input_bytes, uint64_t output_bytes,
                      spmmd_cuda_graph* exec);
  // Whether kernels may write the outputs where the host reads them.
  bool OutputsToHost(const Job& job, int64_t rows) const;
  void DropGraph(Graph* graph);
  absl::Status LaunchStep(const Job& job, const PlanStep& step, const Planned& planned, int64_t rows);
  absl::Status LaunchMatmul(const Job& job, const PlanStep& step, const Planned& planned, int64_t rows);
  absl::Status LaunchGroup(const Job& job, size_t first, int64_t rows);
  // The call with its pointers.
  spmmd_cuda_matmul CallOf(const CudaLayer& layer, const PlanStep& step, const Planned& planned, const Value& x) const;
  // What the launch of the call is to the metrics.
  Launched LaunchedOf(const CudaLayer& layer, const Planned& planned, const Value& x, int64_t rows) const;
  absl::Status LaunchCopy(const Value& from, const Value& to, float threshold, int64_t rows);
  absl::Status LaunchElementwise(spmmd_cuda_elementwise_call* call, const char* name);
  // Where the outputs' bytes go.
  void PlaceOutputs(absl::Span<Job* const> jobs);
  // Marks the end of a launch on the stream.
  absl::Status Mark(const Launched& launched);
  absl::Status RecordEvent(size_t index);
  absl::Status ReadTimes(absl::Span<Job* const> jobs);
  // Takes the times in launched_ for what these jobs took.
  void Account(absl::Span<Job* const> jobs);
  std::byte* At(const Value& value) const;

  CudaContext* const context_;
  const int32_t cublaslt_;  // the kernel's number
  const CudaTuningTable* const tuning_;
  DenseShadows* const shadows_;
  Metrics* const metrics_;
  absl::Mutex run_mutex_;
  std::unique_ptr<CudaStaging> staging_;
  spmmd_cuda_stream stream_ = nullptr;
  CudaArena inputs_;
  CudaArena outputs_;
  CudaArena work_;
  CudaArena scratch_;
  uint64_t scratch_bytes_ = 0;  // of this run
  bool scratch_clean_ = false;  // its counters are zero
  std::vector<spmmd_cuda_event> events_;
  std::list<Graph> graphs_;  // most recently used first
  bool graphs_work_ = true;
  bool timed_ = true;                // launches have events around them, and none overlaps the end of the one before
  std::byte* outputs_at_ = nullptr;  // where kernels write outputs; null: in outputs_

  // Of the run in progress; members for their capacity.
  std::vector<Value> values_;  // inputs, then steps
  std::vector<Planned> planned_;
  std::vector<Value> output_values_;
  std::vector<CudaStaging::UploadPiece> up_;
  std::vector<CudaStaging::DownloadPiece> down_;
  // Copies between the arenas and device memory of the caller's that is not aligned as kernels want it.
  std::vector<CudaStaging::UploadPiece> device_up_;
  std::vector<CudaStaging::DownloadPiece> device_down_;
  std::vector<Launched> launched_;
  std::vector<std::vector<float>> scattered_;
  std::vector<uint64_t> shadowed_;  // layers whose shadows it uses
  // Calls whose cublasLt algorithm has been chosen: (m, k, n, dtype).
  absl::flat_hash_set<std::tuple<int64_t, int64_t, int64_t, DType>> chosen_;
  // By the addresses of the names, which live as long as the library.
  absl::flat_hash_map<std::pair<const char*, const char*>, KernelMetrics*> kernel_metrics_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_CUDA_RUNNER_H_
