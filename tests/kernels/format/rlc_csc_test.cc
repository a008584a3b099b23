#include "kernels/format/rlc_csc.h"

#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/format/matrices.h"

namespace spmmd {
namespace {

using ::testing::ElementsAre;

std::vector<uint16_t> Shorts(const PackedLayer& layer, uint32_t id) {
  const auto span = layer.FindSection(id)->data.As<uint16_t>();
  return {span.begin(), span.end()};
}

// Run length of place p in 4-bit units.
std::vector<int> Runs4(const PackedLayer& layer) {
  std::vector<int> runs;
  for (const uint8_t byte : layer.FindSection(rlc_csc::kRuns)->data.As<uint8_t>()) {
    runs.push_back(byte & 15);
    runs.push_back(byte >> 4);
  }
  return runs;
}

DenseMatrix OneColumn(const std::vector<uint16_t>& column) {
  DenseMatrix w = *DenseMatrix::Create(DType::kF16, static_cast<int64_t>(column.size()), 1);
  std::memcpy(w.mutable_view().data, column.data(), column.size() * 2);
  return w;
}

TEST(RlcCscTest, TheExampleOfThePaper) {
  // [0,0,4,0,0,0,0,2,8] with 2-bit runs: a padding entry bridges four rows.
  const DenseMatrix w = OneColumn({0, 0, 4, 0, 0, 0, 0, 2, 8});
  const PackedLayer layer = *rlc_csc::Pack(w.view(), {}, 2);
  EXPECT_THAT(Shorts(layer, rlc_csc::kValues), ElementsAre(4, 0, 2, 8, 0, 0, 0, 0));
  const auto runs = layer.FindSection(rlc_csc::kRuns)->data.As<uint8_t>();
  EXPECT_THAT(std::vector<int>(runs.begin(), runs.end()), ElementsAre(2 | 3 << 2 | 0 << 4 | 0 << 6, 0));
  EXPECT_EQ(rlc_csc::ComputeStats(layer).padding_entries, 1);
  EXPECT_EQ(rlc_csc::ComputeStats(layer).unused_places, 4);
  EXPECT_TRUE(testing::SameNonzeros(w.view(), Unpack(layer)->view()));
}

TEST(RlcCscTest, EntriesAreDealtOverLanesAndSharedUnitsAreSplit) {
  // Column 0 has 3 entries (places 0-2), column 1 has 20 (places 3-22): lane 0's unit starts with column 0's.
  DenseMatrix w = *DenseMatrix::Create(DType::kF16, 20, 2);
  auto* data = reinterpret_cast<uint16_t*>(w.mutable_view().data);
  for (uint16_t r = 0; r < 3; ++r) data[2 * r] = static_cast<uint16_t>(100 + r);
  for (uint16_t r = 0; r < 20; ++r) data[2 * r + 1] = static_cast<uint16_t>(1 + r);
  const PackedLayer layer = *Pack(Format::kRlcCsc, w.view());
  // Column 1 covers units 0-2. Slots 0-2 exist in units 1 and 2, slots 3-6 in all, slot 7 in units 0 and 1.
  EXPECT_THAT(Shorts(layer, rlc_csc::kValues), ElementsAre(100, 101, 102, 7, 10, 13, 16, 19,  //
                                                           1, 3, 5, 8, 11, 14, 17, 20,        //
                                                           2, 4, 6, 9, 12, 15, 18, 0));
  for (const int run : Runs4(layer)) EXPECT_EQ(run, 0);
  const std::vector<uint16_t> offsets = Shorts(layer, rlc_csc::kColumnOffsets);
  EXPECT_EQ(offsets[0], 0);
  EXPECT_EQ(offsets[1], 3);
  EXPECT_EQ(offsets[2], 23);
  EXPECT_EQ(offsets[64], 23);
}

TEST(RlcCscTest, EveryRunLengthWidth) {
  for (int bits = rlc_csc::kMinRunBits; bits <= rlc_csc::kMaxRunBits; ++bits) {
    for (const double density : {0.01, 0.1, 0.5, 1.0}) {
      for (const auto& [rows, cols] : {std::pair{700, 150}, {256, 64}, {33, 200}}) {
        const DenseMatrix w = testing::MakeMatrix(DType::kBf16, rows, cols, density);
        const auto layer = rlc_csc::Pack(w.view(), {}, bits);
        ASSERT_TRUE(layer.ok()) << layer.status();
        ASSERT_TRUE(Validate(*layer).ok()) << Validate(*layer);
        EXPECT_TRUE(testing::SameNonzeros(w.view(), Unpack(*layer)->view())) << bits << " bits, density " << density;
      }
    }
  }
  const DenseMatrix w = testing::MakeMatrix(DType::kF16, 4, 4, 0.5);
  EXPECT_TRUE(absl::IsInvalidArgument(rlc_csc::Pack(w.view(), {}, 1).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(rlc_csc::Pack(w.view(), {}, 9).status()));
}

TEST(RlcCscTest, SizeAtHalfSparsityIsThePapers) {
  const DenseMatrix w = testing::MakeMatrix(DType::kF16, 2048, 1024, 0.5);
  const PackedLayer layer = *Pack(Format::kRlcCsc, w.view());
  const double share = static_cast<double>(layer.bytes().total()) / static_cast<double>(layer.dense_bytes());
  EXPECT_GT(share, 0.62);
  EXPECT_LT(share, 0.635);
}

}  // namespace
}  // namespace spmmd
