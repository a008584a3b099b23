// A bidirectional stream of requests that are answered one by one, as they finish.
#ifndef SPMMD_SERVER_RPC_PIPELINED_STREAM_H_
#define SPMMD_SERVER_RPC_PIPELINED_STREAM_H_

#include <atomic>
#include <deque>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "server/engine/engine.h"
#include "server/rpc/call.h"
#include "server/rpc/connections.h"
#include "server/rpc/context.h"

namespace spmmd::server {

// One request of a stream, from its bytes to its answer's.
class StreamRequest {
 public:
  virtual ~StreamRequest() = default;
  // Takes the bytes; the next request of the stream is read afterwards. An error ends the stream: what follows such
  // bytes cannot be trusted.
  virtual absl::Status Parse(grpc::ByteBuffer* bytes) = 0;
  // Starts it. `done` is called exactly once, as Engine::Execute does. The handle is for Engine::Cancel, or null.
  virtual Engine::Call Start(Engine& engine, absl::Time deadline, std::function<void(absl::Status)> done) = 0;
  // Writes the answer: the result, or the error. Called once, after `done`; no longer counts as in flight then.
  virtual absl::Status Answer(const absl::Status& result, grpc::ByteBuffer* bytes) = 0;
};

// The reactor of one stream; deletes itself.
//
// At most limits.max_stream_in_flight requests are between "read" and "answer written"; beyond that nothing is read, so
// a caller that never reads its answers cannot make the server hold more. A request that fails is answered by an error;
// only bytes that are no request end the stream. When the server drains, a stream ends (UNAVAILABLE) as soon as nothing
// is in flight on it.
class PipelinedStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>, public DrainableCall {
 public:
  // `make` makes the requests; what it refers to lives as long as the stream and its requests do.
  PipelinedStream(RpcContext& rpc, const Method& method, grpc::CallbackServerContext* context,
                  std::function<std::shared_ptr<StreamRequest>()> make);

  void OnReadDone(bool ok) override;
  // A failed write is a cancelled call, and OnCancel says so.
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;
  void BeginDrain() override;

 private:
  struct Item {
    std::shared_ptr<StreamRequest> request;
    Engine::Call call;
    absl::Time started;
  };

  ~PipelinedStream() override = default;

  void Unref();
  // Takes the request that was read.
  void Handle();
  // A request has ended; called by the engine on any thread, or for a request that never got there. Gives back the
  // request's reference: on an engine thread nothing else keeps this object once the stream has been finished.
  void Answer(const std::shared_ptr<Item>& item, const absl::Status& status);
  void ReadMore() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteMore() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishIfDone() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  CallScope scope_;
  // Null when shared memory is off: what the connection registered goes when its last stream is cancelled.
  std::unique_ptr<Connections::Stream> connection_;
  const std::function<std::shared_ptr<StreamRequest>()> make_;
  const absl::Time deadline_;
  std::atomic<int> refs_{1};  // gRPC's, given back in OnDone, and one for each request in flight
  grpc::ByteBuffer in_;

  absl::Mutex mutex_;
  absl::flat_hash_set<std::shared_ptr<Item>> active_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::unique_ptr<grpc::ByteBuffer>> to_write_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<grpc::ByteBuffer> out_ ABSL_GUARDED_BY(mutex_);  // being written
  int in_flight_ ABSL_GUARDED_BY(mutex_) = 0;                      // read, answer not yet written
  bool reading_ ABSL_GUARDED_BY(mutex_) = true;
  bool reads_done_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_PIPELINED_STREAM_H_
