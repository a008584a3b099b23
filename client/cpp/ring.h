// Execution through shared memory, without a gRPC call for each request: a ring of entries that the server polls
// (proto/ring/ring_layout.h). For callers on the server's host that run small programs at a high rate: an entry costs a
// few microseconds beside its kernels, a call 100 to 200.
//
//   auto program = client->RegisterProgram(mlp);
//   auto ring = client->OpenRing({.program_ids = {*program}, .tensor_bytes = 1 << 20});
//   absl::Span<float> x = (*ring)->As<float>(x_offset, k);          // fill it
//   const Ring::Tensor input{x_offset, k, v1::DATA_TYPE_F32}, output{y_offset, m, v1::DATA_TYPE_F32};
//   absl::StatusOr<Ring::Result> result = (*ring)->Execute({.rows = 1, .inputs = {&input, 1}, .outputs = {&output,
//   1}});
//
// Several entries may be in flight: Submit them, then Wait for as many results, which come in any order. Entries that
// wait together may share a launch.
#ifndef SPMMD_CLIENT_CPP_RING_H_
#define SPMMD_CLIENT_CPP_RING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/options.h"
#include "client/cpp/shared_memory.h"
#include "spmm/v1/sparse_matmul.grpc.pb.h"

namespace spmmd::ring {
struct Header;
}  // namespace spmmd::ring

namespace spmmd::client {

struct RingOptions {
  // Registered programs that entries name by their position here.
  std::vector<std::string> program_ids;
  // Room for tensors, at offsets from 0 on.
  uint64_t tensor_bytes = uint64_t{1} << 20;
  // Entries in flight: a power of two, 2 to 4096.
  uint32_t entries = 64;
  // How long Wait looks for a result before it sleeps.
  absl::Duration spin = absl::Microseconds(200);
};

// One thread at a time may submit, and one may wait. Must not outlive its client.
class Ring {
 public:
  struct Tensor {
    uint64_t offset = 0;  // in the tensors' room; a multiple of the element size, best of 64
    int64_t cols = 0;
    v1::DataType dtype = v1::DATA_TYPE_F32;
  };
  struct Entry {
    uint32_t program = 0;
    int64_t rows = 0;  // N
    // In the program's order. No output may share bytes with an input or another output.
    absl::Span<const Tensor> inputs{};
    absl::Span<const Tensor> outputs{};
    uint64_t user_data = 0;                             // comes back with the result
    absl::Duration timeout = absl::InfiniteDuration();  // from now on
    v1::Priority priority = v1::PRIORITY_UNSPECIFIED;
  };
  struct Result {
    uint64_t user_data = 0;
    // The errors of Execute, with their reason (ErrorReason) and RetryDelay.
    absl::Status status;
    absl::Duration queue;
    absl::Duration kernel;
    absl::Duration total;
  };

  // Closes the ring; entries in flight complete first.
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // `count` elements of the tensors' room.
  template <typename T>
  absl::Span<T> As(uint64_t offset, uint64_t count) const {
    if (offset > tensor_bytes_) return {};
    return region_->As<T>(tensors_at_ + offset, count);
  }

  // INVALID_ARGUMENT for what an entry cannot say, RESOURCE_EXHAUSTED when `entries` are in flight already, UNAVAILABLE
  // when the ring is over.
  absl::Status Submit(const Entry& entry);
  // The next result. DEADLINE_EXCEEDED when none comes in time; UNAVAILABLE when the ring is over and none will come.
  absl::StatusOr<Result> Wait(absl::Duration timeout = absl::InfiniteDuration());
  // Submits and waits; with nothing else in flight.
  absl::StatusOr<Result> Execute(const Entry& entry);

 private:
  friend class Client;
  Ring(SharedMemory* memory, RingOptions options, std::unique_ptr<SharedRegion> region, uint64_t tensors_at);
  static absl::StatusOr<std::unique_ptr<Ring>> Open(SharedMemory* memory, RingOptions options, const CallOptions& call);
  absl::Status Over();
  Result Read(uint32_t index) const;

  SharedMemory& memory_;
  const RingOptions options_;
  const std::unique_ptr<SharedRegion> region_;
  const uint64_t tensors_at_;
  const uint64_t tensor_bytes_;
  ring::Header& header_;
  std::string id_;
  uint32_t submitted_ = 0;
  uint32_t consumed_ = 0;
};

}  // namespace spmmd::client

#endif  // SPMMD_CLIENT_CPP_RING_H_
