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
#include "kernels/cuda/pair_schedule.h"
#include "kernels/cuda/portable_schedule.h"
#include "kernels/cuda/stream_schedule.h"
#include "kernels/cuda/three_layer_schedule.h"
#include "kernels/cuda/tile_schedule.h"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::cuda {
namespace {

constexpr int64_t kSharedBytes = int64_t{225} * 1024;  // an H100's or H200's, less what is static

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

void CheckTile(const Problem &problem, int tokens, int only) {
  const tile::Plan plan = tile::MakePlan(problem.multiprocessors, kSharedBytes, problem.row_blocks, problem.col_blocks,
                                         tokens, problem.chunk_cols, problem.stage_bytes, only);
  if (plan.ctas == 0) return;  // the kernel refuses such a layer
  ASSERT_LE(tile::SharedBytes(plan, problem.stage_bytes), kSharedBytes);
  ASSERT_LE(plan.boxes * plan.depth, tile::kMaxBoxes);
  ASSERT_GE(plan.token_tiles * plan.tokens, tokens);
  ASSERT_LT((plan.token_tiles - 1) * plan.tokens, tokens);
  ASSERT_LE(plan.ctas, problem.multiprocessors);
  std::vector<int> visits(static_cast<size_t>(plan.token_tiles) * static_cast<size_t>(problem.row_blocks) *
                          static_cast<size_t>(problem.col_blocks));
  std::map<int, std::vector<std::pair<int, int>>> pieces;  // leftover tile -> (CTA, piece) in order
  std::map<int, int> whole;                                // CTAs of a whole tile
  for (int cta = 0; cta < plan.ctas; ++cta) {
    tile::Segments segments(plan, cta);
    int number = 0;  // of the unit, in the CTA's order
    for (tile::Segment segment; segments.Next(segment);) {
      for (int unit = segment.begin; unit < segment.end; ++unit, ++number) {
        const IntPair at = plan.Locate(cta, plan.UnitsOf(cta), number);
        ASSERT_TRUE(at.x == segment.tile && at.y == unit);
      }
      ASSERT_LT(segment.begin, segment.end);
      ASSERT_TRUE(!plan.paired || (segment.begin == 0) == (cta % 2 == 0));
      ASSERT_LE(segment.end, plan.units);
      for (int row = 0; row < plan.height * 4; ++row) {
        for (int place = 0; place < plan.depth; ++place) {
          for (int unit = segment.begin; unit < segment.end; ++unit) {
            const int block = plan.RowTile(segment.tile) * plan.height * 4 + row;
            const int col = unit * plan.depth + place;
            const bool inside = block < problem.row_blocks && col < problem.col_blocks;
            ASSERT_EQ(unit < plan.Limit(block, place), inside);
            if (inside) {
              const int at = plan.TokenTile(segment.tile) * problem.row_blocks + block;
              ++visits[static_cast<size_t>(at) * static_cast<size_t>(problem.col_blocks) + static_cast<size_t>(col)];
            }
          }
        }
      }
      if (segment.piece >= 0) {
        ASSERT_LT(segment.piece, tile::kMaxPieces);
        pieces[segment.tile - plan.FirstLeftover()].emplace_back(cta, segment.piece);
      } else {
        ASSERT_EQ(++whole[segment.tile], plan.paired ? cta % 2 + 1 : 1);
      }
    }
    ASSERT_EQ(number, plan.UnitsOf(cta).count);
  }
  EXPECT_TRUE(std::all_of(visits.begin(), visits.end(), [](int n) { return n == 1; }));
  EXPECT_EQ(static_cast<int>(pieces.size()), plan.leftovers);
  // What the second kernel adds up is what the CTAs left, in the order of the
  // CTAs.
  for (const auto &[leftover, left] : pieces) {
    std::vector<std::pair<int, int>> added;
    const int first = plan.Sharer(leftover * plan.units);
    const int last = plan.Sharer((leftover + 1) * plan.units - 1);
    for (int cta = first; cta <= last; ++cta) {
      added.emplace_back(cta, cta == first ? leftover - plan.ShareBegin(first) / plan.units : 0);
    }
    EXPECT_EQ(added, left);
  }
}

TEST(TileSchedule, MultipliesEveryChunkOnceAndAddsEveryPartOnce) {
  int turn = 0;
  for (const Problem &problem : Problems()) {
    for (const int tokens : {8, 16, 32, 64, 100, 300, 1000}) {
      SCOPED_TRACE(::testing::Message() << problem.row_blocks << " x " << problem.col_blocks << " blocks, tokens "
                                        << tokens << ", " << problem.multiprocessors << " SMs, chunk "
                                        << problem.stage_bytes);
      // Every third time one of the cuts that were not chosen.
      CheckTile(problem, tokens, ++turn % 3 == 0 ? turn / 3 % 9 + 1 : 0);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

// The problem's layer alone, and beside two smaller ones: q, k and v.
std::vector<std::vector<int64_t>> Groups(const Problem &problem) {
  const int64_t small = problem.row_blocks / 4 + 1;
  return {{problem.row_blocks}, {problem.row_blocks, small, small}, {1, problem.row_blocks}};
}

// True if the kernel takes the layers, of row_blocks[i] row blocks each.
bool CheckPair(const Problem &problem, const std::vector<int64_t> &layers, int tokens) {
  const pair::Plan plan = pair::MakePlan(problem.multiprocessors, kSharedBytes, layers, problem.col_blocks, tokens,
                                         problem.chunk_cols, problem.stage_bytes, 2);
  if (plan.pairs == 0) return false;
  EXPECT_LE(pair::SharedBytes(plan, tokens, problem.chunk_cols, problem.stage_bytes), kSharedBytes);
  EXPECT_LE(plan.pairs * 2, problem.multiprocessors);
  int pairs = 0;
  for (const int64_t layer : layers) {
    const int row_blocks = static_cast<int>(layer);
    std::vector<int> visits(static_cast<size_t>(row_blocks) * static_cast<size_t>(problem.col_blocks));
    int own = 0;
    for (; own * plan.rows < row_blocks; ++own) {
      for (int rank = 0; rank < 2; ++rank) {
        const int cols = plan.Cols(rank);
        const int items = plan.Rows(row_blocks, own) * cols;
        for (int warp = 0; warp < pair::kWarps; ++warp) {
          const int begin = pair::FirstItem(items, warp);
          const int end = pair::FirstItem(items, warp + 1);
          if (begin == end) continue;
          EXPECT_LE((end - 1) / cols - begin / cols, 1);  // two row blocks at most
          for (int item = begin; item < end; ++item) {
            EXPECT_EQ(plan.RowOf(rank, item), item / cols);
            const int block = own * plan.rows + item / cols;
            ++visits[static_cast<size_t>(block) * static_cast<size_t>(problem.col_blocks) +
                     static_cast<size_t>(plan.FirstCol(rank) + item % cols)];
          }
        }
        EXPECT_EQ(pair::FirstItem(items, pair::kWarps), items);
      }
    }
    EXPECT_TRUE(std::all_of(visits.begin(), visits.end(), [](int n) { return n == 1; }));
    pairs += own;
  }
  EXPECT_EQ(pairs, plan.pairs);
  return true;
}

TEST(PairSchedule, MultipliesEveryChunkOnce) {
  int taken = 0;
  for (const Problem &problem : Problems()) {
    for (const int tokens : {8, 16}) {
      SCOPED_TRACE(::testing::Message() << problem.row_blocks << " x " << problem.col_blocks << " blocks, tokens "
                                        << tokens << ", " << problem.multiprocessors << " SMs, chunk "
                                        << problem.stage_bytes);
      for (const std::vector<int64_t> &layers : Groups(problem)) taken += CheckPair(problem, layers, tokens) ? 1 : 0;
      if (::testing::Test::HasFailure()) return;
    }
  }
  EXPECT_GT(taken, 20);
}

// As CheckPair.
bool CheckStream(const Problem &problem, const std::vector<int64_t> &layers, int tokens, int only) {
  const stream::Plan plan = stream::MakePlan(problem.multiprocessors, kSharedBytes, layers, problem.col_blocks, tokens,
                                             problem.chunk_cols, problem.stage_bytes, only);
  if (plan.pairs == 0) return false;
  EXPECT_LE(stream::SharedBytes(plan, tokens, problem.chunk_cols, problem.stage_bytes), kSharedBytes);
  EXPECT_LE(plan.pairs * 2, problem.multiprocessors);
  EXPECT_LE(plan.warps(), stream::kMaxWarps);
  EXPECT_LE(plan.depth * plan.slots, stream::kMaxSlots);
  EXPECT_LE(plan.rounds, stream::kMaxRounds);
  int pairs = 0;
  for (const int64_t layer : layers) {
    const int row_blocks = static_cast<int>(layer);
    std::vector<int> visits(static_cast<size_t>(row_blocks) * static_cast<size_t>(problem.col_blocks));
    int own = 0;
    for (; own * plan.rows < row_blocks; ++own) {
      const int rows = plan.Rows(row_blocks, own);
      for (int rank = 0; rank < 2; ++rank) {
        for (int warp = 0; warp < plan.warps(); ++warp) {
          const int row = warp % plan.height;
          const int place = warp / plan.height;
          const stream::Share share = stream::ShareOf(plan, rows, rank, row, place);
          for (int i = 0; i < share.rounds * share.steps; ++i) {
            const IntPair at = stream::Find(share, i);
            EXPECT_EQ(at.x, i / share.steps);
            EXPECT_EQ(at.y, i % share.steps);
            const int in_pair = at.x * plan.height + row;
            EXPECT_LT(in_pair, rows);
            const int col = at.y * plan.depth + place;
            EXPECT_LT(col, plan.Cols(rank));
            ++visits[static_cast<size_t>(own * plan.rows + in_pair) * static_cast<size_t>(problem.col_blocks) +
                     static_cast<size_t>(plan.FirstCol(rank) + col)];
          }
        }
      }
    }
    EXPECT_TRUE(std::all_of(visits.begin(), visits.end(), [](int n) { return n == 1; }));
    pairs += own;
  }
  EXPECT_EQ(pairs, plan.pairs);
  return true;
}

// 4096x4096 with half its values: a launch of one round that two rings a group, two chunks a warp and the sums just
// fit.
TEST(TileSchedule, PairsFitAt64Tokens) {
  const tile::Plan plan = tile::MakePlan(132, kSharedBytes, 256, 32, 64, 128, 3072);
  EXPECT_TRUE(plan.paired);
  EXPECT_EQ(plan.rounds, 1);
  EXPECT_EQ(plan.depth, 4);
}

TEST(StreamSchedule, MultipliesEveryChunkOnce) {
  int taken = 0;
  for (const Problem &problem : Problems()) {
    for (const int tokens : {8, 16, 32, 64}) {
      SCOPED_TRACE(::testing::Message() << problem.row_blocks << " x " << problem.col_blocks << " blocks, tokens "
                                        << tokens << ", " << problem.multiprocessors << " SMs, chunk "
                                        << problem.stage_bytes);
      for (const std::vector<int64_t> &layers : Groups(problem)) {
        for (int only = 0; only < 12; ++only) taken += CheckStream(problem, layers, tokens, only) ? 1 : 0;
      }
      if (::testing::Test::HasFailure()) return;
    }
  }
  EXPECT_GT(taken, 20);
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
      const int block = unit / plan.block_units;
      const int end = std::min(plan.Begin(cta + 1), (block + 1) * plan.block_units);
      const bool is_whole = end - unit == plan.block_units;
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
        ASSERT_GE(int64_t{plan.block_units} * plan.depth, col_tiles);
        ASSERT_LE(three_layer_plan::SharedBytes(plan, tokens), kSharedBytes);
        ASSERT_LE(plan.ctas, multiprocessors);
        CheckThreeLayer(plan);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

// What compute capabilities 8.0, 8.6 and 8.9 (and 12.0), and 9.0 offer.
TEST(PortableSchedule, CoversEveryChunkWithinAnyDevicesSharedMemory) {
  const portable::Limits devices[] = {{108, 162 * 1024, 164 * 1024},
                                      {84, 98 * 1024, 100 * 1024},
                                      {142, 98 * 1024, 100 * 1024},
                                      {132, 226 * 1024, 228 * 1024}};
  constexpr int64_t kCounters = 262144;
  for (const portable::Limits &device : devices) {
    for (const Problem &problem : Problems()) {
      for (const int64_t n : {1, 8, 9, 16, 17, 32, 33, 64, 65, 130, 4096, 16384}) {
        const portable::Plan plan =
            portable::MakePlan(device, problem.row_blocks, problem.col_blocks, n, problem.stage_bytes, kCounters);
        SCOPED_TRACE(::testing::Message()
                     << problem.row_blocks << " x " << problem.col_blocks << " chunks of " << problem.stage_bytes
                     << " bytes, n " << n << ", warps " << plan.warps << ", splits " << plan.splits);
        // The largest chunk that the format allows fits everywhere.
        ASSERT_GE(plan.warps, 1);
        ASSERT_LE(plan.warps, portable::kMaxWarps);
        ASSERT_LE(portable::SharedBytes(plan.tokens, plan.warps, problem.stage_bytes), device.shared_per_block);
        ASSERT_GE(int64_t{plan.token_tiles} * plan.tokens, n);
        ASSERT_LT(int64_t{plan.token_tiles - 1} * plan.tokens, n);
        ASSERT_GE(plan.row_tiles * plan.warps, problem.row_blocks);
        ASSERT_LT((plan.row_tiles - 1) * plan.warps, problem.row_blocks);
        ASSERT_EQ(problem.chunk_cols % portable::BoxCols(plan.tokens), 0);
        ASSERT_LE(plan.splits, portable::kMaxSplits);
        if (plan.splits > 1) {
          ASSERT_LE(int64_t{plan.row_tiles} * plan.token_tiles, kCounters);
        }
        // The parts of K follow each other and none is empty.
        ASSERT_EQ(plan.FirstCol(0), 0);
        ASSERT_EQ(plan.FirstCol(plan.splits), problem.col_blocks);
        for (int split = 0; split < plan.splits; ++split) ASSERT_LT(plan.FirstCol(split), plan.FirstCol(split + 1));
      }
    }
  }
}

}  // namespace
}  // namespace spmmd::cuda
