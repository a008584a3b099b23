// What every call has in common: who may make it, how it is counted, what is logged when it fails.
#ifndef SPMMD_SERVER_RPC_CALL_H_
#define SPMMD_SERVER_RPC_CALL_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/server_context.h"
#include "server/metrics/metrics.h"
#include "server/rpc/auth.h"
#include "server/rpc/context.h"

namespace spmmd::server {

// One RPC method; made once by its service.
struct Method {
  std::string name;     // "spmm.v1.SparseMatmul/Execute"
  RpcMetrics* metrics;  // of that name
  AuthGroup group;      // whose token it needs
  bool needs_layers;    // refused (UNAVAILABLE) until the preloaded layers are there
};

// Member of a reactor. Its destructor marks the end of the call, so it must be destroyed in OnDone.
class CallScope {
 public:
  // Counts the call and echoes `x-request-id`. A `counted` of false leaves requests_total to the caller (streams count
  // their requests one by one).
  CallScope(RpcContext& rpc, const Method& method, grpc::CallbackServerContext* context, bool counted = true);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

  // Whether the call may proceed: token and server state. A call that may holds up the drain until this object is gone.
  absl::Status Admit();
  // The caller's deadline, or infinity.
  absl::Time deadline() const;

  // The answer: counted, logged when it is an error, and turned into what travels. Called once.
  grpc::Status Finish(const absl::Status& result);
  // The log line alone, for a request on a stream.
  void LogFailure(const absl::Status& status) const;

  RpcContext& rpc() const { return rpc_; }
  const grpc::CallbackServerContext& context() const { return *context_; }
  const Method& method() const { return method_; }

 private:
  absl::Status Outcome(const absl::Status& status) const;

  RpcContext& rpc_;
  const Method& method_;
  grpc::CallbackServerContext* const context_;
  const bool counted_;
  bool admitted_ = false;
  const absl::Time started_;
  std::string request_id_;
};

// The log line of a failed request, unless there were too many of late.
void LogFailedRequest(std::string_view rpc, const absl::Status& status, const std::string& peer,
                      std::string_view request_id);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_CALL_H_
