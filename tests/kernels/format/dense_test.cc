// Shapes, dense matrices, scans and conversions, the DENSE format, and the reference itself.
#include "kernels/format/dense.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/format/packed_layer.h"
#include "kernels/format/reference.h"
#include "tests/kernels/format/matrices.h"

namespace spmmd::testing {
namespace {

using ::testing::HasSubstr;

TEST(CheckShapeTest, LimitsAreNamed) {
  EXPECT_TRUE(CheckShape(1, 1).ok());
  EXPECT_TRUE(CheckShape(kMaxDim, kMaxElements / kMaxDim).ok());
  EXPECT_THAT(std::string(CheckShape(0, 5).message()), HasSubstr("M: 0"));
  EXPECT_THAT(std::string(CheckShape(-1, 5).message()), HasSubstr("M: -1"));
  EXPECT_THAT(std::string(CheckShape(5, kMaxDim + 1).message()), HasSubstr("K: 16777217"));
  EXPECT_THAT(std::string(CheckShape(kMaxDim, kMaxDim).message()), HasSubstr("M*K"));
  EXPECT_THAT(
      std::string(CheckShape(std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max()).message()),
      HasSubstr("M:"));
}

TEST(DenseMatrixTest, RefusesBadArguments) {
  EXPECT_EQ(DenseMatrix::Create(DType::kF16, 0, 4).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DenseMatrix::Create(static_cast<DType>(0), 4, 4).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ScanDenseTest, CountsAndFindsTheFirst) {
  for (const DType dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
    DenseMatrix w = *DenseMatrix::Create(dtype, 300, 211);
    const MutableDenseView view = w.mutable_view();
    const auto set = [&](int64_t r, int64_t c, float value) {
      std::byte* to = view.row(r) + static_cast<size_t>(c) * SizeOf(dtype);
      const uint16_t half = dtype == DType::kF16 ? FloatToF16(value) : FloatToBf16(value);
      if (dtype == DType::kF32) {
        std::memcpy(to, &value, 4);
      } else {
        std::memcpy(to, &half, 2);
      }
    };
    set(1, 1, -0.0f);
    set(2, 210, 1.0f);
    set(299, 0, -1e-4f);
    EXPECT_TRUE(CheckFinite(w.view()).ok());
    set(250, 3, -HUGE_VALF);
    set(17, 205, NAN);
    const DenseStats stats = ScanDense(w.view());
    EXPECT_EQ(stats.nnz, 4);
    EXPECT_EQ(stats.nonfinite, 2);
    EXPECT_EQ(stats.first_nonfinite_row, 17);
    EXPECT_EQ(stats.first_nonfinite_col, 205);
    EXPECT_THAT(std::string(CheckFinite(w.view()).message()), HasSubstr("NaN at row 17, column 205"));
  }
}

TEST(ConvertDenseTest, EveryPairOfTypes) {
  const DType dtypes[] = {DType::kF16, DType::kBf16, DType::kF32};
  for (const DType from : dtypes) {
    const DenseMatrix source = MakeMatrix(from, 7, 1500, 0.6);
    for (const DType to : dtypes) {
      DenseMatrix target = *DenseMatrix::Create(to, 7, 1500);
      ASSERT_TRUE(ConvertDense(source.view(), target.mutable_view()).ok());
      for (int64_t r = 0; r < 7; ++r) {
        for (int64_t c = 0; c < 1500; ++c) {
          const auto value = static_cast<float>(ElementAsDouble(source.view(), r, c));
          const double want = to == DType::kF16    ? F16ToFloat(FloatToF16(value))
                              : to == DType::kBf16 ? Bf16ToFloat(FloatToBf16(value))
                                                   : value;
          ASSERT_EQ(ElementAsDouble(target.view(), r, c), want) << Name(from) << " to " << Name(to);
        }
      }
    }
  }
  DenseMatrix small = *DenseMatrix::Create(DType::kF16, 2, 2);
  EXPECT_EQ(ConvertDense(MakeMatrix(DType::kF16, 2, 3, 1).view(), small.mutable_view()).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(PackTest, RefusesBadArguments) {
  const DenseMatrix w = MakeMatrix(DType::kF16, 4, 4, 1);
  DenseView view = w.view();
  view.row_stride = 3;
  EXPECT_THAT(std::string(Pack(Format::kBitmap, view).status().message()), HasSubstr("row_stride"));
  view = w.view();
  view.dtype = static_cast<DType>(77);
  EXPECT_THAT(std::string(Pack(Format::kDense, view).status().message()), HasSubstr("dtype: unknown value 77"));
  view = w.view();
  view.rows = 0;
  EXPECT_THAT(std::string(Pack(Format::kDense, view).status().message()), HasSubstr("M: 0"));
  EXPECT_EQ(Pack(static_cast<Format>(200), w.view()).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(FormatNamesTest, ParseIsTheInverseOfName) {
  for (int value = 0; value < 256; ++value) {
    const auto format = static_cast<Format>(value);
    if (!IsValid(format)) {
      EXPECT_FALSE(ParseFormat(Name(format)).has_value());
      continue;
    }
    EXPECT_EQ(ParseFormat(Name(format)), format);
  }
  EXPECT_EQ(ParseFormat("bitmap"), Format::kBitmap);
  EXPECT_FALSE(ParseFormat("BITMAPS").has_value());
  EXPECT_FALSE(ParseFormat("").has_value());
}

TEST(PackedLayerTest, ByteCountsAddUp) {
  PackedLayer layer;
  layer.m = 4;
  layer.k = 8;
  layer.nnz = 8;
  layer.sections.push_back({1, SectionClass::kValues, 6, *Buffer::Allocate(100)});
  layer.sections.push_back({2, SectionClass::kMetadata, 0, *Buffer::Allocate(10)});
  const ByteCounts bytes = layer.bytes();
  EXPECT_EQ(bytes.values, 94u);
  EXPECT_EQ(bytes.metadata, 10u);
  EXPECT_EQ(bytes.padding, 6u);
  EXPECT_EQ(bytes.total(), 110u);
  EXPECT_EQ(layer.dense_bytes(), 64u);
  EXPECT_EQ(layer.sparsity(), 0.75);
  EXPECT_EQ(layer.FindSection(3), nullptr);
}

TEST(ReferenceTest, MatchesAHandComputedProduct) {
  const std::vector<float> w = {1, 0, -2, 0, 3, 4};     // [2, 3]
  const std::vector<float> x = {1, 2, 3, -1, 0.5f, 0};  // [2, 3]
  const DenseView wv{reinterpret_cast<const std::byte*>(w.data()), DType::kF32, 2, 3, 3};
  const DenseView xv{reinterpret_cast<const std::byte*>(x.data()), DType::kF32, 2, 3, 3};
  const std::vector<float> bias = {10, -20};
  const Reference reference = ReferenceMatmul(wv, xv, bias, Activation::kRelu);
  EXPECT_THAT(reference.y, ::testing::ElementsAre(5, 0, 9, 0));
  EXPECT_THAT(reference.scale, ::testing::ElementsAre(17, 38, 11, 21.5));
  const std::vector<int64_t> rows = {1};
  EXPECT_THAT(ReferenceRows(wv, rows, xv).y, ::testing::ElementsAre(18, 1.5));
  const std::vector<uint32_t> indices = {2};
  const std::vector<float> values = {0.5f};
  EXPECT_THAT(ReferenceMatmulSparse(wv, indices, values).y, ::testing::ElementsAre(-1, 2));
}

TEST(ReferenceTest, CompareFindsWhatIsWrong) {
  Reference reference{1, 3, {1, NAN, HUGE_VAL}, {2, 1, 1}};
  std::vector<float> y = {1.0001f, NAN, HUGE_VALF};
  const DenseView view{reinterpret_cast<const std::byte*>(y.data()), DType::kF32, 1, 3, 3};
  EXPECT_TRUE(CompareToReference(view, reference, 1e-4, 0).ok());
  EXPECT_THAT(std::string(CompareToReference(view, reference, 1e-5, 0).message()), HasSubstr("y[0][0] = 1.0001"));
  y[1] = 0;
  EXPECT_THAT(std::string(CompareToReference(view, reference, 1e-4, 0).message()), HasSubstr("1 of 3 mismatch"));
  y = {NAN, NAN, 5};
  EXPECT_THAT(std::string(CompareToReference(view, reference, 1e9, 1e9).message()), HasSubstr("2 of 3 mismatch"));
  EXPECT_EQ(MaxRelativeError(view, {1, 1, {1}, {2}}), HUGE_VAL);
}

}  // namespace
}  // namespace spmmd::testing
