// Packed layers on disk, so that a restart need not pack again: one packed-layer file (kernels/format/container.h) for
// every content, packing options and backend that were registered before, a file for each shard.
//
// A file is found by a hash of what it was made from, written atomically, and checked byte for byte when it is read.
// One that does not pass (damaged, or of another layout version) is set aside under the suffix ".corrupt" and made
// again. The directory is not bounded: what is no longer served is the operator's to delete, at any time.
#ifndef SPMMD_SERVER_CATALOG_PACKED_CACHE_H_
#define SPMMD_SERVER_CATALOG_PACKED_CACHE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/format/packed_layer.h"

namespace spmmd::server {

class PackedCache {
 public:
  // What a file is found by.
  struct Key {
    absl::string_view content;  // ContentKey()
    absl::string_view backend;  // layouts differ by it
    int64_t shard = 0;
    int64_t shards = 1;
  };
  struct Entry {
    PackedLayer layer;  // its sections borrow the mapped file
    std::string format_reason;
  };

  explicit PackedCache(std::string directory) : directory_(std::move(directory)) {}

  // Nullopt when there is no good file.
  std::optional<Entry> Find(const Key& key) const;
  // The errors of WriteLayerFile; a registration does without the cache then.
  absl::Status Store(const Key& key, const PackedLayer& layer, const std::string& format_reason) const;

  std::string PathOf(const Key& key) const;

 private:
  const std::string directory_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_CATALOG_PACKED_CACHE_H_
