// On a Hopper GPU: mma.sp and wgmma.sp, fed with a packed THREE_LAYER as three_layer.h says, compute W * X.
#include <cstdlib>
#include <random>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/format/reference.h"
#include "kernels/format/three_layer.h"
#include "tests/kernels/cuda/three_layer_layout_probe.h"
#include "tests/kernels/format/matrices.h"

namespace spmmd {
namespace {

using testing::Mask;

class ThreeLayerLayoutTest : public ::testing::TestWithParam<bool> {};

TEST_P(ThreeLayerLayoutTest, TensorCoresComputeTheProduct) {
  if (!testing::HasHopperGpu()) {
    ASSERT_EQ(std::getenv("SPMMD_REQUIRE_GPU"), nullptr) << "no Hopper GPU";
    GTEST_SKIP() << "no Hopper GPU";
  }
  for (const auto& [m, k, density, mask] : {std::tuple{64, 128, 0.5, Mask::kUniform},
                                            {200, 500, 0.5, Mask::kUniform},
                                            {64, 1024, 0.3, Mask::kColumnSkew},
                                            {130, 260, 0.7, Mask::kBands},
                                            {128, 256, 1.0, Mask::kUniform},
                                            {96, 384, 0.9, Mask::kTwoFour}}) {
    // Moderate values: the extremes of MakeMatrix overflow fp32 sums.
    DenseMatrix w = testing::MakeMatrix(DType::kF16, m, k, density, mask);
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < int64_t{m} * k; ++i) {
      auto* bits = reinterpret_cast<uint16_t*>(w.mutable_view().data) + i;
      if (IsNonzeroBits(*bits)) *bits = FloatToF16(normal(random) + 2.0f);
    }
    DenseMatrix x = *DenseMatrix::Create(DType::kF16, testing::kProbeTokens, k);
    for (int64_t i = 0; i < testing::kProbeTokens * int64_t{k}; ++i) {
      reinterpret_cast<uint16_t*>(x.mutable_view().data)[i] = FloatToF16(normal(random));
    }
    const PackedLayer layer = *Pack(Format::kThreeLayer, w.view());
    const auto section = [&](uint32_t id) -> const Buffer& { return layer.FindSection(id)->data; };
    const testing::ThreeLayerSections sections{section(three_layer::kValues).As<uint16_t>().data(),
                                               section(three_layer::kMetadata).As<uint32_t>().data(),
                                               section(three_layer::kCodeOffsets).As<uint32_t>().data(),
                                               section(three_layer::kCodes).As<uint8_t>().data(),
                                               section(three_layer::kResidualOffsets).As<uint64_t>().data(),
                                               section(three_layer::kResidualPositions).As<uint16_t>().data(),
                                               section(three_layer::kResidualValues).As<uint16_t>().data(),
                                               section(three_layer::kCodes).size(),
                                               section(three_layer::kResidualValues).size() / sizeof(uint16_t)};
    DenseMatrix y = *DenseMatrix::Create(DType::kF32, testing::kProbeTokens, m);
    const char* error = testing::ProbeThreeLayer(sections, m, k, reinterpret_cast<const uint16_t*>(x.view().data),
                                                 reinterpret_cast<float*>(y.mutable_view().data), GetParam());
    ASSERT_EQ(error, nullptr) << error;
    const Reference reference = ReferenceMatmul(w.view(), x.view());
    const absl::Status status = CompareToReference(y.view(), reference, DefaultTolerance(DType::kF32, k));
    EXPECT_TRUE(status.ok()) << m << "x" << k << " " << MaskName(mask) << ": " << status;
  }
}

INSTANTIATE_TEST_SUITE_P(Instructions, ThreeLayerLayoutTest, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Wgmma" : "Mma"; });

}  // namespace
}  // namespace spmmd
