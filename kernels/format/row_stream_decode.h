// Reading and checking ROW_STREAM bytes without Abseil, so that libspmmd_cuda.so proves a layer safe with the same code
// as the format library.
#ifndef SPMMD_KERNELS_FORMAT_ROW_STREAM_DECODE_H_
#define SPMMD_KERNELS_FORMAT_ROW_STREAM_DECODE_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/format/row_stream_layout.h"

namespace spmmd::row_stream {

inline constexpr uint32_t kLayoutVersion = 1;

// The numbers of PackedLayer::params.
struct Shape {
  int rows_per_tile = 0;
  int warps = 0;
  int pieces = 0;  // per row: 32 * warps / rows_per_tile
  int run_bits = 0;
  Coding coding = Coding::kVerbatim;
  int64_t uniform_blocks = 0;
  int64_t max_blocks = 0;
  int64_t segment_columns = 0;
  int64_t segments = 0;
  int64_t row_tiles = 0;

  int64_t tiles() const { return row_tiles * segments; }
  int64_t columns(int64_t segment, int64_t k) const {
    return segment + 1 < segments ? segment_columns : k - segment * segment_columns;
  }
};

// Null, or what is wrong: a static string. `m` and `k` must be at least 1.
inline const char* ParseShape(const int64_t params[8], bool bf16, int64_t m, int64_t k, Shape* shape) {
  const auto in = [](int64_t v, int64_t low, int64_t high) { return low <= v && v <= high; };
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  if (!in(params[kParamWarps], 1, kMaxWarps)) return "warps out of range";
  shape->warps = static_cast<int>(params[kParamWarps]);
  const int64_t threads = int64_t{kWarpLanes} * shape->warps;
  if (!in(params[kParamRowsPerTile], 1, std::min<int64_t>(kMaxRowsPerTile, threads))) {
    return "rows per tile out of range";
  }
  shape->rows_per_tile = static_cast<int>(params[kParamRowsPerTile]);
  shape->pieces = static_cast<int>(threads) / shape->rows_per_tile;
  if (params[kParamRunBits] != 2 && params[kParamRunBits] != 4) return "run bits are neither 2 nor 4";
  shape->run_bits = static_cast<int>(params[kParamRunBits]);
  const int64_t coding = params[kParamCoding];
  if (coding != 0 && coding != 2 && coding != 3) return "unknown value coding";
  shape->coding = static_cast<Coding>(coding);
  if (shape->coding != Coding::kVerbatim && !bf16) return "coded values need bf16";
  shape->segment_columns = params[kParamSegmentColumns];
  if (!in(shape->segment_columns, 1, std::min(k, kMaxSegmentColumns))) return "segment columns out of range";
  shape->segments = ceil_div(k, shape->segment_columns);
  shape->row_tiles = ceil_div(m, shape->rows_per_tile);
  shape->max_blocks = params[kParamMaxBlocks];
  shape->uniform_blocks = params[kParamUniformBlocks];
  // A piece holds at most one slot a column.
  if (!in(shape->max_blocks, 0, ceil_div(shape->segment_columns, kBlockSlots)) ||
      (shape->uniform_blocks != 0 && shape->uniform_blocks != shape->max_blocks)) {
    return "block counts out of range";
  }
  return nullptr;
}

struct Bytes {
  const void* data = nullptr;  // null when the section is missing
  size_t size = 0;
};

// A layer as it was read: nothing is trusted yet.
struct Source {
  int64_t m = 0;
  int64_t k = 0;
  int64_t nnz = 0;
  bool bf16 = false;
  int64_t params[8] = {};
  Bytes stream, starts, tiles, bases, escapes, row_order;
};

// A layer whose section sizes and tile table have been checked.
struct View {
  Shape shape;
  int64_t m = 0;
  int64_t k = 0;
  int64_t nnz = 0;
  const std::byte* stream = nullptr;
  const uint16_t* starts = nullptr;
  const TileHeader* tiles = nullptr;
  const uint8_t* bases = nullptr;       // null unless coded
  const uint32_t* escapes = nullptr;    // null unless coded
  const uint32_t* row_order = nullptr;  // null unless sorted

  // Row of W at a position of the tiling, or -1.
  int64_t Row(int64_t position) const {
    if (row_order == nullptr) return position < m ? position : -1;
    return row_order[position] < m ? int64_t{row_order[position]} : -1;
  }
};

// Null, or what is wrong.
inline const char* Open(const Source& source, View* view) {
  if (const char* error = ParseShape(source.params, source.bf16, source.m, source.k, &view->shape)) return error;
  view->m = source.m;
  view->k = source.k;
  view->nnz = source.nnz;
  const Shape& shape = view->shape;
  const auto tiles = static_cast<size_t>(shape.tiles());
  const bool coded = shape.coding != Coding::kVerbatim;
  if (source.tiles.size != tiles * sizeof(TileHeader)) return "section tiles has the wrong size";
  view->tiles = static_cast<const TileHeader*>(source.tiles.data);
  int64_t blocks = 0;
  int64_t units = 0;
  for (size_t t = 0; t < tiles; ++t) {
    const TileHeader& tile = view->tiles[t];
    if (tile.first_block != blocks || tile.blocks > shape.max_blocks || tile.first_escape_unit != units ||
        (shape.uniform_blocks != 0 && tile.blocks != shape.uniform_blocks) || (!coded && tile.escape_units != 0)) {
      return "section tiles: offsets or counts are inconsistent";
    }
    blocks += int64_t{tile.blocks} * shape.warps;
    units += tile.escape_units;
    constexpr int64_t kLimit = std::numeric_limits<uint32_t>::max();
    if (blocks > kLimit || units > kLimit) return "section tiles: too many blocks";
  }
  if (source.stream.size != static_cast<size_t>(blocks * BlockBytes(shape.coding, shape.run_bits))) {
    return "section stream has the wrong size";
  }
  view->stream = static_cast<const std::byte*>(source.stream.data);
  if (source.starts.size != tiles * shape.warps * kWarpLanes * 2) return "section starts has the wrong size";
  view->starts = static_cast<const uint16_t*>(source.starts.data);
  if (coded) {
    if (source.bases.size != tiles * shape.rows_per_tile) return "section bases has the wrong size";
    view->bases = static_cast<const uint8_t*>(source.bases.data);
    if (source.escapes.size != static_cast<size_t>(units) * kWarpLanes * 4) return "section escapes has the wrong size";
    view->escapes = static_cast<const uint32_t*>(source.escapes.data);
  }
  if (source.row_order.data != nullptr) {
    if (source.row_order.size != static_cast<size_t>(shape.row_tiles * shape.rows_per_tile) * 4) {
      return "section row order has the wrong size";
    }
    view->row_order = static_cast<const uint32_t*>(source.row_order.data);
  }
  return nullptr;
}

// One lane's share of a block, as words and run lengths.
struct LaneBlock {
  uint16_t word[kBlockSlots] = {};
  uint8_t run[kBlockSlots] = {};
};

inline LaneBlock LoadLaneBlock(Coding coding, int run_bits, int lane, const std::byte* block) {
  LaneBlock out;
  uint32_t runs[2] = {0, 0};
  std::memcpy(runs, block + RunOffset(coding, run_bits, lane), run_bits == 2 ? 4 : 8);
  const uint32_t mask = (1u << run_bits) - 1;
  for (int s = 0; s < kBlockSlots; ++s) {
    out.run[s] = static_cast<uint8_t>(runs[RunWord(run_bits, s)] >> RunShift(run_bits, s) & mask);
  }
  if (coding == Coding::kVerbatim) {
    std::memcpy(out.word, block + int64_t{16} * lane, 16);
    std::memcpy(out.word + 8, block + 512 + int64_t{16} * lane, 16);
    return out;
  }
  uint8_t low[kBlockSlots];
  uint32_t planes;
  uint16_t third = 0;
  std::memcpy(low, block + int64_t{16} * lane, 16);
  std::memcpy(&planes, block + PlaneOffset(run_bits, lane), 4);
  if (coding == Coding::kCode3) std::memcpy(&third, block + ThirdBitOffset(run_bits, lane), 2);
  for (int s = 0; s < kBlockSlots; ++s) {
    out.word[s] =
        static_cast<uint16_t>(low[s] | (planes >> FieldBitShift(s) & 1) << 8 | (planes >> SignBitShift(s) & 1) << 15 |
                              (static_cast<uint32_t>(third) >> ThirdBitShift(s) & 1) << 9);
  }
  return out;
}

// Calls sink(row, column, bits) for every stored nonzero of a tile. False when a lane leaves its segment, a value lies
// outside it, or a base or an escape is out of range.
template <typename Sink>
bool DecodeTile(const View& view, int64_t tile, Sink sink) {
  const Shape& shape = view.shape;
  const bool coded = shape.coding != Coding::kVerbatim;
  const TileHeader& header = view.tiles[tile];
  const int64_t segment = tile % shape.segments;
  const int64_t first_position = tile / shape.segments * shape.rows_per_tile;
  const int64_t columns = shape.columns(segment, view.k);
  const int64_t limit = columns + PadColumns(shape.max_blocks);
  const int64_t first_column = segment * shape.segment_columns;
  const int64_t block_bytes = BlockBytes(shape.coding, shape.run_bits);
  const int threads = shape.warps * kWarpLanes;
  for (int thread = 0; thread < threads; ++thread) {
    const int warp = thread / kWarpLanes;
    const int lane = thread % kWarpLanes;
    const int r = thread % shape.rows_per_tile;
    const int64_t row = thread < shape.pieces * shape.rows_per_tile ? view.Row(first_position + r) : -1;
    int64_t column = view.starts[tile * threads + thread];
    int base = 0;
    if (coded) {
      base = view.bases[tile * shape.rows_per_tile + r];
      if (base > 254 - FieldMax(shape.coding)) return false;
    }
    const std::byte* block = view.stream + (int64_t{header.first_block} + int64_t{warp} * header.blocks) * block_bytes;
    for (uint32_t b = 0; b < header.blocks; ++b, block += block_bytes) {
      const LaneBlock slots = LoadLaneBlock(shape.coding, shape.run_bits, lane, block);
      for (int s = 0; s < kBlockSlots; ++s) {
        column += slots.run[s];
        if ((slots.word[s] & 0x7fff) != 0) {
          if (column >= columns || row < 0) return false;
          sink(row, first_column + column, coded ? Uncode(slots.word[s], base) : slots.word[s]);
        }
        ++column;
      }
      if (column > limit) return false;
    }
    for (auto unit = static_cast<uint32_t>(warp); unit < header.escape_units; unit += shape.warps) {
      const uint32_t entry = view.escapes[(int64_t{header.first_escape_unit} + unit) * kWarpLanes + lane];
      if ((entry >> 16) >= columns) return false;
      if ((entry & 0x7fffu) == 0) continue;
      if (row < 0) return false;
      sink(row, first_column + (entry >> 16), static_cast<uint16_t>(entry));
    }
  }
  return true;
}

// Decodes every tile through parallel_for(tiles, body(tile)). Null, or what is wrong.
template <typename ParallelFor>
const char* CheckDecode(const View& view, ParallelFor parallel_for) {
  if (view.row_order != nullptr) {
    std::vector<bool> seen(static_cast<size_t>(view.m), false);
    const int64_t positions = view.shape.row_tiles * view.shape.rows_per_tile;
    for (int64_t position = 0; position < positions; ++position) {
      const uint32_t row = view.row_order[position];
      if (position >= view.m ? row != kNoRow : row >= view.m || seen[row]) {
        return "section row order is not a permutation of the rows";
      }
      if (position < view.m) seen[row] = true;
    }
  }
  std::atomic<int64_t> nnz{0};
  std::atomic<bool> ok{true};
  parallel_for(view.shape.tiles(), [&](int64_t tile) {
    int64_t count = 0;
    if (!DecodeTile(view, tile, [&](int64_t, int64_t, uint16_t) { ++count; })) ok = false;
    nnz += count;
  });
  if (!ok) return "section stream, bases or escapes: a column or a base is out of range";
  if (nnz != view.nnz) return "the number of nonzeros differs from the header's";
  return nullptr;
}

}  // namespace spmmd::row_stream

#endif  // SPMMD_KERNELS_FORMAT_ROW_STREAM_DECODE_H_
