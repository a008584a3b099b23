#include "server/catalog/packed_cache.h"

#include <xxhash.h>

#include <cstdio>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/format/container.h"

namespace spmmd::server {
namespace {

constexpr char kKeyField[] = "spmmd.cache_key";
constexpr char kReasonField[] = "spmmd.format_reason";

// Every field has its length before it, so that no two keys have one text.
std::string HashOf(const PackedCache::Key& key) {
  const std::string text = absl::StrCat(key.content.size(), ":", key.content, key.backend.size(), ":", key.backend,
                                        key.shard, "/", key.shards);
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return absl::StrCat(absl::Hex(hash.high64, absl::kZeroPad16), absl::Hex(hash.low64, absl::kZeroPad16));
}

}  // namespace

std::string PackedCache::PathOf(const Key& key) const { return absl::StrCat(directory_, "/", HashOf(key), ".spmmd"); }

std::optional<PackedCache::Entry> PackedCache::Find(const Key& key) const {
  const std::string path = PathOf(key);
  absl::StatusOr<LayerFile> file = ReadLayerFile(path);
  if (file.ok() && file->metadata[kKeyField] == HashOf(key)) {
    return Entry{std::move(file->layer), file->metadata[kReasonField]};
  }
  if (!absl::IsNotFound(file.status())) std::rename(path.c_str(), absl::StrCat(path, ".corrupt").c_str());
  return std::nullopt;
}

absl::Status PackedCache::Store(const Key& key, const PackedLayer& layer, const std::string& format_reason) const {
  LayerFile file;
  file.layer = layer;
  file.metadata[kKeyField] = HashOf(key);
  file.metadata[kReasonField] = format_reason;
  return WriteLayerFile(PathOf(key), file);
}

}  // namespace spmmd::server
