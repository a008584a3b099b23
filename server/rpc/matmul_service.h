// spmm.v1.SparseMatmul over the callback API.
#ifndef SPMMD_SERVER_RPC_MATMUL_SERVICE_H_
#define SPMMD_SERVER_RPC_MATMUL_SERVICE_H_

#include "grpcpp/grpcpp.h"
#include "server/pb.h"
#include "server/rpc/call.h"
#include "server/rpc/context.h"
#include "spmm/v1/sparse_matmul.grpc.pb.h"

namespace spmmd::server {

// Every method takes raw bytes: see unary_call.h.
using SparseMatmulRaw = pb::SparseMatmul::WithRawCallbackMethod_Execute<
    pb::SparseMatmul::WithRawCallbackMethod_ExecuteStream<pb::SparseMatmul::WithRawCallbackMethod_RegisterProgram<
        pb::SparseMatmul::WithRawCallbackMethod_UnregisterProgram<pb::SparseMatmul::WithRawCallbackMethod_ServerInfo<
            pb::SparseMatmul::WithRawCallbackMethod_DeviceInfo<pb::SparseMatmul::WithRawCallbackMethod_RegisterRegion<
                pb::SparseMatmul::WithRawCallbackMethod_UnregisterRegion<
                    pb::SparseMatmul::WithRawCallbackMethod_OpenRing<
                        pb::SparseMatmul::WithRawCallbackMethod_CloseRing<pb::SparseMatmul::Service>>>>>>>>>>;

class SparseMatmulService final : public SparseMatmulRaw {
 public:
  // `rpc` must outlive the service.
  explicit SparseMatmulService(RpcContext* rpc);

  grpc::ServerUnaryReactor* Execute(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ExecuteStream(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* RegisterProgram(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* UnregisterProgram(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                              grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ServerInfo(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* DeviceInfo(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* RegisterRegion(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                           grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* UnregisterRegion(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                             grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* OpenRing(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* CloseRing(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;

 private:
  Method MakeMethod(std::string_view name, bool needs_layers);

  RpcContext& rpc_;
  const Method execute_;
  const Method execute_stream_;
  const Method register_program_;
  const Method unregister_program_;
  const Method server_info_;
  const Method device_info_;
  const Method register_region_;
  const Method unregister_region_;
  const Method open_ring_;
  const Method close_ring_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_MATMUL_SERVICE_H_
