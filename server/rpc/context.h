// What the services share.
#ifndef SPMMD_SERVER_RPC_CONTEXT_H_
#define SPMMD_SERVER_RPC_CONTEXT_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/catalog/catalog.h"
#include "server/engine/engine.h"
#include "server/metrics/metrics.h"
#include "server/rpc/auth.h"
#include "server/rpc/blocking_runner.h"
#include "server/shm/region.h"

namespace spmmd::server {

class Connections;

// Requests up to this size may go to a device's thread before they are parsed: larger ones would keep it from others.
inline constexpr size_t kMaxOfferedBytes = size_t{64} << 10;

// A call without an end of its own, told when the server drains.
class DrainableCall {
 public:
  virtual ~DrainableCall() = default;
  virtual void BeginDrain() = 0;
};

struct RpcLimits {
  uint64_t max_message_bytes = uint64_t{64} << 20;
  int max_uploads = 16;
  // How long a registration waits for its client's next message; zero waits for ever.
  absl::Duration upload_idle_timeout = absl::Seconds(60);
  int max_stream_in_flight = 64;
  // Unregister, Pin, Warm and Benchmark calls that may block at once.
  int max_blocking_calls = 64;
  int max_rings = 16;
  // How long a ring's thread looks for the next entry before it sleeps.
  absl::Duration ring_spin = absl::Microseconds(100);
};

enum class ServingState { kStarting, kServing, kDraining };

struct RpcContext {
  Engine* engine = nullptr;
  LayerCatalog* catalog = nullptr;
  Metrics* metrics = nullptr;
  AuthTokens* auth = nullptr;  // null: every call is allowed
  BlockingRunner* blocking = nullptr;
  RegionPool* regions = nullptr;
  Connections* connections = nullptr;
  RpcLimits limits;
  std::string version;
  std::string revision;
  std::string backend;

  std::atomic<ServingState> state{ServingState::kStarting};
  // What grpc.health.v1 says of the whole server.
  std::atomic<bool> healthy{false};
  std::atomic<int> uploads{0};
  std::atomic<int> blocking_calls{0};
  std::atomic<int> rings{0};
  // Calls that were admitted and whose answer has not been handed to the network.
  std::atomic<int> calls{0};

  absl::Mutex streams_mutex;
  absl::flat_hash_set<DrainableCall*> streams ABSL_GUARDED_BY(streams_mutex);
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_CONTEXT_H_
