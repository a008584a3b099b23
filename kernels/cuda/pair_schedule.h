// How a launch of spmm_pair is cut into work. Plain C++, so that a test without a GPU can prove that every chunk is
// multiplied once.
#ifndef SPMMD_KERNELS_CUDA_PAIR_SCHEDULE_H_
#define SPMMD_KERNELS_CUDA_PAIR_SCHEDULE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cuda/host_device.h"
#include "kernels/cuda/paired_rows.h"

namespace spmmd::cuda::pair {

inline constexpr int kWarps = 16;
inline constexpr int kMaxStages = 4;
inline constexpr int kMaxRows = kWarps;  // row blocks a pair: more would make a warp work on three of them
inline constexpr int kBoxCols = 64;      // X lies in boxes of 64 columns x all tokens
inline constexpr int kGroupCols = 512;   // columns of X that arrive together
inline constexpr int kMaxGroups = 64;

// How a launch is cut; the same numbers on host and device.
struct Plan {
  int col_blocks;
  int pairs;                 // of CTAs
  int rows;                  // row blocks a pair; a layer's last may have fewer
  int stages;                // chunks in flight a warp
  uint32_t cols_inverse[2];  // of Cols(rank): 2^22 / cols, rounded up

  // Row blocks of a layer's pair number `pair`.
  SPMMD_HOST_DEVICE int Rows(int row_blocks, int pair) const { return Min(rows, row_blocks - pair * rows); }
  // What a CTA gets from the other: sums of half of the row blocks and token tiles.
  SPMMD_HOST_DEVICE int InboxBytes(int tiles) const { return (rows * tiles + 1) / 2 * 512; }
  // Column blocks of a rank: the first half, rounded up, is rank 0's.
  SPMMD_HOST_DEVICE int Cols(int rank) const { return rank == 0 ? col_blocks - col_blocks / 2 : col_blocks / 2; }
  // The row block, of the pair's, of item `item`; a division takes several times as long, and this is on the way to a
  // launch's first load. Exact because items are fewer than 2^22 / cols.
  SPMMD_HOST_DEVICE int RowOf(int rank, int item) const {
    return static_cast<int>(static_cast<uint32_t>(item) * cols_inverse[rank] >> 22);
  }
  SPMMD_HOST_DEVICE int FirstCol(int rank) const { return rank == 0 ? 0 : col_blocks - col_blocks / 2; }
};

// A CTA's chunks are numbered row block by row block; each warp takes an equal run of them. The first of warp `warp`:
SPMMD_HOST_DEVICE int FirstItem(int items, int warp) { return items * warp / kWarps; }

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Dynamic shared memory: X's part, sums on their way between the CTAs, chunk stages.
inline int64_t ActivationBytes(const Plan &plan, int tokens, int chunk_cols) {
  return int64_t{plan.Cols(0)} * chunk_cols * tokens * 2;
}
inline int64_t SharedBytes(const Plan &plan, int tokens, int chunk_cols, int64_t stage_bytes) {
  return ActivationBytes(plan, tokens, chunk_cols) + plan.InboxBytes(tokens / 8) + kWarps * (plan.stages * stage_bytes);
}

// For layers of row_blocks[i] row blocks each. pairs == 0 when they are too large for this kernel, or their chunks are.
inline Plan MakePlan(int multiprocessors, int64_t max_shared_bytes, const std::vector<int64_t> &row_blocks,
                     int64_t col_blocks, int tokens, int chunk_cols, int64_t stage_bytes, int most_stages) {
  Plan plan = {};
  const int64_t rows = RowsOfAPair(row_blocks, multiprocessors / 2);
  if (rows == 0 || rows > kMaxRows) return plan;
  plan.col_blocks = static_cast<int>(col_blocks);
  plan.rows = static_cast<int>(rows);
  if (CeilDiv(int64_t{plan.Cols(0)} * chunk_cols, kGroupCols) > kMaxGroups) return plan;
  const int64_t most_items = CeilDiv(int64_t{plan.rows} * plan.Cols(0), kWarps);
  // A warp leaves its sums, of two row blocks at most, where its chunks were.
  const int64_t sums = int64_t{2} * tokens / 8 * 512;
  for (plan.stages = static_cast<int>(std::min<int64_t>(most_stages, most_items)); plan.stages > 0; --plan.stages) {
    if (SharedBytes(plan, tokens, chunk_cols, stage_bytes) <= max_shared_bytes) break;
  }
  if (plan.stages < std::min<int64_t>(2, most_items) || plan.stages * stage_bytes < sums) return plan;
  plan.pairs = static_cast<int>(PairsOf(row_blocks, plan.rows));
  for (int rank = 0; rank < 2; ++rank) {
    plan.cols_inverse[rank] = plan.Cols(rank) == 0 ? 0 : static_cast<uint32_t>(CeilDiv(1 << 22, plan.Cols(rank)));
  }
  return plan;
}

}  // namespace spmmd::cuda::pair

#endif  // SPMMD_KERNELS_CUDA_PAIR_SCHEDULE_H_
