#include "server/oip/service.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "kernels/base/status_macros.h"
#include "server/errors.h"
#include "server/oip/describe.h"
#include "server/rpc/unary_call.h"

namespace spmmd::server {
namespace {

constexpr std::string_view kService = "inference.GRPCInferenceService/";
constexpr std::string_view kAdminMethods[] = {"RepositoryModelLoad", "RepositoryModelUnload"};
// Refused while the layers that the server starts with are loaded.
constexpr std::string_view kNeedLayers[] = {"ModelInfer", "ModelStreamInfer"};

// A health call: it is answered, not refused, while the server starts and drains. `answer` is asked only when the
// server takes calls and, with `admit`, when the caller has shown his token; of a server that takes none it is false.
template <typename Request, typename Response, typename Answer, typename Set>
grpc::ServerUnaryReactor* RunHealth(RpcContext& rpc, const Method& method, bool admit,
                                    grpc::CallbackServerContext* context, const grpc::ByteBuffer* in,
                                    grpc::ByteBuffer* out, Answer&& answer, Set&& set) {
  class Call final : public grpc::ServerUnaryReactor {
   public:
    Call(RpcContext& rpc, const Method& method, grpc::CallbackServerContext* context) : scope(rpc, method, context) {}
    void OnDone() override { delete this; }
    CallScope scope;
  };
  auto* call = new Call(rpc, method, context);
  Request request;
  Response response;
  absl::Status status = admit ? call->scope.Admit() : absl::OkStatus();
  const bool serving = !absl::IsUnavailable(status);
  if (!serving) status = absl::OkStatus();
  if (status.ok()) status = ParseMessage(const_cast<grpc::ByteBuffer*>(in), &request);
  if (status.ok()) {
    set(&response, serving && answer(request));
    status = SerializeMessage(response, out);
  }
  call->Finish(call->scope.Finish(status));
  return call;
}

absl::Status NotOffered(absl::string_view what, absl::string_view instead) {
  return MakeError(absl::StatusCode::kUnimplemented, reason::kUnsupported,
                   absl::StrCat("spmmd does not offer ", what, "; ", instead));
}

// What unites load and unload: the repository, and parameters that are not understood.
template <typename Request>
absl::Status CheckControl(const Request& request, absl::string_view allowed) {
  if (!request.repository_name().empty()) {
    return FieldError("repository_name", "there is one repository, without a name");
  }
  if (request.model_name().empty()) return FieldError("model_name", "must not be empty");
  for (const auto& [name, value] : request.parameters()) {
    if (name == allowed) continue;
    return FieldError(absl::StrCat("parameters[", name.substr(0, 64), "]"),
                      "is not known: what a model is made of is said when its layer is registered");
  }
  return absl::OkStatus();
}

}  // namespace

OipService::OipService(RpcContext* rpc)
    : rpc_(*rpc), oip_(rpc), methods_(MakeMethods(*rpc)), model_infer_(MethodOf("ModelInfer")) {}

OipService::Methods OipService::MakeMethods(RpcContext& rpc) {
  Methods methods;
  const auto* descriptor =
      google::protobuf::DescriptorPool::generated_pool()->FindServiceByName("inference.GRPCInferenceService");
  for (int i = 0; i < descriptor->method_count(); ++i) {
    const std::string& name = descriptor->method(i)->name();
    std::string full = absl::StrCat(std::string(kService), name);
    RpcMetrics* metrics = &rpc.metrics->Rpc(full);
    const bool admin = std::ranges::find(kAdminMethods, name) != std::end(kAdminMethods);
    const bool needs_layers = std::ranges::find(kNeedLayers, name) != std::end(kNeedLayers);
    methods.emplace(name, Method{std::move(full), metrics, admin ? AuthGroup::kAdmin : AuthGroup::kData, needs_layers});
  }
  return methods;
}

const Method& OipService::MethodOf(std::string_view name) const { return methods_.find(name)->second; }

grpc::ServerUnaryReactor* OipService::ServerLive(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* response) {
  return RunHealth<inference::ServerLiveRequest, inference::ServerLiveResponse>(
      rpc_, MethodOf("ServerLive"), /*admit=*/false, context, request, response,
      [this](const auto&) { return IsLive(rpc_); }, [](auto* out, bool live) { out->set_live(live); });
}

grpc::ServerUnaryReactor* OipService::ServerReady(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) {
  return RunHealth<inference::ServerReadyRequest, inference::ServerReadyResponse>(
      rpc_, MethodOf("ServerReady"), /*admit=*/false, context, request, response,
      [this](const auto&) { return IsReady(rpc_); }, [](auto* out, bool ready) { out->set_ready(ready); });
}

grpc::ServerUnaryReactor* OipService::ModelReady(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* response) {
  return RunHealth<inference::ModelReadyRequest, inference::ModelReadyResponse>(
      rpc_, MethodOf("ModelReady"), /*admit=*/true, context, request, response,
      [this](const auto& in) { return IsReady(rpc_, in); }, [](auto* out, bool ready) { out->set_ready(ready); });
}

grpc::ServerUnaryReactor* OipService::ModelInfer(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* response) {
  return NewModelInferCall(oip_, model_infer_, context, request, response);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* OipService::ModelStreamInfer(
    grpc::CallbackServerContext* context) {
  return NewModelStreamInferCall(oip_, MethodOf("ModelStreamInfer"), context);
}

// The other methods: `run` is RunUnary or RunBlocking, the body takes `in` and `out`.
#define SPMMD_OIP_METHOD(method, run, body)                                                                           \
  grpc::ServerUnaryReactor* OipService::method(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request, \
                                               grpc::ByteBuffer* response) {                                          \
    return run<inference::method##Request, inference::method##Response>(                                              \
        rpc_, MethodOf(#method), context, request, response,                                                          \
        [this, context]([[maybe_unused]] const auto& in, [[maybe_unused]] auto* out) -> absl::Status {                \
          (void)this;                                                                                                 \
          (void)context;                                                                                              \
          body                                                                                                        \
        });                                                                                                           \
  }

SPMMD_OIP_METHOD(ServerMetadata, RunUnary, {
  DescribeServer(rpc_, out);
  return absl::OkStatus();
})
SPMMD_OIP_METHOD(ModelMetadata, RunUnary, { return DescribeModel(rpc_, in, out); })
SPMMD_OIP_METHOD(ModelConfig, RunUnary, { return DescribeConfig(rpc_, in, out); })
SPMMD_OIP_METHOD(ModelStatistics, RunUnary, { return DescribeStatistics(oip_, in, out); })
SPMMD_OIP_METHOD(RepositoryIndex, RunUnary, { return DescribeRepository(rpc_, in, out); })

SPMMD_OIP_METHOD(RepositoryModelLoad, RunBlocking, {
  SPMMD_RETURN_IF_ERROR(CheckControl(in, ""));
  SPMMD_ASSIGN_OR_RETURN(const Model model,
                         FindModel(*rpc_.catalog, *rpc_.engine, in.model_name(), "", "model_name", ""));
  if (!model.is_layer()) return absl::OkStatus();  // planned just now
  pb::WarmLayerRequest warm;
  warm.mutable_layer()->set_name(model.name);
  pb::WarmLayerResponse warmed;
  return rpc_.engine->Warm(warm, &warmed, absl::FromChrono(context->deadline()));
})
SPMMD_OIP_METHOD(RepositoryModelUnload, RunBlocking, {
  SPMMD_RETURN_IF_ERROR(CheckControl(in, "unload_dependents"));
  SPMMD_ASSIGN_OR_RETURN(Model model, FindModel(*rpc_.catalog, *rpc_.engine, in.model_name(), "", "model_name", ""));
  if (!model.is_layer()) {
    pb::UnregisterProgramRequest unregister;
    unregister.set_program_id(model.name);
    return rpc_.engine->UnregisterProgram(unregister);
  }
  pb::UnregisterLayerRequest unregister;
  unregister.mutable_layer()->set_name(model.name);
  model = Model();  // its lease would be waited for
  pb::UnregisterLayerResponse unregistered;
  return rpc_.catalog->Unregister(unregister, &unregistered);
})

SPMMD_OIP_METHOD(SystemSharedMemoryStatus, RunUnary, { return oip_.shared_memory.Status(in.name(), out); })
SPMMD_OIP_METHOD(SystemSharedMemoryRegister, RunBlocking, { return oip_.shared_memory.Register(in, context->peer()); })
SPMMD_OIP_METHOD(SystemSharedMemoryUnregister, RunBlocking,
                 { return oip_.shared_memory.Unregister(RegionKind::kPosix, in.name()); })
SPMMD_OIP_METHOD(CudaSharedMemoryStatus, RunUnary, { return oip_.shared_memory.Status(in.name(), out); })
SPMMD_OIP_METHOD(CudaSharedMemoryRegister, RunBlocking, { return oip_.shared_memory.Register(in, context->peer()); })
SPMMD_OIP_METHOD(CudaSharedMemoryUnregister, RunBlocking,
                 { return oip_.shared_memory.Unregister(RegionKind::kCuda, in.name()); })

SPMMD_OIP_METHOD(TraceSetting, RunUnary,
                 { return NotOffered("traces", "the times of each request are in ModelStatistics and in /metrics"); })
SPMMD_OIP_METHOD(LogSettings, RunUnary,
                 { return NotOffered("log settings by call", "--log-level and --log-format are given at the start"); })
#undef SPMMD_OIP_METHOD

}  // namespace spmmd::server
