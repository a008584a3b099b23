// Packed layers on disk, so that a restart need not pack again and a layer that was evicted from its devices can come
// back: one packed-layer file (kernels/format/container.h), with its bias, for every content, packing options and
// backend that were registered before, a file for each shard.
//
// A file is found by a hash of what it was made from, written atomically, and checked byte for byte when it is read.
// One that does not pass (damaged, or of another layout version) is set aside under the suffix ".corrupt" and made
// again.
//
// The directory is bounded: what has not been used for longest goes first, corrupt files before all others, and files
// that layers being served depend on never. Uses are remembered over restarts as the files' times. Other files in the
// directory are left alone, and other servers' files count: a directory belongs to one server at a time.
//
// It also remembers which content a tensor of the model repository had when its file was last read, by the file's size
// and times, so that a restart need not read the weights that were packed.
//
// Thread-safe.
#ifndef SPMMD_SERVER_CATALOG_PACKED_CACHE_H_
#define SPMMD_SERVER_CATALOG_PACKED_CACHE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/format/packed_layer.h"
#include "server/device/device.h"
#include "server/metrics/metrics.h"

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
    StoredLayer part;  // its sections borrow the mapped file
    std::string format_reason;
  };

  // `limit_bytes` of all files together; 0: no limit. Looks at what is there, and deletes what is too much. `metrics`
  // must outlive the cache.
  PackedCache(std::string directory, uint64_t limit_bytes, Metrics* metrics);
  ~PackedCache();
  PackedCache(const PackedCache&) = delete;
  PackedCache& operator=(const PackedCache&) = delete;

  // Nullopt when there is no good file.
  std::optional<Entry> Find(const Key& key) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether there is a file; not whether it is good.
  bool Contains(const Key& key) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Makes room and writes. RESOURCE_EXHAUSTED when what is held and the file are more than the limit; the errors of
  // WriteLayerFile. A registration does without the cache then.
  absl::Status Store(const Key& key, const StoredLayer& part, const std::string& format_reason)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // The file stays until Release; false when there is none. Holds are counted.
  bool Hold(const Key& key) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release(const Key& key) ABSL_LOCKS_EXCLUDED(mutex_);

  // The content hash that was found in a source (FileSource::Identity()); nullopt when it is not known.
  std::optional<std::string> FindSource(absl::string_view identity) const;
  void StoreSource(absl::string_view identity, absl::string_view xxh3);

  uint64_t bytes() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::string PathOf(const Key& key) const;

 private:
  struct File {
    uint64_t bytes = 0;
    int64_t used = 0;  // nanoseconds of Unix time
    int holds = 0;
    bool corrupt = false;
  };

  std::string InDirectory(absl::string_view name) const;
  void Scan() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Deletes until `bytes` more fit; false when they cannot.
  bool MakeRoom(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What is on disk under this name now goes into the index.
  void Index(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string directory_;
  const uint64_t limit_bytes_;
  Metrics* const metrics_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<std::string, File> files_ ABSL_GUARDED_BY(mutex_);  // by name
  uint64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_CATALOG_PACKED_CACHE_H_
