#include "client/cli/errors.h"

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cli/render.h"
#include "client/cpp/status.h"

namespace spmmd::cli {

std::string HintFor(const absl::Status& status, const std::string& server) {
  const std::string reason = client::ErrorReason(status);
  if (reason == "LAYER_NOT_FOUND") return "`spmmctl list` shows what is registered";
  if (reason == "NO_MODEL_REPOSITORY") return "start spmmd with --model-repository=DIR, or register a local file";
  if (reason == "DEVICE_MEMORY") return "unregister or unpin layers; `spmmctl status` shows each device's memory";
  for (const auto& violation : client::FieldViolations(status)) {
    if (violation.field == "content" &&
        (absl::StrContains(violation.description, "NaN") || absl::StrContains(violation.description, "infinity"))) {
      return "--allow-nonfinite keeps such values";
    }
    if (absl::StartsWith(violation.field, "inputs[")) return "`spmmctl describe` shows the shape that the layer takes";
  }
  // gRPC's own refusal, made before the server sees the request.
  if (absl::StrContains(status.message(), "message larger than max")) {
    return "send fewer rows at once, or start spmmd with a larger --max-message-bytes";
  }
  if (const auto delay = client::RetryDelay(status)) {
    return absl::StrCat("try again in ", FormatSeconds(absl::ToDoubleSeconds(*delay)));
  }
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
      if (reason == "DRAINING") return "the server is shutting down";
      if (!reason.empty()) return "";
      if (absl::StrContains(status.message(), "NOT_SERVING")) {
        return "it is starting, draining or has lost a device: its log says which";
      }
      if (const std::string message = absl::AsciiStrToLower(status.message());
          absl::StrContains(message, "ssl") || absl::StrContains(message, "handshak")) {
        return absl::StrCat("does the server at ", server, " use TLS, with a certificate that --tls-ca vouches for?");
      }
      return absl::StrCat("is spmmd running at ", server, "? Another address is given by --server or SPMMD_SERVER");
    case absl::StatusCode::kDeadlineExceeded:
      if (reason == "UPLOAD_IDLE") {
        return "the connection stalled, or is slower than the server's --upload-idle-timeout";
      }
      return "--timeout allows more time";
    case absl::StatusCode::kUnauthenticated:
      if (absl::StrContains(status.message(), "not known")) return "it is none of the server's --auth-token-file";
      return "the server wants a token: --token-file";
    case absl::StatusCode::kUnimplemented:
      return "`spmmctl status` shows the server's version, backend and formats";
    default:
      return "";
  }
}

namespace {

std::string Report(const absl::Status& status, const std::string& hint, bool json) {
  const std::string code = absl::StatusCodeToString(status.code());
  const std::string message(status.message());
  if (json) {
    Json fields = Json::array();
    for (const auto& violation : client::FieldViolations(status)) {
      fields.push_back({{"field", violation.field}, {"description", violation.description}});
    }
    const auto delay = client::RetryDelay(status);
    const Json error = {{"error",
                         {{"code", code},
                          {"reason", client::ErrorReason(status)},
                          {"message", message},
                          {"fields", fields},
                          {"retry_seconds", delay.has_value() ? Json(absl::ToDoubleSeconds(*delay)) : Json(nullptr)},
                          {"hint", hint}}}};
    return error.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  }
  return absl::StrCat("spmmctl: ", code, ": ", message, "\n", hint.empty() ? "" : "hint: ", hint,
                      hint.empty() ? "" : "\n");
}

}  // namespace

std::string ErrorText(const absl::Status& status, const std::string& server, bool json) {
  return Report(status, HintFor(status, server), json);
}

std::string LocalErrorText(const absl::Status& status, bool json) { return Report(status, "", json); }

}  // namespace spmmd::cli
