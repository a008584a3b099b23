// Pipelined execution: many requests in flight on one stream, answered in whatever order they finish.
#ifndef SPMMD_CLIENT_CPP_STREAM_H_
#define SPMMD_CLIENT_CPP_STREAM_H_

#include <functional>
#include <future>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/client_context.h"
#include "spmm/v1/sparse_matmul.grpc.pb.h"

namespace spmmd::client {

namespace v1 = ::spmm::v1;

// From Client::OpenStream. Thread-safe. A request that fails gets its own error and leaves the others alone; when the
// stream itself breaks, every request in flight and every later one gets the stream's error.
//
// How much is in flight is the caller's choice: the server refuses what its queue cannot hold (RESOURCE_EXHAUSTED, with
// a RetryDelay), and requests not sent yet are kept in memory here.
class Stream {
 public:
  using Callback = std::function<void(absl::StatusOr<v1::ExecuteResponse>)>;

  // Cancels what is in flight; its callbacks have run (with CANCELLED) when this returns.
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  std::future<absl::StatusOr<v1::ExecuteResponse>> Submit(v1::ExecuteRequest request);

  // `done` runs exactly once, on a thread of gRPC, or on this one when the stream is over already. It must not block
  // and must not destroy the stream; it may submit.
  void Submit(v1::ExecuteRequest request, Callback done);

  // Takes no more requests, waits until all in flight are answered, and returns how the stream ended. Not to be called
  // from a callback.
  absl::Status Close();

 private:
  friend class Client;
  class Reactor;

  Stream(v1::SparseMatmul::StubInterface& stub, std::unique_ptr<grpc::ClientContext> context);

  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<Reactor> reactor_;
};

}  // namespace spmmd::client

#endif  // SPMMD_CLIENT_CPP_STREAM_H_
