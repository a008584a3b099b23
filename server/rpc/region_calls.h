// RegisterRegion, UnregisterRegion, OpenRing and CloseRing.
#ifndef SPMMD_SERVER_RPC_REGION_CALLS_H_
#define SPMMD_SERVER_RPC_REGION_CALLS_H_

#include <memory>

#include "absl/status/status.h"
#include "grpcpp/server_context.h"
#include "server/pb.h"
#include "server/rpc/context.h"
#include "server/shm/region.h"
#include "spmm/v1/sparse_matmul.pb.h"

namespace spmmd::server {

absl::Status RegisterRegion(RpcContext& rpc, const grpc::ServerContextBase& context,
                            const pb::RegisterRegionRequest& request);
absl::Status UnregisterRegion(RpcContext& rpc, const grpc::ServerContextBase& context,
                              const pb::UnregisterRegionRequest& request, pb::UnregisterRegionResponse* response);
absl::Status OpenRing(RpcContext& rpc, const grpc::ServerContextBase& context, const pb::OpenRingRequest& request,
                      pb::OpenRingResponse* response);
// Blocks until what is in flight has completed.
absl::Status CloseRing(RpcContext& rpc, const grpc::ServerContextBase& context, const pb::CloseRingRequest& request);

// The regions that an ExecuteRequest's slices are looked up in; null when its connection has none. The pointer holds
// them.
std::shared_ptr<const RegionSet> RegionsOf(RpcContext& rpc, const grpc::ServerContextBase& context);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_REGION_CALLS_H_
