// The schedules of the SpMM kernels, without a GPU: every chunk is multiplied
// exactly once, every partial sum has a place of its own and is added exactly
// once, and what a launch asks for fits the device.
#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/slab_schedule.h"
#include "kernels/cuda/three_layer_schedule.h"
#include "kernels/cuda/tile_schedule.h"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::cuda {
namespace {

constexpr int64_t kSharedBytes = 225 * 1024;  // an H100's or H200's, less what is static

struct Problem {
  int row_blocks;
  int col_blocks;
  int chunk_cols;
  int64_t stage_bytes;
  int multiprocessors;
};

std::vector<Problem> Problems() {
  std::mt19937 rng(7);
  std::vector<Problem> problems;
  const auto chunk_bytes = [](int cols, int rows) { return int64_t{bitmap_gpu::ChunkBytes(cols, rows)}; };
  for (const int multiprocessors : {132, 5}) {
    for (const auto &[m, k] : {std::pair{4096, 4096},
                               {11008, 4096},
                               {4096, 11008},
                               {5120, 13824},
                               {28672, 7168},
                               {1, 1},
                               {16, 60000},
                               {40000, 100}}) {
      for (const int cols : {128, 256}) {
        problems.push_back(
            {(m + 15) / 16, (k + cols - 1) / cols, cols, chunk_bytes(cols, cols / 8 + 4), multiprocessors});
      }
    }
  }
  for (int i = 0; i < 50; ++i) {
    const int cols = rng() % 2 == 0 ? 128 : 256;
    problems.push_back({static_cast<int>(rng() % 700 + 1), static_cast<int>(rng() % 60 + 1), cols,
                        chunk_bytes(cols, static_cast<int>(rng() % (cols / 4) + 1)),
                        static_cast<int>(rng() % 140 + 1)});
  }
  return problems;
}

void CheckTile(const Problem &problem, int tokens) {
  const tile::Plan plan = tile::MakePlan(problem.multiprocessors, kSharedBytes, problem.row_blocks, problem.col_blocks,
                                         tokens, problem.stage_bytes);
  if (plan.ctas == 0) return;  // the kernel refuses such a layer
  ASSERT_LE(tile::SharedBytes(plan, tokens, problem.stage_bytes), kSharedBytes);
  ASSERT_LE(plan.boxes * plan.depth(), tile::kMaxBoxes);
  ASSERT_LE(plan.ctas, problem.multiprocessors);
  std::vector<int> visits(static_cast<size_t>(problem.row_blocks) * static_cast<size_t>(problem.col_blocks));
  std::map<int, std::vector<std::pair<int, int>>> pieces;  // leftover tile -> (CTA, piece) in order
  std::set<int> whole;
  for (int cta = 0; cta < plan.ctas; ++cta) {
    tile::Segments segments(plan, cta);
    for (tile::Segment segment; segments.Next(segment);) {
      ASSERT_LT(segment.begin, segment.end);
      ASSERT_LE(segment.end, plan.units);
      for (int row = 0; row < plan.height * 4; ++row) {
        for (int place = 0; place < plan.depth(); ++place) {
          for (int unit = segment.begin; unit < segment.end; ++unit) {
            const int block = segment.tile * plan.height * 4 + row;
            const int col = unit * plan.depth() + place;
            const bool inside = block < problem.row_blocks && col < problem.col_blocks;
            ASSERT_EQ(unit < plan.Limit(segment.tile, row, place), inside);
            if (inside) {
              ++visits[static_cast<size_t>(block) * static_cast<size_t>(problem.col_blocks) + static_cast<size_t>(col)];
            }
          }
        }
      }
      if (segment.piece >= 0) {
        ASSERT_LT(segment.piece, tile::kMaxPieces);
        pieces[segment.tile - plan.FirstLeftover()].emplace_back(cta, segment.piece);
      } else {
        ASSERT_TRUE(whole.insert(segment.tile).second);
      }
    }
  }
  EXPECT_TRUE(std::all_of(visits.begin(), visits.end(), [](int n) { return n == 1; }));
  EXPECT_EQ(static_cast<int>(pieces.size()), plan.leftovers);
  // What the second kernel adds up is what the CTAs left, in the order of the
  // CTAs.
  for (const auto &[leftover, left] : pieces) {
    std::vector<std::pair<int, int>> added;
    const int first = plan.Sharer(leftover * plan.units);
    const int last = plan.Sharer((leftover + 1) * plan.units - 1);
    for (int cta = first; cta <= last; ++cta) added.emplace_back(cta, leftover - plan.ShareBegin(cta) / plan.units);
    EXPECT_EQ(added, left);
  }
}

TEST(TileSchedule, MultipliesEveryChunkOnceAndAddsEveryPartOnce) {
  for (const Problem &problem : Problems()) {
    for (const int tokens : {16, 32, 64}) {
      SCOPED_TRACE(::testing::Message() << problem.row_blocks << " x " << problem.col_blocks << " blocks, tokens "
                                        << tokens << ", " << problem.multiprocessors << " SMs, chunk "
                                        << problem.stage_bytes);
      CheckTile(problem, tokens);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

void CheckSlab(const Problem &problem, int tiles) {
  const slab::Plan plan = slab::MakePlan(problem.multiprocessors, kSharedBytes, problem.row_blocks, problem.col_blocks,
                                         tiles, problem.chunk_cols, problem.stage_bytes);
  ASSERT_GT(plan.splits, 0);
  ASSERT_LE(slab::SharedBytes(plan, tiles, problem.chunk_cols, problem.stage_bytes), kSharedBytes);
  std::vector<int> visits(static_cast<size_t>(problem.row_blocks) * static_cast<size_t>(problem.col_blocks));
  std::set<std::tuple<int, int, int>> shares;  // (split, CTA, piece) of leftovers
  std::map<int, std::set<std::tuple<int, int, int>>> left;
  for (int split = 0; split < plan.splits; ++split) {
    ASSERT_GT(plan.SplitCols(split), 0);
    for (int cta = 0; cta < plan.groups; ++cta) {
      // (group, segment) -> block, first chunk's position and warps, as they
      // hand over.
      std::map<std::pair<int, int>, std::map<int, int>> first_col;  // member -> its first column
      std::map<std::pair<int, int>, IntPair> contributors;
      int pieces = 0;
      for (int warp = 0; warp < plan.warps; ++warp) {
        std::pair<int, int> previous{-1, -1};
        slab::Walk walk(plan, split, cta, warp);
        pieces = walk.Pieces();
        for (; !walk.done(); walk.Next()) {
          const std::pair<int, int> at{walk.group(), walk.segment()};
          ASSERT_LT(walk.block(), problem.row_blocks);
          ++visits[static_cast<size_t>(walk.chunk())];
          if (at != previous) {
            // A warp never comes back to a segment that it has handed over.
            const bool leftover = walk.group() == slab::kLeftoverGroup;
            const int member = leftover ? warp : warp >> plan.height_log2;
            ASSERT_TRUE(first_col[at].emplace(member, walk.col()).second);
            const IntPair now = walk.Contributors(walk.group(), walk.segment(), walk.block());
            const auto [known, fresh] = contributors.emplace(at, now);
            ASSERT_TRUE(fresh || (known->second.x == now.x && known->second.y == now.y));
            if (leftover) {
              shares.emplace(split, cta, walk.segment());
              left[walk.block() - plan.FirstLeftover()].emplace(split, cta, walk.segment());
              ASSERT_LT(walk.segment(), slab::kMaxPieces);
              ASSERT_LT(walk.segment(), pieces);
            } else {
              ASSERT_LT(walk.segment(), plan.rounds);
            }
            previous = at;
          }
        }
      }
      for (const auto &[at, members] : first_col) {
        const int count = at.first == slab::kLeftoverGroup ? plan.warps : plan.warps >> plan.height_log2;
        const IntPair promised = contributors[at];
        ASSERT_EQ(static_cast<int>(members.size()), promised.y);
        // They follow each other from the one with the segment's first column.
        for (int i = 0; i < promised.y; ++i) ASSERT_EQ(members.count((promised.x + i) % count), 1u);
        const auto lowest = std::min_element(members.begin(), members.end(),
                                             [](const auto &a, const auto &b) { return a.second < b.second; });
        ASSERT_EQ(lowest->first, promised.x);
      }
      // The end of the kernel asks for every segment by number: none may be
      // missing.
      for (int piece = 0; piece < pieces; ++piece) ASSERT_EQ(first_col.count({slab::kLeftoverGroup, piece}), 1u);
      for (int group = 0; group < plan.height(); ++group) {
        for (int round = 0; round < plan.rounds; ++round) ASSERT_EQ(first_col.count({group, round}), 1u);
      }
    }
  }
  EXPECT_TRUE(std::all_of(visits.begin(), visits.end(), [](int n) { return n == 1; }));
  EXPECT_EQ(static_cast<int>(left.size()), plan.leftovers);
  for (const auto &[leftover, parts] : left) {
    std::set<std::tuple<int, int, int>> added;
    for (int split = 0; split < plan.splits; ++split) {
      const IntPair sharers = slab::Sharers(plan, split, leftover);
      for (int cta = sharers.x; cta <= sharers.y; ++cta) {
        added.emplace(split, cta, leftover - plan.ShareBegin(split, cta) / plan.SplitCols(split));
      }
    }
    EXPECT_EQ(added, parts);
  }
}

TEST(SlabSchedule, MultipliesEveryChunkOnceAndAddsEveryPartOnce) {
  for (const Problem &problem : Problems()) {
    for (const int tiles : {1, 2, 4}) {
      SCOPED_TRACE(::testing::Message() << problem.row_blocks << " x " << problem.col_blocks << " blocks, tiles "
                                        << tiles << ", " << problem.multiprocessors << " SMs, chunk "
                                        << problem.stage_bytes);
      CheckSlab(problem, tiles);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

void CheckThreeLayer(const three_layer_plan::Plan &plan) {
  std::vector<int> visits(static_cast<size_t>(plan.units()));
  std::map<int, std::set<int>> partials;  // block -> partial sums written
  std::map<int, int> whole;               // block -> CTAs that store it themselves
  ASSERT_EQ(plan.Begin(0), 0);
  ASSERT_EQ(plan.Begin(plan.ctas), plan.units());
  for (int cta = 0; cta < plan.ctas; ++cta) {
    ASSERT_LT(plan.Begin(cta), plan.Begin(cta + 1));
    std::set<int> own;
    for (int unit = plan.Begin(cta); unit < plan.Begin(cta + 1);) {
      const int block = unit / plan.block_units();
      const int end = std::min(plan.Begin(cta + 1), (block + 1) * plan.block_units());
      const bool is_whole = end - unit == plan.block_units();
      for (; unit < end; ++unit) {
        ++visits[static_cast<size_t>(unit)];
        ASSERT_EQ(plan.Owner(unit), cta);
      }
      if (is_whole) {
        ++whole[block];
        continue;
      }
      const int partial = plan.Partial(cta, block);
      ASSERT_GE(partial, cta * three_layer_plan::kPartialsPerCta);
      ASSERT_LT(partial, (cta + 1) * three_layer_plan::kPartialsPerCta);
      ASSERT_TRUE(own.insert(partial).second) << "two segments in one place";
      partials[block].insert(partial);
    }
  }
  EXPECT_TRUE(std::all_of(visits.begin(), visits.end(), [](int n) { return n == 1; }));
  for (int block = 0; block < plan.blocks(); ++block) {
    const IntPair owners = plan.Owners(block);
    if (owners.x == owners.y) {
      EXPECT_EQ(whole[block], 1);
      continue;
    }
    EXPECT_EQ(whole[block], 0);
    std::set<int> added;
    for (int cta = owners.x; cta <= owners.y; ++cta) added.insert(plan.Partial(cta, block));
    EXPECT_EQ(added, partials[block]);
  }
}

TEST(ThreeLayerSchedule, MultipliesEveryTileOnceAndAddsEveryPartOnce) {
  std::mt19937 rng(11);
  for (int round = 0; round < 200; ++round) {
    const int multiprocessors = round % 3 == 0 ? 132 : static_cast<int>(rng() % 140 + 1);
    const int64_t row_tiles = static_cast<int64_t>(rng() % (round % 2 == 0 ? 20 : 600) + 1);
    const int64_t col_tiles = static_cast<int64_t>(rng() % 120 + 1);
    for (const int tokens : {8, 16, 32, 64}) {
      for (const bool surplus : {false, true}) {
        const three_layer_plan::Plan plan = three_layer_plan::MakePlan(
            multiprocessors, kSharedBytes, row_tiles, col_tiles, tokens,
            surplus ? static_cast<int64_t>(rng() % 80) * 64 : 0, surplus, static_cast<int>(rng() % 13));
        SCOPED_TRACE(::testing::Message() << row_tiles << " x " << col_tiles << " tiles, tokens " << tokens << ", "
                                          << multiprocessors << " SMs, teams " << plan.teams());
        ASSERT_LE(plan.teams(), three_layer_plan::kMaxTeams);
        ASSERT_LE(plan.stages, three_layer_plan::kMaxStages);
        ASSERT_LE(plan.boxes, three_layer_plan::kMaxBoxes);
        ASSERT_GE(int64_t{plan.blocks()} * plan.height, row_tiles);
        ASSERT_GE(int64_t{plan.block_units()} * plan.depth, col_tiles);
        ASSERT_LE(three_layer_plan::SharedBytes(plan, tokens), kSharedBytes);
        ASSERT_LE(plan.ctas, multiprocessors);
        CheckThreeLayer(plan);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace spmmd::cuda
