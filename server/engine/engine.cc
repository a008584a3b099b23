#include "server/engine/engine.h"

#include <xxhash.h>

#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "kernels/base/status_macros.h"
#include "server/catalog/types.h"
#include "server/engine/program.h"
#include "server/engine/regions.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

// A layer can be unregistered between planning and leasing; planning anew then says so, unless it was registered again.
constexpr int kPlanAttempts = 4;

// The same bytes for the same program, in every process of one version.
std::string Serialize(const pb::Program& program) {
  std::string bytes;
  google::protobuf::io::StringOutputStream stream(&bytes);
  google::protobuf::io::CodedOutputStream out(&stream);
  out.SetSerializationDeterministic(true);
  program.SerializeToCodedStream(&out);
  out.Trim();
  return bytes;
}

std::string ProgramId(const std::string& serialized) {
  const XXH128_hash_t hash = XXH3_128bits(serialized.data(), serialized.size());
  return absl::StrCat(absl::Hex(hash.high64, absl::kZeroPad16), absl::Hex(hash.low64, absl::kZeroPad16));
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
  for (const std::weak_ptr<const ServedLayer>& weak : plan.layers) {
    std::shared_ptr<const ServedLayer> layer = weak.lock();
    if (layer == nullptr) return false;
    job->leases.push_back(std::move(layer));
  }
  return true;
}

// The layers of the job's plan on its device.
void FindLayers(Job* job) {
  job->layers.clear();
  for (size_t i = 0; i < job->leases.size(); ++i) {
    job->layers.push_back(job->leases[i]->content().On(*job->copies[i], job->device));
  }
}

absl::Status DeviceLost(const Device& device) {
  return MakeError(absl::StatusCode::kUnavailable, reason::kDeviceLost,
                   absl::StrCat("device ", device.id(), " is lost"), {{"device", device.id()}});
}

// What the shards of one run have in common. The parent job ends when the last of them has.
struct ShardedRun {
  explicit ShardedRun(std::shared_ptr<Job> whole) : job(std::move(whole)), remaining(job->shards.size()) {}

  void Ended(const Job& shard, const absl::Status& status) {
    {
      absl::MutexLock lock(&mutex);
      result.Update(status);
      job->queue_time = std::max(job->queue_time, shard.queue_time);
      job->kernel_time = std::max(job->kernel_time, shard.kernel_time);
      job->batch_jobs = std::max(job->batch_jobs, shard.batch_jobs);
      job->batch_rows = std::max(job->batch_rows, shard.batch_rows);
      if (--remaining > 0) return;
    }
    // The last one: nobody else looks any more.
    job->copies.clear();
    job->leases.clear();
    job->buffers.clear();
    job->done(std::move(result));
    job->done = nullptr;
  }

  const std::shared_ptr<Job> job;
  absl::Mutex mutex;
  size_t remaining;
  absl::Status result;
};

absl::Status ProgramNotFound(const std::string& id) {
  return MakeError(absl::StatusCode::kNotFound, reason::kProgramNotFound,
                   absl::StrCat("program_id: program \"", id, "\" is not registered"));
}

}  // namespace

// A program kept for later, with the plan made of it and the state of the catalog that the plan is good for.
class Engine::RegisteredProgram {
 public:
  pb::Program program;
  std::string serialized;  // what its id is made of
  int64_t uses = 0;        // registrations less removals; guarded by Engine::mutex_
  absl::Mutex mutex;
  std::shared_ptr<const Plan> plan ABSL_GUARDED_BY(mutex);
  uint64_t generation ABSL_GUARDED_BY(mutex) = 0;
};

Engine::Engine(Options options, LayerCatalog* catalog, Metrics* metrics)
    : options_(options),
      catalog_(catalog),
      metrics_(metrics),
      loader_(
          {.max_waiting = catalog->devices().front()->executor().options().max_depth,
           .max_bytes = catalog->devices().front()->executor().options().max_bytes},
          &catalog->residency(),
          [](const std::shared_ptr<Job>& job) {
            // The loader has others to bring layers for.
            job->hand_off = true;
            Dispatch(job);
          },
          metrics) {}

Engine::~Engine() = default;

Engine::Call Engine::Execute(const pb::ExecuteRequest& request, pb::ExecuteResponse* response, absl::Time deadline,
                             const Caller& caller, absl::AnyInvocable<void(absl::Status)> done) {
  const absl::Time start = absl::Now();
  auto job = std::make_shared<Job>();
  job->deadline = deadline;
  absl::Status prepared = GuardHostMemory([&] { return Prepare(request, caller, response, job.get()); });
  if (!prepared.ok()) {
    done(std::move(prepared));
    return nullptr;
  }
  job->hand_off = caller.hand_off;
  job->stay = caller.stay;
  job->done = [job = job.get(), response, start, done = std::move(done)](absl::Status status) mutable {
    if (!job->regions.empty()) {
      if (status.ok()) status = CheckRegions(*job);
      job->regions.clear();  // the job itself may live on in a handle for Cancel()
    }
    if (status.ok()) {
      SetDuration(job->queue_time, response->mutable_timing()->mutable_queue());
      SetDuration(job->kernel_time, response->mutable_timing()->mutable_kernel());
      SetDuration(absl::Now() - start, response->mutable_timing()->mutable_total());
      response->mutable_timing()->set_batch_requests(job->batch_jobs);
      response->mutable_timing()->set_batch_tokens(job->batch_rows);
    }
    done(std::move(status));
  };
  if (TakeCopies(job.get())) {
    Dispatch(job);
  } else {
    loader_.Submit(job);
  }
  return job;
}

bool Engine::Offer(absl::AnyInvocable<void()>& task) {
  for (Device* device : catalog_->devices()) {
    if (device->executor().Offer(task)) return true;
  }
  return false;
}

void Engine::Dispatch(const std::shared_ptr<Job>& job) {
  if (!job->plan->sharded) {
    FindLayers(job.get());
    job->device->executor().Submit(job);
    return;
  }
  const auto run = std::make_shared<ShardedRun>(job);
  for (const std::shared_ptr<Job>& shard : job->shards) {
    shard->leases = job->leases;
    shard->copies = job->copies;
    FindLayers(shard.get());
    shard->done = [run, shard = shard.get()](const absl::Status& result) { run->Ended(*shard, result); };
  }
  // The last of them may run here, beside the others.
  for (size_t i = 0; i < job->shards.size(); ++i) {
    job->shards[i]->hand_off = job->hand_off || i + 1 < job->shards.size();
    job->shards[i]->device->executor().Submit(job->shards[i]);
  }
}

void Engine::Cancel(const Call& call) {
  if (call == nullptr) return;
  const absl::Status status =
      call->deadline <= absl::Now()
          ? MakeError(absl::StatusCode::kDeadlineExceeded, reason::kDeadline, "deadline passed before the request ran")
          : MakeError(absl::StatusCode::kCancelled, reason::kCancelled, "cancelled by the caller");
  if (loader_.Cancel(call, status)) return;
  if (call->shards.empty()) call->device->executor().Cancel(call, status);
  for (const std::shared_ptr<Job>& shard : call->shards) shard->device->executor().Cancel(shard, status);
}

absl::Status Engine::Prepare(const pb::ExecuteRequest& request, const Caller& caller, pb::ExecuteResponse* response,
                             Job* job) {
  std::shared_ptr<RegisteredProgram> registered;
  SPMMD_RETURN_IF_ERROR(BindPlan(request, caller, job, &registered));
  SPMMD_RETURN_IF_ERROR(BindInputs(request, *job->plan, options_.max_tokens, caller.regions, caller.payloads, job));
  SPMMD_RETURN_IF_ERROR(Schedule(request, job));
  const pb::Program& program = registered != nullptr ? registered->program : request.program();
  SPMMD_ASSIGN_OR_RETURN(const auto slices, FindOutputSlices(request, program, *job->plan));
  SPMMD_RETURN_IF_ERROR(PlaceOutputs(slices, caller, request.outputs_size() > 0, response, job));
  return job->plan->sharded ? SplitJob(job) : ChooseDevice(job);
}

absl::Status Engine::ChooseDevice(Job* job) {
  int64_t fewest = 0;
  for (Device* device : job->plan->devices) {
    if (job->memory_device != nullptr && job->memory_device != device) continue;
    if (!device->healthy()) continue;
    const int64_t jobs = job->plan->devices.size() == 1 ? 0 : device->executor().unfinished();
    if (job->device != nullptr && jobs >= fewest) continue;
    job->device = device;
    fewest = jobs;
  }
  if (job->device == nullptr && job->memory_device != nullptr && job->memory_device->healthy()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kUnsupported,
                     absl::StrCat(job->regions.front().path, ": a region of the request is memory of ",
                                  job->memory_device->id(), ", where the program's layers are not"));
  }
  if (job->device == nullptr) {
    return DeviceLost(job->memory_device != nullptr ? *job->memory_device : *job->plan->devices.front());
  }
  return absl::OkStatus();
}

absl::Status Engine::SplitJob(Job* job) {
  const Plan& plan = *job->plan;
  const auto count = static_cast<int64_t>(plan.devices.size());
  if (job->memory_device != nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kUnsupported,
                     absl::StrCat(job->regions.front().path,
                                  ": layers that are sharded over devices take no region "
                                  "in the memory of one"));
  }
  for (const Device* device : plan.devices) {
    if (!device->healthy()) return DeviceLost(*device);
  }
  for (int64_t index = 0; index < count; ++index) {
    auto shard = std::make_shared<Job>();
    shard->plan = job->plan;
    shard->device = plan.devices[static_cast<size_t>(index)];
    shard->rows = job->rows;
    for (const int64_t cols : job->step_cols) {
      const auto [begin, end] = ShareOf(cols, index, count);
      if (begin == end) {
        return MakeError(absl::StatusCode::kFailedPrecondition, reason::kUnsupported,
                         absl::StrCat("program.steps: ", cols, " columns cannot be spread over ", count, " devices"));
      }
      shard->step_cols.push_back(end - begin);
    }
    for (size_t i = 0; i < job->inputs.size(); ++i) {
      InputValue input = job->inputs[i];
      if (plan.input_sliced[i]) {
        const auto [begin, end] = ShareOf(input.dense.cols, index, count);
        input.dense.data += static_cast<size_t>(begin) * SizeOf(input.dense.dtype);
        input.dense.cols = end - begin;
      }
      shard->inputs.push_back(std::move(input));
    }
    for (MutableDenseView output : job->outputs) {
      const auto [begin, end] = ShareOf(output.cols, index, count);
      output.data += static_cast<size_t>(begin) * SizeOf(output.dtype);
      output.cols = end - begin;
      shard->outputs.push_back(output);
    }
    shard->outputs_pinned = job->outputs_pinned;
    shard->bytes = job->bytes;
    shard->deadline = job->deadline;
    shard->flow = job->flow;
    shard->background = job->background;
    shard->joinable = job->joinable;
    shard->deterministic = job->deterministic;
    job->shards.push_back(std::move(shard));
  }
  return absl::OkStatus();
}

absl::Status Engine::Schedule(const pb::ExecuteRequest& request, Job* job) const {
  if (!pb::Priority_IsValid(request.priority())) {
    return FieldError("priority", absl::StrCat("unknown value ", static_cast<int>(request.priority())));
  }
  job->background = request.priority() == pb::PRIORITY_BACKGROUND;
  job->flow = job->leases.empty() ? nullptr : job->leases.front().get();
  const auto dense = [](const InputValue& input) { return !input.sparse.has_value(); };
  const auto shareable = [](const std::shared_ptr<const ServedLayer>& layer) { return !layer->deterministic(); };
  job->deterministic = !absl::c_all_of(job->leases, shareable);
  job->joinable = job->memory_device == nullptr && job->rows > 0 && job->rows < options_.max_batch_tokens &&
                  absl::c_all_of(job->inputs, dense) && !job->deterministic;
  return absl::OkStatus();
}

Engine::KnownProgram Engine::Recall(absl::string_view program_bytes) {
  absl::MutexLock lock(&mutex_);
  const auto entry = recalled_.find(program_bytes);
  return entry == recalled_.end() ? nullptr : entry->second;
}

absl::Status Engine::BindPlan(const pb::ExecuteRequest& request, const Caller& caller, Job* job,
                              std::shared_ptr<RegisteredProgram>* found) {
  std::shared_ptr<RegisteredProgram>& registered = *found;
  const auto target = caller.known != nullptr ? pb::ExecuteRequest::kProgram : request.target_case();
  const bool remember = caller.known == nullptr && target == pb::ExecuteRequest::kProgram &&
                        !caller.program_bytes.empty() && caller.program_bytes.size() <= kMaxRecalledBytes;
  switch (target) {
    case pb::ExecuteRequest::kProgram:
      if (request.outputs_size() > 0) return FieldError("outputs", "only with program_id");
      registered = caller.known;
      if (remember) {
        registered = std::make_shared<RegisteredProgram>();
        registered->program = request.program();
      }
      break;
    case pb::ExecuteRequest::kProgramId: {
      SPMMD_ASSIGN_OR_RETURN(registered, FindProgram(request.program_id()));
      break;
    }
    case pb::ExecuteRequest::TARGET_NOT_SET:
      return FieldError("target", "one of program, program_id must be set");
  }
  for (int attempt = 0; attempt < kPlanAttempts; ++attempt) {
    SPMMD_ASSIGN_OR_RETURN(job->plan,
                           registered != nullptr ? PlanOf(*registered) : PlanProgram(request.program(), *catalog_));
    if (!TakeLeases(job)) continue;
    if (remember) {
      absl::MutexLock lock(&mutex_);
      if (recalled_.size() >= kMaxRecalled) recalled_.clear();
      recalled_.insert_or_assign(caller.program_bytes, registered);
    }
    return absl::OkStatus();
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

absl::Status Engine::PlaceOutputs(const std::vector<const pb::RegionSlice*>& slices, const Caller& caller,
                                  bool in_request, pb::ExecuteResponse* response, Job* job) {
  const Plan& plan = *job->plan;
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
  for (size_t o = 0; o < plan.outputs.size(); ++o) {
    const PlanOutput& output = plan.outputs[o];
    const int64_t cols = job->step_cols[static_cast<size_t>(output.step)];
    const uint64_t bytes = static_cast<uint64_t>(job->rows * cols) * SizeOf(output.dtype);
    pb::NamedOutput& named = *response->add_outputs();
    named.set_name(plan.step_names[static_cast<size_t>(output.step)]);
    pb::Tensor& tensor = *named.mutable_tensor();
    tensor.set_dtype(ToProto(output.dtype));
    tensor.add_shape(job->rows);
    tensor.add_shape(cols);
    std::byte* data = nullptr;
    if (slices[o] != nullptr) {
      const std::string path = absl::StrCat(in_request ? "outputs[" : "program.outputs[", o, "].region");
      SPMMD_ASSIGN_OR_RETURN(data,
                             BindSlice(caller.regions, *slices[o], path, output.dtype, bytes, /*output=*/true, job));
      if (job->regions.back().region->device() != nullptr) job->outputs_on_device |= uint32_t{1} << o;
      *tensor.mutable_region() = *slices[o];
    } else if (caller.payloads != nullptr && bytes >= Payloads::kMinBytes) {
      caller.payloads->outputs.resize(plan.outputs.size());
      HostBuffer& buffer = caller.payloads->outputs[o];
      buffer = plan.devices.front()->host_buffers().Take(bytes);
      if (buffer.pinned()) job->outputs_pinned |= uint32_t{1} << o;
      data = buffer.data();
      tensor.mutable_data();
    } else {
      std::string& content = *tensor.mutable_data();
      content.resize(bytes);
      data = reinterpret_cast<std::byte*>(content.data());
    }
    job->outputs.push_back({data, output.dtype, job->rows, cols, cols});
  }
  return absl::OkStatus();
}

absl::Status Engine::RegisterProgram(const pb::RegisterProgramRequest& request, pb::RegisterProgramResponse* response) {
  if (!request.has_program()) return FieldError("program", "must be set");
  auto registered = std::make_shared<RegisteredProgram>();
  registered->program = request.program();
  registered->serialized = Serialize(request.program());
  SPMMD_RETURN_IF_ERROR(PlanOf(*registered).status());
  std::string id = ProgramId(registered->serialized);
  absl::MutexLock lock(&mutex_);
  auto entry = programs_.find(id);
  while (entry != programs_.end() && entry->second->serialized != registered->serialized) {
    id += '+';  // another program with the same hash
    entry = programs_.find(id);
  }
  if (entry == programs_.end()) {
    if (static_cast<int64_t>(programs_.size()) >= options_.max_programs) {
      return Exhausted(
          reason::kTooManyPrograms,
          absl::StrCat("program: ", programs_.size(), " programs are registered, the limit is ", options_.max_programs),
          absl::ZeroDuration(), {{"limit", absl::StrCat(options_.max_programs)}});
    }
    entry = programs_.emplace(id, std::move(registered)).first;
  }
  ++entry->second->uses;
  response->set_program_id(std::move(id));
  return absl::OkStatus();
}

absl::Status Engine::UnregisterProgram(const pb::UnregisterProgramRequest& request) {
  absl::MutexLock lock(&mutex_);
  const auto entry = programs_.find(request.program_id());
  if (entry == programs_.end()) return ProgramNotFound(request.program_id());
  if (--entry->second->uses == 0) programs_.erase(entry);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Engine::RegisteredProgram>> Engine::FindProgram(const std::string& program_id) {
  absl::MutexLock lock(&mutex_);
  const auto entry = programs_.find(program_id);
  if (entry == programs_.end()) return ProgramNotFound(program_id);
  return entry->second;
}

absl::StatusOr<pb::Program> Engine::GetProgram(const std::string& program_id) {
  SPMMD_ASSIGN_OR_RETURN(const std::shared_ptr<RegisteredProgram> registered, FindProgram(program_id));
  return registered->program;
}

absl::StatusOr<Engine::ProgramView> Engine::DescribeProgram(const std::string& program_id) {
  SPMMD_ASSIGN_OR_RETURN(std::shared_ptr<RegisteredProgram> registered, FindProgram(program_id));
  SPMMD_ASSIGN_OR_RETURN(std::shared_ptr<const Plan> plan, PlanOf(*registered));
  return ProgramView{std::move(plan), std::move(registered)};
}

std::vector<std::string> Engine::ProgramIds() {
  std::vector<std::string> ids;
  absl::MutexLock lock(&mutex_);
  for (const auto& [id, program] : programs_) ids.push_back(id);
  return ids;
}

void Engine::DescribeDevices(pb::DeviceInfoResponse* response) const {
  for (const Device* device : catalog_->devices()) device->Describe(response->add_devices());
}

void Engine::DescribeServer(pb::ServerInfoResponse* response) const {
  Device& first = *catalog_->devices().front();
  response->set_backend(first.backend());
  for (int value = pb::Format_MIN; value <= pb::Format_MAX; ++value) {
    const std::optional<Format> format = FromProto(static_cast<pb::Format>(value));
    if (format.has_value() && first.CanExecute(first.Layout(*format))) {
      response->add_formats(static_cast<pb::Format>(value));
    }
  }
  pb::ServerLimits& limits = *response->mutable_limits();
  limits.set_max_tokens(options_.max_tokens);
  limits.set_max_queue_depth(first.executor().options().max_depth);
  limits.set_max_queue_bytes(first.executor().options().max_bytes);
  limits.set_max_batch_tokens(options_.max_batch_tokens);
}

void Engine::Drain() {
  loader_.Drain();
  for (Device* device : catalog_->devices()) device->executor().Drain();
}

}  // namespace spmmd::server
