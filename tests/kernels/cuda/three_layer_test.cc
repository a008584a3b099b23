// three_layer_spmm against float64: odd shapes, densities, masks, dtypes, alignments, epilogues; outputs poisoned
// before and fenced around; long codes; determinism; damaged layers.
#include "kernels/format/three_layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/format/prune.h"
#include "kernels/format/reference.h"
#include "tests/kernels/cuda/dense_call.h"
#include "tests/kernels/cuda/gpu.h"

namespace spmmd::gpu_test {
namespace {

enum class MaskKind { kUniform, kColumnSkew, kRowSkew, kTwoFour, kBands };

// N(0, 1) values: of a uniform mask each is there with probability `density`; skewed masks vary it by column or row;
// bands are full in one half of the columns and empty in the other, tile by tile.
DenseMatrix MakeWeights(DType dtype, int64_t rows, int64_t cols, double density, MaskKind mask, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  std::vector<double> scale(static_cast<size_t>(std::max(rows, cols)));
  for (double& s : scale) s = std::exp(static_cast<double>(normal(rng)));
  DenseMatrix wide = *DenseMatrix::Create(DType::kF32, rows, cols);
  for (int64_t r = 0; r < rows; ++r) {
    auto* row = reinterpret_cast<float*>(wide.mutable_view().row(r));
    for (int64_t c = 0; c < cols; ++c) {
      double p = density;
      if (mask == MaskKind::kColumnSkew) p *= scale[static_cast<size_t>(c)];
      if (mask == MaskKind::kRowSkew) p *= scale[static_cast<size_t>(r)];
      if (mask == MaskKind::kBands) p = c / 64 % 2 == 0 ? 1.0 : 0.0;
      if (mask == MaskKind::kTwoFour) p = 1.0;
      if (uniform(rng) < p) row[c] = normal(rng);
    }
  }
  DenseMatrix out = *DenseMatrix::Create(dtype, rows, cols);
  EXPECT_TRUE(ConvertDense(wide.view(), out.mutable_view()).ok());
  if (mask == MaskKind::kTwoFour) {
    EXPECT_TRUE(PruneNm(out.mutable_view(), 2, 4).ok());
  }
  return out;
}

class ThreeLayerSpmmTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    constexpr auto kFormat = static_cast<int32_t>(Format::kThreeLayer);
    if (gpu().cuda->format_supported(gpu().device, kFormat) != SPMMD_CUDA_OK) GTEST_SKIP() << gpu().cuda->last_error();
  }
  void Check(const DenseMatrix& w, int64_t n, const Options& options, uint32_t seed) {
    Check(*Pack(Format::kThreeLayer, w.view()), w, n, options, seed);
  }
  void Check(const PackedLayer& packed, const DenseMatrix& w, int64_t n, const Options& options, uint32_t seed) {
    const LayerPtr layer = Upload(packed);
    ASSERT_NE(layer, nullptr);
    SCOPED_TRACE(::testing::Message() << "M=" << w.rows() << " K=" << w.cols() << " N=" << n << " " << Name(w.dtype())
                                      << " x " << Name(options.x_dtype) << " y " << Name(options.y_dtype));
    const DenseMatrix x = MakeWeights(options.x_dtype, n, w.cols(), 1.0, MaskKind::kUniform, seed);
    DenseCall(w, x, options, seed).Run(layer.get(), Kernel(), workspace_);
  }

  static int32_t Kernel() { return gpu().cuda->find_kernel("three_layer_spmm"); }

  Workspace workspace_;
};

TEST_F(ThreeLayerSpmmTest, OneTile) {
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    for (const MaskKind mask : {MaskKind::kTwoFour, MaskKind::kUniform}) {
      Options options;
      options.x_dtype = dtype;
      options.y_dtype = DType::kF32;
      Check(MakeWeights(dtype, 64, 128, 0.5, mask, 1), 8, options, 2);
    }
  }
}

TEST_F(ThreeLayerSpmmTest, RandomShapesDensitiesAndTypes) {
  std::mt19937 rng(20241130);
  const auto pick = [&](auto... values) {
    const std::vector<std::common_type_t<decltype(values)...>> all = {values...};
    return all[rng() % all.size()];
  };
  for (int round = 0; round < 80 && !HasFailure(); ++round) {
    const auto m = static_cast<int64_t>(rng() % 300 + 1);
    const auto k = static_cast<int64_t>(rng() % 300 + 1);
    const auto n = static_cast<int64_t>(rng() % 70 + 1);
    const DenseMatrix w = MakeWeights(pick(DType::kF16, DType::kBf16), m, k, pick(0.0, 0.02, 0.3, 0.5, 0.7, 1.0),
                                      pick(MaskKind::kUniform, MaskKind::kUniform, MaskKind::kColumnSkew,
                                           MaskKind::kRowSkew, MaskKind::kTwoFour, MaskKind::kBands),
                                      static_cast<uint32_t>(round));
    Options options;
    options.x_dtype = pick(DType::kF16, DType::kBf16, DType::kF32);
    options.y_dtype = pick(DType::kF16, DType::kBf16, DType::kF32);
    options.activation = pick(Activation::kNone, Activation::kNone, Activation::kRelu, Activation::kGelu,
                              Activation::kGeluTanh, Activation::kSilu);
    options.bias = pick(false, true);
    options.x_pad = pick(0, 0, 1, 8);
    options.x_offset = pick(0, 0, 1, 3);
    options.y_pad = pick(0, 0, 1, 8);
    options.y_offset = pick(0, 0, 1);
    options.flags = pick(0u, SPMMD_CUDA_FLAG_CHAIN);
    Check(w, n, options, static_cast<uint32_t>(round));
  }
}

// Whole blocks and shared ones, more CTAs than blocks and fewer, every padded number of tokens.
TEST_F(ThreeLayerSpmmTest, LargeShapesAreDeterministic) {
  const struct {
    int64_t m, k;
    double density;
    MaskKind mask;
  } shapes[] = {{4096, 1024, 0.5, MaskKind::kUniform}, {2500, 2100, 0.5, MaskKind::kColumnSkew},
                {70, 20000, 0.4, MaskKind::kUniform},  {16, 9000, 1.0, MaskKind::kUniform},
                {20000, 130, 0.5, MaskKind::kRowSkew}, {2112, 2300, 0.5, MaskKind::kTwoFour},
                {50700, 128, 0.5, MaskKind::kTwoFour}};
  for (const auto& shape : shapes) {
    const DenseMatrix w = MakeWeights(DType::kBf16, shape.m, shape.k, shape.density, shape.mask, 7);
    const PackedLayer packed = *Pack(Format::kThreeLayer, w.view());
    for (const int64_t n : {5, 16, 32, 64}) {
      Options options;
      options.x_dtype = DType::kBf16;
      options.y_dtype = DType::kF32;
      options.launches = 2;
      Check(packed, w, n, options, 3);
      if (HasFailure()) return;
    }
  }
}

// More code bytes than a stage has room for: a tile whose moves lie far apart in threads that each have many.
TEST_F(ThreeLayerSpmmTest, CodesThatAreNotStaged) {
  // Full groups in the first half of each tile, empty ones in the second: 2048 moves a tile.
  const DenseMatrix w = MakeWeights(DType::kF16, 130, 400, 0.5, MaskKind::kBands, 4);
  const PackedLayer packed = *Pack(Format::kThreeLayer, w.view());
  EXPECT_GT(packed.params[three_layer::kParamMaxCodeBytes], 2048);
  Check(packed, w, 20, {}, 5);
}

TEST_F(ThreeLayerSpmmTest, DamagedLayersAreRefusedBeforeTheyReachTheDevice) {
  const DenseMatrix w = MakeWeights(DType::kF16, 100, 300, 0.5, MaskKind::kUniform, 2);
  std::mt19937 rng(5);
  for (int round = 0; round < 300; ++round) {
    PackedLayer damaged = *Pack(Format::kThreeLayer, w.view());
    Buffer& data = damaged.sections[static_cast<size_t>(round) % damaged.sections.size()].data;
    data.mutable_data()[rng() % data.size()] ^= static_cast<std::byte>(1u << (rng() % 8));
    const CudaLayerDesc desc(damaged);
    spmmd_cuda_layer* layer = nullptr;
    const spmmd_cuda_status code = gpu().cuda->layer_upload(gpu().device, &desc.desc, &layer);
    // The library and the format's own Validate agree.
    EXPECT_EQ(code == SPMMD_CUDA_OK, Validate(damaged).ok()) << gpu().cuda->last_error();
    EXPECT_TRUE(code == SPMMD_CUDA_OK || code == SPMMD_CUDA_DATA_LOSS) << code;
    gpu().cuda->layer_free(layer);
  }
}

}  // namespace
}  // namespace spmmd::gpu_test
