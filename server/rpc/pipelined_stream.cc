#include "server/rpc/pipelined_stream.h"

#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/time/clock.h"
#include "server/errors.h"
#include "server/rpc/status.h"

namespace spmmd::server {

PipelinedStream::PipelinedStream(RpcContext& rpc, const Method& method, grpc::CallbackServerContext* context,
                                 std::function<std::shared_ptr<StreamRequest>()> make)
    : scope_(rpc, method, context, /*counted=*/false), make_(std::move(make)), deadline_(scope_.deadline()) {
  if (absl::Status status = scope_.Admit(); !status.ok()) {
    // No request was read that could be counted, so the call itself is.
    method.metrics->Started();
    method.metrics->Finished(status.code(), absl::ZeroDuration());
    finished_ = true;
    Finish(scope_.Finish(status));
    return;
  }
  {
    absl::MutexLock lock(&rpc.streams_mutex);
    rpc.streams.insert(this);
  }
  connection_ = rpc.connections->StreamBegan(*context);
  // Says that the stream is open: who registers regions waits for it.
  if (connection_ != nullptr) StartSendInitialMetadata();
  StartRead(&in_);
  // One that begins while the server drains has missed BeginDrain.
  if (rpc.state.load() == ServingState::kDraining) BeginDrain();
}

void PipelinedStream::OnReadDone(bool ok) {
  if (!ok) {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    reads_done_ = true;
    FinishIfDone();
    return;
  }
  if (in_.Length() <= kMaxOfferedBytes) {
    // For the task: the stream may be cancelled, and over, before that runs.
    refs_.fetch_add(1, std::memory_order_relaxed);
    absl::AnyInvocable<void()> task = [this] {
      Handle();
      Unref();
    };
    if (scope_.rpc().engine->Offer(task)) return;
    refs_.fetch_sub(1, std::memory_order_relaxed);
  }
  Handle();
}

void PipelinedStream::Handle() {
  auto item = std::make_shared<Item>();
  item->request = make_();
  if (absl::Status status = item->request->Parse(&in_); !status.ok()) {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    reads_done_ = true;
    if (end_.ok()) end_ = std::move(status);
    FinishIfDone();
    return;
  }
  item->started = absl::Now();
  {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;  // arrived after the stream was ended by a drain
    refs_.fetch_add(1, std::memory_order_relaxed);
    ++in_flight_;
    active_.insert(item);
    // The next request is read while this one runs.
    reading_ = false;
    ReadMore();
  }
  scope_.method().metrics->Started();
  Engine& engine = *scope_.rpc().engine;
  Engine::Call call =
      item->request->Start(engine, deadline_, [this, item](absl::Status status) { Answer(item, std::move(status)); });
  // gRPC, or the task's reference, keeps this object until here, however far the request has got meanwhile.
  bool cancel = false;
  {
    absl::MutexLock lock(&mutex_);
    item->call = call;
    cancel = cancelled_;
  }
  if (cancel) engine.Cancel(call);
}

void PipelinedStream::OnWriteDone(bool /*ok*/) {
  absl::MutexLock lock(&mutex_);
  writing_ = false;
  --in_flight_;
  WriteMore();
  ReadMore();
  FinishIfDone();
}

void PipelinedStream::OnCancel() {
  if (connection_ != nullptr) connection_->set_cancelled();
  std::vector<Engine::Call> calls;
  {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
    if (end_.ok()) end_ = absl::CancelledError("cancelled by the caller");
    for (const auto& item : active_) calls.push_back(item->call);
  }
  for (const Engine::Call& call : calls) scope_.rpc().engine->Cancel(call);
  absl::MutexLock lock(&mutex_);
  FinishIfDone();
}

void PipelinedStream::BeginDrain() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
  FinishIfDone();
}

void PipelinedStream::OnDone() {
  connection_.reset();
  {
    absl::MutexLock lock(&scope_.rpc().streams_mutex);
    scope_.rpc().streams.erase(this);
  }
  Unref();
}

void PipelinedStream::Unref() {
  if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

void PipelinedStream::Answer(const std::shared_ptr<Item>& item, const absl::Status& status) {
  scope_.method().metrics->Finished(status.code(), absl::Now() - item->started);
  if (!status.ok()) scope_.LogFailure(status);
  auto bytes = std::make_unique<grpc::ByteBuffer>();
  const absl::Status serialized = item->request->Answer(status, bytes.get());
  {
    absl::MutexLock lock(&mutex_);
    active_.erase(item);
    if (!serialized.ok() && end_.ok()) end_ = serialized;
    if (cancelled_ || !serialized.ok()) {
      --in_flight_;
    } else {
      to_write_.push_back(std::move(bytes));
      WriteMore();
    }
    FinishIfDone();
  }
  Unref();
}

void PipelinedStream::ReadMore() {
  if (reading_ || reads_done_ || finished_ || draining_ || in_flight_ >= scope_.rpc().limits.max_stream_in_flight)
    return;
  reading_ = true;
  StartRead(&in_);
}

void PipelinedStream::WriteMore() {
  if (cancelled_) {
    in_flight_ -= static_cast<int>(to_write_.size());
    to_write_.clear();
  }
  if (writing_ || to_write_.empty()) return;
  writing_ = true;
  out_ = std::move(to_write_.front());
  to_write_.pop_front();
  StartWrite(out_.get());
}

void PipelinedStream::FinishIfDone() {
  if (finished_ || writing_) return;
  WriteMore();  // drops what a cancelled caller will not read
  if (in_flight_ > 0 || (!reads_done_ && !cancelled_ && !draining_)) return;
  finished_ = true;
  absl::Status status = end_;
  if (status.ok() && !reads_done_) {
    status = MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "the server is shutting down");
  }
  // A drain is no failure worth a line for each stream.
  Finish(draining_ && status.code() == absl::StatusCode::kUnavailable ? ToGrpcStatus(status) : scope_.Finish(status));
}

}  // namespace spmmd::server
