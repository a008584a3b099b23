#include "client/cpp/ring.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <ctime>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/connection.h"
#include "client/cpp/status.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "proto/ring/ring_layout.h"

namespace spmmd::client {
namespace {

// Whoever sleeps looks this often whether the server is still there.
constexpr int64_t kMaxSleepNanoseconds = 100'000'000;
constexpr absl::Duration kCloseTimeout = absl::Seconds(30);

int64_t Now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The same status as a call's: with ErrorInfo and RetryInfo.
absl::Status StatusOf(const ring::Completion& completion) {
  const std::string message(completion.message, std::min<size_t>(completion.message_bytes, sizeof(completion.message)));
  google::rpc::Status details;
  details.set_code(completion.code);
  details.set_message(message);
  google::rpc::ErrorInfo info;
  info.set_domain("spmmd");
  info.set_reason(std::string(completion.reason, std::min<size_t>(completion.reason_bytes, sizeof(completion.reason))));
  details.add_details()->PackFrom(info);
  if (completion.retry_ns != 0) {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(static_cast<int64_t>(completion.retry_ns / 1'000'000'000));
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(completion.retry_ns % 1'000'000'000));
    details.add_details()->PackFrom(retry);
  }
  return FromGrpcStatus(
      grpc::Status(static_cast<grpc::StatusCode>(completion.code), message, details.SerializeAsString()));
}

}  // namespace

Ring::Ring(SharedMemory* memory, RingOptions options, std::unique_ptr<SharedRegion> region, uint64_t tensors_at)
    : memory_(*memory),
      options_(std::move(options)),
      region_(std::move(region)),
      tensors_at_(tensors_at),
      tensor_bytes_(options_.tensor_bytes),
      header_(*reinterpret_cast<ring::Header*>(region_->data())) {}

absl::StatusOr<std::unique_ptr<Ring>> Ring::Open(SharedMemory* memory, RingOptions options, const CallOptions& call) {
  const uint32_t entries = options.entries;
  if (entries < ring::kMinEntries || entries > ring::kMaxEntries || (entries & (entries - 1)) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("entries: ", entries, " is not a power of two within ",
                                                   ring::kMinEntries, " to ", ring::kMaxEntries));
  }
  // Tensors begin at a page, so that offsets from 0 are aligned in memory.
  const uint64_t tensors_at = (ring::Bytes(entries) + ring::kAlignment - 1) / ring::kAlignment * ring::kAlignment;
  auto region = memory->Create(tensors_at + options.tensor_bytes, call);
  if (!region.ok()) return region.status();
  std::unique_ptr<Ring> ring(new Ring(memory, std::move(options), *std::move(region), tensors_at));
  v1::OpenRingRequest request;
  request.set_region(ring->region_->name());
  request.set_entries(entries);
  for (const std::string& id : ring->options_.program_ids) request.add_program_ids(id);
  v1::OpenRingResponse response;
  grpc::ClientContext context;
  absl::Status status = memory->connection()->Prepare(context, call, memory->connection()->options().timeout);
  if (status.ok()) status = FromGrpcStatus(memory->stub().OpenRing(&context, request, &response));
  if (!status.ok()) return status;
  const ring::Header& header = ring->header_;
  if (header.magic != ring::kMagic || header.version != ring::kVersion) {
    return absl::UnimplementedError(
        absl::StrCat("the server's ring has layout version ", header.version, ", this library knows ", ring::kVersion));
  }
  ring->id_ = response.ring_id();
  return ring;
}

Ring::~Ring() {
  if (id_.empty() || !memory_.alive()) return;
  v1::CloseRingRequest request;
  request.set_ring_id(id_);
  v1::CloseRingResponse response;
  grpc::ClientContext context;
  if (!memory_.connection()->Prepare(context, {}, kCloseTimeout).ok()) return;
  static_cast<void>(memory_.stub().CloseRing(&context, request, &response));
}

absl::Status Ring::Over() {
  switch (ring::Load(header_.state)) {
    case ring::kOpen:
      return memory_.alive() ? absl::OkStatus() : absl::UnavailableError("the connection to the server has ended");
    case ring::kFailed:
      return absl::UnavailableError("the server has given the ring up: its counters or its memory were damaged");
    default:
      return absl::UnavailableError("the server has closed the ring");
  }
}

absl::Status Ring::Submit(const Entry& entry) {
  if (entry.inputs.size() + entry.outputs.size() > ring::kMaxTensors) {
    return absl::InvalidArgumentError(absl::StrCat("entry: ", entry.inputs.size(), " inputs and ", entry.outputs.size(),
                                                   " outputs, the limit is ", ring::kMaxTensors, " together"));
  }
  if (entry.rows < 0 || entry.rows > std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("rows: ", entry.rows, " is out of range"));
  }
  if (submitted_ - consumed_ >= options_.entries) {
    return absl::ResourceExhaustedError(absl::StrCat(options_.entries, " entries are in flight: wait for one"));
  }
  if (const uint32_t state = ring::Load(header_.state); state != ring::kOpen) return Over();
  ring::Submission submission = {};
  submission.user_data = entry.user_data;
  if (entry.timeout != absl::InfiniteDuration()) {
    submission.deadline_ns = static_cast<uint64_t>(
        std::max<int64_t>(1, Now() + std::max<int64_t>(0, absl::ToInt64Nanoseconds(entry.timeout))));
  }
  submission.program = entry.program;
  submission.rows = static_cast<uint32_t>(entry.rows);
  submission.inputs = static_cast<uint8_t>(entry.inputs.size());
  submission.outputs = static_cast<uint8_t>(entry.outputs.size());
  submission.priority = static_cast<uint8_t>(entry.priority);
  size_t next = 0;
  for (const absl::Span<const Tensor> tensors : {entry.inputs, entry.outputs}) {
    for (const Tensor& tensor : tensors) {
      if (tensor.cols < 0 || tensor.cols > std::numeric_limits<uint32_t>::max()) {
        return absl::InvalidArgumentError(absl::StrCat("cols: ", tensor.cols, " is out of range"));
      }
      submission.tensors[next++] = {tensors_at_ + tensor.offset, static_cast<uint32_t>(tensor.cols),
                                    static_cast<uint32_t>(tensor.dtype)};
    }
  }
  std::memcpy(region_->data() + ring::kSubmissionsOffset + (submitted_ % options_.entries) * sizeof(submission),
              &submission, sizeof(submission));
  ++submitted_;
  ring::Store(header_.submitted, submitted_);
  ring::WakeIfWaiting(header_.server_waiting);
  return absl::OkStatus();
}

Ring::Result Ring::Read(uint32_t index) const {
  ring::Completion completion;
  std::memcpy(
      &completion,
      region_->data() + ring::CompletionsOffset(options_.entries) + (index % options_.entries) * sizeof(completion),
      sizeof(completion));
  Result result;
  result.user_data = completion.user_data;
  if (completion.code != 0) {
    result.status = StatusOf(completion);
    return result;
  }
  result.queue = absl::Nanoseconds(static_cast<int64_t>(completion.queue_ns));
  result.kernel = absl::Nanoseconds(static_cast<int64_t>(completion.kernel_ns));
  result.total = absl::Nanoseconds(static_cast<int64_t>(completion.total_ns));
  return result;
}

absl::StatusOr<Ring::Result> Ring::Wait(absl::Duration timeout) {
  constexpr uint32_t kLooksBetweenYields = 32;
  const int64_t start = Now();
  const int64_t spin_until = start + absl::ToInt64Nanoseconds(options_.spin);
  const int64_t wait = absl::ToInt64Nanoseconds(std::max(timeout, absl::ZeroDuration()));
  const int64_t until =
      wait > std::numeric_limits<int64_t>::max() - start ? std::numeric_limits<int64_t>::max() : start + wait;
  uint32_t looks = 0;
  while (ring::Load(header_.completed) == consumed_) {
    if (++looks % kLooksBetweenYields != 0) {
      Pause();
      continue;
    }
    const int64_t now = Now();
    if (now >= until) return absl::DeadlineExceededError("no entry completed in time");
    if (now < spin_until) {
      sched_yield();
      continue;
    }
    ring::Store(header_.client_waiting, 1);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    // In this order: the last completions are stored before the state is.
    const absl::Status over = Over();
    const bool empty = ring::Load(header_.completed) == consumed_;
    if (empty && over.ok()) {
      ring::FutexWait(header_.client_waiting, 1, std::min(until - now, kMaxSleepNanoseconds));
    }
    ring::Store(header_.client_waiting, 0);
    if (empty && !over.ok()) return over;
  }
  const Result result = Read(consumed_);
  ++consumed_;
  ring::Store(header_.consumed, consumed_);
  ring::WakeIfWaiting(header_.server_waiting);
  return result;
}

absl::StatusOr<Ring::Result> Ring::Execute(const Entry& entry) {
  if (absl::Status status = Submit(entry); !status.ok()) return status;
  return Wait();
}

}  // namespace spmmd::client
