// What every format must hold, whatever the mask: bit-exact Unpack, exact byte accounting, Validate that accepts what
// Pack makes and survives what it does not. Formats are listed once, below.
#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/format/csr.h"
#include "kernels/format/packed_layer.h"
#include "kernels/format/rlc_csc.h"
#include "tests/kernels/format/matrices.h"

namespace spmmd {
namespace {

using ::testing::HasSubstr;
using testing::Mask;

constexpr Format kFormats[] = {Format::kCsr, Format::kCoo, Format::kRlcCsc, Format::kThreeLayer};

bool Takes(Format format, DType dtype) {
  return dtype != DType::kF32 || format == Format::kCsr || format == Format::kCoo || format == Format::kDense;
}

class FormatTest : public ::testing::TestWithParam<Format> {};

void ExpectRoundTrip(const DenseMatrix& w, const absl::StatusOr<PackedLayer>& layer) {
  ASSERT_TRUE(layer.ok()) << layer.status();
  ASSERT_TRUE(Validate(*layer).ok()) << Validate(*layer);
  EXPECT_EQ(layer->nnz, ScanDense(w.view()).nnz);
  size_t section_bytes = 0;
  for (const Section& section : layer->sections) section_bytes += section.data.size();
  EXPECT_EQ(layer->bytes().total(), section_bytes);
  // Values kept verbatim: exactly the nonzeros' bytes count as values.
  EXPECT_EQ(layer->bytes().values, static_cast<size_t>(layer->nnz) * SizeOf(layer->dtype)) << Name(layer->format);
  const auto back = Unpack(*layer);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_TRUE(testing::SameNonzeros(w.view(), back->view()));
}

TEST_P(FormatTest, RoundTripsOddShapesAtEveryDensity) {
  const std::pair<int, int> shapes[] = {{1, 1},    {1, 2},    {2, 1},    {1, 300},   {300, 1},
                                        {7, 5},    {63, 127}, {64, 128}, {65, 129},  {128, 64},
                                        {255, 65}, {256, 64}, {257, 63}, {130, 300}, {300, 257}};
  for (const auto& [rows, cols] : shapes) {
    for (const double density : {0.0, 0.02, 0.3, 0.5, 0.7, 1.0}) {
      const DenseMatrix w = testing::MakeMatrix(DType::kF16, rows, cols, density);
      SCOPED_TRACE(::testing::Message() << rows << "x" << cols << " density " << density);
      ExpectRoundTrip(w, Pack(GetParam(), w.view()));
    }
  }
}

TEST_P(FormatTest, RoundTripsRandomShapes) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 60; ++i) {
    const auto rows = static_cast<int64_t>(random() % 300 + 1);
    const auto cols = static_cast<int64_t>(random() % 300 + 1);
    const double density = static_cast<double>(random() % 101) / 100.0;
    const Mask mask = testing::kAllMasks[random() % std::size(testing::kAllMasks)];
    const DenseMatrix w = testing::MakeMatrix(DType::kBf16, rows, cols, density, mask, random());
    SCOPED_TRACE(::testing::Message() << rows << "x" << cols << " density " << density << " " << MaskName(mask));
    ExpectRoundTrip(w, Pack(GetParam(), w.view()));
  }
}

TEST_P(FormatTest, RoundTripsEveryMaskAndDtype) {
  for (const DType dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
    if (!Takes(GetParam(), dtype)) continue;
    for (const Mask mask : testing::kAllMasks) {
      const DenseMatrix w = testing::MakeMatrix(dtype, 321, 531, 0.5, mask);
      SCOPED_TRACE(::testing::Message() << Name(dtype) << " " << MaskName(mask));
      ExpectRoundTrip(w, Pack(GetParam(), w.view()));
    }
  }
}

TEST_P(FormatTest, StridedAndUnalignedInput) {
  const DenseMatrix w = testing::MakeMatrix(DType::kF16, 140, 300, 0.5);
  DenseView part = w.view();
  part.data += 3 * sizeof(uint16_t);  // element alignment only
  part.cols = 257;
  const auto layer = Pack(GetParam(), part);
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_TRUE(testing::SameNonzeros(part, Unpack(*layer)->view()));
}

TEST_P(FormatTest, NonfiniteIsRefusedUnlessAllowed) {
  DenseMatrix w = testing::MakeMatrix(DType::kF16, 70, 140, 0.5);
  const uint16_t nan = 0x7e01;
  const uint16_t infinity = 0xfc00;
  std::memcpy(w.mutable_view().row(41) + 2 * 77, &infinity, 2);
  std::memcpy(w.mutable_view().row(69) + 2 * 139, &nan, 2);
  const auto refused = Pack(GetParam(), w.view());
  EXPECT_TRUE(absl::IsInvalidArgument(refused.status()));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("row 41, column 77"));
  ExpectRoundTrip(w, Pack(GetParam(), w.view(), {.allow_nonfinite = true}));
}

TEST_P(FormatTest, SameBytesForTheSameMatrix) {
  const DenseMatrix w = testing::MakeMatrix(DType::kF16, 400, 1300, 0.5, Mask::kColumnSkew);
  const auto a = Pack(GetParam(), w.view());
  const auto b = Pack(GetParam(), w.view());
  ASSERT_TRUE(a.ok() && b.ok());
  ASSERT_EQ(a->sections.size(), b->sections.size());
  for (size_t i = 0; i < a->sections.size(); ++i) {
    ASSERT_EQ(a->sections[i].data.size(), b->sections[i].data.size());
    EXPECT_EQ(std::memcmp(a->sections[i].data.data(), b->sections[i].data.data(), a->sections[i].data.size()), 0);
  }
}

Buffer CopyOf(const Buffer& buffer, size_t size) {
  Buffer copy = *Buffer::Allocate(size);
  std::memcpy(copy.mutable_data(), buffer.data(), std::min(size, buffer.size()));
  return copy;
}

// Under AddressSanitizer this is the proof that Validate guards Unpack: whatever is accepted must unpack in bounds.
TEST_P(FormatTest, DamagedLayersAreRefusedOrHarmless) {
  std::mt19937_64 random(5);
  int refused = 0;
  int accepted = 0;
  for (const auto& [rows, cols, mask] : {std::tuple{70, 140, Mask::kUniform}, {300, 67, Mask::kBands}}) {
    const DenseMatrix w = testing::MakeMatrix(DType::kF16, rows, cols, 0.4, mask);
    const PackedLayer good = *Pack(GetParam(), w.view());
    for (int round = 0; round < 600; ++round) {
      PackedLayer bad = good;
      const size_t victim = random() % bad.sections.size();
      const size_t size = bad.sections[victim].data.size();
      switch (random() % 8) {
        case 0:
          bad.params[random() % 3] += static_cast<int64_t>(random() % 5) - 2;
          break;
        case 1:
          bad.sections[victim].data = CopyOf(bad.sections[victim].data, size == 0 ? 1 : random() % size);
          break;
        case 2:
          bad.sections.erase(bad.sections.begin() + static_cast<ptrdiff_t>(victim));
          break;
        case 3:
          bad.m += static_cast<int64_t>(random() % 600) - 300;
          bad.k += static_cast<int64_t>(random() % 3) - 1;
          break;
        case 4:
          bad.nnz += static_cast<int64_t>(random() % 3) - 1;
          break;
        default: {
          if (size == 0) break;
          Buffer copy = CopyOf(bad.sections[victim].data, size);
          const size_t flips = random() % 3 + 1;
          for (size_t i = 0; i < flips; ++i) copy.mutable_data()[random() % size] = static_cast<std::byte>(random());
          bad.sections[victim].data = std::move(copy);
        }
      }
      const absl::Status status = Validate(bad);
      if (!status.ok()) {
        ASSERT_TRUE(absl::IsDataLoss(status)) << status;
        ++refused;
        continue;
      }
      ++accepted;
      const auto unpacked = Unpack(bad);
      ASSERT_TRUE(unpacked.ok()) << unpacked.status();
      EXPECT_EQ(ScanDense(unpacked->view()).nnz, bad.nnz);
    }
  }
  EXPECT_GT(refused, 200);
  EXPECT_GT(accepted, 10);  // a flipped value bit is another valid layer
}

INSTANTIATE_TEST_SUITE_P(All, FormatTest, ::testing::ValuesIn(kFormats),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST(FormatDtypeTest, RefusesFp32WhereTheFormatCannotHoldIt) {
  const DenseMatrix w = testing::MakeMatrix(DType::kF32, 4, 4, 0.5);
  for (const Format format : kFormats) {
    const auto layer = Pack(format, w.view());
    EXPECT_EQ(layer.ok(), Takes(format, DType::kF32)) << Name(format);
    EXPECT_TRUE(layer.ok() || absl::IsInvalidArgument(layer.status())) << layer.status();
  }
}

}  // namespace
}  // namespace spmmd
