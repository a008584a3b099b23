#include "kernels/cpu/epilogue.h"

#include <cstring>

#include "kernels/format/dense_rows.h"

#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/epilogue.cc"
// foreach_target.h must come first.
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace spmmd::cpu {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;

// x / (1 + exp(-u)). Where exp(-u) would overflow the quotient is below any x / 1e38 and taken as the limit, a zero:
// also for x = -infinity, so that an overflowed pre-activation does not become a NaN.
HWY_INLINE FloatVec TimesSigmoid(FloatTag d, FloatVec x, FloatVec u) {
  const FloatVec limit = hn::Set(d, -88.0f);
  const FloatVec quotient = hn::Div(x, hn::Add(hn::Set(d, 1.0f), hn::Exp(d, hn::Neg(hn::Max(u, limit)))));
  return hn::IfThenElse(hn::Lt(u, limit), hn::Neg(hn::Zero(d)), quotient);
}

// x * Phi(x) with Abramowitz and Stegun's 7.1.26, whose error of 1.5e-7 in erf is that of an fp32 result.
HWY_INLINE FloatVec Gelu(FloatTag d, FloatVec x) {
  const FloatVec z = hn::Mul(hn::Abs(x), hn::Set(d, 0.70710678f));
  const FloatVec one = hn::Set(d, 1.0f);
  const FloatVec t = hn::Div(one, hn::MulAdd(z, hn::Set(d, 0.3275911f), one));
  FloatVec poly = hn::Set(d, 1.061405429f);
  poly = hn::MulAdd(poly, t, hn::Set(d, -1.453152027f));
  poly = hn::MulAdd(poly, t, hn::Set(d, 1.421413741f));
  poly = hn::MulAdd(poly, t, hn::Set(d, -0.284496736f));
  poly = hn::MulAdd(poly, t, hn::Set(d, 0.254829592f));
  const FloatVec upper_tail =  // Phi(-|x|)
      hn::Mul(hn::Mul(hn::Set(d, 0.5f), hn::Mul(poly, t)), hn::Exp(d, hn::Neg(hn::Mul(z, z))));
  const FloatVec phi = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), upper_tail, hn::Sub(one, upper_tail));
  return hn::Mul(x, phi);
}

// 0.5 x (1 + tanh(u)) is x * sigmoid(2 u).
HWY_INLINE FloatVec GeluTanh(FloatTag d, FloatVec x) {
  const FloatVec inner = hn::MulAdd(hn::Mul(hn::Mul(x, x), x), hn::Set(d, 0.044715f), x);
  const FloatVec two_u = hn::Mul(inner, hn::Set(d, 2.0f * 0.79788456f));
  return TimesSigmoid(d, x, two_u);
}

HWY_INLINE FloatVec Activate(FloatTag d, Activation activation, FloatVec x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Zero(d), x);
    case Activation::kGelu:
      return Gelu(d, x);
    case Activation::kGeluTanh:
      return GeluTanh(d, x);
    case Activation::kSilu:
      return TimesSigmoid(d, x, x);
  }
  return x;
}

void ApplyEpilogueImpl(float* values, int64_t count, const float* bias, Activation activation) {
  const FloatTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  if (bias != nullptr) {
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, values + i), hn::LoadU(d, bias + i)), d, values + i);
    }
    for (; i < count; ++i) values[i] += bias[i];
  }
  if (activation == Activation::kNone) return;
  for (int64_t i = 0; i < count; i += lanes) {
    hn::StoreU(Activate(d, activation, hn::LoadU(d, values + i)), d, values + i);
  }
}

void FinishTokenImpl(const PartialSums& sums, int token, int64_t rows, const float* bias, Activation activation,
                     DType y_type, std::byte* y) {
  const FloatTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  HWY_ALIGN float values[bitmap::kTileRows];
  HWY_ALIGN float group[kGroupRows];
  for (int64_t row = 0; row < rows; row += kGroupRows) {
    const float* from = sums.first + (row * sums.tokens + token * kGroupRows);
    for (int64_t i = 0; i < kGroupRows; i += lanes) {
      FloatVec sum = hn::Load(d, from + i);
      for (int64_t part = 1; part < sums.parts; ++part) sum = hn::Add(sum, hn::Load(d, from + part * sums.stride + i));
      hn::Store(sum, d, group + i);
    }
    if (sums.order == RowOrder::kEvenOdd) {
      for (int64_t i = 0; i < kGroupRows / 2; ++i) {
        values[row + 2 * i] = group[i];
        values[row + 2 * i + 1] = group[kGroupRows / 2 + i];
      }
    } else if (sums.order == RowOrder::kFours) {
      for (int64_t i = 0; i < kGroupRows / 2; i += 4) {
        std::memcpy(values + row + 2 * i, group + i, 4 * sizeof(float));
        std::memcpy(values + row + 2 * i + 4, group + kGroupRows / 2 + i, 4 * sizeof(float));
      }
    } else {
      std::memcpy(values + row, group, sizeof(group));
    }
  }
  ApplyEpilogueImpl(values, rows, bias, activation);
  NarrowRow(values, y_type, y, rows);
}

void AddPartImpl(const float* part, int64_t count, float* total) {
  const FloatTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < count; i += lanes) {
    hn::Store(hn::Add(hn::Load(d, total + i), hn::Load(d, part + i)), d, total + i);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace spmmd::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spmmd::cpu {
namespace {
HWY_EXPORT(ApplyEpilogueImpl);
HWY_EXPORT(FinishTokenImpl);
HWY_EXPORT(AddPartImpl);
}  // namespace

void ApplyEpilogue(float* values, int64_t count, const float* bias, Activation activation) {
  HWY_DYNAMIC_DISPATCH(ApplyEpilogueImpl)(values, count, bias, activation);
}

void FinishToken(const PartialSums& sums, int token, int64_t rows, const float* bias, Activation activation,
                 DType y_type, std::byte* y) {
  HWY_DYNAMIC_DISPATCH(FinishTokenImpl)(sums, token, rows, bias, activation, y_type, y);
}

void AddPart(const float* part, int64_t count, float* total) { HWY_DYNAMIC_DISPATCH(AddPartImpl)(part, count, total); }
}  // namespace spmmd::cpu
#endif  // HWY_ONCE
