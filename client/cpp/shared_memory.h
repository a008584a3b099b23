// Memory shared with a server on the same host: tensors are read and written where they lie, and no bytes travel.
//
//   auto region = client->CreateRegion(bytes);
//   float* x = region->As<float>(0, n * k);                       // fill it
//   *request.add_inputs() = MakeInput("x", **region, 0, v1::DATA_TYPE_F32, n, k);
//   *request.mutable_program()->mutable_outputs(0)->mutable_region() = (*region)->Slice(y_offset, y_bytes);
//   client->Execute(request);                                     // y is in the region now
//
// The server must have been started with --shared-memory, and the connection must be a Unix socket or a loopback
// address. A region belongs to its client's connection: when that breaks (the server restarts), the server has
// forgotten it, calls that name it get NOT_FOUND, and a new one must be made. The object behind it has no name any more
// once it is registered, so that nothing stays in /dev/shm whatever happens to this process.
#ifndef SPMMD_CLIENT_CPP_SHARED_MEMORY_H_
#define SPMMD_CLIENT_CPP_SHARED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/options.h"
#include "spmm/v1/sparse_matmul.grpc.pb.h"

namespace spmmd::client {

namespace v1 = ::spmm::v1;

class Connection;
class SharedMemory;

// A region; from Client::CreateRegion. Unregistered and unmapped on destruction: no request that names it may be in
// flight then. Must not outlive its client.
class SharedRegion {
 public:
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  // What requests call it.
  const std::string& name() const { return name_; }
  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }
  // `count` elements at a byte offset; empty when they do not lie inside the region or are misaligned.
  template <typename T>
  absl::Span<T> As(uint64_t offset, uint64_t count) const {
    if (offset > size_ || count > (size_ - offset) / sizeof(T) || offset % alignof(T) != 0) return {};
    return {reinterpret_cast<T*>(data_ + offset), count};
  }
  v1::RegionSlice Slice(uint64_t offset, uint64_t bytes) const;

 private:
  friend class SharedMemory;
  SharedRegion(SharedMemory* owner, std::string name, std::byte* data, uint64_t size)
      : owner_(*owner), name_(std::move(name)), data_(data), size_(size) {}

  SharedMemory& owner_;
  const std::string name_;
  std::byte* const data_;
  const uint64_t size_;
};

// A program input that lies in a region: [rows, cols] elements of `dtype` from `offset` on. The server checks it.
v1::NamedInput MakeInput(std::string_view name, const SharedRegion& region, uint64_t offset, v1::DataType dtype,
                         int64_t rows, int64_t cols);

// What a client shares with its server. Internal to the client library. Thread-safe.
class SharedMemory {
 public:
  SharedMemory(std::shared_ptr<Connection> connection, v1::SparseMatmul::Stub* stub);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // RESOURCE_EXHAUSTED when /dev/shm has no room; the errors of RegisterRegion.
  absl::StatusOr<std::unique_ptr<SharedRegion>> Create(uint64_t bytes, const CallOptions& call);
  // Whether the connection on which regions were registered is still there.
  bool alive() const;

  const std::shared_ptr<Connection>& connection() const { return connection_; }
  v1::SparseMatmul::Stub& stub() const { return stub_; }

 private:
  friend class SharedRegion;
  class Lease;

  // Whether the server takes shared memory at all: only such a one says when a stream is open.
  absl::Status CheckServer();
  absl::Status EnsureLease();
  void Unregister(const std::string& name);

  const std::shared_ptr<Connection> connection_;
  v1::SparseMatmul::Stub& stub_;
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace spmmd::client

#endif  // SPMMD_CLIENT_CPP_SHARED_MEMORY_H_
