#include "server/engine/engine.h"

#include <random>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/status_macros.h"
#include "server/catalog/types.h"
#include "server/engine/program.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

// A layer can be unregistered between planning and leasing; planning anew then says so, unless it was registered again.
constexpr int kPlanAttempts = 4;

std::string MakeProgramPrefix() {
  std::random_device random;
  return absl::StrCat(absl::Hex((uint64_t{random()} << 32) | random(), absl::kZeroPad16), "-");
}

void SetDuration(absl::Duration duration, google::protobuf::Duration* out) {
  const int64_t nanos = absl::ToInt64Nanoseconds(duration);
  out->set_seconds(nanos / 1'000'000'000);
  out->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
}

// Leases on all layers of the job's plan; false when one is gone.
bool TakeLeases(Job* job) {
  const Plan& plan = *job->plan;
  job->leases.clear();
  job->layers.clear();
  for (const std::weak_ptr<const ServedLayer>& weak : plan.layers) {
    std::shared_ptr<const ServedLayer> layer = weak.lock();
    if (layer == nullptr) return false;
    job->layers.push_back(layer->content().On(plan.device));
    job->leases.push_back(std::move(layer));
  }
  return true;
}

absl::Status ProgramNotFound(const std::string& id) {
  return MakeError(absl::StatusCode::kNotFound, reason::kProgramNotFound,
                   absl::StrCat("program_id: program \"", id, "\" is not registered"));
}

}  // namespace

Engine::Engine(Options options, LayerCatalog* catalog, Metrics* metrics)
    : options_(options), catalog_(catalog), metrics_(metrics), program_prefix_(MakeProgramPrefix()) {}

Engine::~Engine() = default;

Engine::Call Engine::Execute(const pb::ExecuteRequest& request, pb::ExecuteResponse* response, absl::Time deadline,
                             absl::AnyInvocable<void(absl::Status)> done) {
  const absl::Time start = absl::Now();
  auto job = std::make_shared<Job>();
  job->deadline = deadline;
  absl::Status prepared = GuardHostMemory([&] { return Prepare(request, response, job.get()); });
  if (!prepared.ok()) {
    done(std::move(prepared));
    return nullptr;
  }
  job->done = [job = job.get(), response, start, done = std::move(done)](absl::Status status) mutable {
    if (status.ok()) {
      SetDuration(job->queue_time, response->mutable_timing()->mutable_queue());
      SetDuration(job->kernel_time, response->mutable_timing()->mutable_kernel());
      SetDuration(absl::Now() - start, response->mutable_timing()->mutable_total());
    }
    done(std::move(status));
  };
  job->plan->device->executor().Submit(job);
  return job;
}

void Engine::Cancel(const Call& call) {
  if (call == nullptr) return;
  const bool expired = call->deadline <= absl::Now();
  call->plan->device->executor().Cancel(
      call, expired ? MakeError(absl::StatusCode::kDeadlineExceeded, reason::kDeadline,
                                "deadline passed before the request ran")
                    : MakeError(absl::StatusCode::kCancelled, reason::kCancelled, "cancelled by the caller"));
}

absl::Status Engine::Prepare(const pb::ExecuteRequest& request, pb::ExecuteResponse* response, Job* job) {
  SPMMD_RETURN_IF_ERROR(BindPlan(request, job));
  if (!job->plan->device->healthy()) {
    return MakeError(absl::StatusCode::kUnavailable, reason::kDeviceLost,
                     absl::StrCat("device ", job->plan->device->id(), " is lost"));
  }
  SPMMD_RETURN_IF_ERROR(BindInputs(request, *job->plan, options_.max_tokens, job));
  SPMMD_RETURN_IF_ERROR(Schedule(request, job));
  return AllocateOutputs(*job->plan, response, job);
}

absl::Status Engine::Schedule(const pb::ExecuteRequest& request, Job* job) const {
  if (!pb::Priority_IsValid(request.priority())) {
    return FieldError("priority", absl::StrCat("unknown value ", static_cast<int>(request.priority())));
  }
  job->background = request.priority() == pb::PRIORITY_BACKGROUND;
  job->flow = job->leases.empty() ? nullptr : job->leases.front().get();
  const auto dense = [](const InputValue& input) { return !input.sparse.has_value(); };
  const auto shareable = [](const std::shared_ptr<const ServedLayer>& layer) { return !layer->deterministic(); };
  job->joinable = job->rows > 0 && job->rows < options_.max_batch_tokens && absl::c_all_of(job->inputs, dense) &&
                  absl::c_all_of(job->leases, shareable);
  return absl::OkStatus();
}

absl::Status Engine::BindPlan(const pb::ExecuteRequest& request, Job* job) {
  std::shared_ptr<RegisteredProgram> registered;
  switch (request.target_case()) {
    case pb::ExecuteRequest::kProgram:
      if (request.outputs_size() > 0) return FieldError("outputs", "only with program_id");
      break;
    case pb::ExecuteRequest::kProgramId: {
      SPMMD_ASSIGN_OR_RETURN(registered, FindProgram(request.program_id()));
      if (request.outputs_size() > 0) {
        return MakeError(absl::StatusCode::kUnimplemented, reason::kUnsupported,
                         "outputs: this server has no shared memory");
      }
      break;
    }
    case pb::ExecuteRequest::TARGET_NOT_SET:
      return FieldError("target", "one of program, program_id must be set");
  }
  for (int attempt = 0; attempt < kPlanAttempts; ++attempt) {
    SPMMD_ASSIGN_OR_RETURN(job->plan,
                           registered != nullptr ? PlanOf(*registered) : PlanProgram(request.program(), *catalog_));
    if (TakeLeases(job)) return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kUnavailable, reason::kLayerNotReady,
                   "a layer of the program is being replaced all the time");
}

absl::StatusOr<std::shared_ptr<const Plan>> Engine::PlanOf(RegisteredProgram& registered) {
  // Read before planning: a change during planning makes the plan stale, not fresh.
  const uint64_t generation = catalog_->generation();
  {
    absl::MutexLock lock(&registered.mutex);
    if (registered.plan != nullptr && registered.generation == generation) return registered.plan;
  }
  SPMMD_ASSIGN_OR_RETURN(std::shared_ptr<const Plan> plan, PlanProgram(registered.program, *catalog_));
  absl::MutexLock lock(&registered.mutex);
  registered.plan = plan;
  registered.generation = generation;
  return plan;
}

absl::Status Engine::AllocateOutputs(const Plan& plan, pb::ExecuteResponse* response, Job* job) {
  uint64_t total = 0;
  for (const PlanOutput& output : plan.outputs) {
    const int64_t cols = job->step_cols[static_cast<size_t>(output.step)];
    total += static_cast<uint64_t>(job->rows * cols) * SizeOf(output.dtype);  // <= 16 * 2^31 * 2^24 * 4: no overflow
  }
  if (total > options_.max_output_bytes) {
    return Exhausted(
        reason::kTooLarge,
        absl::StrCat("program.outputs: the outputs have ", total, " bytes, the limit is ", options_.max_output_bytes),
        absl::ZeroDuration(), {{"needed", absl::StrCat(total)}, {"limit", absl::StrCat(options_.max_output_bytes)}});
  }
  job->bytes += total;
  response->clear_outputs();
  response->mutable_outputs()->Reserve(static_cast<int>(plan.outputs.size()));
  for (const PlanOutput& output : plan.outputs) {
    const int64_t cols = job->step_cols[static_cast<size_t>(output.step)];
    pb::NamedOutput& named = *response->add_outputs();
    named.set_name(plan.step_names[static_cast<size_t>(output.step)]);
    pb::Tensor& tensor = *named.mutable_tensor();
    tensor.set_dtype(ToProto(output.dtype));
    tensor.add_shape(job->rows);
    tensor.add_shape(cols);
    std::string& data = *tensor.mutable_data();
    data.resize(static_cast<size_t>(job->rows * cols) * SizeOf(output.dtype));
    job->outputs.push_back({reinterpret_cast<std::byte*>(data.data()), output.dtype, job->rows, cols, cols});
  }
  return absl::OkStatus();
}

absl::Status Engine::RegisterProgram(const pb::RegisterProgramRequest& request, pb::RegisterProgramResponse* response) {
  if (!request.has_program()) return FieldError("program", "must be set");
  auto registered = std::make_shared<RegisteredProgram>();
  registered->program = request.program();
  SPMMD_RETURN_IF_ERROR(PlanOf(*registered).status());
  absl::MutexLock lock(&mutex_);
  if (static_cast<int64_t>(programs_.size()) >= options_.max_programs) {
    return Exhausted(
        reason::kTooManyPrograms,
        absl::StrCat("program: ", programs_.size(), " programs are registered, the limit is ", options_.max_programs),
        absl::ZeroDuration(), {{"limit", absl::StrCat(options_.max_programs)}});
  }
  std::string id = absl::StrCat(program_prefix_, next_program_++);
  response->set_program_id(id);
  programs_.emplace(std::move(id), std::move(registered));
  return absl::OkStatus();
}

absl::Status Engine::UnregisterProgram(const pb::UnregisterProgramRequest& request) {
  absl::MutexLock lock(&mutex_);
  if (programs_.erase(request.program_id()) == 0) return ProgramNotFound(request.program_id());
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Engine::RegisteredProgram>> Engine::FindProgram(const std::string& program_id) {
  absl::MutexLock lock(&mutex_);
  const auto entry = programs_.find(program_id);
  if (entry == programs_.end()) return ProgramNotFound(program_id);
  return entry->second;
}

void Engine::DescribeDevices(pb::DeviceInfoResponse* response) const {
  for (const Device* device : catalog_->devices()) device->Describe(response->add_devices());
}

void Engine::DescribeServer(pb::ServerInfoResponse* response) const {
  Device& first = *catalog_->devices().front();
  response->set_backend(first.backend());
  for (int value = pb::Format_MIN; value <= pb::Format_MAX; ++value) {
    const std::optional<Format> format = FromProto(static_cast<pb::Format>(value));
    if (format.has_value() && first.CanExecute(*format)) response->add_formats(static_cast<pb::Format>(value));
  }
  pb::ServerLimits& limits = *response->mutable_limits();
  limits.set_max_tokens(options_.max_tokens);
  limits.set_max_queue_depth(first.executor().options().max_depth);
  limits.set_max_queue_bytes(first.executor().options().max_bytes);
  limits.set_max_batch_tokens(options_.max_batch_tokens);
}

void Engine::Drain() {
  for (Device* device : catalog_->devices()) device->executor().Drain();
}

}  // namespace spmmd::server
