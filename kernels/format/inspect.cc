#include "kernels/format/inspect.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "kernels/base/thread_pool.h"
#include "kernels/format/bitmap_gpu_layout.h"
#include "kernels/format/rlc_csc.h"
#include "kernels/format/row_stream.h"
#include "kernels/format/three_layer.h"

namespace spmmd {
namespace {

template <typename Bits>
bool NonzeroAt(const std::byte* row, int64_t col) {
  Bits bits;
  std::memcpy(&bits, row + static_cast<size_t>(col) * sizeof(Bits), sizeof(bits));
  return IsNonzeroBits(bits);
}

bool NonzeroAt(DType dtype, const std::byte* row, int64_t col) {
  return dtype == DType::kF32 ? NonzeroAt<uint32_t>(row, col) : NonzeroAt<uint16_t>(row, col);
}

}  // namespace

LayerStats ComputeLayerStats(const PackedLayer& layer) {
  LayerStats out;
  const auto share = [&](std::string_view name, int64_t part) {
    out.shares.emplace_back(name, layer.nnz == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(layer.nnz));
  };
  switch (layer.format) {
    case Format::kThreeLayer: {
      const three_layer::Stats stats = three_layer::ComputeStats(layer);
      share("sparse_tc", stats.sparse_tc);
      share("slot_filled", stats.slot_filled);
      share("residual", stats.residual);
      share("dummy_codes", stats.dummy_codes);
      share("filler_codes", stats.filler_codes);
      out.numbers = {{"tiles", stats.tiles}, {"tiles_without_filling", stats.tiles_without_filling}};
      break;
    }
    case Format::kRlcCsc: {
      const rlc_csc::Stats stats = rlc_csc::ComputeStats(layer);
      share("padding_entries", stats.padding_entries);
      share("unused_places", stats.unused_places);
      out.numbers = {{"run_bits", layer.params[0]}};
      break;
    }
    case Format::kRowStream:
      share("escapes", row_stream::CountEscapes(layer));
      out.numbers = {{"exponent_bits", layer.params[row_stream::kParamCoding]},  // 0: values are verbatim
                     {"run_bits", layer.params[row_stream::kParamRunBits]},
                     {"rows_per_tile", layer.params[row_stream::kParamRowsPerTile]},
                     {"warps", layer.params[row_stream::kParamWarps]},
                     {"segment_columns", layer.params[row_stream::kParamSegmentColumns]}};
      break;
    case Format::kBitmapGpu:
      out.numbers = {{"chunk_columns", layer.params[bitmap_gpu::kParamChunkCols]}};
      break;
    default:
      break;
  }
  return out;
}

DensityMap MapDensity(const DenseView& w, int64_t rows, int64_t cols) {
  DensityMap map;
  map.rows = std::min(std::max<int64_t>(rows, 1), w.rows);
  map.cols = std::min(std::max<int64_t>(cols, 1), w.cols);
  map.density.resize(static_cast<size_t>(map.rows * map.cols));
  // Within kMaxElements, so that row * w.rows and the like stay in range.
  const auto row_begin = [&](int64_t i) { return i * w.rows / map.rows; };
  const auto col_begin = [&](int64_t j) { return j * w.cols / map.cols; };
  std::vector<int64_t> empty_rows(static_cast<size_t>(map.rows));
  std::vector<std::vector<bool>> columns_seen(static_cast<size_t>(map.rows));
  DefaultThreadPool().ParallelFor(map.rows, [&](int64_t i, int /*worker*/) {
    std::vector<bool>& seen = columns_seen[static_cast<size_t>(i)];
    seen.resize(static_cast<size_t>(w.cols));
    std::vector<int64_t> counts(static_cast<size_t>(map.cols));
    for (int64_t row = row_begin(i); row < row_begin(i + 1); ++row) {
      const std::byte* const data = w.row(row);
      int64_t in_row = 0;
      for (int64_t j = 0; j < map.cols; ++j) {
        int64_t count = 0;
        for (int64_t col = col_begin(j); col < col_begin(j + 1); ++col) {
          if (!NonzeroAt(w.dtype, data, col)) continue;
          seen[static_cast<size_t>(col)] = true;
          ++count;
        }
        counts[static_cast<size_t>(j)] += count;
        in_row += count;
      }
      if (in_row == 0) ++empty_rows[static_cast<size_t>(i)];
    }
    for (int64_t j = 0; j < map.cols; ++j) {
      const int64_t elements = (row_begin(i + 1) - row_begin(i)) * (col_begin(j + 1) - col_begin(j));
      map.density[static_cast<size_t>(i * map.cols + j)] =
          static_cast<double>(counts[static_cast<size_t>(j)]) / static_cast<double>(elements);
    }
  });
  for (const int64_t count : empty_rows) map.empty_rows += count;
  for (int64_t col = 0; col < w.cols; ++col) {
    const auto sees = [col](const std::vector<bool>& seen) { return seen[static_cast<size_t>(col)]; };
    if (std::none_of(columns_seen.begin(), columns_seen.end(), sees)) ++map.empty_cols;
  }
  const auto [lowest, highest] = std::minmax_element(map.density.begin(), map.density.end());
  map.lowest = *lowest;
  map.highest = *highest;
  return map;
}

}  // namespace spmmd
