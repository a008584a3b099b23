// BITMAP_GPU: one bit an element plus packed values, in the order in which the CUDA SpMM kernels consume them.
//
// The matrix is cut into self-contained chunks of 16 rows x 128 or 256 columns, each fetched by one bulk copy into
// shared memory and decoded by one warp straight into the A fragments of the tensor cores. Every lane walks two value
// streams of its own, one in each half of its own shared-memory bank, so that no access ever conflicts, whatever the
// mask. Streams that are longer than the chunk's average continue in the unused end of a shorter one, which cuts the
// padding from about 21 % of the values to about 7 % at 50 % sparsity. Bytes per element (dense: 2), 256 / 128 columns:
// 1.22 / 1.28 at 50 % sparsity, 0.81 / 0.88 at 70 %. The layout depends on neither the device nor the batch size.
//
// The byte-exact specification is bitmap_gpu_layout.h. fp16 and bf16 only.
#ifndef SPMMD_KERNELS_FORMAT_BITMAP_GPU_H_
#define SPMMD_KERNELS_FORMAT_BITMAP_GPU_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/format/packed_layer.h"

namespace spmmd::bitmap_gpu {

// Columns of a chunk that suit the matrix: 256 costs fewer bytes, 128 shortens what one warp does at a time, which is
// what counts when all of the matrix is in flight at once.
int DefaultChunkCols(int64_t m, int64_t k);

// chunk_cols: 128, 256, or 0 for DefaultChunkCols. INVALID_ARGUMENT for fp32, for non-finite weights unless allowed,
// and for a matrix whose packed form would exceed 64 GiB.
absl::StatusOr<PackedLayer> Pack(const DenseView& w, const PackOptions& options, int chunk_cols = 0);

// `layer` has passed Validate; `out` has its shape and dtype.
absl::Status Unpack(const PackedLayer& layer, const MutableDenseView& out);

absl::Status Validate(const PackedLayer& layer);

}  // namespace spmmd::bitmap_gpu

#endif  // SPMMD_KERNELS_FORMAT_BITMAP_GPU_H_
