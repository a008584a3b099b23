// The commands of spmmctl for layers that are spread over several servers.
#ifndef SPMMD_CLIENT_CLI_SHARDS_H_
#define SPMMD_CLIENT_CLI_SHARDS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/commands.h"

namespace spmmd::cli {

struct ShardArgs {
  std::vector<std::string> layers;
  int count = 0;
  int from = 0;  // the number before; 0: none
};
// Which shard holds each layer, and with `from` which of them a change of the number moves. Needs no server.
absl::Status Shard(const ShardArgs& args, bool json);

struct ApplyArgs {
  std::string manifest;
  bool remote = false;   // the manifest's files are in the servers' model repositories
  bool remove = false;   // afterwards, take layers of the manifest away from shards that are not theirs any more
  bool dry_run = false;  // only say what would be done
};
// Makes the servers hold the layers of a manifest (spmm.config.v1.Manifest, the form of spmmd --manifest): what a
// replica of a layer's shard lacks is registered there, what it has is left alone. So the same command fills new
// servers, restarted ones, and the shards of another number. A server that fails does not stop the others; the first
// error is returned, and then nothing is removed.
absl::Status Apply(const Session& session, const std::string& server, const ApplyArgs& args);

// The layers of a manifest: JSON when its name ends in .json, else protobuf text. Names and file sources are checked.
absl::StatusOr<std::vector<v1::LayerSpec>> ReadManifest(const std::string& path);

}  // namespace spmmd::cli

#endif  // SPMMD_CLIENT_CLI_SHARDS_H_
