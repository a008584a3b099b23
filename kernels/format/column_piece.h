// COLUMN_PIECE: the format of the CUDA SpMspV kernel, which touches only the columns whose activation is not zero.
//
// W is cut into row blocks of 512 rows; a piece is one column of one block: a 64-byte bitmap and the nonzeros as eight
// streams of 64 rows, side by side in units of four values a stream. All eight get as many places as their mean length
// needs, and the last values of a longer stream lie in the unused places of a shorter one. The order
// of rows inside a stream is that of the tensor core's A fragment, so that a warp which holds four active columns feeds
// them to it without moving a value between lanes; column_piece_layout.h has the bytes. A piece is found through one
// descriptor a column; an empty piece takes no bytes.
//
// Bytes of the dense matrix at 30 / 50 / 70 % sparsity: about 82 / 62 / 42 %, read only for active columns. Layout
// version 1 padded every stream to the longest: 87 / 67 / 47 %.
#ifndef SPMMD_KERNELS_FORMAT_COLUMN_PIECE_H_
#define SPMMD_KERNELS_FORMAT_COLUMN_PIECE_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/format/dense.h"
#include "kernels/format/packed_layer.h"

namespace spmmd::column_piece {

// fp16 and bf16, any shape; RESOURCE_EXHAUSTED when one row block needs 4 GiB. The cases of the switches in
// packed_layer.h; see there.
absl::StatusOr<PackedLayer> Pack(const DenseView& w, const PackOptions& options);
absl::Status Unpack(const PackedLayer& layer, const MutableDenseView& out);
absl::Status Validate(const PackedLayer& layer);

}  // namespace spmmd::column_piece

#endif  // SPMMD_KERNELS_FORMAT_COLUMN_PIECE_H_
