#include "kernels/format/bitmap_gpu.h"

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
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd::bitmap_gpu {
namespace {

constexpr int kMaxSteps = 16;
constexpr int64_t kOffsetUnit = 16;  // bytes
constexpr int64_t kSmallElements = int64_t{50} << 20;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Grid {
  int chunk_cols;
  int64_t row_blocks;
  int64_t col_blocks;

  Grid(int64_t m, int64_t k, int cols)
      : chunk_cols(cols), row_blocks(CeilDiv(m, kChunkRows)), col_blocks(CeilDiv(k, cols)) {}
  int64_t chunks() const { return row_blocks * col_blocks; }
};

// One chunk on its way from dense to packed.
class ChunkPacker {
 public:
  ChunkPacker(const DenseView& w, const Grid& grid, int64_t chunk) : chunk_cols_(grid.chunk_cols) {
    row0_ = chunk / grid.col_blocks * kChunkRows;
    col0_ = chunk % grid.col_blocks * grid.chunk_cols;
    rows_ = static_cast<int>(std::min<int64_t>(kChunkRows, w.rows - row0_));
    cols_ = static_cast<int>(std::min<int64_t>(grid.chunk_cols, w.cols - col0_));
    steps_ = Steps(chunk_cols_);
    Scan(w);
    Balance();
  }

  int nnz() const { return nnz_; }
  int bytes() const { return ChunkBytes(chunk_cols_, value_rows_); }

  // Writes bytes() bytes. Filler is zero because `out` is.
  void Write(std::byte* out) const {
    const int words = MaskWords(chunk_cols_);
    for (int lane = 0; lane < kLanes; ++lane) {
      std::memcpy(out + static_cast<size_t>(lane * words) * 4, masks_[static_cast<size_t>(lane)].data(),
                  static_cast<size_t>(words) * 4);
      const uint32_t descriptor = EncodeJump(jumps_[static_cast<size_t>(2 * lane)], chunk_cols_) |
                                  EncodeJump(jumps_[static_cast<size_t>(2 * lane + 1)], chunk_cols_) << 16;
      std::memcpy(out + MaskBytes(chunk_cols_) + lane * 4, &descriptor, 4);
    }
    std::byte* values = out + HeaderBytes(chunk_cols_);
    for (int stream = 0; stream < kStreams; ++stream) {
      const Jump& jump = jumps_[static_cast<size_t>(stream)];
      int column = stream;
      int row = 0;
      for (int step = 0; step < steps_; ++step) {
        if (step == jump.step) {
          column = jump.column;
          row = jump.row;
        }
        const uint32_t bits = StepBits(stream, step);
        for (int e = 0; e < 4; ++e) {
          if ((bits >> e & 1u) == 0) continue;
          const uint16_t value =
              ValueAt(ElementRow(stream / 2, stream % 2), step * kStepCols + ElementCol(stream / 2, e));
          std::memcpy(values + row * kRowBytes + column * 2, &value, 2);
          ++row;
        }
      }
    }
  }

 private:
  uint16_t ValueAt(int row, int col) const { return values_[static_cast<size_t>(row * chunk_cols_ + col)]; }

  uint32_t StepBits(int stream, int step) const {
    return masks_[static_cast<size_t>(stream / 2)][static_cast<size_t>(step / 4)] >> (step % 4 * 8 + stream % 2 * 4) &
           0xfu;
  }

  void Scan(const DenseView& w) {
    values_.fill(0);
    for (int r = 0; r < rows_; ++r) {
      std::memcpy(values_.data() + r * chunk_cols_, w.row(row0_ + r) + static_cast<size_t>(col0_) * 2,
                  static_cast<size_t>(cols_) * 2);
    }
    for (auto& lane : masks_) lane.fill(0);
    for (int stream = 0; stream < kStreams; ++stream) {
      const int lane = stream / 2;
      const int row = ElementRow(lane, stream % 2);
      int total = 0;
      for (int step = 0; step < steps_; ++step) {
        uint32_t bits = 0;
        for (int e = 0; e < 4; ++e) {
          bits |= (IsNonzeroBits(ValueAt(row, step * kStepCols + ElementCol(lane, e))) ? 1u : 0u) << e;
        }
        masks_[static_cast<size_t>(lane)][static_cast<size_t>(step / 4)] |= bits << (step % 4 * 8 + stream % 2 * 4);
        const int count = std::popcount(bits);
        counts_[static_cast<size_t>(stream)][static_cast<size_t>(step)] = static_cast<uint8_t>(count);
        total += count;
      }
      totals_[static_cast<size_t>(stream)] = total;
      nnz_ += total;
    }
  }

  // The fewest value rows for which every too long stream finds room for its tail, best fit, longest tail first.
  void Balance() {
    const int longest = *std::max_element(totals_.begin(), totals_.end());
    for (value_rows_ = static_cast<int>(CeilDiv(nnz_, kStreams)); value_rows_ < longest; ++value_rows_) {
      if (TryBalance()) return;
    }
    jumps_.fill({});  // value_rows_ == longest: nothing has to move
  }

  bool TryBalance() {
    struct Tail {
      int length;
      int stream;
    };
    std::array<Tail, kStreams> tails;
    int tail_count = 0;
    std::array<int, kStreams> room;  // unused rows at the end of a stream's column
    jumps_.fill({});
    for (int stream = 0; stream < kStreams; ++stream) {
      const int total = totals_[static_cast<size_t>(stream)];
      room[static_cast<size_t>(stream)] = std::max(0, value_rows_ - total);
      if (total <= value_rows_) continue;
      int step = 0;
      int head = 0;
      while (step < LastJumpStep(chunk_cols_) &&
             head + counts_[static_cast<size_t>(stream)][static_cast<size_t>(step)] <= value_rows_) {
        head += counts_[static_cast<size_t>(stream)][static_cast<size_t>(step)];
        ++step;
      }
      if (step < steps_ / 2) return false;
      jumps_[static_cast<size_t>(stream)].step = step;
      tails[static_cast<size_t>(tail_count++)] = {total - head, stream};
    }
    std::sort(tails.begin(), tails.begin() + tail_count, [](const Tail& a, const Tail& b) {
      return a.length != b.length ? a.length > b.length : a.stream < b.stream;
    });
    for (int i = 0; i < tail_count; ++i) {
      const Tail& tail = tails[static_cast<size_t>(i)];
      int best = -1;
      for (int column = 0; column < kStreams; ++column) {
        const int space = room[static_cast<size_t>(column)];
        if (space >= tail.length && (best < 0 || space < room[static_cast<size_t>(best)])) best = column;
      }
      if (best < 0) return false;
      Jump& jump = jumps_[static_cast<size_t>(tail.stream)];
      jump.column = best;
      jump.row = value_rows_ - room[static_cast<size_t>(best)];
      room[static_cast<size_t>(best)] -= tail.length;
    }
    return true;
  }

  int chunk_cols_;
  int64_t row0_ = 0;
  int64_t col0_ = 0;
  int rows_ = 0;
  int cols_ = 0;
  int steps_ = 0;
  int nnz_ = 0;
  int value_rows_ = 0;
  std::array<uint16_t, kChunkRows * 256> values_;
  std::array<std::array<uint32_t, 4>, kLanes> masks_;
  std::array<std::array<uint8_t, kMaxSteps>, kStreams> counts_;
  std::array<int, kStreams> totals_;
  std::array<Jump, kStreams> jumps_;
};

absl::Status Corrupt(const char* section, const std::string& what) {
  return absl::DataLossError(absl::StrCat("BITMAP_GPU section ", section, ": ", what));
}

}  // namespace

int DefaultChunkCols(int64_t m, int64_t k) { return m * k < kSmallElements ? 128 : 256; }

absl::StatusOr<PackedLayer> Pack(const DenseView& w, const PackOptions& options, int chunk_cols) {
  if (w.dtype == DType::kF32) {
    return absl::InvalidArgumentError("dtype: BITMAP_GPU stores fp16 and bf16, not fp32");
  }
  if (chunk_cols == 0) chunk_cols = DefaultChunkCols(w.rows, w.cols);
  if (!IsChunkCols(chunk_cols)) {
    return absl::InvalidArgumentError(absl::StrCat("chunk_cols: ", chunk_cols, " is neither 128 nor 256"));
  }
  if (!options.allow_nonfinite) SPMMD_RETURN_IF_ERROR(CheckFinite(w));
  const Grid grid(w.rows, w.cols, chunk_cols);
  PackedLayer layer;
  layer.format = Format::kBitmapGpu;
  layer.layout_version = kLayoutVersion;
  layer.dtype = w.dtype;
  layer.m = w.rows;
  layer.k = w.cols;
  layer.params[kParamChunkCols] = chunk_cols;

  // Sizes first, then bytes: packing a chunk twice is cheaper than keeping them all.
  SPMMD_ASSIGN_OR_RETURN(Buffer offset_buffer,
                         Buffer::Allocate(static_cast<size_t>(grid.chunks() + 1) * sizeof(uint32_t)));
  uint32_t* offsets = offset_buffer.MutableAs<uint32_t>().data();
  std::vector<int64_t> block_nnz(static_cast<size_t>(grid.row_blocks));
  DefaultThreadPool().ParallelFor(grid.row_blocks, [&](int64_t block, int /*worker*/) {
    for (int64_t c = 0; c < grid.col_blocks; ++c) {
      const ChunkPacker packer(w, grid, block * grid.col_blocks + c);
      offsets[block * grid.col_blocks + c + 1] = static_cast<uint32_t>(packer.bytes() / kOffsetUnit);
      block_nnz[static_cast<size_t>(block)] += packer.nnz();
    }
  });
  int64_t end = 0;
  int64_t largest = 0;
  for (int64_t c = 1; c <= grid.chunks(); ++c) {
    largest = std::max<int64_t>(largest, offsets[c]);
    end += offsets[c];
    if (end > int64_t{UINT32_MAX}) {
      return absl::InvalidArgumentError("M*K: the packed layer would exceed BITMAP_GPU's limit of 64 GiB");
    }
    offsets[c] = static_cast<uint32_t>(end);
  }
  for (const int64_t nnz : block_nnz) layer.nnz += nnz;
  layer.params[kParamMaxChunkBytes] = largest * kOffsetUnit;

  SPMMD_ASSIGN_OR_RETURN(Buffer chunks, Buffer::Allocate(static_cast<size_t>(end * kOffsetUnit)));
  std::byte* out = chunks.mutable_data();
  DefaultThreadPool().ParallelFor(grid.row_blocks, [&](int64_t block, int /*worker*/) {
    for (int64_t c = block * grid.col_blocks; c < (block + 1) * grid.col_blocks; ++c) {
      ChunkPacker(w, grid, c).Write(out + static_cast<int64_t>(offsets[c]) * kOffsetUnit);
    }
  });
  // Filler values, and mask bits outside the matrix.
  const int64_t headers = grid.chunks() * HeaderBytes(chunk_cols);
  const int64_t outside_bits = grid.chunks() * kChunkRows * chunk_cols - w.rows * w.cols;
  const int64_t padding = end * kOffsetUnit - headers - layer.nnz * 2 + outside_bits / 8;
  layer.sections.push_back({kChunkSection, SectionClass::kValues, static_cast<size_t>(padding), std::move(chunks)});
  layer.sections.push_back({kOffsetSection, SectionClass::kMetadata, 0, std::move(offset_buffer)});
  return layer;
}

absl::Status Unpack(const PackedLayer& layer, const MutableDenseView& out) {
  const int chunk_cols = static_cast<int>(layer.params[kParamChunkCols]);
  const Grid grid(layer.m, layer.k, chunk_cols);
  const std::byte* chunks = layer.FindSection(kChunkSection)->data.data();
  const uint32_t* offsets = layer.FindSection(kOffsetSection)->data.As<uint32_t>().data();
  const int words = MaskWords(chunk_cols);
  DefaultThreadPool().ParallelFor(grid.chunks(), [&](int64_t c, int /*worker*/) {
    const int64_t row0 = c / grid.col_blocks * kChunkRows;
    const int64_t col0 = c % grid.col_blocks * chunk_cols;
    const std::byte* chunk = chunks + static_cast<int64_t>(offsets[c]) * kOffsetUnit;
    const std::byte* values = chunk + HeaderBytes(chunk_cols);
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t descriptor;
      std::memcpy(&descriptor, chunk + MaskBytes(chunk_cols) + lane * 4, 4);
      for (int half = 0; half < 2; ++half) {
        const Jump jump = DecodeJump(descriptor, half, chunk_cols);
        int column = 2 * lane + half;
        int row = 0;
        for (int step = 0; step < Steps(chunk_cols); ++step) {
          if (step == jump.step) {
            column = jump.column;
            row = jump.row;
          }
          uint32_t word;
          std::memcpy(&word, chunk + static_cast<size_t>(lane * words + step / 4) * 4, 4);
          const uint32_t bits = word >> (step % 4 * 8 + half * 4) & 0xfu;
          for (int e = 0; e < 4; ++e) {
            if ((bits >> e & 1u) == 0) continue;
            std::byte* to = out.row(row0 + ElementRow(lane, half)) +
                            static_cast<size_t>(col0 + step * kStepCols + ElementCol(lane, e)) * 2;
            std::memcpy(to, values + row * kRowBytes + column * 2, 2);
            ++row;
          }
        }
      }
    }
  });
  return absl::OkStatus();
}

absl::Status Validate(const PackedLayer& layer) {
  if (layer.layout_version != kLayoutVersion) {
    return absl::DataLossError(
        absl::StrCat("BITMAP_GPU layout version ", layer.layout_version, ", expected ", kLayoutVersion));
  }
  if (layer.dtype == DType::kF32) return absl::DataLossError("BITMAP_GPU dtype: fp32");
  if (!IsChunkCols(layer.params[kParamChunkCols])) {
    return absl::DataLossError(absl::StrCat("BITMAP_GPU params: ", layer.params[kParamChunkCols], " columns a chunk"));
  }
  const Grid grid(layer.m, layer.k, static_cast<int>(layer.params[kParamChunkCols]));
  const Section* chunks = layer.FindSection(kChunkSection);
  const Section* offset_section = layer.FindSection(kOffsetSection);
  if (chunks == nullptr) return Corrupt("chunks", "missing");
  if (offset_section == nullptr) return Corrupt("offsets", "missing");
  const size_t want = static_cast<size_t>(grid.chunks() + 1) * sizeof(uint32_t);
  if (offset_section->data.size() != want) {
    return Corrupt("offsets", absl::StrCat(offset_section->data.size(), " bytes, expected ", want));
  }
  const uint32_t* offsets = offset_section->data.As<uint32_t>().data();
  if (offsets[0] != 0 || static_cast<size_t>(offsets[grid.chunks()]) * kOffsetUnit != chunks->data.size()) {
    return Corrupt("offsets", absl::StrCat("do not run from 0 to the ", chunks->data.size(), " bytes of the chunks"));
  }
  std::atomic<int64_t> bad{grid.chunks()};
  std::atomic<int64_t> nnz{0};
  DefaultThreadPool().ParallelFor(grid.chunks(), [&](int64_t c, int /*worker*/) {
    const int64_t rows = std::min<int64_t>(kChunkRows, layer.m - c / grid.col_blocks * kChunkRows);
    const int64_t cols = std::min<int64_t>(grid.chunk_cols, layer.k - c % grid.col_blocks * grid.chunk_cols);
    int64_t count = 0;
    const bool ok =
        offsets[c] <= offsets[c + 1] && offsets[c + 1] <= offsets[grid.chunks()] &&
        static_cast<int64_t>(offsets[c + 1] - offsets[c]) * kOffsetUnit <= layer.params[kParamMaxChunkBytes] &&
        CheckChunk(chunks->data.data() + static_cast<int64_t>(offsets[c]) * kOffsetUnit,
                   static_cast<size_t>(offsets[c + 1] - offsets[c]) * kOffsetUnit, grid.chunk_cols,
                   static_cast<int>(rows), static_cast<int>(cols), &count);
    nnz.fetch_add(count, std::memory_order_relaxed);
    if (ok) return;
    int64_t seen = bad.load(std::memory_order_relaxed);
    while (c < seen && !bad.compare_exchange_weak(seen, c, std::memory_order_relaxed)) {
    }
  });
  if (bad.load() != grid.chunks()) {
    return Corrupt("chunks", absl::StrCat("chunk ", bad.load(), " would be decoded out of bounds"));
  }
  if (nnz.load() != layer.nnz) {
    return Corrupt("chunks", absl::StrCat(nnz.load(), " nonzeros, the header says ", layer.nnz));
  }
  if (layer.params[kParamMaxChunkBytes] > ChunkBytes(grid.chunk_cols, kMaxStreamRow)) {
    return absl::DataLossError("BITMAP_GPU params: largest chunk exceeds a dense one");
  }
  return absl::OkStatus();
}

}  // namespace spmmd::bitmap_gpu
