#include "server/device/host_buffers.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <thread>
#include <utility>

#include "kernels/base/thread_pool.h"

namespace spmmd::server {
namespace {

constexpr std::align_val_t kAlignment{64};
constexpr uint64_t kGranularity = uint64_t{64} << 10;

// One core does not reach the memory's bandwidth; a few do.
ThreadPool& CopyThreads() {
  static auto* const pool = new ThreadPool(std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 1, 8));
  return *pool;
}

}  // namespace

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(capacity_, other.capacity_);
  std::swap(pinned_, other.pinned_);
  return *this;
}

HostBuffer::~HostBuffer() {
  if (data_ != nullptr) pool_->GiveBack({data_, pinned_}, capacity_);
}

std::shared_ptr<HostBufferPool> HostBufferPool::Create(Options options) {
  return std::shared_ptr<HostBufferPool>(new HostBufferPool(std::move(options)));
}

HostBufferPool::~HostBufferPool() { Close(); }

HostBuffer HostBufferPool::Take(uint64_t bytes) {
  HostBuffer buffer;
  buffer.pool_ = shared_from_this();
  buffer.bytes_ = bytes;
  const uint64_t capacity = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  bool pin = options_.allocate != nullptr;
  std::vector<Block> dropped;
  {
    absl::MutexLock lock(&mutex_);
    // The smallest that is large enough, unless it is far too large.
    if (const auto found = idle_.lower_bound(capacity); found != idle_.end() && found->first <= 2 * capacity) {
      buffer.capacity_ = found->first;
      buffer.data_ = found->second.data;
      buffer.pinned_ = found->second.pinned;
      idle_bytes_ -= found->first;
      idle_.erase(found);
      return buffer;
    }
    if (pin && pinned_bytes_ + capacity > options_.max_pinned_bytes) dropped = Shrink(0);
    pin = pin && pinned_bytes_ + capacity <= options_.max_pinned_bytes;
    if (pin) pinned_bytes_ += capacity;
  }
  for (const Block& block : dropped) Free(block);
  if (pin) {
    buffer.data_ = options_.allocate(capacity);
    buffer.pinned_ = buffer.data_ != nullptr;
    if (!buffer.pinned_) {
      absl::MutexLock lock(&mutex_);
      pinned_bytes_ -= capacity;
    }
  }
  if (buffer.data_ == nullptr) buffer.data_ = static_cast<std::byte*>(::operator new(capacity, kAlignment));
  buffer.capacity_ = capacity;
  return buffer;
}

void HostBufferPool::GiveBack(Block block, uint64_t capacity) {
  std::vector<Block> dropped;
  {
    absl::MutexLock lock(&mutex_);
    if (closed_ || capacity > options_.max_idle_bytes) {
      if (block.pinned) pinned_bytes_ -= capacity;
      dropped.push_back(block);
    } else {
      dropped = Shrink(options_.max_idle_bytes - capacity);
      idle_.emplace(capacity, block);
      idle_bytes_ += capacity;
    }
  }
  for (const Block& each : dropped) Free(each);
}

std::vector<HostBufferPool::Block> HostBufferPool::Shrink(uint64_t bytes) {
  std::vector<Block> dropped;
  while (idle_bytes_ > bytes) {
    const auto largest = std::prev(idle_.end());
    idle_bytes_ -= largest->first;
    if (largest->second.pinned) pinned_bytes_ -= largest->first;
    dropped.push_back(largest->second);
    idle_.erase(largest);
  }
  return dropped;
}

void HostBufferPool::Free(Block block) const {
  if (block.pinned) {
    options_.free(block.data);
  } else {
    ::operator delete(block.data, kAlignment);
  }
}

void HostBufferPool::Close() {
  std::vector<Block> dropped;
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
    dropped = Shrink(0);
  }
  for (const Block& block : dropped) Free(block);
}

uint64_t HostBufferPool::idle_bytes() const {
  absl::MutexLock lock(&mutex_);
  return idle_bytes_;
}

uint64_t HostBufferPool::pinned_bytes() const {
  absl::MutexLock lock(&mutex_);
  return pinned_bytes_;
}

void Gather(absl::Span<const absl::Span<const std::byte>> pieces, std::byte* to) {
  constexpr uint64_t kTaskBytes = uint64_t{512} << 10;
  // Pieces of one task, and where its first one goes.
  struct Task {
    size_t begin;
    size_t end;
    std::byte* to;
  };
  std::vector<Task> tasks;
  uint64_t bytes = 0;  // of the last task
  std::byte* at = to;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (tasks.empty() || bytes >= kTaskBytes) {
      tasks.push_back({i, i, at});
      bytes = 0;
    }
    tasks.back().end = i + 1;
    bytes += pieces[i].size();
    at += pieces[i].size();
  }
  const auto copy = [&](int64_t index, int /*worker*/) {
    const Task& task = tasks[static_cast<size_t>(index)];
    std::byte* out = task.to;
    for (size_t i = task.begin; i < task.end; ++i) {
      std::memcpy(out, pieces[i].data(), pieces[i].size());
      out += pieces[i].size();
    }
  };
  if (tasks.size() > 2) {
    CopyThreads().ParallelFor(static_cast<int64_t>(tasks.size()), copy);
  } else {
    for (size_t i = 0; i < tasks.size(); ++i) copy(static_cast<int64_t>(i), 0);
  }
}

}  // namespace spmmd::server
