// ROW_STREAM: the format of the CUDA SpMV kernel (N = 1..3). Design, section 3.
//
// Rows are grouped into tiles of `rows_per_tile` rows, one tile a thread block of `warps` warps. Inside a tile every
// row's nonzeros are cut into equal pieces and thread t owns piece t / rows_per_tile of row t % rows_per_tile. A piece
// is a run-length coded list of slots: a slot skips `run` columns and then holds one value; a gap longer than the run
// field is bridged by slots of value zero. All lanes of a warp advance together through blocks of 16 slots a lane whose
// loads are 16 bytes wide and coalesced; row_stream_layout.h has the bytes.
//
// Values are verbatim (fp16, bf16) or losslessly coded (bf16: 10 or 11 bits, an exponent base a row, exceptions in an
// escape list); the packer takes what is smallest for the layer.
//
// Bytes of the dense matrix at 30 / 50 / 70 % sparsity: verbatim about 80 / 61 / 38 %, coded about 55 / 42 / 27 %.
#ifndef SPMMD_KERNELS_FORMAT_ROW_STREAM_H_
#define SPMMD_KERNELS_FORMAT_ROW_STREAM_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/format/dense.h"
#include "kernels/format/packed_layer.h"
#include "kernels/format/row_stream_layout.h"

namespace spmmd::row_stream {

// What the packer is free to choose. Everything left at its default is picked per layer by a model of bytes moved and
// of how evenly the tiles spread over the device.
struct Options {
  std::optional<Coding> coding = std::nullopt;   // coded forms need bf16: INVALID_ARGUMENT otherwise
  int run_bits = 0;                              // 2 or 4
  int rows_per_tile = 0;                         // 1..kMaxRowsPerTile, at most 32 * warps
  int warps = 0;                                 // 1..kMaxWarps
  std::optional<bool> sort_rows = std::nullopt;  // group rows of like length and store the order
  int64_t segment_columns = 0;                   // 8..kMaxSegmentColumns: columns a tile covers; K when it fits
  int multiprocessors = 132;                     // of the device that the tiles should spread over
};

// fp16 and bf16, any shape. PackOptions as in Pack().
absl::StatusOr<PackedLayer> Pack(const DenseView& w, const PackOptions& options, const Options& tuning = {});

// Writes the nonzeros into `out` [M, K], zero-filled by the caller. Safe on bytes that fail Validate.
absl::Status Unpack(const PackedLayer& layer, const MutableDenseView& out);

// Everything that Unpack and the kernels rely on, down to every lane's last column. DATA_LOSS naming the
// section otherwise.
absl::Status Validate(const PackedLayer& layer);

// Nonzeros that the coding could not hold: entries of the escape list.
int64_t CountEscapes(const PackedLayer& layer);

}  // namespace spmmd::row_stream

#endif  // SPMMD_KERNELS_FORMAT_ROW_STREAM_H_
