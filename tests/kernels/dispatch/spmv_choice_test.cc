// The choice between SpMV, SpMspV and dense for one token: properties that hold for any tuning, and the H200's own
// against what was measured there.
#include "kernels/dispatch/spmv_choice.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace spmmd {
namespace {

constexpr int64_t kM = 4096;
constexpr int64_t kK = 4096;

// 50 % sparsity: bytes of dense that the formats take there.
SpmvCopies AllCopies(int64_t m = kM, int64_t k = kK) {
  SpmvCopies copies;
  copies.m = m;
  copies.k = k;
  copies.nnz = m * k / 2;
  copies.dense_bytes = m * k * 2;
  copies.row_stream_bytes = copies.dense_bytes * 62 / 100;
  copies.column_piece_bytes = copies.dense_bytes * 62 / 100;
  return copies;
}

TEST(SpmvChoice, OnlyResidentCopiesCount) {
  const SpmvTuning tuning = H200SpmvTuning();
  SpmvCopies none;
  none.m = kM;
  none.k = kK;
  EXPECT_FALSE(ChooseSpmv(tuning, none, kK, false).has_value());
  EXPECT_EQ(LargestSpmspvColumns(tuning, none, false), -1);
  for (const SpmvKernel kernel : {SpmvKernel::kSpmv, SpmvKernel::kSpmspv, SpmvKernel::kDense}) {
    SpmvCopies one = none;
    (kernel == SpmvKernel::kSpmv     ? one.row_stream_bytes
     : kernel == SpmvKernel::kSpmspv ? one.column_piece_bytes
                                     : one.dense_bytes) = 1 << 20;
    for (const int64_t active : {int64_t{0}, kK / 2, kK}) {
      const auto choice = ChooseSpmv(tuning, one, active, false);
      ASSERT_TRUE(choice.has_value());
      EXPECT_EQ(choice->kernel, kernel);
      EXPECT_TRUE(std::isfinite(choice->us));
      EXPECT_GT(choice->us, 0);
    }
    for (const SpmvKernel other : {SpmvKernel::kSpmv, SpmvKernel::kSpmspv, SpmvKernel::kDense}) {
      if (other != kernel) {
        EXPECT_EQ(PredictSpmvUs(tuning, one, other, 1, false), std::numeric_limits<double>::infinity());
      }
    }
  }
}

TEST(SpmvChoice, PicksTheSmallestPrediction) {
  const SpmvTuning tuning = H200SpmvTuning();
  for (const auto& [m, k] : std::vector<std::pair<int64_t, int64_t>>{{64, 64}, {4096, 4096}, {28672, 7168}}) {
    const SpmvCopies copies = AllCopies(m, k);
    for (const bool accumulate : {false, true}) {
      for (int64_t active = 0; active <= k; active += k / 16) {
        const auto choice = ChooseSpmv(tuning, copies, active, accumulate);
        ASSERT_TRUE(choice.has_value());
        for (const SpmvKernel kernel : {SpmvKernel::kSpmv, SpmvKernel::kSpmspv, SpmvKernel::kDense}) {
          EXPECT_LE(choice->us, PredictSpmvUs(tuning, copies, kernel, active, accumulate));
        }
        EXPECT_EQ(choice->us, PredictSpmvUs(tuning, copies, choice->kernel, active, accumulate));
      }
    }
  }
}

// Fewer active columns never cost more, and the crossover that LargestSpmspvColumns names is where the choice flips.
TEST(SpmvChoice, CrossoverSeparates) {
  const SpmvTuning tuning = H200SpmvTuning();
  for (const auto& [m, k] : std::vector<std::pair<int64_t, int64_t>>{{4096, 4096}, {11008, 4096}, {28672, 7168}}) {
    for (const bool accumulate : {false, true}) {
      const SpmvCopies copies = AllCopies(m, k);
      const int64_t most = LargestSpmspvColumns(tuning, copies, accumulate);
      ASSERT_GE(most, -1);
      ASSERT_LE(most, k);
      double previous = 0;
      for (int64_t active = 0; active <= k; active += 64) {
        const double us = PredictSpmvUs(tuning, copies, SpmvKernel::kSpmspv, active, accumulate);
        EXPECT_GE(us, previous);
        previous = us;
        EXPECT_EQ(ChooseSpmv(tuning, copies, active, accumulate)->kernel == SpmvKernel::kSpmspv, active <= most)
            << m << "x" << k << " active " << active << " crossover " << most;
      }
    }
  }
}

TEST(SpmvChoice, ActiveColumnsOutsideTheLayerAreClamped) {
  const SpmvTuning tuning = H200SpmvTuning();
  const SpmvCopies copies = AllCopies();
  EXPECT_EQ(PredictSpmvUs(tuning, copies, SpmvKernel::kSpmspv, -5, false),
            PredictSpmvUs(tuning, copies, SpmvKernel::kSpmspv, 0, false));
  EXPECT_EQ(PredictSpmvUs(tuning, copies, SpmvKernel::kSpmspv, kK + 5, false),
            PredictSpmvUs(tuning, copies, SpmvKernel::kSpmspv, kK, false));
}

TEST(SpmvChoice, SlowerMemoryScalesBytesOnly) {
  const SpmvCopies copies = AllCopies(28672, 7168);
  const SpmvTuning fast = H200SpmvTuning();
  const SpmvTuning slow = ScaledSpmvTuning(1.0e12);
  const double ratio = PredictSpmvUs(slow, copies, SpmvKernel::kSpmv, 0, false) /
                       PredictSpmvUs(fast, copies, SpmvKernel::kSpmv, 0, false);
  EXPECT_GT(ratio, 2.0);
  EXPECT_LT(ratio, 4.7);
  EXPECT_EQ(ScaledSpmvTuning(0).spmv.us_per_mib, fast.spmv.us_per_mib);
}

TEST(SpmvChoice, ChainedLaunchesCostLess) {
  const SpmvCopies copies = AllCopies();
  for (const SpmvKernel kernel : {SpmvKernel::kSpmv, SpmvKernel::kSpmspv}) {
    for (const bool accumulate : {false, true}) {
      EXPECT_LT(PredictSpmvUs(H200SpmvTuning(true), copies, kernel, kK / 2, accumulate),
                PredictSpmvUs(H200SpmvTuning(false), copies, kernel, kK / 2, accumulate));
    }
  }
}

// An H200 as measured (docs/measurements-spmv.md): dense x belongs to SpMV, half-empty x of a large layer to SpMspV.
TEST(SpmvChoice, AgreesWithMeasurements) {
  const SpmvTuning tuning = H200SpmvTuning();
  const SpmvCopies large = AllCopies(28672, 7168);
  EXPECT_EQ(ChooseSpmv(tuning, large, 7168, false)->kernel, SpmvKernel::kSpmv);
  EXPECT_EQ(ChooseSpmv(tuning, large, 7168 / 2, false)->kernel, SpmvKernel::kSpmspv);
  EXPECT_EQ(ChooseSpmv(tuning, AllCopies(), 4096, false)->kernel, SpmvKernel::kSpmv);
  EXPECT_EQ(ChooseSpmv(tuning, AllCopies(), 0, true)->kernel, SpmvKernel::kSpmspv);
}

}  // namespace
}  // namespace spmmd
