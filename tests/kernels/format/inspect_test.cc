#include "kernels/format/inspect.h"

#include <cmath>
#include <map>
#include <set>
#include <string>

#include "gtest/gtest.h"
#include "tests/kernels/format/matrices.h"

namespace spmmd {
namespace {

using testing::MakeMatrix;

constexpr Format kAllFormats[] = {Format::kDense,  Format::kThreeLayer, Format::kRlcCsc,
                                  Format::kBitmap, Format::kRowStream,  Format::kCsr,
                                  Format::kCoo,    Format::kBitmapGpu,  Format::kColumnPiece};

TEST(SectionName, EverySectionOfEveryFormatHasOneOfItsOwn) {
  for (const Format format : kAllFormats) {
    std::set<std::string> names;
    // bf16 on a skewed mask: ROW_STREAM codes it, sorts rows and has escapes.
    const auto layer = Pack(format, MakeMatrix(DType::kBf16, 300, 500, 0.4, testing::Mask::kRowSkew).view());
    ASSERT_TRUE(layer.ok()) << layer.status();
    for (const Section& section : layer->sections) {
      const std::string name(SectionName(format, section.id));
      EXPECT_FALSE(name.empty()) << Name(format) << " section " << section.id;
      EXPECT_TRUE(names.insert(name).second) << Name(format) << ' ' << name;
    }
    EXPECT_EQ(SectionName(format, 99), "");
  }
}

TEST(ComputeLayerStats, SharesOfThreeLayerCoverTheNonzeros) {
  const auto layer = Pack(Format::kThreeLayer, MakeMatrix(DType::kF16, 512, 512, 0.5).view());
  const LayerStats stats = ComputeLayerStats(*layer);
  std::map<std::string, double> shares(stats.shares.begin(), stats.shares.end());
  EXPECT_NEAR(shares["sparse_tc"] + shares["slot_filled"] + shares["residual"], 1.0, 1e-12);
  EXPECT_NEAR(shares["slot_filled"], 0.183, 0.01);  // the mask says 18.75 % of surplus, less what finds no slot
  EXPECT_LT(shares["residual"], 0.01);
}

TEST(ComputeLayerStats, EmptyLayersHaveNoShareOfNothing) {
  const DenseMatrix zeros = *DenseMatrix::Create(DType::kBf16, 70, 90);
  for (const Format format : kAllFormats) {
    for (const auto& [name, share] : ComputeLayerStats(*Pack(format, zeros.view())).shares) {
      EXPECT_EQ(share, 0.0) << Name(format) << ' ' << name;
    }
  }
}

TEST(MapDensity, CountsEveryElementOnce) {
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    for (const auto& [m, k, rows, cols] : {std::tuple<int64_t, int64_t, int64_t, int64_t>{64, 64, 4, 4},
                                           {7, 13, 3, 5},
                                           {1, 1, 32, 64},
                                           {5, 300, 32, 64},
                                           {300, 5, 1, 1}}) {
      const DenseMatrix w = MakeMatrix(dtype, m, k, 0.3, testing::Mask::kBands);
      const DensityMap map = MapDensity(w.view(), rows, cols);
      ASSERT_EQ(map.rows, std::min(rows, m));
      ASSERT_EQ(map.cols, std::min(cols, k));
      double nonzeros = 0;
      for (int64_t i = 0; i < map.rows; ++i) {
        for (int64_t j = 0; j < map.cols; ++j) {
          const auto height = static_cast<double>((i + 1) * m / map.rows - i * m / map.rows);
          const auto width = static_cast<double>((j + 1) * k / map.cols - j * k / map.cols);
          EXPECT_GE(map.at(i, j), map.lowest);
          EXPECT_LE(map.at(i, j), map.highest);
          nonzeros += map.at(i, j) * height * width;
        }
      }
      EXPECT_NEAR(nonzeros, static_cast<double>(ScanDense(w.view()).nnz), 1e-6);
    }
  }
}

TEST(MapDensity, FindsWhatIsEmptyAndWhatIsFull) {
  DenseMatrix w = *DenseMatrix::Create(DType::kF16, 40, 80);
  auto* values = reinterpret_cast<uint16_t*>(w.mutable_view().data);
  for (int64_t row = 0; row < 40; ++row) {
    for (int64_t col = 0; col < 80; ++col) {
      if (row < 20 && col < 40) values[row * 80 + col] = 0x3c00;
    }
  }
  values[39 * 80 + 79] = 0x8000;  // -0.0 is a zero
  const DensityMap map = MapDensity(w.view(), 2, 2);
  EXPECT_EQ(map.density, (std::vector<double>{1, 0, 0, 0}));
  EXPECT_EQ(map.lowest, 0);
  EXPECT_EQ(map.highest, 1);
  EXPECT_EQ(map.empty_rows, 20);
  EXPECT_EQ(map.empty_cols, 40);
}

}  // namespace
}  // namespace spmmd
