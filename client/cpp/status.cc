#include "client/cpp/status.h"

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace spmmd::client {
namespace {

constexpr absl::string_view kTypePrefix = "type.googleapis.com/";

template <typename Detail>
std::string TypeUrl() {
  return absl::StrCat(kTypePrefix, Detail::descriptor()->full_name());
}

// The detail of this type that `status` carries, or nullopt.
template <typename Detail>
std::optional<Detail> FindDetail(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(TypeUrl<Detail>());
  Detail detail;
  if (!payload.has_value() || !detail.ParseFromString(std::string(*payload))) return std::nullopt;
  return detail;
}

// Servers may or may not repeat the field and its description in the message; each shall be seen once.
std::string WithFieldViolations(std::string message, const google::rpc::BadRequest& bad_request) {
  for (const auto& violation : bad_request.field_violations()) {
    const bool has_description = absl::StrContains(message, violation.description());
    const bool has_field = absl::StrContains(message, violation.field());
    if (has_description && has_field) continue;
    if (has_description) {
      absl::StrAppend(&message, " [field ", violation.field(), "]");
    } else {
      absl::StrAppend(&message, " [", violation.field(), ": ", violation.description(), "]");
    }
  }
  return message;
}

absl::Status Decode(int code, std::string message, const std::string& serialized_details) {
  // Codes outside the canonical range mean a peer that does not follow the protocol.
  const auto canonical = code > 0 && code <= 16 ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown;
  google::rpc::Status details;
  if (serialized_details.empty() || !details.ParseFromString(serialized_details)) {
    return absl::Status(canonical, message);
  }
  for (const auto& any : details.details()) {
    google::rpc::BadRequest bad_request;
    if (any.UnpackTo(&bad_request)) message = WithFieldViolations(std::move(message), bad_request);
  }
  absl::Status status(canonical, message);
  for (const auto& any : details.details()) status.SetPayload(any.type_url(), absl::Cord(any.value()));
  return status;
}

}  // namespace

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return Decode(status.error_code(), status.error_message(), status.error_details());
}

absl::Status FromStreamError(const ::spmm::v1::StreamError& error) {
  return Decode(error.code(), error.message(), error.status_details());
}

std::vector<FieldViolation> FieldViolations(const absl::Status& status) {
  std::vector<FieldViolation> violations;
  if (const auto bad_request = FindDetail<google::rpc::BadRequest>(status)) {
    for (const auto& violation : bad_request->field_violations()) {
      violations.push_back({violation.field(), violation.description()});
    }
  }
  return violations;
}

std::string ErrorReason(const absl::Status& status) {
  const auto info = FindDetail<google::rpc::ErrorInfo>(status);
  return info.has_value() ? info->reason() : "";
}

std::optional<absl::Duration> RetryDelay(const absl::Status& status) {
  const auto info = FindDetail<google::rpc::RetryInfo>(status);
  if (!info.has_value() || !info->has_retry_delay()) return std::nullopt;
  return absl::Seconds(info->retry_delay().seconds()) + absl::Nanoseconds(info->retry_delay().nanos());
}

}  // namespace spmmd::client
