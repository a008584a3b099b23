// The table of bytes a dense element in docs/formats.md, held against what the packers make.
#include <cmath>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"
#include "kernels/base/dtype.h"
#include "kernels/format/packed_layer.h"
#include "kernels/format/prune.h"

namespace spmmd {
namespace {

constexpr int64_t kSize = 4096;
constexpr double kTolerance = 0.004;  // of 2 bytes; a third digit that another draw of weights could change

using Table = std::vector<std::pair<std::string, std::vector<double>>>;

// The rows of the first table after the heading: the first cell, and the numbers in the others.
Table ReadTable(const std::string& heading) {
  std::ifstream file("docs/formats.md");
  Table table;
  bool found = false;
  for (std::string line; std::getline(file, line);) {
    if (line == heading) found = true;
    if (!found) continue;
    if (line.rfind("| ", 0) != 0) {
      if (!table.empty()) break;
      continue;
    }
    std::vector<std::string> cells = absl::StrSplit(line, '|');
    std::vector<double> numbers;
    for (size_t i = 2; i + 1 < cells.size(); ++i) {
      double number = 0;
      if (absl::SimpleAtod(absl::StripSuffix(absl::StripAsciiWhitespace(cells[i]), " %"), &number)) {
        numbers.push_back(number);
      }
    }
    if (!numbers.empty()) table.emplace_back(absl::StripAsciiWhitespace(cells[1]), numbers);
  }
  return table;
}

// N(0, 1) in fp16. Rows are rotations of one pool, which no packer notices.
DenseMatrix Weights() {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> pool(size_t{1} << 20);
  for (uint16_t& bits : pool) bits = FloatToF16(normal(random));
  DenseMatrix w = *DenseMatrix::Create(DType::kF16, kSize, kSize);
  for (int64_t row = 0; row < kSize; ++row) {
    auto* out = reinterpret_cast<uint16_t*>(w.mutable_view().row(row));
    const auto start = static_cast<size_t>(random());
    for (int64_t col = 0; col < kSize; ++col) out[col] = pool[(start + static_cast<size_t>(col)) % pool.size()];
  }
  return w;
}

TEST(SizeTable, SaysWhatThePackersMake) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "too slow under a sanitizer, and about sizes";
#endif
  const Table table = ReadTable("## Bytes per dense element");
  ASSERT_GE(table.size(), 10u) << "the table moved; tests run in the source directory";
  const std::vector<double> percents = table[0].second;
  ASSERT_EQ(percents, (std::vector<double>{30, 50, 60, 70, 80})) << "its head";
  const DenseMatrix dense = Weights();
  DenseMatrix w = *DenseMatrix::Create(DType::kF16, kSize, kSize);
  int formats = 0;
  for (size_t column = 0; column < percents.size(); ++column) {
    const double s = percents[column] / 100;
    std::memcpy(w.mutable_view().data, dense.view().data, dense.bytes());
    ASSERT_TRUE(PruneMagnitude(w.mutable_view(), s).ok());
    for (size_t row = 1; row < table.size(); ++row) {
      const auto& [label, numbers] = table[row];
      ASSERT_EQ(numbers.size(), percents.size()) << label;
      double bytes = 0;
      if (label.rfind("entropy bound", 0) == 0) {
        bytes = 2 * (1 - s) - (s * std::log2(s) + (1 - s) * std::log2(1 - s)) / 8;
      } else if (label.rfind("one bit", 0) == 0) {
        bytes = 2 * (1 - s) + 1.0 / 8;
      } else {
        const std::vector<std::string> quoted = absl::StrSplit(label, '`');
        ASSERT_GE(quoted.size(), 2u) << label;
        const auto format = ParseFormat(quoted[1]);
        ASSERT_TRUE(format.has_value()) << label;
        const auto layer = Pack(*format, w.view());
        ASSERT_TRUE(layer.ok()) << layer.status();
        bytes = static_cast<double>(layer->bytes().total()) / (static_cast<double>(kSize) * kSize);
        ++formats;
      }
      EXPECT_NEAR(numbers[column], bytes, kTolerance) << label << " at " << percents[column] << " %";
    }
  }
  EXPECT_GE(formats, 7 * 5);
}

}  // namespace
}  // namespace spmmd
