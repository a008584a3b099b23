// How a launch of spmm_tile is cut into work, and the order in which a CTA goes through its part. Plain C++, so that a
// test without a GPU can prove that every chunk is multiplied once.
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
  int height;  // warpgroups along M: 1, 2 or 4
  int units;   // of a tile
  int ctas;
  int rounds;     // whole tiles a CTA
  int leftovers;  // tiles behind the rounds, shared by all CTAs
  int stages;     // chunks in flight a warp
  int boxes;      // of one X ring; there are 4 / height rings

  SPMMD_HOST_DEVICE int depth() const { return kGroups / height; }
  SPMMD_HOST_DEVICE int FirstLeftover() const { return rounds * ctas; }
  // Leftover units are numbered tile by tile and dealt out evenly: the first share_extra CTAs get share + 1 of them,
  // the others share.
  int share;
  int share_extra;
  SPMMD_HOST_DEVICE int ShareBegin(int c) const { return c * share + (c < share_extra ? c : share_extra); }
  // The CTA whose share holds leftover unit `unit`.
  SPMMD_HOST_DEVICE int Sharer(int unit) const {
    const int longer = share_extra * (share + 1);
    return unit < longer ? unit / (share + 1) : share_extra + (unit - longer) / share;
  }
};

// A CTA's units in order: its share of the leftovers, then whole tiles.
class Walk {
 public:
  SPMMD_HOST_DEVICE Walk(const Plan& plan, int cta) : plan_(plan), cta_(cta) {
    if (plan.leftovers > 0) {
      const int begin = plan.ShareBegin(cta);
      left_ = plan.ShareBegin(cta + 1) - begin;
      const int leftover = begin / plan.units;
      tile_ = plan.FirstLeftover() + leftover;
      unit_ = begin - leftover * plan.units;
    }
    if (left_ == 0) StartRound(0);
  }

  SPMMD_HOST_DEVICE bool done() const { return done_; }
  SPMMD_HOST_DEVICE int tile() const { return tile_; }
  SPMMD_HOST_DEVICE int unit() const { return unit_; }
  SPMMD_HOST_DEVICE bool leftover() const { return left_ > 0; }
  SPMMD_HOST_DEVICE int piece() const { return piece_; }  // number of the leftover tile within the CTA
  // True when the unit after this one belongs to another sum.
  SPMMD_HOST_DEVICE bool EndsSegment() const { return unit_ + 1 == plan_.units || left_ == 1; }
  SPMMD_HOST_DEVICE void Next() {
    const bool ends_tile = ++unit_ == plan_.units;
    if (left_ > 0) {
      if (--left_ == 0) {
        StartRound(0);
      } else if (ends_tile) {
        unit_ = 0;
        ++tile_;
        ++piece_;
      }
    } else if (ends_tile) {
      StartRound(round_ + 1);
    }
  }

 private:
  SPMMD_HOST_DEVICE void StartRound(int round) {
    round_ = round;
    unit_ = 0;
    tile_ = round * plan_.ctas + cta_;
    done_ = round >= plan_.rounds;
  }

  const Plan& plan_;
  int cta_;
  int tile_ = 0, unit_ = 0, left_ = 0, piece_ = 0, round_ = 0;
  bool done_ = false;
};

// Dynamic shared memory of a launch.
inline int64_t SharedBytes(const Plan& plan, int tokens, int64_t stage_bytes) {
  const int64_t box = int64_t{tokens} * kBoxCols * 2;
  const int64_t slot = tokens / 8 * 512;
  return plan.depth() * plan.boxes * box + kWarps * plan.stages * stage_bytes +
         (plan.depth() - 1) * plan.height * 4 * slot + kWarps * 512;
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The cut with the lowest estimated time; ctas == 0 when the largest chunk leaves no room for any.
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
