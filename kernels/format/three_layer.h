// THREE_LAYER: 2:4 slots for the sparse tensor cores, surplus nonzeros parked in unused slots, and a sparse rest; after
// "Accelerating GPU Inference of Large Language Models with Moderately Unstructured Sparse Weight Matrices" (DAC '26),
// sections 3 and 4. fp16 and bf16.
//
// A kernel multiplies a tile with W = W_t + W_r + R. W_t has two values of every four neighbours along K; W_r, the
// other two, whose surplus values travel in empty slots of W_t and are moved out on the chip; R is what found no slot.
//
// Tiles. W is cut into tiles of 64 rows x 128 columns, zero beyond M and K. Tile (i, j) has rows [64 i, 64 i + 64) and
// columns [128 j, 128 j + 128) and number i * ceil(K / 128) + j.
//
// Groups and slots. A group is four neighbouring columns of one row. Of its nonzeros the first two (in column order)
// are W_t's; further ones are surplus. The group's metadata nibble is p | q << 2 for the pair p < q of columns that W_t
// keeps, one of the six values 4 (0,1), 8 (0,2), 12 (0,3), 9 (1,2), 13 (1,3), 14 (2,3). A group of one nonzero keeps
// (0,1) or (2,3), whichever has it, an empty one (0,1). Slot 0 of the group is the value at column p, slot 1 that at q.
// W_r's pair is the complement, so W_r needs no metadata of its own: for eight nibbles x of a word,
//   e = (x >> 3 ^ x >> 1) & 0x11111111;  complement = x ^ (e * 5 | (e ^ 0x11111111) * 10).
//
// Fragment order. Values and metadata lie as the registers of `mma.sp.sync.aligned.m16n8k32` (.f16/.bf16 A, PTX ISA,
// "Matrix Fragments for sparse mma.m16n8k32") and of `wgmma.mma_async.sp.m64nNk32` with A in registers (PTX ISA,
// "Asynchronous warpgroup-level matrix multiply: sparse", whose warp w of the warpgroup holds rows 16 w to 16 w + 15 in
// the same fragment). A tile is 4 strips of 16 rows by 4 steps of 32 columns; lane l = 4 g + t of the warp of strip s
// holds, at step k, four registers of one group each:
//   register 0: row g,     columns 4 t ... 4 t + 3 of the step        register 1: row g + 8, the same columns
//   register 2: row g,     columns 16 + 4 t ... 16 + 4 t + 3          register 3: row g + 8, the same columns
// slot 0 in the lower half. Register r of lane l at step k of strip s is word ((4 s + k) * 32 + l) * 4 + r of the tile:
// one 128-bit load a lane and step, 512 contiguous bytes a warp. A slot's number in the tile, 0 to 4095, is its 16-bit
// index there; slots of W_r are numbered alike.
//
// Metadata order. Metadata of m16n8k32 sits in two lanes of each four: lane t = h holds columns [16 h, 16 h + 16) (four
// nibbles a row, ascending from bit 0), row g in the lower and row g + 8 in the upper half-word. The sparsity selector
// says whether lanes t = 0, 1 (selector 0) or t = 2, 3 (selector 1) are read, so one register serves two steps: word
// ((s * 32 + l) * 2 + j) of the tile belongs to lane l of strip s and step 2 j + t / 2, half h = t % 2. A kernel loads
// 8 bytes a lane and tile and passes word j with selector k % 2 at step k = 2 j + k % 2.
//
// Slot-Filling codes. The surplus elements of a tile, by ascending W_r slot, are matched in order with empty slots of
// W_t, ascending too. The moves (from slot a of W_t to slot b of W_r) are cut into 32 pieces, one a decoding thread, of
// equal code length. A tile without surplus has no code bytes. Otherwise:
//   uint32 first[32]        thread i's first move: a in bits 0-15, b in bits 16-31; 0xffffffff if the thread has none
//   uint16 units[U][32]     unit u of thread i: two codes, the earlier in the lower byte
// A code has the distance of a in bits 0-3 and that of b in bits 4-7, added to the thread's position. Neither is 0:
// move the value at a to b and clear a. One or both are 0: only the position moves. Such dummy codes cross gaps of more
// than 15 (the paper's dummy points); code 0 fills a thread's last units. Positions ascend from code to code and thread
// to thread.
//
// Residual. Surplus that finds no empty slot in its tile (spread evenly over the surplus) is kept by row, then column:
// CSR with the row in the index, because a tile has only 13 bits of position: (row in tile) << 7 | column in tile.
//
// Sections:
//   1 values              8192 bytes a tile: the slots of W_t, parked values included
//   2 metadata            1024 bytes a tile
//   3 code_offsets        uint32 [tiles + 1], in 64-byte units of section 4
//   4 codes               a multiple of 64 bytes a tile
//   5 residual_offsets    uint64 [tiles + 1], in entries
//   6 residual_positions  uint16 an entry
//   7 residual_values     16 bits an entry
// params: [0] 64, [1] 128, [2] 32.
//
// Padding counted: empty slots that hold no parked value, dummy and filler codes, absent first moves.
//
// The distance range is 15 and not the paper's "up to 16": distance 0 marks dummies, which lets them cross gaps in
// either coordinate without touching a live slot.
#ifndef SPMMD_KERNELS_FORMAT_THREE_LAYER_H_
#define SPMMD_KERNELS_FORMAT_THREE_LAYER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/format/dense.h"
#include "kernels/format/packed_layer.h"

namespace spmmd::three_layer {

inline constexpr uint32_t kLayoutVersion = 1;
inline constexpr int64_t kTileRows = 64;
inline constexpr int64_t kTileCols = 128;
inline constexpr int64_t kTileSlots = kTileRows * kTileCols / 2;
inline constexpr int64_t kTileGroups = kTileSlots / 2;
inline constexpr int64_t kTileMetadataWords = kTileGroups / 8;
inline constexpr int kThreads = 32;
inline constexpr int kMaxDistance = 15;
inline constexpr size_t kCodeGranule = 64;  // bytes: one unit of all threads
inline constexpr uint32_t kNoMove = 0xffffffffu;

enum SectionId : uint32_t {
  kValues = 1,
  kMetadata = 2,
  kCodeOffsets = 3,
  kCodes = 4,
  kResidualOffsets = 5,
  kResidualPositions = 6,
  kResidualValues = 7,
};

// Number of the group that holds (row, 4 * quad ... 4 * quad + 3) of a tile: its slots are 2 * group and 2 * group + 1.
constexpr int64_t GroupOf(int64_t row, int64_t quad) {
  const int64_t strip = row / 16;
  const int64_t step = quad / 8;
  const int64_t lane = row % 8 * 4 + quad % 4;
  const int64_t reg = quad % 8 / 4 * 2 + row % 16 / 8;
  return ((strip * 4 + step) * 32 + lane) * 4 + reg;
}

// Where that group's metadata nibble is in the tile's metadata: word and bit.
struct MetadataPlace {
  int64_t word;
  int shift;
};
constexpr MetadataPlace MetadataOf(int64_t row, int64_t quad) {
  const int64_t strip = row / 16;
  const int64_t step = quad / 8;
  const int64_t lane = row % 8 * 4 + step % 2 * 2 + quad % 8 / 4;
  return {(strip * 32 + lane) * 2 + step / 2, static_cast<int>(row % 16 / 8 * 16 + quad % 4 * 4)};
}

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
