#include "kernels/format/convert.h"

#include <cstring>
#include <string>

#include "gtest/gtest.h"
#include "tests/kernels/format/matrices.h"

namespace spmmd {
namespace {

constexpr Format kFormats[] = {Format::kDense,     Format::kThreeLayer, Format::kRlcCsc,
                               Format::kBitmap,    Format::kCsr,        Format::kCoo,
                               Format::kRowStream, Format::kBitmapGpu,  Format::kColumnPiece};

TEST(ConvertTest, EveryFormatIntoEveryOther) {
  DenseMatrix w = testing::MakeMatrix(DType::kBf16, 150, 270, 0.5, testing::Mask::kColumnSkew);
  const uint16_t nan = 0x7fc1;
  std::memcpy(w.mutable_view().row(9) + 2 * 11, &nan, 2);
  for (const Format from : kFormats) {
    const auto layer = Pack(from, w.view(), {.allow_nonfinite = true});
    ASSERT_TRUE(layer.ok()) << Name(from) << ": " << layer.status();
    for (const Format to : kFormats) {
      const auto converted = Convert(*layer, to);
      ASSERT_TRUE(converted.ok()) << Name(from) << " to " << Name(to) << ": " << converted.status();
      EXPECT_EQ(converted->format, to);
      EXPECT_TRUE(testing::SameNonzeros(w.view(), Unpack(*converted)->view())) << Name(from) << " to " << Name(to);
    }
  }
}

TEST(ConvertTest, SameFormatSharesItsBytesAndErrorsPassThrough) {
  const DenseMatrix w = testing::MakeMatrix(DType::kF32, 20, 30, 0.5);
  const PackedLayer layer = *Pack(Format::kCsr, w.view());
  EXPECT_EQ(Convert(layer, Format::kCsr)->sections[2].data.data(), layer.sections[2].data.data());
  EXPECT_TRUE(absl::IsInvalidArgument(Convert(layer, Format::kThreeLayer).status()));
  PackedLayer damaged = layer;
  damaged.nnz += 1;
  EXPECT_TRUE(absl::IsDataLoss(Convert(damaged, Format::kCsr).status()));
  EXPECT_TRUE(absl::IsDataLoss(Convert(damaged, Format::kDense).status()));
}

}  // namespace
}  // namespace spmmd
