// COLUMN_PIECE must give back every bit of every matrix and refuse bytes that would lead a kernel astray.
#include "kernels/format/column_piece.h"

#include <cstring>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/format/column_piece_layout.h"

namespace spmmd {
namespace {

DenseMatrix Draw(int64_t m, int64_t k, double density, DType dtype, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::uniform_real_distribution<double> uniform;
  DenseMatrix w = DenseMatrix::Create(dtype, m, k).value();
  const uint16_t special = dtype == DType::kF16 ? 0x7c00 : 0x7f80;
  for (int64_t r = 0; r < m; ++r) {
    auto* row = reinterpret_cast<uint16_t*>(w.mutable_view().row(r));
    for (int64_t c = 0; c < k; ++c) {
      row[c] = 0x8000;
      if (uniform(rng) >= density) continue;
      const auto bits = static_cast<uint16_t>(rng());
      row[c] = (bits & special) == special ? 0x3c00 : bits;
    }
  }
  return w;
}

void ExpectSame(const DenseView& expected, const DenseView& actual) {
  int64_t mismatches = 0;
  for (int64_t r = 0; r < expected.rows; ++r) {
    const auto* a = reinterpret_cast<const uint16_t*>(expected.row(r));
    const auto* b = reinterpret_cast<const uint16_t*>(actual.row(r));
    for (int64_t c = 0; c < expected.cols; ++c) mismatches += b[c] != (IsNonzeroBits(a[c]) ? a[c] : 0) ? 1 : 0;
  }
  EXPECT_EQ(mismatches, 0);
}

TEST(ColumnPiece, RowOrderIsAPermutationAndBitsAreDistinct) {
  std::set<int> rows;
  for (int stream = 0; stream < column_piece::kStreams; ++stream) {
    for (int d = 0; d < column_piece::kStreamRows; ++d) rows.insert(column_piece::Row(stream, d));
  }
  EXPECT_EQ(rows.size(), static_cast<size_t>(column_piece::kBlockRows));
  EXPECT_EQ(*rows.rbegin(), column_piece::kBlockRows - 1);
  std::set<int> bits;
  for (int d = 0; d < 32; ++d) bits.insert(column_piece::Bit(d));
  EXPECT_EQ(bits.size(), 32u);
}

TEST(ColumnPiece, RoundTripsEveryShapeAndDensity) {
  uint64_t seed = 1;
  for (const auto& [m, k] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {1, 70}, {70, 1}, {511, 33}, {512, 64}, {513, 65}, {1300, 40}}) {
    for (const double density : {0.0, 0.05, 0.5, 1.0}) {
      for (const DType dtype : {DType::kF16, DType::kBf16}) {
        SCOPED_TRACE(testing::Message() << m << "x" << k << " density " << density);
        const DenseMatrix w = Draw(m, k, density, dtype, ++seed);
        auto packed = Pack(Format::kColumnPiece, w.view());
        ASSERT_TRUE(packed.ok()) << packed.status();
        EXPECT_EQ(packed->nnz, ScanDense(w.view()).nnz);
        auto dense = Unpack(*packed);
        ASSERT_TRUE(dense.ok()) << dense.status();
        ExpectSame(w.view(), dense->view());
        size_t total = 0;
        for (const Section& section : packed->sections) total += section.data.size();
        EXPECT_EQ(packed->bytes().total(), total);
      }
    }
  }
}

TEST(ColumnPiece, EmptyColumnsTakeNoPieces) {
  DenseMatrix w = DenseMatrix::Create(DType::kF16, 600, 100).value();
  reinterpret_cast<uint16_t*>(w.mutable_view().row(3))[7] = 0x3c00;
  const PackedLayer packed = Pack(Format::kColumnPiece, w.view()).value();
  EXPECT_EQ(packed.FindSection(column_piece::kPieceSection)->data.size(),
            static_cast<size_t>(column_piece::kBitmapBytes + column_piece::kChunkBytes));
}

TEST(ColumnPiece, RefusesWhatItCannotStore) {
  const DenseMatrix f32 = DenseMatrix::Create(DType::kF32, 4, 4).value();
  EXPECT_EQ(Pack(Format::kColumnPiece, f32.view()).status().code(), absl::StatusCode::kInvalidArgument);
  DenseMatrix nan = DenseMatrix::Create(DType::kBf16, 4, 4).value();
  reinterpret_cast<uint16_t*>(nan.mutable_view().row(1))[2] = 0x7fc0;
  EXPECT_EQ(Pack(Format::kColumnPiece, nan.view()).status().code(), absl::StatusCode::kInvalidArgument);
  PackOptions allow;
  allow.allow_nonfinite = true;
  EXPECT_TRUE(Pack(Format::kColumnPiece, nan.view(), allow).ok());
}

TEST(ColumnPiece, ValidateCatchesDamage) {
  const PackedLayer packed = Pack(Format::kColumnPiece, Draw(700, 50, 0.4, DType::kF16, 5).view()).value();
  const auto copy = [&] {
    PackedLayer out;
    out.format = packed.format;
    out.layout_version = packed.layout_version;
    out.dtype = packed.dtype;
    out.m = packed.m;
    out.k = packed.k;
    out.nnz = packed.nnz;
    out.params = packed.params;
    for (const Section& section : packed.sections) {
      Buffer data = Buffer::Allocate(section.data.size()).value();
      std::memcpy(data.mutable_data(), section.data.data(), section.data.size());
      out.sections.push_back({section.id, section.section_class, section.padding, std::move(data)});
    }
    return out;
  };
  std::mt19937_64 rng(3);
  int refused = 0;
  for (int trial = 0; trial < 200; ++trial) {
    PackedLayer damaged = copy();
    Section& section = damaged.sections[rng() % 3];
    section.data.mutable_data()[rng() % section.data.size()] ^= static_cast<std::byte>(1 + rng() % 255);
    const absl::Status status = Validate(damaged);
    if (!status.ok()) ++refused;
    DenseMatrix out = DenseMatrix::Create(packed.dtype, packed.m, packed.k).value();
    (void)column_piece::Unpack(damaged, out.mutable_view());  // must stay in bounds
  }
  EXPECT_GT(refused, 100);
  for (size_t i = 0; i < 3; ++i) {
    PackedLayer cut = copy();
    cut.sections[i].data = Buffer::Allocate(packed.sections[i].data.size() - 1).value();
    EXPECT_EQ(Validate(cut).code(), absl::StatusCode::kDataLoss);
  }
  PackedLayer odd = copy();
  odd.params[column_piece::kParamMaxChunks] = 17;
  EXPECT_EQ(Validate(odd).code(), absl::StatusCode::kDataLoss);
  odd = copy();
  odd.nnz -= 1;
  EXPECT_EQ(Validate(odd).code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace spmmd
