#include "server/device/host_buffers.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace spmmd::server {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// Page-locked memory that counts.
struct FakePinned {
  HostBufferPool::Options Options() {
    HostBufferPool::Options options;
    options.allocate = [this](uint64_t bytes) -> std::byte* {
      if (fail) return nullptr;
      auto* const data = static_cast<std::byte*>(std::aligned_alloc(64, bytes));
      blocks.insert(data);
      return data;
    };
    options.free = [this](std::byte* data) {
      EXPECT_EQ(blocks.erase(data), 1);
      std::free(data);
    };
    return options;
  }
  std::set<std::byte*> blocks;
  bool fail = false;
};

TEST(HostBufferPoolTest, BlocksAreUsedAgain) {
  FakePinned pinned;
  const auto pool = HostBufferPool::Create(pinned.Options());
  std::byte* first = nullptr;
  {
    const HostBuffer buffer = pool->Take(5 * kMiB);
    EXPECT_EQ(buffer.bytes(), 5 * kMiB);
    EXPECT_TRUE(buffer.pinned());
    first = buffer.data();
    EXPECT_NE(pool->Take(5 * kMiB).data(), first);  // that one is taken
  }
  EXPECT_EQ(pool->idle_bytes(), 10 * kMiB);
  EXPECT_EQ(pool->Take(4 * kMiB).bytes(), 4 * kMiB);
  EXPECT_EQ(pinned.blocks.size(), 2);
  // Far smaller: the large blocks stay for others.
  const HostBuffer small = pool->Take(100);
  EXPECT_EQ(pinned.blocks.size(), 3);
  pool->Close();
  EXPECT_EQ(pinned.blocks.size(), 1);
}

TEST(HostBufferPoolTest, KeepsNoMoreThanItMay) {
  FakePinned pinned;
  HostBufferPool::Options options = pinned.Options();
  options.max_idle_bytes = 8 * kMiB;
  const auto pool = HostBufferPool::Create(std::move(options));
  {
    std::vector<HostBuffer> buffers;
    for (int i = 0; i < 4; ++i) buffers.push_back(pool->Take(3 * kMiB));
    buffers.push_back(pool->Take(9 * kMiB));
    EXPECT_EQ(pool->pinned_bytes(), 21 * kMiB);
  }
  EXPECT_EQ(pool->idle_bytes(), 6 * kMiB);
  EXPECT_EQ(pool->pinned_bytes(), 6 * kMiB);
  EXPECT_EQ(pinned.blocks.size(), 2);
  pool->Close();
  EXPECT_TRUE(pinned.blocks.empty());
  EXPECT_EQ(pool->pinned_bytes(), 0);
}

TEST(HostBufferPoolTest, TheHeapStandsIn) {
  FakePinned pinned;
  HostBufferPool::Options options = pinned.Options();
  options.max_pinned_bytes = 4 * kMiB;
  const auto pool = HostBufferPool::Create(std::move(options));
  HostBuffer first = pool->Take(3 * kMiB);
  EXPECT_TRUE(first.pinned());
  EXPECT_FALSE(pool->Take(3 * kMiB).pinned());  // past the limit
  first = HostBuffer();
  EXPECT_EQ(pool->pinned_bytes(), 3 * kMiB);
  EXPECT_TRUE(pool->Take(4 * kMiB).pinned());  // what was kept makes room
  pinned.fail = true;
  pool->Close();
  EXPECT_FALSE(pool->Take(kMiB).pinned());
  EXPECT_EQ(pool->pinned_bytes(), 0);
}

TEST(HostBufferPoolTest, BlocksOutliveThePool) {
  FakePinned pinned;
  auto pool = HostBufferPool::Create(pinned.Options());
  HostBuffer buffer = pool->Take(kMiB);
  pool->Close();
  pool.reset();
  EXPECT_EQ(pinned.blocks.size(), 1);
  buffer = HostBuffer();
  EXPECT_TRUE(pinned.blocks.empty());
}

TEST(HostBufferPoolTest, FromManyThreads) {
  const auto pool = HostBufferPool::Create({});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      for (int i = 0; i < 2000; ++i) {
        const HostBuffer buffer = pool->Take(static_cast<uint64_t>(1 + (t * 7 + i) % 5) * 70000);
        buffer.data()[0] = static_cast<std::byte>(t);
        buffer.data()[buffer.bytes() - 1] = static_cast<std::byte>(t);
        EXPECT_EQ(buffer.data()[0], static_cast<std::byte>(t));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(GatherTest, IsAConcatenation) {
  std::mt19937 random(1);
  for (const uint64_t total : {uint64_t{1}, uint64_t{5000}, 3 * kMiB + 17}) {
    std::string from(total, '\0');
    for (char& byte : from) byte = static_cast<char>(random());
    std::vector<absl::Span<const std::byte>> pieces;
    for (uint64_t at = 0; at < total;) {
      const uint64_t size = std::min<uint64_t>(total - at, random() % 40000);
      pieces.emplace_back(reinterpret_cast<const std::byte*>(from.data()) + at, size);
      at += size;
    }
    std::string to(total, '\0');
    Gather(pieces, reinterpret_cast<std::byte*>(to.data()));
    EXPECT_EQ(to, from);
  }
}

}  // namespace
}  // namespace spmmd::server
