// Triton's shared-memory extensions over the server's regions (server/shm).
//
// Triton's regions belong to the server, not to a connection: whoever may execute can use any of them by its name, and
// they stay until they are unregistered. So do these; clients of the protocol rely on it (perf_analyzer registers on
// one connection and infers on others). Only callers on this host can register and use them.
#ifndef SPMMD_SERVER_OIP_SHARED_MEMORY_H_
#define SPMMD_SERVER_OIP_SHARED_MEMORY_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "inference/grpc_service.pb.h"
#include "server/rpc/context.h"
#include "server/shm/region.h"

namespace spmmd::server {

class OipSharedMemory {
 public:
  explicit OipSharedMemory(RpcContext* rpc) : rpc_(*rpc), regions_(rpc->regions) {}

  // What a request from `peer` may name; null when there is nothing.
  const RegionSet* For(const std::string& peer) const;
  bool empty() const { return regions_.empty(); }

  // INVALID_ARGUMENT naming the field, FAILED_PRECONDITION (shared memory is off; the caller is elsewhere), NOT_FOUND,
  // ALREADY_EXISTS, RESOURCE_EXHAUSTED.
  absl::Status Register(const inference::SystemSharedMemoryRegisterRequest& request, const std::string& peer);
  // UNIMPLEMENTED when the server has no GPU.
  absl::Status Register(const inference::CudaSharedMemoryRegisterRequest& request, const std::string& peer);
  // An unknown name is no error, as in Triton; an empty one means all of that kind.
  absl::Status Unregister(RegionKind kind, const std::string& name);
  // NOT_FOUND for an unknown name; an empty one means all.
  absl::Status Status(const std::string& name, inference::SystemSharedMemoryStatusResponse* response) const;
  absl::Status Status(const std::string& name, inference::CudaSharedMemoryStatusResponse* response) const;

 private:
  absl::StatusOr<std::vector<std::shared_ptr<const Region>>> Select(RegionKind kind, const std::string& name) const;

  RpcContext& rpc_;
  RegionSet regions_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_OIP_SHARED_MEMORY_H_
