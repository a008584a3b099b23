// Errors of the server as absl::Status: the canonical code, a message that names the fields, and the details of the
// wire contract (google.rpc.*) as payloads that the functions below decode.
#ifndef SPMMD_CLIENT_CPP_STATUS_H_
#define SPMMD_CLIENT_CPP_STATUS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/support/status.h"
#include "spmm/v1/sparse_matmul.pb.h"

namespace spmmd::client {

// One wrong field of a request: its path ("program.steps[2].matmul.layer") and what is wrong with it.
struct FieldViolation {
  std::string field;
  std::string description;
};

// OK for OK. Details that do not parse are ignored: the code and the message always survive.
absl::Status FromGrpcStatus(const grpc::Status& status);

// The error of one request on a stream; same contents as FromGrpcStatus gives for the unary call.
absl::Status FromStreamError(const ::spmm::v1::StreamError& error);

// From google.rpc.BadRequest; empty when there is none.
std::vector<FieldViolation> FieldViolations(const absl::Status& status);

// From google.rpc.ErrorInfo: the stable upper-snake reason, for instance "LAYER_NOT_FOUND"; empty when there is none.
std::string ErrorReason(const absl::Status& status);

// From google.rpc.RetryInfo: how long to wait before the request is worth repeating; nullopt when the server says
// nothing.
std::optional<absl::Duration> RetryDelay(const absl::Status& status);

}  // namespace spmmd::client

#endif  // SPMMD_CLIENT_CPP_STATUS_H_
