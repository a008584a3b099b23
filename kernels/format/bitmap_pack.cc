// Two steps a group of columns. First its rows are transposed into scratch, so that a column lies in consecutive
// memory (64 KiB for 16-bit values: the L2 cache). Then every column is compressed with full-width stores, each of
// which overwrites what the one before left beyond its end; scratch takes the overhang, so that no store reaches into
// memory that another thread writes.
#include "kernels/format/bitmap_pack.h"

#include <algorithm>
#include <cstring>

#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/format/bitmap_pack.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spmmd::bitmap {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;  // NOLINT(misc-unused-alias-decls): some targets do not use it

// columns[c * stride + r] = w[row0 + r][col0 + c].
template <typename Bits>
void TransposeScalar(const DenseView& w, int64_t row0, int64_t row_begin, int64_t row_end, int64_t col0, int64_t cols,
                     int64_t stride, Bits* columns) {
  for (int64_t r = row_begin; r < row_end; ++r) {
    const std::byte* row = w.row(row0 + r) + static_cast<size_t>(col0) * sizeof(Bits);
    for (int64_t c = 0; c < cols; ++c) {
      std::memcpy(&columns[c * stride + r], row + static_cast<size_t>(c) * sizeof(Bits), sizeof(Bits));
    }
  }
}

#if HWY_TARGET <= HWY_SSSE3
// 8 x 8 block, 128-bit vectors: interleaving rows i and i + 4 three times transposes.
HWY_INLINE void TransposeBlock(const std::byte* const* rows, int64_t stride, uint16_t* to) {
  const hn::FixedTag<uint16_t, 8> d;
  const auto load = [&](int i) HWY_ATTR { return hn::LoadU(d, reinterpret_cast<const uint16_t*>(rows[i])); };
  const auto r0 = load(0), r1 = load(1), r2 = load(2), r3 = load(3);
  const auto r4 = load(4), r5 = load(5), r6 = load(6), r7 = load(7);
  const auto a0 = hn::InterleaveLower(d, r0, r4), a1 = hn::InterleaveUpper(d, r0, r4);
  const auto a2 = hn::InterleaveLower(d, r1, r5), a3 = hn::InterleaveUpper(d, r1, r5);
  const auto a4 = hn::InterleaveLower(d, r2, r6), a5 = hn::InterleaveUpper(d, r2, r6);
  const auto a6 = hn::InterleaveLower(d, r3, r7), a7 = hn::InterleaveUpper(d, r3, r7);
  const auto b0 = hn::InterleaveLower(d, a0, a4), b1 = hn::InterleaveUpper(d, a0, a4);
  const auto b2 = hn::InterleaveLower(d, a1, a5), b3 = hn::InterleaveUpper(d, a1, a5);
  const auto b4 = hn::InterleaveLower(d, a2, a6), b5 = hn::InterleaveUpper(d, a2, a6);
  const auto b6 = hn::InterleaveLower(d, a3, a7), b7 = hn::InterleaveUpper(d, a3, a7);
  hn::StoreU(hn::InterleaveLower(d, b0, b4), d, to);
  hn::StoreU(hn::InterleaveUpper(d, b0, b4), d, to + stride);
  hn::StoreU(hn::InterleaveLower(d, b1, b5), d, to + 2 * stride);
  hn::StoreU(hn::InterleaveUpper(d, b1, b5), d, to + 3 * stride);
  hn::StoreU(hn::InterleaveLower(d, b2, b6), d, to + 4 * stride);
  hn::StoreU(hn::InterleaveUpper(d, b2, b6), d, to + 5 * stride);
  hn::StoreU(hn::InterleaveLower(d, b3, b7), d, to + 6 * stride);
  hn::StoreU(hn::InterleaveUpper(d, b3, b7), d, to + 7 * stride);
}

// 4 x 4 block of 32-bit values.
HWY_INLINE void TransposeBlock(const std::byte* const* rows, int64_t stride, uint32_t* to) {
  const hn::FixedTag<uint32_t, 4> d;
  const auto load = [&](int i) HWY_ATTR { return hn::LoadU(d, reinterpret_cast<const uint32_t*>(rows[i])); };
  const auto r0 = load(0), r1 = load(1), r2 = load(2), r3 = load(3);
  const auto a0 = hn::InterleaveLower(d, r0, r2), a1 = hn::InterleaveUpper(d, r0, r2);
  const auto a2 = hn::InterleaveLower(d, r1, r3), a3 = hn::InterleaveUpper(d, r1, r3);
  hn::StoreU(hn::InterleaveLower(d, a0, a2), d, to);
  hn::StoreU(hn::InterleaveUpper(d, a0, a2), d, to + stride);
  hn::StoreU(hn::InterleaveLower(d, a1, a3), d, to + 2 * stride);
  hn::StoreU(hn::InterleaveUpper(d, a1, a3), d, to + 3 * stride);
}

template <typename Bits>
void Transpose(const DenseView& w, int64_t row0, int64_t rows, int64_t col0, int64_t cols, int64_t stride,
               Bits* columns) {
  constexpr int64_t kBlock = 16 / sizeof(Bits);
  const int64_t block_rows = rows / kBlock * kBlock;
  const int64_t block_cols = cols / kBlock * kBlock;
  const std::byte* row[kBlock];
  for (int64_t r = 0; r < block_rows; r += kBlock) {
    for (int64_t i = 0; i < kBlock; ++i) row[i] = w.row(row0 + r + i) + static_cast<size_t>(col0) * sizeof(Bits);
    for (int64_t c = 0; c < block_cols; c += kBlock) {
      TransposeBlock(row, stride, columns + c * stride + r);
      for (int64_t i = 0; i < kBlock; ++i) row[i] += 16;
    }
  }
  if (block_cols < cols) {
    TransposeScalar(w, row0, 0, block_rows, col0 + block_cols, cols - block_cols, stride,
                    columns + block_cols * stride);
  }
  TransposeScalar(w, row0, block_rows, rows, col0, cols, stride, columns);
}
#else
template <typename Bits>
void Transpose(const DenseView& w, int64_t row0, int64_t rows, int64_t col0, int64_t cols, int64_t stride,
               Bits* columns) {
  TransposeScalar(w, row0, 0, rows, col0, cols, stride, columns);
}
#endif

// Compresses one column of `padded_rows` elements (a multiple of 64); returns the number of values written.
template <typename Bits>
int64_t CompressColumn(const Bits* column, int64_t padded_rows, uint64_t* masks, Bits* values) {
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  Bits* out = values;
#if HWY_TARGET <= HWY_SSSE3
  const hn::CappedTag<Bits, 32> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto magnitude = hn::Set(d, kMagnitude);
  const auto zero = hn::Zero(d);
  for (int64_t s = 0; s < padded_rows; s += kStripRows) {
    uint64_t strip = 0;
    for (int64_t i = 0; i < kStripRows; i += lanes) {
      const auto bits = hn::Load(d, column + s + i);
      const auto keep = hn::Ne(hn::And(bits, magnitude), zero);
      uint64_t kept = 0;
      hn::StoreMaskBits(d, keep, reinterpret_cast<uint8_t*>(&kept));
      strip |= kept << i;
      hn::StoreU(hn::Compress(bits, keep), d, out);
      out += hn::CountTrue(d, keep);
    }
    *masks++ = strip;
  }
#else
  for (int64_t s = 0; s < padded_rows; s += kStripRows) {
    uint64_t strip = 0;
    for (int64_t i = 0; i < kStripRows; ++i) {
      const Bits bits = column[s + i];
      const bool keep = (bits & kMagnitude) != 0;
      strip |= uint64_t{keep} << i;
      *out = bits;  // without a branch: the next value overwrites what is not kept
      out += keep ? 1 : 0;
    }
    *masks++ = strip;
  }
#endif
  return out - values;
}

template <typename Bits>
int64_t PackGroupOf(const DenseView& w, int64_t row0, int64_t rows, int64_t col0, int64_t cols, PackScratch& scratch,
                    uint64_t* masks, uint32_t* counts) {
  const int64_t strips = (rows + kStripRows - 1) / kStripRows;
  const int64_t padded_rows = strips * kStripRows;
  auto* columns = reinterpret_cast<Bits*>(scratch.columns);
  auto* values = reinterpret_cast<Bits*>(scratch.values);
  // One cache line more than the rows need: columns a power of two apart would fall into the same few L1 sets.
  const int64_t stride = padded_rows + static_cast<int64_t>(64 / sizeof(Bits));
  Transpose(w, row0, rows, col0, cols, stride, columns);
  int64_t total = 0;
  for (int64_t c = 0; c < cols; ++c) {
    Bits* column = columns + c * stride;
    std::fill(column + rows, column + padded_rows, Bits{0});
    const int64_t count = CompressColumn(column, padded_rows, masks + c * strips, values + total);
    counts[c] = static_cast<uint32_t>(count);
    total += count;
  }
  return total;
}

int64_t PackGroupImpl(const DenseView& w, int64_t row0, int64_t rows, int64_t col0, int64_t cols, PackScratch& scratch,
                      uint64_t* masks, uint32_t* counts) {
  return w.dtype == DType::kF32 ? PackGroupOf<uint32_t>(w, row0, rows, col0, cols, scratch, masks, counts)
                                : PackGroupOf<uint16_t>(w, row0, rows, col0, cols, scratch, masks, counts);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace spmmd::bitmap
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spmmd::bitmap {
namespace {
HWY_EXPORT(PackGroupImpl);
}  // namespace

int64_t PackGroup(const DenseView& w, int64_t row0, int64_t rows, int64_t col0, int64_t cols, PackScratch& scratch,
                  uint64_t* masks, uint32_t* counts) {
  return HWY_DYNAMIC_DISPATCH(PackGroupImpl)(w, row0, rows, col0, cols, scratch, masks, counts);
}
}  // namespace spmmd::bitmap
#endif  // HWY_ONCE
