// Several servers: replicas of one another, and shards that hold different layers. See docs/scale-out.md.
#ifndef SPMMD_CLIENT_CPP_SHARDING_H_
#define SPMMD_CLIENT_CPP_SHARDING_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"

namespace spmmd::client {

// `options` for an address that resolves to several replicas ("dns:///name-headless:8500",
// "ipv4:10.0.0.1:8500,10.0.0.2:8500"): calls go to all of them in turn, but those whose health is not SERVING, and
// Execute is sent again elsewhere when a server goes away under it. Registrations through such a client reach one
// replica only: ShardedClient sends them to all, with one shard too.
ClientOptions Balanced(ClientOptions options = {});

// The addresses of the servers behind one address that are there now: what a name resolves to, the parts of
// "ipv4:A,B" and "ipv6:A,B", the address itself for a Unix socket. UNAVAILABLE when the name does not resolve.
absl::StatusOr<std::vector<std::string>> ReplicasOf(const std::string& address);

// One server of a shard, on a connection of its own.
struct Replica {
  std::string address;
  std::unique_ptr<Client> client;
};

// A program that every replica of its shard has checked and planned. Belongs to the ShardedClient that made it.
struct ShardedProgram {
  v1::Program program;
  std::string id;
};

// One client over all shards. Thread-safe, and fixed: for another number of shards connect a new one, and let go of
// this one when its calls have ended.
//
// Calls on a layer go to its shard: what only computes or reads, to the replicas in turn; what changes a server, to
// every replica that is there now. One that starts later has what its own manifest says, so production layers belong
// into a manifest. When a change fails on one replica the others may have it already: its error names the replica, and
// the call may be repeated.
class ShardedClient {
 public:
  // `shards`: addresses in the order of the servers' --shard-index, each as for Client::Connect with Balanced(options).
  static absl::StatusOr<std::unique_ptr<ShardedClient>> Connect(absl::Span<const std::string> shards,
                                                                const ClientOptions& options = {});

  int count() const { return static_cast<int>(clients_.size()); }
  int ShardOf(std::string_view layer) const;
  // The balanced client of the layer's shard, for whatever has no method here.
  Client& Of(std::string_view layer) const { return *clients_[static_cast<size_t>(ShardOf(layer))]; }
  // Connections to each replica of a shard that is there now.
  absl::StatusOr<std::vector<Replica>> Replicas(int shard) const;

  // --- Data.

  absl::StatusOr<MatmulResult> Matmul(std::string_view layer, const DenseRows& x, const MatmulOptions& options = {});
  absl::StatusOr<MatmulResult> Matmul(std::string_view layer, const SparseRows& x, const MatmulOptions& options = {});
  // INVALID_ARGUMENT when the program's layers lie on several shards: names that agree up to the first '/' lie
  // together.
  absl::StatusOr<v1::ExecuteResponse> Execute(const v1::Program& program,
                                              absl::Span<const std::pair<std::string_view, DenseRows>> inputs,
                                              const CallOptions& call = {});
  // Registers the program with every replica of its shard, which is found as for Execute.
  absl::StatusOr<ShardedProgram> RegisterProgram(const v1::Program& program, const CallOptions& call = {});
  // Runs it by its id. A replica that does not know it, because it started later, gets it registered.
  absl::StatusOr<v1::ExecuteResponse> Execute(const ShardedProgram& program,
                                              absl::Span<const std::pair<std::string_view, DenseRows>> inputs,
                                              const CallOptions& call = {});
  // Replicas that do not know it are passed over.
  absl::Status UnregisterProgram(const ShardedProgram& program, const CallOptions& call = {});
  // A stream to one replica of the layer's shard; only layers of that shard may be used on it.
  absl::StatusOr<std::unique_ptr<Stream>> OpenStream(std::string_view layer, const CallOptions& call = {});

  // --- Catalog, on every replica of the layer's shard. The first one's answer is returned; bytes are summed.

  absl::StatusOr<RegisterResult> Register(const v1::LayerSpec& spec, const LayerContent& content,
                                          const RegisterOptions& options = {});
  absl::StatusOr<RegisterResult> RegisterFile(const v1::LayerSpec& spec, const RegisterOptions& options = {});
  // NOT_FOUND when no replica has it; versions are counted once.
  absl::StatusOr<v1::UnregisterLayerResponse> Unregister(const v1::LayerRef& layer, const CallOptions& call = {});
  absl::StatusOr<v1::Layer> Pin(const v1::LayerRef& layer, bool pinned, const CallOptions& call = {});
  absl::StatusOr<v1::Layer> Warm(const v1::LayerRef& layer, const CallOptions& call = {});
  // From one replica.
  absl::StatusOr<v1::Layer> Get(const v1::LayerRef& layer, const CallOptions& call = {});
  // The layers of all shards, by name, each once.
  absl::StatusOr<std::vector<v1::Layer>> List(std::string_view name_prefix = "", const CallOptions& call = {});

 private:
  ShardedClient(std::vector<std::string> shards, ClientOptions options, std::vector<std::unique_ptr<Client>> clients)
      : shards_(std::move(shards)), options_(std::move(options)), clients_(std::move(clients)) {}

  // The first layer of a program whose layers all lie on one shard; empty when it has none.
  absl::StatusOr<std::string_view> OneShard(const v1::Program& program) const;
  // Each replica's result, until the first error, which gets the replica's address in front.
  template <typename Result>
  absl::StatusOr<std::vector<Result>> OnReplicas(std::string_view layer,
                                                 const std::function<absl::StatusOr<Result>(Client&)>& change) const;

  const std::vector<std::string> shards_;
  const ClientOptions options_;
  const std::vector<std::unique_ptr<Client>> clients_;
};

}  // namespace spmmd::client

#endif  // SPMMD_CLIENT_CPP_SHARDING_H_
