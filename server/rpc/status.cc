#include "server/rpc/status.h"

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/status.h"
#include "server/errors.h"

namespace spmmd::server {

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  google::rpc::Status details = ToRpcStatus(status);
  // Text and details travel as HTTP/2 headers, of which clients accept 8 KiB by default; a longer answer would reach
  // them as an unrelated error. Details grow with what a caller sent, so they are what gives way.
  constexpr size_t kMaxMessage = 2048;
  constexpr size_t kMaxDetails = 4096;
  std::string message(status.message());
  if (message.size() > kMaxMessage) {
    message.resize(kMaxMessage - 3);
    message += "...";
    details.set_message(message);
  }
  std::string serialized = details.SerializeAsString();
  if (serialized.size() > kMaxDetails) {
    details.clear_details();
    serialized = details.SerializeAsString();
  }
  return {static_cast<grpc::StatusCode>(status.code()), message, serialized};
}

std::string_view CodeName(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
      return "OK";
    case absl::StatusCode::kCancelled:
      return "CANCELLED";
    case absl::StatusCode::kUnknown:
      return "UNKNOWN";
    case absl::StatusCode::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case absl::StatusCode::kDeadlineExceeded:
      return "DEADLINE_EXCEEDED";
    case absl::StatusCode::kNotFound:
      return "NOT_FOUND";
    case absl::StatusCode::kAlreadyExists:
      return "ALREADY_EXISTS";
    case absl::StatusCode::kPermissionDenied:
      return "PERMISSION_DENIED";
    case absl::StatusCode::kUnauthenticated:
      return "UNAUTHENTICATED";
    case absl::StatusCode::kResourceExhausted:
      return "RESOURCE_EXHAUSTED";
    case absl::StatusCode::kFailedPrecondition:
      return "FAILED_PRECONDITION";
    case absl::StatusCode::kAborted:
      return "ABORTED";
    case absl::StatusCode::kOutOfRange:
      return "OUT_OF_RANGE";
    case absl::StatusCode::kUnimplemented:
      return "UNIMPLEMENTED";
    case absl::StatusCode::kInternal:
      return "INTERNAL";
    case absl::StatusCode::kUnavailable:
      return "UNAVAILABLE";
    case absl::StatusCode::kDataLoss:
      return "DATA_LOSS";
    default:
      return "UNKNOWN";
  }
}

}  // namespace spmmd::server
