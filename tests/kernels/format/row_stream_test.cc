// ROW_STREAM must give back every bit of every matrix, under every choice that the packer can make, and must refuse
// bytes that would lead a kernel astray.
#include "kernels/format/row_stream.h"

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/dtype.h"
#include "kernels/format/row_stream_decode.h"

namespace spmmd {
namespace {

using row_stream::Coding;
using row_stream::CountEscapes;
using row_stream::FieldMax;
using row_stream::Options;

enum class Values { kNormal, kLogNormalRows, kHeavyTail, kAnyBits };

struct Case {
  int64_t m;
  int64_t k;
  double density;
  Values values = Values::kNormal;
  double row_skew = 0;  // sigma of a log-normal density factor a row
};

// `any bits` draws every finite pattern, subnormals included.
uint16_t DrawValue(Values values, DType dtype, double row_scale, std::mt19937_64& rng) {
  std::normal_distribution<double> normal(0, 0.02);
  double v = 0;
  switch (values) {
    case Values::kNormal:
      v = normal(rng);
      break;
    case Values::kLogNormalRows:
      v = normal(rng) * row_scale;
      break;
    case Values::kHeavyTail:
      v = normal(rng) / std::max(1e-3, std::abs(normal(rng)) * 20);
      break;
    case Values::kAnyBits: {
      const auto bits = static_cast<uint16_t>(rng());
      const uint16_t special = dtype == DType::kF16 ? 0x7c00 : 0x7f80;
      return (bits & special) == special ? 0x3c00 : bits;
    }
  }
  return dtype == DType::kF16 ? FloatToF16(static_cast<float>(v)) : FloatToBf16(static_cast<float>(v));
}

DenseMatrix Draw(const Case& c, DType dtype, uint64_t seed) {
  std::mt19937_64 rng(seed);
  DenseMatrix w = DenseMatrix::Create(dtype, c.m, c.k).value();
  std::uniform_real_distribution<double> uniform(0, 1);
  std::normal_distribution<double> normal;
  const MutableDenseView view = w.mutable_view();
  for (int64_t r = 0; r < c.m; ++r) {
    const double scale = std::exp(normal(rng));
    const double density = c.row_skew == 0 ? c.density : std::min(1.0, c.density * std::exp(c.row_skew * normal(rng)));
    for (int64_t k = 0; k < c.k; ++k) {
      uint16_t bits = 0x8000;  // pruned weights are often -0.0
      if (uniform(rng) < density) bits = DrawValue(c.values, dtype, scale, rng);
      std::memcpy(view.row(r) + k * 2, &bits, 2);
    }
  }
  return w;
}

uint16_t Bits(const DenseView& v, int64_t r, int64_t c) {
  uint16_t bits;
  std::memcpy(&bits, v.row(r) + c * 2, 2);
  return bits;
}

// The dense matrix, zeros normalised to +0.
void ExpectSame(const DenseView& expected, const DenseView& actual) {
  ASSERT_EQ(expected.rows, actual.rows);
  ASSERT_EQ(expected.cols, actual.cols);
  int64_t mismatches = 0;
  for (int64_t r = 0; r < expected.rows; ++r) {
    for (int64_t c = 0; c < expected.cols; ++c) {
      const uint16_t bits = Bits(expected, r, c);
      if (Bits(actual, r, c) != (IsNonzeroBits(bits) ? bits : 0)) ++mismatches;
    }
  }
  EXPECT_EQ(mismatches, 0);
}

DenseMatrix MustUnpack(const PackedLayer& layer) {
  DenseMatrix out = DenseMatrix::Create(layer.dtype, layer.m, layer.k).value();
  const absl::Status status = row_stream::Unpack(layer, out.mutable_view());
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

PackedLayer RoundTrip(const DenseMatrix& w, const Options& options) {
  PackedLayer layer;
  auto packed = row_stream::Pack(w.view(), {}, options);
  EXPECT_TRUE(packed.ok()) << packed.status();
  if (!packed.ok()) return layer;
  layer = *std::move(packed);
  const absl::Status status = Validate(layer);
  EXPECT_TRUE(status.ok()) << status;
  ExpectSame(w.view(), MustUnpack(layer).view());
  size_t total = 0;
  for (const Section& section : layer.sections) total += section.data.size();
  EXPECT_EQ(layer.bytes().total(), total);
  EXPECT_EQ(layer.nnz, ScanDense(w.view()).nnz);
  return layer;
}

TEST(RowStream, RoundTripsEveryShapeAndDensity) {
  uint64_t seed = 1;
  for (const auto& [m, k] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {1, 7}, {7, 1}, {3, 17}, {31, 33}, {32, 64}, {33, 1000}, {100, 257}, {257, 100}, {129, 515}}) {
    for (const double density : {0.0, 0.02, 0.3, 0.5, 0.7, 1.0}) {
      for (const DType dtype : {DType::kF16, DType::kBf16}) {
        SCOPED_TRACE(testing::Message() << m << "x" << k << " density " << density << " " << Name(dtype));
        RoundTrip(Draw({m, k, density}, dtype, ++seed), {});
      }
    }
  }
}

TEST(RowStream, RoundTripsUnderEveryPackerChoice) {
  uint64_t seed = 100;
  for (const Coding coding : {Coding::kVerbatim, Coding::kCode2, Coding::kCode3}) {
    for (const int run_bits : {2, 4}) {
      for (const auto& [rows, warps] : std::vector<std::pair<int, int>>{
               {32, 4}, {1, 1}, {5, 3}, {20, 10}, {73, 12}, {32, 1}, {128, 16}, {512, 16}}) {
        for (const bool sorted : {false, true}) {
          for (const int64_t segment : {0, 96}) {
            SCOPED_TRACE(testing::Message()
                         << "coding " << static_cast<int>(coding) << " run " << run_bits << " rows " << rows
                         << " warps " << warps << " sorted " << sorted << " segment " << segment);
            Options options{coding, run_bits, rows, warps, sorted, segment};
            const Case c{75, 333, 0.4, Values::kNormal, 0.7};
            const PackedLayer layer = RoundTrip(Draw(c, DType::kBf16, ++seed), options);
            EXPECT_EQ(layer.params[row_stream::kParamRowsPerTile], rows);
            EXPECT_EQ(layer.params[row_stream::kParamWarps], warps);
            EXPECT_EQ(layer.params[row_stream::kParamCoding], static_cast<int>(coding));
            EXPECT_EQ(layer.FindSection(row_stream::kRowOrderSection) != nullptr, sorted);
          }
        }
      }
    }
  }
}

TEST(RowStream, CodesAreExactForAnyBfloat16) {
  uint64_t seed = 1000;
  for (const Coding coding : {Coding::kCode2, Coding::kCode3}) {
    for (const Values values : {Values::kNormal, Values::kLogNormalRows, Values::kHeavyTail, Values::kAnyBits}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(coding) << " values " << static_cast<int>(values));
      Options options;
      options.coding = coding;
      const DenseMatrix w = Draw({64, 700, 0.6, values, 0.3}, DType::kBf16, ++seed);
      const PackedLayer layer = RoundTrip(w, options);
      if (values == Values::kAnyBits) {
        EXPECT_GT(CountEscapes(layer), layer.nnz / 2);
      }
      if (values == Values::kNormal && coding == Coding::kCode3) {
        EXPECT_LT(CountEscapes(layer), layer.nnz / 50);
      }
    }
  }
}

TEST(RowStream, RecodeInvertsForEveryPatternAndBase) {
  for (const Coding coding : {Coding::kCode2, Coding::kCode3}) {
    for (int base = 0; base <= 254 - FieldMax(coding); ++base) {
      int held = 0;
      for (int v = 0; v < 0x8000; ++v) {
        uint16_t word = 0xffff;
        if (!row_stream::Recode(static_cast<uint16_t>(v), base, coding, &word)) continue;
        ++held;
        ASSERT_EQ(row_stream::Uncode(word, base), v);
        ASSERT_LE(word >> 7, FieldMax(coding));
        ASSERT_LT(v, 0x7f80);
      }
      // Full binades of the window, and what the subnormal field holds.
      EXPECT_GE(held, FieldMax(coding) * 128);
    }
  }
}

TEST(RowStream, PicksTheCodeByBytes) {
  const DenseMatrix magnitude = Draw({128, 2048, 0.5}, DType::kBf16, 7);
  const PackedLayer coded = RoundTrip(magnitude, {});
  EXPECT_NE(coded.params[row_stream::kParamCoding], 0);
  const DenseMatrix any = Draw({128, 2048, 0.5, Values::kAnyBits}, DType::kBf16, 8);
  const PackedLayer verbatim = RoundTrip(any, {});
  EXPECT_EQ(verbatim.params[row_stream::kParamCoding], 0);
  EXPECT_LT(coded.bytes().total(), verbatim.bytes().total());
}

TEST(RowStream, TakesFewerBytesThanDense) {
  // Exactly half of each row is kept, as per-row magnitude pruning leaves it.
  DenseMatrix w = DenseMatrix::Create(DType::kF16, 512, 4096).value();
  std::mt19937_64 rng(3);
  std::vector<int> columns(4096);
  for (int i = 0; i < 4096; ++i) columns[i] = i;
  for (int64_t r = 0; r < 512; ++r) {
    std::shuffle(columns.begin(), columns.end(), rng);
    for (int i = 0; i < 2048; ++i) {
      const uint16_t bits = FloatToF16(0.5f + static_cast<float>(i));
      std::memcpy(w.mutable_view().row(r) + columns[i] * 2, &bits, 2);
    }
  }
  const PackedLayer layer = RoundTrip(w, {});
  EXPECT_LT(static_cast<double>(layer.bytes().total()), 0.66 * static_cast<double>(layer.dense_bytes()));
}

TEST(RowStream, ReadsUnalignedStridedRows) {
  const DenseMatrix w = Draw({40, 100, 0.5}, DType::kF16, 9);
  std::vector<std::byte> storage(40 * 131 * 2 + 1);
  const DenseView strided{storage.data() + 1, DType::kF16, 40, 100, 131};
  for (int64_t r = 0; r < 40; ++r) std::memcpy(storage.data() + 1 + r * 262, w.view().row(r), 200);
  auto packed = row_stream::Pack(strided, {});
  ASSERT_TRUE(packed.ok()) << packed.status();
  ExpectSame(w.view(), MustUnpack(*packed).view());
}

TEST(RowStream, RefusesWhatItCannotStore) {
  DenseMatrix f32 = DenseMatrix::Create(DType::kF32, 4, 4).value();
  EXPECT_EQ(row_stream::Pack(f32.view(), {}).status().code(), absl::StatusCode::kInvalidArgument);
  DenseMatrix f16 = DenseMatrix::Create(DType::kF16, 4, 4).value();
  EXPECT_EQ(row_stream::Pack(f16.view(), {}, {.coding = Coding::kCode2}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(row_stream::Pack(f16.view(), {}, {.run_bits = 3}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(row_stream::Pack(f16.view(), {}, {.warps = 17}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(row_stream::Pack(f16.view(), {}, {.rows_per_tile = 33, .warps = 1}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(row_stream::Pack(f16.view(), {}, {.segment_columns = 4}).status().code(),
            absl::StatusCode::kInvalidArgument);
  const uint16_t nan = 0x7e00;
  std::memcpy(f16.mutable_view().row(2) + 2, &nan, 2);
  EXPECT_EQ(row_stream::Pack(f16.view(), {}).status().code(), absl::StatusCode::kInvalidArgument);
  PackOptions allow;
  allow.allow_nonfinite = true;
  auto packed = row_stream::Pack(f16.view(), allow);
  ASSERT_TRUE(packed.ok());
  ExpectSame(f16.view(), MustUnpack(*packed).view());
}

TEST(RowStream, KeepsNonfiniteBfloat16UnderEveryCode) {
  DenseMatrix w = Draw({16, 200, 0.5}, DType::kBf16, 11);
  for (const uint16_t special : {0x7f80, 0xff80, 0x7fc1}) {
    std::memcpy(w.mutable_view().row(special % 16) + 10, &special, 2);
  }
  PackOptions allow;
  allow.allow_nonfinite = true;
  for (const Coding coding : {Coding::kVerbatim, Coding::kCode2, Coding::kCode3}) {
    auto packed = row_stream::Pack(w.view(), allow, {.coding = coding});
    ASSERT_TRUE(packed.ok());
    ExpectSame(w.view(), MustUnpack(*packed).view());
  }
}

TEST(RowStream, WideMatrixIsCutIntoSegments) {
  const DenseMatrix w = Draw({3, row_stream::kMaxSegmentColumns * 2 + 5, 0.3}, DType::kBf16, 13);
  const PackedLayer layer = RoundTrip(w, {});
  EXPECT_LE(layer.params[row_stream::kParamSegmentColumns], row_stream::kMaxSegmentColumns);
}

// Buffers are immutable once packed: a corrupted layer is a copy with bytes changed.
PackedLayer Copy(const PackedLayer& layer) {
  PackedLayer copy;
  copy.format = layer.format;
  copy.layout_version = layer.layout_version;
  copy.dtype = layer.dtype;
  copy.m = layer.m;
  copy.k = layer.k;
  copy.nnz = layer.nnz;
  copy.params = layer.params;
  for (const Section& section : layer.sections) {
    Buffer data = Buffer::Allocate(section.data.size()).value();
    if (section.data.size() > 0) std::memcpy(data.mutable_data(), section.data.data(), section.data.size());
    copy.sections.push_back({section.id, section.section_class, section.padding, std::move(data)});
  }
  return copy;
}

TEST(RowStream, ValidateCatchesDamage) {
  std::mt19937_64 rng(17);
  for (const Coding coding : {Coding::kVerbatim, Coding::kCode2, Coding::kCode3}) {
    Options options{coding, 4, 8, 2, true, 64};
    const PackedLayer layer =
        row_stream::Pack(Draw({50, 150, 0.4, Values::kHeavyTail}, DType::kBf16, 19).view(), {}, options).value();
    int refused = 0;
    for (int trial = 0; trial < 300; ++trial) {
      PackedLayer damaged = Copy(layer);
      Section& section = damaged.sections[rng() % damaged.sections.size()];
      if (section.data.size() == 0) continue;
      section.data.mutable_data()[rng() % section.data.size()] ^= static_cast<std::byte>(1 + rng() % 255);
      const absl::Status status = Validate(damaged);
      if (!status.ok()) {
        ++refused;
        EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
      }
      DenseMatrix out = DenseMatrix::Create(layer.dtype, layer.m, layer.k).value();
      (void)row_stream::Unpack(damaged, out.mutable_view());  // must stay in bounds whatever the bytes say
    }
    EXPECT_GT(refused, 50);
    for (size_t i = 0; i < layer.sections.size(); ++i) {
      PackedLayer cut = Copy(layer);
      Buffer shorter = Buffer::Allocate(layer.sections[i].data.size() - 1).value();
      cut.sections[i].data = std::move(shorter);
      EXPECT_EQ(Validate(cut).code(), absl::StatusCode::kDataLoss) << "section " << layer.sections[i].id;
    }
    for (int param = 0; param <= row_stream::kParamMaxBlocks; ++param) {
      for (const int64_t value : {int64_t{-1}, int64_t{1} << 40}) {
        PackedLayer odd = Copy(layer);
        odd.params[param] = value;
        EXPECT_EQ(Validate(odd).code(), absl::StatusCode::kDataLoss) << "param " << param;
      }
    }
    PackedLayer odd = Copy(layer);
    odd.nnz += 1;
    EXPECT_EQ(Validate(odd).code(), absl::StatusCode::kDataLoss);
    odd = Copy(layer);
    odd.layout_version += 1;
    EXPECT_EQ(Validate(odd).code(), absl::StatusCode::kDataLoss);
  }
}

}  // namespace
}  // namespace spmmd
