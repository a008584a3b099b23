#include "kernels/format/import.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/format/matrices.h"

namespace spmmd {
namespace {

using ::testing::HasSubstr;

template <typename T>
Bytes AsBytes(const std::vector<T>& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T)};
}

// A matrix in all upload encodings.
struct Encoded {
  std::vector<uint64_t> row_offsets{0};
  std::vector<uint32_t> rows;
  std::vector<uint32_t> cols;
  std::vector<uint8_t> bitmap;
  std::vector<uint8_t> row_bitmap;
  std::vector<std::byte> values;
  std::vector<std::byte> dense;
};

Encoded Encode(const DenseView& w) {
  Encoded out;
  const size_t size = SizeOf(w.dtype);
  out.bitmap.resize(static_cast<size_t>((w.rows * w.cols + 7) / 8));
  const int64_t row_bytes = (w.cols + 7) / 8;
  out.row_bitmap.resize(static_cast<size_t>(w.rows * row_bytes));
  for (int64_t r = 0; r < w.rows; ++r) {
    for (int64_t c = 0; c < w.cols; ++c) {
      const std::byte* element = w.row(r) + static_cast<size_t>(c) * size;
      out.dense.insert(out.dense.end(), element, element + size);
      if (ElementAsDouble(w, r, c) == 0.0) continue;
      out.rows.push_back(static_cast<uint32_t>(r));
      out.cols.push_back(static_cast<uint32_t>(c));
      out.values.insert(out.values.end(), element, element + size);
      const int64_t bit = r * w.cols + c;
      out.bitmap[static_cast<size_t>(bit / 8)] |= static_cast<uint8_t>(1u << (bit % 8));
      out.row_bitmap[static_cast<size_t>(r * row_bytes + c / 8)] |= static_cast<uint8_t>(1u << (c % 8));
    }
    out.row_offsets.push_back(out.cols.size());
  }
  return out;
}

std::string Message(const absl::StatusOr<DenseMatrix>& result) {
  EXPECT_TRUE(absl::IsInvalidArgument(result.status())) << result.status();
  return std::string(result.status().message());
}

TEST(ImportTest, EveryEncodingGivesTheMatrixBack) {
  for (const DType dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
    for (const auto& [rows, cols] : {std::pair{1, 1}, {1, 300}, {300, 1}, {17, 64}, {33, 129}, {5, 7}, {700, 500}}) {
      for (const double density : {0.0, 0.03, 0.5, 1.0}) {
        const DenseMatrix w = testing::MakeMatrix(dtype, rows, cols, density);
        const Encoded e = Encode(w.view());
        SCOPED_TRACE(::testing::Message() << rows << "x" << cols << " density " << density);
        EXPECT_TRUE(testing::SameNonzeros(
            w.view(), ImportCsr(dtype, rows, cols, AsBytes(e.row_offsets), AsBytes(e.cols), e.values)->view()));
        EXPECT_TRUE(testing::SameNonzeros(
            w.view(), ImportCoo(dtype, rows, cols, AsBytes(e.rows), AsBytes(e.cols), e.values)->view()));
        EXPECT_TRUE(
            testing::SameNonzeros(w.view(), ImportBitmap(dtype, rows, cols, AsBytes(e.bitmap), e.values)->view()));
        EXPECT_TRUE(testing::SameNonzeros(w.view(),
                                          ImportRowBitmap(dtype, rows, cols, AsBytes(e.row_bitmap), e.values)->view()));
        const auto dense = ImportDense(dtype, rows, cols, e.dense);
        ASSERT_TRUE(dense.ok());
        EXPECT_EQ(std::memcmp(dense->view().data, e.dense.data(), e.dense.size()), 0);
      }
    }
  }
}

TEST(ImportTest, CooTakesAnyOrder) {
  const DenseMatrix w = testing::MakeMatrix(DType::kBf16, 40, 60, 0.4);
  const Encoded e = Encode(w.view());
  std::vector<size_t> order(e.rows.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937_64 random(3);
  std::shuffle(order.begin(), order.end(), random);
  Encoded shuffled;
  for (const size_t i : order) {
    shuffled.rows.push_back(e.rows[i]);
    shuffled.cols.push_back(e.cols[i]);
    shuffled.values.insert(shuffled.values.end(), e.values.begin() + static_cast<ptrdiff_t>(2 * i),
                           e.values.begin() + static_cast<ptrdiff_t>(2 * i + 2));
  }
  EXPECT_TRUE(testing::SameNonzeros(
      w.view(),
      ImportCoo(DType::kBf16, 40, 60, AsBytes(shuffled.rows), AsBytes(shuffled.cols), shuffled.values)->view()));
}

TEST(ImportTest, UnalignedSpansWork) {
  const DenseMatrix w = testing::MakeMatrix(DType::kF32, 20, 30, 0.5);
  const Encoded e = Encode(w.view());
  const auto shifted = [](Bytes bytes) {
    std::vector<std::byte> out(1);
    out.insert(out.end(), bytes.begin(), bytes.end());
    return out;
  };
  const auto offsets = shifted(AsBytes(e.row_offsets));
  const auto cols = shifted(AsBytes(e.cols));
  const auto values = shifted(e.values);
  EXPECT_TRUE(testing::SameNonzeros(w.view(), ImportCsr(DType::kF32, 20, 30, Bytes(offsets).subspan(1),
                                                        Bytes(cols).subspan(1), Bytes(values).subspan(1))
                                                  ->view()));
}

TEST(ImportTest, RefusesBadCsrWithThePosition) {
  const std::vector<uint16_t> values = {1, 2, 3};
  const auto import = [&](const std::vector<uint64_t>& offsets, const std::vector<uint32_t>& cols) {
    return Message(ImportCsr(DType::kF16, 2, 4, AsBytes(offsets), AsBytes(cols), AsBytes(values)));
  };
  EXPECT_THAT(import({0, 2, 3}, {0, 0, 1}), HasSubstr("COLUMN_INDICES[1]"));  // duplicate
  EXPECT_THAT(import({0, 2, 3}, {2, 1, 1}), HasSubstr("COLUMN_INDICES[1]"));  // unsorted
  EXPECT_THAT(import({0, 2, 3}, {0, 1, 4}), HasSubstr("COLUMN_INDICES[2]"));  // out of range
  EXPECT_THAT(import({0, 2, 3}, {0, 1, 0xffffffffu}), HasSubstr("COLUMN_INDICES[2]"));
  EXPECT_THAT(import({1, 2, 3}, {0, 1, 2}), HasSubstr("ROW_OFFSETS[0]"));
  EXPECT_THAT(import({0, 3, 2}, {0, 1, 2}), HasSubstr("ROW_OFFSETS[2]"));
  EXPECT_THAT(import({0, 4, 3}, {0, 1, 2}), HasSubstr("ROW_OFFSETS[1]"));
  EXPECT_THAT(import({0, ~uint64_t{0}, 3}, {0, 1, 2}), HasSubstr("ROW_OFFSETS[1]"));
  EXPECT_THAT(import({0, 2, 2}, {0, 1, 2}), HasSubstr("ROW_OFFSETS[2]"));
  EXPECT_THAT(import({0, 3}, {0, 1, 2}), HasSubstr("ROW_OFFSETS: has"));
  EXPECT_THAT(import({0, 2, 3}, {0, 1}), HasSubstr("COLUMN_INDICES: has"));
}

TEST(ImportTest, RefusesBadCooWithThePosition) {
  const std::vector<uint16_t> values = {1, 0, 3};
  const auto import = [&](const std::vector<uint32_t>& rows, const std::vector<uint32_t>& cols) {
    return Message(ImportCoo(DType::kF16, 2, 4, AsBytes(rows), AsBytes(cols), AsBytes(values)));
  };
  EXPECT_THAT(import({0, 1, 2}, {0, 0, 0}), HasSubstr("ROW_INDICES[2]"));
  EXPECT_THAT(import({0, 1, 1}, {0, 0, 4}), HasSubstr("COLUMN_INDICES[2]"));
  // The second entry's value is zero: a duplicate all the same.
  EXPECT_THAT(import({0, 1, 1}, {0, 3, 3}), HasSubstr("(1, 3) comes twice"));
  EXPECT_THAT(import({0, 1}, {0, 1, 2}), HasSubstr("ROW_INDICES: has"));
}

TEST(ImportTest, RefusesBadBitmaps) {
  const std::vector<uint16_t> values = {1, 2, 3};
  const auto import = [&](const std::vector<uint8_t>& bitmap) {
    return Message(ImportBitmap(DType::kF16, 2, 5, AsBytes(bitmap), AsBytes(values)));
  };
  EXPECT_THAT(import({0b11, 0}), HasSubstr("2 bits are set where VALUES has 3"));
  EXPECT_THAT(import({0b11, 0b100}), HasSubstr("behind the last element"));
  EXPECT_THAT(import({0b111}), HasSubstr("BITMAP: has 1 bytes where 2"));
  const std::vector<uint8_t> rows = {0b11, 0b100001};
  EXPECT_THAT(Message(ImportRowBitmap(DType::kF16, 2, 5, AsBytes(rows), AsBytes(values))), HasSubstr("row 1"));
}

TEST(ImportTest, RefusesBadShapesAndSizesBeforeAllocating) {
  const std::vector<uint16_t> values = {1, 2, 3};
  EXPECT_FALSE(ImportDense(DType::kF16, 0, 4, AsBytes(values)).ok());
  EXPECT_FALSE(ImportDense(DType::kF16, -1, 4, AsBytes(values)).ok());
  EXPECT_FALSE(ImportDense(DType::kF16, int64_t{1} << 40, int64_t{1} << 40, AsBytes(values)).ok());
  EXPECT_THAT(Message(ImportDense(DType::kF16, 1 << 20, 1 << 14, AsBytes(values))), HasSubstr("VALUES: has 6 bytes"));
  EXPECT_THAT(Message(ImportDense(static_cast<DType>(9), 1, 3, AsBytes(values))), HasSubstr("dtype"));
  const std::vector<uint8_t> odd(3);
  const std::vector<uint8_t> bitmap(1);
  EXPECT_THAT(Message(ImportBitmap(DType::kF16, 1, 3, AsBytes(bitmap), AsBytes(odd))), HasSubstr("VALUES: 3 bytes"));
}

TEST(ImportTest, ConvertsAndRefusesOverflow) {
  DenseMatrix w = *DenseMatrix::Create(DType::kF32, 3, 2);
  float* values = reinterpret_cast<float*>(w.mutable_view().data);
  values[0] = 1.5f;
  values[3] = std::numeric_limits<float>::infinity();
  const auto narrow = ConvertToDType(w.view(), DType::kF16);
  ASSERT_TRUE(narrow.ok()) << narrow.status();  // an infinity may stay one
  EXPECT_EQ(ElementAsDouble(narrow->view(), 0, 0), 1.5);
  values[4] = 70000.0f;
  EXPECT_THAT(Message(ConvertToDType(w.view(), DType::kF16)), HasSubstr("element (2, 0)"));
  EXPECT_TRUE(ConvertToDType(w.view(), DType::kBf16).ok());
}

}  // namespace
}  // namespace spmmd
