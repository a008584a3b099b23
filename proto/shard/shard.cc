#include "proto/shard/shard.h"

#include <openssl/sha.h>

#include <array>
#include <string>

namespace spmmd {

std::string_view ShardKey(std::string_view layer) { return layer.substr(0, layer.find('/')); }

int ShardOf(std::string_view layer, int count) {
  const std::string_view key = ShardKey(layer);
  using Digest = std::array<unsigned char, SHA256_DIGEST_LENGTH>;
  Digest best{};
  int owner = 0;
  for (int shard = 0; shard < count; ++shard) {
    const std::string text = std::to_string(shard).append("/").append(key);
    Digest digest;
    SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
    if (digest > best) {
      best = digest;
      owner = shard;
    }
  }
  return owner;
}

}  // namespace spmmd
