#include "kernels/format/rlc_csc.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_pool.h"

// The fast 16-bit compress needs VBMI2, which Highway leaves out unless asked.
#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/format/rlc_csc.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#ifndef SPMMD_RLC_CSC_ONCE
#define SPMMD_RLC_CSC_ONCE
namespace spmmd::rlc_csc {

constexpr int64_t kMaxTileEntries = kTileRows * kTileCols;
// Vector loads and stores may touch this much on both sides of what they are about.
constexpr int64_t kSlack = 64;

// One worker's memory: a tile turned column-major, and the column at hand.
struct TileScratch {
  alignas(64) uint16_t columns[kTileCols][kTileRows];
  alignas(64) uint16_t positions[kTileRows + 2 * kSlack];
  alignas(64) uint16_t sequence[kTileRows + 2 * kSlack];
  alignas(64) uint8_t sequence_runs[kTileRows + 2 * kSlack];
};

// Where a tile goes: room for kMaxTileEntries of each, and kSlack bytes more of runs.
struct TileOutput {
  uint16_t* values;
  uint8_t* runs;
};

struct TileCounts {
  int64_t nnz = 0;
  int64_t entries = 0;
};

// Eight run lengths, one a byte, as eight n-bit fields; and back.
// Bytes of places that are not ours may hold anything and must not spill into their neighbours.
inline uint64_t PackRuns(uint64_t bytes, int n) {
  bytes &= ((uint64_t{1} << n) - 1) * 0x0101010101010101u;
  const uint64_t pairs = (bytes & 0x00ff00ff00ff00ffu) | ((bytes >> 8 & 0x00ff00ff00ff00ffu) << n);
  const uint64_t quads = (pairs & 0x0000ffff0000ffffu) | ((pairs >> 16 & 0x0000ffff0000ffffu) << (2 * n));
  return (quads & 0xffffffffu) | (quads >> 32 << (4 * n));
}
inline uint64_t UnpackRuns(uint64_t fields, int n) {
  const uint64_t one = (uint64_t{1} << n) - 1;
  const uint64_t two = (uint64_t{1} << (2 * n)) - 1;
  const uint64_t four = (uint64_t{1} << (4 * n)) - 1;
  const uint64_t quads = (fields & four) | (fields >> (4 * n) & four) << 32;
  const uint64_t pairs = (quads & two * 0x0000000100000001u) | (quads >> (2 * n) & two * 0x0000000100000001u) << 16;
  return (pairs & one * 0x0001000100010001u) | (pairs >> n & one * 0x0001000100010001u) << 8;
}

}  // namespace spmmd::rlc_csc
#endif  // SPMMD_RLC_CSC_ONCE

HWY_BEFORE_NAMESPACE();
namespace spmmd::rlc_csc {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_SCALAR

// The plain form: what the vector code below must equal, and what runs where Highway has no 128-bit vectors.
void LoadColumns(const DenseView& w, int64_t row0, int64_t rows, int64_t col0, int64_t cols, TileScratch* scratch) {
  std::memset(scratch->columns, 0, sizeof(scratch->columns));
  for (int64_t r = 0; r < rows; ++r) {
    const auto* source = reinterpret_cast<const uint16_t*>(w.row(row0 + r)) + col0;
    for (int64_t c = 0; c < cols; ++c) scratch->columns[c][r] = source[c];
  }
}

int64_t CompressColumn(const uint16_t* column, uint16_t max_run, TileScratch* scratch, bool* long_gap) {
  int64_t count = 0;
  int64_t previous = -1;
  *long_gap = false;
  for (int64_t r = 0; r < kTileRows; ++r) {
    if (!IsNonzeroBits(column[r])) continue;
    const int64_t run = r - previous - 1;
    *long_gap |= run > max_run;
    scratch->sequence[kSlack + count] = column[r];
    scratch->sequence_runs[kSlack + count++] = static_cast<uint8_t>(run);
    previous = r;
  }
  return count;
}

void InterleaveColumn(int64_t begin, int64_t entries, int run_bits, const TileScratch& scratch,
                      const TileOutput& output) {
  const int64_t end = begin + entries;
  int64_t next = kSlack;
  uint8_t runs[kTileRows + 2 * kUnitEntries] = {};
  const int64_t first_place = begin / kUnitEntries * kUnitEntries;
  for (int64_t slot = 0; slot < kUnitEntries; ++slot) {
    for (int64_t place = first_place + slot; place < end; place += kUnitEntries) {
      if (place < begin) continue;
      output.values[place] = scratch.sequence[next];
      runs[place - first_place] = scratch.sequence_runs[next++];
    }
  }
  for (int64_t place = first_place; place < end; place += kUnitEntries) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, runs + (place - first_place), sizeof(bytes));
    uint64_t fields = PackRuns(bytes, run_bits);
    uint8_t* out = output.runs + place / kUnitEntries * run_bits;
    if (place < begin) {
      uint64_t before = 0;
      std::memcpy(&before, out, sizeof(before));
      const uint64_t keep = (uint64_t{1} << ((begin - place) * run_bits)) - 1;
      fields = (before & keep) | (fields & ~keep);
    }
    std::memcpy(out, &fields, sizeof(fields));
  }
}

#else

using D8x16 = hn::FixedTag<uint8_t, 16>;
using D16x8 = hn::FixedTag<uint16_t, 8>;
using D32x4 = hn::FixedTag<uint32_t, 4>;
using D64x2 = hn::FixedTag<uint64_t, 2>;

template <class D, class To, class V>
HWY_INLINE hn::Vec<D> ZipLower(D d, To to, V a, V b) {
  return hn::BitCast(d, hn::InterleaveLower(to, hn::BitCast(to, a), hn::BitCast(to, b)));
}
template <class D, class To, class V>
HWY_INLINE hn::Vec<D> ZipUpper(D d, To to, V a, V b) {
  return hn::BitCast(d, hn::InterleaveUpper(to, hn::BitCast(to, a), hn::BitCast(to, b)));
}

// rows[i] holds lane j of input i; afterwards rows[j] holds lane j of all inputs.
HWY_INLINE void Transpose8x8(hn::Vec<D16x8>* rows) {
  const D16x8 d16;
  const D32x4 d32;
  const D64x2 d64;
  const auto a0 = hn::InterleaveLower(d16, rows[0], rows[1]);
  const auto a1 = hn::InterleaveUpper(d16, rows[0], rows[1]);
  const auto a2 = hn::InterleaveLower(d16, rows[2], rows[3]);
  const auto a3 = hn::InterleaveUpper(d16, rows[2], rows[3]);
  const auto a4 = hn::InterleaveLower(d16, rows[4], rows[5]);
  const auto a5 = hn::InterleaveUpper(d16, rows[4], rows[5]);
  const auto a6 = hn::InterleaveLower(d16, rows[6], rows[7]);
  const auto a7 = hn::InterleaveUpper(d16, rows[6], rows[7]);
  const auto b0 = ZipLower(d16, d32, a0, a2);
  const auto b1 = ZipUpper(d16, d32, a0, a2);
  const auto b2 = ZipLower(d16, d32, a1, a3);
  const auto b3 = ZipUpper(d16, d32, a1, a3);
  const auto b4 = ZipLower(d16, d32, a4, a6);
  const auto b5 = ZipUpper(d16, d32, a4, a6);
  const auto b6 = ZipLower(d16, d32, a5, a7);
  const auto b7 = ZipUpper(d16, d32, a5, a7);
  rows[0] = ZipLower(d16, d64, b0, b4);
  rows[1] = ZipUpper(d16, d64, b0, b4);
  rows[2] = ZipLower(d16, d64, b1, b5);
  rows[3] = ZipUpper(d16, d64, b1, b5);
  rows[4] = ZipLower(d16, d64, b2, b6);
  rows[5] = ZipUpper(d16, d64, b2, b6);
  rows[6] = ZipLower(d16, d64, b3, b7);
  rows[7] = ZipUpper(d16, d64, b3, b7);
}

// The tile column-major, zero outside the matrix.
void LoadColumns(const DenseView& w, int64_t row0, int64_t rows, int64_t col0, int64_t cols, TileScratch* scratch) {
  const D16x8 d;
  if (rows == kTileRows && cols == kTileCols) {
    for (int64_t r = 0; r < kTileRows; r += 8) {
      for (int64_t c = 0; c < kTileCols; c += 8) {
        hn::Vec<D16x8> block[8];
        for (int i = 0; i < 8; ++i) {
          block[i] = hn::LoadU(d, reinterpret_cast<const uint16_t*>(w.row(row0 + r + i)) + col0 + c);
        }
        Transpose8x8(block);
        for (int i = 0; i < 8; ++i) hn::Store(block[i], d, &scratch->columns[c + i][r]);
      }
    }
    return;
  }
  std::memset(scratch->columns, 0, sizeof(scratch->columns));
  for (int64_t r = 0; r < rows; ++r) {
    const auto* source = reinterpret_cast<const uint16_t*>(w.row(row0 + r)) + col0;
    for (int64_t c = 0; c < cols; ++c) scratch->columns[c][r] = source[c];
  }
}

// Compresses a column into sequence and sequence_runs without bridging long gaps; returns the number of nonzeros and
// whether a run exceeds max_run.
HWY_INLINE int64_t CompressColumn(const uint16_t* column, uint16_t max_run, TileScratch* scratch, bool* long_gap) {
  const hn::ScalableTag<uint16_t> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  uint16_t* positions = scratch->positions + kSlack;
  uint16_t* sequence = scratch->sequence + kSlack;
  int64_t count = 0;
  auto position = hn::Iota(d, 0);
  const auto step = hn::Set(d, static_cast<uint16_t>(lanes));
  for (int64_t r = 0; r < kTileRows; r += lanes) {
    const auto value = hn::Load(d, column + r);
    const auto nonzero = hn::Ne(hn::Add(value, value), hn::Zero(d));  // the sum drops the sign: -0.0 is a zero
    // Compress and store apart: a compressing store to memory is microcode on Zen 4.
    hn::StoreU(hn::Compress(value, nonzero), d, sequence + count);
    hn::StoreU(hn::Compress(position, nonzero), d, positions + count);
    count += static_cast<int64_t>(hn::CountTrue(d, nonzero));
    position = hn::Add(position, step);
  }
  positions[-1] = 0xffff;  // -1
  const auto one = hn::Set(d, uint16_t{1});
  const auto limit = hn::Set(di, static_cast<int16_t>(max_run));
  auto longest = hn::Zero(di);
  for (int64_t i = 0; i < count; i += lanes) {
    const auto gap = hn::Sub(hn::Sub(hn::LoadU(d, positions + i), hn::LoadU(d, positions + i - 1)), one);
    const auto in_range = hn::FirstN(d, static_cast<size_t>(count - i));
    const auto run = hn::BitCast(di, hn::IfThenElseZero(in_range, gap));
    longest = hn::Max(longest, run);
    hn::StoreU(hn::DemoteTo(d8, run), d8, scratch->sequence_runs + kSlack + i);
  }
  *long_gap = !hn::AllFalse(di, hn::Gt(longest, limit));
  return count;
}

// Deals a column's entries over the units that hold places [begin, begin + entries): the header's interleaving. Places
// before `begin` in the first unit keep what they hold; those behind the end of the last are overwritten by what
// follows.
HWY_INLINE void InterleaveColumn(int64_t begin, int64_t entries, int run_bits, const TileScratch& scratch,
                                 const TileOutput& output) {
  const D16x8 d16;
  const D8x16 d8;
  const hn::Half<D8x16> d8half;
  const int64_t skipped = begin % kUnitEntries;
  const int64_t end = skipped + entries;
  const int64_t units = (end + kUnitEntries - 1) / kUnitEntries;
  // Slot s reads the sequence from start[s] on, one entry a unit. Where the slot of the first unit is not ours the
  // start is one too low, and the entry read there is dropped.
  int64_t start[kUnitEntries];
  int64_t next = 0;
  for (int64_t s = 0; s < kUnitEntries; ++s) {
    const int64_t first = s < skipped ? 1 : 0;
    const int64_t last = end > s ? (end - s + kUnitEntries - 1) / kUnitEntries : 0;
    start[s] = next - first;
    next += std::max<int64_t>(0, last - first);
  }
  const uint16_t* sequence = scratch.sequence + kSlack;
  const uint8_t* sequence_runs = scratch.sequence_runs + kSlack;
  const int64_t unit0 = begin / kUnitEntries;
  uint16_t* out = output.values + unit0 * kUnitEntries;
  uint8_t* out_runs = output.runs + unit0 * run_bits;
  for (int64_t u = 0; u < units; u += 8) {
    hn::Vec<D16x8> block[8];
    for (int s = 0; s < 8; ++s) block[s] = hn::LoadU(d16, sequence + start[s] + u);
    Transpose8x8(block);

    hn::Vec<D8x16> pair[4];
    for (int s = 0; s < 4; ++s) {
      const auto low = hn::LoadU(d8half, sequence_runs + start[int64_t{2} * s] + u);
      const auto high = hn::LoadU(d8half, sequence_runs + start[2 * s + 1] + u);
      pair[s] = hn::Combine(d8, hn::InterleaveUpper(d8half, low, high), hn::InterleaveLower(d8half, low, high));
    }
    const D32x4 d32;
    const auto quad0 = ZipLower(d8, d16, pair[0], pair[1]);
    const auto quad1 = ZipUpper(d8, d16, pair[0], pair[1]);
    const auto quad2 = ZipLower(d8, d16, pair[2], pair[3]);
    const auto quad3 = ZipUpper(d8, d16, pair[2], pair[3]);
    alignas(16) uint64_t runs[8];
    auto* run_bytes = reinterpret_cast<uint8_t*>(runs);
    hn::Store(ZipLower(d8, d32, quad0, quad2), d8, run_bytes);
    hn::Store(ZipUpper(d8, d32, quad0, quad2), d8, run_bytes + 16);
    hn::Store(ZipLower(d8, d32, quad1, quad3), d8, run_bytes + 32);
    hn::Store(ZipUpper(d8, d32, quad1, quad3), d8, run_bytes + 48);

    const int64_t here = std::min<int64_t>(8, units - u);
    for (int64_t i = 0; i < here; ++i) {
      auto values = block[i];
      uint64_t fields = PackRuns(runs[i], run_bits);
      if (u + i == 0 && skipped != 0) {
        values = hn::IfThenElse(hn::FirstN(d16, static_cast<size_t>(skipped)), hn::LoadU(d16, out), values);
        uint64_t before = 0;
        std::memcpy(&before, out_runs, sizeof(before));
        const uint64_t keep = (uint64_t{1} << (skipped * run_bits)) - 1;
        fields = (before & keep) | (fields & ~keep);
      }
      hn::StoreU(values, d16, out + (u + i) * kUnitEntries);
      // Eight bytes whatever n: units are written in ascending order, so what is too much is overwritten.
      std::memcpy(out_runs + (u + i) * run_bits, &fields, sizeof(fields));
    }
  }
}

#endif  // HWY_TARGET

// Inserts padding entries into a compressed column; returns its number of entries.
int64_t BridgeGaps(int64_t count, int max_run, TileScratch* scratch) {
  uint16_t values[kTileRows];
  uint8_t runs[kTileRows];
  uint16_t* sequence = scratch->sequence + kSlack;
  uint8_t* sequence_runs = scratch->sequence_runs + kSlack;
  int64_t entries = 0;
  for (int64_t i = 0; i < count; ++i) {
    int run = sequence_runs[i];
    for (; run > max_run; run -= max_run + 1) {
      values[entries] = 0;
      runs[entries++] = static_cast<uint8_t>(max_run);
    }
    values[entries] = sequence[i];
    runs[entries++] = static_cast<uint8_t>(run);
  }
  std::memcpy(sequence, values, static_cast<size_t>(entries) * sizeof(uint16_t));
  std::memcpy(sequence_runs, runs, static_cast<size_t>(entries));
  return entries;
}

TileCounts PackTile(const DenseView& w, int64_t row0, int64_t col0, int run_bits, TileScratch* scratch,
                    uint16_t* offsets, const TileOutput& output) {
  const int64_t rows = std::min(kTileRows, w.rows - row0);
  const int64_t cols = std::min(kTileCols, w.cols - col0);
  const int max_run = (1 << run_bits) - 1;
  LoadColumns(w, row0, rows, col0, cols, scratch);
  TileCounts counts;
  for (int64_t c = 0; c < kTileCols; ++c) {
    offsets[c] = static_cast<uint16_t>(counts.entries);
    if (c >= cols) continue;
    bool long_gap = false;
    const int64_t nnz = CompressColumn(scratch->columns[c], static_cast<uint16_t>(max_run), scratch, &long_gap);
    if (nnz == 0) continue;
    const int64_t entries = long_gap ? BridgeGaps(nnz, max_run, scratch) : nnz;
    InterleaveColumn(counts.entries, entries, run_bits, *scratch, output);
    counts.nnz += nnz;
    counts.entries += entries;
  }
  offsets[kTileCols] = static_cast<uint16_t>(counts.entries);
  if (const int64_t used = counts.entries % kUnitEntries; used != 0) {
    const int64_t unit = counts.entries / kUnitEntries;
    std::fill(output.values + counts.entries, output.values + (unit + 1) * kUnitEntries, uint16_t{0});
    uint64_t fields = 0;
    std::memcpy(&fields, output.runs + unit * run_bits, static_cast<size_t>(run_bits));
    fields &= (uint64_t{1} << (used * run_bits)) - 1;
    std::memcpy(output.runs + unit * run_bits, &fields, static_cast<size_t>(run_bits));
  }
  return counts;
}

}  // namespace HWY_NAMESPACE
}  // namespace spmmd::rlc_csc
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spmmd::rlc_csc {
namespace {

HWY_EXPORT(PackTile);

// Tiles of one row of tiles that a task packs: long enough to amortise a task, short enough to balance two cores.
constexpr int64_t kTilesPerTask = 16;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tasks that are packed before their results are moved to their final place: enough to keep the cores busy, few enough
// for the results to stay in cache.
constexpr int64_t kTasksPerThread = 4;

// What a task leaves until it is known how much lies before it. The memory is used again by later tasks.
struct Piece {
  std::unique_ptr<uint16_t[]> values = std::make_unique_for_overwrite<uint16_t[]>(kTilesPerTask * kMaxTileEntries);
  std::unique_ptr<uint8_t[]> runs = std::make_unique_for_overwrite<uint8_t[]>(kTilesPerTask * kMaxTileEntries + kSlack);
  uint64_t units = 0;
};

// The first `bytes` of a buffer that was allocated for the worst case. Large buffers are mapped, and pages that were
// never written take no memory.
Buffer Shrink(Buffer buffer, size_t bytes) {
  const auto whole = std::make_shared<const Buffer>(std::move(buffer));
  return Buffer::Borrow({whole->data(), bytes}, whole);
}

struct View {
  explicit View(const PackedLayer& layer)
      : run_bits(static_cast<int>(layer.params[0])),
        row_tiles(CeilDiv(layer.m, kTileRows)),
        col_tiles(CeilDiv(layer.k, kTileCols)) {
    const auto section = [&](uint32_t id) { return layer.FindSection(id); };
    if (section(kTileUnits) == nullptr || section(kColumnOffsets) == nullptr || section(kRuns) == nullptr ||
        section(kValues) == nullptr) {
      return;
    }
    tile_units = section(kTileUnits)->data.As<uint64_t>();
    column_offsets = section(kColumnOffsets)->data.As<uint16_t>();
    runs = section(kRuns)->data.As<uint8_t>();
    values = section(kValues)->data.As<uint16_t>();
    complete = true;
  }
  int64_t tiles() const { return row_tiles * col_tiles; }
  const uint16_t* offsets(int64_t tile) const { return column_offsets.data() + tile * (kTileCols + 1); }
  int Run(int64_t place) const {
    const size_t unit = static_cast<size_t>(place / kUnitEntries) * static_cast<size_t>(run_bits);
    uint64_t fields = 0;
    std::memcpy(&fields, runs.data() + unit, static_cast<size_t>(run_bits));
    return static_cast<int>(fields >> (place % kUnitEntries * run_bits) & ((1u << run_bits) - 1));
  }

  int run_bits;
  int64_t row_tiles;
  int64_t col_tiles;
  bool complete = false;
  absl::Span<const uint64_t> tile_units;
  absl::Span<const uint16_t> column_offsets;
  absl::Span<const uint8_t> runs;
  absl::Span<const uint16_t> values;
};

// Calls body(row in tile, place) for each entry of a column of a tile whose first place is `base`. The row may be
// anything if the bytes are damaged; it never decreases.
template <typename Body>
void ForEachEntry(const View& view, int64_t base, int64_t begin, int64_t end, Body body) {
  int64_t row = -1;
  for (int64_t slot = 0; slot < kUnitEntries; ++slot) {
    for (int64_t place = begin / kUnitEntries * kUnitEntries + slot; place < end; place += kUnitEntries) {
      if (place < begin) continue;
      row += view.Run(base + place) + 1;
      body(row, base + place);
    }
  }
}

// Rows that the entries at places [begin, end) cover together: the sum of run + 1.
int64_t CoveredRows(const View& view, int64_t base, int64_t begin, int64_t end) {
  int64_t sum = end - begin;
  for (int64_t unit = begin / kUnitEntries; unit * kUnitEntries < end; ++unit) {
    uint64_t fields = 0;
    std::memcpy(&fields, view.runs.data() + static_cast<size_t>((base / kUnitEntries + unit) * view.run_bits),
                static_cast<size_t>(view.run_bits));
    uint64_t bytes = UnpackRuns(fields, view.run_bits);
    const int64_t skip = begin - unit * kUnitEntries;
    const int64_t keep = end - unit * kUnitEntries;
    if (skip > 0) bytes &= ~uint64_t{0} << (8 * skip);
    if (keep < kUnitEntries) bytes &= (uint64_t{1} << (8 * keep)) - 1;
    const uint64_t halves = (bytes & 0x00ff00ff00ff00ffu) + (bytes >> 8 & 0x00ff00ff00ff00ffu);
    sum += static_cast<int64_t>(halves * 0x0001000100010001u >> 48);
  }
  return sum;
}

// All that Validate checks of a tile once its units are known to exist; counts its nonzeros.
bool CheckTile(const View& view, const PackedLayer& layer, int64_t tile, int64_t* nnz) {
  const uint16_t* offsets = view.offsets(tile);
  const uint64_t first_unit = view.tile_units[static_cast<size_t>(tile)];
  const uint64_t end_unit = view.tile_units[static_cast<size_t>(tile) + 1];
  const auto base = static_cast<int64_t>(first_unit) * kUnitEntries;
  const int64_t cols = std::min(kTileCols, layer.k - tile % view.col_tiles * kTileCols);
  const int64_t rows = std::min(kTileRows, layer.m - tile / view.col_tiles * kTileRows);
  // Places inside the tile's units, columns beyond K empty: what makes all reads below safe.
  const int64_t entries = offsets[kTileCols];
  if (offsets[0] != 0 || !std::is_sorted(offsets, offsets + kTileCols + 1) || offsets[cols] != entries ||
      static_cast<uint64_t>(CeilDiv(entries, kUnitEntries)) != end_unit - first_unit) {
    return false;
  }
  const uint16_t* values = view.values.data() + base;
  for (int64_t place = 0; place < entries; ++place) *nnz += IsNonzeroBits(values[place]) ? 1 : 0;
  for (int64_t place = entries; place < static_cast<int64_t>(end_unit - first_unit) * kUnitEntries; ++place) {
    if (values[place] != 0) return false;
  }
  for (int64_t c = 0; c < cols; ++c) {
    // Kernels add into 256 accumulators a tile, padding entries included.
    if (CoveredRows(view, base, offsets[c], offsets[c + 1]) > kTileRows) return false;
  }
  if (rows == kTileRows) return true;
  // In the last row of tiles only padding entries may stand below row M.
  bool ok = true;
  for (int64_t c = 0; c < cols; ++c) {
    ForEachEntry(view, base, offsets[c], offsets[c + 1], [&](int64_t row, int64_t place) {
      ok = ok && (row < rows || !IsNonzeroBits(view.values[static_cast<size_t>(place)]));
    });
  }
  return ok;
}

}  // namespace

absl::StatusOr<PackedLayer> Pack(const DenseView& w, const PackOptions& options, int run_bits) {
  if (SizeOf(w.dtype) != sizeof(uint16_t)) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype: RLC_CSC stores fp16 and bf16 weights, not ", std::string(Name(w.dtype))));
  }
  if (run_bits < kMinRunBits || run_bits > kMaxRunBits) {
    return absl::InvalidArgumentError(
        absl::StrCat("run_bits: ", run_bits, " is not in [", kMinRunBits, ", ", kMaxRunBits, "]"));
  }
  if (!options.allow_nonfinite) SPMMD_RETURN_IF_ERROR(CheckFinite(w));

  const int64_t row_tiles = CeilDiv(w.rows, kTileRows);
  const int64_t col_tiles = CeilDiv(w.cols, kTileCols);
  const int64_t tasks_per_row = CeilDiv(col_tiles, kTilesPerTask);
  const auto tiles = static_cast<size_t>(row_tiles * col_tiles);
  SPMMD_ASSIGN_OR_RETURN(Buffer tile_units, Buffer::Allocate((tiles + 1) * sizeof(uint64_t)));
  SPMMD_ASSIGN_OR_RETURN(Buffer column_offsets, Buffer::Allocate(tiles * (kTileCols + 1) * sizeof(uint16_t)));
  uint64_t* units = tile_units.MutableAs<uint64_t>().data();
  uint16_t* offsets = column_offsets.MutableAs<uint16_t>().data();

  // Sizes come out while packing, so the buffers are as large as they could get: every element an entry.
  const size_t max_units = static_cast<size_t>(CeilDiv(w.rows * w.cols, kUnitEntries)) + tiles;
  SPMMD_ASSIGN_OR_RETURN(Buffer all_runs, Buffer::Allocate(max_units * static_cast<size_t>(run_bits)));
  SPMMD_ASSIGN_OR_RETURN(Buffer all_values, Buffer::Allocate(max_units * kUnitEntries * sizeof(uint16_t)));

  ThreadPool& pool = DefaultThreadPool();
  const int64_t tasks = row_tiles * tasks_per_row;
  const int64_t wave = std::min(tasks, pool.size() * kTasksPerThread);
  std::vector<std::unique_ptr<TileScratch>> scratches(static_cast<size_t>(pool.size()));
  std::vector<Piece> pieces(static_cast<size_t>(wave));
  std::atomic<int64_t> nnz{0};
  std::atomic<int64_t> entries{0};
  for (int64_t first_task = 0; first_task < tasks; first_task += wave) {
    const int64_t count = std::min(wave, tasks - first_task);
    const auto first_tile_of = [&](int64_t i) {
      return (first_task + i) / tasks_per_row * col_tiles + (first_task + i) % tasks_per_row * kTilesPerTask;
    };
    pool.ParallelFor(count, [&](int64_t i, int worker) {
      std::unique_ptr<TileScratch>& scratch = scratches[static_cast<size_t>(worker)];
      if (scratch == nullptr) scratch = std::make_unique_for_overwrite<TileScratch>();
      Piece& piece = pieces[static_cast<size_t>(i)];
      piece.units = 0;
      TileCounts total;
      const int64_t first_tile = first_tile_of(i);
      const int64_t tile_row = first_tile / col_tiles;
      const int64_t last_tile = std::min((tile_row + 1) * col_tiles, first_tile + kTilesPerTask);
      for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        const TileOutput output{piece.values.get() + piece.units * kUnitEntries,
                                piece.runs.get() + piece.units * static_cast<uint64_t>(run_bits)};
        const TileCounts counts =
            HWY_DYNAMIC_DISPATCH(PackTile)(w, tile_row * kTileRows, tile % col_tiles * kTileCols, run_bits,
                                           scratch.get(), offsets + tile * (kTileCols + 1), output);
        units[tile + 1] = static_cast<uint64_t>(CeilDiv(counts.entries, kUnitEntries));
        piece.units += units[tile + 1];
        total.nnz += counts.nnz;
        total.entries += counts.entries;
      }
      nnz.fetch_add(total.nnz, std::memory_order_relaxed);
      entries.fetch_add(total.entries, std::memory_order_relaxed);
    });
    const int64_t end_tile = first_task + count == tasks ? static_cast<int64_t>(tiles) : first_tile_of(count);
    for (int64_t tile = first_tile_of(0); tile < end_tile; ++tile) units[tile + 1] += units[tile];
    pool.ParallelFor(count, [&](int64_t i, int /*worker*/) {
      const Piece& piece = pieces[static_cast<size_t>(i)];
      const uint64_t place = units[first_tile_of(i)];
      std::memcpy(all_values.MutableAs<uint16_t>().data() + place * kUnitEntries, piece.values.get(),
                  piece.units * kUnitEntries * sizeof(uint16_t));
      std::memcpy(all_runs.mutable_data() + place * static_cast<uint64_t>(run_bits), piece.runs.get(),
                  piece.units * static_cast<uint64_t>(run_bits));
    });
  }
  const size_t unit_count = units[tiles];
  Buffer runs = Shrink(std::move(all_runs), unit_count * static_cast<size_t>(run_bits));
  Buffer values = Shrink(std::move(all_values), unit_count * kUnitEntries * sizeof(uint16_t));

  PackedLayer layer;
  layer.format = Format::kRlcCsc;
  layer.layout_version = kLayoutVersion;
  layer.dtype = w.dtype;
  layer.m = w.rows;
  layer.k = w.cols;
  layer.params = {run_bits, kTileRows, kTileCols};
  layer.nnz = nnz.load();
  // Padding entries and the places behind the last entry of each tile.
  const int64_t padding = static_cast<int64_t>(unit_count) * kUnitEntries - layer.nnz;
  const auto padding_values = static_cast<size_t>(padding) * sizeof(uint16_t);
  const auto padding_runs = static_cast<size_t>(padding * run_bits / 8);
  layer.sections.push_back({kTileUnits, SectionClass::kMetadata, 0, std::move(tile_units)});
  layer.sections.push_back({kColumnOffsets, SectionClass::kMetadata, 0, std::move(column_offsets)});
  layer.sections.push_back({kRuns, SectionClass::kMetadata, padding_runs, std::move(runs)});
  layer.sections.push_back({kValues, SectionClass::kValues, padding_values, std::move(values)});
  return layer;
}

absl::Status Unpack(const PackedLayer& layer, const MutableDenseView& out) {
  const View view(layer);
  DefaultThreadPool().ParallelFor(view.tiles(), [&](int64_t tile, int /*worker*/) {
    const int64_t row0 = tile / view.col_tiles * kTileRows;
    const int64_t col0 = tile % view.col_tiles * kTileCols;
    const uint16_t* offsets = view.offsets(tile);
    const auto base = static_cast<int64_t>(view.tile_units[static_cast<size_t>(tile)]) * kUnitEntries;
    for (int64_t c = 0; c < std::min(kTileCols, layer.k - col0); ++c) {
      ForEachEntry(view, base, offsets[c], offsets[c + 1], [&](int64_t row, int64_t place) {
        const uint16_t bits = view.values[static_cast<size_t>(place)];
        // A padding entry may stand below row M; it holds nothing.
        if (!IsNonzeroBits(bits)) return;
        std::memcpy(out.row(row0 + row) + static_cast<size_t>(col0 + c) * sizeof(bits), &bits, sizeof(bits));
      });
    }
  });
  return absl::OkStatus();
}

absl::Status Validate(const PackedLayer& layer) {
  if (layer.layout_version != kLayoutVersion) {
    return absl::DataLossError(
        absl::StrCat("RLC_CSC layout version ", layer.layout_version, ", expected ", kLayoutVersion));
  }
  if (SizeOf(layer.dtype) != sizeof(uint16_t)) return absl::DataLossError("RLC_CSC dtype: neither fp16 nor bf16");
  if (layer.params[0] < kMinRunBits || layer.params[0] > kMaxRunBits || layer.params[1] != kTileRows ||
      layer.params[2] != kTileCols) {
    return absl::DataLossError("RLC_CSC params: run bits or tile size out of range");
  }
  const View view(layer);
  if (!view.complete) return absl::DataLossError("RLC_CSC sections: one is missing");
  const auto tiles = static_cast<size_t>(view.tiles());
  if (layer.FindSection(kTileUnits)->data.size() != (tiles + 1) * sizeof(uint64_t)) {
    return absl::DataLossError("RLC_CSC section tile_units: wrong size");
  }
  if (layer.FindSection(kColumnOffsets)->data.size() != tiles * (kTileCols + 1) * sizeof(uint16_t)) {
    return absl::DataLossError("RLC_CSC section column_offsets: wrong size");
  }
  const size_t value_bytes = layer.FindSection(kValues)->data.size();
  constexpr size_t kUnitBytes = kUnitEntries * sizeof(uint16_t);
  const size_t units = value_bytes / kUnitBytes;
  if (value_bytes % kUnitBytes != 0 ||
      layer.FindSection(kRuns)->data.size() != units * static_cast<size_t>(view.run_bits)) {
    return absl::DataLossError("RLC_CSC sections values and runs: sizes disagree");
  }
  if (view.tile_units.front() != 0 || view.tile_units.back() != units ||
      !std::is_sorted(view.tile_units.begin(), view.tile_units.end())) {
    return absl::DataLossError("RLC_CSC section tile_units: must ascend from 0 to the number of units");
  }
  std::atomic<int64_t> bad_tile{-1};
  std::atomic<int64_t> nnz{0};
  DefaultThreadPool().ParallelFor(view.tiles(), [&](int64_t tile, int /*worker*/) {
    int64_t count = 0;
    if (!CheckTile(view, layer, tile, &count)) bad_tile.store(tile, std::memory_order_relaxed);
    nnz.fetch_add(count, std::memory_order_relaxed);
  });
  if (bad_tile.load() >= 0) {
    return absl::DataLossError(absl::StrCat("RLC_CSC tile ", bad_tile.load(), ": offsets or runs leave the tile"));
  }
  if (nnz.load() != layer.nnz) {
    return absl::DataLossError(absl::StrCat("RLC_CSC section values: ", nnz.load(), " nonzeros, expected ", layer.nnz));
  }
  return absl::OkStatus();
}

Stats ComputeStats(const PackedLayer& layer) {
  const View view(layer);
  Stats stats;
  for (int64_t tile = 0; tile < view.tiles(); ++tile) stats.entries += view.offsets(tile)[kTileCols];
  stats.padding_entries = stats.entries - layer.nnz;
  stats.unused_places = static_cast<int64_t>(view.tile_units.back()) * kUnitEntries - stats.entries;
  return stats;
}

}  // namespace spmmd::rlc_csc
#endif  // HWY_ONCE
