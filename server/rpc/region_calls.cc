#include "server/rpc/region_calls.h"

#include <memory>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "server/errors.h"
#include "server/ring/ring.h"
#include "server/rpc/call.h"
#include "server/rpc/connections.h"

namespace spmmd::server {
namespace {

// What an entry of a ring is called in metrics and logs.
constexpr char kRingMethod[] = "spmm.v1.SparseMatmul/Ring";

std::string NewRingId() {
  static std::random_device random;
  static absl::Mutex mutex;
  absl::MutexLock lock(&mutex);
  return absl::StrCat(absl::Hex((uint64_t{random()} << 32) | random(), absl::kZeroPad16));
}

absl::Status RingNotFound(const std::string& id) {
  return MakeError(absl::StatusCode::kNotFound, reason::kRingNotFound,
                   absl::StrCat("ring_id: \"", id, "\" is no ring of this connection"));
}

// Whether an entry may run; as CallScope::Admit, less the token, which was shown when the ring was opened.
absl::Status AdmitEntry(RpcContext& rpc) {
  rpc.calls.fetch_add(1);
  if (rpc.state.load() != ServingState::kDraining) return absl::OkStatus();
  rpc.calls.fetch_sub(1);
  return MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "the server is shutting down");
}

}  // namespace

absl::Status RegisterRegion(RpcContext& rpc, const grpc::ServerContextBase& context,
                            const pb::RegisterRegionRequest& request) {
  SPMMD_ASSIGN_OR_RETURN(const auto owned, rpc.connections->Of(context));
  switch (request.handle_case()) {
    case pb::RegisterRegionRequest::kPosixShm:
      return owned->regions.RegisterPosix(request.name(), request.posix_shm(), request.offset(), request.size());
    case pb::RegisterRegionRequest::kCudaIpc:
      return owned->regions.RegisterCuda(request.name(), request.cuda_ipc(), request.device_uuid(), request.offset(),
                                         request.size());
    case pb::RegisterRegionRequest::HANDLE_NOT_SET:
      break;
  }
  return FieldError("handle", "one of posix_shm, cuda_ipc must be set");
}

absl::Status UnregisterRegion(RpcContext& rpc, const grpc::ServerContextBase& context,
                              const pb::UnregisterRegionRequest& request, pb::UnregisterRegionResponse* response) {
  const auto owned = rpc.connections->Find(context);
  if (request.name().empty()) {
    response->set_removed_regions(owned == nullptr ? 0 : owned->regions.UnregisterAll());
    return absl::OkStatus();
  }
  if (owned == nullptr) return RegionNotFound(request.name());
  SPMMD_RETURN_IF_ERROR(owned->regions.Unregister(request.name()));
  response->set_removed_regions(1);
  return absl::OkStatus();
}

absl::Status OpenRing(RpcContext& rpc, const grpc::ServerContextBase& context, const pb::OpenRingRequest& request,
                      pb::OpenRingResponse* response) {
  SPMMD_ASSIGN_OR_RETURN(const auto owned, rpc.connections->Of(context));
  auto region = owned->regions.Find(request.region());
  if (!region.ok()) return AtField("region", region.status());
  Ring::Options options;
  options.offset = request.offset();
  options.entries = request.entries();
  options.program_ids.assign(request.program_ids().begin(), request.program_ids().end());
  options.spin = rpc.limits.ring_spin;
  options.admit = [&rpc] { return AdmitEntry(rpc); };
  options.ended = [&rpc] { rpc.calls.fetch_sub(1, std::memory_order_release); };
  options.log_failure = [peer = context.peer()](const absl::Status& status) {
    LogFailedRequest(kRingMethod, status, peer, "");
  };
  RpcMetrics* const metrics = &rpc.metrics->Rpc(kRingMethod);
  if (rpc.rings.fetch_add(1) >= rpc.limits.max_rings) {
    rpc.rings.fetch_sub(1);
    return Exhausted(reason::kTooManyRings, absl::StrCat(rpc.limits.max_rings, " rings are open, which is the limit"),
                     absl::ZeroDuration(), {{"limit", absl::StrCat(rpc.limits.max_rings)}});
  }
  auto ring = Ring::Create(std::move(options), *std::move(region), rpc.regions, rpc.engine, metrics);
  if (!ring.ok()) {
    rpc.rings.fetch_sub(1);
    return ring.status();
  }
  const std::string id = NewRingId();
  {
    absl::MutexLock lock(&owned->mutex);
    if (owned->ended) {
      rpc.rings.fetch_sub(1);
      return MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "the connection has ended");
    }
    owned->rings.emplace(id, *ring);
  }
  rpc.blocking->Run([&rpc, ring = *std::move(ring)]() mutable {
    ring->Run();
    ring.reset();  // its region may go before the count does
    rpc.rings.fetch_sub(1);
  });
  response->set_ring_id(id);
  return absl::OkStatus();
}

absl::Status CloseRing(RpcContext& rpc, const grpc::ServerContextBase& context, const pb::CloseRingRequest& request) {
  std::shared_ptr<Ring> ring;
  if (const auto owned = rpc.connections->Find(context); owned != nullptr) {
    absl::MutexLock lock(&owned->mutex);
    if (const auto it = owned->rings.find(request.ring_id()); it != owned->rings.end()) {
      ring = std::move(it->second);
      owned->rings.erase(it);
    }
  }
  if (ring == nullptr) return RingNotFound(request.ring_id());
  ring->Close(/*cancel=*/false);
  ring->AwaitEnd();
  return absl::OkStatus();
}

std::shared_ptr<const RegionSet> RegionsOf(RpcContext& rpc, const grpc::ServerContextBase& context) {
  std::shared_ptr<Connections::Owned> owned = rpc.connections->Find(context);
  if (owned == nullptr) return nullptr;
  const RegionSet* const regions = &owned->regions;
  return {std::move(owned), regions};
}

}  // namespace spmmd::server
