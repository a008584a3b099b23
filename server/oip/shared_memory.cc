#include "server/oip/shared_memory.h"

#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status_macros.h"
#include "server/errors.h"
#include "server/rpc/local_sockets.h"

namespace spmmd::server {
namespace {

absl::Status CheckLocal(const std::string& peer) {
  if (IsLocalPeer(peer)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kNotLocal,
                   absl::StrCat("shared memory is for callers on the server's host; this one is ", peer));
}

// The pool's field names are those of spmm.v1.RegisterRegionRequest.
absl::Status InTheirFields(const absl::Status& status) {
  static constexpr std::pair<absl::string_view, absl::string_view> kFields[] = {
      {"posix_shm", "key"}, {"size", "byte_size"}, {"cuda_ipc", "raw_handle"}, {"device_uuid", "device_id"}};
  for (const auto& [ours, theirs] : kFields) {
    absl::string_view problem = status.message();
    if (FieldOf(status) == ours && absl::ConsumePrefix(&problem, absl::StrCat(ours, ": "))) {
      return FieldError(theirs, problem, ReasonOf(status));
    }
  }
  return status;
}

}  // namespace

const RegionSet* OipSharedMemory::For(const std::string& peer) const {
  return !regions_.empty() && IsLocalPeer(peer) ? &regions_ : nullptr;
}

absl::Status OipSharedMemory::Register(const inference::SystemSharedMemoryRegisterRequest& request,
                                       const std::string& peer) {
  SPMMD_RETURN_IF_ERROR(CheckLocal(peer));
  // As shm_open() has it, the slash may be left out.
  const std::string key = absl::StrCat(request.key().empty() || request.key()[0] == '/' ? "" : "/", request.key());
  return InTheirFields(regions_.RegisterPosix(request.name(), key, request.offset(), request.byte_size()));
}

absl::Status OipSharedMemory::Register(const inference::CudaSharedMemoryRegisterRequest& request,
                                       const std::string& peer) {
  if (rpc_.regions->options().open_device_memory == nullptr) {
    return MakeError(absl::StatusCode::kUnimplemented, reason::kUnsupported,
                     "CUDA shared memory takes a server with a GPU; this one computes on the CPU");
  }
  SPMMD_RETURN_IF_ERROR(CheckLocal(peer));
  // The protocol numbers GPUs as the server does.
  const std::string id = absl::StrCat("cuda:", request.device_id());
  for (const Device* device : rpc_.catalog->devices()) {
    if (device->id() != id) continue;
    pb::Device description;
    device->Describe(&description);
    return InTheirFields(
        regions_.RegisterCuda(request.name(), request.raw_handle(), description.uuid(), 0, request.byte_size()));
  }
  return FieldError("device_id", absl::StrCat("this server does not use ", id));
}

absl::Status OipSharedMemory::Unregister(RegionKind kind, const std::string& name) {
  for (const std::shared_ptr<const Region>& region : regions_.List()) {
    // Another call may have been faster: gone is gone.
    if (region->kind() == kind && (name.empty() || region->name() == name)) (void)regions_.Unregister(region->name());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::shared_ptr<const Region>>> OipSharedMemory::Select(RegionKind kind,
                                                                                   const std::string& name) const {
  std::vector<std::shared_ptr<const Region>> selected;
  for (std::shared_ptr<const Region>& region : regions_.List()) {
    if (region->kind() == kind && (name.empty() || region->name() == name)) selected.push_back(std::move(region));
  }
  if (selected.empty() && !name.empty()) {
    return MakeError(absl::StatusCode::kNotFound, reason::kRegionNotFound,
                     absl::StrCat("name: region \"", name, "\" is not registered"));
  }
  return selected;
}

absl::Status OipSharedMemory::Status(const std::string& name,
                                     inference::SystemSharedMemoryStatusResponse* response) const {
  SPMMD_ASSIGN_OR_RETURN(const auto regions, Select(RegionKind::kPosix, name));
  for (const auto& region : regions) {
    auto& status = (*response->mutable_regions())[region->name()];
    status.set_name(region->name());
    status.set_key(region->key());
    status.set_offset(region->offset());
    status.set_byte_size(region->size());
  }
  return absl::OkStatus();
}

absl::Status OipSharedMemory::Status(const std::string& name,
                                     inference::CudaSharedMemoryStatusResponse* response) const {
  SPMMD_ASSIGN_OR_RETURN(const auto regions, Select(RegionKind::kCuda, name));
  for (const auto& region : regions) {
    auto& status = (*response->mutable_regions())[region->name()];
    status.set_name(region->name());
    absl::string_view number = region->device()->id();
    uint64_t device = 0;
    if (absl::ConsumePrefix(&number, "cuda:") && absl::SimpleAtoi(number, &device)) status.set_device_id(device);
    status.set_byte_size(region->size());
  }
  return absl::OkStatus();
}

}  // namespace spmmd::server
