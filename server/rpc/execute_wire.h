// ExecuteRequest and ExecuteResponse on the wire, without copies of large tensors: a request's stay in the slices that
// the network filled, a response's in the buffers that the device filled. Small fields are protobuf's own business.
// Reading begins with a skim (execute_skim.h).
#ifndef SPMMD_SERVER_RPC_EXECUTE_WIRE_H_
#define SPMMD_SERVER_RPC_EXECUTE_WIRE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/engine/engine.h"
#include "server/engine/payloads.h"
#include "server/pb.h"
#include "spmm/v1/sparse_matmul.pb.h"

namespace spmmd::server {

// One request as it is executed. The bytes that `payloads` point to stay until ReleaseBytes() or the end.
class ReceivedRequest {
 public:
  // Takes the bytes. INVALID_ARGUMENT when they are no such message.
  absl::Status ParseExecute(Engine& engine, grpc::ByteBuffer* bytes);
  absl::Status ParseStream(Engine& engine, grpc::ByteBuffer* bytes, uint64_t* request_id);
  // Forgets the bytes: Engine::Execute has read them once it returns.
  void ReleaseBytes();

  const pb::ExecuteRequest& message() const { return message_; }
  Payloads& payloads() { return payloads_; }
  // For Engine::Execute.
  void Describe(Engine::Caller* caller);

 private:
  absl::Status Parse(Engine& engine, grpc::ByteBuffer* bytes, bool stream, uint64_t* request_id);

  pb::ExecuteRequest message_;
  Payloads payloads_;
  std::string program_;
  Engine::KnownProgram known_;
  std::vector<grpc::Slice> slices_;
};

// An ExecuteResponse whose large tensors are `outputs`. Takes them: the slices give them back to their pool when the
// bytes have been sent.
grpc::ByteBuffer SerializeExecuteResponse(const pb::ExecuteResponse& response, std::vector<HostBuffer> outputs);
// The same in an ExecuteStreamResponse.
grpc::ByteBuffer SerializeExecuteStreamResponse(uint64_t request_id, const pb::ExecuteResponse& response,
                                                std::vector<HostBuffer> outputs);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_EXECUTE_WIRE_H_
