// BITMAP_GPU: lossless for any shape, density, mask and dtype; dense enough; and proof against corrupt bytes.
#include "kernels/format/bitmap_gpu.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <tuple>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/format/bitmap_gpu_layout.h"

namespace spmmd {
namespace {

using ::testing::HasSubstr;

// Column scales exp(sigma * normal) raise or lower a column's chance of a nonzero, as activation-aware pruning does.
DenseMatrix RandomMatrix(DType dtype, int64_t rows, int64_t cols, double density, double sigma, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  DenseMatrix w = *DenseMatrix::Create(dtype, rows, cols);
  std::vector<double> scale(static_cast<size_t>(cols));
  for (double& s : scale) s = std::exp(sigma * static_cast<double>(normal(rng)));
  std::uniform_real_distribution<double> uniform;
  for (int64_t r = 0; r < rows; ++r) {
    auto* row = reinterpret_cast<uint16_t*>(w.mutable_view().row(r));
    for (int64_t c = 0; c < cols; ++c) {
      if (uniform(rng) >= density * scale[static_cast<size_t>(c)]) continue;
      const float v = normal(rng) + 0.001f;
      row[c] = dtype == DType::kF16 ? FloatToF16(v) : FloatToBf16(v);
    }
  }
  return w;
}

void ExpectSameBits(const DenseMatrix& a, const DenseMatrix& b) {
  ASSERT_EQ(a.bytes(), b.bytes());
  EXPECT_EQ(std::memcmp(a.view().data, b.view().data, a.bytes()), 0);
}

void ExpectRoundTrip(const DenseMatrix& w, int chunk_cols) {
  auto packed = bitmap_gpu::Pack(w.view(), {}, chunk_cols);
  ASSERT_TRUE(packed.ok()) << packed.status();
  ASSERT_TRUE(Validate(*packed).ok()) << Validate(*packed);
  EXPECT_EQ(packed->nnz, ScanDense(w.view()).nnz);
  auto dense = Unpack(*packed);
  ASSERT_TRUE(dense.ok()) << dense.status();
  ExpectSameBits(w, *dense);
  const ByteCounts bytes = packed->bytes();
  EXPECT_EQ(bytes.total(), packed->sections[0].data.size() + packed->sections[1].data.size());
}

class BitmapGpuRoundTrip : public ::testing::TestWithParam<std::tuple<int64_t, int64_t>> {};

TEST_P(BitmapGpuRoundTrip, BitsComeBack) {
  const auto [rows, cols] = GetParam();
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    for (const double density : {0.0, 0.03, 0.5, 1.0}) {
      for (const double sigma : {0.0, 1.0}) {
        const auto seed = static_cast<uint32_t>(rows * 7919 + cols);
        const DenseMatrix w = RandomMatrix(dtype, rows, cols, density, sigma, seed);
        SCOPED_TRACE(::testing::Message() << Name(dtype) << " density " << density << " sigma " << sigma);
        ExpectRoundTrip(w, 128);
        ExpectRoundTrip(w, 256);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, BitmapGpuRoundTrip,
                         ::testing::Combine(::testing::Values<int64_t>(1, 15, 16, 17, 100),
                                            ::testing::Values<int64_t>(1, 127, 128, 257, 600)));

TEST(BitmapGpu, NegativeZeroIsAZero) {
  DenseMatrix w = *DenseMatrix::Create(DType::kF16, 3, 40);
  auto* bits = reinterpret_cast<uint16_t*>(w.mutable_view().data);
  for (int i = 0; i < 120; ++i) bits[i] = 0x8000;
  auto packed = Pack(Format::kBitmapGpu, w.view());
  ASSERT_TRUE(packed.ok());
  EXPECT_EQ(packed->nnz, 0);
}

TEST(BitmapGpu, OneFullRowAmongEmptyOnesCostsNoMoreThanADenseChunk) {
  DenseMatrix w = *DenseMatrix::Create(DType::kBf16, 16, 256);
  auto* bits = reinterpret_cast<uint16_t*>(w.mutable_view().row(5));
  for (int c = 0; c < 256; ++c) bits[c] = static_cast<uint16_t>(0x3f80 + c);
  auto packed = bitmap_gpu::Pack(w.view(), {}, 256);
  ASSERT_TRUE(packed.ok());
  EXPECT_LE(packed->params[bitmap_gpu::kParamMaxChunkBytes], bitmap_gpu::ChunkBytes(256, 64));
  auto dense = Unpack(*packed);
  ASSERT_TRUE(dense.ok());
  ExpectSameBits(w, *dense);
}

// The figures that the design counts on: bytes an element of a uniform mask.
TEST(BitmapGpu, BorrowedTailsKeepThePaddingLow) {
  for (const auto& [chunk_cols, density, limit] :
       {std::tuple{256, 0.5, 1.24}, {128, 0.5, 1.31}, {256, 0.3, 0.83}, {128, 0.3, 0.91}}) {
    const DenseMatrix w = RandomMatrix(DType::kF16, 256, 2048, density, 0.0, 5);
    auto packed = bitmap_gpu::Pack(w.view(), {}, chunk_cols);
    ASSERT_TRUE(packed.ok());
    const double per_element = static_cast<double>(packed->bytes().total()) / (256.0 * 2048.0);
    EXPECT_LT(per_element, limit) << chunk_cols << " columns, density " << density;
    EXPECT_GT(per_element, 2 * density + 0.125);
  }
}

TEST(BitmapGpu, RefusesWhatItCannotStore) {
  DenseMatrix f32 = *DenseMatrix::Create(DType::kF32, 4, 4);
  EXPECT_EQ(Pack(Format::kBitmapGpu, f32.view()).status().code(), absl::StatusCode::kInvalidArgument);
  DenseMatrix nan = *DenseMatrix::Create(DType::kF16, 4, 4);
  reinterpret_cast<uint16_t*>(nan.mutable_view().data)[6] = 0x7e00;
  EXPECT_EQ(Pack(Format::kBitmapGpu, nan.view()).status().code(), absl::StatusCode::kInvalidArgument);
  auto allowed = Pack(Format::kBitmapGpu, nan.view(), {.allow_nonfinite = true});
  ASSERT_TRUE(allowed.ok());
  ExpectSameBits(nan, *Unpack(*allowed));
  EXPECT_THAT(std::string(bitmap_gpu::Pack(nan.view(), {.allow_nonfinite = true}, 64).status().message()),
              HasSubstr("chunk_cols"));
}

PackedLayer SmallLayer() {
  const DenseMatrix w = RandomMatrix(DType::kF16, 40, 300, 0.5, 0.5, 11);
  return *bitmap_gpu::Pack(w.view(), {}, 128);
}

void ExpectCorrupt(const PackedLayer& layer) { EXPECT_EQ(Validate(layer).code(), absl::StatusCode::kDataLoss); }

TEST(BitmapGpu, ValidateFindsStructuralDamage) {
  {
    PackedLayer layer = SmallLayer();
    layer.layout_version = 2;
    ExpectCorrupt(layer);
  }
  {
    PackedLayer layer = SmallLayer();
    layer.params[bitmap_gpu::kParamChunkCols] = 192;
    ExpectCorrupt(layer);
  }
  {
    PackedLayer layer = SmallLayer();
    layer.params[bitmap_gpu::kParamMaxChunkBytes] -= 16;
    ExpectCorrupt(layer);
  }
  {
    PackedLayer layer = SmallLayer();
    layer.nnz += 1;
    ExpectCorrupt(layer);
  }
  {
    PackedLayer layer = SmallLayer();
    layer.sections.pop_back();
    ExpectCorrupt(layer);
  }
  {
    PackedLayer layer = SmallLayer();
    layer.sections[1].data.MutableAs<uint32_t>()[2] = 0;
    ExpectCorrupt(layer);
  }
}

// Any damage either is found or leaves a layer whose decoding stays inside (Unpack of an accepted layer runs under
// AddressSanitizer in the sanitizer build).
TEST(BitmapGpu, RandomDamageIsFoundOrHarmless) {
  std::mt19937 rng(3);
  int found = 0;
  for (int round = 0; round < 300; ++round) {
    PackedLayer layer = SmallLayer();
    Buffer& data = layer.sections[round % 4 == 0 ? 1 : 0].data;
    for (int flips = 0; flips < 3; ++flips) {
      data.mutable_data()[rng() % data.size()] ^= static_cast<std::byte>(1u << (rng() % 8));
    }
    if (!Validate(layer).ok()) {
      ++found;
      continue;
    }
    EXPECT_TRUE(Unpack(layer).ok());
  }
  EXPECT_GT(found, 100);
}

TEST(BitmapGpu, JumpCodesRoundTrip) {
  for (const int cols : {128, 256}) {
    for (int step = bitmap_gpu::Steps(cols) / 2; step <= bitmap_gpu::LastJumpStep(cols); ++step) {
      const uint32_t code = bitmap_gpu::EncodeJump({step, 63, 64}, cols);
      const bitmap_gpu::Jump jump = bitmap_gpu::DecodeJump(code << 16, 1, cols);
      EXPECT_EQ(jump.step, step);
      EXPECT_EQ(jump.column, 63);
      EXPECT_EQ(jump.row, 64);
    }
    EXPECT_EQ(bitmap_gpu::DecodeJump(bitmap_gpu::EncodeJump({}, cols), 0, cols).step, -1);
  }
}

}  // namespace
}  // namespace spmmd
