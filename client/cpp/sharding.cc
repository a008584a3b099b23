#include "client/cpp/sharding.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "proto/shard/shard.h"

namespace spmmd::client {
namespace {

// The same as the Python client's. The attempts together outlast a look-up of the name: when the last server that is
// known drains, those that came meanwhile are found by it.
constexpr char kServiceConfig[] = R"({
  "loadBalancingConfig": [{"round_robin": {}}],
  "healthCheckConfig": {"serviceName": ""},
  "methodConfig": [{
    "name": [{"service": "spmm.v1.SparseMatmul", "method": "Execute"}],
    "retryPolicy": {
      "maxAttempts": 5,
      "initialBackoff": "0.05s",
      "maxBackoff": "1s",
      "backoffMultiplier": 3,
      "retryableStatusCodes": ["UNAVAILABLE"]
    }
  }]
})";

// "host:port" and "[v6]:port" after any "dns:///". An empty host when there is no port.
std::pair<std::string, std::string> HostAndPort(std::string_view address) {
  absl::string_view text(address.data(), address.size());
  absl::ConsumePrefix(&text, "dns:");
  while (absl::ConsumePrefix(&text, "/")) {
  }
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) return {};
  absl::string_view host = text.substr(0, colon);
  absl::ConsumePrefix(&host, "[");
  absl::ConsumeSuffix(&host, "]");
  return {std::string(host), std::string(text.substr(colon + 1))};
}

// The same error with `prefix` in front of its message; code and details stay.
absl::Status Prefixed(const absl::Status& status, const std::string& prefix) {
  if (status.ok()) return status;
  absl::Status result(status.code(), absl::StrCat(prefix, ": ", status.message()));
  status.ForEachPayload(
      [&result](absl::string_view url, const absl::Cord& payload) { result.SetPayload(url, payload); });
  return result;
}

absl::StatusOr<v1::ExecuteRequest> WithInputs(absl::Span<const std::pair<std::string_view, DenseRows>> inputs) {
  v1::ExecuteRequest request;
  for (const auto& [name, rows] : inputs) {
    absl::StatusOr<v1::NamedInput> input = MakeInput(name, rows);
    if (!input.ok()) return Prefixed(input.status(), absl::StrCat("input '", std::string(name), "'"));
    *request.add_inputs() = *std::move(input);
  }
  return request;
}

}  // namespace

ClientOptions Balanced(ClientOptions options) {
  options.channel_arguments.SetServiceConfigJSON(kServiceConfig);
  // gRPC's own 30 s between look-ups and up to 120 s between attempts are longer than a rollout takes.
  options.channel_arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 1000);
  options.channel_arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 200);
  options.channel_arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 5000);
  return options;
}

absl::StatusOr<std::vector<std::string>> ReplicasOf(const std::string& address) {
  for (const char* scheme : {"ipv4:", "ipv6:"}) {
    absl::string_view list = address;
    if (absl::ConsumePrefix(&list, scheme)) return std::vector<std::string>(absl::StrSplit(list, ','));
  }
  if (absl::StartsWith(address, "unix:") || absl::StartsWith(address, "unix-abstract:")) {
    return std::vector<std::string>{address};
  }
  const auto [host, port] = HostAndPort(address);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return absl::UnavailableError(absl::StrCat("'", address, "': ", gai_strerror(error)));
  }
  std::set<std::string> v4;
  std::set<std::string> v6;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    std::array<char, INET6_ADDRSTRLEN> text{};
    if (entry->ai_family == AF_INET) {
      inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(entry->ai_addr)->sin_addr, text.data(), text.size());
      v4.insert(absl::StrCat(text.data(), ":", port));
    } else if (entry->ai_family == AF_INET6) {
      inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(entry->ai_addr)->sin6_addr, text.data(), text.size());
      v6.insert(absl::StrCat("[", text.data(), "]:", port));
    }
  }
  freeaddrinfo(found);
  if (v4.size() <= 1 && v6.size() <= 1) return std::vector<std::string>{address};  // one server, whatever its families
  const std::set<std::string>& all = v4.empty() ? v6 : v4;
  return std::vector<std::string>(all.begin(), all.end());
}

absl::StatusOr<std::unique_ptr<ShardedClient>> ShardedClient::Connect(absl::Span<const std::string> shards,
                                                                      const ClientOptions& options) {
  if (shards.empty()) return absl::InvalidArgumentError("shards: at least one");
  const ClientOptions balanced = Balanced(options);
  std::vector<std::unique_ptr<Client>> clients;
  for (size_t i = 0; i < shards.size(); ++i) {
    auto client = Client::Connect(shards[i], balanced);
    if (!client.ok()) return Prefixed(client.status(), absl::StrCat("shards[", i, "]"));
    clients.push_back(*std::move(client));
  }
  return std::unique_ptr<ShardedClient>(
      new ShardedClient(std::vector<std::string>(shards.begin(), shards.end()), options, std::move(clients)));
}

int ShardedClient::ShardOf(std::string_view layer) const { return ::spmmd::ShardOf(layer, count()); }

absl::StatusOr<std::vector<Replica>> ShardedClient::Replicas(int shard) const {
  const std::string& target = shards_[static_cast<size_t>(shard)];
  absl::StatusOr<std::vector<std::string>> addresses = ReplicasOf(target);
  if (!addresses.ok()) return Prefixed(addresses.status(), absl::StrCat("shard ", shard));
  ClientOptions options = options_;
  if (options.tls.has_value() && options.tls->server_name.empty()) {
    // The certificate is for the name, not for the addresses that it resolves to.
    if (addresses->front() != target && !absl::StartsWith(target, "ipv")) {
      options.tls->server_name = HostAndPort(target).first;
    }
  }
  std::vector<Replica> replicas;
  for (const std::string& address : *addresses) {
    auto client = Client::Connect(address, options);
    if (!client.ok()) return Prefixed(client.status(), address);
    replicas.push_back({address, *std::move(client)});
  }
  return replicas;
}

template <typename Result>
absl::StatusOr<std::vector<Result>> ShardedClient::OnReplicas(
    std::string_view layer, const std::function<absl::StatusOr<Result>(Client&)>& change) const {
  absl::StatusOr<std::vector<Replica>> replicas = Replicas(ShardOf(layer));
  if (!replicas.ok()) return replicas.status();
  std::vector<Result> results;
  for (const Replica& replica : *replicas) {
    absl::StatusOr<Result> result = change(*replica.client);
    if (!result.ok()) return replicas->size() == 1 ? result.status() : Prefixed(result.status(), replica.address);
    results.push_back(*std::move(result));
  }
  return results;
}

// ---- Data

absl::StatusOr<MatmulResult> ShardedClient::Matmul(std::string_view layer, const DenseRows& x,
                                                   const MatmulOptions& options) {
  return Of(layer).Matmul(layer, x, options);
}

absl::StatusOr<MatmulResult> ShardedClient::Matmul(std::string_view layer, const SparseRows& x,
                                                   const MatmulOptions& options) {
  return Of(layer).Matmul(layer, x, options);
}

absl::StatusOr<std::string_view> ShardedClient::OneShard(const v1::Program& program) const {
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
  return first;
}

absl::StatusOr<v1::ExecuteResponse> ShardedClient::Execute(
    const v1::Program& program, absl::Span<const std::pair<std::string_view, DenseRows>> inputs,
    const CallOptions& call) {
  absl::StatusOr<std::string_view> layer = OneShard(program);
  if (!layer.ok()) return layer.status();
  return Of(*layer).Execute(program, inputs, call);
}

absl::StatusOr<ShardedProgram> ShardedClient::RegisterProgram(const v1::Program& program, const CallOptions& call) {
  absl::StatusOr<std::string_view> layer = OneShard(program);
  if (!layer.ok()) return layer.status();
  const auto ids =
      OnReplicas<std::string>(*layer, [&](Client& client) { return client.RegisterProgram(program, call); });
  if (!ids.ok()) return ids.status();
  // Replicas of several versions may differ in the id; then the program itself goes along with every call.
  const bool same = std::ranges::all_of(*ids, [&](const std::string& id) { return id == ids->front(); });
  return ShardedProgram{program, same ? ids->front() : std::string()};
}

absl::StatusOr<v1::ExecuteResponse> ShardedClient::Execute(
    const ShardedProgram& program, absl::Span<const std::pair<std::string_view, DenseRows>> inputs,
    const CallOptions& call) {
  absl::StatusOr<std::string_view> layer = OneShard(program.program);
  if (!layer.ok()) return layer.status();
  if (program.id.empty()) return Of(*layer).Execute(program.program, inputs, call);
  absl::StatusOr<v1::ExecuteRequest> request = WithInputs(inputs);
  if (!request.ok()) return request.status();
  request->set_program_id(program.id);
  absl::StatusOr<v1::ExecuteResponse> response = Of(*layer).Execute(*request, call);
  if (response.ok() || ErrorReason(response.status()) != "PROGRAM_NOT_FOUND") return response;
  // A replica that came later. Removing it first keeps the count of registrations where it is known.
  OnReplicas<std::string>(*layer, [&](Client& client) {
    client.UnregisterProgram(program.id, call).IgnoreError();
    return client.RegisterProgram(program.program, call);
  }).IgnoreError();  // what this call needs goes along with it
  *request->mutable_program() = program.program;
  return Of(*layer).Execute(*request, call);
}

absl::Status ShardedClient::UnregisterProgram(const ShardedProgram& program, const CallOptions& call) {
  absl::StatusOr<std::string_view> layer = OneShard(program.program);
  if (!layer.ok()) return layer.status();
  if (program.id.empty()) return absl::OkStatus();
  return OnReplicas<bool>(*layer,
                          [&](Client& client) -> absl::StatusOr<bool> {
                            const absl::Status status = client.UnregisterProgram(program.id, call);
                            if (!status.ok() && !absl::IsNotFound(status)) return status;
                            return status.ok();
                          })
      .status();
}

absl::StatusOr<std::unique_ptr<Stream>> ShardedClient::OpenStream(std::string_view layer, const CallOptions& call) {
  return Of(layer).OpenStream(call);
}

// ---- Catalog

absl::StatusOr<RegisterResult> ShardedClient::Register(const v1::LayerSpec& spec, const LayerContent& content,
                                                       const RegisterOptions& options) {
  auto results =
      OnReplicas<RegisterResult>(spec.name(), [&](Client& client) { return client.Register(spec, content, options); });
  if (!results.ok()) return results.status();
  RegisterResult result = std::move(results->front());
  for (size_t i = 1; i < results->size(); ++i) {
    result.uploaded |= (*results)[i].uploaded;
    result.uploaded_bytes += (*results)[i].uploaded_bytes;
  }
  return result;
}

absl::StatusOr<RegisterResult> ShardedClient::RegisterFile(const v1::LayerSpec& spec, const RegisterOptions& options) {
  auto results =
      OnReplicas<RegisterResult>(spec.name(), [&](Client& client) { return client.RegisterFile(spec, options); });
  if (!results.ok()) return results.status();
  return std::move(results->front());
}

absl::StatusOr<v1::UnregisterLayerResponse> ShardedClient::Unregister(const v1::LayerRef& layer,
                                                                      const CallOptions& call) {
  absl::Status missing;
  const auto parts = OnReplicas<v1::UnregisterLayerResponse>(
      layer.name(), [&](Client& client) -> absl::StatusOr<v1::UnregisterLayerResponse> {
        auto part = client.Unregister(layer, call);
        if (!absl::IsNotFound(part.status())) return part;
        missing = part.status();
        return v1::UnregisterLayerResponse();
      });
  if (!parts.ok()) return parts.status();
  v1::UnregisterLayerResponse removed;
  for (const auto& part : *parts) {
    removed.set_removed_versions(std::max(removed.removed_versions(), part.removed_versions()));
    removed.set_freed_bytes(removed.freed_bytes() + part.freed_bytes());
  }
  if (removed.removed_versions() == 0) return missing;
  return removed;
}

absl::StatusOr<v1::Layer> ShardedClient::Pin(const v1::LayerRef& layer, bool pinned, const CallOptions& call) {
  auto changed = OnReplicas<v1::Layer>(layer.name(), [&](Client& client) { return client.Pin(layer, pinned, call); });
  if (!changed.ok()) return changed.status();
  return std::move(changed->front());
}

absl::StatusOr<v1::Layer> ShardedClient::Warm(const v1::LayerRef& layer, const CallOptions& call) {
  auto warmed = OnReplicas<v1::Layer>(layer.name(), [&](Client& client) { return client.Warm(layer, call); });
  if (!warmed.ok()) return warmed.status();
  return std::move(warmed->front());
}

absl::StatusOr<v1::Layer> ShardedClient::Get(const v1::LayerRef& layer, const CallOptions& call) {
  return Of(layer.name()).Get(layer, call);
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
