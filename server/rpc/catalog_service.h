// spmm.v1.LayerCatalog over the callback API.
#ifndef SPMMD_SERVER_RPC_CATALOG_SERVICE_H_
#define SPMMD_SERVER_RPC_CATALOG_SERVICE_H_

#include "grpcpp/grpcpp.h"
#include "server/pb.h"
#include "server/rpc/call.h"
#include "server/rpc/context.h"
#include "spmm/v1/layer_catalog.grpc.pb.h"

namespace spmmd::server {

// Every method takes raw bytes: see unary_call.h.
using LayerCatalogRaw =
    pb::LayerCatalog::WithRawCallbackMethod_RegisterLayer<pb::LayerCatalog::WithRawCallbackMethod_ListLayers<
        pb::LayerCatalog::WithRawCallbackMethod_GetLayer<pb::LayerCatalog::WithRawCallbackMethod_UnregisterLayer<
            pb::LayerCatalog::WithRawCallbackMethod_PinLayer<pb::LayerCatalog::WithRawCallbackMethod_WarmLayer<
                pb::LayerCatalog::WithRawCallbackMethod_Benchmark<pb::LayerCatalog::Service>>>>>>>;

class LayerCatalogService final : public LayerCatalogRaw {
 public:
  // `rpc` must outlive the service.
  explicit LayerCatalogService(RpcContext* rpc);

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* RegisterLayer(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* ListLayers(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetLayer(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* UnregisterLayer(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* PinLayer(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* WarmLayer(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Benchmark(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;

 private:
  Method MakeMethod(std::string_view name);

  RpcContext& rpc_;
  const Method register_layer_;
  const Method list_layers_;
  const Method get_layer_;
  const Method unregister_layer_;
  const Method pin_layer_;
  const Method warm_layer_;
  const Method benchmark_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_CATALOG_SERVICE_H_
