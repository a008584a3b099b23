#include "server/device/cpu_runner.h"

#include <algorithm>
#include <cstring>

#include "absl/time/clock.h"
#include "kernels/base/status_macros.h"
#include "server/device/elementwise.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

// Whether `active` nonzeros in `rows` rows of length k are multiplied faster one row at a time, touching only their
// columns of W (SpMspV), than all rows at once, touching all of W (SpMM). Costs in units of one SpMV over the whole of
// W, fitted to 4096x4096 fp16 at 50 % with 1 to 32 rows and 2 to 90 % active: a row by SpMspV costs its share of active
// columns, a twentieth more for the less regular access, and a little for the launch; every further row of an SpMM
// costs 0.42.
bool SparseIsFaster(Format format, int64_t rows, int64_t active, int64_t k) {
  // DENSE rows are stored along K: skipping columns saves no memory traffic.
  if (format == Format::kDense) return false;
  constexpr double kPerActiveShare = 1.05;
  constexpr double kPerRow = 0.03;
  constexpr double kPerFurtherRow = 0.42;
  const double sparse =
      kPerActiveShare * static_cast<double>(active) / static_cast<double>(k) + kPerRow * static_cast<double>(rows);
  const double dense = 1.0 + kPerFurtherRow * static_cast<double>(rows - 1);
  return sparse < dense;
}

void Scatter(const SparseRows& x, const MutableDenseView& to) {
  for (int64_t row = 0; row < x.rows; ++row) {
    auto* out = reinterpret_cast<float*>(to.row(row));
    std::fill_n(out, x.cols, 0.0f);
    for (uint64_t i = x.offsets[static_cast<size_t>(row)]; i < x.offsets[static_cast<size_t>(row) + 1]; ++i) {
      out[x.indices[i]] = x.values[i];
    }
  }
}

MutableDenseView Fp32View(std::byte* data, int64_t rows, int64_t cols) { return {data, DType::kF32, rows, cols, cols}; }

uint64_t Fp32Bytes(int64_t rows, int64_t cols) { return static_cast<uint64_t>(rows * cols) * sizeof(float); }

}  // namespace

absl::StatusOr<int> Workspace::Take(uint64_t bytes) {
  int best = -1;
  for (int i = 0; i < static_cast<int>(blocks_.size()); ++i) {
    const Block& block = blocks_[static_cast<size_t>(i)];
    if (block.taken || block.buffer.size() < bytes) continue;
    if (best < 0 || block.buffer.size() < blocks_[static_cast<size_t>(best)].buffer.size()) best = i;
  }
  if (best < 0) {
    Block block;
    SPMMD_ASSIGN_OR_RETURN(block.reservation, budget_->Reserve(MemoryKind::kWorkspace, bytes));
    SPMMD_ASSIGN_OR_RETURN(block.buffer, Buffer::Allocate(bytes));
    blocks_.push_back(std::move(block));
    best = static_cast<int>(blocks_.size()) - 1;
  }
  blocks_[static_cast<size_t>(best)].taken = true;
  return best;
}

void Workspace::EndRun() {
  // Small blocks first: they serve most requests.
  std::sort(blocks_.begin(), blocks_.end(),
            [](const Block& a, const Block& b) { return a.buffer.size() < b.buffer.size(); });
  uint64_t kept = 0;
  size_t count = 0;
  for (Block& block : blocks_) {
    block.taken = false;
    if (kept + block.buffer.size() > kRetainedBytes) break;
    kept += block.buffer.size();
    ++count;
  }
  blocks_.resize(count);
}

absl::Status CpuRunner::Run(absl::Span<Job* const> jobs) {
  absl::Status status = GuardHostMemory([&]() -> absl::Status {
    if (jobs.size() > 1) return RunJoined(jobs);
    return jobs[0]->rows == 0 ? absl::OkStatus() : RunSteps(*jobs[0]);
  });
  workspace_.EndRun();
  thresholded_.EndRun();
  return status;
}

absl::Status CpuRunner::RunJoined(absl::Span<Job* const> jobs) {
  const Job& first = *jobs[0];
  Job joined;
  joined.plan = first.plan;
  joined.layers = first.layers;
  joined.step_cols = first.step_cols;
  for (const Job* job : jobs) joined.rows += job->rows;
  // Rows of a value without gaps, in the workspace.
  const auto place = [&](DType dtype, int64_t cols) -> absl::StatusOr<MutableDenseView> {
    SPMMD_ASSIGN_OR_RETURN(const int block, workspace_.Take(static_cast<uint64_t>(joined.rows * cols) * SizeOf(dtype)));
    return MutableDenseView{workspace_.data(block), dtype, joined.rows, cols, cols};
  };
  for (size_t i = 0; i < first.inputs.size(); ++i) {
    SPMMD_ASSIGN_OR_RETURN(const MutableDenseView x, place(first.inputs[i].dense.dtype, first.inputs[i].dense.cols));
    int64_t row = 0;
    for (const Job* job : jobs) {
      const DenseView& from = job->inputs[i].dense;
      SPMMD_RETURN_IF_ERROR(ConvertDense(from, {x.row(row), x.dtype, from.rows, x.cols, x.row_stride}));
      row += from.rows;
    }
    joined.inputs.emplace_back().dense = x.Const();
  }
  for (const MutableDenseView& output : first.outputs) {
    SPMMD_ASSIGN_OR_RETURN(const MutableDenseView y, place(output.dtype, output.cols));
    joined.outputs.push_back(y);
  }
  SPMMD_RETURN_IF_ERROR(RunSteps(joined));
  for (size_t o = 0; o < joined.outputs.size(); ++o) {
    const MutableDenseView& y = joined.outputs[o];
    int64_t row = 0;
    for (Job* job : jobs) {
      const MutableDenseView& to = job->outputs[o];
      SPMMD_RETURN_IF_ERROR(ConvertDense({y.row(row), y.dtype, to.rows, y.cols, y.row_stride}, to));
      row += to.rows;
    }
  }
  for (Job* job : jobs) {
    job->kernel_time = joined.kernel_time;
    job->kernel = joined.kernel;
    job->kernel_bytes = joined.kernel_bytes;
  }
  return absl::OkStatus();
}

absl::Status CpuRunner::RunSteps(Job& job) {
  const Plan& plan = *job.plan;
  metrics_->BatchLaunched(job.rows);
  std::vector<Value> values;
  values.reserve(job.inputs.size() + plan.steps.size());
  for (const InputValue& input : job.inputs) {
    values.push_back({input.dense, input.sparse.has_value() ? &*input.sparse : nullptr, -1});
  }
  for (int s = 0; s < static_cast<int>(plan.steps.size()); ++s) {
    if (s > 0) SPMMD_RETURN_IF_ERROR(CheckWanted(job, absl::Now()));
    const PlanStep& step = plan.steps[static_cast<size_t>(s)];
    const int64_t cols = job.step_cols[static_cast<size_t>(s)];

    // The step writes straight into the response when it can: into an fp32 output, which later steps may read, or into
    // any output that is the value's only use.
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
    Value value;
    MutableDenseView y;
    if (direct >= 0) {
      y = job.outputs[static_cast<size_t>(direct)];
    } else if (uses > 0 || step.last_use >= 0) {
      SPMMD_ASSIGN_OR_RETURN(value.block, workspace_.Take(Fp32Bytes(job.rows, cols)));
      y = Fp32View(workspace_.data(value.block), job.rows, cols);
    } else {
      values.push_back(value);  // nobody reads it
      continue;
    }
    value.dense = y.Const();

    const Value& left = values[static_cast<size_t>(step.left)];
    if (step.op == PlanStep::Op::kMatmul) {
      SPMMD_RETURN_IF_ERROR(RunMatmul(step, left, y, job));
    } else {
      const Value& right = values[static_cast<size_t>(step.right)];
      const absl::Time start = absl::Now();
      const bool add = step.op == PlanStep::Op::kAdd;
      Elementwise(add ? ElementwiseOp::kAdd : ElementwiseOp::kMul, step.activation, left.dense, right.dense, y, pool_);
      const absl::Duration took = absl::Now() - start;
      const int64_t elements = job.rows * cols;
      cpu::LaunchInfo info;
      info.kernel = add ? "elementwise_add" : "elementwise_mul";
      info.flops = elements;
      info.bytes =
          elements * static_cast<int64_t>(SizeOf(left.dense.dtype) + SizeOf(right.dense.dtype) + SizeOf(y.dtype));
      Record(info, "F32", took, job);
    }
    for (int o = 0; o < static_cast<int>(plan.outputs.size()); ++o) {
      if (plan.outputs[static_cast<size_t>(o)].step != s || o == direct) continue;
      SPMMD_RETURN_IF_ERROR(ConvertDense(y.Const(), job.outputs[static_cast<size_t>(o)]));
    }
    values.push_back(value);
    if (step.last_use < 0 && value.block >= 0) workspace_.Give(value.block);
    // Values that this step was the last to read.
    for (int earlier = 0; earlier < s; ++earlier) {
      const int block = values[job.inputs.size() + static_cast<size_t>(earlier)].block;
      if (plan.steps[static_cast<size_t>(earlier)].last_use == s && block >= 0) workspace_.Give(block);
    }
  }
  return absl::OkStatus();
}

absl::Status CpuRunner::RunMatmul(const PlanStep& step, const Value& x, const MutableDenseView& y, Job& job) {
  const auto& layer = static_cast<const CpuLayer&>(*job.layers[static_cast<size_t>(step.layer)]);
  Epilogue epilogue;
  if (step.use_bias) epilogue.bias = layer.bias();
  epilogue.activation = step.activation;
  if (x.sparse == nullptr && !step.activation_threshold.has_value()) {
    return Launch(layer, x.dense, epilogue, y, job);
  }

  const SparseRows* rows = x.sparse;
  if (rows == nullptr || step.activation_threshold.has_value()) {
    const float threshold = step.activation_threshold.value_or(0.0f);
    SPMMD_ASSIGN_OR_RETURN(
        rows, rows == nullptr ? thresholded_.FromDense(x.dense, threshold) : thresholded_.FromSparse(*rows, threshold));
  }
  if (SparseIsFaster(layer.format(), job.rows, static_cast<int64_t>(rows->values.size()), layer.k())) {
    return RunSparseRows(layer, epilogue, *rows, y, job);
  }
  SPMMD_ASSIGN_OR_RETURN(const int block, workspace_.Take(Fp32Bytes(job.rows, layer.k())));
  const MutableDenseView dense = Fp32View(workspace_.data(block), job.rows, layer.k());
  Scatter(*rows, dense);
  absl::Status status = Launch(layer, dense.Const(), epilogue, y, job);
  workspace_.Give(block);
  return status;
}

absl::Status CpuRunner::RunSparseRows(const CpuLayer& layer, const Epilogue& epilogue, const SparseRows& x,
                                      const MutableDenseView& y, Job& job) {
  for (int64_t row = 0; row < x.rows; ++row) {
    const uint64_t begin = x.offsets[static_cast<size_t>(row)];
    const uint64_t count = x.offsets[static_cast<size_t>(row) + 1] - begin;
    const SparseVector vector{x.indices.subspan(begin, count), absl::MakeConstSpan(x.values).subspan(begin, count)};
    const MutableDenseView out{y.row(row), y.dtype, 1, y.cols, y.row_stride};
    const absl::Time start = absl::Now();
    cpu::LaunchInfo info;
    SPMMD_RETURN_IF_ERROR(cpu::MatmulSparse(layer.packed(), vector, epilogue, out, pool_, &info));
    const absl::Duration took = absl::Now() - start;

    Record(info, Name(layer.format()).data(), took, job);
  }
  return absl::OkStatus();
}

absl::Status CpuRunner::Launch(const CpuLayer& layer, const DenseView& x, const Epilogue& epilogue,
                               const MutableDenseView& y, Job& job) {
  const absl::Time start = absl::Now();
  cpu::LaunchInfo info;
  SPMMD_RETURN_IF_ERROR(cpu::Matmul(layer.packed(), x, epilogue, y, pool_, &info));
  const absl::Duration took = absl::Now() - start;

  Record(info, Name(layer.format()).data(), took, job);
  return absl::OkStatus();
}

void CpuRunner::Record(const cpu::LaunchInfo& info, const char* format, absl::Duration took, Job& job) {
  job.kernel_time += took;
  job.kernel = absl::string_view(info.kernel.data(), info.kernel.size());
  job.kernel_bytes = info.bytes;
  KernelMetrics*& metrics = kernel_metrics_[{info.kernel.data(), format}];
  if (metrics == nullptr) metrics = &metrics_->Kernel(device_, std::string(info.kernel), format);
  metrics->Launched(took, info.bytes, info.flops);
}

}  // namespace spmmd::server
