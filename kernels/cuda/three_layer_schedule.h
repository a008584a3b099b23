// How a launch of three_layer_spmm is cut into work. Plain C++, so that a test without a GPU can prove that every tile
// is multiplied once and every partial sum added once.
#ifndef SPMMD_KERNELS_CUDA_THREE_LAYER_SCHEDULE_H_
#define SPMMD_KERNELS_CUDA_THREE_LAYER_SCHEDULE_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/host_device.h"

namespace spmmd::cuda::three_layer_plan {

inline constexpr int kMaxStages = 4;
inline constexpr int kMaxBoxes = 8;
inline constexpr int kPartialsPerCta = 2;
inline constexpr int kTileRows = 64;
inline constexpr int64_t kValueBytes = 8192;
inline constexpr int64_t kMetadataBytes = 1024;
inline constexpr int64_t kTurnBytes = 512;      // a warp's place for turning fragments into rows
inline constexpr int64_t kMaxCodeBytes = 2048;  // staged in shared memory; a tile with more reads its codes from L2

// A block is one row of tiles for each warp; a unit is one tile for each warp, block by block along K. CTA c has units
// [Begin(c), Begin(c + 1)). The part of a block that a CTA has is a segment; a block of several segments is added up
// from partial sums.
struct Plan {
  int row_tiles;
  int col_tiles;
  int ctas;
  int warps;
  int stages;      // tiles that a warp has in shared memory or on their way there
  int boxes;       // tiles of X in shared memory
  int code_bytes;  // that a stage has room for
  int surplus;     // 0: no tile of the layer has any, and there is no room for it

  SPMMD_HOST_DEVICE int blocks() const { return (row_tiles + warps - 1) / warps; }
  SPMMD_HOST_DEVICE int units() const { return blocks() * col_tiles; }
  SPMMD_HOST_DEVICE int Begin(int cta) const {
    const int all = units();
    return cta * (all / ctas) + Min(cta, all % ctas);
  }
  // The CTA that has `unit`.
  SPMMD_HOST_DEVICE int Owner(int unit) const {
    const int all = units();
    const int share = all / ctas;
    const int longer = all % ctas * (share + 1);
    return unit < longer ? unit / (share + 1) : all % ctas + (unit - longer) / share;
  }
  // The first and the last CTA that have a segment of `block`; equal when there is nothing to add up.
  SPMMD_HOST_DEVICE IntPair Owners(int block) const {
    return IntPair{Owner(block * col_tiles), Owner((block + 1) * col_tiles - 1)};
  }
  // Which of a CTA's partial sums its segment of `block` is, when it is one: only its first and its last segment can
  // be.
  SPMMD_HOST_DEVICE int Partial(int cta, int block) const {
    return cta * kPartialsPerCta + (Begin(cta) / col_tiles == block ? 0 : 1);
  }
};

// Dynamic shared memory of a launch.
inline int64_t BoxBytes(int tokens) { return int64_t{tokens} * 256; }
inline int64_t SharedBytes(const Plan& plan, int tokens) {
  return plan.boxes * BoxBytes(tokens) + plan.warps * (plan.stages * (kValueBytes + kMetadataBytes + plan.code_bytes) +
                                                       (plan.surplus != 0 ? kValueBytes : 0) + kTurnBytes);
}

// variant: 0 for the usual cut, 1 to 8 for others that benchmarks try.
inline Plan MakePlan(int multiprocessors, int64_t max_shared_bytes, int64_t row_tiles, int64_t col_tiles, int tokens,
                     int64_t max_code_bytes, bool surplus, int max_warps, int variant) {
  Plan plan = {};
  plan.row_tiles = static_cast<int>(row_tiles);
  plan.col_tiles = static_cast<int>(col_tiles);
  plan.code_bytes = static_cast<int>(std::min(max_code_bytes, kMaxCodeBytes));
  plan.surplus = surplus ? 1 : 0;
  plan.boxes = tokens <= 16 ? 6 : tokens == 32 ? 4 : 3;
  const struct { int warps, stages; } choices[] = {{7, 1}, {11, 1}, {7, 2}, {6, 2}, {8, 2}, {11, 2}, {5, 3}, {7, 3}};
  const auto fits = [&] { return plan.warps <= max_warps && SharedBytes(plan, tokens) <= max_shared_bytes; };
  if (variant > 0 && variant <= 8) {
    plan.warps = choices[variant - 1].warps;
    plan.stages = choices[variant - 1].stages;
  } else {
    plan.warps = surplus && tokens > 16 ? 6 : 7;
    plan.stages = surplus ? 2 : 3;
  }
  while (!fits() && plan.boxes > 2) --plan.boxes;
  while (!fits() && plan.stages > 1) --plan.stages;
  while (!fits() && plan.warps > 1) --plan.warps;
  plan.ctas = static_cast<int>(std::min<int64_t>(multiprocessors, plan.units()));
  return plan;
}

}  // namespace spmmd::cuda::three_layer_plan

#endif  // SPMMD_KERNELS_CUDA_THREE_LAYER_SCHEDULE_H_
