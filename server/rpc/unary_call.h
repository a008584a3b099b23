// The reactor of a unary method. Methods take and return gRPC's bytes, not messages: gRPC's own parsing answers bytes
// that are no message with an empty UNIMPLEMENTED, and the answer is serialised here once, with the payload in place.
#ifndef SPMMD_SERVER_RPC_UNARY_CALL_H_
#define SPMMD_SERVER_RPC_UNARY_CALL_H_

#include <utility>

#include "absl/status/status.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/errors.h"
#include "server/rpc/call.h"

namespace spmmd::server {

template <typename Message>
absl::Status MalformedMessage() {
  return MakeError(absl::StatusCode::kInvalidArgument, "MALFORMED_MESSAGE",
                   "the request's bytes are not a " + Message::descriptor()->full_name() + " message");
}

// Parses, and empties, the buffer. INVALID_ARGUMENT when the bytes are not such a message; CANCELLED when there is no
// message, which is how gRPC hands over a call that its caller gave up while the message travelled.
template <typename Message>
absl::Status ParseMessage(grpc::ByteBuffer* bytes, Message* message) {
  if (!bytes->Valid()) return absl::CancelledError("the call ended before its request had come");
  const grpc::Status status = grpc::SerializationTraits<Message>::Deserialize(bytes, message);
  if (status.ok()) return absl::OkStatus();
  return MalformedMessage<Message>();
}

template <typename Message>
absl::Status SerializeMessage(const Message& message, grpc::ByteBuffer* bytes) {
  bytes->Clear();  // the writer refuses a buffer that still holds an earlier message
  bool own = false;
  const grpc::Status status = grpc::SerializationTraits<Message>::Serialize(message, bytes, &own);
  if (status.ok()) return absl::OkStatus();
  return absl::InternalError("the response cannot be serialised: " + status.error_message());
}

template <typename Request, typename Response>
class UnaryCall : public grpc::ServerUnaryReactor {
 public:
  UnaryCall(RpcContext& rpc, const Method& method, grpc::CallbackServerContext* context,
            grpc::ByteBuffer* response_bytes)
      : scope_(rpc, method, context), response_bytes_(response_bytes) {}

  // Admits the call and parses its request. False: the call was answered with the error.
  bool Begin(const grpc::ByteBuffer* request_bytes) {
    absl::Status status = scope_.Admit();
    // The buffer is this call's own; only gRPC's signature makes it const.
    if (status.ok()) status = ParseMessage(const_cast<grpc::ByteBuffer*>(request_bytes), &request_);
    if (!status.ok()) End(status);
    return status.ok();
  }

  // Answers. The object may be gone when this returns.
  void End(absl::Status status) {
    if (status.ok()) status = SerializeMessage(response_, response_bytes_);
    Finish(scope_.Finish(status));
  }

  void OnDone() override { delete this; }

  const Request& request() const { return request_; }
  Request* mutable_request() { return &request_; }
  Response* response() { return &response_; }
  CallScope& scope() { return scope_; }

 protected:
  ~UnaryCall() override = default;

 private:
  CallScope scope_;
  grpc::ByteBuffer* const response_bytes_;
  Request request_;
  Response response_;
};

// A method that does not block: `body(request, response) -> absl::Status`.
template <typename Request, typename Response, typename Body>
grpc::ServerUnaryReactor* RunUnary(RpcContext& rpc, const Method& method, grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* in, grpc::ByteBuffer* out, Body&& body) {
  auto* call = new UnaryCall<Request, Response>(rpc, method, context, out);
  if (call->Begin(in)) call->End(body(call->request(), call->response()));
  return call;
}

// A method that may block: the same, on a thread of its own, at most limits.max_blocking_calls at once.
template <typename Request, typename Response, typename Body>
grpc::ServerUnaryReactor* RunBlocking(RpcContext& rpc, const Method& method, grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* in, grpc::ByteBuffer* out, Body body) {
  auto* call = new UnaryCall<Request, Response>(rpc, method, context, out);
  if (!call->Begin(in)) return call;
  if (rpc.blocking_calls.fetch_add(1, std::memory_order_relaxed) >= rpc.limits.max_blocking_calls) {
    rpc.blocking_calls.fetch_sub(1, std::memory_order_relaxed);
    call->End(Exhausted("TOO_MANY_ADMIN_CALLS", "too many admin calls at once", absl::Seconds(1)));
    return call;
  }
  rpc.blocking->Run([&rpc, call, body = std::move(body)] {
    absl::Status status = body(call->request(), call->response());
    rpc.blocking_calls.fetch_sub(1, std::memory_order_relaxed);
    call->End(std::move(status));
  });
  return call;
}

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_UNARY_CALL_H_
