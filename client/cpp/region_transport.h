// Moves the large tensors of a client's requests through shared memory, when the server is on the same host and allows
// it. Internal to the client library.
#ifndef SPMMD_CLIENT_CPP_REGION_TRANSPORT_H_
#define SPMMD_CLIENT_CPP_REGION_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/shared_memory.h"
#include "spmm/v1/sparse_matmul.pb.h"

namespace spmmd::client {

// Inputs go through a region from a size on; outputs too, once an earlier answer of the same program has told their
// widths. What the server or the host does not allow is found out once, and everything travels in messages from then
// on. Thread-safe.
class RegionTransport {
 public:
  // Below this a copy into shared memory and a region's name cost as much as the bytes on the wire
  // (docs/shared-memory.md).
  static constexpr size_t kMinBytes = size_t{256} << 10;

  // `min_bytes` is another limit, for tests. The memory must outlive this object.
  explicit RegionTransport(SharedMemory* memory, size_t min_bytes = kMinBytes)
      : memory_(*memory), min_bytes_(min_bytes) {}

  using Send = absl::FunctionRef<absl::StatusOr<v1::ExecuteResponse>(const v1::ExecuteRequest&)>;
  // send(request), or the same with what is large in a region; the answer has its bytes in it either way.
  absl::StatusOr<v1::ExecuteResponse> Execute(const v1::ExecuteRequest& request, Send send);

  // Requests that went through a region.
  int64_t placed() const;

 private:
  struct Width {
    int64_t cols = 0;
    size_t element = 0;
  };

  // Null when there can be none.
  std::unique_ptr<SharedRegion> Take(uint64_t bytes);
  void Give(std::unique_ptr<SharedRegion> region);
  absl::StatusOr<v1::ExecuteResponse> ExecuteIn(SharedRegion& region, const v1::ExecuteRequest& request,
                                                const std::vector<Width>& widths, Send send);

  SharedMemory& memory_;
  const size_t min_bytes_;
  mutable absl::Mutex mutex_;
  bool off_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t placed_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::unique_ptr<SharedRegion>> free_ ABSL_GUARDED_BY(mutex_);
  // By program: columns and element size of each output.
  std::unordered_map<std::string, std::vector<Width>> widths_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spmmd::client

#endif  // SPMMD_CLIENT_CPP_REGION_TRANSPORT_H_
