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
            static_cast<size_t>(column_piece::kBitmapBytes + column_piece::kUnitBytes));
}

// Rows of a 512-row column whose nonzeros are the first `lengths[g]` of stream g.
DenseMatrix OfLengths(const std::vector<int>& lengths) {
  DenseMatrix w = DenseMatrix::Create(DType::kF16, column_piece::kBlockRows, 1).value();
  for (size_t g = 0; g < lengths.size(); ++g) {
    for (int d = 0; d < lengths[g]; ++d) {
      const int row = column_piece::Row(static_cast<int>(g), d);
      *reinterpret_cast<uint16_t*>(w.mutable_view().row(row)) = static_cast<uint16_t>(0x3c00 + row);
    }
  }
  return w;
}

TEST(ColumnPiece, LongStreamsBorrowPlacesOfShortOnes) {
  struct Case {
    std::vector<int> lengths;
    int units;
    uint32_t borrowers;  // one bit a stream
  };
  const std::vector<Case> cases = {
      {{32, 32, 32, 32, 32, 32, 32, 32}, 8, 0},
      {{36, 28, 32, 32, 32, 32, 32, 32}, 8, 1},           // 4 values of stream 0 behind the 28 of stream 1
      {{37, 27, 30, 34, 32, 32, 29, 35}, 8, 0b10001001},  // three, each with a lender of its own
      {{38, 26, 32, 32, 32, 32, 32, 32}, 9, 0b1},         // a tail of 6 is too long: a unit more, and 2 of it
      {{34, 34, 34, 34, 34, 34, 26, 26}, 9, 0},           // four borrowers find no lender
      {{64, 0, 0, 0, 0, 0, 0, 0}, 15, 0b1},
      {{1, 0, 0, 0, 0, 0, 0, 0}, 1, 0},
      {{64, 64, 64, 64, 64, 64, 64, 64}, 16, 0},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::PrintToString(c.lengths));
    const DenseMatrix w = OfLengths(c.lengths);
    const PackedLayer packed = Pack(Format::kColumnPiece, w.view()).value();
    ASSERT_TRUE(Validate(packed).ok()) << Validate(packed);
    EXPECT_EQ(packed.sections[0].data.size(), static_cast<size_t>(64 + 64 * c.units));
    column_piece::Descriptor descriptor;
    std::memcpy(&descriptor, packed.FindSection(column_piece::kDescriptorSection)->data.data(), sizeof(descriptor));
    uint32_t borrowers = 0;
    for (int g = 0; g < column_piece::kStreams; ++g) {
      borrowers |= column_piece::Lender(descriptor.lenders, g) != g ? 1u << g : 0u;
    }
    EXPECT_EQ(borrowers, c.borrowers);
    ExpectSame(w.view(), Unpack(packed).value().view());
  }
}

TEST(ColumnPiece, PiecesAreNearTheSizeOfTheirValues) {
  const DenseMatrix w = Draw(4096, 64, 0.5, DType::kF16, 11);
  const PackedLayer packed = Pack(Format::kColumnPiece, w.view()).value();
  const double share = static_cast<double>(packed.bytes().total()) / static_cast<double>(w.bytes());
  EXPECT_LT(share, 0.63);  // 0.567 without any padding, 0.674 when padded to the longest stream
}

TEST(ColumnPiece, ValidateChecksLenders) {
  const auto with_lenders = [](uint32_t lenders) {
    PackedLayer packed = Pack(Format::kColumnPiece, OfLengths({36, 35, 27, 26, 32, 32, 32, 32}).view()).value();
    Section& section = packed.sections[1];
    const column_piece::Descriptor was = *reinterpret_cast<const column_piece::Descriptor*>(section.data.data());
    const column_piece::Descriptor now = {was.piece, lenders == 0 ? was.lenders : lenders};
    std::memcpy(section.data.mutable_data(), &now, sizeof(now));
    return Validate(packed).code();
  };
  const auto lenders = [](uint32_t of0, uint32_t of1) { return (column_piece::kNoTails & ~63u) | of0 | of1 << 3; };
  EXPECT_EQ(with_lenders(0), absl::StatusCode::kOk);
  EXPECT_EQ(with_lenders(lenders(3, 2)), absl::StatusCode::kOk);
  EXPECT_EQ(with_lenders(lenders(3, 3)), absl::StatusCode::kDataLoss);               // two tails in one place
  EXPECT_EQ(with_lenders(lenders(0, 2)), absl::StatusCode::kDataLoss);               // its own lender, with a tail
  EXPECT_EQ(with_lenders(lenders(4, 2)), absl::StatusCode::kDataLoss);               // no room there
  EXPECT_EQ(with_lenders(lenders(3, 2) ^ (7u << 12)), absl::StatusCode::kDataLoss);  // a lender without a tail
  EXPECT_EQ(with_lenders(lenders(3, 2) | 1u << 24), absl::StatusCode::kDataLoss);    // bits beyond the streams
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
  odd.params[column_piece::kParamMaxUnits] = column_piece::kMaxUnits + 1;
  EXPECT_EQ(Validate(odd).code(), absl::StatusCode::kDataLoss);
  odd = copy();
  odd.nnz -= 1;
  EXPECT_EQ(Validate(odd).code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace spmmd
