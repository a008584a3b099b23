// How a launch of spmm_tile is cut into work, and the order in which a CTA goes
// through its part. Plain C++, so that a test without a GPU can prove that
// every chunk is multiplied once.
#ifndef SPMMD_KERNELS_CUDA_TILE_SCHEDULE_H_
#define SPMMD_KERNELS_CUDA_TILE_SCHEDULE_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/host_device.h"

namespace spmmd::cuda::tile {

inline constexpr int kMaxGroups = 4;  // consumer warpgroups
// As many consumer warpgroups as the registers for the sums of `tokens` allow.
SPMMD_HOST_DEVICE constexpr int GroupsFor(int tokens) { return tokens <= 64 ? 4 : tokens <= 128 ? 3 : 2; }
inline constexpr int kMaxBoxes = 16;  // of all X rings together
inline constexpr int kMaxRing = 8;    // of one: deeper ones were slower
inline constexpr int kMaxPieces = 2;  // leftover tiles of which a CTA may have a share: a share is less than one tile
inline constexpr int kBoxCols = 64;

// How a launch is cut; the same numbers on host and device.
struct Plan {
  double us;  // estimated
  int row_blocks;
  int col_blocks;
  int tokens;  // a tile: 8, 16, 32, 64, 128 or 256
  int token_tiles;
  int groups;              // consumer warpgroups
  int height;              // of them along M, a divisor
  int units;               // of a tile
  uint32_t units_inverse;  // 2^32 / units, rounded up; 2^32 - 1 for 1
  int last_unit_chunks;    // chunks along K of a tile's last unit; the others have
                           // depth
  int ctas;
  int rounds;     // whole tiles a CTA
  int leftovers;  // tiles behind the rounds, shared by all CTAs
  int stages;     // chunks in flight a warp
  int boxes;      // of one X ring; there are `depth` rings
  int depth;      // groups / height: warpgroups along K
  // Pairs of CTAs (clusters) instead: a pair takes whole tiles, each of its CTAs one half of K, and they exchange half
  // of their sums each. Then `rounds` are at most, and there are no leftovers.
  bool paired;
  // Pairs with tiles of 128 tokens and more: no room for sums beside X, so they pass through X's rings between tiles.
  bool draining;
  int tiles;
  uint32_t half_inverse[2];  // as units_inverse, of HalfUnits

  // Units of a tile of a CTA of a pair: the first half, rounded up, is rank 0's.
  SPMMD_HOST_DEVICE int HalfUnits(int rank) const { return rank == 0 ? units - units / 2 : units / 2; }
  SPMMD_HOST_DEVICE int FirstLeftover() const { return rounds * ctas; }
  // Tiles are numbered token tile by token tile within the same rows of W, so that these are read from L2 from the
  // second time on.
  SPMMD_HOST_DEVICE int RowTile(int tile) const { return token_tiles == 1 ? tile : tile / token_tiles; }
  SPMMD_HOST_DEVICE int TokenTile(int tile) const { return token_tiles == 1 ? 0 : tile % token_tiles; }
  // Units of a tile in which the warp of a row block (of all) has a chunk, `place` of depth along K.
  SPMMD_HOST_DEVICE int Limit(int row_block, int place) const {
    if (row_block >= row_blocks) return 0;
    return place < last_unit_chunks ? units : units - 1;
  }
  // A CTA's units in the order in which it works through them: its share of the leftovers, then whole tiles.
  struct Units {
    int first;   // leftover unit
    int shared;  // leftover units
    int count;   // in all
  };
  SPMMD_HOST_DEVICE Units UnitsOf(int cta) const {
    if (paired) {
      const bool last = (rounds - 1) * (ctas / 2) + cta / 2 < tiles;  // has a tile in the last round
      return Units{0, 0, (last ? rounds : rounds - 1) * HalfUnits(cta % 2)};
    }
    if (leftovers == 0) return Units{0, 0, rounds * units};
    const int shared = share + (cta < share_extra ? 1 : 0);
    return Units{ShareBegin(cta), shared, shared + rounds * units};
  }
  // The tile and unit of a CTA's i-th unit.
  SPMMD_HOST_DEVICE IntPair Locate(int cta, const Units &of, int i) const {
    if (paired) {
      const int rank = cta % 2;
      const int half = HalfUnits(rank);
      const int round = Divide(i, half, half_inverse[rank]);
      return IntPair{round * (ctas / 2) + cta / 2, (rank == 0 ? 0 : HalfUnits(0)) + i - round * half};
    }
    const bool is_shared = i < of.shared;
    const int number = is_shared ? of.first + i : i - of.shared;
    const int quotient = DivideByUnits(number);
    return IntPair{is_shared ? FirstLeftover() + quotient : quotient * ctas + cta, number - quotient * units};
  }
  // A division takes several times as long, and this is on the way to a launch's first load.
  SPMMD_HOST_DEVICE int DivideByUnits(int number) const { return Divide(number, units, units_inverse); }
  SPMMD_HOST_DEVICE static int Divide(int number, int by, uint32_t inverse) {
#ifdef __CUDA_ARCH__
    const int quotient = static_cast<int>(__umulhi(static_cast<uint32_t>(number), inverse));
#else
    const int quotient = static_cast<int>(uint64_t{static_cast<uint32_t>(number)} * inverse >> 32);
#endif
    const int remainder = number - quotient * by;  // at most one quotient off, either way
    return quotient + (remainder >= by ? 1 : 0) - (remainder < 0 ? 1 : 0);
  }
  // 2^32 / by, rounded up; 2^32 - 1 for 1.
  static uint32_t Inverse(int by) {
    const auto divisor = static_cast<uint64_t>(by);
    return static_cast<uint32_t>(std::min<uint64_t>(((uint64_t{1} << 32) + divisor - 1) / divisor, 0xffffffffu));
  }
  // Leftover units are numbered tile by tile and dealt out evenly: the first
  // share_extra CTAs get share + 1 of them, the others share.
  int share;
  int share_extra;
  SPMMD_HOST_DEVICE int ShareBegin(int c) const { return c * share + (c < share_extra ? c : share_extra); }
  // The CTA whose share holds leftover unit `unit`.
  SPMMD_HOST_DEVICE int Sharer(int unit) const {
    const int longer = share_extra * (share + 1);
    return unit < longer ? unit / (share + 1) : share_extra + (unit - longer) / share;
  }
};

// Consecutive units of one tile that a CTA works on.
struct Segment {
  int tile;
  int begin;  // units
  int end;
  int piece;  // number among the CTA's shares of leftover tiles, -1 for a whole
              // tile
};

// A CTA's segments in order: its share of the leftovers, then whole tiles.
class Segments {
 public:
  SPMMD_HOST_DEVICE Segments(const Plan &plan, int cta) : plan_(plan), cta_(cta) {
    if (plan.leftovers == 0) return;
    const int begin = plan.ShareBegin(cta);
    left_ = plan.ShareBegin(cta + 1) - begin;
    leftover_ = plan.DivideByUnits(begin);
    unit_ = begin - leftover_ * plan.units;
  }

  // False past the last one.
  SPMMD_HOST_DEVICE bool Next(Segment &segment) {
    if (left_ > 0) {
      segment = {plan_.FirstLeftover() + leftover_, unit_, Min(plan_.units, unit_ + left_), piece_};
      left_ -= segment.end - segment.begin;
      unit_ = 0;
      ++leftover_;
      ++piece_;
      return true;
    }
    if (round_ == plan_.rounds) return false;
    if (plan_.paired) {
      const int tile = round_ * (plan_.ctas / 2) + cta_ / 2;
      const int middle = plan_.HalfUnits(0);
      segment = {tile, cta_ % 2 == 0 ? 0 : middle, cta_ % 2 == 0 ? middle : plan_.units, -1};
      ++round_;
      return tile < plan_.tiles;
    }
    segment = {round_ * plan_.ctas + cta_, 0, plan_.units, -1};
    ++round_;
    return true;
  }

 private:
  const Plan &plan_;
  int cta_;
  int left_ = 0, leftover_ = 0, unit_ = 0, piece_ = 0, round_ = 0;
};

// Sums that a CTA of a pair gets from the other at a time; with several rounds they go by turns to two places, but
// draining to one.
SPMMD_HOST_DEVICE int InboxBytes(const Plan &plan) {
  return plan.paired ? plan.height * 4 * (plan.tokens / 8) * 256 : 0;
}
// Places for a row block's sums on their way between the warps along K: half of those still adding give theirs away.
SPMMD_HOST_DEVICE constexpr int ExchangeSlots(int depth) { return depth / 2; }
SPMMD_HOST_DEVICE int ExchangeBytes(const Plan &plan) {
  return ExchangeSlots(plan.depth) * plan.height * 4 * (plan.tokens / 8) * 512;
}

// Dynamic shared memory of a launch.
inline int64_t SharedBytes(const Plan &plan, int64_t stage_bytes) {
  const int64_t rings = plan.depth * (plan.boxes * (int64_t{plan.tokens} * kBoxCols * 2));
  const int64_t sums =
      int64_t{ExchangeBytes(plan)} + (plan.rounds > 1 && !plan.draining ? 2 : 1) * int64_t{InboxBytes(plan)};
  return (plan.draining ? std::max(rings, sums) : rings + sums) + plan.groups * 4 * plan.stages * stage_bytes +
         plan.height * 4 * 512;
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The cut of one tile size with the lowest estimated time, or number `only` (from 1) of the cuts tried; ctas == 0 when
// the largest chunk leaves no room for any.
inline Plan MakePlan(int multiprocessors, int64_t max_shared_bytes, int64_t row_blocks, int64_t col_blocks, int tokens,
                     int64_t token_tiles, int chunk_cols, int64_t stage_bytes, int only) {
  // Fitted to measurements on an H200.
  constexpr double kLaunchUs = 3;
  constexpr double kBytesPerUsPerSm = 30e3;
  constexpr double kActivationBytesPerUs = 21e6;  // of all SMs, from L2
  constexpr double kTileUs = 0.5;
  constexpr double kPairUs = 0.8;
  constexpr double kDrainUs = 1.5;
  constexpr double kShortRing = 1.03;    // fewer boxes than two chunks have columns
  constexpr double kShallowRing = 1.35;  // or than one
  constexpr double kOneStage = 1.8;      // a warp waits for each chunk: only where a dense one is too large for two
  const double partial_bytes_per_us = tokens <= 64 ? 4e6 : 8e6;
  const double second_kernel_us = tokens <= 64 ? 2.3 : 1.3;
  // Decoding and multiplying: the shared memory's limit, from 128 tokens on the tensor cores'.
  const double elements_per_us = tokens <= 8     ? 29e3
                                 : tokens <= 16  ? 27.5e3
                                 : tokens <= 32  ? 26e3
                                 : tokens <= 64  ? 22.6e3
                                 : tokens <= 128 ? 15.2e3
                                                 : 9.4e3;
  const int groups = GroupsFor(tokens);
  Plan best = {};
  int number = 0;
  for (int height = groups; height > 0; --height) {
    if (groups % height != 0) continue;
    for (const bool paired : {false, true}) {
      Plan plan = {};
      plan.tokens = tokens;
      plan.token_tiles = static_cast<int>(token_tiles);
      plan.groups = groups;
      plan.row_blocks = static_cast<int>(row_blocks);
      plan.col_blocks = static_cast<int>(col_blocks);
      plan.height = height;
      plan.depth = groups / height;
      plan.units = static_cast<int>(CeilDiv(col_blocks, plan.depth));
      plan.units_inverse = Plan::Inverse(plan.units);
      plan.last_unit_chunks = static_cast<int>(col_blocks) - (plan.units - 1) * plan.depth;
      plan.paired = paired;
      const int64_t tiles = CeilDiv(row_blocks, int64_t{height} * 4) * token_tiles;
      const int64_t most = multiprocessors;
      const int64_t pairs = std::min(most / 2, tiles);
      if (paired && pairs > 0) plan.rounds = static_cast<int>(CeilDiv(tiles, pairs));
      plan.draining = paired && tokens >= 128;
      plan.boxes = 0;
      for (plan.stages = 2; plan.stages > 0 && plan.boxes < 2; --plan.stages) {
        for (plan.boxes = std::min(kMaxRing, kMaxBoxes / plan.depth); plan.boxes >= 2; --plan.boxes) {
          if (SharedBytes(plan, stage_bytes) <= max_shared_bytes) break;
        }
        if (plan.boxes >= 2) break;
      }
      // All SMs and shared leftovers, or as few CTAs as make the rounds even.
      const int64_t all = std::min(most, tiles * plan.units);
      const int64_t even = CeilDiv(tiles, CeilDiv(tiles, most));
      for (int64_t ctas : {paired ? 2 * pairs : all, paired ? int64_t{0} : even}) {
        if (paired && (plan.units < 2 || ctas == 0)) continue;
        ++number;
        if (plan.boxes < 2 || (only != 0 && number != only)) continue;
        double us = 0;
        if (paired) {
          plan.tiles = static_cast<int>(tiles);
          ctas = 2 * CeilDiv(tiles, plan.rounds);
          for (int rank = 0; rank < 2; ++rank) plan.half_inverse[rank] = Plan::Inverse(plan.HalfUnits(rank));
          us = static_cast<double>(plan.rounds) * plan.HalfUnits(0);
        } else {
          plan.rounds = static_cast<int>(tiles / ctas);
          plan.leftovers = static_cast<int>(tiles - plan.rounds * ctas);
          us = static_cast<double>(plan.rounds) * plan.units +
               static_cast<double>(CeilDiv(int64_t{plan.leftovers} * plan.units, ctas));
        }
        plan.ctas = static_cast<int>(ctas);
        us *= groups * 4 *
              std::max(static_cast<double>(stage_bytes) / kBytesPerUsPerSm, 16 * chunk_cols / elements_per_us);
        us *= plan.boxes * kBoxCols < chunk_cols       ? kShallowRing
              : plan.boxes * kBoxCols < 2 * chunk_cols ? kShortRing
                                                       : 1;
        if (plan.stages < 2) us *= kOneStage;
        us += kLaunchUs + kTileUs * (plan.rounds + (paired ? 0 : 1)) * (height < groups ? 2 : 1);
        us += static_cast<double>(tiles * col_blocks) * chunk_cols * tokens * 2 / kActivationBytesPerUs;
        if (paired) us += (plan.draining ? kDrainUs : kPairUs) * plan.rounds;
        if (plan.leftovers > 0) {
          us += second_kernel_us +
                static_cast<double>(ctas + plan.leftovers) * height * 64 * tokens * 8 / partial_bytes_per_us;
        }
        if (best.ctas == 0 || us < best.us) {
          plan.share = static_cast<int>(int64_t{plan.leftovers} * plan.units / ctas);
          plan.share_extra = static_cast<int>(int64_t{plan.leftovers} * plan.units % ctas);
          plan.us = us;
          best = plan;
        }
      }
    }
  }
  return best;
}

// The cut for a launch of n tokens, or one of those tried for the tile size that it would take.
inline Plan MakePlan(int multiprocessors, int64_t max_shared_bytes, int64_t row_blocks, int64_t col_blocks, int64_t n,
                     int chunk_cols, int64_t stage_bytes, int only = 0) {
  const auto plan = [&](int tokens) {
    return MakePlan(multiprocessors, max_shared_bytes, row_blocks, col_blocks, tokens, CeilDiv(n, tokens), chunk_cols,
                    stage_bytes, only);
  };
  for (const int tokens : {8, 16, 32, 64}) {
    if (n <= tokens) return plan(tokens);
  }
  const Plan narrow = plan(128);
  const Plan wide = plan(256);
  return wide.ctas == 0 || (narrow.ctas > 0 && narrow.us <= wide.us) ? narrow : wide;
}

}  // namespace spmmd::cuda::tile

#endif  // SPMMD_KERNELS_CUDA_TILE_SCHEDULE_H_
