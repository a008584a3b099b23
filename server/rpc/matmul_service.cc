#include "server/rpc/matmul_service.h"

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/grpcpp.h"
#include "server/errors.h"
#include "server/rpc/execute_stream.h"
#include "server/rpc/execute_wire.h"
#include "server/rpc/region_calls.h"
#include "server/rpc/unary_call.h"

namespace spmmd::server {
namespace {

// Like UnaryCall, with the payloads of request and response where they are (execute_wire.h).
class ExecuteCall final : public grpc::ServerUnaryReactor {
 public:
  ExecuteCall(RpcContext& rpc, const Method& method, grpc::CallbackServerContext* context,
              grpc::ByteBuffer* response_bytes)
      : scope_(rpc, method, context), response_bytes_(response_bytes) {}

  // Called by the method's handler.
  void Run(const grpc::ByteBuffer* request_bytes) {
    if (absl::Status status = scope_.Admit(); !status.ok()) {
      Finish(scope_.Finish(status));
      return;
    }
    // The buffer is this call's own; only gRPC's signature makes it const.
    request_bytes_ = const_cast<grpc::ByteBuffer*>(request_bytes);
    if (request_bytes_->Length() <= kMaxOfferedBytes) {
      refs_.fetch_add(1, std::memory_order_relaxed);
      absl::AnyInvocable<void()> task = [this] {
        Execute();
        Unref();
      };
      if (scope_.rpc().engine->Offer(task)) return;
      refs_.fetch_sub(1, std::memory_order_relaxed);
    }
    // gRPC keeps this object until the handler has returned it.
    Execute();
  }

  void OnCancel() override {
    Engine::Call call;
    {
      absl::MutexLock lock(&mutex_);
      cancelled_ = true;
      call = call_;
    }
    scope_.rpc().engine->Cancel(call);
  }
  void OnDone() override { Unref(); }

 private:
  ~ExecuteCall() override = default;

  void Unref() {
    if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  void Execute() {
    Engine& engine = *scope_.rpc().engine;
    if (absl::Status status = request_.ParseExecute(engine, request_bytes_); !status.ok()) {
      Finish(scope_.Finish(status));
      return;
    }
    const std::shared_ptr<const RegionSet> regions = RegionsOf(scope_.rpc(), scope_.context());
    Engine::Caller caller;
    caller.regions = regions.get();
    request_.Describe(&caller);
    Engine::Call call =
        engine.Execute(request_.message(), &response_, scope_.deadline(), caller, [this](const absl::Status& result) {
          if (result.ok()) {
            *response_bytes_ = SerializeExecuteResponse(response_, std::move(request_.payloads().outputs));
          }
          Finish(scope_.Finish(result));
        });
    request_.ReleaseBytes();
    bool cancel = false;
    {
      absl::MutexLock lock(&mutex_);
      call_ = call;
      cancel = cancelled_;
    }
    if (cancel) engine.Cancel(call);
  }

  CallScope scope_;
  grpc::ByteBuffer* const response_bytes_;
  grpc::ByteBuffer* request_bytes_ = nullptr;
  ReceivedRequest request_;
  pb::ExecuteResponse response_;
  std::atomic<int> refs_{1};  // gRPC's, given back in OnDone, and a device thread's
  absl::Mutex mutex_;
  Engine::Call call_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

Method SparseMatmulService::MakeMethod(std::string_view name, bool needs_layers) {
  std::string full = "spmm.v1.SparseMatmul/" + std::string(name);
  RpcMetrics* metrics = &rpc_.metrics->Rpc(full);
  return {std::move(full), metrics, AuthGroup::kData, needs_layers};
}

SparseMatmulService::SparseMatmulService(RpcContext* rpc)
    : rpc_(*rpc),
      execute_(MakeMethod("Execute", true)),
      execute_stream_(MakeMethod("ExecuteStream", true)),
      register_program_(MakeMethod("RegisterProgram", true)),
      unregister_program_(MakeMethod("UnregisterProgram", false)),
      server_info_(MakeMethod("ServerInfo", false)),
      device_info_(MakeMethod("DeviceInfo", false)),
      register_region_(MakeMethod("RegisterRegion", false)),
      unregister_region_(MakeMethod("UnregisterRegion", false)),
      open_ring_(MakeMethod("OpenRing", false)),
      close_ring_(MakeMethod("CloseRing", false)) {}

grpc::ServerUnaryReactor* SparseMatmulService::Execute(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  auto* call = new ExecuteCall(rpc_, execute_, context, response);
  call->Run(request);
  return call;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* SparseMatmulService::ExecuteStream(
    grpc::CallbackServerContext* context) {
  return NewExecuteStreamCall(rpc_, execute_stream_, context);
}

grpc::ServerUnaryReactor* SparseMatmulService::RegisterProgram(grpc::CallbackServerContext* context,
                                                               const grpc::ByteBuffer* request,
                                                               grpc::ByteBuffer* response) {
  return RunUnary<pb::RegisterProgramRequest, pb::RegisterProgramResponse>(
      rpc_, register_program_, context, request, response,
      [this](const auto& in, auto* out) { return rpc_.engine->RegisterProgram(in, out); });
}

grpc::ServerUnaryReactor* SparseMatmulService::UnregisterProgram(grpc::CallbackServerContext* context,
                                                                 const grpc::ByteBuffer* request,
                                                                 grpc::ByteBuffer* response) {
  return RunUnary<pb::UnregisterProgramRequest, pb::UnregisterProgramResponse>(
      rpc_, unregister_program_, context, request, response,
      [this](const auto& in, auto*) { return rpc_.engine->UnregisterProgram(in); });
}

grpc::ServerUnaryReactor* SparseMatmulService::ServerInfo(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return RunUnary<pb::ServerInfoRequest, pb::ServerInfoResponse>(
      rpc_, server_info_, context, request, response, [this](const auto&, auto* out) {
        rpc_.engine->DescribeServer(out);
        out->set_version(rpc_.version);
        out->set_revision(rpc_.revision);
        out->set_backend(rpc_.backend);
        out->set_shard_index(rpc_.catalog->options().shard_index);
        out->set_shard_count(rpc_.catalog->options().shard_count);
        if (rpc_.regions->options().enabled) {
          out->add_extensions("shared_memory");
          if (rpc_.limits.max_rings > 0) out->add_extensions("ring");
          if (rpc_.regions->options().open_device_memory != nullptr) out->add_extensions("cuda_ipc");
        }
        out->mutable_limits()->set_max_message_bytes(rpc_.limits.max_message_bytes);
        out->mutable_limits()->set_max_chunk_bytes(rpc_.catalog->options().max_chunk_bytes);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* SparseMatmulService::DeviceInfo(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return RunUnary<pb::DeviceInfoRequest, pb::DeviceInfoResponse>(rpc_, device_info_, context, request, response,
                                                                 [this](const auto&, auto* out) {
                                                                   rpc_.engine->DescribeDevices(out);
                                                                   return absl::OkStatus();
                                                                 });
}

grpc::ServerUnaryReactor* SparseMatmulService::RegisterRegion(grpc::CallbackServerContext* context,
                                                              const grpc::ByteBuffer* request,
                                                              grpc::ByteBuffer* response) {
  return RunBlocking<pb::RegisterRegionRequest, pb::RegisterRegionResponse>(
      rpc_, register_region_, context, request, response,
      [this, context](const auto& in, auto*) { return spmmd::server::RegisterRegion(rpc_, *context, in); });
}

grpc::ServerUnaryReactor* SparseMatmulService::UnregisterRegion(grpc::CallbackServerContext* context,
                                                                const grpc::ByteBuffer* request,
                                                                grpc::ByteBuffer* response) {
  return RunBlocking<pb::UnregisterRegionRequest, pb::UnregisterRegionResponse>(
      rpc_, unregister_region_, context, request, response,
      [this, context](const auto& in, auto* out) { return spmmd::server::UnregisterRegion(rpc_, *context, in, out); });
}

grpc::ServerUnaryReactor* SparseMatmulService::OpenRing(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return RunUnary<pb::OpenRingRequest, pb::OpenRingResponse>(
      rpc_, open_ring_, context, request, response,
      [this, context](const auto& in, auto* out) { return spmmd::server::OpenRing(rpc_, *context, in, out); });
}

grpc::ServerUnaryReactor* SparseMatmulService::CloseRing(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return RunBlocking<pb::CloseRingRequest, pb::CloseRingResponse>(
      rpc_, close_ring_, context, request, response,
      [this, context](const auto& in, auto*) { return spmmd::server::CloseRing(rpc_, *context, in); });
}

}  // namespace spmmd::server
