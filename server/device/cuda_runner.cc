#include "server/device/cuda_runner.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/base/status_macros.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

constexpr uint64_t kAlignment = 256;

uint64_t Align(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

uint64_t TensorBytes(DType dtype, int64_t rows, int64_t cols) {
  return static_cast<uint64_t>(rows) * static_cast<uint64_t>(cols) * SizeOf(dtype);
}

// Without a measurement: up to this many tokens the sparse kernels were faster than dense on most layers
// (docs/measurements.md).
constexpr int64_t kSparseTokens = 64;
constexpr size_t kMaxChosen = 4096;

// Device memory that kernels may read and write as if it were an arena's.
bool IsAligned(const std::byte* data) { return reinterpret_cast<uintptr_t>(data) % kAlignment == 0; }

bool OnDevice(const Job& job, size_t output) { return ((job.outputs_on_device >> output) & 1) != 0; }

const char* const kElementwiseNames[] = {"elementwise_copy", "elementwise_add", "elementwise_mul"};

}  // namespace

class CudaRunner::Layout {
 public:
  uint64_t Take(uint64_t bytes) {
    bytes = Align(std::max<uint64_t>(bytes, 1));
    size_t best = free_.size();
    for (size_t i = 0; i < free_.size(); ++i) {
      if (free_[i].bytes >= bytes && (best == free_.size() || free_[i].bytes < free_[best].bytes)) best = i;
    }
    if (best == free_.size()) {
      taken_.push_back({end_, bytes});
      end_ += bytes;
    } else {
      taken_.push_back(free_[best]);
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(best));
    }
    return taken_.back().offset;
  }
  void Give(uint64_t offset) {
    const auto taken = std::find_if(taken_.begin(), taken_.end(), [&](const Part& p) { return p.offset == offset; });
    free_.push_back(*taken);
    taken_.erase(taken);
  }
  uint64_t size() const { return end_; }

 private:
  struct Part {
    uint64_t offset;
    uint64_t bytes;
  };
  std::vector<Part> taken_;
  std::vector<Part> free_;
  uint64_t end_ = 0;
};

absl::StatusOr<bool> CudaArena::Ensure(uint64_t bytes) {
  if (memory_.data() != nullptr && memory_.bytes() >= bytes) return false;
  constexpr uint64_t kGranularity = uint64_t{1} << 20;
  memory_.Free();
  SPMMD_ASSIGN_OR_RETURN(memory_,
                         CudaMemory::Allocate(context_, budget_, kind_, (bytes / kGranularity + 1) * kGranularity));
  return true;
}

CudaRunner::CudaRunner(CudaContext* context, MemoryBudget* budget, const CudaTuningTable* tuning, DenseShadows* shadows,
                       Metrics* metrics)
    : context_(context),
      cublaslt_(context->cuda().find_kernel("dense_cublaslt")),
      tuning_(tuning),
      shadows_(shadows),
      metrics_(metrics),
      inputs_(context, budget, MemoryKind::kStaging),
      outputs_(context, budget, MemoryKind::kStaging),
      work_(context, budget, MemoryKind::kWorkspace),
      scratch_(context, budget, MemoryKind::kWorkspace) {}

absl::StatusOr<std::unique_ptr<CudaRunner>> CudaRunner::Create(CudaContext* context, MemoryBudget* budget,
                                                               const CudaTuningTable* tuning, DenseShadows* shadows,
                                                               Metrics* metrics) {
  std::unique_ptr<CudaRunner> runner(new CudaRunner(context, budget, tuning, shadows, metrics));
  SPMMD_RETURN_IF_ERROR(context->Check(context->cuda().stream_create(context->device(), &runner->stream_)));
  SPMMD_ASSIGN_OR_RETURN(runner->staging_, CudaStaging::Create(context));
  return runner;
}

CudaRunner::~CudaRunner() {
  const CudaLibrary& cuda = context_->cuda();
  for (Graph& graph : graphs_) DropGraph(&graph);
  for (const spmmd_cuda_event event : events_) cuda.event_destroy(context_->device(), event);
  if (stream_ != nullptr) cuda.stream_destroy(context_->device(), stream_);
}

void CudaRunner::Trim() {
  for (CudaArena* arena : {&inputs_, &outputs_, &work_, &scratch_}) arena->Free();
}

void CudaRunner::Exclusively(absl::FunctionRef<void()> work) {
  absl::MutexLock lock(&run_mutex_);
  work();
}

absl::Status CudaRunner::Run(absl::Span<Job* const> jobs) {
  absl::MutexLock lock(&run_mutex_);
  if (context_->lost()) return context_->LostError();
  int64_t rows = 0;
  for (const Job* job : jobs) rows += job->rows;
  if (rows == 0) return absl::OkStatus();
  absl::Status status = GuardHostMemory([&] { return RunSteps(jobs, rows); });
  if (!status.ok()) {
    // What was enqueued may still use the arenas; counters of a launch that was given up may not be zero.
    const absl::Status settled = context_->Check(context_->cuda().stream_synchronize(context_->device(), stream_));
    scratch_clean_ = false;
    if (context_->lost()) status = settled;
  }
  shadows_->Release();
  for (CudaArena* arena : {&inputs_, &outputs_, &work_, &scratch_}) arena->EndRun();
  return status;
}

absl::Status CudaRunner::RunSteps(absl::Span<Job* const> jobs, int64_t rows) {
  const Job& first = *jobs.front();
  metrics_->BatchLaunched(rows);
  launched_.clear();
  uint64_t input_bytes = 0;
  uint64_t output_bytes = 0;
  SPMMD_RETURN_IF_ERROR(Place(jobs, rows, &input_bytes, &output_bytes));
  SPMMD_ASSIGN_OR_RETURN(Graph* const graph, FindGraph(first, rows, input_bytes, output_bytes));
  if (graph != nullptr) {
    SPMMD_RETURN_IF_ERROR(Replay(jobs, graph, rows, input_bytes, output_bytes));
    if (graphs_work_) return absl::OkStatus();
  }
  const CudaLibrary& cuda = context_->cuda();
  SPMMD_RETURN_IF_ERROR(staging_->Upload(inputs_.data(), up_, stream_));
  for (const CudaStaging::UploadPiece& piece : device_up_) {
    SPMMD_RETURN_IF_ERROR(context_->Check(
        cuda.memcpy_async(context_->device(), inputs_.data() + piece.offset, piece.from, piece.bytes, stream_)));
  }
  SPMMD_RETURN_IF_ERROR(RecordEvent(0));
  SPMMD_RETURN_IF_ERROR(LaunchSteps(first, rows));
  for (const CudaStaging::DownloadPiece& piece : device_down_) {
    SPMMD_RETURN_IF_ERROR(context_->Check(
        cuda.memcpy_async(context_->device(), piece.to, outputs_.data() + piece.offset, piece.bytes, stream_)));
  }
  SPMMD_RETURN_IF_ERROR(staging_->Download(outputs_.data(), down_, stream_));
  if (first.memory_device != nullptr) {
    // The caller's memory is his again, whatever came down to the host.
    SPMMD_RETURN_IF_ERROR(context_->Check(cuda.stream_synchronize(context_->device(), stream_)));
  }
  return ReadTimes(jobs);
}

absl::Status CudaRunner::Place(absl::Span<Job* const> jobs, int64_t rows, uint64_t* input_bytes,
                               uint64_t* output_bytes) {
  const auto place = [&](bool use_shadows) -> absl::Status {
    shadowed_.clear();
    *input_bytes = PlaceInputs(jobs, rows);
    *output_bytes = 0;
    uint64_t work_bytes = 0;
    scratch_bytes_ = 0;
    SPMMD_RETURN_IF_ERROR(PlaceSteps(*jobs.front(), rows, use_shadows, output_bytes, &work_bytes, &scratch_bytes_));
    SPMMD_RETURN_IF_ERROR(inputs_.Ensure(*input_bytes).status());
    SPMMD_RETURN_IF_ERROR(outputs_.Ensure(*output_bytes).status());
    if (work_bytes > 0) SPMMD_RETURN_IF_ERROR(work_.Ensure(work_bytes).status());
    if (scratch_bytes_ > 0) {
      SPMMD_ASSIGN_OR_RETURN(const bool fresh, scratch_.Ensure(scratch_bytes_));
      if (fresh || !scratch_clean_) {
        SPMMD_RETURN_IF_ERROR(context_->Check(
            context_->cuda().workspace_init(context_->device(), scratch_.data(), scratch_bytes_, stream_)));
        scratch_clean_ = true;
      }
    }
    PlaceOutputs(jobs);
    return absl::OkStatus();
  };
  const absl::Status status = place(shadows_->enabled());
  if (shadowed_.empty()) return status;
  if (status.ok() && shadows_->Hold(shadowed_)) return status;
  // The memory of a shadow went to somebody else meanwhile, or to this very run's workspace.
  if (!status.ok() && !absl::IsResourceExhausted(status)) return status;
  return place(/*use_shadows=*/false);
}

absl::Status CudaRunner::LaunchSteps(const Job& job, int64_t rows) {
  const Plan& plan = *job.plan;
  for (size_t s = 0; s < plan.steps.size(); ++s) {
    if (planned_[s].y.block == Block::kNone) continue;  // nobody reads it
    if (planned_[s].group > 1) {
      SPMMD_RETURN_IF_ERROR(LaunchGroup(job, s, rows));
    } else if (planned_[s].group == 1) {
      SPMMD_RETURN_IF_ERROR(LaunchStep(job, plan.steps[s], planned_[s], rows));
    }
    for (size_t o = 0; o < plan.outputs.size(); ++o) {
      const Value& y = planned_[s].y;
      const Value& output = output_values_[o];
      if (plan.outputs[o].step != static_cast<int>(s)) continue;
      if (y.block == output.block && y.offset == output.offset && y.at == output.at) continue;
      SPMMD_RETURN_IF_ERROR(LaunchCopy(y, output, /*threshold=*/0, rows));
    }
  }
  return absl::OkStatus();
}

CudaRunner::GraphKey CudaRunner::KeyOf(const Job& job, int64_t rows) const {
  GraphKey key;
  key.rows = rows;
  for (const ResidentLayer* layer : job.layers) key.layers.push_back(static_cast<const CudaLayer*>(layer)->serial());
  for (const Planned& planned : planned_) key.kernels.emplace_back(planned.kernel, planned.shadow);
  key.steps = job.plan->steps;
  key.outputs = job.plan->outputs;
  key.step_cols = job.step_cols;
  for (const InputValue& input : job.inputs) key.inputs.emplace_back(input.dense.dtype, input.dense.cols);
  key.blocks = {inputs_.data(), outputs_.data(), work_.data(), scratch_.data()};
  key.scratch_bytes = scratch_bytes_;
  return key;
}

absl::StatusOr<CudaRunner::Graph*> CudaRunner::FindGraph(const Job& job, int64_t rows, uint64_t input_bytes,
                                                         uint64_t output_bytes) {
  // Memory of the caller's may be elsewhere the next time.
  if (job.memory_device != nullptr) return nullptr;
  if (!graphs_work_ || input_bytes > kMaxGraphBytes || output_bytes > kMaxGraphBytes) return nullptr;
  for (const InputValue& input : job.inputs) {
    if (input.sparse.has_value()) return nullptr;  // how many nonzeros there are is part of the launch
  }
  GraphKey key = KeyOf(job, rows);
  const auto known = std::find_if(graphs_.begin(), graphs_.end(), [&](const Graph& g) { return g.key == key; });
  if (known == graphs_.end()) {
    // Recorded when it comes a second time.
    if (graphs_.size() == kMaxGraphs) {
      DropGraph(&graphs_.back());
      graphs_.pop_back();
    }
    graphs_.emplace_front();
    graphs_.front().key = std::move(key);
    return nullptr;
  }
  graphs_.splice(graphs_.begin(), graphs_, known);
  Graph* const graph = &graphs_.front();
  return graph;
}

bool CudaRunner::OutputsToHost(const Job& job, int64_t rows) const {
  // Few large writes; more rows come in pieces of 16 bytes.
  if (rows > 2) return false;
  for (size_t s = 0; s < planned_.size(); ++s) {
    const Planned& planned = planned_[s];
    if (planned.y.block != Block::kOutputs) continue;
    // A later step would read it over the bus, and cublasLt may add up in place.
    if (job.plan->steps[s].last_use >= 0 || (planned.kernel >= 0 && planned.kernel == cublaslt_)) return false;
  }
  return true;
}

absl::Status CudaRunner::Record(const Job& job, int64_t rows, bool timed, uint64_t input_bytes, uint64_t output_bytes,
                                spmmd_cuda_graph* exec) {
  const CudaLibrary& cuda = context_->cuda();
  launched_.clear();
  if (cuda.graph_begin(context_->device(), stream_) != SPMMD_CUDA_OK) {
    graphs_work_ = false;
    return context_->Probe();
  }
  const auto copy = [&](std::byte* to, const std::byte* from, uint64_t bytes) {
    return context_->Check(bytes <= kKernelCopyBytes ? cuda.copy_kernel(context_->device(), to, from, bytes, stream_)
                                                     : cuda.memcpy_async(context_->device(), to, from, bytes, stream_));
  };
  const bool to_host = OutputsToHost(job, rows) && output_bytes <= kKernelCopyBytes;
  const auto enqueue = [&]() -> absl::Status {
    SPMMD_RETURN_IF_ERROR(copy(inputs_.data(), staging_->upload_slot(), input_bytes));
    SPMMD_RETURN_IF_ERROR(RecordEvent(0));
    SPMMD_RETURN_IF_ERROR(LaunchSteps(job, rows));
    return to_host ? absl::OkStatus() : copy(staging_->download_slot(), outputs_.data(), output_bytes);
  };
  timed_ = timed;
  outputs_at_ = to_host ? staging_->download_slot() : nullptr;
  const absl::Status enqueued = enqueue();
  timed_ = true;
  outputs_at_ = nullptr;
  // Ends the capture whatever happened in it.
  const spmmd_cuda_status ended = cuda.graph_end(context_->device(), stream_, exec);
  if (!enqueued.ok() || ended != SPMMD_CUDA_OK) {
    *exec = nullptr;
    graphs_work_ = false;  // requests run as they are from here on
    launched_.clear();
    return context_->Probe();
  }
  return absl::OkStatus();
}

absl::Status CudaRunner::Replay(absl::Span<Job* const> jobs, Graph* graph, int64_t rows, uint64_t input_bytes,
                                uint64_t output_bytes) {
  const CudaLibrary& cuda = context_->cuda();
  const bool timed = jobs.front()->timed || graph->replays++ % kTimedEvery == 0;
  spmmd_cuda_graph& exec = timed ? graph->timed : graph->graph;
  if (exec == nullptr) {
    SPMMD_RETURN_IF_ERROR(Record(*jobs.front(), rows, timed, input_bytes, output_bytes, &exec));
    if (exec == nullptr) return absl::OkStatus();
    if (timed) graph->launched = launched_;
  }
  SPMMD_RETURN_IF_ERROR(staging_->Fill(up_));
  SPMMD_RETURN_IF_ERROR(context_->Check(cuda.graph_launch(context_->device(), exec, stream_)));
  SPMMD_RETURN_IF_ERROR(context_->Check(cuda.stream_synchronize(context_->device(), stream_)));
  staging_->Empty(down_);
  launched_ = graph->launched;
  if (!timed) {
    Account(jobs);
    return absl::OkStatus();
  }
  SPMMD_RETURN_IF_ERROR(ReadTimes(jobs));
  graph->launched = launched_;
  return absl::OkStatus();
}

void CudaRunner::DropGraph(Graph* graph) {
  for (spmmd_cuda_graph* exec : {&graph->graph, &graph->timed}) {
    if (*exec != nullptr) context_->cuda().graph_destroy(context_->device(), *exec);
    *exec = nullptr;
  }
}

uint64_t CudaRunner::PlaceInputs(absl::Span<Job* const> jobs, int64_t rows) {
  values_.clear();
  up_.clear();
  device_up_.clear();
  uint64_t end = 0;
  const std::vector<InputValue>& inputs = jobs.front()->inputs;
  scattered_.resize(std::max(scattered_.size(), inputs.size()));
  for (size_t i = 0; i < inputs.size(); ++i) {
    Value value;
    value.block = Block::kInputs;
    value.offset = end;
    if (inputs[i].sparse.has_value()) {
      // Sparse requests run alone.
      const SparseRows& sparse = *inputs[i].sparse;
      value.cols = sparse.cols;
      std::vector<float>& dense = scattered_[i];
      dense.assign(static_cast<size_t>(rows * sparse.cols), 0.0f);
      for (int64_t row = 0; row < rows; ++row) {
        for (uint64_t e = sparse.offsets[static_cast<size_t>(row)]; e < sparse.offsets[static_cast<size_t>(row) + 1];
             ++e) {
          dense[static_cast<size_t>(row * sparse.cols) + sparse.indices[e]] = sparse.values[e];
        }
      }
      up_.push_back({reinterpret_cast<const std::byte*>(dense.data()), end, dense.size() * sizeof(float)});
      end += Align(dense.size() * sizeof(float));
      if (rows == 1) {
        value.sparse = true;
        value.nnz = static_cast<int64_t>(sparse.values.size());
        const uint64_t bytes = sparse.values.size() * sizeof(float);
        value.indices_offset = end;
        up_.push_back({reinterpret_cast<const std::byte*>(sparse.indices.data()), end, bytes});
        end += Align(bytes);
        value.values_offset = end;
        up_.push_back({reinterpret_cast<const std::byte*>(sparse.values.data()), end, bytes});
        end += Align(bytes);
      }
    } else if (inputs[i].on_device) {
      // Such requests run alone, and their rows have no gaps.
      const DenseView& x = inputs[i].dense;
      value.dtype = x.dtype;
      value.cols = x.cols;
      const uint64_t bytes = TensorBytes(x.dtype, x.rows, x.cols);
      if (IsAligned(x.data)) {
        value.block = Block::kCaller;
        value.offset = 0;
        value.at = const_cast<std::byte*>(x.data);
      } else {
        device_up_.push_back({x.data, end, bytes});
        end += Align(bytes);
      }
    } else {
      value.dtype = inputs[i].dense.dtype;
      value.cols = inputs[i].dense.cols;
      uint64_t at = end;
      for (const Job* job : jobs) {
        const DenseView& x = job->inputs[i].dense;
        const uint64_t row_bytes = TensorBytes(x.dtype, 1, x.cols);
        if (x.row_stride == x.cols || x.rows <= 1) {
          up_.push_back({x.data, at, row_bytes * static_cast<uint64_t>(x.rows), job->inputs[i].pinned});
        } else {
          for (int64_t row = 0; row < x.rows; ++row) {
            up_.push_back({x.row(row), at + row_bytes * static_cast<uint64_t>(row), row_bytes, job->inputs[i].pinned});
          }
        }
        at += row_bytes * static_cast<uint64_t>(x.rows);
      }
      end = Align(at);
    }
    values_.push_back(value);
  }
  return end;
}

void CudaRunner::UseCandidate(const spmmd_cuda_layer* dense, const CudaLayer& layer, const CudaWidth& width,
                              const spmmd_cuda_matmul& call) {
  // Measured for outputs of the weights' type; cublasLt's list for others is another one.
  if (width.dense_candidate < 0 || call.y_dtype != static_cast<int32_t>(layer.shape().dtype)) return;
  if (chosen_.size() >= kMaxChosen) chosen_.clear();
  if (!chosen_.insert({layer.m(), layer.k(), call.n, layer.shape().dtype}).second) return;
  // Where there is no such candidate, cublasLt's first one runs.
  context_->cuda().dense_use_candidate(dense, &call, width.dense_candidate);
}

absl::Status CudaRunner::ChooseKernel(const CudaLayer& layer, bool deterministic, bool use_shadows, Planned* planned,
                                      uint64_t* scratch_bytes) {
  const CudaLibrary& cuda = context_->cuda();
  const spmmd_cuda_matmul& call = planned->call;
  planned->layer = layer.handle();
  const auto select = [&](const spmmd_cuda_layer* handle) -> absl::Status {
    planned->layer = handle;
    if (planned->kernel < 0)
      SPMMD_RETURN_IF_ERROR(context_->Check(cuda.select_kernel(handle, &call, &planned->kernel)));
    uint64_t bytes = 0;
    SPMMD_RETURN_IF_ERROR(context_->Check(cuda.workspace_bytes(handle, planned->kernel, &call, &bytes)));
    *scratch_bytes = std::max(*scratch_bytes, bytes);
    return absl::OkStatus();
  };
  const bool dense = layer.format() == Format::kDense;
  // What runs must not depend on what else the process has measured or has room for.
  if (deterministic || (!dense && layer.format() != Format::kBitmapGpu)) return select(layer.handle());

  const std::shared_ptr<const CudaWidths> widths = tuning_->Find(layer.shape());
  const CudaWidth* const width = widths == nullptr || widths->empty() ? nullptr : &WidthFor(*widths, call.n);
  if (dense) {
    if (width != nullptr) UseCandidate(layer.handle(), layer, *width, call);
    return select(layer.handle());
  }
  const bool want_dense = width != nullptr ? width->dense_is_faster() : call.n > kSparseTokens;
  if (want_dense && use_shadows) {
    SPMMD_RETURN_IF_ERROR(shadows_->Want(layer.serial(), layer.handle(), stream_));
    absl::Status status;
    const auto use = [&](const spmmd_cuda_layer* shadow, uint64_t serial) {
      planned->shadow = serial;
      if (width != nullptr) UseCandidate(shadow, layer, *width, call);
      return select(shadow);
    };
    if (shadows_->With(layer.serial(), use, &status)) {
      shadowed_.push_back(layer.serial());
      return status;
    }
  }
  if (width != nullptr && width->kernel >= 0 &&
      cuda.can_implement(layer.handle(), width->kernel, &call) == SPMMD_CUDA_OK) {
    planned->kernel = width->kernel;
  }
  return select(layer.handle());
}

absl::Status CudaRunner::PlaceSteps(const Job& job, int64_t rows, bool use_shadows, uint64_t* output_bytes,
                                    uint64_t* work_bytes, uint64_t* scratch_bytes) {
  const Plan& plan = *job.plan;
  output_values_.clear();
  for (size_t o = 0; o < plan.outputs.size(); ++o) {
    const PlanOutput& output = plan.outputs[o];
    Value value;
    value.dtype = output.dtype;
    value.cols = job.step_cols[static_cast<size_t>(output.step)];
    if (OnDevice(job, o) && IsAligned(job.outputs[o].data)) {
      value.block = Block::kCaller;
      value.at = job.outputs[o].data;
    } else {
      value.block = Block::kOutputs;
      value.offset = *output_bytes;
      *output_bytes += Align(TensorBytes(value.dtype, rows, value.cols));
    }
    output_values_.push_back(value);
  }
  planned_.clear();
  planned_.resize(plan.steps.size());
  Layout layout;
  for (int s = 0; s < static_cast<int>(plan.steps.size()); ++s) {
    const PlanStep& step = plan.steps[static_cast<size_t>(s)];
    Planned& planned = planned_[static_cast<size_t>(s)];
    // The step writes straight into an output when it can: an fp32 one, which later steps may read, or any that is the
    // value's only use.
    int direct = -1;
    int uses = 0;
    for (int o = 0; o < static_cast<int>(plan.outputs.size()); ++o) {
      if (plan.outputs[static_cast<size_t>(o)].step != s) continue;
      ++uses;
      if (direct < 0 || plan.outputs[static_cast<size_t>(o)].dtype == DType::kF32) direct = o;
    }
    if (direct >= 0 && plan.outputs[static_cast<size_t>(direct)].dtype != DType::kF32 &&
        (uses > 1 || step.last_use >= 0)) {
      direct = -1;
    }
    if (direct >= 0) {
      planned.y = output_values_[static_cast<size_t>(direct)];
    } else if (uses > 0 || step.last_use >= 0) {
      planned.y.block = Block::kWork;
      planned.y.cols = job.step_cols[static_cast<size_t>(s)];
      planned.y.offset = layout.Take(TensorBytes(DType::kF32, rows, planned.y.cols));
    }
    values_.push_back(planned.y);
    if (planned.y.block == Block::kNone) continue;

    if (step.op == PlanStep::Op::kMatmul) {
      const auto& layer = static_cast<const CudaLayer&>(*job.layers[static_cast<size_t>(step.layer)]);
      const Value& x = values_[static_cast<size_t>(step.left)];
      const float threshold = step.activation_threshold.value_or(0.0f);
      const bool skips_columns = layer.format() == Format::kColumnPiece || layer.format() == Format::kRlcCsc;
      planned.filtered = threshold > 0 && !skips_columns;
      if (planned.filtered) {
        planned.filter = x;
        planned.filter.block = Block::kWork;
        planned.filter.sparse = false;
        planned.filter.offset = layout.Take(TensorBytes(x.dtype, rows, x.cols));
      }
      spmmd_cuda_matmul& call = planned.call;
      call.n = rows;
      call.x_stride = x.cols;
      call.x_dtype = static_cast<int32_t>(x.dtype);
      call.y_dtype = static_cast<int32_t>(planned.y.dtype);
      call.y_stride = planned.y.cols;
      call.activation = static_cast<int32_t>(step.activation);
      if (skips_columns) call.x_threshold = threshold;
      if (x.sparse && threshold == 0 && layer.format() == Format::kColumnPiece) {
        static const uint32_t kSomeIndex = 0;
        call.x_indices = &kSomeIndex;  // says that it will be sparse
        call.x_nnz = x.nnz;
      }
      SPMMD_RETURN_IF_ERROR(ChooseKernel(layer, job.deterministic, use_shadows, &planned, scratch_bytes));
    }
    if (planned.filtered) layout.Give(planned.filter.offset);
    // Outputs of another type are converted right behind the step, so that its value may go with its last reader.
    if (step.last_use < 0 && planned.y.block == Block::kWork) layout.Give(planned.y.offset);
    for (int earlier = 0; earlier < s; ++earlier) {
      const Value& y = planned_[static_cast<size_t>(earlier)].y;
      if (plan.steps[static_cast<size_t>(earlier)].last_use == s && y.block == Block::kWork) layout.Give(y.offset);
    }
  }
  GroupSteps(job, scratch_bytes);
  *work_bytes = layout.size();
  return absl::OkStatus();
}

std::byte* CudaRunner::At(const Value& value) const {
  switch (value.block) {
    case Block::kInputs:
      return inputs_.data() + value.offset;
    case Block::kWork:
      return work_.data() + value.offset;
    case Block::kOutputs:
      return (outputs_at_ != nullptr ? outputs_at_ : outputs_.data()) + value.offset;
    case Block::kCaller:
      return value.at;
    case Block::kNone:
      break;
  }
  return nullptr;
}

absl::Status CudaRunner::LaunchStep(const Job& job, const PlanStep& step, const Planned& planned, int64_t rows) {
  if (step.op == PlanStep::Op::kMatmul) return LaunchMatmul(job, step, planned, rows);
  const Value& left = values_[static_cast<size_t>(step.left)];
  const Value& right = values_[static_cast<size_t>(step.right)];
  spmmd_cuda_elementwise_call call = {};
  call.op = step.op == PlanStep::Op::kAdd ? SPMMD_CUDA_OP_ADD : SPMMD_CUDA_OP_MUL;
  call.activation = static_cast<int32_t>(step.activation);
  call.rows = rows;
  call.cols = planned.y.cols;
  call.left = At(left);
  call.left_dtype = static_cast<int32_t>(left.dtype);
  call.left_stride = left.cols;
  call.right = At(right);
  call.right_dtype = static_cast<int32_t>(right.dtype);
  call.right_stride = right.cols;
  call.y = At(planned.y);
  call.y_dtype = static_cast<int32_t>(planned.y.dtype);
  call.y_stride = planned.y.cols;
  return LaunchElementwise(&call, kElementwiseNames[call.op]);
}

absl::Status CudaRunner::LaunchCopy(const Value& from, const Value& to, float threshold, int64_t rows) {
  spmmd_cuda_elementwise_call call = {};
  call.op = SPMMD_CUDA_OP_COPY;
  call.threshold = threshold;
  call.rows = rows;
  call.cols = to.cols;
  call.left = At(from);
  call.left_dtype = static_cast<int32_t>(from.dtype);
  call.left_stride = from.cols;
  call.y = At(to);
  call.y_dtype = static_cast<int32_t>(to.dtype);
  call.y_stride = to.cols;
  return LaunchElementwise(&call, kElementwiseNames[SPMMD_CUDA_OP_COPY]);
}

absl::Status CudaRunner::LaunchElementwise(spmmd_cuda_elementwise_call* call, const char* name) {
  SPMMD_RETURN_IF_ERROR(context_->Check(context_->cuda().elementwise(context_->device(), call, stream_)));
  const int64_t elements = call->rows * call->cols;
  size_t element_bytes = SizeOf(static_cast<DType>(call->left_dtype)) + SizeOf(static_cast<DType>(call->y_dtype));
  if (call->right != nullptr) element_bytes += SizeOf(static_cast<DType>(call->right_dtype));
  return Mark({name, "F32", elements * static_cast<int64_t>(element_bytes), elements});
}

absl::Status CudaRunner::LaunchMatmul(const Job& job, const PlanStep& step, const Planned& planned, int64_t rows) {
  const auto& layer = static_cast<const CudaLayer&>(*job.layers[static_cast<size_t>(step.layer)]);
  const Value* x = &values_[static_cast<size_t>(step.left)];
  if (planned.filtered) {
    SPMMD_RETURN_IF_ERROR(LaunchCopy(*x, planned.filter, *step.activation_threshold, rows));
    x = &planned.filter;
  }
  const spmmd_cuda_matmul call = CallOf(layer, step, planned, *x);
  SPMMD_RETURN_IF_ERROR(context_->Check(context_->cuda().launch(planned.layer, planned.kernel, &call, stream_)));
  return Mark(LaunchedOf(layer, planned, *x, rows));
}

spmmd_cuda_matmul CudaRunner::CallOf(const CudaLayer& layer, const PlanStep& step, const Planned& planned,
                                     const Value& x) const {
  spmmd_cuda_matmul call = planned.call;
  if (call.x_indices != nullptr) {
    call.x_indices = reinterpret_cast<const uint32_t*>(inputs_.data() + x.indices_offset);
    call.x_values = reinterpret_cast<const float*>(inputs_.data() + x.values_offset);
  } else {
    call.x = At(x);
  }
  if (step.use_bias) call.bias = layer.bias();
  if (!timed_) call.flags |= SPMMD_CUDA_FLAG_CHAIN;
  call.y = At(planned.y);
  call.workspace = scratch_.data();
  call.workspace_bytes = scratch_bytes_;
  return call;
}

CudaRunner::Launched CudaRunner::LaunchedOf(const CudaLayer& layer, const Planned& planned, const Value& x,
                                            int64_t rows) const {
  const bool indexed = planned.call.x_indices != nullptr;
  const bool shadowed = planned.shadow != 0;
  auto weights = static_cast<double>(shadowed ? layer.m() * layer.k() * 2 : static_cast<int64_t>(layer.bytes()));
  auto nonzeros = static_cast<double>(shadowed ? layer.m() * layer.k() : layer.nnz());
  if (indexed) {
    const double share = static_cast<double>(x.nnz) / static_cast<double>(layer.k());
    weights *= share;
    nonzeros *= share;
  }
  const uint64_t x_bytes = indexed ? static_cast<uint64_t>(x.nnz) * 8 : TensorBytes(x.dtype, rows, x.cols);
  return {context_->cuda().kernel_name(planned.kernel), Name(shadowed ? Format::kDense : layer.format()).data(),
          static_cast<int64_t>(weights) +
              static_cast<int64_t>(x_bytes + TensorBytes(planned.y.dtype, rows, planned.y.cols)),
          static_cast<int64_t>(2.0 * nonzeros * static_cast<double>(rows))};
}

void CudaRunner::GroupSteps(const Job& job, uint64_t* scratch_bytes) {
  const std::vector<PlanStep>& steps = job.plan->steps;
  // Results of a group are written while its x is still read, and converted to other types after it: none of them may
  // lie where an earlier one of the group is converted from.
  const auto may_join = [&](size_t s) {
    const Planned& planned = planned_[s];
    return steps[s].op == PlanStep::Op::kMatmul && !planned.filtered &&
           (planned.y.block == Block::kOutputs || (planned.y.block == Block::kWork && steps[s].last_use >= 0));
  };
  for (size_t first = 0; first < steps.size(); ++first) {
    if (!may_join(first)) continue;
    const spmmd_cuda_layer* layers[kMaxGroup] = {planned_[first].layer};
    spmmd_cuda_matmul calls[kMaxGroup] = {planned_[first].call};
    size_t count = 1;
    int32_t kernel = planned_[first].kernel;
    for (size_t s = first + 1; s < steps.size() && count < kMaxGroup; ++s) {
      if (!may_join(s) || steps[s].left != steps[first].left) break;
      layers[count] = planned_[s].layer;
      calls[count] = planned_[s].call;
      uint64_t bytes = 0;
      // Refused where the kernel has no groups, or these layers do not go together.
      const auto go_together = [&](int32_t with) {
        return context_->cuda().group_workspace_bytes(layers, with, calls, static_cast<int32_t>(count + 1), &bytes) ==
               SPMMD_CUDA_OK;
      };
      // Where each has another kernel alone (a large q, a small k), one of the two in one launch is still faster.
      if (!go_together(kernel)) {
        if (planned_[s].kernel == kernel || !go_together(planned_[s].kernel)) break;
        kernel = planned_[s].kernel;
      }
      *scratch_bytes = std::max(*scratch_bytes, bytes);
      ++count;
    }
    planned_[first].group = static_cast<int>(count);
    planned_[first].kernel = kernel;
    for (size_t s = first + 1; s < first + count; ++s) {
      planned_[s].group = 0;
      planned_[s].kernel = kernel;
    }
    first += count - 1;
  }
}

absl::Status CudaRunner::LaunchGroup(const Job& job, size_t first, int64_t rows) {
  const size_t count = static_cast<size_t>(planned_[first].group);
  const spmmd_cuda_layer* layers[kMaxGroup] = {};
  spmmd_cuda_matmul calls[kMaxGroup] = {};
  Launched all;
  for (size_t i = 0; i < count; ++i) {
    const PlanStep& step = job.plan->steps[first + i];
    const Planned& planned = planned_[first + i];
    const auto& layer = static_cast<const CudaLayer&>(*job.layers[static_cast<size_t>(step.layer)]);
    const Value& x = values_[static_cast<size_t>(step.left)];
    layers[i] = planned.layer;
    calls[i] = CallOf(layer, step, planned, x);
    const Launched one = LaunchedOf(layer, planned, x, rows);
    all.kernel = one.kernel;
    all.format = one.format;
    all.bytes += one.bytes;
    all.flops += one.flops;
  }
  const spmmd_cuda_status code =
      context_->cuda().launch_group(layers, planned_[first].kernel, calls, static_cast<int32_t>(count), stream_);
  if (code == SPMMD_CUDA_INVALID_ARGUMENT) {
    // Layers that were cut differently when they were packed do not go together, which only the launch looks at.
    for (size_t i = first; i < first + count; ++i) {
      SPMMD_RETURN_IF_ERROR(LaunchStep(job, job.plan->steps[i], planned_[i], rows));
    }
    return absl::OkStatus();
  }
  SPMMD_RETURN_IF_ERROR(context_->Check(code));
  return Mark(all);
}

absl::Status CudaRunner::RecordEvent(size_t index) {
  if (!timed_) return absl::OkStatus();
  if (index == events_.size()) {
    spmmd_cuda_event event = nullptr;
    SPMMD_RETURN_IF_ERROR(context_->Check(context_->cuda().event_create(context_->device(), /*timing=*/1, &event)));
    events_.push_back(event);
  }
  return context_->Check(context_->cuda().event_record(context_->device(), events_[index], stream_));
}

absl::Status CudaRunner::Mark(const Launched& launched) {
  launched_.push_back(launched);
  return RecordEvent(launched_.size());
}

void CudaRunner::PlaceOutputs(absl::Span<Job* const> jobs) {
  down_.clear();
  device_down_.clear();
  for (size_t o = 0; o < output_values_.size(); ++o) {
    if (output_values_[o].block == Block::kCaller) continue;
    uint64_t at = output_values_[o].offset;
    if (OnDevice(*jobs.front(), o)) {  // runs alone
      const MutableDenseView& y = jobs.front()->outputs[o];
      device_down_.push_back({y.data, at, TensorBytes(y.dtype, y.rows, y.cols)});
      continue;
    }
    for (const Job* job : jobs) {
      const MutableDenseView& y = job->outputs[o];
      const bool pinned = ((job->outputs_pinned >> o) & 1) != 0;
      const uint64_t row_bytes = TensorBytes(y.dtype, 1, y.cols);
      if (y.row_stride == y.cols || y.rows <= 1) {
        down_.push_back({y.data, at, row_bytes * static_cast<uint64_t>(y.rows), pinned});
      } else {
        for (int64_t row = 0; row < y.rows; ++row) {
          down_.push_back({y.row(row), at + row_bytes * static_cast<uint64_t>(row), row_bytes, pinned});
        }
      }
      at += row_bytes * static_cast<uint64_t>(y.rows);
    }
  }
}

absl::Status CudaRunner::ReadTimes(absl::Span<Job* const> jobs) {
  for (size_t i = 0; i < launched_.size(); ++i) {
    double microseconds = 0;
    SPMMD_RETURN_IF_ERROR(context_->Check(
        context_->cuda().event_elapsed_us(context_->device(), events_[i], events_[i + 1], &microseconds)));
    launched_[i].took = absl::Microseconds(microseconds);
  }
  Account(jobs);
  return absl::OkStatus();
}

void CudaRunner::Account(absl::Span<Job* const> jobs) {
  absl::Duration total;
  for (const Launched& launched : launched_) {
    total += launched.took;
    KernelMetrics*& metrics = kernel_metrics_[{launched.kernel, launched.format}];
    if (metrics == nullptr) metrics = &metrics_->Kernel(context_->id(), launched.kernel, launched.format);
    metrics->Launched(launched.took, launched.bytes, launched.flops);
  }
  for (Job* job : jobs) {
    job->kernel_time += total;
    if (launched_.empty()) continue;
    job->kernel = launched_.back().kernel;
    job->kernel_bytes = launched_.back().bytes;
  }
}

}  // namespace spmmd::server
