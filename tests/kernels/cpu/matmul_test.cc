// Products against the double-precision reference, over shapes, densities, dtypes and token counts.
#include "kernels/cpu/matmul.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/bitmap_kernels.h"
#include "tests/kernels/cpu/operands.h"

namespace spmmd::testing {
namespace {

constexpr Format kFormats[] = {Format::kBitmap, Format::kDense};

TEST(MatmulTest, OddShapesAndTokenCounts) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> size(1, 300);
  std::uniform_int_distribution<int> tokens(0, 70);
  constexpr double kDensities[] = {0.0, 0.05, 0.3, 0.5, 0.7, 1.0};
  for (int i = 0; i < 150; ++i) {
    const int64_t m = size(random), k = size(random);
    const int64_t n = i % 3 == 0 ? 1 : tokens(random);
    const DType dtype = kAllDtypes[i % 3];
    const DType x_dtype = kAllDtypes[random() % 3], y_dtype = kAllDtypes[random() % 3];
    const double density = kDensities[random() % 6];
    const DenseMatrix w = Weights(dtype, m, k, density, static_cast<uint64_t>(i));
    const Strided x = Tokens(x_dtype, n, k, static_cast<uint64_t>(i));
    for (const Format format : kFormats) {
      const PackedLayer layer = *Pack(format, w.view());
      EXPECT_TRUE(ProductIsRight(layer, w.view(), x.const_view(), {}, y_dtype, DefaultThreadPool()))
          << Name(format) << " M=" << m << " K=" << k << " N=" << n << " density " << density << " " << Name(dtype);
    }
  }
}

TEST(MatmulTest, EdgesOfStripsAndTiles) {
  constexpr int64_t kEdges[] = {1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 255, 256, 257};
  uint64_t seed = 0;
  for (const int64_t m : kEdges) {
    for (const int64_t k : kEdges) {
      const DType dtype = kAllDtypes[++seed % 3];
      const DenseMatrix w = Weights(dtype, m, k, 0.5, seed);
      const PackedLayer layer = *Pack(Format::kBitmap, w.view());
      const Strided x = Tokens(DType::kF32, 1 + static_cast<int64_t>(seed % 2) * 4, k, seed);
      EXPECT_TRUE(ProductIsRight(layer, w.view(), x.const_view(), {}, DType::kF32, DefaultThreadPool()))
          << "M=" << m << " K=" << k << " " << Name(dtype);
    }
  }
}

TEST(MatmulTest, SeveralRowBlocksAndColumnTiles) {
  for (const DType dtype : kAllDtypes) {
    const DenseMatrix w = Weights(dtype, 4096 + 4096 + 70, 256 + 13, 0.4, 5);
    const PackedLayer layer = *Pack(Format::kBitmap, w.view());
    for (const int64_t n : {1, 3}) {
      const Strided x = Tokens(DType::kBf16, n, w.cols(), 6);
      EXPECT_TRUE(ProductIsRight(layer, w.view(), x.const_view(), {}, DType::kF32, DefaultThreadPool()))
          << Name(dtype) << " N=" << n;
    }
    EXPECT_TRUE(
        SparseProductIsRight(layer, w.view(), SparseTokens(w.cols(), 0.5, 7), {}, DType::kF32, DefaultThreadPool()))
        << Name(dtype);
  }
}

TEST(MatmulTest, ManyTokensTakeSeveralPasses) {
  const DenseMatrix w = Weights(DType::kBf16, 96, 80, 0.5, 8);
  const Strided x = Tokens(DType::kBf16, 555, 80, 9);
  for (const Format format : kFormats) {
    const PackedLayer layer = *Pack(format, w.view());
    EXPECT_TRUE(ProductIsRight(layer, w.view(), x.const_view(), {}, DType::kBf16, DefaultThreadPool())) << Name(format);
  }
}

TEST(MatmulTest, BiasAndEveryActivation) {
  for (const Format format : kFormats) {
    for (const Activation activation :
         {Activation::kNone, Activation::kRelu, Activation::kGelu, Activation::kGeluTanh, Activation::kSilu}) {
      for (const int64_t n : {1, 5}) {
        const DenseMatrix w = Weights(DType::kF16, 130, 96, 0.5, 10);
        const PackedLayer layer = *Pack(format, w.view());
        const Strided x = Tokens(DType::kF32, n, 96, 11);
        const std::vector<float> bias = Bias(130, 12);
        EXPECT_TRUE(
            ProductIsRight(layer, w.view(), x.const_view(), {bias, activation}, DType::kF32, DefaultThreadPool()))
            << Name(format) << " " << Name(activation) << " N=" << n;
      }
    }
  }
}

TEST(MatmulTest, ActivationsOverTheWholeRange) {
  // An identity matrix passes any value to the activation.
  constexpr int64_t kSize = 400;
  DenseMatrix w = *DenseMatrix::Create(DType::kF32, kSize, kSize);
  for (int64_t i = 0; i < kSize; ++i) StoreValue(w.mutable_view(), i, i, 1.0f);
  const PackedLayer layer = *Pack(Format::kBitmap, w.view());
  Strided x(DType::kF32, 1, kSize, 0);
  for (int64_t i = 0; i < kSize; ++i) {
    const float magnitude = std::exp((static_cast<float>(i / 2) - 150.0f) / 10.0f);  // 3e-7 to 134
    StoreValue(x.view(), 0, i, i % 2 == 0 ? magnitude : -magnitude);
  }
  for (const Activation activation : {Activation::kRelu, Activation::kGelu, Activation::kGeluTanh, Activation::kSilu}) {
    EXPECT_TRUE(ProductIsRight(layer, w.view(), x.const_view(), {{}, activation}, DType::kF32, DefaultThreadPool()))
        << Name(activation);
  }
}

TEST(MatmulTest, ActivationsOfHugeValuesAreTheirLimits) {
  DenseMatrix w = *DenseMatrix::Create(DType::kF32, 1, 1);
  StoreValue(w.mutable_view(), 0, 0, 1.0f);
  const PackedLayer layer = *Pack(Format::kBitmap, w.view());
  for (const Activation activation : {Activation::kGelu, Activation::kGeluTanh, Activation::kSilu}) {
    for (const float magnitude : {200.0f, 1e10f, 1e36f, 3e38f}) {
      for (const float x : {magnitude, -magnitude}) {
        float result = 7.0f;
        const MutableDenseView out = {reinterpret_cast<std::byte*>(&result), DType::kF32, 1, 1, 1};
        const DenseView in = {reinterpret_cast<const std::byte*>(&x), DType::kF32, 1, 1, 1};
        ASSERT_TRUE(cpu::Matmul(layer, in, {{}, activation}, out, DefaultThreadPool()).ok());
        EXPECT_EQ(result, x > 0 ? x : 0.0f) << Name(activation) << "(" << x << ")";
      }
    }
  }
}

TEST(MatmulTest, SubnormalAndLargeFp16) {
  // What separates the two fp16 decoders: subnormal and largest weights, activations beyond 2^15.
  DenseMatrix w = *DenseMatrix::Create(DType::kF16, 64, 16);
  for (int64_t r = 0; r < 64; ++r) {
    for (int64_t c = 0; c < 16; ++c) {
      const auto bits = static_cast<uint16_t>(c % 3 == 0 ? 1 + r : c % 3 == 1 ? 0x83ff - r : 0x7bff - r);
      std::memcpy(w.mutable_view().row(r) + c * 2, &bits, 2);
    }
  }
  const PackedLayer layer = *Pack(Format::kBitmap, w.view());
  for (const float scale : {1.0f, 0x1p-100f, 0x1p14f, 0x1p15f, 0x1p60f}) {
    for (const int64_t n : {1, 6}) {
      Strided x(DType::kF32, n, 16, 1);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t c = 0; c < 16; ++c) StoreValue(x.view(), i, c, scale * (1.0f + static_cast<float>(c) / 16));
      }
      Strided y(DType::kF32, n, 64, 0);
      ASSERT_TRUE(cpu::Matmul(layer, x.const_view(), {}, y.view(), DefaultThreadPool()).ok());
      const absl::Status same = CompareToReference(y.const_view(), ReferenceMatmul(w.view(), x.const_view()),
                                                   DefaultTolerance(DType::kF32, 16), 0);
      EXPECT_TRUE(same.ok()) << same << " scale " << scale << " N=" << n;
    }
  }
}

TEST(MatmulTest, SubnormalAndTinyBf16) {
  // What the instruction for bf16 pairs would flush to zero: weights, x, products and sums below 2^-126.
  DenseMatrix w = *DenseMatrix::Create(DType::kBf16, 64, 17);
  for (int64_t r = 0; r < 64; ++r) {
    for (int64_t c = 0; c < 17; ++c) {
      const auto bits =
          static_cast<uint16_t>(c % 2 == 0 ? 1 + r : 0x8000 + 0x80 * (r + 1));  // subnormal; 2^-126 to 2^-62
      std::memcpy(w.mutable_view().row(r) + c * 2, &bits, 2);
    }
  }
  DenseMatrix plain = Weights(DType::kBf16, 64, 17, 0.6, 3);
  const PackedLayer tiny = *Pack(Format::kBitmap, w.view());
  const PackedLayer usual = *Pack(Format::kBitmap, plain.view());
  for (const float scale : {1.0f, 0x1p-63f, 0x1p-64f, 0x1p-65f, 0x1p-130f, 0x1p90f, 0x1p120f}) {
    for (const int64_t n : {1, 6}) {
      Strided x(DType::kF32, n, 17, 1);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t c = 0; c < 17; ++c) StoreValue(x.view(), i, c, scale * (1.0f + static_cast<float>(c % 5) / 8));
      }
      for (const auto& [layer, dense] : {std::pair{&tiny, &w}, {&usual, &plain}}) {
        if (layer == &tiny && scale < 1) continue;  // below fp32's range as a whole
        Strided y(DType::kF32, n, 64, 0);
        ASSERT_TRUE(cpu::Matmul(*layer, x.const_view(), {}, y.view(), DefaultThreadPool()).ok());
        const absl::Status same =
            CompareToReference(y.const_view(), ReferenceMatmul(dense->view(), x.const_view()), 1e-6, 0x1p-140);
        EXPECT_TRUE(same.ok()) << same << " scale " << scale << " N=" << n << " tiny " << (layer == &tiny);
      }
    }
  }
}

TEST(MatmulTest, NonfiniteXReachesTheOutput) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const DType dtype : kAllDtypes) {
    const DenseMatrix w = Weights(dtype, 70, 40, 1.0, 13);
    const PackedLayer layer = *Pack(Format::kBitmap, w.view());
    for (const float value : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()}) {
      for (const int64_t n : {1, 4}) {
        Strided x = Tokens(DType::kBf16, n, 40, 14);
        for (int64_t i = 0; i < n; ++i) StoreValue(x.view(), i, 7, value);
        EXPECT_TRUE(ProductIsRight(layer, w.view(), x.const_view(), {}, DType::kF32, DefaultThreadPool()))
            << Name(dtype) << " " << value;
      }
    }
  }
}

TEST(MatmulTest, NamesTheBf16KernelWhereItRan) {
  const DenseMatrix w = Weights(DType::kBf16, 70, 41, 0.5, 15);
  const PackedLayer layer = *Pack(Format::kBitmap, w.view());
  const bool has = cpu::HasBf16Dot();
  for (const int64_t n : {1, 5}) {
    for (const DType x_dtype : {DType::kBf16, DType::kF32}) {
      const Strided x = Tokens(x_dtype, n, 41, 16);
      Strided y(DType::kF32, n, 70, 0);
      cpu::LaunchInfo info;
      ASSERT_TRUE(cpu::Matmul(layer, x.const_view(), {}, y.view(), DefaultThreadPool(), &info).ok());
      EXPECT_EQ(info.kernel.ends_with("_bf16"), has && x_dtype == DType::kBf16) << info.kernel;
      EXPECT_THAT(std::string(info.kernel), ::testing::StartsWith(n == 1 ? "bitmap_spmv_" : "bitmap_spmm_"));
    }
  }
}

TEST(MatmulTest, NonfiniteWeightsReachTheOutput) {
  for (const DType dtype : kAllDtypes) {
    DenseMatrix w = Weights(dtype, 70, 40, 0.5, 13);
    StoreValue(w.mutable_view(), 3, 4, std::numeric_limits<float>::infinity());
    StoreValue(w.mutable_view(), 66, 7, std::numeric_limits<float>::quiet_NaN());
    const PackedLayer layer = *Pack(Format::kBitmap, w.view(), {.allow_nonfinite = true});
    const Strided x = Tokens(DType::kF32, 1, 40, 14);
    EXPECT_TRUE(ProductIsRight(layer, w.view(), x.const_view(), {}, DType::kF32, DefaultThreadPool())) << Name(dtype);
  }
}

TEST(MatmulTest, ReportsWhatRan) {
  const DenseMatrix w = Weights(DType::kF16, 64, 32, 0.5, 15);
  const PackedLayer layer = *Pack(Format::kBitmap, w.view());
  const Strided x = Tokens(DType::kF32, 2, 32, 16);
  Strided y(DType::kF16, 2, 64, 0);
  cpu::LaunchInfo info;
  ASSERT_TRUE(cpu::Matmul(layer, x.const_view(), {}, y.view(), DefaultThreadPool(), &info).ok());
  EXPECT_THAT(std::string(info.kernel), ::testing::StartsWith("bitmap_spmm_"));
  EXPECT_EQ(info.flops, 2 * layer.nnz * 2);
  EXPECT_EQ(info.bytes, static_cast<int64_t>(layer.bytes().total()) + 2 * 32 * 4 + 2 * 64 * 2);
  // A sparse x with every column touches every byte but the tile starts.
  const SparseOperand all = SparseTokens(32, 1.1, 17);
  Strided y1(DType::kF16, 1, 64, 0);
  ASSERT_TRUE(cpu::MatmulSparse(layer, all.view(), {}, y1.view(), DefaultThreadPool(), &info).ok());
  EXPECT_THAT(std::string(info.kernel), ::testing::StartsWith("bitmap_spmspv_"));
  EXPECT_EQ(info.flops, 2 * layer.nnz);
  EXPECT_EQ(info.bytes, static_cast<int64_t>(layer.bytes().total()) - 2 * 8 + 32 * 8 + 64 * 2);
}

TEST(MatmulTest, RefusesOperandsThatDisagree) {
  const DenseMatrix w = Weights(DType::kF16, 8, 16, 0.5, 18);
  const PackedLayer layer = *Pack(Format::kBitmap, w.view());
  const Strided x = Tokens(DType::kF32, 2, 16, 19);
  Strided y(DType::kF32, 2, 8, 0);
  const auto message = [&](const PackedLayer& l, DenseView xv, const Epilogue& e, MutableDenseView yv) {
    return std::string(cpu::Matmul(l, xv, e, yv, DefaultThreadPool()).message());
  };
  DenseView bad_x = x.const_view();
  bad_x.cols = 15;
  EXPECT_THAT(message(layer, bad_x, {}, y.view()), ::testing::HasSubstr("x: 15 columns, expected K = 16"));
  bad_x = x.const_view();
  bad_x.row_stride = 3;
  EXPECT_THAT(message(layer, bad_x, {}, y.view()), ::testing::HasSubstr("row_stride"));
  bad_x = x.const_view();
  bad_x.dtype = static_cast<DType>(9);
  EXPECT_THAT(message(layer, bad_x, {}, y.view()), ::testing::HasSubstr("dtype 9"));
  MutableDenseView bad_y = y.view();
  bad_y.rows = 3;
  EXPECT_THAT(message(layer, x.const_view(), {}, bad_y), ::testing::HasSubstr("y: 3 rows, expected N = 2"));
  bad_y = y.view();
  bad_y.cols = 7;
  EXPECT_THAT(message(layer, x.const_view(), {}, bad_y), ::testing::HasSubstr("y: 7 columns, expected M = 8"));
  const std::vector<float> bias(7);
  EXPECT_THAT(message(layer, x.const_view(), {bias}, y.view()), ::testing::HasSubstr("bias: 7 elements"));
  EXPECT_THAT(message(layer, x.const_view(), {{}, static_cast<Activation>(77)}, y.view()),
              ::testing::HasSubstr("activation: unknown value 77"));
  PackedLayer other = layer;
  other.format = Format::kCsr;
  EXPECT_EQ(cpu::Matmul(other, x.const_view(), {}, y.view(), DefaultThreadPool()).code(),
            absl::StatusCode::kUnimplemented);
}

TEST(MatmulTest, NoTokensDoNothing) {
  const DenseMatrix w = Weights(DType::kF16, 8, 16, 0.5, 20);
  for (const Format format : kFormats) {
    const PackedLayer layer = *Pack(format, w.view());
    EXPECT_TRUE(
        cpu::Matmul(layer, {nullptr, DType::kF32, 0, 16, 16}, {}, {nullptr, DType::kF32, 0, 8, 8}, DefaultThreadPool())
            .ok());
  }
}

}  // namespace
}  // namespace spmmd::testing
