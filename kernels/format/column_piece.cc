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

// Columns that one task packs: a cache line of every row.
constexpr int64_t kTaskColumns = 32;

struct Task {
  int64_t block;
  int64_t first_column;
  int64_t columns;
};

// Calls visit(stream, column - first_column, d, bits) for the nonzeros of a task, d ascending within a stream's column.
template <typename Visit>
void VisitNonzeros(const DenseView& w, const Task& task, Visit visit) {
  for (int d = 0; d < kStreamRows; ++d) {
    for (int stream = 0; stream < kStreams; ++stream) {
      const int64_t row = task.block * kBlockRows + Row(stream, d);
      if (row >= w.rows) continue;
      const std::byte* from = w.row(row) + task.first_column * 2;
      for (int64_t c = 0; c < task.columns; ++c) {
        uint16_t bits;
        std::memcpy(&bits, from + c * 2, 2);
        if (IsNonzeroBits(bits)) visit(stream, c, d, bits);
      }
    }
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
    std::array<std::array<uint8_t, kTaskColumns>, kStreams> count = {};
    int64_t total = 0;
    VisitNonzeros(w, task, [&](int stream, int64_t c, int, uint16_t) {
      ++count[stream][c];
      ++total;
    });
    for (int64_t c = 0; c < task.columns; ++c) {
      int longest = 0;
      for (int stream = 0; stream < kStreams; ++stream) longest = std::max<int>(longest, count[stream][c]);
      descriptor[task.block * w.cols + task.first_column + c] = (longest + kChunkValues - 1) / kChunkValues;
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
    std::array<std::array<uint8_t, kTaskColumns>, kStreams> count = {};
    std::array<std::byte*, kTaskColumns> piece;
    std::array<int, kTaskColumns> chunks;
    int64_t used = 0;
    for (int64_t c = 0; c < task.columns; ++c) {
      const uint32_t entry = descriptor[task.block * w.cols + task.first_column + c];
      chunks[c] = DescriptorChunks(entry);
      piece[c] = data + (block_unit[task.block] + DescriptorOffset(entry)) * kUnitBytes;
      used += chunks[c] > 0 ? 1 : 0;
    }
    VisitNonzeros(w, task, [&](int stream, int64_t c, int d, uint16_t bits) {
      std::byte* word = piece[c] + stream * 8 + d / 32 * 4;
      uint32_t mask;
      std::memcpy(&mask, word, 4);
      mask |= 1u << Bit(d);
      std::memcpy(word, &mask, 4);
      std::memcpy(piece[c] + ValueOffset(stream, count[stream][c]++, chunks[c]), &bits, 2);
    });
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
