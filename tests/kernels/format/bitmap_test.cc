// BITMAP: its layout byte for byte, its size, and what damage Validate names. Round trips over shapes, densities and
// dtypes are in format_property_test.cc, execution of damaged layers in ../cpu/corrupt_layer_test.cc.
#include "kernels/format/bitmap.h"

#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/thread_pool.h"
#include "tests/kernels/format/matrices.h"

namespace spmmd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(BitmapTest, LayoutOfASmallMatrix) {
  // 66 x 2: two strips. Column 0 has rows 0, 63, 64, 65; column 1 has row 1 and a -0.0, which is a zero.
  DenseMatrix w = *DenseMatrix::Create(DType::kF32, 66, 2);
  auto* at = reinterpret_cast<float*>(w.mutable_view().data);
  at[0 * 2 + 0] = 1;
  at[63 * 2 + 0] = 2;
  at[64 * 2 + 0] = 3;
  at[65 * 2 + 0] = 4;
  at[1 * 2 + 1] = 5;
  at[2 * 2 + 1] = -0.0f;
  const PackedLayer layer = *Pack(Format::kBitmap, w.view());
  EXPECT_EQ(layer.nnz, 5);
  EXPECT_THAT(layer.FindSection(bitmap::kValues)->data.As<float>(), ElementsAre(1, 2, 3, 4, 5));
  EXPECT_THAT(layer.FindSection(bitmap::kMasks)->data.As<uint64_t>(),
              ElementsAre(uint64_t{1} | uint64_t{1} << 63, 3u, 2u, 0u));
  EXPECT_THAT(layer.FindSection(bitmap::kTileStarts)->data.As<uint64_t>(), ElementsAre(0u, 5u));
  EXPECT_THAT(layer.FindSection(bitmap::kColumnStarts)->data.As<uint32_t>(), ElementsAre(0u, 4u));
  EXPECT_EQ(layer.params[0], 4096);
  EXPECT_EQ(layer.params[1], 256);
  // 2 columns x 62 mask bits belong to no row.
  EXPECT_EQ(layer.bytes().padding, 2u * 62 / 8);
}

TEST(BitmapTest, TilesFollowOneAnother) {
  const DenseMatrix w = MakeMatrix(DType::kF16, 4096 + 100, 300, 0.5);
  const PackedLayer layer = *Pack(Format::kBitmap, w.view());
  const bitmap::View view = bitmap::MakeView(layer);
  EXPECT_EQ(view.blocks, 2);
  EXPECT_EQ(view.column_tiles, 2);
  EXPECT_EQ(view.strips(0), 64);
  EXPECT_EQ(view.strips(1), 2);
  uint64_t next = 0;
  for (int64_t block = 0; block < 2; ++block) {
    for (int64_t c = 0; c < 300; ++c) {
      ASSERT_EQ(view.piece_start(block, c), next) << block << " " << c;
      for (int64_t s = 0; s < view.strips(block); ++s) {
        const uint64_t mask = view.column_masks(block, c)[s];
        for (int64_t i = 0; i < 64; ++i) {
          const int64_t row = block * 4096 + s * 64 + i;
          const uint32_t bits = row < w.rows() ? BitsAt(w.view(), row, c) : 0;
          ASSERT_EQ((mask >> i) & 1, (bits & 0x7fffu) != 0 ? 1u : 0u);
          if ((mask >> i) & 1) {
            uint16_t value;
            std::memcpy(&value, view.values + 2 * next++, 2);
            ASSERT_EQ(value, bits);
          }
        }
      }
    }
  }
  EXPECT_EQ(next, static_cast<uint64_t>(layer.nnz));
}

TEST(BitmapTest, BytesAreTheBoundAndLittleMore) {
  for (const double density : {0.3, 0.5, 0.7}) {
    const DenseMatrix w = MakeMatrix(DType::kBf16, 4096, 512, density);
    const PackedLayer layer = *Pack(Format::kBitmap, w.view());
    const ByteCounts bytes = layer.bytes();
    EXPECT_EQ(bytes.values, static_cast<size_t>(layer.nnz) * 2);
    EXPECT_EQ(bytes.padding, 0u);
    EXPECT_EQ(bytes.total(), bitmap::PackedBytes(DType::kBf16, 4096, 512, layer.nnz));
    const double bound = static_cast<double>(bytes.values) + 4096 * 512 / 8.0;
    EXPECT_LT(static_cast<double>(bytes.total()), 1.002 * bound);
  }
}

TEST(BitmapTest, PackedBytesIsExactForAnyShape) {
  for (const auto& [m, k] : {std::pair<int64_t, int64_t>{1, 1}, {64, 256}, {65, 257}, {5000, 3}, {3, 5000}}) {
    for (const DType dtype : {DType::kF16, DType::kF32}) {
      const PackedLayer layer = *Pack(Format::kBitmap, MakeMatrix(dtype, m, k, 0.4).view());
      EXPECT_EQ(layer.bytes().total(), bitmap::PackedBytes(dtype, m, k, layer.nnz)) << m << "x" << k;
    }
  }
}

TEST(BitmapTest, SaysWhetherAValueIsTiny) {
  for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    for (const int64_t column : {0, 40}) {  // in whole vectors and behind them
      DenseMatrix w = *DenseMatrix::Create(dtype, 3, 41);
      auto* at = reinterpret_cast<uint16_t*>(w.mutable_view().data);
      const auto no_tiny = [&](uint16_t bits) {
        if (dtype == DType::kF32) {
          reinterpret_cast<float*>(at)[41 + column] = Bf16ToFloat(bits);
        } else {
          at[41 + column] = bits;
        }
        const PackedLayer layer = *Pack(Format::kBitmap, w.view());
        EXPECT_TRUE(Validate(layer).ok());
        return layer.params[bitmap::kNoTinyParam];
      };
      const int64_t yes = dtype == DType::kBf16 ? 1 : 0;
      EXPECT_EQ(no_tiny(0), yes);
      EXPECT_EQ(no_tiny(0x8000), yes);
      EXPECT_EQ(no_tiny(0x2780), yes);  // 2^-48
      EXPECT_EQ(no_tiny(0x277f), 0);    // the value before it
      EXPECT_EQ(no_tiny(0xa77f), 0);
      EXPECT_EQ(no_tiny(0x8001), 0);
    }
  }
}

TEST(BitmapTest, ValidateKnowsATinyValue) {
  DenseMatrix w = *DenseMatrix::Create(DType::kBf16, 1, 2);
  const uint16_t values[] = {0x3f80, 0x0001};
  std::memcpy(w.mutable_view().data, values, sizeof(values));
  PackedLayer layer = *Pack(Format::kBitmap, w.view());
  layer.params[bitmap::kNoTinyParam] = 1;
  EXPECT_THAT(std::string(Validate(layer).message()), HasSubstr("section values: 1 values below 2^-48"));
  layer.params[bitmap::kNoTinyParam] = 2;
  EXPECT_THAT(std::string(Validate(layer).message()), HasSubstr("no_tiny is 2"));
  PackedLayer half = *Pack(Format::kBitmap, MakeMatrix(DType::kF16, 4, 4, 0.5).view());
  half.params[bitmap::kNoTinyParam] = 1;
  EXPECT_THAT(std::string(Validate(half).message()), HasSubstr("no_tiny is 1"));
}

TEST(BitmapTest, ValidateNamesTheSection) {
  const PackedLayer good = *Pack(Format::kBitmap, MakeMatrix(DType::kF16, 100, 300, 0.5).view());
  const auto message = [&](uint32_t id, auto&& damage) {
    PackedLayer bad = good;
    for (Section& section : bad.sections) {
      if (section.id != id) continue;
      Buffer copy = *Buffer::Allocate(section.data.size());
      std::memcpy(copy.mutable_data(), section.data.data(), copy.size());
      damage(copy);
      section.data = std::move(copy);
    }
    const absl::Status status = Validate(bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    return std::string(status.message());
  };
  EXPECT_THAT(message(bitmap::kMasks, [](Buffer& b) { b.MutableAs<uint64_t>()[4] ^= 1; }), HasSubstr("masks"));
  // A bit of a row that does not exist, paid for by one that does.
  EXPECT_THAT(message(bitmap::kMasks,
                      [](Buffer& b) {
                        uint64_t& last = b.MutableAs<uint64_t>()[1];  // rows 64..127 of column 0, M is 100
                        last = (last & (last - 1)) | uint64_t{1} << 40;
                      }),
              HasSubstr("masks"));
  EXPECT_THAT(message(bitmap::kTileStarts, [](Buffer& b) { b.MutableAs<uint64_t>()[0] = 1; }),
              HasSubstr("tile_starts"));
  EXPECT_THAT(message(bitmap::kTileStarts, [](Buffer& b) { b.MutableAs<uint64_t>()[1] = ~uint64_t{0} - 5; }),
              HasSubstr("tile"));
  EXPECT_THAT(message(bitmap::kColumnStarts, [](Buffer& b) { b.MutableAs<uint32_t>()[7] += 1; }), HasSubstr("tile 0"));
  EXPECT_THAT(message(bitmap::kColumnStarts, [](Buffer& b) { b.MutableAs<uint32_t>()[299] = 0xffffffffu; }),
              HasSubstr("tile 1"));
  EXPECT_THAT(message(bitmap::kValues, [](Buffer& b) { b.MutableAs<uint16_t>()[9] = 0x7e00; }), HasSubstr("values"));
  EXPECT_THAT(message(bitmap::kValues, [](Buffer& b) { b = *Buffer::Allocate(b.size() - 2); }), HasSubstr("values"));
}

}  // namespace
}  // namespace spmmd::testing
