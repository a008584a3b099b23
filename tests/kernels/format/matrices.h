// Weight matrices for the format tests: every mask that packers must hold, with values that catch sloppy bit handling.
#ifndef SPMMD_TESTS_KERNELS_FORMAT_MATRICES_H_
#define SPMMD_TESTS_KERNELS_FORMAT_MATRICES_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/dtype.h"
#include "kernels/format/dense.h"

namespace spmmd::testing {

enum class Mask {
  kUniform,     // i.i.d.
  kColumnSkew,  // columns scaled log-normally before thresholding, as Wanda does by activation norms
  kRowSkew,     // the same by rows
  kBands,       // some rows and columns fully dense, some empty, the rest i.i.d.
  kBlocks,      // 64x64 blocks either dense or nearly empty
  kTwoFour,     // at most two of every four neighbours along a row
};
inline constexpr Mask kAllMasks[] = {Mask::kUniform, Mask::kColumnSkew, Mask::kRowSkew,
                                     Mask::kBands,   Mask::kBlocks,     Mask::kTwoFour};

inline std::string MaskName(Mask mask) {
  switch (mask) {
    case Mask::kUniform:
      return "uniform";
    case Mask::kColumnSkew:
      return "column_skew";
    case Mask::kRowSkew:
      return "row_skew";
    case Mask::kBands:
      return "bands";
    case Mask::kBlocks:
      return "blocks";
    case Mask::kTwoFour:
      return "two_four";
  }
  return "?";
}

// Deterministic for its arguments. Stored values are N(0, 1) with a pinch of subnormals, largest finite values and,
// among the zeros, -0.0.
inline DenseMatrix MakeMatrix(DType dtype, int64_t rows, int64_t cols, double density, Mask mask = Mask::kUniform,
                              uint64_t seed = 1) {
  std::mt19937_64 random(seed * 1000003 + static_cast<uint64_t>(rows * 4099 + cols));
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  std::vector<double> row_scale(static_cast<size_t>(rows), 1.0);
  std::vector<double> col_scale(static_cast<size_t>(cols), 1.0);
  constexpr double kSigma = 1.0;
  if (mask == Mask::kColumnSkew) {
    for (double& scale : col_scale) scale = std::exp(kSigma * normal(random));
  }
  if (mask == Mask::kRowSkew) {
    for (double& scale : row_scale) scale = std::exp(kSigma * normal(random));
  }
  if (mask == Mask::kBands) {
    for (double& scale : row_scale) {
      const double draw = uniform(random);
      scale = draw < 0.05 ? 1e9 : draw < 0.1 ? 0.0 : 1.0;
    }
    for (double& scale : col_scale) {
      const double draw = uniform(random);
      scale = draw < 0.05 ? 1e9 : draw < 0.1 ? 0.0 : 1.0;
    }
  }
  // Keep where uniform < 1 - (1 - density)^scale: i.i.d. at scale 1, dense or empty at the extremes.
  DenseMatrix matrix = *DenseMatrix::Create(dtype, rows, cols);
  const MutableDenseView view = matrix.mutable_view();
  for (int64_t r = 0; r < rows; ++r) {
    int kept_in_group = 0;
    for (int64_t c = 0; c < cols; ++c) {
      if (c % 4 == 0) kept_in_group = 0;
      double keep =
          1.0 - std::pow(1.0 - density, row_scale[static_cast<size_t>(r)] * col_scale[static_cast<size_t>(c)]);
      if (mask == Mask::kBlocks) keep = ((r / 64) * 7 + (c / 64) * 3) % 4 == 0 ? 1.0 : density / 4;
      bool kept = uniform(random) < keep;
      if (mask == Mask::kTwoFour) kept = kept && kept_in_group < 2;
      kept_in_group += kept;
      float value = kept ? normal(random) : 0.0f;
      const double special = uniform(random);
      uint32_t bits32 = 0;
      if (kept) {
        if (value == 0.0f) value = 1.0f;
        bits32 = std::bit_cast<uint32_t>(value);
        if (special < 0.01) bits32 = 1;            // smallest subnormal
        if (special > 0.99) bits32 = 0xff7fffffu;  // largest negative finite
      } else if (special < 0.1) {
        bits32 = 0x80000000u;  // -0.0
      }
      std::byte* out = view.row(r) + static_cast<size_t>(c) * SizeOf(dtype);
      if (dtype == DType::kF32) {
        std::memcpy(out, &bits32, sizeof(bits32));
        continue;
      }
      uint16_t bits16 = dtype == DType::kF16 ? FloatToF16(value) : FloatToBf16(value);
      if (kept && !IsNonzeroBits(bits16)) bits16 = 0x0001;
      if (kept && special < 0.01) bits16 = 0x0001;
      if (kept && special > 0.99) bits16 = dtype == DType::kF16 ? 0xfbff : 0xff7f;
      if (!kept && special < 0.1) bits16 = 0x8000;
      std::memcpy(out, &bits16, sizeof(bits16));
    }
  }
  return matrix;
}

inline uint32_t BitsAt(const DenseView& view, int64_t row, int64_t col) {
  uint32_t bits = 0;
  std::memcpy(&bits, view.row(row) + static_cast<size_t>(col) * SizeOf(view.dtype), SizeOf(view.dtype));
  return bits;
}

// Bit-exact, but for zeros: either sign in `expected` must be +0 in `actual`.
inline ::testing::AssertionResult SameNonzeros(const DenseView& expected, const DenseView& actual) {
  if (expected.dtype != actual.dtype || expected.rows != actual.rows || expected.cols != actual.cols) {
    return ::testing::AssertionFailure() << "shape or dtype differs";
  }
  for (int64_t r = 0; r < expected.rows; ++r) {
    for (int64_t c = 0; c < expected.cols; ++c) {
      uint32_t want = BitsAt(expected, r, c);
      const bool nonzero =
          expected.dtype == DType::kF32 ? IsNonzeroBits(want) : IsNonzeroBits(static_cast<uint16_t>(want));
      if (!nonzero) want = 0;
      if (want != BitsAt(actual, r, c)) {
        return ::testing::AssertionFailure() << "element (" << r << ", " << c << "): expected bits " << std::hex << want
                                             << ", got " << BitsAt(actual, r, c);
      }
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace spmmd::testing

#endif  // SPMMD_TESTS_KERNELS_FORMAT_MATRICES_H_
