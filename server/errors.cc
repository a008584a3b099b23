#include "server/errors.h"

#include <google/protobuf/any.pb.h>

#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace spmmd::server {
namespace {

template <typename Message>
std::string TypeUrl() {
  return absl::StrCat("type.googleapis.com/", Message::descriptor()->full_name());
}

template <typename Message>
void Attach(const Message& detail, absl::Status* status) {
  status->SetPayload(TypeUrl<Message>(), absl::Cord(detail.SerializeAsString()));
}

template <typename Message>
std::optional<Message> DetailOf(const absl::Status& status) {
  const auto payload = status.GetPayload(TypeUrl<Message>());
  Message detail;
  if (!payload.has_value() || !detail.ParseFromString(std::string(*payload))) return std::nullopt;
  return detail;
}

void AttachReason(absl::string_view reason, const ErrorMetadata& metadata, absl::Status* status) {
  google::rpc::ErrorInfo info;
  info.set_domain(std::string(kErrorDomain));
  info.set_reason(std::string(reason));
  for (const auto& [key, value] : metadata) (*info.mutable_metadata())[key] = value;
  Attach(info, status);
}

}  // namespace

absl::Status FieldError(absl::string_view path, absl::string_view problem, absl::string_view reason,
                        const ErrorMetadata& metadata) {
  absl::Status status(absl::StatusCode::kInvalidArgument, absl::StrCat(path, ": ", problem));
  google::rpc::BadRequest bad_request;
  google::rpc::BadRequest::FieldViolation& violation = *bad_request.add_field_violations();
  violation.set_field(std::string(path));
  violation.set_description(std::string(problem));
  Attach(bad_request, &status);
  AttachReason(reason, metadata, &status);
  return status;
}

absl::Status AtField(absl::string_view path, const absl::Status& status) {
  if (status.ok()) return status;
  if (status.code() == absl::StatusCode::kInvalidArgument || status.code() == absl::StatusCode::kOutOfRange) {
    return FieldError(path, absl::string_view(status.message().data(), status.message().size()));
  }
  absl::Status named(status.code(), absl::StrCat(path, ": ", status.message()));
  status.ForEachPayload([&named](absl::string_view url, const absl::Cord& payload) { named.SetPayload(url, payload); });
  return named;
}

absl::Status MakeError(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                       const ErrorMetadata& metadata) {
  absl::Status status(code, message);
  AttachReason(reason, metadata, &status);
  return status;
}

absl::Status Exhausted(absl::string_view reason, absl::string_view message, absl::Duration retry_after,
                       const ErrorMetadata& metadata) {
  absl::Status status = MakeError(absl::StatusCode::kResourceExhausted, reason, message, metadata);
  if (retry_after > absl::ZeroDuration()) {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(absl::ToInt64Seconds(retry_after));
    retry.mutable_retry_delay()->set_nanos(
        static_cast<int32_t>(absl::ToInt64Nanoseconds(retry_after % absl::Seconds(1))));
    Attach(retry, &status);
  }
  return status;
}

absl::Status OutOfMemory(absl::string_view reason, absl::string_view where, uint64_t needed, uint64_t free,
                         uint64_t limit) {
  return MakeError(absl::StatusCode::kResourceExhausted, reason,
                   absl::StrCat(where, ": needed ", needed, " bytes, free ", free, " bytes, limit ", limit, " bytes"),
                   {{"needed", absl::StrCat(needed)}, {"free", absl::StrCat(free)}, {"limit", absl::StrCat(limit)}});
}

google::rpc::Status ToRpcStatus(const absl::Status& status) {
  google::rpc::Status rpc;
  rpc.set_code(static_cast<int>(status.code()));
  rpc.set_message(std::string(status.message()));
  if (status.ok()) return rpc;
  absl::Status detailed = status;
  if (!status.GetPayload(TypeUrl<google::rpc::ErrorInfo>()).has_value()) {
    AttachReason(absl::StatusCodeToString(status.code()), {}, &detailed);
  }
  detailed.ForEachPayload([&rpc](absl::string_view url, const absl::Cord& payload) {
    google::protobuf::Any& any = *rpc.add_details();
    any.set_type_url(std::string(url));
    any.set_value(std::string(payload));
  });
  return rpc;
}

absl::Status FromRpcStatus(const google::rpc::Status& rpc) {
  absl::Status status(static_cast<absl::StatusCode>(rpc.code()), rpc.message());
  for (const google::protobuf::Any& any : rpc.details()) status.SetPayload(any.type_url(), absl::Cord(any.value()));
  return status;
}

std::string ReasonOf(const absl::Status& status) {
  if (status.ok()) return "";
  const auto info = DetailOf<google::rpc::ErrorInfo>(status);
  return info.has_value() ? info->reason() : absl::StatusCodeToString(status.code());
}

std::string FieldOf(const absl::Status& status) {
  const auto bad_request = DetailOf<google::rpc::BadRequest>(status);
  return bad_request.has_value() && bad_request->field_violations_size() > 0 ? bad_request->field_violations(0).field()
                                                                             : "";
}

std::optional<absl::Duration> RetryDelayOf(const absl::Status& status) {
  const auto retry = DetailOf<google::rpc::RetryInfo>(status);
  if (!retry.has_value()) return std::nullopt;
  return absl::Seconds(retry->retry_delay().seconds()) + absl::Nanoseconds(retry->retry_delay().nanos());
}

}  // namespace spmmd::server
