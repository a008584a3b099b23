#include "kernels/format/three_layer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/format/prune.h"
#include "tests/kernels/format/matrices.h"

namespace spmmd {
namespace {

using testing::Mask;
using three_layer::Stats;

double Share(int64_t part, int64_t whole) { return static_cast<double>(part) / static_cast<double>(whole); }

TEST(ThreeLayerTest, FragmentOrderIsAPermutationOfTheTile) {
  std::set<int64_t> groups;
  std::set<std::pair<int64_t, int>> nibbles;
  for (int64_t row = 0; row < three_layer::kTileRows; ++row) {
    for (int64_t quad = 0; quad < three_layer::kTileCols / 4; ++quad) {
      groups.insert(three_layer::GroupOf(row, quad));
      const auto [word, shift] = three_layer::MetadataOf(row, quad);
      nibbles.insert({word, shift});
      EXPECT_TRUE(word >= 0 && word < three_layer::kTileMetadataWords && shift >= 0 && shift < 32 && shift % 4 == 0);
    }
  }
  EXPECT_EQ(static_cast<int64_t>(groups.size()), three_layer::kTileGroups);
  EXPECT_EQ(*groups.rbegin(), three_layer::kTileGroups - 1);
  EXPECT_EQ(static_cast<int64_t>(nibbles.size()), three_layer::kTileGroups);
}

TEST(ThreeLayerTest, FragmentOrderOnKnownElements) {
  // PTX, mma.m16n8k32 .f16 A fragment: lane 4 g + t holds columns 4 t ... of row g in register 0, row g + 8 in register
  // 1, columns 16 + 4 t ... in registers 2 and 3.
  EXPECT_EQ(three_layer::GroupOf(0, 0), 0);
  EXPECT_EQ(three_layer::GroupOf(8, 0), 1);
  EXPECT_EQ(three_layer::GroupOf(0, 4), 2);
  EXPECT_EQ(three_layer::GroupOf(8, 4), 3);
  EXPECT_EQ(three_layer::GroupOf(0, 1), 4);            // lane 1
  EXPECT_EQ(three_layer::GroupOf(1, 0), 4 * 4);        // lane 4
  EXPECT_EQ(three_layer::GroupOf(0, 8), 32 * 4);       // step 1
  EXPECT_EQ(three_layer::GroupOf(16, 0), 4 * 32 * 4);  // strip 1
  // Metadata: lane 4 g + h, row g in the lower half-word; steps 1 and 3 in lanes 4 g + 2 + h.
  EXPECT_EQ(three_layer::MetadataOf(0, 0).word, 0);
  EXPECT_EQ(three_layer::MetadataOf(8, 3).word, 0);
  EXPECT_EQ(three_layer::MetadataOf(8, 3).shift, 28);
  EXPECT_EQ(three_layer::MetadataOf(0, 4).word, 2);   // lane 1, word 0
  EXPECT_EQ(three_layer::MetadataOf(0, 8).word, 4);   // step 1: lane 2
  EXPECT_EQ(three_layer::MetadataOf(0, 16).word, 1);  // step 2: lane 0, word 1
  EXPECT_EQ(three_layer::MetadataOf(1, 0).word, 8);   // lane 4
}

TEST(ThreeLayerTest, CodeNumbersGoBankByBank) {
  for (int64_t slot = 0; slot < three_layer::kTileSlots; ++slot) {
    const int64_t number = three_layer::CodeNumber(slot);
    EXPECT_EQ(three_layer::CodeNumber(number), slot);
    EXPECT_EQ(number / 128, slot / 2 % 32);  // the word's bank
  }
}

TEST(ThreeLayerTest, ComplementFormulaOfTheHeader) {
  for (const uint32_t p : {0u, 1u, 2u, 3u}) {
    for (uint32_t q = p + 1; q < 4; ++q) {
      const uint32_t rest = 0xf & ~(1u << p | 1u << q);
      const uint32_t want = static_cast<uint32_t>(std::countr_zero(rest) | (31 - std::countl_zero(rest)) << 2);
      for (int nibble = 0; nibble < 8; ++nibble) {
        const uint32_t x = ((p | q << 2) << (4 * nibble)) | (0x44444444u & ~(15u << (4 * nibble)));
        const uint32_t e = (x >> 3 ^ x >> 1) & 0x11111111u;
        const uint32_t complement = x ^ (e * 5 | (e ^ 0x11111111u) * 10);
        EXPECT_EQ(complement >> (4 * nibble) & 15u, want);
      }
    }
  }
}

// The paper's shares: 17.7 % slot-filled, 2.13 % dummy points, under 1 % residual.
TEST(ThreeLayerTest, SharesOnIndependentHalfMasks) {
  const DenseMatrix w = testing::MakeMatrix(DType::kF16, 1024, 2048, 0.5);
  const PackedLayer layer = *Pack(Format::kThreeLayer, w.view());
  const Stats stats = three_layer::ComputeStats(layer);
  EXPECT_EQ(stats.sparse_tc + stats.slot_filled + stats.residual, stats.nnz);
  EXPECT_NEAR(Share(stats.slot_filled, stats.nnz), 0.183, 0.004);
  EXPECT_NEAR(Share(stats.dummy_codes, stats.nnz), 0.021, 0.004);
  EXPECT_LT(Share(stats.residual, stats.nnz), 0.01);
  EXPECT_GT(stats.residual, 0);
  const double bytes = static_cast<double>(layer.bytes().total()) / static_cast<double>(layer.dense_bytes());
  EXPECT_GT(bytes, 0.61);
  EXPECT_LT(bytes, 0.635);
  EXPECT_EQ(stats.values_bytes + stats.metadata_bytes + stats.code_bytes + stats.residual_bytes, layer.bytes().total());
}

TEST(ThreeLayerTest, TwoFourMasksNeedTheSparseTcLayerAlone) {
  DenseMatrix w = testing::MakeMatrix(DType::kBf16, 200, 500, 1.0);
  ASSERT_TRUE(PruneNm(w.mutable_view(), 2, 4).ok());
  const PackedLayer layer = *Pack(Format::kThreeLayer, w.view());
  const Stats stats = three_layer::ComputeStats(layer);
  EXPECT_EQ(stats.slot_filled, 0);
  EXPECT_EQ(stats.residual, 0);
  EXPECT_EQ(stats.tiles_without_filling, stats.tiles);
  EXPECT_EQ(layer.FindSection(three_layer::kCodes)->data.size(), 0u);
}

TEST(ThreeLayerTest, DenseTilesGoHalfToTheResidual) {
  const DenseMatrix w = testing::MakeMatrix(DType::kF16, 128, 256, 1.0);
  const Stats stats = three_layer::ComputeStats(*Pack(Format::kThreeLayer, w.view()));
  EXPECT_EQ(stats.sparse_tc, stats.nnz / 2);
  EXPECT_EQ(stats.slot_filled, 0);
  EXPECT_EQ(stats.residual, stats.nnz / 2);
}

TEST(ThreeLayerTest, SkewedMasksFillSlotsToo) {
  for (const Mask mask : {Mask::kColumnSkew, Mask::kRowSkew, Mask::kBands}) {
    const DenseMatrix w = testing::MakeMatrix(DType::kF16, 640, 1280, 0.5, mask);
    const Stats stats = three_layer::ComputeStats(*Pack(Format::kThreeLayer, w.view()));
    EXPECT_GT(Share(stats.slot_filled, stats.nnz), 0.1) << MaskName(mask);
    EXPECT_LT(Share(stats.residual, stats.nnz), 0.1) << MaskName(mask);
  }
}

// What the layout promises a kernel: 64 threads of equal length, positions ascending over all of them.
TEST(ThreeLayerTest, LongGapsTakeDummyCodes) {
  // Two full groups at the far ends of a tile whose other groups are empty: W_r slots 0, 1 and 4094, 4095, whose code
  // numbers are 0, 64 and 4031, 4095.
  DenseMatrix w = *DenseMatrix::Create(DType::kF16, 64, 128);
  for (int c = 0; c < 4; ++c) {
    const auto value = static_cast<uint16_t>(0x3c00 + c);
    std::memcpy(w.mutable_view().row(0) + 2 * c, &value, 2);
    std::memcpy(w.mutable_view().row(63) + 2 * (124 + c), &value, 2);
  }
  const PackedLayer layer = *Pack(Format::kThreeLayer, w.view());
  const auto codes = layer.FindSection(three_layer::kCodes)->data.As<uint32_t>();
  // Four moves start four threads: no codes at all.
  ASSERT_EQ(codes.size(), 64u);
  // Empty slots of W_t: all but 0, 1, 4094 and 4095. Numbers 1 to 4 are the slots 64, 128, 192 and 256.
  EXPECT_EQ(codes[0], 1u | 0u << 16);
  EXPECT_EQ(codes[1], 2u | 64u << 16);
  EXPECT_EQ(codes[2], 3u | 4031u << 16);
  EXPECT_EQ(codes[3], 4u | 4095u << 16);
  EXPECT_EQ(codes[4], three_layer::kNoMove);
  EXPECT_TRUE(testing::SameNonzeros(w.view(), Unpack(layer)->view()));
}

TEST(ThreeLayerTest, ValidateKnowsTheRulesThatKernelsRelyOn) {
  const DenseMatrix w = testing::MakeMatrix(DType::kF16, 70, 130, 0.5);
  const PackedLayer good = *Pack(Format::kThreeLayer, w.view());
  const auto spoil = [&](uint32_t id, auto change) {
    PackedLayer bad = good;
    for (Section& section : bad.sections) {
      if (section.id != id) continue;
      Buffer copy = *Buffer::Allocate(section.data.size());
      std::memcpy(copy.mutable_data(), section.data.data(), section.data.size());
      change(copy);
      section.data = std::move(copy);
    }
    return Validate(bad);
  };
  EXPECT_TRUE(spoil(three_layer::kMetadata, [](Buffer&) {}).ok());
  // Equal indices in a pair: not a 2:4 pattern.
  EXPECT_TRUE(absl::IsDataLoss(spoil(three_layer::kMetadata, [](Buffer& b) { b.MutableAs<uint32_t>()[0] &= ~15u; })));
  // First move out of the tile.
  EXPECT_TRUE(absl::IsDataLoss(spoil(three_layer::kCodes, [](Buffer& b) { b.MutableAs<uint16_t>()[1] = 4096; })));
  // A thread that starts where the one before it did.
  EXPECT_TRUE(absl::IsDataLoss(
      spoil(three_layer::kCodes, [](Buffer& b) { b.MutableAs<uint32_t>()[1] = b.MutableAs<uint32_t>()[0]; })));
  // A nonzero beyond column K: the first group of tile 1 whose columns are beyond 130.
  EXPECT_TRUE(absl::IsDataLoss(spoil(three_layer::kValues, [](Buffer& b) {
    b.MutableAs<uint16_t>()[static_cast<size_t>(three_layer::kTileSlots + 2 * three_layer::GroupOf(0, 5))] = 0x3c00;
  })));
}

}  // namespace
}  // namespace spmmd
