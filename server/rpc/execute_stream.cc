#include "server/rpc/execute_stream.h"

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/grpcpp.h"
#include "server/engine/engine.h"
#include "server/errors.h"
#include "server/pb.h"
#include "server/rpc/status.h"
#include "server/rpc/unary_call.h"
#include "spmm/v1/sparse_matmul.pb.h"

namespace spmmd::server {
namespace {

class ExecuteStreamCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                                public DrainableCall {
 public:
  ExecuteStreamCall(RpcContext& rpc, const Method& method, grpc::CallbackServerContext* context)
      : scope_(rpc, method, context, /*counted=*/false), deadline_(scope_.deadline()) {
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
    StartRead(&in_);
    // One that begins while the server drains has missed BeginDrain.
    if (rpc.state.load() == ServingState::kDraining) BeginDrain();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      absl::MutexLock lock(&mutex_);
      reading_ = false;
      reads_done_ = true;
      FinishIfDone();
      return;
    }
    auto item = std::make_shared<Item>();
    if (absl::Status status = ParseMessage(&in_, &item->request); !status.ok()) {
      absl::MutexLock lock(&mutex_);
      reading_ = false;
      reads_done_ = true;
      if (end_.ok()) end_ = std::move(status);
      FinishIfDone();
      return;
    }
    item->started = absl::Now();
    const uint64_t id = item->request.request_id();
    bool duplicate = false;
    {
      absl::MutexLock lock(&mutex_);
      if (finished_) return;  // arrived after the stream was ended by a drain
      refs_.fetch_add(1, std::memory_order_relaxed);
      ++in_flight_;
      duplicate = !active_.emplace(id, item).second;
      // The next request is read while this one runs.
      reading_ = false;
      ReadMore();
    }
    scope_.method().metrics->Started();
    item->response.set_request_id(id);
    if (duplicate) {
      item->owns_id = false;
      Answer(item, FieldError("request_id", "a request with this id is in flight on the stream"));
      return;
    }
    Engine& engine = *scope_.rpc().engine;
    Engine::Call call = engine.Execute(item->request.request(), item->response.mutable_response(), deadline_,
                                       [this, item](absl::Status status) { Answer(item, std::move(status)); });
    // gRPC keeps this object until OnReadDone returns, however far the request has got meanwhile.
    bool cancel = false;
    {
      absl::MutexLock lock(&mutex_);
      item->call = call;
      cancel = cancelled_;
    }
    if (cancel) engine.Cancel(call);
  }

  // A failed write is a cancelled call, and OnCancel says so.
  void OnWriteDone(bool /*ok*/) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    --in_flight_;
    WriteMore();
    ReadMore();
    FinishIfDone();
  }

  void OnCancel() override {
    std::vector<Engine::Call> calls;
    {
      absl::MutexLock lock(&mutex_);
      cancelled_ = true;
      if (end_.ok()) end_ = absl::CancelledError("cancelled by the caller");
      for (const auto& [id, item] : active_) calls.push_back(item->call);
    }
    for (const Engine::Call& call : calls) scope_.rpc().engine->Cancel(call);
    absl::MutexLock lock(&mutex_);
    FinishIfDone();
  }

  void BeginDrain() override {
    absl::MutexLock lock(&mutex_);
    draining_ = true;
    FinishIfDone();
  }

  void OnDone() override {
    {
      absl::MutexLock lock(&scope_.rpc().streams_mutex);
      scope_.rpc().streams.erase(this);
    }
    Unref();
  }

 private:
  struct Item {
    pb::ExecuteStreamRequest request;
    pb::ExecuteStreamResponse response;
    Engine::Call call;
    absl::Time started;
    bool owns_id = true;
  };

  ~ExecuteStreamCall() override = default;

  void Unref() {
    if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  // A request has ended; called by the engine on any thread, or for a request that never got there. Gives back the
  // request's reference: on an engine thread nothing else keeps this object once the stream has been finished.
  void Answer(const std::shared_ptr<Item>& item, const absl::Status& status) {
    scope_.method().metrics->Finished(status.code(), absl::Now() - item->started);
    if (!status.ok()) {
      scope_.LogFailure(status);
      pb::StreamError* error = item->response.mutable_error();
      error->set_code(static_cast<int32_t>(status.code()));
      error->set_message(std::string(status.message()));
      error->set_status_details(ToRpcStatus(status).SerializeAsString());
    }
    auto bytes = std::make_unique<grpc::ByteBuffer>();
    const absl::Status serialized = SerializeMessage(item->response, bytes.get());
    {
      absl::MutexLock lock(&mutex_);
      if (item->owns_id) active_.erase(item->request.request_id());
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

  void ReadMore() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (reading_ || reads_done_ || finished_ || draining_ || in_flight_ >= scope_.rpc().limits.max_stream_in_flight)
      return;
    reading_ = true;
    StartRead(&in_);
  }

  void WriteMore() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
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

  void FinishIfDone() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
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

  CallScope scope_;
  const absl::Time deadline_;
  std::atomic<int> refs_{1};  // gRPC's, given back in OnDone, and one for each request in flight
  grpc::ByteBuffer in_;

  absl::Mutex mutex_;
  absl::flat_hash_map<uint64_t, std::shared_ptr<Item>> active_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::unique_ptr<grpc::ByteBuffer>> to_write_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<grpc::ByteBuffer> out_ ABSL_GUARDED_BY(mutex_);  // being written
  int in_flight_ ABSL_GUARDED_BY(mutex_) = 0;                      // read, answer not yet written
  bool reading_ ABSL_GUARDED_BY(mutex_) = true;
  bool reads_done_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* NewExecuteStreamCall(
    RpcContext& rpc, const Method& method, grpc::CallbackServerContext* context) {
  return new ExecuteStreamCall(rpc, method, context);
}

}  // namespace spmmd::server
