// Every instruction set that this machine supports gives right results, and the dense passes the same bits.
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/matmul.h"
#include "kernels/format/dense_rows.h"
#include "tests/kernels/cpu/operands.h"

namespace spmmd::testing {
namespace {

class TargetsTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(TargetsTest, Matmul) {
  const OnTarget target(GetParam());
  uint64_t seed = 1;
  for (const auto& [m, k] : {std::pair<int64_t, int64_t>{1, 1}, {65, 33}, {190, 300}, {33, 9}}) {
    for (const DType dtype : kAllDtypes) {
      const DenseMatrix w = Weights(dtype, m, k, 0.5, ++seed);
      const std::vector<float> bias = Bias(m, seed);
      for (const Format format : {Format::kBitmap, Format::kDense}) {
        const PackedLayer layer = *Pack(format, w.view());
        for (const int64_t n : {1, 2, 3, 4, 5, 7, 9, 12, 19}) {
          const Strided x = Tokens(DType::kF16, n, k, seed);
          EXPECT_TRUE(ProductIsRight(layer, w.view(), x.const_view(), {bias, Activation::kGelu}, DType::kF32,
                                     DefaultThreadPool()))
              << Name(format) << " " << Name(dtype) << " M=" << m << " K=" << k << " N=" << n;
        }
        EXPECT_TRUE(SparseProductIsRight(layer, w.view(), SparseTokens(k, 0.5, seed), {bias, Activation::kSilu},
                                         DType::kBf16, DefaultThreadPool()))
            << Name(format) << " " << Name(dtype) << " M=" << m << " K=" << k;
      }
    }
  }
}

TEST_P(TargetsTest, WidenEveryHalf) {
  const OnTarget target(GetParam());
  std::vector<uint16_t> bits(65536);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(bits.size());
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    WidenRow(dtype, reinterpret_cast<const std::byte*>(bits.data()), wide.data(), 65536);
    for (size_t i = 0; i < bits.size(); ++i) {
      const float want = dtype == DType::kF16 ? F16ToFloat(bits[i]) : Bf16ToFloat(bits[i]);
      if (want != want) {
        EXPECT_TRUE(wide[i] != wide[i]) << i;  // payloads of NaNs may differ
      } else {
        EXPECT_EQ(std::bit_cast<uint32_t>(wide[i]), std::bit_cast<uint32_t>(want)) << Name(dtype) << " " << i;
      }
    }
  }
}

TEST_P(TargetsTest, NarrowLikeTheScalarDefinition) {
  const OnTarget target(GetParam());
  std::vector<float> wide;
  std::mt19937 random(3);
  for (int i = 0; i < 40000; ++i) wide.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  for (int i = 0; i < 40000; ++i) {  // around the rounding boundaries of fp16
    const auto half = static_cast<uint16_t>(random());
    const uint32_t bits = std::bit_cast<uint32_t>(F16ToFloat(half));
    wide.push_back(std::bit_cast<float>(bits + (static_cast<uint32_t>(random()) & 0x3fffu) - 0x2000u));
  }
  for (const float value :
       {0.0f, -0.0f, 65504.0f, 65519.99f, 65520.0f, -65520.0f, 0x1p-24f, 0x1p-25f, 0x1.8p-25f, HUGE_VALF}) {
    wide.push_back(value);
  }
  std::vector<uint16_t> narrow(wide.size());
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    NarrowRow(wide.data(), dtype, reinterpret_cast<std::byte*>(narrow.data()), static_cast<int64_t>(wide.size()));
    int wrong = 0;
    for (size_t i = 0; i < wide.size(); ++i) {
      wrong += narrow[i] == (dtype == DType::kF16 ? FloatToF16(wide[i]) : FloatToBf16(wide[i])) ? 0 : 1;
    }
    EXPECT_EQ(wrong, 0) << Name(dtype);
  }
}

TEST_P(TargetsTest, ScanCountsNonzerosAndNonfinite) {
  const OnTarget target(GetParam());
  std::vector<uint16_t> bits(65536);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i * 40503u);  // a permutation
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{77}, int64_t{65536}}) {
      RowStats want;
      for (int64_t i = 0; i < count; ++i) {
        const uint16_t b = bits[static_cast<size_t>(i)];
        const float value = dtype == DType::kF16 ? F16ToFloat(b) : Bf16ToFloat(b);
        want.nnz += value != 0 ? 1 : 0;
        want.nonfinite += std::isfinite(value) ? 0 : 1;
      }
      const RowStats got = ScanRow(dtype, reinterpret_cast<const std::byte*>(bits.data()), count);
      EXPECT_EQ(got.nnz, want.nnz) << Name(dtype) << " " << count;
      EXPECT_EQ(got.nonfinite, want.nonfinite) << Name(dtype) << " " << count;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, TargetsTest, ::testing::ValuesIn(SupportedTargets()),
                         [](const auto& info) { return std::string(hwy::TargetName(info.param)); });

}  // namespace
}  // namespace spmmd::testing
