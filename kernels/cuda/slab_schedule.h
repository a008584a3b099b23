// How a launch of spmm_slab is cut into work, and the order in which a warp goes through its part. Plain C++, so that a
// test without a GPU can prove that every chunk is multiplied once and every partial sum added once.
#ifndef SPMMD_KERNELS_CUDA_SLAB_SCHEDULE_H_
#define SPMMD_KERNELS_CUDA_SLAB_SCHEDULE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/cuda/host_device.h"

namespace spmmd::cuda::slab {

inline constexpr int kMaxWarps = 16;
inline constexpr int kMaxStages = 2;
inline constexpr int kGenerations = 2;  // buffers a warp has for sums that are being handed over
inline constexpr int kMaxPieces = 6;    // leftover row blocks of which a CTA may have a share

// How a launch is cut; the same numbers on host and device.
struct Plan {
  int row_blocks;
  int col_blocks;
  int splits;
  int cols_per_split;  // column blocks; the last split may have fewer, never none
  int groups;          // CTAs a split
  int height_log2;     // row blocks of a slab: a power of two that divides warps
  int rounds;          // slabs a CTA
  int leftovers;       // row blocks behind the rounds, shared by all CTAs of a split
  int warps;
  int stages;

  SPMMD_HOST_DEVICE int SplitCols(int split) const {
    const int left = col_blocks - split * cols_per_split;
    return left < cols_per_split ? left : cols_per_split;
  }
  SPMMD_HOST_DEVICE int FirstLeftover() const { return rounds * groups << height_log2; }
  // Leftover chunks of a split are numbered row block by row block and dealt out evenly: the first share_extra CTAs get
  // share + 1 of them, the others share. [0] is for splits of full width, [1] for the last, which may be narrower.
  int share[2];
  int share_extra[2];

  SPMMD_HOST_DEVICE int height() const { return 1 << height_log2; }
  SPMMD_HOST_DEVICE int Narrow(int split) const { return split == splits - 1 ? 1 : 0; }
  SPMMD_HOST_DEVICE int ShareBegin(int split, int c) const {
    const int which = Narrow(split);
    return c * share[which] + (c < share_extra[which] ? c : share_extra[which]);
  }
  // The CTA whose share holds leftover chunk `chunk`.
  SPMMD_HOST_DEVICE int Sharer(int split, int chunk) const {
    const int which = Narrow(split);
    const int longer = share_extra[which] * (share[which] + 1);
    return chunk < longer ? chunk / (share[which] + 1) : share_extra[which] + (chunk - longer) / share[which];
  }
  void DealOut() {
    for (int which = 0; which < 2; ++which) {
      const int chunks = leftovers * (which == 1 ? SplitCols(splits - 1) : cols_per_split);
      share[which] = chunks / groups;
      share_extra[which] = chunks % groups;
    }
  }
};

// One warp's way through its chunks: its share of the CTA's leftovers, then its part of each slab.
//
// A segment is one row block's chunks within the CTA. `group` names the warps that work on it: the row block of the
// slab, or kLeftoverGroup for leftovers, where all warps take turns. Segments of a group are numbered in order.
inline constexpr int kLeftoverGroup = kMaxWarps;

class Walk {
 public:
  SPMMD_HOST_DEVICE Walk(const Plan& plan, int split, int cta, int warp)
      : plan_(plan),
        cta_(cta),
        warp_(warp),
        cols_(plan.SplitCols(split)),
        base_(split * plan.cols_per_split),
        members_(plan.warps >> plan.height_log2) {
    if (plan.leftovers > 0) {
      share_begin_ = plan.ShareBegin(split, cta);
      share_end_ = plan.ShareBegin(split, cta + 1);
      first_leftover_ = share_begin_ / cols_;
    }
    share_ = share_begin_ + warp;
    col_ = warp >> plan.height_log2;
    Settle();
  }

  SPMMD_HOST_DEVICE bool done() const { return done_; }
  SPMMD_HOST_DEVICE void Next() {
    if (group_ == kLeftoverGroup) {
      share_ += plan_.warps;
    } else {
      col_ += members_;
    }
    Settle();
  }

  SPMMD_HOST_DEVICE int group() const { return group_; }
  SPMMD_HOST_DEVICE int segment() const { return segment_; }
  SPMMD_HOST_DEVICE int block() const { return block_; }
  SPMMD_HOST_DEVICE int col() const { return base_ + col_now_; }  // absolute column block
  SPMMD_HOST_DEVICE int64_t chunk() const { return static_cast<int64_t>(block_) * plan_.col_blocks + col(); }

  // Of a segment that this warp has walked through: the first of its warps, in order of chunks, as a member of the
  // group, and how many there are.
  SPMMD_HOST_DEVICE IntPair Contributors(int group, int segment, int block) const {
    if (group == kLeftoverGroup) {
      const int begin = Max(share_begin_, (block - plan_.FirstLeftover()) * cols_);
      const int end = Min(share_end_, (block - plan_.FirstLeftover() + 1) * cols_);
      return IntPair{(begin - share_begin_) % plan_.warps, Min(plan_.warps, end - begin)};
    }
    return IntPair{static_cast<int>(static_cast<int64_t>(segment) * cols_ % members_), Min(members_, cols_)};
  }
  // Leftover segments of the CTA.
  SPMMD_HOST_DEVICE int Pieces() const {
    return share_begin_ == share_end_ ? 0 : (share_end_ - 1) / cols_ - first_leftover_ + 1;
  }

 private:
  SPMMD_HOST_DEVICE void Settle() {
    if (share_ < share_end_) {
      const int leftover = share_ / cols_;
      group_ = kLeftoverGroup;
      segment_ = leftover - first_leftover_;
      block_ = plan_.FirstLeftover() + leftover;
      col_now_ = share_ - leftover * cols_;
      return;
    }
    while (col_ >= cols_) {
      col_ -= cols_;
      ++round_;
    }
    group_ = warp_ & (plan_.height() - 1);
    segment_ = round_;
    block_ = ((round_ * plan_.groups + cta_) << plan_.height_log2) + group_;
    col_now_ = col_;
    done_ = round_ >= plan_.rounds;
  }

  const Plan& plan_;
  int cta_, warp_, cols_, base_, members_;
  int share_begin_ = 0, share_end_ = 0, first_leftover_ = 0, share_;
  int round_ = 0, col_;
  int group_ = 0, segment_ = 0, block_ = 0, col_now_ = 0;
  bool done_ = false;
};

// The first and the last CTA of a split whose leftover chunks meet row block `leftover`.
SPMMD_HOST_DEVICE IntPair Sharers(const Plan& plan, int split, int leftover) {
  const int cols = plan.SplitCols(split);
  return IntPair{plan.Sharer(split, leftover * cols), plan.Sharer(split, (leftover + 1) * cols - 1)};
}

// Dynamic shared memory of a launch.
inline int64_t SharedBytes(const Plan& plan, int tiles, int chunk_cols, int64_t stage_bytes) {
  return int64_t{plan.cols_per_split} * chunk_cols * tiles * 16 + kGenerations * plan.warps * tiles * 512 +
         plan.warps * plan.stages * stage_bytes;
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The cut with the lowest estimated time. There always is one: with one column block a split, X, the reduction buffers
// and two stages of a dense chunk for 8 warps take 186 KiB at most.
inline Plan MakePlan(int multiprocessors, int64_t max_shared_bytes, int64_t row_blocks, int64_t col_blocks, int tiles,
                     int chunk_cols, int64_t stage_bytes) {
  // Estimates in us: streaming at an SM's share of the read ceiling, partial sums through L2 and the second kernel, and
  // the hand-overs of one warp.
  constexpr double kBytesPerUsPerSm = 34e3;
  constexpr double kPartialBytesPerUs = 4e6;
  constexpr double kSecondKernelUs = 1.5;
  constexpr double kHandOverUs = 0.4;
  constexpr double kElementsPerUsPerWarp = 2600;  // decoding, as long as warps do not compete for issue slots
  constexpr int64_t kWantedInFlight = 96 * 1024;
  constexpr int kMaxSplits = 64;
  Plan best = {};
  double best_us = 0;
  int64_t previous_cols = 0;
  for (int64_t wanted = 1; wanted <= std::min<int64_t>({col_blocks, multiprocessors, kMaxSplits}) ||
                           (best.splits == 0 && wanted <= col_blocks);
       ++wanted) {
    Plan plan = {};
    plan.row_blocks = static_cast<int>(row_blocks);
    plan.col_blocks = static_cast<int>(col_blocks);
    plan.cols_per_split = static_cast<int>(CeilDiv(col_blocks, wanted));
    if (plan.cols_per_split == previous_cols) continue;
    previous_cols = plan.cols_per_split;
    plan.splits = static_cast<int>(CeilDiv(col_blocks, plan.cols_per_split));
    const int64_t most_groups = std::max<int64_t>(1, multiprocessors / plan.splits);
    for (const int warps : {16, 12, 8}) {
      plan.warps = warps;
      plan.stages = 2;  // with more in flight the first chunks arrive later
      if (SharedBytes(plan, tiles, chunk_cols, stage_bytes) > max_shared_bytes) continue;
      const int64_t in_flight = warps * plan.stages * stage_bytes;
      for (plan.height_log2 = 0; warps % plan.height() == 0; ++plan.height_log2) {
        const int height = plan.height();
        // All SMs and shared leftovers, or as few CTAs as make the rounds even.
        const int64_t slabs = CeilDiv(row_blocks, height);
        for (const int64_t groups : {most_groups, CeilDiv(slabs, CeilDiv(slabs, most_groups))}) {
          plan.groups = static_cast<int>(groups);
          plan.rounds = static_cast<int>(row_blocks / (groups * height));
          plan.leftovers = static_cast<int>(row_blocks - groups * height * plan.rounds);
          if (plan.leftovers > (kMaxPieces - 2) * groups) continue;
          // Whole chunks of the busiest warp.
          const double chunks = std::ceil(static_cast<double>(plan.rounds) * plan.cols_per_split * height / warps) +
                                std::ceil(static_cast<double>(plan.leftovers) * plan.cols_per_split /
                                          static_cast<double>(groups) / warps);
          double us = std::max(chunks * warps * static_cast<double>(stage_bytes) / kBytesPerUsPerSm,
                               chunks * 16 * chunk_cols / kElementsPerUsPerWarp);
          if (in_flight < kWantedInFlight) us *= 1.0 + 0.3 * (1.0 - static_cast<double>(in_flight) / kWantedInFlight);
          us += kHandOverUs * (plan.rounds + 2.0 * plan.leftovers / static_cast<double>(groups));
          if (plan.splits > 1) {
            us += kSecondKernelUs + static_cast<double>(row_blocks) * plan.splits * tiles * 1024 / kPartialBytesPerUs;
          }
          if (best.splits == 0 || us < best_us) {
            plan.DealOut();
            best = plan;
            best_us = us;
          }
        }
      }
    }
  }
  return best;
}

}  // namespace spmmd::cuda::slab

#endif  // SPMMD_KERNELS_CUDA_SLAB_SCHEDULE_H_
