// Operands for the CPU kernel tests: weights at a density, tokens and outputs with odd strides and no more than element
// alignment, and one call that checks a product against the reference.
#ifndef SPMMD_TESTS_KERNELS_CPU_OPERANDS_H_
#define SPMMD_TESTS_KERNELS_CPU_OPERANDS_H_

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "kernels/cpu/matmul.h"
#include "kernels/format/packed_layer.h"
#include "kernels/format/reference.h"

namespace spmmd::testing {

inline constexpr DType kAllDtypes[] = {DType::kF16, DType::kBf16, DType::kF32};

inline void StoreValue(const MutableDenseView& view, int64_t row, int64_t col, float value) {
  std::byte* to = view.row(row) + static_cast<size_t>(col) * SizeOf(view.dtype);
  const uint16_t half = view.dtype == DType::kF16 ? FloatToF16(value) : FloatToBf16(value);
  if (view.dtype == DType::kF32) {
    std::memcpy(to, &value, sizeof(value));
  } else {
    std::memcpy(to, &half, sizeof(half));
  }
}

// N(0, 1) where an i.i.d. mask of `density` keeps, -0.0 at some of the others.
inline DenseMatrix Weights(DType dtype, int64_t m, int64_t k, double density, uint64_t seed) {
  DenseMatrix w = *DenseMatrix::Create(dtype, m, k);
  std::mt19937 random(static_cast<uint32_t>(seed * 7919 + static_cast<uint64_t>(m * 31 + k)));
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t c = 0; c < k; ++c) {
      if (uniform(random) < density) {
        StoreValue(w.mutable_view(), r, c, normal(random));
      } else if (random() % 8 == 0) {
        StoreValue(w.mutable_view(), r, c, -0.0f);
      }
    }
  }
  return w;
}

// Rows of `cols` elements with `gap` unused ones between them, beginning one element behind an aligned address. What
// lies outside of the rows is filled with 0xa5 and checked by Intact().
class Strided {
 public:
  Strided(DType dtype, int64_t rows, int64_t cols, int64_t gap)
      : bytes_((static_cast<size_t>(rows * (cols + gap)) + 2) * SizeOf(dtype), std::byte{0xa5}) {
    view_ = {bytes_.data() + SizeOf(dtype), dtype, rows, cols, cols + gap};
  }
  const MutableDenseView& view() { return view_; }
  DenseView const_view() const { return view_.Const(); }

  bool Intact() const {
    std::vector<bool> inside(bytes_.size());
    for (int64_t r = 0; r < view_.rows; ++r) {
      const auto begin = static_cast<size_t>(view_.row(r) - bytes_.data());
      for (size_t i = 0; i < static_cast<size_t>(view_.cols) * SizeOf(view_.dtype); ++i) inside[begin + i] = true;
    }
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if (!inside[i] && bytes_[i] != std::byte{0xa5}) return false;
    }
    return true;
  }

 private:
  std::vector<std::byte> bytes_;
  MutableDenseView view_;
};

inline Strided Tokens(DType dtype, int64_t n, int64_t k, uint64_t seed, int64_t gap = 3) {
  Strided x(dtype, n, k, gap);
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::normal_distribution<float> normal;
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < k; ++c) StoreValue(x.view(), r, c, normal(random));
  }
  return x;
}

inline std::vector<float> Bias(int64_t m, uint64_t seed) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::normal_distribution<float> normal;
  std::vector<float> bias(static_cast<size_t>(m));
  for (float& b : bias) b = normal(random);
  return bias;
}

struct SparseOperand {
  std::vector<uint32_t> indices;
  std::vector<float> values;
  SparseVector view() const { return {indices, values}; }
};

inline SparseOperand SparseTokens(int64_t k, double density, uint64_t seed) {
  SparseOperand x;
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  for (int64_t i = 0; i < k; ++i) {
    if (uniform(random) >= density) continue;
    x.indices.push_back(static_cast<uint32_t>(i));
    x.values.push_back(normal(random));
  }
  return x;
}

// All bytes of a view's rows, without the gaps.
inline std::string RowBytes(const DenseView& view) {
  std::string bytes;
  for (int64_t r = 0; r < view.rows; ++r) {
    bytes.append(reinterpret_cast<const char*>(view.row(r)), static_cast<size_t>(view.cols) * SizeOf(view.dtype));
  }
  return bytes;
}

// Multiplies into a strided, poisoned output and compares with the reference.
inline ::testing::AssertionResult ProductIsRight(const PackedLayer& layer, const DenseView& w, const DenseView& x,
                                                 const Epilogue& epilogue, DType y_dtype, ThreadPool& pool) {
  Strided y(y_dtype, x.rows, w.rows, 5);
  const absl::Status ran = cpu::Matmul(layer, x, epilogue, y.view(), pool);
  if (!ran.ok()) return ::testing::AssertionFailure() << ran;
  if (!y.Intact()) return ::testing::AssertionFailure() << "wrote outside of y's rows";
  const Reference reference = ReferenceMatmul(w, x, epilogue.bias, epilogue.activation);
  const absl::Status compared = CompareToReference(y.const_view(), reference, DefaultTolerance(y_dtype, w.cols));
  if (!compared.ok()) return ::testing::AssertionFailure() << compared;
  return ::testing::AssertionSuccess();
}

inline ::testing::AssertionResult SparseProductIsRight(const PackedLayer& layer, const DenseView& w,
                                                       const SparseOperand& x, const Epilogue& epilogue, DType y_dtype,
                                                       ThreadPool& pool) {
  Strided y(y_dtype, 1, w.rows, 5);
  const absl::Status ran = cpu::MatmulSparse(layer, x.view(), epilogue, y.view(), pool);
  if (!ran.ok()) return ::testing::AssertionFailure() << ran;
  if (!y.Intact()) return ::testing::AssertionFailure() << "wrote outside of y's row";
  const Reference reference = ReferenceMatmulSparse(w, x.indices, x.values, epilogue.bias, epilogue.activation);
  const absl::Status compared = CompareToReference(y.const_view(), reference, DefaultTolerance(y_dtype, w.cols));
  if (!compared.ok()) return ::testing::AssertionFailure() << compared;
  return ::testing::AssertionSuccess();
}

// Every instruction set that this machine can run, best first.
inline std::vector<int64_t> SupportedTargets() {
  std::vector<int64_t> targets;
  for (int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) targets.push_back(left & -left);
  return targets;
}

// Restricts dispatch to one target while it lives.
class OnTarget {
 public:
  explicit OnTarget(int64_t target) { hwy::SetSupportedTargetsForTest(target); }
  ~OnTarget() { hwy::SetSupportedTargetsForTest(0); }
  OnTarget(const OnTarget&) = delete;
  OnTarget& operator=(const OnTarget&) = delete;
};

}  // namespace spmmd::testing

#endif  // SPMMD_TESTS_KERNELS_CPU_OPERANDS_H_
