// Several servers: replicas of one another, and shards that hold different layers. See docs/scale-out.md.
#ifndef SPMMD_CLIENT_CPP_SHARDING_H_
#define SPMMD_CLIENT_CPP_SHARDING_H_

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
// Execute is sent again elsewhere when a server goes away under it. Registrations reach one replica only: replicas get
// their layers from their manifests.
ClientOptions Balanced(ClientOptions options = {});

// One client over all shards. Thread-safe, and fixed: for another number of shards connect a new one, and let go of
// this one when its calls have ended.
class ShardedClient {
 public:
  // `shards`: addresses in the order of the servers' --shard-index, each as for Client::Connect with Balanced(options).
  static absl::StatusOr<std::unique_ptr<ShardedClient>> Connect(absl::Span<const std::string> shards,
                                                                const ClientOptions& options = {});

  int count() const { return static_cast<int>(clients_.size()); }
  int ShardOf(std::string_view layer) const;
  // The client of the layer's shard, for whatever has no method here. Streams and registered programs belong to one.
  Client& Of(std::string_view layer) const { return *clients_[static_cast<size_t>(ShardOf(layer))]; }

  absl::StatusOr<MatmulResult> Matmul(std::string_view layer, const DenseRows& x, const MatmulOptions& options = {});
  absl::StatusOr<MatmulResult> Matmul(std::string_view layer, const SparseRows& x, const MatmulOptions& options = {});
  // INVALID_ARGUMENT when the program's layers lie on several shards: names that agree up to the first '/' lie
  // together.
  absl::StatusOr<v1::ExecuteResponse> Execute(const v1::Program& program,
                                              absl::Span<const std::pair<std::string_view, DenseRows>> inputs,
                                              const CallOptions& call = {});
  // The layers of all shards, by name, each once.
  absl::StatusOr<std::vector<v1::Layer>> List(std::string_view name_prefix = "", const CallOptions& call = {});

 private:
  explicit ShardedClient(std::vector<std::unique_ptr<Client>> clients) : clients_(std::move(clients)) {}

  const std::vector<std::unique_ptr<Client>> clients_;
};

}  // namespace spmmd::client

#endif  // SPMMD_CLIENT_CPP_SHARDING_H_
