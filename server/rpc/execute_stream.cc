#include "server/rpc/execute_stream.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/grpcpp.h"
#include "server/engine/engine.h"
#include "server/errors.h"
#include "server/pb.h"
#include "server/rpc/execute_wire.h"
#include "server/rpc/pipelined_stream.h"
#include "server/rpc/region_calls.h"
#include "server/rpc/unary_call.h"
#include "spmm/v1/sparse_matmul.pb.h"

namespace spmmd::server {
namespace {

// The ids in flight on one stream.
class RequestIds {
 public:
  bool Insert(uint64_t id) {
    absl::MutexLock lock(&mutex_);
    return ids_.insert(id).second;
  }
  void Erase(uint64_t id) {
    absl::MutexLock lock(&mutex_);
    ids_.erase(id);
  }

 private:
  absl::Mutex mutex_;
  absl::flat_hash_set<uint64_t> ids_ ABSL_GUARDED_BY(mutex_);
};

class ExecuteStreamItem final : public StreamRequest {
 public:
  ExecuteStreamItem(RpcContext& rpc, const grpc::CallbackServerContext& context, std::shared_ptr<RequestIds> ids)
      : rpc_(rpc), context_(context), ids_(std::move(ids)) {}

  absl::Status Parse(grpc::ByteBuffer* bytes) override {
    absl::Status status = request_.ParseStream(*rpc_.engine, bytes, &request_id_);
    if (status.ok()) owns_id_ = ids_->Insert(request_id_);
    return status;
  }

  Engine::Call Start(Engine& engine, absl::Time deadline, std::function<void(absl::Status)> done) override {
    if (!owns_id_) {
      done(FieldError("request_id", "a request with this id is in flight on the stream"));
      return nullptr;
    }
    const std::shared_ptr<const RegionSet> regions = RegionsOf(rpc_, context_);
    Engine::Caller caller;
    caller.regions = regions.get();
    request_.Describe(&caller);
    Engine::Call call = engine.Execute(request_.message(), &response_, deadline, caller, std::move(done));
    request_.ReleaseBytes();
    return call;
  }

  absl::Status Answer(const absl::Status& result, grpc::ByteBuffer* bytes) override {
    // Before the answer travels: whoever has it may use the id again.
    if (owns_id_) ids_->Erase(request_id_);
    if (!result.ok()) {
      pb::ExecuteStreamResponse response;
      response.set_request_id(request_id_);
      pb::StreamError* error = response.mutable_error();
      error->set_code(static_cast<int32_t>(result.code()));
      error->set_message(std::string(result.message()));
      error->set_status_details(ToRpcStatus(result).SerializeAsString());
      return SerializeMessage(response, bytes);
    }
    *bytes = SerializeExecuteStreamResponse(request_id_, response_, std::move(request_.payloads().outputs));
    return absl::OkStatus();
  }

 private:
  RpcContext& rpc_;
  const grpc::CallbackServerContext& context_;
  const std::shared_ptr<RequestIds> ids_;
  ReceivedRequest request_;
  uint64_t request_id_ = 0;
  pb::ExecuteResponse response_;
  bool owns_id_ = false;
};

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* NewExecuteStreamCall(
    RpcContext& rpc, const Method& method, grpc::CallbackServerContext* context) {
  return new PipelinedStream(rpc, method, context, [&rpc, context, ids = std::make_shared<RequestIds>()] {
    return std::make_shared<ExecuteStreamItem>(rpc, *context, ids);
  });
}

}  // namespace spmmd::server
