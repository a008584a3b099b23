// Y = activation(X * W^T + bias) on the CPU, for every format that has a CPU kernel.
#ifndef SPMMD_KERNELS_CPU_MATMUL_H_
#define SPMMD_KERNELS_CPU_MATMUL_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/base/activation.h"
#include "kernels/base/thread_pool.h"
#include "kernels/format/dense.h"
#include "kernels/format/packed_layer.h"

namespace spmmd {

// Applied in fp32 to the accumulator, bias first.
struct Epilogue {
  absl::Span<const float> bias;  // [M], or empty
  Activation activation = Activation::kNone;
};

// One token's activation vector given by its nonzeros: x[indices[i]] = values[i].
struct SparseVector {
  absl::Span<const uint32_t> indices;  // strictly ascending, all < K
  absl::Span<const float> values;      // same length
};

namespace cpu {

// What ran, for metrics and GetLayer.
struct LaunchInfo {
  std::string_view kernel;  // e.g. "bitmap_spmv_avx3_dl": static storage
  int64_t bytes = 0;        // weights, metadata, activations read and outputs written, once each
  int64_t flops = 0;        // 2 * nnz * N (SpMM, SpMV), 2 * the touched nonzeros (SpMspV)
};

// True when CpuMatmul executes this format: BITMAP and DENSE.
bool CanExecute(Format format);

// x: [N, K], any dtype; y: [N, M], any dtype, fully overwritten; accumulation in fp32. N >= 0 (0 does nothing).
// INVALID_ARGUMENT naming the field when shapes disagree; UNIMPLEMENTED for a format without a CPU kernel. The layer
// must have passed Validate(): the bytes are trusted here.
absl::Status Matmul(const PackedLayer& w, const DenseView& x, const Epilogue& epilogue, const MutableDenseView& y,
                    ThreadPool& pool, LaunchInfo* info = nullptr);

// SpMspV: only the columns of W named by x are touched. y: [1, M], fully overwritten: an empty x gives
// activation(bias). INVALID_ARGUMENT naming the position for an index out of range, unsorted or repeated.
absl::Status MatmulSparse(const PackedLayer& w, const SparseVector& x, const Epilogue& epilogue,
                          const MutableDenseView& y, ThreadPool& pool, LaunchInfo* info = nullptr);

// The nonzeros of one row with |x| > threshold (threshold >= 0; 0 keeps every nonzero), in ascending order.
void Sparsify(const DenseView& x, int64_t row, float threshold, std::vector<uint32_t>* indices,
              std::vector<float>* values);

}  // namespace cpu
}  // namespace spmmd

#endif  // SPMMD_KERNELS_CPU_MATMUL_H_
