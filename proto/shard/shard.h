// Which shard holds a layer: the rule that servers, clients and gateways must agree on, as much a part of the contract
// as the messages are.
#ifndef SPMMD_PROTO_SHARD_SHARD_H_
#define SPMMD_PROTO_SHARD_SHARD_H_

#include <string_view>

namespace spmmd {

// What is hashed of a layer's name: the part before the first '/', so that the layers of "block7/q", "block7/k" lie on
// one shard and a program may use them together. The whole name when there is no '/'.
std::string_view ShardKey(std::string_view layer);

// Rendezvous hashing: the shard i of 0 .. count - 1 with the greatest SHA-256("<i>/<key>"), digests compared byte by
// byte. When a shard is added, layers only move to it (1 / (count + 1) of them); when the last one is removed, only its
// own move. SHA-256 because every language and Helm's templates have it; its cost is paid once a layer. Requires count
// >= 1.
int ShardOf(std::string_view layer, int count);

}  // namespace spmmd

#endif  // SPMMD_PROTO_SHARD_SHARD_H_
