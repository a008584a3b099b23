// Y = activation(X * W^T + bias) for few tokens on a ROW_STREAM layer: what the kernel takes, and who may launch it.
#ifndef SPMMD_KERNELS_CUDA_ROW_STREAM_SPMV_H_
#define SPMMD_KERNELS_CUDA_ROW_STREAM_SPMV_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/internal.h"
#include "kernels/format/row_stream_layout.h"

namespace spmmd::cuda {

// Layers of one launch that share their activations (q, k and v; gate and up).
inline constexpr int kMaxGroup = 4;
// Tokens of one launch; more take several.
inline constexpr int kMaxSpmvTokens = 3;

// thread / rows_per_tile == thread * row_reciprocal >> kReciprocalBits, exact because neither exceeds 512.
inline constexpr int kReciprocalBits = 18;
static_assert(row_stream::kMaxRowsPerTile * row_stream::kWarpLanes * row_stream::kMaxWarps <= 1 << kReciprocalBits);

struct RowStreamLayerArgs {
  const uint8_t* stream;
  const uint16_t* starts;
  const row_stream::TileHeader* tiles;
  const uint8_t* bases;       // null unless coded
  const uint32_t* escapes;    // null unless coded
  const uint32_t* row_order;  // null unless sorted
  const float* bias;          // null or [m]
  void* y;
  int64_t y_stride;
  int32_t y_dtype;
  int32_t activation;
  int32_t m;
  int32_t rows_per_tile;
  int32_t pieces;
  int32_t uniform_blocks;
  uint32_t first_tile;      // of this layer within the grid
  uint32_t row_reciprocal;  // ceil(2^kReciprocalBits / rows_per_tile)
};

template <int kLayers>
struct RowStreamArgsOf {
  const void* x;
  int64_t x_stride;
  int32_t x_dtype;
  int32_t k;
  int32_t segment_columns;
  int32_t segments;
  int32_t staged_columns;  // columns of shared memory, padding included: a multiple of 8
  int32_t layers;
  int32_t x_early;  // x is there when the kernel starts, and its first vectors may be loaded before the stream
  RowStreamLayerArgs layer[kLayers];
};
// What the host fills in; kernels of one layer take the part they need.
using RowStreamArgs = RowStreamArgsOf<kMaxGroup>;

// kSingle: one layer, K in one segment. The loops over layers or segments cost registers and cold instructions, so each
// is a kernel of its own.
enum class RowStreamMode : uint8_t { kSingle, kGrouped, kSegmented };

// Variant 0 prefetches two blocks of the stream in 40 registers (48 warps a multiprocessor), variant 1 three in 64 (32
// warps); one token of the weights' own type only.
inline constexpr int kRowStreamAuto = -1;
inline constexpr int kRowStreamVariants = 2;

// What selects a kernel.
struct RowStreamKernelKey {
  row_stream::Coding coding;
  bool bf16;
  int run_bits;
  int tokens;   // 1..kMaxSpmvTokens
  bool wide_x;  // activations staged as fp32: fp32 ones, and 16-bit ones of another type than the weights
  RowStreamMode mode;
  int variant;
};

// One translation unit a value coding. Null for a key of another coding.
const void* RowStreamKernelF16(const RowStreamKernelKey& key);
const void* RowStreamKernelBf16(const RowStreamKernelKey& key);
const void* RowStreamKernelCode2(const RowStreamKernelKey& key);
const void* RowStreamKernelCode3(const RowStreamKernelKey& key);

// One launch for up to kMaxGroup layers with equal K, dtype, coding, run bits, warps and segment width that read the
// same x: `calls[i]` belongs to `layers[i]` and differs only in y, y_stride, bias and activation. INVALID_ARGUMENT
// naming the field otherwise.
Status LaunchRowStreamGroup(const spmmd_cuda_layer* const* layers, const Call* calls, int count, int variant,
                            cudaStream_t stream);

Status ValidateRowStream(const LayerDesc& desc);

extern const Kernel kRowStreamSpmv;

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_ROW_STREAM_SPMV_H_
