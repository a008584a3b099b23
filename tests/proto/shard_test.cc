#include "proto/shard/shard.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

namespace spmmd {
namespace {

TEST(ShardTest, KeyIsThePartBeforeTheSlash) {
  EXPECT_EQ(ShardKey("block0/up"), "block0");
  EXPECT_EQ(ShardKey("block0/mlp/up"), "block0");
  EXPECT_EQ(ShardKey("head"), "head");
  EXPECT_EQ(ShardKey(""), "");
}

// Computed by an independent implementation: hashlib of Python. The same table is in
// tests/python/unit/test_sharding.py.
TEST(ShardTest, IsWhatEveryLanguageComputes) {
  constexpr std::array<int, 6> kCounts = {1, 2, 3, 5, 8, 100};
  struct Case {
    std::string layer;
    std::vector<int> shards;
  };
  const std::vector<Case> cases = {
      {"block0/up", {0, 0, 2, 3, 5, 5}},
      {"block0/down", {0, 0, 2, 3, 5, 5}},
      {"block1/up", {0, 1, 1, 1, 1, 40}},
      {"head", {0, 0, 0, 3, 7, 54}},
      {"model.layers.31.mlp.up_proj", {0, 0, 0, 3, 3, 13}},
      {"a", {0, 0, 0, 0, 0, 91}},
      {"0", {0, 0, 2, 2, 2, 87}},
      {"x-y_z.w", {0, 0, 0, 4, 5, 29}},
  };
  for (const Case& c : cases) {
    for (size_t i = 0; i < kCounts.size(); ++i) EXPECT_EQ(ShardOf(c.layer, kCounts[i]), c.shards[i]) << c.layer;
  }
}

TEST(ShardTest, ANewShardOnlyTakesAndTakesItsShare) {
  constexpr int kLayers = 2000;
  for (const int count : {1, 2, 3, 7}) {
    int moved = 0;
    for (int i = 0; i < kLayers; ++i) {
      const std::string layer = "layer" + std::to_string(i);
      const int after = ShardOf(layer, count + 1);
      if (after == ShardOf(layer, count)) continue;
      EXPECT_EQ(after, count) << layer;
      ++moved;
    }
    const double share = static_cast<double>(kLayers) / (count + 1);
    EXPECT_GT(moved, share * 0.8);
    EXPECT_LT(moved, share * 1.2);
  }
}

}  // namespace
}  // namespace spmmd
