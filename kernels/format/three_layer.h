// THREE_LAYER: 2:4 slots for the sparse tensor cores, surplus nonzeros parked in unused slots, and a sparse rest; after
// "Accelerating GPU Inference of Large Language Models with Moderately Unstructured Sparse Weight Matrices" (DAC '26),
// sections 3 and 4. fp16 and bf16.
//
// The byte-exact specification is three_layer_layout.h.
#ifndef SPMMD_KERNELS_FORMAT_THREE_LAYER_H_
#define SPMMD_KERNELS_FORMAT_THREE_LAYER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/format/dense.h"
#include "kernels/format/packed_layer.h"
#include "kernels/format/three_layer_layout.h"

namespace spmmd::three_layer {

// INVALID_ARGUMENT for fp32; RESOURCE_EXHAUSTED.
absl::StatusOr<PackedLayer> Pack(const DenseView& w, const PackOptions& options);
// Called by spmmd::Unpack and Validate, which see to what is common to all formats.
absl::Status Unpack(const PackedLayer& layer, const MutableDenseView& out);
absl::Status Validate(const PackedLayer& layer);

// Where the nonzeros went. sparse_tc + slot_filled + residual == nnz.
struct Stats {
  int64_t nnz = 0;
  int64_t sparse_tc = 0;    // in W_t's own slots
  int64_t slot_filled = 0;  // parked, moved to W_r
  int64_t residual = 0;
  int64_t dummy_codes = 0;   // cross long gaps
  int64_t filler_codes = 0;  // ends of threads' codes
  int64_t tiles = 0;
  int64_t tiles_without_filling = 0;  // no surplus: a kernel needs the Sparse-TC layer alone
  size_t values_bytes = 0;
  size_t metadata_bytes = 0;
  size_t code_bytes = 0;      // sections 3 and 4
  size_t residual_bytes = 0;  // sections 5 to 7
};
// Counts over a valid layer.
Stats ComputeStats(const PackedLayer& layer);

}  // namespace spmmd::three_layer

#endif  // SPMMD_KERNELS_FORMAT_THREE_LAYER_H_
