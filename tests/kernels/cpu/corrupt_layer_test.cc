// Damaged BITMAP layers: Validate refuses them, or they run without touching memory they must not (AddressSanitizer
// watches).
#include <cstring>
#include <random>

#include "gtest/gtest.h"
#include "kernels/cpu/matmul.h"
#include "tests/kernels/cpu/operands.h"

namespace spmmd::testing {
namespace {

// The section's bytes in a heap block of exactly Buffer's promise: the size plus kAlignment.
void ReplaceSection(Section& section, size_t size) {
  Buffer data = *Buffer::Allocate(size);
  std::memcpy(data.mutable_data(), section.data.data(), std::min(size, section.data.size()));
  section.data = std::move(data);
}

// True when the layer passed and was executed.
bool RunIfValid(const PackedLayer& layer, const DenseView& x, const SparseOperand& sparse) {
  if (!Validate(layer).ok()) return false;
  Strided y(DType::kF32, x.rows, layer.m, 0);
  EXPECT_TRUE(cpu::Matmul(layer, x, {}, y.view(), DefaultThreadPool()).ok());
  Strided y1(DType::kF32, 1, layer.m, 0);
  EXPECT_TRUE(cpu::MatmulSparse(layer, sparse.view(), {}, y1.view(), DefaultThreadPool()).ok());
  return true;
}

TEST(CorruptLayerTest, FlippedBitsAndTruncatedSections) {
  std::mt19937 random(1);
  for (const DType dtype : kAllDtypes) {
    const DenseMatrix w = Weights(dtype, 150, 300, 0.5, 2);
    const PackedLayer good = *Pack(Format::kBitmap, w.view());
    const Strided x = Tokens(DType::kF32, 3, 300, 3);
    const SparseOperand sparse = SparseTokens(300, 0.5, 4);
    ASSERT_TRUE(RunIfValid(good, x.const_view(), sparse));
    int refused = 0;
    int ran = 0;
    for (int i = 0; i < 400; ++i) {
      PackedLayer bad = good;
      Section& section = bad.sections[random() % bad.sections.size()];
      const size_t size = section.data.size();
      ReplaceSection(section, i % 4 == 0 ? random() % size : size);
      for (int flips = static_cast<int>(random() % 3) + (i % 4 == 0 ? 0 : 1); flips > 0 && section.data.size() > 0;
           --flips) {
        section.data.mutable_data()[random() % section.data.size()] ^= std::byte(1u << (random() % 8));
      }
      (RunIfValid(bad, x.const_view(), sparse) ? ran : refused)++;
    }
    EXPECT_GT(refused, 200) << Name(dtype);
    EXPECT_GT(ran, 0) << Name(dtype);  // flipped value bits are no damage that a layout could see
  }
}

TEST(CorruptLayerTest, HostileHeaders) {
  const DenseMatrix w = Weights(DType::kF16, 70, 90, 0.5, 5);
  const PackedLayer good = *Pack(Format::kBitmap, w.view());
  const auto refused = [&](auto&& damage) {
    PackedLayer bad = good;
    damage(bad);
    return Validate(bad).code() == absl::StatusCode::kDataLoss;
  };
  EXPECT_TRUE(refused([](PackedLayer& l) { l.m = 0; }));
  EXPECT_TRUE(refused([](PackedLayer& l) { l.m = -5; }));
  EXPECT_TRUE(refused([](PackedLayer& l) {
    l.m = 71;
    l.k = 1 << 20;
  }));
  EXPECT_TRUE(refused([](PackedLayer& l) { l.k = int64_t{1} << 62; }));
  EXPECT_TRUE(refused([](PackedLayer& l) { l.nnz += 1; }));
  EXPECT_TRUE(refused([](PackedLayer& l) { l.nnz = -1; }));
  EXPECT_TRUE(refused([](PackedLayer& l) { l.dtype = DType::kF32; }));
  EXPECT_TRUE(refused([](PackedLayer& l) { l.dtype = static_cast<DType>(200); }));
  EXPECT_TRUE(refused([](PackedLayer& l) { l.layout_version += 1; }));
  EXPECT_TRUE(refused([](PackedLayer& l) { l.params[0] = 64; }));
  EXPECT_TRUE(refused([](PackedLayer& l) { l.params[2] = 1; }));
  EXPECT_TRUE(refused([](PackedLayer& l) { l.params[7] = 1; }));
  EXPECT_TRUE(refused([](PackedLayer& l) { l.sections.pop_back(); }));
  EXPECT_TRUE(refused([](PackedLayer& l) { l.sections.clear(); }));
  EXPECT_TRUE(refused([](PackedLayer& l) { l.sections.push_back(l.sections[0]); }));
  EXPECT_TRUE(refused([](PackedLayer& l) { l.format = static_cast<Format>(99); }));
  EXPECT_TRUE(refused([](PackedLayer& l) { l.format = Format::kDense; }));
}

}  // namespace
}  // namespace spmmd::testing
