#include "server/oip/infer.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/alarm.h"
#include "inference/grpc_service.pb.h"
#include "kernels/base/status_macros.h"
#include "server/engine/engine.h"
#include "server/errors.h"
#include "server/oip/convert.h"
#include "server/oip/model.h"
#include "server/rpc/pipelined_stream.h"
#include "server/rpc/unary_call.h"

namespace spmmd::server {
namespace {

using inference::ModelInferRequest;
using inference::ModelInferResponse;
using inference::ModelStreamInferResponse;

// One request on its way through the engine.
class InferRun {
 public:
  explicit InferRun(OipContext& oip) : oip_(oip) {}
  InferRun(const InferRun&) = delete;
  InferRun& operator=(const InferRun&) = delete;

  // `done` is called exactly once, as Engine::Execute does, with the error in the caller's terms; `response` is
  // complete then. This object and all others must live until Start has returned and `done` was called. The request's
  // tensors are moved from.
  Engine::Call Start(ModelInferRequest* request, absl::Time deadline, const grpc::CallbackServerContext& context,
                     ModelInferResponse* response, std::function<void(absl::Status)> done) {
    started_ = absl::Now();
    if (absl::Status status = GuardHostMemory([&] { return Convert(request); }); !status.ok()) {
      if (numbers_ != nullptr) numbers_->Failed(absl::Now() - started_);
      done(std::move(status));
      return nullptr;
    }
    if (context_.timeout > absl::ZeroDuration()) deadline = std::min(deadline, started_ + context_.timeout);
    Engine& engine = *oip_.rpc.engine;
    Engine::Caller caller;
    if (!oip_.shared_memory.empty()) caller.regions = oip_.shared_memory.For(context.peer());
    converted_ = absl::Now();
    Engine::Call call = engine.Execute(
        execute_, &result_, deadline, caller,
        [this, response, done = std::move(done)](const absl::Status& status) { done(Ended(status, response)); });
    // The call's own deadline is gRPC's to watch; a request that waits must not outlive this one either.
    if (call != nullptr && context_.timeout > absl::ZeroDuration()) {
      alarm_.Set(absl::ToChronoTime(deadline + absl::Milliseconds(1)), [call, &engine](bool due) {
        if (due) engine.Cancel(call);
      });
    }
    return call;
  }

 private:
  absl::Status Convert(ModelInferRequest* request) {
    const RpcContext& rpc = oip_.rpc;
    SPMMD_ASSIGN_OR_RETURN(const Model model, FindModel(*rpc.catalog, *rpc.engine, request->model_name(),
                                                        request->model_version(), "model_name", "model_version"));
    numbers_ = oip_.statistics.Of(model);
    return ToExecute(model, request, &execute_, &context_);
  }

  absl::Status Ended(const absl::Status& status, ModelInferResponse* response) {
    if (!status.ok()) {
      numbers_->Failed(absl::Now() - started_);
      return ToInferError(status, context_);
    }
    const absl::Time computed = absl::Now();
    ToInferResponse(context_, &result_, response);
    numbers_->Succeeded(result_.timing(), context_.rows, converted_ - started_, absl::Now() - computed);
    return absl::OkStatus();
  }

  OipContext& oip_;
  absl::Time started_;
  absl::Time converted_;
  std::shared_ptr<ModelNumbers> numbers_;
  InferContext context_;
  pb::ExecuteRequest execute_;
  pb::ExecuteResponse result_;
  grpc::Alarm alarm_;
};

class ModelInferCall final : public UnaryCall<ModelInferRequest, ModelInferResponse> {
 public:
  ModelInferCall(OipContext& oip, const Method& method, grpc::CallbackServerContext* context,
                 grpc::ByteBuffer* response)
      : UnaryCall(oip.rpc, method, context, response), run_(oip) {}

  // Called by the method's handler: neither OnCancel nor OnDone come before that has returned.
  void Run() {
    call_ = run_.Start(mutable_request(), scope().deadline(), scope().context(), response(),
                       [this](absl::Status status) { End(std::move(status)); });
  }

  void OnCancel() override { scope().rpc().engine->Cancel(call_); }

 private:
  InferRun run_;
  Engine::Call call_;
};

class ModelStreamInferItem final : public StreamRequest {
 public:
  ModelStreamInferItem(OipContext& oip, const grpc::CallbackServerContext& context) : context_(context), run_(oip) {}

  absl::Status Parse(grpc::ByteBuffer* bytes) override { return ParseMessage(bytes, &request_); }

  Engine::Call Start(Engine& /*engine*/, absl::Time deadline, std::function<void(absl::Status)> done) override {
    return run_.Start(&request_, deadline, context_, response_.mutable_infer_response(), std::move(done));
  }

  absl::Status Answer(const absl::Status& result, grpc::ByteBuffer* bytes) override {
    if (!result.ok()) {
      response_.mutable_infer_response()->Clear();
      response_.mutable_infer_response()->set_id(request_.id());
      response_.set_error_message(std::string(result.message()));
    }
    return SerializeMessage(response_, bytes);
  }

 private:
  const grpc::CallbackServerContext& context_;
  ModelInferRequest request_;
  ModelStreamInferResponse response_;
  InferRun run_;
};

}  // namespace

grpc::ServerUnaryReactor* NewModelInferCall(OipContext& oip, const Method& method, grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  auto* call = new ModelInferCall(oip, method, context, response);
  if (call->Begin(request)) call->Run();
  return call;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* NewModelStreamInferCall(
    OipContext& oip, const Method& method, grpc::CallbackServerContext* context) {
  return new PipelinedStream(oip.rpc, method, context,
                             [&oip, context] { return std::make_shared<ModelStreamInferItem>(oip, *context); });
}

}  // namespace spmmd::server
