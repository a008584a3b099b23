// ExecuteStream: pipelined requests, answered as they finish.
#ifndef SPMMD_SERVER_RPC_EXECUTE_STREAM_H_
#define SPMMD_SERVER_RPC_EXECUTE_STREAM_H_

#include "grpcpp/grpcpp.h"
#include "server/rpc/call.h"
#include "server/rpc/context.h"

namespace spmmd::server {

// The reactor of one stream; deletes itself.
//
// At most limits.max_stream_in_flight requests are between "read" and "answer written"; beyond that nothing is read, so
// a caller that never reads its answers cannot make the server hold more. A request that fails is answered by an error;
// only bytes that are no request end the stream. When the server drains, a stream ends (UNAVAILABLE) as soon as nothing
// is in flight on it.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* NewExecuteStreamCall(RpcContext& rpc, const Method& method,
                                                                                  grpc::CallbackServerContext* context);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_EXECUTE_STREAM_H_
