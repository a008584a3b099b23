// The commands of spmmctl, after their arguments are parsed.
#ifndef SPMMD_CLIENT_CLI_COMMANDS_H_
#define SPMMD_CLIENT_CLI_COMMANDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/parse.h"
#include "client/cli/weights.h"
#include "client/cpp/client.h"
#include "client/cpp/sharding.h"

namespace spmmd::cli {

// What every command needs.
struct Session {
  // One server, or all shards of several: the other is null.
  client::Client* client;
  client::ShardedClient* shards;
  client::CallOptions call;
  bool json = false;
  // Progress may be drawn on stderr.
  bool progress = false;

  // Who answers calls that only read or compute.
  client::Client& Of(const std::string& layer) const { return shards != nullptr ? shards->Of(layer) : *client; }
};

// Layers read from files, for Register and for what registers many.
struct LocalWeights {
  DenseMatrix w;
  std::vector<float> bias;
  client::LayerContent Content() const;
};
// `bias` may be empty: then a packed-layer file's own counts.
absl::StatusOr<LocalWeights> ReadWeights(const FileAndTensor& file, const std::string& bias);

struct RegisterArgs {
  std::string file;
  std::string bias;
  bool remote = false;
  // Name, pruning, format, placement and so on are filled in.
  v1::LayerSpec spec;
};
absl::Status Register(const Session& session, const RegisterArgs& args);

absl::Status List(const Session& session, const std::string& prefix);
absl::Status Describe(const Session& session, const v1::LayerRef& layer);

struct RunArgs {
  v1::LayerRef layer;
  std::string input;
  std::string output;
  client::MatmulOptions matmul;
};
absl::Status Run(const Session& session, const RunArgs& args);

absl::Status Bench(const Session& session, const v1::BenchmarkRequest& request);
absl::Status Unregister(const Session& session, const v1::LayerRef& layer);
absl::Status Pin(const Session& session, const v1::LayerRef& layer, bool pinned);
absl::Status Warm(const Session& session, const v1::LayerRef& layer);

// Prints even when a server is not serving; that is then the error. With shards, a line for each replica of each.
absl::Status Status(const Session& session, const std::string& server, absl::Duration wait);

}  // namespace spmmd::cli

#endif  // SPMMD_CLIENT_CLI_COMMANDS_H_
