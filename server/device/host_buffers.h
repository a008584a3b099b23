// Host memory for large tensors on their way in and out: blocks that are used again, so that a payload does not pay for
// fresh pages each time (more than the copy itself), and page-locked where a GPU copies from and to them.
#ifndef SPMMD_SERVER_DEVICE_HOST_BUFFERS_H_
#define SPMMD_SERVER_DEVICE_HOST_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"

namespace spmmd::server {

class HostBufferPool;

// A block of a pool, given back on destruction, on any thread.
class HostBuffer {
 public:
  HostBuffer() = default;
  HostBuffer(HostBuffer&& other) noexcept { *this = std::move(other); }
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  ~HostBuffer();

  // Null: no block. Aligned to 64 bytes; what is in there is somebody else's past.
  std::byte* data() const { return data_; }
  // As asked for.
  uint64_t bytes() const { return bytes_; }
  // Page-locked.
  bool pinned() const { return pinned_; }

 private:
  friend class HostBufferPool;
  std::shared_ptr<HostBufferPool> pool_;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t capacity_ = 0;
  bool pinned_ = false;
};

class HostBufferPool : public std::enable_shared_from_this<HostBufferPool> {
 public:
  struct Options {
    // Page-locked memory; both null: there is none, and blocks come from the heap. `allocate` returns null when it
    // cannot. Called until the last block is back, whoever has it.
    std::function<std::byte*(uint64_t bytes)> allocate;
    std::function<void(std::byte*)> free;
    uint64_t max_idle_bytes = uint64_t{256} << 20;  // kept for later
    uint64_t max_pinned_bytes = uint64_t{1} << 30;  // in use and kept; past it blocks come from the heap
  };

  static std::shared_ptr<HostBufferPool> Create(Options options);
  ~HostBufferPool();

  // A block of at least `bytes` > 0. std::bad_alloc when the heap has none.
  HostBuffer Take(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Frees what is kept, and from here on what comes back.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

  uint64_t idle_bytes() const ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t pinned_bytes() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class HostBuffer;
  struct Block {
    std::byte* data = nullptr;
    bool pinned = false;
  };

  explicit HostBufferPool(Options options) : options_(std::move(options)) {}
  void GiveBack(Block block, uint64_t capacity) ABSL_LOCKS_EXCLUDED(mutex_);
  // Not with the lock held: it may take long.
  void Free(Block block) const;
  // Takes idle blocks out until they have at most `bytes`.
  std::vector<Block> Shrink(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  mutable absl::Mutex mutex_;
  std::multimap<uint64_t, Block> idle_ ABSL_GUARDED_BY(mutex_);  // by capacity
  uint64_t idle_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t pinned_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

// Copies the pieces one behind the other to `to`; large ones by several threads.
void Gather(absl::Span<const absl::Span<const std::byte>> pieces, std::byte* to);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_HOST_BUFFERS_H_
