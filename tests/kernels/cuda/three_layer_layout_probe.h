// Runs a packed THREE_LAYER matrix through sparse tensor cores by the letter of three_layer.h, and nothing else: the
// proof that its fragment and metadata order are the hardware's. Not a fast kernel.
#ifndef SPMMD_TESTS_KERNELS_CUDA_THREE_LAYER_LAYOUT_PROBE_H_
#define SPMMD_TESTS_KERNELS_CUDA_THREE_LAYER_LAYOUT_PROBE_H_

#include <cstddef>
#include <cstdint>

namespace spmmd::testing {

inline constexpr int kProbeTokens = 8;

struct ThreeLayerSections {
  const uint16_t* values;
  const uint32_t* metadata;
  const uint32_t* code_offsets;
  const uint8_t* codes;
  const uint64_t* residual_offsets;
  const uint16_t* residual_positions;
  const uint16_t* residual_values;
  size_t code_bytes;
  size_t residual_entries;
};

// y[8][m] = x[8][k] * W^T in fp16 with fp32 accumulation, host pointers. `use_wgmma` takes wgmma.mma_async.sp.m64n8k32,
// else mma.sp.m16n8k32. Returns null, or what CUDA said.
const char* ProbeThreeLayer(const ThreeLayerSections& w, int64_t m, int64_t k, const uint16_t* x, float* y,
                            bool use_wgmma);

// Whether a GPU that has both instructions is there.
bool HasHopperGpu();

}  // namespace spmmd::testing

#endif  // SPMMD_TESTS_KERNELS_CUDA_THREE_LAYER_LAYOUT_PROBE_H_
