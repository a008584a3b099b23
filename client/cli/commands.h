// The commands of spmmctl, after their arguments are parsed.
#ifndef SPMMD_CLIENT_CLI_COMMANDS_H_
#define SPMMD_CLIENT_CLI_COMMANDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/parse.h"
#include "client/cpp/client.h"

namespace spmmd::cli {

// What every command needs.
struct Session {
  client::Client* client;
  client::CallOptions call;
  bool json = false;
  // Progress may be drawn on stderr.
  bool progress = false;
};

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

// Prints even when the server is not serving; that is then the error.
absl::Status Status(const Session& session, const std::string& server, absl::Duration wait);

}  // namespace spmmd::cli

#endif  // SPMMD_CLIENT_CLI_COMMANDS_H_
