// ExecuteStream: pipelined requests, answered as they finish.
#ifndef SPMMD_SERVER_RPC_EXECUTE_STREAM_H_
#define SPMMD_SERVER_RPC_EXECUTE_STREAM_H_

#include "grpcpp/grpcpp.h"
#include "server/rpc/call.h"
#include "server/rpc/context.h"

namespace spmmd::server {

// The reactor of one stream (pipelined_stream.h); deletes itself. A request whose id is in flight already is answered
// by INVALID_ARGUMENT.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* NewExecuteStreamCall(RpcContext& rpc, const Method& method,
                                                                                  grpc::CallbackServerContext* context);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_EXECUTE_STREAM_H_
