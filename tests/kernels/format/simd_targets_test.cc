// Every instruction set that this machine has packs the same bytes.
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "kernels/format/packed_layer.h"
#include "tests/kernels/format/matrices.h"

namespace spmmd {
namespace {

class SimdTargetsTest : public ::testing::TestWithParam<Format> {
 protected:
  static void UseOnly(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  void TearDown() override { UseOnly(0); }
};

TEST_P(SimdTargetsTest, PackTheSameBytes) {
  const int64_t supported = hwy::SupportedTargets();
  for (const auto& [rows, cols, density, mask] : {std::tuple{300, 500, 0.5, testing::Mask::kUniform},
                                                  {256, 256, 0.08, testing::Mask::kBands},
                                                  {70, 90, 1.0, testing::Mask::kUniform}}) {
    const DenseMatrix w = testing::MakeMatrix(DType::kF16, rows, cols, density, mask);
    UseOnly(0);
    const auto want = Pack(GetParam(), w.view());
    ASSERT_TRUE(want.ok()) << want.status();
    int targets = 0;
    for (const int64_t target : {HWY_SSSE3, HWY_SSE4, HWY_AVX2, HWY_AVX3, HWY_AVX3_DL, HWY_SCALAR}) {
      // The scalar target is always there, but SupportedTargets does not say so when better ones are.
      if (target != HWY_SCALAR && (supported & target) == 0) continue;
      UseOnly(target);
      const auto got = Pack(GetParam(), w.view());
      ASSERT_TRUE(got.ok()) << got.status();
      ASSERT_EQ(got->sections.size(), want->sections.size());
      for (size_t i = 0; i < got->sections.size(); ++i) {
        ASSERT_EQ(got->sections[i].data.size(), want->sections[i].data.size()) << hwy::TargetName(target);
        EXPECT_EQ(
            std::memcmp(got->sections[i].data.data(), want->sections[i].data.data(), got->sections[i].data.size()), 0)
            << hwy::TargetName(target) << " section " << got->sections[i].id;
      }
      ++targets;
    }
    EXPECT_GT(targets, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, SimdTargetsTest, ::testing::Values(Format::kBitmap, Format::kRlcCsc, Format::kThreeLayer),
                         [](const auto& info) { return std::string(Name(info.param)); });

}  // namespace
}  // namespace spmmd
