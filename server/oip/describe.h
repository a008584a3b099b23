// The protocol's descriptions of the server and its models.
#ifndef SPMMD_SERVER_OIP_DESCRIBE_H_
#define SPMMD_SERVER_OIP_DESCRIBE_H_

#include "absl/status/status.h"
#include "inference/grpc_service.pb.h"
#include "server/oip/infer.h"
#include "server/oip/model.h"

namespace spmmd::server {

// Of ServerLive, ServerReady and ModelReady: see the proto.
bool IsLive(const RpcContext& rpc);
bool IsReady(const RpcContext& rpc);
bool IsReady(const RpcContext& rpc, const inference::ModelReadyRequest& request);

void DescribeServer(const RpcContext& rpc, inference::ServerMetadataResponse* response);
absl::Status DescribeModel(const RpcContext& rpc, const inference::ModelMetadataRequest& request,
                           inference::ModelMetadataResponse* response);
absl::Status DescribeConfig(const RpcContext& rpc, const inference::ModelConfigRequest& request,
                            inference::ModelConfigResponse* response);
absl::Status DescribeStatistics(const OipContext& oip, const inference::ModelStatisticsRequest& request,
                                inference::ModelStatisticsResponse* response);
absl::Status DescribeRepository(const RpcContext& rpc, const inference::RepositoryIndexRequest& request,
                                inference::RepositoryIndexResponse* response);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_OIP_DESCRIBE_H_
