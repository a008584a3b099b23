// ModelInfer and ModelStreamInfer.
#ifndef SPMMD_SERVER_OIP_INFER_H_
#define SPMMD_SERVER_OIP_INFER_H_

#include "grpcpp/grpcpp.h"
#include "server/oip/shared_memory.h"
#include "server/oip/statistics.h"
#include "server/rpc/call.h"
#include "server/rpc/context.h"

namespace spmmd::server {

// What the protocol's calls share.
struct OipContext {
  explicit OipContext(RpcContext* context) : rpc(*context), shared_memory(context) {}
  RpcContext& rpc;
  StatisticsTable statistics;
  OipSharedMemory shared_memory;
};

// Both delete themselves. `oip` must outlive them.
grpc::ServerUnaryReactor* NewModelInferCall(OipContext& oip, const Method& method, grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request, grpc::ByteBuffer* response);
// A request that fails is answered by its id and an error message; see pipelined_stream.h.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* NewModelStreamInferCall(
    OipContext& oip, const Method& method, grpc::CallbackServerContext* context);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_OIP_INFER_H_
