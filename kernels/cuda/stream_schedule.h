// How a launch of spmm_stream is cut into work. Plain C++, so that a test without a GPU can prove that every chunk is
// multiplied once.
#ifndef SPMMD_KERNELS_CUDA_STREAM_SCHEDULE_H_
#define SPMMD_KERNELS_CUDA_STREAM_SCHEDULE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cuda/host_device.h"
#include "kernels/cuda/paired_rows.h"

namespace spmmd::cuda::stream {

inline constexpr int kMaxWarps = 23;  // that decode
inline constexpr int kMaxStages = 3;  // chunks in flight a warp
inline constexpr int kMaxSlots = 16;  // of all X rings together
inline constexpr int kMaxRounds = 8;
inline constexpr int kMaxRowsShared = 15;  // named barriers, one a row of warps
inline constexpr int kBoxCols = 64;        // X comes in boxes of 64 columns x all tokens

// How a launch is cut; the same numbers on host and device.
struct Plan {
  double us;  // estimated
  int col_blocks;
  int pairs;   // of CTAs
  int rows;    // row blocks a pair; a layer's last may have fewer
  int height;  // row blocks that a pair works on at a time
  int depth;   // warps a row block, in each of the two CTAs
  int rounds;
  int stages;                    // chunks in flight a warp
  int slots;                     // column blocks of X in flight a ring; there are `depth` rings
  uint32_t steps_inverse[2][2];  // [rank][longer], see Find

  SPMMD_HOST_DEVICE int warps() const { return height * depth; }
  // Row blocks of a layer's pair number `pair`.
  SPMMD_HOST_DEVICE int Rows(int row_blocks, int pair) const { return Min(rows, row_blocks - pair * rows); }
  // Column blocks of a rank: the first half, rounded up, is rank 0's.
  SPMMD_HOST_DEVICE int Cols(int rank) const { return rank == 0 ? col_blocks - col_blocks / 2 : col_blocks / 2; }
  SPMMD_HOST_DEVICE int FirstCol(int rank) const { return rank == 0 ? 0 : col_blocks - col_blocks / 2; }
};

// Warp (row, place) of a CTA multiplies, in each round in which its row exists, the column blocks place, place + depth,
// ... of the CTA's half of K.
struct Share {
  int steps;   // column blocks a round
  int rounds;  // in which its row exists
  uint32_t inverse;
};
// `rows`: row blocks of its pair.
SPMMD_HOST_DEVICE Share ShareOf(const Plan &plan, int rows, int rank, int row, int place) {
  const int cols = plan.Cols(rank);
  const int base = plan.depth == 1 ? cols : plan.depth == 2 ? cols / 2 : plan.depth == 4 ? cols / 4 : cols / plan.depth;
  const int longer = place < cols - base * plan.depth ? 1 : 0;
  Share share = {base + longer, 0, plan.steps_inverse[rank][longer]};
  for (int first = 0; first + row < rows && share.rounds < plan.rounds; first += plan.height) ++share.rounds;
  return share;
}
// Round (x) and step (y) of a warp's i-th chunk. A division takes several times as long, and this is on the way to a
// launch's first load. Exact while i < 2^22 / steps.
SPMMD_HOST_DEVICE IntPair Find(const Share &share, int i) {
  const int round = static_cast<int>(static_cast<uint32_t>(i) * share.inverse >> 22);
  return IntPair{round, i - round * share.steps};
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Dynamic shared memory: X rings, sums on their way between the warps of a row block, each CTA's own sums and those
// that come from the other CTA, chunk stages.
inline int64_t SlotBytes(int tokens, int chunk_cols) { return int64_t{tokens} * chunk_cols * 2; }
SPMMD_HOST_DEVICE int ExchangeBytes(const Plan &plan, int tiles) {
  return (plan.depth - 1) * plan.height * tiles * 512;
}
// Half of the row blocks and token tiles of all rounds.
SPMMD_HOST_DEVICE int SumBytes(const Plan &plan, int tiles) {
  return plan.rounds * ((plan.height * tiles + 1) / 2) * 512;
}
inline int64_t SharedBytes(const Plan &plan, int tokens, int chunk_cols, int64_t stage_bytes) {
  return plan.depth * (plan.slots * SlotBytes(tokens, chunk_cols)) + ExchangeBytes(plan, tokens / 8) +
         int64_t{2} * SumBytes(plan, tokens / 8) + plan.warps() * (plan.stages * stage_bytes);
}

// The cut with the lowest estimated time, or number `only` (from 1) of those tried; pairs == 0 when there is none.
// For layers of row_blocks[i] row blocks each.
inline Plan MakePlan(int multiprocessors, int64_t max_shared_bytes, const std::vector<int64_t> &row_blocks,
                     int64_t col_blocks, int tokens, int chunk_cols, int64_t stage_bytes, int only = 0) {
  // Fitted to measurements on an H200.
  constexpr double kLaunchUs = 2;
  constexpr double kBytesPerUsPerSm = 34e3;
  constexpr double kRoundUs = 1.2;
  const double warp_us = 0.2 / 32 * tokens;  // more warps start later and X in more rings
  // Decoding: latency limits a warp, the shared memory all of them.
  const double warp_elements_per_us = tokens <= 8 ? 2450 : tokens <= 16 ? 2500 : 2300;
  const double elements_per_us = tokens <= 8 ? 38e3 : tokens <= 16 ? 30e3 : 22e3;
  Plan best = {};
  const int64_t rows = RowsOfAPair(row_blocks, multiprocessors / 2);
  if (rows == 0) return best;
  int number = 0;
  for (int depth = 1; depth <= 5; ++depth) {
    for (int rounds = 1; rounds <= kMaxRounds; ++rounds) {
      Plan plan = {};
      plan.col_blocks = static_cast<int>(col_blocks);
      plan.depth = depth;
      plan.rounds = rounds;
      if (CeilDiv(rows, rounds) * depth > kMaxWarps) continue;
      plan.height = static_cast<int>(CeilDiv(rows, rounds));
      plan.rows = static_cast<int>(rows);
      if (rounds > 1 && int64_t{plan.height} * (rounds - 1) >= rows) continue;
      if (depth > 1 && plan.height > kMaxRowsShared) continue;
      if (depth > plan.Cols(0)) continue;
      if (int64_t{plan.Cols(0)} * (rounds + 1) * CeilDiv(plan.Cols(0), depth) >= 1 << 22) continue;
      for (plan.stages = 2; plan.stages > 0; --plan.stages) {
        for (plan.slots = std::min(4, kMaxSlots / depth); plan.slots >= 2; --plan.slots) {
          if (SharedBytes(plan, tokens, chunk_cols, stage_bytes) <= max_shared_bytes) break;
        }
        if (plan.slots >= 2) break;
      }
      if (plan.stages < 2) continue;
      if (only != 0 && ++number != only) continue;
      const double steps = static_cast<double>(rounds * CeilDiv(plan.Cols(0), depth));
      plan.us = std::max({steps * plan.warps() * static_cast<double>(stage_bytes) / kBytesPerUsPerSm,
                          steps * plan.warps() * 16 * chunk_cols / elements_per_us,
                          steps * 16 * chunk_cols / warp_elements_per_us});
      // Many warps on one ring of X wait for each other; more rings have fewer slots.
      if (plan.slots < 3) plan.us *= 1.03;
      if (plan.height > 16) plan.us *= 1.08;
      if (plan.depth > 2 && rounds > 1) plan.us *= 1.02;
      plan.us += kLaunchUs + kRoundUs * rounds + warp_us * plan.warps();
      if (best.pairs == 0 || plan.us < best.us) {
        plan.pairs = static_cast<int>(PairsOf(row_blocks, rows));
        for (int rank = 0; rank < 2; ++rank) {
          for (int longer = 0; longer < 2; ++longer) {
            const int64_t each = plan.Cols(rank) / depth + longer;
            plan.steps_inverse[rank][longer] = each == 0 ? 0 : static_cast<uint32_t>(CeilDiv(1 << 22, each));
          }
        }
        best = plan;
      }
    }
  }
  return best;
}

}  // namespace spmmd::cuda::stream

#endif  // SPMMD_KERNELS_CUDA_STREAM_SCHEDULE_H_
