#include "server/ring/ring.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/status_macros.h"
#include "server/catalog/types.h"
#include "server/errors.h"
#include "server/log/log.h"

namespace spmmd::server {
namespace {

// How long a sleeping ring takes at most to notice that it was closed, should the caller meddle with the futex.
constexpr int64_t kMaxSleepNanoseconds = 100'000'000;

int64_t MonotonicNanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

absl::Status CheckOpenRequest(const Ring::Options& options, const Region& region) {
  if (region.kind() != RegionKind::kPosix) return FieldError("region", "must be a posix_shm region");
  if (options.offset % ring::kAlignment != 0) {
    return FieldError("offset", absl::StrCat(options.offset, " is not a multiple of ", ring::kAlignment));
  }
  const uint32_t entries = options.entries;
  if (entries < ring::kMinEntries || entries > ring::kMaxEntries || (entries & (entries - 1)) != 0) {
    return FieldError("entries", absl::StrCat(entries, " is not a power of two within ", ring::kMinEntries, " to ",
                                              ring::kMaxEntries));
  }
  if (!region.Slice("", options.offset, ring::Bytes(entries)).ok()) {
    return FieldError("offset", absl::StrCat("a ring of ", ring::Bytes(entries), " bytes at offset ", options.offset,
                                             " does not fit the region of ", region.size(), " bytes"));
  }
  if (reinterpret_cast<uintptr_t>(region.data() + options.offset) % alignof(ring::Header) != 0) {
    return FieldError("offset", absl::StrCat("the region itself begins at a place that is not aligned to ",
                                             alignof(ring::Header), " bytes"));
  }
  if (options.program_ids.empty()) return FieldError("program_ids", "must name a program");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<Ring>> Ring::Create(Options options, std::shared_ptr<const Region> region,
                                                   RegionPool* pool, Engine* engine, RpcMetrics* metrics) {
  SPMMD_RETURN_IF_ERROR(CheckOpenRequest(options, *region));
  SPMMD_RETURN_IF_ERROR(region->Check());
  std::vector<pb::ExecuteRequest> templates;
  for (size_t i = 0; i < options.program_ids.size(); ++i) {
    const std::string path = absl::StrCat("program_ids[", i, "]");
    absl::StatusOr<pb::Program> program = engine->GetProgram(options.program_ids[i]);
    if (!program.ok()) return AtField(path, program.status());
    if (program->inputs_size() + program->outputs_size() > ring::kMaxTensors) {
      return FieldError(
          path, absl::StrCat("the program has ", program->inputs_size(), " inputs and ", program->outputs_size(),
                             " outputs, an entry has room for ", ring::kMaxTensors));
    }
    pb::ExecuteRequest& request = templates.emplace_back();
    request.set_program_id(options.program_ids[i]);
    for (const std::string& name : program->inputs()) {
      pb::NamedInput& input = *request.add_inputs();
      input.set_name(name);
      input.mutable_dense()->add_shape(0);
      input.mutable_dense()->add_shape(0);
      input.mutable_dense()->mutable_region()->set_region(region->name());
    }
    for (const pb::OutputSpec& output : program->outputs()) {
      pb::OutputSpec& spec = *request.add_outputs();
      spec.set_step(output.step());
      spec.set_dtype(output.dtype() == pb::DATA_TYPE_UNSPECIFIED ? pb::DATA_TYPE_F32 : output.dtype());
      spec.mutable_region()->set_region(region->name());
    }
  }
  std::shared_ptr<Ring> ring(new Ring(std::move(options), std::move(region), pool, engine, metrics));
  ring->templates_ = std::move(templates);
  ring->regions_.Add(ring->region_);
  ring::Header& header = ring->header_;
  header.version = ring::kVersion;
  header.entries = ring->options_.entries;
  header.submissions_offset = ring::kSubmissionsOffset;
  header.completions_offset = ring::CompletionsOffset(ring->options_.entries);
  for (uint32_t* word : {&header.submitted, &header.taken, &header.completed, &header.consumed, &header.server_waiting,
                         &header.client_waiting}) {
    ring::Store(*word, 0);
  }
  header.magic = ring::kMagic;
  ring::Store(header.state, ring::kOpen);
  return ring;
}

Ring::Ring(Options options, std::shared_ptr<const Region> region, RegionPool* pool, Engine* engine, RpcMetrics* metrics)
    : options_(std::move(options)),
      region_(std::move(region)),
      regions_(pool),
      engine_(engine),
      metrics_(metrics),
      base_(region_->data() + options_.offset),
      header_(*reinterpret_cast<ring::Header*>(base_)) {}

void Ring::Run() {
  constexpr uint32_t kLooksBetweenYields = 32;  // a microsecond or two
  const int64_t spin = absl::ToInt64Nanoseconds(options_.spin);
  int64_t look_until = 0;
  uint32_t idle = 0;  // looks since the last entry
  while (!stopping_.load(std::memory_order_acquire)) {
    if (region_->broken()) Fail("its memory is gone");
    if (TakeOne()) {
      idle = 0;
      continue;
    }
    if (idle == 0) look_until = MonotonicNanoseconds() + spin;
    if (++idle % kLooksBetweenYields != 0) {
      Pause();
    } else if (MonotonicNanoseconds() < look_until) {
      sched_yield();  // somebody may want the core: the caller, say
    } else {
      Sleep();
    }
  }
  {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](uint32_t* in_flight) { return *in_flight == 0; }, &in_flight_));
  }
  ring::Store(header_.state, failed_.load() ? ring::kFailed : ring::kClosed);
  ring::WakeIfWaiting(header_.client_waiting);
  absl::MutexLock lock(&mutex_);
  over_ = true;
}

void Ring::Sleep() {
  ring::Store(header_.server_waiting, 1);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (Ready() == 0 && !stopping_.load(std::memory_order_seq_cst)) {
    ring::FutexWait(header_.server_waiting, 1, kMaxSleepNanoseconds);
  }
  ring::Store(header_.server_waiting, 0);
}

void Ring::Close(bool cancel) {
  stopping_.store(true, std::memory_order_seq_cst);
  ring::WakeIfWaiting(header_.server_waiting);
  if (!cancel) return;
  std::vector<Engine::Call> calls;
  {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
    for (const auto& item : items_) {
      if (item->call != nullptr) calls.push_back(item->call);
    }
  }
  for (const Engine::Call& call : calls) engine_->Cancel(call);
}

void Ring::AwaitEnd() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&over_));
}

void Ring::Fail(const std::string& why) {
  failed_.store(true);
  stopping_.store(true);
  LogWarning("ring failed", {{"region", region_->name()}, {"reason", why}});
}

uint32_t Ring::Ready() {
  const uint32_t submitted = ring::Load(header_.submitted);
  const uint32_t waiting = submitted - taken_;
  if (waiting == 0) return 0;
  if (waiting > options_.entries) {
    Fail(
        absl::StrCat("`submitted` is ", submitted, " where ", taken_, " entries of ", options_.entries, " were taken"));
    return 0;
  }
  // Every entry needs a place for its completion when it is taken: completions are never held back.
  const uint32_t consumed = ring::Load(header_.consumed);
  uint32_t completed = 0;
  uint32_t in_flight = 0;
  {
    absl::MutexLock lock(&mutex_);
    completed = completed_;
    in_flight = in_flight_;
  }
  const uint32_t unread = completed - consumed;
  if (unread > options_.entries) {
    Fail(absl::StrCat("`consumed` is ", consumed, " where ", completed, " were completed"));
    return 0;
  }
  const uint32_t used = unread + in_flight;
  return used >= options_.entries ? 0 : std::min(waiting, options_.entries - used);
}

bool Ring::TakeOne() {
  const uint32_t ready = Ready();
  if (ready == 0) return false;
  // Copied before it is looked at: the caller may go on writing.
  ring::Submission entry;
  std::memcpy(&entry, base_ + ring::kSubmissionsOffset + (taken_ % options_.entries) * sizeof(entry), sizeof(entry));
  ++taken_;
  ring::Store(header_.taken, taken_);

  metrics_->Started();
  Item* item = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    ++in_flight_;
    if (free_.empty()) {
      items_.push_back(std::make_unique<Item>());
      free_.push_back(items_.back().get());
    }
    item = free_.back();
    free_.pop_back();
  }
  item->user_data = entry.user_data;
  item->started = absl::Now();
  item->running = true;
  absl::Status status = options_.admit();
  item->admitted = status.ok();
  if (status.ok()) status = MakeRequest(entry, item);
  if (!status.ok()) {
    Complete(item, status);
    return true;
  }
  absl::Time deadline = absl::InfiniteFuture();
  if (entry.deadline_ns != 0) {
    const auto limit = static_cast<int64_t>(std::min<uint64_t>(entry.deadline_ns, INT64_MAX));
    deadline = item->started + absl::Nanoseconds(limit - MonotonicNanoseconds());
  }
  Engine::Caller caller;
  caller.regions = &regions_;
  caller.hand_off = ready > 1;
  caller.stay = true;
  Engine::Call call = engine_->Execute(item->request, &item->response, deadline, caller,
                                       [this, item](const absl::Status& result) { Complete(item, result); });
  bool cancel = false;
  {
    // Nobody else takes items: this one is still that entry's, completed or not.
    absl::MutexLock lock(&mutex_);
    if (item->running) item->call = call;
    cancel = cancelled_;
  }
  if (cancel) engine_->Cancel(call);
  return true;
}

absl::Status Ring::Place(const ring::Tensor& tensor, uint32_t rows, const std::string& path,
                         pb::RegionSlice* slice) const {
  const std::optional<DType> dtype = FromProto(static_cast<pb::DataType>(tensor.dtype));
  if (!dtype.has_value()) {
    return FieldError(absl::StrCat(path, ".dtype"), absl::StrCat("unknown value ", tensor.dtype));
  }
  // < 2^32 * 2^32 * 4 may overflow; the engine refuses such shapes, so that the product only has to be defined.
  const uint64_t bytes = uint64_t{rows} * tensor.cols * SizeOf(*dtype);
  slice->set_offset(tensor.offset);
  slice->set_size(bytes);
  const uint64_t begin = options_.offset;
  const uint64_t end = begin + ring::Bytes(options_.entries);
  if (bytes > 0 && tensor.offset < end && begin < tensor.offset + bytes) {
    return FieldError(absl::StrCat(path, ".offset"),
                      absl::StrCat(bytes, " bytes at offset ", tensor.offset, " overlap the ring itself"));
  }
  return absl::OkStatus();
}

absl::Status Ring::MakeRequest(const ring::Submission& entry, Item* item) const {
  if (entry.program >= templates_.size()) {
    return FieldError("program",
                      absl::StrCat(entry.program, " is not below the ring's number of programs, ", templates_.size()));
  }
  const pb::ExecuteRequest& model = templates_[entry.program];
  if (std::any_of(std::begin(entry.reserved), std::end(entry.reserved), [](uint8_t byte) { return byte != 0; })) {
    return FieldError("reserved", "must be zero");
  }
  if (entry.inputs != model.inputs_size()) {
    return FieldError("inputs",
                      absl::StrCat(static_cast<int>(entry.inputs), " given, the program has ", model.inputs_size()));
  }
  if (entry.outputs != model.outputs_size()) {
    return FieldError("outputs",
                      absl::StrCat(static_cast<int>(entry.outputs), " given, the program has ", model.outputs_size()));
  }
  if (item->program != entry.program) {
    item->request = model;
    item->program = entry.program;
  }
  item->request.set_priority(static_cast<pb::Priority>(entry.priority));
  for (int i = 0; i < entry.inputs; ++i) {
    pb::Tensor& tensor = *item->request.mutable_inputs(i)->mutable_dense();
    tensor.set_dtype(static_cast<pb::DataType>(entry.tensors[i].dtype));
    tensor.set_shape(0, entry.rows);
    tensor.set_shape(1, entry.tensors[i].cols);
    SPMMD_RETURN_IF_ERROR(
        Place(entry.tensors[i], entry.rows, absl::StrCat("inputs[", i, "]"), tensor.mutable_region()));
  }
  for (int o = 0; o < entry.outputs; ++o) {
    const ring::Tensor& tensor = entry.tensors[entry.inputs + o];
    pb::OutputSpec& output = *item->request.mutable_outputs(o);
    const std::string path = absl::StrCat("outputs[", o, "]");
    if (tensor.dtype != static_cast<uint32_t>(output.dtype())) {
      return FieldError(absl::StrCat(path, ".dtype"),
                        absl::StrCat(tensor.dtype, ", the program says ", static_cast<int>(output.dtype())));
    }
    SPMMD_RETURN_IF_ERROR(Place(tensor, entry.rows, path, output.mutable_region()));
  }
  return absl::OkStatus();
}

void Ring::Complete(Item* item, const absl::Status& status) {
  metrics_->Finished(status.code(), absl::Now() - item->started);
  ring::Completion completion = {};
  completion.user_data = item->user_data;
  completion.code = static_cast<int32_t>(status.code());
  if (status.ok()) {
    const pb::ExecuteTiming& timing = item->response.timing();
    const auto nanoseconds = [](const google::protobuf::Duration& duration) {
      return static_cast<uint64_t>(duration.seconds() * 1'000'000'000 + duration.nanos());
    };
    completion.queue_ns = nanoseconds(timing.queue());
    completion.kernel_ns = nanoseconds(timing.kernel());
    completion.total_ns = nanoseconds(timing.total());
  } else {
    options_.log_failure(status);
    const std::string reason = ReasonOf(status);
    completion.reason_bytes = static_cast<uint32_t>(reason.copy(completion.reason, sizeof(completion.reason)));
    completion.message_bytes =
        static_cast<uint32_t>(std::string(status.message()).copy(completion.message, sizeof(completion.message)));
    if (const auto retry = RetryDelayOf(status); retry.has_value()) {
      completion.retry_ns = static_cast<uint64_t>(absl::ToInt64Nanoseconds(*retry));
    }
  }
  absl::MutexLock lock(&mutex_);
  std::byte* const place =
      base_ + ring::CompletionsOffset(options_.entries) + (completed_ % options_.entries) * sizeof(completion);
  std::memcpy(place, &completion, sizeof(completion));
  ++completed_;
  ring::Store(header_.completed, completed_);
  ring::WakeIfWaiting(header_.client_waiting);
  if (item->admitted) options_.ended();
  item->running = false;
  item->call = nullptr;
  free_.push_back(item);
  --in_flight_;  // with the lock given up, the ring may be gone
}

}  // namespace spmmd::server
