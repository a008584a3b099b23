// RLC_CSC: compressed sparse columns with n-bit run lengths, after Celty (SpMspV on the SIMT cores). A column is
// skipped without touching its bytes, and one warp-wide 128-bit load brings what it holds of 256 rows. fp16 and bf16.
//
// Tiles. W is cut into tiles of 256 rows x 64 columns (a warp's share in the paper). Tile (i, j) has rows
// [256 i, 256 i + 256) and columns [64 j, 64 j + 64), clipped at M and K, and number i * ceil(K / 64) + j. Within a
// tile each column is a sequence of entries.
//
// Entries. An entry is a value and a run length r in [0, 2^n - 1]: it stands r + 1 rows behind the entry before it, the
// first one at row r of the tile. A gap of more than 2^n - 1 zeros is bridged by padding entries of value 0 and run
// 2^n - 1, each covering 2^n rows (EIE's rule: a decoder adds r + 1 for every entry and needs no case for padding; the
// paper's worked example counts 2^n - 1 rows instead). Zeros behind the last nonzero have no entry, so a column has at
// most 256. n is 2 to 8, 4 by default.
//
// Units. Entries are stored eight to a unit, the 128-bit load of one lane: 16 bytes of values, and n bytes of run
// lengths (run s of a unit is bits [s n, s n + n) of those bytes read as a little-endian integer). A tile's entries
// fill its units in column order without gaps. A column that owns the places [b, e) of its tile lies in units floor(b /
// 8) to ceil(e / 8) - 1: the reader loads these whole units from the aligned address before b, and drops the places
// outside [b, e) (reverse-offset memory alignment, ROMA). So no load is unaligned and none straddles, and the only
// alignment padding is at the end of a tile (3.5 entries of some 8192).
//
// Interleaving. Lane u of the reader holds unit floor(b / 8) + u. The column's entries are dealt over lanes first: for
// slot s = 0..7, for lane u = 0, 1, ..., place 8 (floor(b / 8) + u) + s takes the next entry if it is in [b, e). So in
// each of its eight steps a warp has neighbouring entries in neighbouring lanes: prefix sums run across lanes, and the
// scattered accumulations fall on different shared-memory banks.
//
// Sections:
//   1 tile_units      uint64 [tiles + 1]: first unit of each tile; the last is the number of units
//   2 column_offsets  uint16 [tiles][65]: column c of the tile owns places [offset[c], offset[c + 1])
//   3 runs            n bytes a unit
//   4 values          16 bytes a unit; places behind a tile's last entry are zero, as are their runs
// params: [0] n, [1] 256, [2] 64.
//
// Padding counted: padding entries, and the places behind a tile's last entry (whole bytes of each section).
//
// Bytes at 50 %, 4096 x 4096: 1 (values) + .25 (runs) + .008 (offsets) = 1.258 a dense element, 62.9 % of dense.
#ifndef SPMMD_KERNELS_FORMAT_RLC_CSC_H_
#define SPMMD_KERNELS_FORMAT_RLC_CSC_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/format/dense.h"
#include "kernels/format/packed_layer.h"

namespace spmmd::rlc_csc {

inline constexpr uint32_t kLayoutVersion = 1;
inline constexpr int64_t kTileRows = 256;
inline constexpr int64_t kTileCols = 64;
inline constexpr int64_t kUnitEntries = 8;
inline constexpr int kMinRunBits = 2;
inline constexpr int kMaxRunBits = 8;
inline constexpr int kDefaultRunBits = 4;

enum SectionId : uint32_t { kTileUnits = 1, kColumnOffsets = 2, kRuns = 3, kValues = 4 };

// INVALID_ARGUMENT for fp32 and for run_bits out of range; RESOURCE_EXHAUSTED.
absl::StatusOr<PackedLayer> Pack(const DenseView& w, const PackOptions& options, int run_bits = kDefaultRunBits);
// Called by spmmd::Unpack and Validate, which see to what is common to all formats.
absl::Status Unpack(const PackedLayer& layer, const MutableDenseView& out);
absl::Status Validate(const PackedLayer& layer);

struct Stats {
  int64_t entries = 0;          // nonzeros and padding entries
  int64_t padding_entries = 0;  // bridges over long gaps
  int64_t unused_places = 0;    // behind the last entry of each tile
};
// Counts over a valid layer.
Stats ComputeStats(const PackedLayer& layer);

}  // namespace spmmd::rlc_csc

#endif  // SPMMD_KERNELS_FORMAT_RLC_CSC_H_
