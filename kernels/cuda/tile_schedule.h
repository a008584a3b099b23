// How a launch of spmm_tile is cut into work, and the order in which a CTA goes
// through its part. Plain C++, so that a test without a GPU can prove that
// every chunk is multiplied once.
#ifndef SPMMD_KERNELS_CUDA_TILE_SCHEDULE_H_
#define SPMMD_KERNELS_CUDA_TILE_SCHEDULE_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/host_device.h"

namespace spmmd::cuda::tile {

inline constexpr int kGroups = 4;  // consumer warpgroups
inline constexpr int kWarps = kGroups * 4;
inline constexpr int kMaxBoxes = 16;  // of all X rings together
inline constexpr int kMaxRing = 8;    // of one: deeper ones were slower
inline constexpr int kMaxPieces = 4;  // leftover tiles of which a CTA may have a share
inline constexpr int kBoxCols = 64;

// How a launch is cut; the same numbers on host and device.
struct Plan {
  int row_blocks;
  int col_blocks;
  int height;            // warpgroups along M: 1, 2 or 4
  int units;             // of a tile
  int last_unit_chunks;  // chunks along K of a tile's last unit; the others have
                         // depth()
  int ctas;
  int rounds;     // whole tiles a CTA
  int leftovers;  // tiles behind the rounds, shared by all CTAs
  int stages;     // chunks in flight a warp
  int boxes;      // of one X ring; there are 4 / height rings

  SPMMD_HOST_DEVICE int depth() const { return kGroups / height; }
  SPMMD_HOST_DEVICE int FirstLeftover() const { return rounds * ctas; }
  // Units of a tile in which the warp of a row block has a chunk, `place` of
  // depth() along K.
  SPMMD_HOST_DEVICE int Limit(int tile, int row_block_in_tile, int place) const {
    if (tile * height * 4 + row_block_in_tile >= row_blocks) return 0;
    return place < last_unit_chunks ? units : units - 1;
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
    leftover_ = begin / plan.units;
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
    segment = {round_ * plan_.ctas + cta_, 0, plan_.units, -1};
    ++round_;
    return true;
  }

 private:
  const Plan &plan_;
  int cta_;
  int left_ = 0, leftover_ = 0, unit_ = 0, piece_ = 0, round_ = 0;
};

// Dynamic shared memory of a launch.
inline int64_t SharedBytes(const Plan &plan, int tokens, int64_t stage_bytes) {
  const int64_t box = int64_t{tokens} * kBoxCols * 2;
  const int64_t slot = tokens / 8 * 512;
  return plan.depth() * plan.boxes * box + kWarps * plan.stages * stage_bytes +
         (plan.depth() - 1) * plan.height * 4 * slot + kWarps * 512;
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The cut with the lowest estimated time; ctas == 0 when the largest chunk
// leaves no room for any.
inline Plan MakePlan(int multiprocessors, int64_t max_shared_bytes, int64_t row_blocks, int64_t col_blocks, int tokens,
                     int64_t stage_bytes) {
  constexpr double kBytesPerUsPerSm = 34e3;
  constexpr double kPartialBytesPerUs = 4e6;
  constexpr double kSecondKernelUs = 1.3;
  constexpr double kTileUs = 0.5;
  constexpr double kShallowRing = 1.1;  // fewer than four boxes
  Plan best = {};
  double best_us = 0;
  for (const int height : {4, 2, 1}) {
    Plan plan = {};
    plan.row_blocks = static_cast<int>(row_blocks);
    plan.col_blocks = static_cast<int>(col_blocks);
    plan.height = height;
    plan.units = static_cast<int>(CeilDiv(col_blocks, plan.depth()));
    plan.last_unit_chunks = static_cast<int>(col_blocks) - (plan.units - 1) * plan.depth();
    plan.stages = 2;
    for (plan.boxes = std::min(kMaxRing, kMaxBoxes / plan.depth()); plan.boxes >= 2; plan.boxes /= 2) {
      if (SharedBytes(plan, tokens, stage_bytes) <= max_shared_bytes) break;
    }
    if (plan.boxes < 2) continue;
    const int64_t tiles = CeilDiv(row_blocks, height * 4);
    const int64_t most = multiprocessors;
    // All SMs and shared leftovers, or as few CTAs as make the rounds even.
    for (const int64_t ctas : {std::min(most, tiles * plan.units), CeilDiv(tiles, CeilDiv(tiles, most))}) {
      plan.ctas = static_cast<int>(ctas);
      plan.rounds = static_cast<int>(tiles / ctas);
      plan.leftovers = static_cast<int>(tiles - plan.rounds * ctas);
      const double units = static_cast<double>(plan.rounds) * plan.units +
                           static_cast<double>(CeilDiv(int64_t{plan.leftovers} * plan.units, ctas));
      double us = units * kWarps * static_cast<double>(stage_bytes) / kBytesPerUsPerSm;
      if (plan.boxes < 4) us *= kShallowRing;
      us += kTileUs * (plan.rounds + 1) * (height < kGroups ? 2 : 1);
      if (plan.leftovers > 0) {
        us += kSecondKernelUs +
              static_cast<double>(ctas + plan.leftovers) * height * 64 * tokens * 8 / kPartialBytesPerUs;
      }
      if (best.ctas == 0 || us < best_us) {
        plan.share = static_cast<int>(int64_t{plan.leftovers} * plan.units / ctas);
        plan.share_extra = static_cast<int>(int64_t{plan.leftovers} * plan.units % ctas);
        best = plan;
        best_us = us;
      }
    }
  }
  return best;
}

}  // namespace spmmd::cuda::tile

#endif  // SPMMD_KERNELS_CUDA_TILE_SCHEDULE_H_
