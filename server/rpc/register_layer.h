// RegisterLayer: spec -> accepted -> chunks -> progress -> layer.
#ifndef SPMMD_SERVER_RPC_REGISTER_LAYER_H_
#define SPMMD_SERVER_RPC_REGISTER_LAYER_H_

#include "grpcpp/grpcpp.h"
#include "server/rpc/call.h"
#include "server/rpc/context.h"

namespace spmmd::server {

// The reactor of one call; deletes itself.
//
// Backpressure: the next chunk is read only when the last one is in the layer's memory, so that a client that sends
// faster than the server takes is held back by HTTP/2 flow control. Packing and everything that may touch a disk runs
// on the blocking threads. The layer is made when the caller half-closes; when no content was needed, at once, and
// nothing is read. A client whose next message does not come within
// RpcLimits::upload_idle_timeout loses its call and what it holds.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* NewRegisterLayerCall(RpcContext& rpc, const Method& method,
                                                                                  grpc::CallbackServerContext* context);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_REGISTER_LAYER_H_
