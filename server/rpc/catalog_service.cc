#include "server/rpc/catalog_service.h"

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "grpcpp/grpcpp.h"
#include "server/rpc/register_layer.h"
#include "server/rpc/unary_call.h"

namespace spmmd::server {

Method LayerCatalogService::MakeMethod(std::string_view name) {
  std::string full = "spmm.v1.LayerCatalog/" + std::string(name);
  RpcMetrics* metrics = &rpc_.metrics->Rpc(full);
  return {std::move(full), metrics, AuthGroup::kAdmin, /*needs_layers=*/false};
}

LayerCatalogService::LayerCatalogService(RpcContext* rpc)
    : rpc_(*rpc),
      register_layer_(MakeMethod("RegisterLayer")),
      list_layers_(MakeMethod("ListLayers")),
      get_layer_(MakeMethod("GetLayer")),
      unregister_layer_(MakeMethod("UnregisterLayer")),
      pin_layer_(MakeMethod("PinLayer")),
      warm_layer_(MakeMethod("WarmLayer")),
      benchmark_(MakeMethod("Benchmark")) {}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* LayerCatalogService::RegisterLayer(
    grpc::CallbackServerContext* context) {
  return NewRegisterLayerCall(rpc_, register_layer_, context);
}

grpc::ServerUnaryReactor* LayerCatalogService::ListLayers(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return RunUnary<pb::ListLayersRequest, pb::ListLayersResponse>(
      rpc_, list_layers_, context, request, response,
      [this](const auto& in, auto* out) { return rpc_.catalog->List(in, out); });
}

grpc::ServerUnaryReactor* LayerCatalogService::GetLayer(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return RunUnary<pb::GetLayerRequest, pb::GetLayerResponse>(
      rpc_, get_layer_, context, request, response,
      [this](const auto& in, auto* out) { return rpc_.catalog->Get(in, out); });
}

grpc::ServerUnaryReactor* LayerCatalogService::UnregisterLayer(grpc::CallbackServerContext* context,
                                                               const grpc::ByteBuffer* request,
                                                               grpc::ByteBuffer* response) {
  return RunBlocking<pb::UnregisterLayerRequest, pb::UnregisterLayerResponse>(
      rpc_, unregister_layer_, context, request, response,
      [this](const auto& in, auto* out) { return rpc_.catalog->Unregister(in, out); });
}

grpc::ServerUnaryReactor* LayerCatalogService::PinLayer(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return RunBlocking<pb::PinLayerRequest, pb::PinLayerResponse>(
      rpc_, pin_layer_, context, request, response,
      [this](const auto& in, auto* out) { return rpc_.catalog->Pin(in, out); });
}

grpc::ServerUnaryReactor* LayerCatalogService::WarmLayer(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return RunBlocking<pb::WarmLayerRequest, pb::WarmLayerResponse>(
      rpc_, warm_layer_, context, request, response,
      [this](const auto& in, auto* out) { return rpc_.engine->Warm(in, out); });
}

grpc::ServerUnaryReactor* LayerCatalogService::Benchmark(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return RunBlocking<pb::BenchmarkRequest, pb::BenchmarkResponse>(
      rpc_, benchmark_, context, request, response,
      [this](const auto& in, auto* out) { return rpc_.engine->Benchmark(in, out); });
}

}  // namespace spmmd::server
