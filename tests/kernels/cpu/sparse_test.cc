// SpMspV: sparse activations against the reference, bad index lists, and Sparsify.
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/matmul.h"
#include "tests/kernels/cpu/operands.h"

namespace spmmd::testing {
namespace {

using ::testing::HasSubstr;

TEST(MatmulSparseTest, EveryDensityOfX) {
  uint64_t seed = 1;
  for (const DType dtype : kAllDtypes) {
    for (const auto& [m, k] : {std::pair<int64_t, int64_t>{1, 1}, {33, 300}, {300, 17}, {129, 520}, {1100, 64}}) {
      const DenseMatrix w = Weights(dtype, m, k, 0.5, seed++);
      for (const Format format : {Format::kBitmap, Format::kDense}) {
        const PackedLayer layer = *Pack(format, w.view());
        for (const double density : {0.0, 0.02, 0.3, 0.5, 0.9, 1.1}) {
          EXPECT_TRUE(SparseProductIsRight(layer, w.view(), SparseTokens(k, density, seed), {}, DType::kF32,
                                           DefaultThreadPool()))
              << Name(format) << " " << Name(dtype) << " M=" << m << " K=" << k << " density of x " << density;
        }
      }
    }
  }
}

TEST(MatmulSparseTest, EmptyXGivesTheActivatedBias) {
  const DenseMatrix w = Weights(DType::kF16, 100, 30, 0.5, 2);
  const std::vector<float> bias = Bias(100, 3);
  for (const Format format : {Format::kBitmap, Format::kDense}) {
    const PackedLayer layer = *Pack(format, w.view());
    EXPECT_TRUE(SparseProductIsRight(layer, w.view(), {}, {bias, Activation::kSilu}, DType::kF32, DefaultThreadPool()));
    EXPECT_TRUE(SparseProductIsRight(layer, w.view(), {}, {}, DType::kBf16, DefaultThreadPool()));
  }
}

TEST(MatmulSparseTest, LargeValuesTakeTheOtherDecoder) {
  const DenseMatrix w = Weights(DType::kF16, 100, 30, 0.5, 4);
  SparseOperand x = SparseTokens(30, 0.5, 5);
  x.values[1] = 1e20f;
  EXPECT_TRUE(
      SparseProductIsRight(*Pack(Format::kBitmap, w.view()), w.view(), x, {}, DType::kF32, DefaultThreadPool()));
}

TEST(MatmulSparseTest, RefusesBadIndexListsWithThePosition) {
  const DenseMatrix w = Weights(DType::kF16, 10, 20, 0.5, 6);
  for (const Format format : {Format::kBitmap, Format::kDense}) {
    const PackedLayer layer = *Pack(format, w.view());
    Strided y(DType::kF32, 1, 10, 0);
    const auto message = [&](std::vector<uint32_t> indices, std::vector<float> values) {
      const absl::Status status = cpu::MatmulSparse(layer, {indices, values}, {}, y.view(), DefaultThreadPool());
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      return std::string(status.message());
    };
    EXPECT_THAT(message({1, 20}, {1, 1}), HasSubstr("x.indices[1]: 20 is not below K = 20"));
    EXPECT_THAT(message({0xffffffffu}, {1}), HasSubstr("x.indices[0]: 4294967295"));
    EXPECT_THAT(message({3, 5, 5}, {1, 1, 1}), HasSubstr("x.indices[2]: 5 after 5"));
    EXPECT_THAT(message({3, 2}, {1, 1}), HasSubstr("x.indices[1]: 2 after 3"));
    EXPECT_THAT(message({3, 4}, {1}), HasSubstr("2 indices, but 1 values"));
    Strided two(DType::kF32, 2, 10, 0);
    EXPECT_THAT(std::string(cpu::MatmulSparse(layer, {}, {}, two.view(), DefaultThreadPool()).message()),
                HasSubstr("y: 2 rows, expected N = 1"));
  }
}

TEST(SparsifyTest, KeepsWhatExceedsTheThreshold) {
  for (const DType dtype : kAllDtypes) {
    Strided x(dtype, 2, 1500, 3);
    for (int64_t c = 0; c < 1500; ++c) {
      StoreValue(x.view(), 0, c, 9.0f);
      StoreValue(x.view(), 1, c, c % 3 == 0 ? 0.0f : c % 3 == 1 ? -0.5f : 2.0f);
    }
    StoreValue(x.view(), 1, 0, -0.0f);
    StoreValue(x.view(), 1, 1499, std::numeric_limits<float>::quiet_NaN());
    std::vector<uint32_t> indices;
    std::vector<float> values;
    cpu::Sparsify(x.const_view(), 1, 0.0f, &indices, &values);
    ASSERT_EQ(indices.size(), 1000u);  // 500 zeros gone
    EXPECT_EQ(indices[0], 1u);
    EXPECT_EQ(values[0], -0.5f);
    EXPECT_TRUE(std::is_sorted(indices.begin(), indices.end()));
    cpu::Sparsify(x.const_view(), 1, 0.5f, &indices, &values);  // |x| = threshold goes
    ASSERT_EQ(indices.size(), 501u - 1u);
    EXPECT_EQ(indices[0], 2u);
    EXPECT_EQ(indices.back(), 1499u);  // NaN stays
    cpu::Sparsify(x.const_view(), 1, 3.0f, &indices, &values);
    EXPECT_THAT(indices, ::testing::ElementsAre(1499u));
  }
}

}  // namespace
}  // namespace spmmd::testing
