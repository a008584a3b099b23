#include "kernels/format/prune.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/format/matrices.h"

namespace spmmd {
namespace {

double MagnitudeKey(const DenseView& w, int64_t i) {
  const double value = ElementAsDouble(w, i / w.cols, i % w.cols);
  return std::isnan(value) ? std::numeric_limits<double>::infinity() : std::abs(value);
}

// The definition, by sorting: smallest first, among equals the later first.
std::vector<bool> KeptByMagnitude(const DenseView& w, double sparsity) {
  const int64_t total = w.rows * w.cols;
  std::vector<int64_t> order(static_cast<size_t>(total));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const double x = MagnitudeKey(w, a);
    const double y = MagnitudeKey(w, b);
    return x != y ? x < y : a > b;
  });
  std::vector<bool> kept(static_cast<size_t>(total), true);
  for (int64_t i = 0; i < std::llround(sparsity * static_cast<double>(total)); ++i) {
    kept[static_cast<size_t>(order[static_cast<size_t>(i)])] = false;
  }
  return kept;
}

DenseMatrix Copy(const DenseMatrix& w) {
  DenseMatrix copy = *DenseMatrix::Create(w.dtype(), w.rows(), w.cols());
  std::memcpy(copy.mutable_view().data, w.view().data, w.bytes());
  return copy;
}

void ExpectKept(const DenseMatrix& before, const DenseMatrix& after, const std::vector<bool>& kept) {
  for (int64_t i = 0; i < before.rows() * before.cols(); ++i) {
    const int64_t r = i / before.cols();
    const int64_t c = i % before.cols();
    const double want = kept[static_cast<size_t>(i)] ? ElementAsDouble(before.view(), r, c) : 0.0;
    ASSERT_EQ(ElementAsDouble(after.view(), r, c), want) << "(" << r << ", " << c << ")";
  }
}

TEST(PruneMagnitudeTest, MatchesTheDefinition) {
  for (const DType dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
    for (const double density : {1.0, 0.6, 0.0}) {
      for (const double sparsity : {0.0, 0.1, 0.5, 0.7, 0.999}) {
        const DenseMatrix before = testing::MakeMatrix(dtype, 61, 77, density);
        DenseMatrix after = Copy(before);
        ASSERT_TRUE(PruneMagnitude(after.mutable_view(), sparsity).ok());
        ExpectKept(before, after, KeptByMagnitude(before.view(), sparsity));
      }
    }
  }
}

TEST(PruneMagnitudeTest, TiesGoFromTheEnd) {
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    DenseMatrix w = *DenseMatrix::Create(dtype, 40, 10);
    DenseMatrix ones = *DenseMatrix::Create(DType::kF32, 40, 10);
    for (int i = 0; i < 400; ++i) reinterpret_cast<float*>(ones.mutable_view().data)[i] = i % 2 == 0 ? 1.0f : -1.0f;
    ASSERT_TRUE(ConvertDense(ones.view(), w.mutable_view()).ok());
    const DenseMatrix before = Copy(w);
    ASSERT_TRUE(PruneMagnitude(w.mutable_view(), 0.3).ok());
    std::vector<bool> kept(400, true);
    std::fill(kept.begin() + 280, kept.end(), false);
    ExpectKept(before, w, kept);
  }
}

TEST(PruneMagnitudeTest, HonoursRowStride) {
  DenseMatrix w = testing::MakeMatrix(DType::kF16, 20, 50, 1.0);
  const DenseMatrix before = Copy(w);
  MutableDenseView left = w.mutable_view();
  left.cols = 30;
  ASSERT_TRUE(PruneMagnitude(left, 0.5).ok());
  int64_t zeros = 0;
  for (int64_t r = 0; r < 20; ++r) {
    for (int64_t c = 0; c < 50; ++c) {
      if (c >= 30) {
        EXPECT_EQ(testing::BitsAt(w.view(), r, c), testing::BitsAt(before.view(), r, c));
      } else {
        zeros += ElementAsDouble(w.view(), r, c) == 0.0;
      }
    }
  }
  EXPECT_EQ(zeros, 300);
}

TEST(PruneMagnitudeTest, RefusesBadSparsity) {
  DenseMatrix w = testing::MakeMatrix(DType::kF16, 2, 2, 1.0);
  for (const double sparsity : {-0.1, 1.0, 2.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_TRUE(absl::IsInvalidArgument(PruneMagnitude(w.mutable_view(), sparsity)));
  }
}

TEST(PruneNmTest, KeepsTheLargestOfEveryGroup) {
  for (const DType dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
    for (const auto& [n, m] : {std::pair{2, 4}, {1, 2}, {1, 4}, {4, 8}, {3, 7}, {63, 64}, {16, 32}}) {
      const DenseMatrix before = testing::MakeMatrix(dtype, 13, 101, 0.8);
      DenseMatrix after = Copy(before);
      ASSERT_TRUE(PruneNm(after.mutable_view(), n, m).ok());
      std::vector<bool> kept(static_cast<size_t>(13 * 101), false);
      for (int64_t r = 0; r < 13; ++r) {
        for (int64_t begin = 0; begin < 101; begin += m) {
          std::vector<int64_t> group(static_cast<size_t>(std::min<int64_t>(m, 101 - begin)));
          std::iota(group.begin(), group.end(), r * 101 + begin);
          std::stable_sort(group.begin(), group.end(), [&](int64_t a, int64_t b) {
            return MagnitudeKey(before.view(), a) > MagnitudeKey(before.view(), b);
          });
          for (size_t i = 0; i < group.size() && i < static_cast<size_t>(n); ++i) {
            kept[static_cast<size_t>(group[i])] = true;
          }
        }
      }
      ExpectKept(before, after, kept);
    }
  }
}

TEST(PruneNmTest, RefusesBadGroups) {
  DenseMatrix w = testing::MakeMatrix(DType::kF16, 2, 2, 1.0);
  for (const auto& [n, m] : {std::pair{0, 4}, {4, 4}, {1, 1}, {2, 65}, {-1, 4}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(PruneNm(w.mutable_view(), n, m)));
  }
}

TEST(IsTwoOfFourTest, WhatPruningLeavesAndNothingElse) {
  for (const DType dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
    for (const int64_t cols : {1, 3, 4, 7, 64, 131}) {
      DenseMatrix w = *DenseMatrix::Create(dtype, 9, cols);
      const auto set = [&](int64_t r, int64_t c, uint32_t bits) {
        std::memcpy(w.mutable_view().row(r) + static_cast<size_t>(c) * SizeOf(dtype), &bits, SizeOf(dtype));
      };
      for (int64_t r = 0; r < 9; ++r) {
        for (int64_t c = 0; c < cols; ++c) set(r, c, 0x3c003c00u);
      }
      EXPECT_EQ(IsTwoOfFour(w.view()), cols < 3) << cols;
      ASSERT_TRUE(PruneNm(w.mutable_view(), 2, 4).ok());
      EXPECT_TRUE(IsTwoOfFour(w.view())) << cols;
      if (cols < 4) continue;
      // A third one, first as a negative zero, in one group of one row.
      set(7, 0, 0x3c003c00u);
      set(7, 1, 0x3c003c00u);
      set(7, 2, dtype == DType::kF32 ? 0x80000000u : 0x8000u);
      set(7, 3, 0);
      EXPECT_TRUE(IsTwoOfFour(w.view())) << cols;
      set(7, 3, 0x3c003c00u);
      EXPECT_FALSE(IsTwoOfFour(w.view())) << cols;
    }
  }
}

}  // namespace
}  // namespace spmmd
