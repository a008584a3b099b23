// How a launch of spmm_portable is cut into work. Plain C++, so that a test without a GPU can prove that every chunk is
// multiplied once.
#ifndef SPMMD_KERNELS_CUDA_PORTABLE_SCHEDULE_H_
#define SPMMD_KERNELS_CUDA_PORTABLE_SCHEDULE_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/host_device.h"

namespace spmmd::cuda::portable {

inline constexpr int kMaxWarps = 8;     // of a CTA, each with a row block of its own
inline constexpr int kChunkStages = 2;  // chunks in flight a warp
inline constexpr int kBoxStages = 3;    // boxes of X in flight a CTA
inline constexpr int kMaxSplits = 32;
// A box is all tokens of a tile x this many columns.
SPMMD_HOST_DEVICE constexpr int BoxCols(int tokens) { return tokens <= 8 ? 128 : 64; }

// How a launch is cut; the same numbers on host and device. A CTA takes the row blocks of one row tile and the tokens
// of one token tile over one of `splits` parts of K.
struct Plan {
  int row_blocks;
  int col_blocks;
  int warps;   // row blocks of a row tile; 0: the layer's chunks are too large
  int tokens;  // of a token tile: 8, 16, 32 or 64
  int row_tiles;
  int token_tiles;
  int splits;

  // The first column block of part `split`.
  SPMMD_HOST_DEVICE int FirstCol(int split) const {
    return static_cast<int>(static_cast<int64_t>(col_blocks) * split / splits);
  }
};

struct Limits {
  int multiprocessors;
  int64_t shared_per_block;  // dynamic
  int64_t shared_per_multiprocessor;
};

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t BoxBytes(int tokens) { return int64_t{tokens} * BoxCols(tokens) * 2; }
// Dynamic shared memory: X, chunk stages.
inline int64_t SharedBytes(int tokens, int warps, int64_t stage_bytes) {
  return kBoxStages * BoxBytes(tokens) + int64_t{warps} * kChunkStages * stage_bytes;
}

inline Plan MakePlan(const Limits& limits, int64_t row_blocks, int64_t col_blocks, int64_t n, int64_t stage_bytes,
                     int64_t max_tiles_with_counters) {
  constexpr int64_t kSystemShared = 1024;  // of every CTA
  constexpr int kMaxResidentWarps = 16;    // by registers
  // What a CTA costs beside its chunks, in chunks: its start, the latency of its first loads, its end.
  constexpr double kStart = 2.0;
  constexpr double kSplit = 0.05;  // a part more to add up
  Plan plan = {};
  plan.row_blocks = static_cast<int>(row_blocks);
  plan.col_blocks = static_cast<int>(col_blocks);
  plan.tokens = n <= 8 ? 8 : n <= 16 ? 16 : n <= 32 ? 32 : 64;
  plan.token_tiles = static_cast<int>(CeilDiv(n, plan.tokens));
  // More row blocks share each box of X, which counts where X is not small beside the weights; fewer leave more CTAs a
  // multiprocessor to hide each other's waits.
  plan.warps = plan.tokens <= 16 ? 4 : kMaxWarps;
  while (plan.warps > 1 && plan.warps / 2 >= row_blocks) plan.warps /= 2;
  const auto shared = [&] { return SharedBytes(plan.tokens, plan.warps, stage_bytes); };
  const auto resident = [&] {
    return std::min<int64_t>(limits.shared_per_multiprocessor / (shared() + kSystemShared),
                             kMaxResidentWarps / plan.warps);
  };
  while (plan.warps > 1 && (shared() > limits.shared_per_block || resident() < 1)) plan.warps /= 2;
  if (shared() > limits.shared_per_block) {
    plan.warps = 0;
    return plan;
  }
  plan.row_tiles = static_cast<int>(CeilDiv(row_blocks, plan.warps));
  const int64_t at_once = std::max<int64_t>(1, resident()) * limits.multiprocessors;
  const int64_t tiles = int64_t{plan.row_tiles} * plan.token_tiles;
  double best = 0;
  for (int splits = 1; splits <= std::min<int64_t>(kMaxSplits, col_blocks); ++splits) {
    if (splits > 1 && tiles > max_tiles_with_counters) break;
    const double each = static_cast<double>(CeilDiv(col_blocks, splits)) + kStart + kSplit * (splits - 1);
    const double cost = static_cast<double>(CeilDiv(tiles * splits, at_once)) * each;
    if (plan.splits == 0 || cost < best) {
      plan.splits = splits;
      best = cost;
    }
  }
  return plan;
}

}  // namespace spmmd::cuda::portable

#endif  // SPMMD_KERNELS_CUDA_PORTABLE_SCHEDULE_H_
