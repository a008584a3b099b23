// absl::Status to what travels: the canonical code, the text, and google.rpc.Status in grpc-status-details-bin.
#ifndef SPMMD_SERVER_RPC_STATUS_H_
#define SPMMD_SERVER_RPC_STATUS_H_

#include <string_view>

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace spmmd::server {

grpc::Status ToGrpcStatus(const absl::Status& status);

// "INVALID_ARGUMENT", ...
std::string_view CodeName(absl::StatusCode code);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_STATUS_H_
