#include "kernels/format/bitmap_gpu.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
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

// The elements of one chunk, zeros outside the matrix.
class ChunkElements {
 public:
  ChunkElements(const DenseView& w, const Grid& grid, int64_t chunk) {
    const int64_t row0 = chunk / grid.col_blocks * kChunkRows;
    const int64_t col0 = chunk % grid.col_blocks * grid.chunk_cols;
    data_ = reinterpret_cast<const uint16_t*>(w.row(row0)) + col0;
    stride_ = w.row_stride;
    const int64_t rows = std::min<int64_t>(kChunkRows, w.rows - row0);
    const int64_t cols = std::min<int64_t>(grid.chunk_cols, w.cols - col0);
    if (rows == kChunkRows && cols == grid.chunk_cols) return;
    clipped_.assign(static_cast<size_t>(kChunkRows) * static_cast<size_t>(grid.chunk_cols), 0);
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(clipped_.data() + r * grid.chunk_cols, data_ + r * stride_, static_cast<size_t>(cols) * 2);
    }
    data_ = clipped_.data();
    stride_ = grid.chunk_cols;
  }
  const uint16_t* row(int r) const { return data_ + r * stride_; }

 private:
  const uint16_t* data_;
  int64_t stride_;
  std::vector<uint16_t> clipped_;
};

// What becomes of a byte's eight bits, those of columns 0 to 7 (or 8 to 15) of a step: byte t has the pair that lane t
// of four holds.
constexpr std::array<uint32_t, 256> kPairs = [] {
  std::array<uint32_t, 256> pairs{};
  for (uint32_t bits = 0; bits < 256; ++bits) {
    for (uint32_t t = 0; t < 4; ++t) pairs[bits] |= (bits >> (2 * t) & 3u) << (8 * t);
  }
  return pairs;
}();

// Where everything in a chunk goes: its masks, its descriptors and the number of its value rows.
class ChunkPlan {
 public:
  ChunkPlan(const DenseView& w, const Grid& grid, int64_t chunk)
      : chunk_cols_(grid.chunk_cols), steps_(Steps(chunk_cols_)) {
    Scan(ChunkElements(w, grid, chunk));
    Balance();
  }

  int nnz() const { return nnz_; }
  int bytes() const { return ChunkBytes(chunk_cols_, value_rows_); }

  // Writes HeaderBytes() bytes.
  void WriteHeader(std::byte* out) const {
    const int words = MaskWords(chunk_cols_);
    for (int lane = 0; lane < kLanes; ++lane) {
      std::memcpy(out + int64_t{4} * words * lane, masks_[static_cast<size_t>(lane)].data(),
                  static_cast<size_t>(words) * 4);
      const size_t pair = 2 * static_cast<size_t>(lane);
      const uint32_t descriptor = EncodeJump(jumps_[pair], chunk_cols_) | EncodeJump(jumps_[pair + 1], chunk_cols_)
                                                                              << 16;
      std::memcpy(out + MaskBytes(chunk_cols_) + int64_t{4} * lane, &descriptor, 4);
    }
  }

 private:
  // Values of a stream in the steps before `step`.
  int Before(int stream, int step) const {
    const int lane = stream / 2;
    return static_cast<int>(before_[static_cast<size_t>(ElementRow(lane, stream % 2))][static_cast<size_t>(step)] >>
                                (8 * (lane % 4)) &
                            0xffu);
  }
  int Total(int stream) const { return Before(stream, steps_); }

  void Scan(const ChunkElements& elements) {
    // For the four lanes of a row, one in each byte: their bits in every step.
    std::array<std::array<uint32_t, kMaxSteps>, kChunkRows> nibbles;
    for (int row = 0; row < kChunkRows; ++row) {
      const uint16_t* from = elements.row(row);
      std::array<uint32_t, kMaxSteps + 1>& before = before_[static_cast<size_t>(row)];
      before[0] = 0;
      for (size_t step = 0; step < static_cast<size_t>(steps_); ++step, from += kStepCols) {
        // A byte an element (a loop that compilers vectorize), then a bit an element.
        std::array<uint16_t, kStepCols> values;
        std::memcpy(values.data(), from, sizeof(values));
        std::array<uint8_t, kStepCols> nonzero;
        for (size_t i = 0; i < kStepCols; ++i) nonzero[i] = IsNonzeroBits(values[i]) ? 1 : 0;
        uint64_t bytes[2];
        std::memcpy(bytes, nonzero.data(), sizeof(bytes));
        constexpr uint64_t kByteToBit = 0x0102040810204080u;
        const uint32_t four = kPairs[bytes[0] * kByteToBit >> 56] | kPairs[bytes[1] * kByteToBit >> 56] << 2;
        nibbles[static_cast<size_t>(row)][step] = four;
        const uint32_t pairs = four - (four >> 1 & 0x05050505u);
        before[step + 1] = before[step] + (pairs & 0x03030303u) + (pairs >> 2 & 0x03030303u);
      }
    }
    for (size_t g = 0; g < kChunkRows / 2; ++g) {
      for (size_t word = 0; word < static_cast<size_t>(MaskWords(chunk_cols_)); ++word) {
        std::array<uint32_t, 4> lanes{};
        for (size_t s = 0; s < 4; ++s) {
          const uint32_t both = nibbles[g][4 * word + s] | nibbles[g + kChunkRows / 2][4 * word + s] << 4;
          for (size_t t = 0; t < 4; ++t) lanes[t] |= (both >> (8 * t) & 0xffu) << (8 * s);
        }
        for (size_t t = 0; t < 4; ++t) masks_[4 * g + t][word] = lanes[t];
      }
    }
    for (int stream = 0; stream < kStreams; ++stream) nnz_ += Total(stream);
  }

  // The fewest value rows for which every too long stream finds room for its tail, best fit, longest tail first.
  void Balance() {
    int longest = 0;
    for (int stream = 0; stream < kStreams; ++stream) longest = std::max(longest, Total(stream));
    for (value_rows_ = static_cast<int>(CeilDiv(nnz_, kStreams)); value_rows_ < longest; ++value_rows_) {
      if (TryBalance()) return;
    }
    jumps_.fill({});  // value_rows_ == longest: nothing has to move
  }

  bool TryBalance() {
    // Streams and columns by a length below 64, each a bit of a word.
    std::array<uint64_t, kMaxStreamRow> tails{};  // streams whose tail is that long
    std::array<uint64_t, kMaxStreamRow> rooms{};  // columns with that many unused rows at their end
    uint64_t tail_lengths = 0;                    // which of them are not 0
    uint64_t room_lengths = 0;
    int spare = 0;
    jumps_.fill({});
    for (int stream = 0; stream < kStreams; ++stream) {
      const int total = Total(stream);
      const uint64_t bit = uint64_t{1} << stream;
      if (total <= value_rows_) {
        const int room = value_rows_ - total;  // below 64, as value_rows_ is below the longest stream
        rooms[static_cast<size_t>(room)] |= bit;
        room_lengths |= uint64_t{1} << room;
        spare += room;
        continue;
      }
      int step = LastJumpStep(chunk_cols_);
      while (Before(stream, step) > value_rows_) --step;
      if (step < steps_ / 2) return false;
      jumps_[static_cast<size_t>(stream)].step = step;
      const int length = total - Before(stream, step);
      tails[static_cast<size_t>(length)] |= bit;
      tail_lengths |= uint64_t{1} << length;
      spare -= length;
    }
    if (spare < 0) return false;
    while (tail_lengths != 0) {
      const int length = std::bit_width(tail_lengths) - 1;
      tail_lengths ^= uint64_t{1} << length;
      for (uint64_t streams = tails[static_cast<size_t>(length)]; streams != 0; streams &= streams - 1) {
        const uint64_t enough = room_lengths >> length << length;
        if (enough == 0) return false;
        const int room = std::countr_zero(enough);
        uint64_t& columns = rooms[static_cast<size_t>(room)];
        Jump& jump = jumps_[static_cast<size_t>(std::countr_zero(streams))];
        jump.column = std::countr_zero(columns);
        jump.row = value_rows_ - room;
        const uint64_t column = columns & (~columns + 1);
        columns ^= column;
        if (columns == 0) room_lengths ^= uint64_t{1} << room;
        rooms[static_cast<size_t>(room - length)] |= column;
        room_lengths |= uint64_t{1} << (room - length);
      }
    }
    return true;
  }

  const int chunk_cols_;
  const int steps_;
  int nnz_ = 0;
  int value_rows_ = 0;
  std::array<std::array<uint32_t, 4>, kLanes> masks_;
  std::array<std::array<uint32_t, kMaxSteps + 1>, kChunkRows> before_;
  std::array<Jump, kStreams> jumps_;
};

// Writes a chunk's value rows where its header says. Filler is zero because `out` is.
void WriteValues(const ChunkElements& elements, int chunk_cols, const std::byte* header, std::byte* out) {
  const int words = MaskWords(chunk_cols);
  const int steps = Steps(chunk_cols);
  for (int stream = 0; stream < kStreams; ++stream) {
    const int lane = stream / 2;
    const int half = stream % 2;
    std::array<uint32_t, 4> mask;
    uint32_t descriptor;
    std::memcpy(mask.data(), header + int64_t{4} * words * lane, static_cast<size_t>(words) * 4);
    std::memcpy(&descriptor, header + MaskBytes(chunk_cols) + int64_t{4} * lane, 4);
    const Jump jump = DecodeJump(descriptor, half, chunk_cols);
    // Which elements are zero is a matter of chance: no branch depends on it. Every element is written, and the next
    // one over it when it was a zero.
    std::array<uint16_t, kMaxSteps * 4 + 1> packed;
    size_t count = 0;
    size_t head = 0;
    const uint16_t* from = elements.row(ElementRow(lane, half)) + ElementCol(lane, 0);
    for (int step = 0; step < steps; ++step, from += kStepCols) {
      if (step == jump.step) head = count;
      const uint32_t bits = mask[static_cast<size_t>(step / 4)] >> (step % 4 * 8 + half * 4);
      packed[count] = from[0];
      count += bits & 1u;
      packed[count] = from[1];
      count += bits >> 1 & 1u;
      packed[count] = from[8];
      count += bits >> 2 & 1u;
      packed[count] = from[9];
      count += bits >> 3 & 1u;
    }
    if (jump.step < 0) head = count;
    std::byte* to = out + int64_t{2} * stream;
    for (size_t i = 0; i < head; ++i, to += kRowBytes) std::memcpy(to, &packed[i], 2);
    to = out + int64_t{kRowBytes} * jump.row + int64_t{2} * jump.column;
    for (size_t i = head; i < count; ++i, to += kRowBytes) std::memcpy(to, &packed[i], 2);
  }
}

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

  // Where a chunk starts is known once all before it are planned. Their headers are kept until then: a tenth of the
  // layer's bytes.
  SPMMD_ASSIGN_OR_RETURN(Buffer offset_buffer,
                         Buffer::Allocate(static_cast<size_t>(grid.chunks() + 1) * sizeof(uint32_t)));
  const auto header_bytes = static_cast<size_t>(HeaderBytes(chunk_cols));
  SPMMD_ASSIGN_OR_RETURN(Buffer header_buffer, Buffer::Allocate(static_cast<size_t>(grid.chunks()) * header_bytes));
  uint32_t* offsets = offset_buffer.MutableAs<uint32_t>().data();
  std::byte* headers = header_buffer.mutable_data();
  std::vector<int64_t> block_nnz(static_cast<size_t>(grid.row_blocks));
  DefaultThreadPool().ParallelFor(grid.row_blocks, [&](int64_t block, int /*worker*/) {
    for (int64_t c = block * grid.col_blocks; c < (block + 1) * grid.col_blocks; ++c) {
      const ChunkPlan plan(w, grid, c);
      offsets[c + 1] = static_cast<uint32_t>(plan.bytes() / kOffsetUnit);
      plan.WriteHeader(headers + static_cast<size_t>(c) * header_bytes);
      block_nnz[static_cast<size_t>(block)] += plan.nnz();
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
      const std::byte* header = headers + static_cast<size_t>(c) * header_bytes;
      std::byte* to = out + static_cast<int64_t>(offsets[c]) * kOffsetUnit;
      std::memcpy(to, header, header_bytes);
      WriteValues(ChunkElements(w, grid, c), chunk_cols, header, to + header_bytes);
    }
  });
  // Filler values, and mask bits outside the matrix.
  const int64_t all_headers = grid.chunks() * HeaderBytes(chunk_cols);
  const int64_t outside_bits = grid.chunks() * kChunkRows * chunk_cols - w.rows * w.cols;
  const int64_t padding = end * kOffsetUnit - all_headers - layer.nnz * 2 + outside_bits / 8;
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
      std::memcpy(&descriptor, chunk + MaskBytes(chunk_cols) + int64_t{4} * lane, 4);
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
                            static_cast<size_t>(col0 + int64_t{kStepCols} * step + ElementCol(lane, e)) * 2;
            std::memcpy(to, values + int64_t{kRowBytes} * row + int64_t{2} * column, 2);
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
