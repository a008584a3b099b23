#include "kernels/format/bitmap.h"

#include <atomic>
#include <bit>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_pool.h"
#include "kernels/format/bitmap_pack.h"
#include "kernels/format/dense_rows.h"

namespace spmmd::bitmap {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The sizes that M and K imply.
struct Geometry {
  int64_t blocks;
  int64_t column_tiles;
  int64_t mask_words;
  size_t padding_bits;

  Geometry(int64_t m, int64_t k)
      : blocks(CeilDiv(m, kTileRows)),
        column_tiles(CeilDiv(k, kTileCols)),
        mask_words(k * ((blocks - 1) * kStripsPerTile + CeilDiv(m - (blocks - 1) * kTileRows, kStripRows))),
        padding_bits(static_cast<size_t>(mask_words * kStripRows - m * k)) {}
};

template <typename Bits>
void ExpandTile(const View& view, int64_t block, int64_t col0, int64_t cols, const MutableDenseView& out) {
  const int64_t strips = view.strips(block);
  const auto* values = reinterpret_cast<const Bits*>(view.values) + view.piece_start(block, col0);
  for (int64_t c = col0; c < col0 + cols; ++c) {
    const uint64_t* masks = view.column_masks(block, c);
    for (int64_t s = 0; s < strips; ++s) {
      for (uint64_t mask = masks[s]; mask != 0; mask &= mask - 1) {
        const int64_t row = block * kTileRows + s * kStripRows + std::countr_zero(mask);
        std::memcpy(out.row(row) + static_cast<size_t>(c) * sizeof(Bits), values++, sizeof(Bits));
      }
    }
  }
}

absl::Status Corrupt(const char* section, const std::string& what) {
  return absl::DataLossError(absl::StrCat("BITMAP section ", section, ": ", what));
}

absl::Status CheckSize(const PackedLayer& layer, SectionId id, const char* name, size_t want) {
  const Section* section = layer.FindSection(id);
  if (section == nullptr) return Corrupt(name, "missing");
  if (section->data.size() != want) {
    return Corrupt(name, absl::StrCat(section->data.size(), " bytes, expected ", want));
  }
  return absl::OkStatus();
}

}  // namespace

View MakeView(const PackedLayer& layer) {
  const Geometry geometry(layer.m, layer.k);
  View view;
  view.dtype = layer.dtype;
  view.m = layer.m;
  view.k = layer.k;
  view.blocks = geometry.blocks;
  view.column_tiles = geometry.column_tiles;
  view.values = layer.FindSection(kValues)->data.data();
  view.masks = layer.FindSection(kMasks)->data.As<uint64_t>().data();
  view.tile_starts = layer.FindSection(kTileStarts)->data.As<uint64_t>().data();
  view.column_starts = layer.FindSection(kColumnStarts)->data.As<uint32_t>().data();
  return view;
}

size_t PackedBytes(DType dtype, int64_t m, int64_t k, int64_t nnz) {
  const Geometry geometry(m, k);
  return static_cast<size_t>(nnz) * SizeOf(dtype) + static_cast<size_t>(geometry.mask_words) * sizeof(uint64_t) +
         static_cast<size_t>(geometry.blocks * geometry.column_tiles + 1) * sizeof(uint64_t) +
         static_cast<size_t>(geometry.blocks * k) * sizeof(uint32_t);
}

absl::StatusOr<PackedLayer> Pack(const DenseView& w, const PackOptions& options) {
  const Geometry geometry(w.rows, w.cols);
  const int64_t tiles = geometry.blocks * geometry.column_tiles;
  PackedLayer layer;
  layer.format = Format::kBitmap;
  layer.layout_version = kLayoutVersion;
  layer.dtype = w.dtype;
  layer.m = w.rows;
  layer.k = w.cols;
  layer.params[0] = kTileRows;
  layer.params[1] = kTileCols;

  struct Tile {
    int64_t block, row0, rows, col0, cols;
  };
  const auto tile_at = [&](int64_t t) {
    Tile tile;
    tile.block = t / geometry.column_tiles;
    tile.row0 = tile.block * kTileRows;
    tile.rows = std::min(kTileRows, w.rows - tile.row0);
    tile.col0 = t % geometry.column_tiles * kTileCols;
    tile.cols = std::min(kTileCols, w.cols - tile.col0);
    return tile;
  };

  // First pass: where each tile's values start, and whether any is not finite or tiny.
  SPMMD_ASSIGN_OR_RETURN(Buffer tile_starts, Buffer::Allocate(static_cast<size_t>(tiles + 1) * sizeof(uint64_t)));
  uint64_t* starts = tile_starts.MutableAs<uint64_t>().data();
  std::atomic<int64_t> nonfinite{0}, tiny{0};
  DefaultThreadPool().ParallelFor(tiles, [&](int64_t t, int /*worker*/) {
    const Tile tile = tile_at(t);
    RowStats total;
    for (int64_t r = tile.row0; r < tile.row0 + tile.rows; ++r) {
      const RowStats row = ScanRow(w.dtype, w.row(r) + static_cast<size_t>(tile.col0) * SizeOf(w.dtype), tile.cols);
      total.nnz += row.nnz;
      total.nonfinite += row.nonfinite;
      total.tiny += row.tiny;
    }
    starts[t + 1] = static_cast<uint64_t>(total.nnz);
    if (total.nonfinite != 0) nonfinite.fetch_add(total.nonfinite, std::memory_order_relaxed);
    if (total.tiny != 0) tiny.fetch_add(total.tiny, std::memory_order_relaxed);
  });
  layer.params[kNonfiniteParam] = nonfinite.load();
  layer.params[kNoTinyParam] = w.dtype == DType::kBf16 && tiny.load() == 0 ? 1 : 0;
  if (!options.allow_nonfinite && nonfinite.load() != 0) return CheckFinite(w);  // finds the position
  for (int64_t t = 0; t < tiles; ++t) starts[t + 1] += starts[t];
  layer.nnz = static_cast<int64_t>(starts[tiles]);

  SPMMD_ASSIGN_OR_RETURN(Buffer masks, Buffer::Allocate(static_cast<size_t>(geometry.mask_words) * sizeof(uint64_t)));
  SPMMD_ASSIGN_OR_RETURN(Buffer column_starts,
                         Buffer::Allocate(static_cast<size_t>(geometry.blocks * w.cols) * sizeof(uint32_t)));
  SPMMD_ASSIGN_OR_RETURN(Buffer values, Buffer::Allocate(static_cast<size_t>(layer.nnz) * SizeOf(w.dtype)));
  uint64_t* mask_words = masks.MutableAs<uint64_t>().data();
  uint32_t* columns = column_starts.MutableAs<uint32_t>().data();
  std::byte* out = values.mutable_data();

  ThreadPool& pool = DefaultThreadPool();
  std::vector<std::unique_ptr<PackScratch>> scratch(static_cast<size_t>(pool.size()));
  pool.ParallelFor(tiles, [&](int64_t t, int worker) {
    std::unique_ptr<PackScratch>& mine = scratch[static_cast<size_t>(worker)];
    if (mine == nullptr) mine = std::make_unique_for_overwrite<PackScratch>();
    const Tile tile = tile_at(t);
    const int64_t strips = CeilDiv(tile.rows, kStripRows);
    uint64_t at = starts[t];
    for (int64_t c = tile.col0; c < tile.col0 + tile.cols; c += kGroupCols) {
      const int64_t cols = std::min(kGroupCols, tile.col0 + tile.cols - c);
      uint64_t* group_masks = mask_words + tile.block * w.cols * kStripsPerTile + c * strips;
      uint32_t counts[kGroupCols];
      const int64_t count = PackGroup(w, tile.row0, tile.rows, c, cols, *mine, group_masks, counts);
      auto start = static_cast<uint32_t>(at - starts[t]);
      for (int64_t i = 0; i < cols; ++i) {
        columns[tile.block * w.cols + c + i] = start;
        start += counts[i];
      }
      std::memcpy(out + at * SizeOf(w.dtype), mine->values, static_cast<size_t>(count) * SizeOf(w.dtype));
      at += static_cast<uint64_t>(count);
    }
  });
  layer.sections.push_back({kValues, SectionClass::kValues, 0, std::move(values)});
  layer.sections.push_back({kMasks, SectionClass::kMetadata, geometry.padding_bits / 8, std::move(masks)});
  layer.sections.push_back({kTileStarts, SectionClass::kMetadata, 0, std::move(tile_starts)});
  layer.sections.push_back({kColumnStarts, SectionClass::kMetadata, 0, std::move(column_starts)});
  return layer;
}

absl::Status Unpack(const PackedLayer& layer, const MutableDenseView& out) {
  const View view = MakeView(layer);
  DefaultThreadPool().ParallelFor(view.blocks * view.column_tiles, [&](int64_t t, int /*worker*/) {
    const int64_t col0 = t % view.column_tiles * kTileCols;
    const int64_t cols = std::min(kTileCols, view.k - col0);
    if (view.dtype == DType::kF32) {
      ExpandTile<uint32_t>(view, t / view.column_tiles, col0, cols, out);
    } else {
      ExpandTile<uint16_t>(view, t / view.column_tiles, col0, cols, out);
    }
  });
  return absl::OkStatus();
}

absl::Status Validate(const PackedLayer& layer) {
  if (layer.layout_version != kLayoutVersion) {
    return absl::DataLossError(
        absl::StrCat("BITMAP layout version ", layer.layout_version, ", expected ", kLayoutVersion));
  }
  const std::array<int64_t, 8> params{kTileRows, kTileCols, layer.params[kNonfiniteParam], layer.params[kNoTinyParam]};
  if (layer.params != params) return absl::DataLossError("BITMAP params: tile sizes are not 4096 x 256");
  const int64_t no_tiny = layer.params[kNoTinyParam];
  if (no_tiny != 0 && (no_tiny != 1 || layer.dtype != DType::kBf16)) {
    return absl::DataLossError(absl::StrCat("BITMAP params: no_tiny is ", no_tiny));
  }
  const Geometry geometry(layer.m, layer.k);
  const int64_t tiles = geometry.blocks * geometry.column_tiles;
  SPMMD_RETURN_IF_ERROR(CheckSize(layer, kValues, "values", static_cast<size_t>(layer.nnz) * SizeOf(layer.dtype)));
  SPMMD_RETURN_IF_ERROR(CheckSize(layer, kMasks, "masks", static_cast<size_t>(geometry.mask_words) * sizeof(uint64_t)));
  SPMMD_RETURN_IF_ERROR(
      CheckSize(layer, kTileStarts, "tile_starts", static_cast<size_t>(tiles + 1) * sizeof(uint64_t)));
  SPMMD_RETURN_IF_ERROR(CheckSize(layer, kColumnStarts, "column_starts",
                                  static_cast<size_t>(geometry.blocks * layer.k) * sizeof(uint32_t)));
  const View view = MakeView(layer);
  if (view.tile_starts[0] != 0 || view.tile_starts[tiles] != static_cast<uint64_t>(layer.nnz)) {
    return Corrupt("tile_starts", absl::StrCat("does not run from 0 to nnz = ", layer.nnz));
  }
  // Each tile alone: its pieces' starts and its successor's start follow from its masks. Together with the two ends
  // above that bounds every read of the values.
  std::atomic<int64_t> first_bad{tiles};
  std::atomic<int64_t> nonfinite{0}, tiny{0};
  DefaultThreadPool().ParallelFor(tiles, [&](int64_t t, int /*worker*/) {
    const int64_t block = t / geometry.column_tiles;
    const int64_t col0 = t % geometry.column_tiles * kTileCols;
    const int64_t col1 = std::min(layer.k, col0 + kTileCols);
    const int64_t strips = view.strips(block);
    const int64_t edge = view.rows(block) % kStripRows;
    const uint64_t beyond = edge == 0 ? 0 : ~uint64_t{0} << edge;
    uint64_t count = 0;
    bool ok = true;
    for (int64_t c = col0; c < col1; ++c) {
      const uint64_t* masks = view.column_masks(block, c);
      ok = ok && view.column_starts[block * layer.k + c] == count && (masks[strips - 1] & beyond) == 0;
      for (int64_t s = 0; s < strips; ++s) count += static_cast<uint64_t>(std::popcount(masks[s]));
    }
    const uint64_t start = view.tile_starts[t];
    ok = ok && start <= static_cast<uint64_t>(layer.nnz) && view.tile_starts[t + 1] - start == count &&
         count <= static_cast<uint64_t>(layer.nnz) - start;
    if (ok) {
      const RowStats stats = ScanRow(view.dtype, view.values + start * SizeOf(view.dtype), static_cast<int64_t>(count));
      if (stats.nonfinite != 0) nonfinite.fetch_add(stats.nonfinite, std::memory_order_relaxed);
      if (stats.tiny != 0) tiny.fetch_add(stats.tiny, std::memory_order_relaxed);
      return;
    }
    int64_t seen = first_bad.load(std::memory_order_relaxed);
    while (t < seen && !first_bad.compare_exchange_weak(seen, t, std::memory_order_relaxed)) {
    }
  });
  if (first_bad.load() != tiles) {
    return Corrupt("masks", absl::StrCat("tile ", first_bad.load(), " disagrees with its column or tile starts"));
  }
  if (nonfinite.load() != layer.params[kNonfiniteParam]) {
    return Corrupt("values", absl::StrCat(nonfinite.load(), " NaNs and infinities, the header says ",
                                          layer.params[kNonfiniteParam]));
  }
  if (no_tiny == 1 && tiny.load() != 0) {
    return Corrupt("values", absl::StrCat(tiny.load(), " values below 2^-48, the header says there are none"));
  }
  return absl::OkStatus();
}

}  // namespace spmmd::bitmap
