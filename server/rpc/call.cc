#include "server/rpc/call.h"

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/errors.h"
#include "server/log/log.h"
#include "server/rpc/status.h"

namespace spmmd::server {
namespace {

// What a failing client can make the log grow by.
constexpr int64_t kMaxFailureLinesPerSecond = 100;

// True when a line may be written now. `suppressed` is the number of lines left out before it.
bool TakeLogLine(int64_t* suppressed) {
  static std::atomic<int64_t> window{0};
  static std::atomic<int64_t> lines{0};
  static std::atomic<int64_t> left_out{0};
  const int64_t second = absl::ToUnixSeconds(absl::Now());
  int64_t seen = window.load(std::memory_order_relaxed);
  if (seen != second && window.compare_exchange_strong(seen, second)) lines.store(0, std::memory_order_relaxed);
  if (lines.fetch_add(1, std::memory_order_relaxed) >= kMaxFailureLinesPerSecond) {
    left_out.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  *suppressed = left_out.exchange(0, std::memory_order_relaxed);
  return true;
}

}  // namespace

CallScope::CallScope(RpcContext& rpc, const Method& method, grpc::CallbackServerContext* context, bool counted)
    : rpc_(rpc), method_(method), context_(context), counted_(counted), started_(absl::Now()) {
  if (counted_) method_.metrics->Started();
  const auto& metadata = context->client_metadata();
  if (const auto it = metadata.find("x-request-id"); it != metadata.end()) {
    request_id_.assign(it->second.data(), it->second.size());
    context->AddInitialMetadata("x-request-id", request_id_);
  }
}

CallScope::~CallScope() {
  if (admitted_) rpc_.calls.fetch_sub(1, std::memory_order_release);
}

absl::Status CallScope::Admit() {
  if (rpc_.auth != nullptr) {
    const auto& metadata = context_->client_metadata();
    const auto it = metadata.find("authorization");
    absl::Status status = rpc_.auth->Check(
        it == metadata.end() ? std::string_view() : std::string_view(it->second.data(), it->second.size()),
        method_.group);
    if (!status.ok()) return status;
  }
  // Counted before the state is looked at, so that a drain either sees the call or refuses it.
  rpc_.calls.fetch_add(1);
  admitted_ = true;
  if (rpc_.state.load() == ServingState::kDraining) {
    rpc_.calls.fetch_sub(1);
    admitted_ = false;
    return MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "the server is shutting down");
  }
  if (method_.needs_layers && rpc_.state.load() == ServingState::kStarting) {
    return MakeError(absl::StatusCode::kUnavailable, "STARTING", "the server is still loading its layers");
  }
  return absl::OkStatus();
}

absl::Time CallScope::deadline() const { return absl::FromChrono(context_->deadline()); }

// An upload or a stream that its caller gives up ends early, which is nobody's bad request. The caller is gone: this is
// what metrics and the log say.
absl::Status CallScope::Outcome(const absl::Status& status) const {
  if (status.code() != absl::StatusCode::kInvalidArgument) return status;
  if (deadline() <= absl::Now()) return absl::DeadlineExceededError("the deadline passed while the request arrived");
  if (context_->IsCancelled()) return absl::CancelledError("the call was cancelled while the request arrived");
  return status;
}

grpc::Status CallScope::Finish(const absl::Status& result) {
  const absl::Status status = Outcome(result);
  if (counted_) method_.metrics->Finished(status.code(), absl::Now() - started_);
  if (status.ok()) return grpc::Status::OK;
  LogFailure(status);
  return ToGrpcStatus(status);
}

void CallScope::LogFailure(const absl::Status& status) const {
  LogFailedRequest(method_.name, status, context_->peer(), request_id_);
}

void LogFailedRequest(std::string_view rpc, const absl::Status& status, const std::string& peer,
                      std::string_view request_id) {
  if (!LogEnabled(LogLevel::kWarning)) return;
  int64_t suppressed = 0;
  if (!TakeLogLine(&suppressed)) return;
  if (suppressed > 0) LogWarning("failed requests not logged", {{"count", suppressed}});
  Log(LogLevel::kWarning, "request failed",
      {{"rpc", rpc},
       {"code", CodeName(status.code())},
       {"error", std::string_view(status.message().data(), status.message().size())},
       {"peer", peer},
       {"request_id", request_id}});
}

}  // namespace spmmd::server
