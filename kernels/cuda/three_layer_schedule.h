// How a launch of three_layer_spmm is cut into work. Plain C++, so that a test without a GPU can prove that every tile
// is multiplied once and every partial sum added once.
#ifndef SPMMD_KERNELS_CUDA_THREE_LAYER_SCHEDULE_H_
#define SPMMD_KERNELS_CUDA_THREE_LAYER_SCHEDULE_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/host_device.h"

namespace spmmd::cuda::three_layer_plan {

inline constexpr int kMaxTeams = 7;
inline constexpr int kMaxWarps = 16;  // 128 registers a thread: two a team, up to four that fetch
inline constexpr int kMaxStages = 4;
inline constexpr int kMaxBoxes = 8;
inline constexpr int kPartialsPerCta = 2;
inline constexpr int64_t kValueBytes = 8192;
inline constexpr int64_t kMetadataBytes = 1024;
inline constexpr int64_t kMaxCodeBytes = 2048;  // staged in shared memory; a tile with more reads its codes from L2
inline constexpr int64_t kResidualBytes = 320;  // so too

// A team of two warps works on a tile; a unit is one tile for each team, `height` of them along M and `depth` along K.
// A block is `height` rows of tiles. CTA c has units [Begin(c), Begin(c + 1)), block by block along K. The part of a
// block that a CTA has is a segment; a block of several segments is added up from partial sums.
struct Plan {
  int row_tiles;
  int col_tiles;
  int ctas;
  int height;
  int depth;
  int helpers;         // warps that fetch
  int stages;          // tiles that a team has in shared memory or on their way there
  int boxes;           // tiles of X in shared memory for each place along K
  int code_bytes;      // that a stage has room for
  int residual_bytes;  // that a stage has room for
  int scratch;         // bytes a team: W_r, and sums on their way between teams
  int surplus;         // 0: no tile of the layer has any
  int block_units;     // units of a block
  int share;           // units of a CTA; the first `extra` have one more
  int extra;

  SPMMD_HOST_DEVICE int teams() const { return height * depth; }
  SPMMD_HOST_DEVICE int blocks() const { return (row_tiles + height - 1) / height; }
  SPMMD_HOST_DEVICE int units() const { return blocks() * block_units; }
  SPMMD_HOST_DEVICE int Begin(int cta) const { return cta * share + Min(cta, extra); }
  // The CTA that has `unit`.
  SPMMD_HOST_DEVICE int Owner(int unit) const {
    const int longer = extra * (share + 1);
    return unit < longer ? unit / (share + 1) : extra + (unit - longer) / share;
  }
  // The first and the last CTA that have a segment of `block`; equal when there is nothing to add up.
  SPMMD_HOST_DEVICE IntPair Owners(int block) const {
    return IntPair{Owner(block * block_units), Owner((block + 1) * block_units - 1)};
  }
  // Which of the partial sums a CTA's segment of `block` is, when it is one: only its first and last segment can be.
  SPMMD_HOST_DEVICE int Partial(int cta, int block) const {
    return cta * kPartialsPerCta + (Begin(cta) >= block * block_units ? 0 : 1);
  }

  // Cuts the matrix for at most `most_ctas` CTAs.
  void Cut(int most_ctas) {
    block_units = (col_tiles + depth - 1) / depth;
    const int all = units();
    ctas = std::min(most_ctas, all);
    share = all / ctas;
    extra = all % ctas;
  }
};

// Dynamic shared memory of a launch.
inline int64_t SharedBytes(const Plan& plan, int tokens) {
  return int64_t{plan.depth} * plan.boxes * tokens * 256 +
         int64_t{plan.teams()} *
             (plan.stages * (kValueBytes + kMetadataBytes + plan.code_bytes + plan.residual_bytes) + plan.scratch);
}

// variant: 0 for the usual cut, 1 to 12 for others that benchmarks try.
//
// Measured on an H200: with few rows of tiles partial sums count, and whole units a CTA; with many it pays to read X
// less often, which more teams along M do, the more so the more tokens there are.
inline Plan MakePlan(int multiprocessors, int64_t max_shared_bytes, int64_t row_tiles, int64_t col_tiles, int tokens,
                     int64_t max_code_bytes, bool surplus, int variant) {
  constexpr struct {
    int height, depth, stages;
  } kCuts[] = {{2, 3, 2}, {3, 2, 2}, {6, 1, 2}, {1, 6, 2}, {2, 2, 3}, {1, 4, 3},
               {1, 5, 2}, {2, 2, 2}, {4, 1, 3}, {5, 1, 2}, {2, 3, 3}, {1, 7, 2}};
  const auto usual = [&]() -> size_t {
    if (row_tiles < 96) return 7;
    if (!surplus) return tokens <= 32 ? 4 : 1;
    return tokens == 64 && row_tiles >= 256 ? 2 : 1;
  };
  Plan plan = {};
  plan.row_tiles = static_cast<int>(row_tiles);
  plan.col_tiles = static_cast<int>(col_tiles);
  plan.code_bytes = static_cast<int>(std::min(max_code_bytes, kMaxCodeBytes));
  plan.surplus = surplus ? 1 : 0;
  plan.residual_bytes = surplus ? static_cast<int>(kResidualBytes) : 0;
  // Sums of all four strips at once, but of N = 64 half of them.
  plan.scratch = surplus ? static_cast<int>(kValueBytes) : std::min(tokens * 256, static_cast<int>(kValueBytes));
  const auto& cut = kCuts[variant > 0 && variant <= 12 ? static_cast<size_t>(variant - 1) : usual()];
  plan.height = cut.height;
  plan.depth = cut.depth;
  plan.stages = cut.stages;
  plan.boxes = plan.depth > 1 ? 4 : 6;
  const auto fits = [&] { return SharedBytes(plan, tokens) <= max_shared_bytes; };
  while (!fits() && plan.boxes > 2) --plan.boxes;
  while (!fits() && plan.stages > 1) --plan.stages;
  while (!fits() && plan.height > 1) --plan.height;
  while (!fits() && plan.depth > 1) --plan.depth;
  plan.helpers = std::min(4, kMaxWarps - 2 * plan.teams());
  plan.Cut(multiprocessors);
  return plan;
}

}  // namespace spmmd::cuda::three_layer_plan

#endif  // SPMMD_KERNELS_CUDA_THREE_LAYER_SCHEDULE_H_
