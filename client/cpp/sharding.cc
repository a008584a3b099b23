#include "client/cpp/sharding.h"

#include <cstdint>
#include <map>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/shard/shard.h"

namespace spmmd::client {
namespace {

// The same as the Python client's.
constexpr char kServiceConfig[] = R"({
  "loadBalancingConfig": [{"round_robin": {}}],
  "healthCheckConfig": {"serviceName": ""},
  "methodConfig": [{
    "name": [{"service": "spmm.v1.SparseMatmul", "method": "Execute"}],
    "retryPolicy": {
      "maxAttempts": 4,
      "initialBackoff": "0.02s",
      "maxBackoff": "0.5s",
      "backoffMultiplier": 2,
      "retryableStatusCodes": ["UNAVAILABLE"]
    }
  }]
})";

}  // namespace

ClientOptions Balanced(ClientOptions options) {
  options.channel_arguments.SetServiceConfigJSON(kServiceConfig);
  // gRPC's own 30 s between look-ups and up to 120 s between attempts are longer than a rollout takes.
  options.channel_arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 5000);
  options.channel_arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 200);
  options.channel_arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 5000);
  return options;
}

absl::StatusOr<std::unique_ptr<ShardedClient>> ShardedClient::Connect(absl::Span<const std::string> shards,
                                                                      const ClientOptions& options) {
  if (shards.empty()) return absl::InvalidArgumentError("shards: at least one");
  const ClientOptions balanced = Balanced(options);
  std::vector<std::unique_ptr<Client>> clients;
  for (size_t i = 0; i < shards.size(); ++i) {
    auto client = Client::Connect(shards[i], balanced);
    if (!client.ok()) {
      return absl::Status(client.status().code(), absl::StrCat("shards[", i, "]: ", client.status().message()));
    }
    clients.push_back(*std::move(client));
  }
  return std::unique_ptr<ShardedClient>(new ShardedClient(std::move(clients)));
}

int ShardedClient::ShardOf(std::string_view layer) const { return ::spmmd::ShardOf(layer, count()); }

absl::StatusOr<MatmulResult> ShardedClient::Matmul(std::string_view layer, const DenseRows& x,
                                                   const MatmulOptions& options) {
  return Of(layer).Matmul(layer, x, options);
}

absl::StatusOr<MatmulResult> ShardedClient::Matmul(std::string_view layer, const SparseRows& x,
                                                   const MatmulOptions& options) {
  return Of(layer).Matmul(layer, x, options);
}

absl::StatusOr<v1::ExecuteResponse> ShardedClient::Execute(
    const v1::Program& program, absl::Span<const std::pair<std::string_view, DenseRows>> inputs,
    const CallOptions& call) {
  std::string_view first;  // empty: a program without a layer may run anywhere
  for (const v1::Step& step : program.steps()) {
    if (!step.has_matmul()) continue;
    const std::string& name = step.matmul().layer().name();
    if (first.empty()) first = name;
    if (ShardOf(name) == ShardOf(first)) continue;
    return absl::InvalidArgumentError(absl::StrCat("program: its layers lie on several shards (", std::string(first),
                                                   " on shard ", ShardOf(first), ", ", name, " on shard ",
                                                   ShardOf(name), "); give them one name up to a '/'"));
  }
  return Of(first).Execute(program, inputs, call);
}

absl::StatusOr<std::vector<v1::Layer>> ShardedClient::List(std::string_view name_prefix, const CallOptions& call) {
  // Newest version first, as one server has it. While a shard is added two may hold the same layer.
  std::map<std::pair<std::string, int64_t>, v1::Layer> layers;
  for (const auto& client : clients_) {
    absl::StatusOr<std::vector<v1::Layer>> part = client->List(name_prefix, call);
    if (!part.ok()) return part.status();
    for (v1::Layer& layer : *part) layers.try_emplace({layer.name(), -layer.version()}, std::move(layer));
  }
  std::vector<v1::Layer> result;
  result.reserve(layers.size());
  for (auto& [key, layer] : layers) result.push_back(std::move(layer));
  return result;
}

}  // namespace spmmd::client
