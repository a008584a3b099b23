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

  explicit StreamColumns(StreamRows rows) {
    std::array<uint8_t, kTaskColumns> counts{};
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

constexpr const char* kBadPiece = "section descriptors or pieces: a piece is out of place or has too many bits";

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
  SPMMD_ASSIGN_OR_RETURN(Buffer descriptors, Buffer::Allocate(static_cast<size_t>(blocks * w.cols) * 4));
  SPMMD_ASSIGN_OR_RETURN(Buffer block_units, Buffer::Allocate(static_cast<size_t>(blocks + 1) * 8));
  auto* const descriptor = descriptors.MutableAs<uint32_t>().data();
  auto* const block_unit = block_units.MutableAs<uint64_t>().data();
  ThreadPool& pool = DefaultThreadPool();

  // Chunks of every piece, then where each begins.
  std::atomic<int64_t> nnz{0};
  pool.ParallelFor(blocks * column_tasks, [&](int64_t i, int) {
    const Task task = task_at(i);
    std::array<uint8_t, kTaskColumns> longest{};
    int64_t total = 0;
    for (int stream = 0; stream < kStreams; ++stream) {
      const std::array<uint8_t, kTaskColumns> counts = CountStream({w, task, stream});
      for (size_t c = 0; c < kTaskColumns; ++c) {
        longest[c] = std::max(longest[c], counts[c]);
        total += counts[c];
      }
    }
    for (int64_t c = 0; c < task.columns; ++c) {
      descriptor[task.block * w.cols + task.first_column + c] =
          (longest[static_cast<size_t>(c)] + kChunkValues - 1) / kChunkValues;
    }
    nnz += total;
  });
  int max_chunks = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    uint64_t unit = 0;
    for (int64_t c = 0; c < w.cols; ++c) {
      uint32_t& entry = descriptor[b * w.cols + c];
      const int chunks = static_cast<int>(entry);
      max_chunks = std::max(max_chunks, chunks);
      entry = Descriptor(unit, chunks);
      unit += PieceUnits(chunks);
      if (unit >= kMaxBlockUnits) {
        return absl::ResourceExhaustedError("COLUMN_PIECE: a block of 512 rows needs 4 GiB or more");
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
    std::array<int, kTaskColumns> chunks;
    int64_t used = 0;
    for (int64_t c = 0; c < task.columns; ++c) {
      const uint32_t entry = descriptor[task.block * w.cols + task.first_column + c];
      chunks[static_cast<size_t>(c)] = DescriptorChunks(entry);
      piece[static_cast<size_t>(c)] = data + (block_unit[task.block] + DescriptorOffset(entry)) * kUnitBytes;
      used += chunks[static_cast<size_t>(c)] > 0 ? 1 : 0;
    }
    for (int stream = 0; stream < kStreams; ++stream) {
      const StreamColumns columns({w, task, stream});
      for (size_t c = 0; c < static_cast<size_t>(task.columns); ++c) {
        if (chunks[c] == 0) continue;
        for (size_t word = 0; word < 2; ++word) {
          std::memcpy(piece[c] + stream * kBitmapBytes / kStreams + 4 * word, &columns.bits[word][c], 4);
        }
        // Neighbours in a stream lie side by side within two chunks, or within an odd last one.
        const uint16_t* const from = columns.values[c].data();
        int i = 0;
        for (; i + 2 * kChunkValues <= chunks[c] * kChunkValues; i += 2 * kChunkValues) {
          std::memcpy(piece[c] + ValueOffset(stream, i, chunks[c]), from + i, size_t{4} * kChunkValues);
        }
        if (i < chunks[c] * kChunkValues) {
          std::memcpy(piece[c] + ValueOffset(stream, i, chunks[c]), from + i, size_t{2} * kChunkValues);
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
  layer.params[kParamMaxChunks] = max_chunks;
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
