#include "kernels/format/column_piece.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_pool.h"
#include "kernels/format/column_piece_layout.h"

namespace spmmd::column_piece {
namespace {

// Columns that one task packs: 512 bytes of every row. The rows of a stream are far apart, and shorter pieces of them
// cost a TLB entry and a DRAM page for little: with 64 bytes two threads are no faster than one.
constexpr int64_t kTaskColumns = 256;

struct Task {
  int64_t block;
  int64_t first_column;
  int64_t columns;
};

// The rows of one stream of a task, padded with zeros to kTaskColumns columns and kStreamRows rows. Whether an element
// is zero is a matter of chance: nothing below branches on it.
class StreamRows {
 public:
  StreamRows(const DenseView& w, const Task& task, int stream) : w_(w), task_(task), stream_(stream) {}

  // Elements of the row of index d, valid until the next call.
  const uint16_t* row(int d) {
    const int64_t row = task_.block * kBlockRows + Row(stream_, d);
    if (row < w_.rows && task_.columns == kTaskColumns) {
      return reinterpret_cast<const uint16_t*>(w_.row(row)) + task_.first_column;
    }
    clipped_.fill(0);
    if (row < w_.rows) {
      std::memcpy(clipped_.data(), w_.row(row) + task_.first_column * 2, static_cast<size_t>(task_.columns) * 2);
    }
    return clipped_.data();
  }

 private:
  const DenseView& w_;
  const Task& task_;
  const int stream_;
  std::array<uint16_t, kTaskColumns> clipped_;
};

// Nonzeros of every column in a stream.
std::array<uint8_t, kTaskColumns> CountStream(StreamRows rows) {
  std::array<uint8_t, kTaskColumns> counts{};
  for (int d = 0; d < kStreamRows; ++d) {
    const uint16_t* const values = rows.row(d);
    for (size_t c = 0; c < kTaskColumns; ++c) counts[c] = static_cast<uint8_t>(counts[c] + IsNonzeroBits(values[c]));
  }
  return counts;
}

// The nonzeros of every column in a stream, one after another and then zeros, and the columns' bitmaps.
struct StreamColumns {
  std::array<std::array<uint16_t, kStreamRows + 1>, kTaskColumns> values{};
  std::array<std::array<uint32_t, kTaskColumns>, 2> bits{};
  std::array<uint8_t, kTaskColumns> counts{};

  explicit StreamColumns(StreamRows rows) {
    for (int d = 0; d < kStreamRows; ++d) {
      const uint16_t* const row = rows.row(d);
      std::array<uint32_t, kTaskColumns>& word = bits[static_cast<size_t>(d / 32)];
      for (size_t c = 0; c < kTaskColumns; ++c) word[c] |= (IsNonzeroBits(row[c]) ? 1u : 0u) << Bit(d);
      // Every element is written, zeros of either sign as +0, and the next one over it when it was a zero.
      for (size_t c = 0; c < kTaskColumns; ++c) {
        const bool nonzero = IsNonzeroBits(row[c]);
        values[c][counts[c]] = nonzero ? row[c] : uint16_t{0};
        counts[c] = static_cast<uint8_t>(counts[c] + nonzero);
      }
    }
  }
};

// How a piece lays out streams of these lengths: the fewest units for which every stream that is longer than its places
// finds a lender of its own.
struct Places {
  int units = 0;
  uint32_t lenders = kNoTails;
};

Places ChoosePlaces(const std::array<uint8_t, kStreams>& length) {
  int total = 0;
  int longest = 0;
  for (const uint8_t n : length) {
    total += n;
    longest = std::max<int>(longest, n);
  }
  if (total == 0) return {};
  constexpr int kEach = kStreams * kUnitValues;
  // By length, longest first: the i-th longest borrows from the i-th shortest, which is the best that can be done.
  std::array<uint8_t, kStreams> order;
  for (size_t i = 0; i < kStreams; ++i) {
    size_t at = i;
    for (; at > 0 && length[order[at - 1]] < length[i]; --at) order[at] = order[at - 1];
    order[at] = static_cast<uint8_t>(i);
  }
  int units = std::max((total + kEach - 1) / kEach, (longest - kMaxBorrowed + kUnitValues - 1) / kUnitValues);
  for (;; ++units) {
    const int places = units * kUnitValues;
    uint32_t lenders = kNoTails;
    bool fits = true;
    for (size_t i = 0; i < kStreams; ++i) {
      const size_t borrower = order[i];
      if (length[borrower] <= places) break;
      const size_t lender = order[kStreams - 1 - i];
      if (length[lender] + (length[borrower] - places) > places) {
        fits = false;
        break;
      }
      lenders ^= static_cast<uint32_t>(borrower ^ lender) << (3 * borrower);
    }
    if (fits) return {units, lenders};
  }
}

absl::Status Corrupt(const char* what) { return absl::DataLossError(absl::StrCat("COLUMN_PIECE: ", what)); }

absl::StatusOr<View> OpenView(const PackedLayer& layer) {
  if (layer.format != Format::kColumnPiece) return Corrupt("the layer has another format");
  if (layer.layout_version != kLayoutVersion) return Corrupt("unknown layout version");
  if (layer.dtype != DType::kF16 && layer.dtype != DType::kBf16) return Corrupt("dtype is neither fp16 nor bf16");
  if (!CheckShape(layer.m, layer.k).ok()) return Corrupt("shape out of range");
  const Section* pieces = layer.FindSection(kPieceSection);
  const Section* descriptors = layer.FindSection(kDescriptorSection);
  const Section* blocks = layer.FindSection(kBlockSection);
  if (pieces == nullptr || descriptors == nullptr || blocks == nullptr) return Corrupt("a section is missing");
  View view;
  if (const char* error =
          Open(layer.m, layer.k, layer.nnz, layer.params.data(), pieces->data.data(), pieces->data.size(),
               descriptors->data.data(), descriptors->data.size(), blocks->data.data(), blocks->data.size(), &view)) {
    return Corrupt(error);
  }
  return view;
}

constexpr const char* kBadPiece =
    "section descriptors or pieces: a piece or a tail is out of place, or has too many bits";

}  // namespace

absl::StatusOr<PackedLayer> Pack(const DenseView& w, const PackOptions& options) {
  SPMMD_RETURN_IF_ERROR(CheckShape(w.rows, w.cols));
  if (w.dtype != DType::kF16 && w.dtype != DType::kBf16) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype: COLUMN_PIECE stores fp16 and bf16 weights, not ", std::string(Name(w.dtype))));
  }
  if (!options.allow_nonfinite) SPMMD_RETURN_IF_ERROR(CheckFinite(w));
  const int64_t blocks = (w.rows + kBlockRows - 1) / kBlockRows;
  const int64_t column_tasks = (w.cols + kTaskColumns - 1) / kTaskColumns;
  const auto task_at = [&](int64_t i) {
    const int64_t first = i % column_tasks * kTaskColumns;
    return Task{i / column_tasks, first, std::min(kTaskColumns, w.cols - first)};
  };
  SPMMD_ASSIGN_OR_RETURN(Buffer descriptors,
                         Buffer::Allocate(static_cast<size_t>(blocks * w.cols) * sizeof(Descriptor)));
  SPMMD_ASSIGN_OR_RETURN(Buffer block_units, Buffer::Allocate(static_cast<size_t>(blocks + 1) * 8));
  auto* const descriptor = descriptors.MutableAs<Descriptor>().data();
  auto* const block_unit = block_units.MutableAs<uint64_t>().data();
  ThreadPool& pool = DefaultThreadPool();

  // Units and lenders of every piece, then where each begins.
  std::atomic<int64_t> nnz{0};
  pool.ParallelFor(blocks * column_tasks, [&](int64_t i, int) {
    const Task task = task_at(i);
    std::array<std::array<uint8_t, kTaskColumns>, kStreams> counts;
    for (int stream = 0; stream < kStreams; ++stream) {
      counts[static_cast<size_t>(stream)] = CountStream({w, task, stream});
    }
    int64_t total = 0;
    for (int64_t c = 0; c < task.columns; ++c) {
      std::array<uint8_t, kStreams> length;
      for (size_t stream = 0; stream < kStreams; ++stream) {
        length[stream] = counts[stream][static_cast<size_t>(c)];
        total += length[stream];
      }
      const Places places = ChoosePlaces(length);
      descriptor[task.block * w.cols + task.first_column + c] = {static_cast<uint32_t>(places.units), places.lenders};
    }
    nnz += total;
  });
  int max_units = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    uint64_t unit = 0;
    for (int64_t c = 0; c < w.cols; ++c) {
      uint32_t& entry = descriptor[b * w.cols + c].piece;
      const int units = static_cast<int>(entry);
      max_units = std::max(max_units, units);
      entry = EncodePiece(unit, units);
      unit += PieceUnits(units);
      if (unit >= kMaxBlockUnits) {
        return absl::ResourceExhaustedError("COLUMN_PIECE: a block of 512 rows needs 8 GiB or more");
      }
    }
    block_unit[b + 1] = block_unit[b] + unit;
  }

  const size_t piece_bytes = block_unit[blocks] * kUnitBytes;
  SPMMD_ASSIGN_OR_RETURN(Buffer pieces, Buffer::Allocate(piece_bytes));
  std::byte* const data = pieces.mutable_data();
  std::atomic<int64_t> used_pieces{0};
  pool.ParallelFor(blocks * column_tasks, [&](int64_t i, int) {
    const Task task = task_at(i);
    std::array<std::byte*, kTaskColumns> piece;
    int64_t used = 0;
    const Descriptor* const own = descriptor + task.block * w.cols + task.first_column;
    for (int64_t c = 0; c < task.columns; ++c) {
      piece[static_cast<size_t>(c)] = data + (block_unit[task.block] + PieceUnit(own[c].piece)) * kUnitBytes;
      used += PlaceUnits(own[c].piece) > 0 ? 1 : 0;
    }
    // What does not fit a stream's own places waits here until all lengths are known.
    std::array<std::array<uint8_t, kStreams>, kTaskColumns> length;
    std::array<std::array<std::array<uint16_t, kMaxBorrowed>, kStreams>, kTaskColumns> tail;
    for (int stream = 0; stream < kStreams; ++stream) {
      const StreamColumns columns({w, task, stream});
      for (size_t c = 0; c < static_cast<size_t>(task.columns); ++c) {
        const int units = PlaceUnits(own[c].piece);
        if (units == 0) continue;
        for (size_t word = 0; word < 2; ++word) {
          std::memcpy(piece[c] + stream * kBitmapBytes / kStreams + 4 * word, &columns.bits[word][c], 4);
        }
        const uint16_t* const from = columns.values[c].data();
        int place = 0;
        for (; place < units / 2 * 8; place += 8) {
          std::memcpy(piece[c] + PlaceOffset(stream, place, units), from + place, 16);
        }
        if (units % 2 != 0) {
          std::memcpy(piece[c] + PlaceOffset(stream, place, units), from + place, 8);
          place += kUnitValues;
        }
        const uint8_t values = columns.counts[c];
        length[c][static_cast<size_t>(stream)] = values;
        for (int at = place; at < values; ++at)
          tail[c][static_cast<size_t>(stream)][static_cast<size_t>(at - place)] = from[at];
      }
    }
    for (size_t c = 0; c < static_cast<size_t>(task.columns); ++c) {
      if (own[c].lenders == kNoTails) continue;
      const int units = PlaceUnits(own[c].piece);
      for (int stream = 0; stream < kStreams; ++stream) {
        const int borrowed = length[c][static_cast<size_t>(stream)] - units * kUnitValues;
        const int lender = Lender(own[c].lenders, stream);
        for (int at = 0; at < borrowed; ++at) {
          std::memcpy(piece[c] + PlaceOffset(lender, length[c][static_cast<size_t>(lender)] + at, units),
                      &tail[c][static_cast<size_t>(stream)][static_cast<size_t>(at)], 2);
        }
      }
    }
    used_pieces += used;
  });

  PackedLayer layer;
  layer.format = Format::kColumnPiece;
  layer.layout_version = kLayoutVersion;
  layer.dtype = w.dtype;
  layer.m = w.rows;
  layer.k = w.cols;
  layer.nnz = nnz;
  layer.params[kParamMaxUnits] = max_units;
  // The bitmaps are metadata inside the section of values; what is neither a bitmap nor a nonzero is padding.
  const size_t padding = piece_bytes - static_cast<size_t>(used_pieces) * kBitmapBytes - static_cast<size_t>(nnz) * 2;
  layer.sections.push_back({kPieceSection, SectionClass::kValues, padding, std::move(pieces)});
  layer.sections.push_back({kDescriptorSection, SectionClass::kMetadata, 0, std::move(descriptors)});
  layer.sections.push_back({kBlockSection, SectionClass::kMetadata, 0, std::move(block_units)});
  return layer;
}

absl::Status Validate(const PackedLayer& layer) {
  SPMMD_ASSIGN_OR_RETURN(const View view, OpenView(layer));
  std::atomic<int64_t> nnz{0};
  std::atomic<bool> ok{true};
  DefaultThreadPool().ParallelFor(view.blocks, [&](int64_t block, int) {
    int64_t count = 0;
    if (!DecodeBlock(view, block, &count, [](int64_t, int64_t, uint16_t) {})) ok = false;
    nnz += count;
  });
  if (!ok) return Corrupt(kBadPiece);
  if (nnz != view.nnz) return Corrupt("the number of nonzeros differs from the header's");
  return absl::OkStatus();
}

absl::Status Unpack(const PackedLayer& layer, const MutableDenseView& out) {
  SPMMD_ASSIGN_OR_RETURN(const View view, OpenView(layer));
  std::atomic<bool> ok{true};
  DefaultThreadPool().ParallelFor(view.blocks, [&](int64_t block, int) {
    int64_t count = 0;
    if (!DecodeBlock(view, block, &count, [&](int64_t row, int64_t column, uint16_t bits) {
          std::memcpy(out.row(row) + column * 2, &bits, 2);
        })) {
      ok = false;
    }
  });
  return ok ? absl::OkStatus() : Corrupt(kBadPiece);
}

}  // namespace spmmd::column_piece
