// inference.GRPCInferenceService over the callback API: what existing clients of KServe and Triton speak (docs/oip.md).
#ifndef SPMMD_SERVER_OIP_SERVICE_H_
#define SPMMD_SERVER_OIP_SERVICE_H_

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "grpcpp/grpcpp.h"
#include "inference/grpc_service.grpc.pb.h"
#include "server/oip/infer.h"
#include "server/rpc/call.h"
#include "server/rpc/context.h"

namespace spmmd::server {

// Every method takes raw bytes: see rpc/unary_call.h.
template <template <typename> typename... Methods>
struct RawMethods;
template <template <typename> typename First, template <typename> typename... Rest>
struct RawMethods<First, Rest...> {
  using Type = First<typename RawMethods<Rest...>::Type>;
};
template <>
struct RawMethods<> {
  using Type = inference::GRPCInferenceService::Service;
};

using Oip = inference::GRPCInferenceService;
using OipRaw = RawMethods<
    Oip::WithRawCallbackMethod_ServerLive, Oip::WithRawCallbackMethod_ServerReady,
    Oip::WithRawCallbackMethod_ModelReady, Oip::WithRawCallbackMethod_ServerMetadata,
    Oip::WithRawCallbackMethod_ModelMetadata, Oip::WithRawCallbackMethod_ModelInfer,
    Oip::WithRawCallbackMethod_ModelStreamInfer, Oip::WithRawCallbackMethod_ModelConfig,
    Oip::WithRawCallbackMethod_ModelStatistics, Oip::WithRawCallbackMethod_RepositoryIndex,
    Oip::WithRawCallbackMethod_RepositoryModelLoad, Oip::WithRawCallbackMethod_RepositoryModelUnload,
    Oip::WithRawCallbackMethod_SystemSharedMemoryStatus, Oip::WithRawCallbackMethod_SystemSharedMemoryRegister,
    Oip::WithRawCallbackMethod_SystemSharedMemoryUnregister, Oip::WithRawCallbackMethod_CudaSharedMemoryStatus,
    Oip::WithRawCallbackMethod_CudaSharedMemoryRegister, Oip::WithRawCallbackMethod_CudaSharedMemoryUnregister,
    Oip::WithRawCallbackMethod_TraceSetting, Oip::WithRawCallbackMethod_LogSettings>::Type;

class OipService final : public OipRaw {
 public:
  // `rpc` must outlive the service.
  explicit OipService(RpcContext* rpc);

#define SPMMD_OIP_UNARY(method)                                                                           \
  grpc::ServerUnaryReactor* method(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request, \
                                   grpc::ByteBuffer* response) override
  SPMMD_OIP_UNARY(ServerLive);
  SPMMD_OIP_UNARY(ServerReady);
  SPMMD_OIP_UNARY(ModelReady);
  SPMMD_OIP_UNARY(ServerMetadata);
  SPMMD_OIP_UNARY(ModelMetadata);
  SPMMD_OIP_UNARY(ModelInfer);
  SPMMD_OIP_UNARY(ModelConfig);
  SPMMD_OIP_UNARY(ModelStatistics);
  SPMMD_OIP_UNARY(RepositoryIndex);
  SPMMD_OIP_UNARY(RepositoryModelLoad);
  SPMMD_OIP_UNARY(RepositoryModelUnload);
  SPMMD_OIP_UNARY(SystemSharedMemoryStatus);
  SPMMD_OIP_UNARY(SystemSharedMemoryRegister);
  SPMMD_OIP_UNARY(SystemSharedMemoryUnregister);
  SPMMD_OIP_UNARY(CudaSharedMemoryStatus);
  SPMMD_OIP_UNARY(CudaSharedMemoryRegister);
  SPMMD_OIP_UNARY(CudaSharedMemoryUnregister);
  SPMMD_OIP_UNARY(TraceSetting);
  SPMMD_OIP_UNARY(LogSettings);
#undef SPMMD_OIP_UNARY
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ModelStreamInfer(
      grpc::CallbackServerContext* context) override;

 private:
  using Methods = std::map<std::string, Method, std::less<>>;  // by the method's own name
  static Methods MakeMethods(RpcContext& rpc);
  const Method& MethodOf(std::string_view name) const;

  RpcContext& rpc_;
  OipContext oip_;
  const Methods methods_;
  const Method& model_infer_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_OIP_SERVICE_H_
