// Vector lanes run along K. A row block of four (two for more than two tokens) shares the loads of x; every (row,
// token) pair has one vector of partial sums, which is added up at the end.
#include "kernels/cpu/dense_kernels.h"

#include <cstring>

#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/dense_kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spmmd::cpu {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;

// One vector of weights at element k.
template <DType kType>
HWY_INLINE FloatVec LoadWeights(const std::byte* row, int64_t k) {
  const FloatTag d;
  if constexpr (kType == DType::kF32) {
    return hn::LoadU(d, reinterpret_cast<const float*>(row) + k);
  } else {
    const auto* from = reinterpret_cast<const uint16_t*>(row) + k;
    const hn::Rebind<uint16_t, FloatTag> d16;
    if constexpr (kType == DType::kBf16) {
      const hn::RebindToUnsigned<FloatTag> d32;
      return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))));
    } else {
#if HWY_TARGET <= HWY_AVX2
      const hn::Rebind<hwy::float16_t, FloatTag> df16;
      return hn::PromoteTo(d, hn::BitCast(df16, hn::LoadU(d16, from)));
#else
      HWY_ALIGN float lanes[HWY_LANES(float)];
      for (size_t i = 0; i < hn::Lanes(d); ++i) lanes[i] = F16ToFloat(from[i]);
      return hn::Load(d, lanes);
#endif
    }
  }
}

template <DType kType, int kRows, int kTokens>
HWY_INLINE void DotBlock(const std::byte* w, size_t row_bytes, int64_t k, const float* x, int64_t x_stride, float* out,
                         int64_t out_stride) {
  const FloatTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  FloatVec sums[kRows * kTokens];
  HWY_UNROLL(32)
  for (int i = 0; i < kRows * kTokens; ++i) sums[i] = hn::Zero(d);
  int64_t at = 0;
  for (; at + lanes <= k; at += lanes) {
    FloatVec weights[kRows];
    HWY_UNROLL(32)
    for (int r = 0; r < kRows; ++r) weights[r] = LoadWeights<kType>(w + static_cast<size_t>(r) * row_bytes, at);
    HWY_UNROLL(32)
    for (int n = 0; n < kTokens; ++n) {
      const FloatVec token = hn::LoadU(d, x + n * x_stride + at);
      HWY_UNROLL(32)
      for (int r = 0; r < kRows; ++r) {
        sums[n * kRows + r] = hn::MulAdd(weights[r], token, sums[n * kRows + r]);
      }
    }
  }
  if (at < k) {  // what lies behind the row must not count, not even times zero
    const auto inside = hn::FirstN(d, static_cast<size_t>(k - at));
    for (int r = 0; r < kRows; ++r) {
      const FloatVec weights =
          hn::IfThenElseZero(inside, LoadWeights<kType>(w + static_cast<size_t>(r) * row_bytes, at));
      for (int n = 0; n < kTokens; ++n) {
        sums[n * kRows + r] = hn::MulAdd(weights, hn::LoadU(d, x + n * x_stride + at), sums[n * kRows + r]);
      }
    }
  }
  for (int n = 0; n < kTokens; ++n) {
    for (int r = 0; r < kRows; ++r) out[n * out_stride + r] = hn::GetLane(hn::SumOfLanes(d, sums[n * kRows + r]));
  }
}

template <DType kType, int kRows, int kTokens>
void DotRows(const std::byte* w, int64_t rows, int64_t k, const float* x, int64_t x_stride, float* out,
             int64_t out_stride) {
  const size_t row_bytes = static_cast<size_t>(k) * SizeOf(kType);
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    DotBlock<kType, kRows, kTokens>(w + static_cast<size_t>(r) * row_bytes, row_bytes, k, x, x_stride, out + r,
                                    out_stride);
  }
  for (; r < rows; ++r) {
    DotBlock<kType, 1, kTokens>(w + static_cast<size_t>(r) * row_bytes, row_bytes, k, x, x_stride, out + r, out_stride);
  }
}

template <DType kType>
void DenseRowsOf(const std::byte* w, int64_t rows, int64_t k, const float* x, int64_t x_stride, int64_t tokens,
                 float* out, int64_t out_stride) {
  // A few rows at a time for all tokens, so that a batch reads the weights from memory once.
  constexpr int64_t kRowsAtOnce = 4;
  for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
    const int64_t count = HWY_MIN(kRowsAtOnce, rows - r);
    const std::byte* from = w + static_cast<size_t>(r * k) * SizeOf(kType);
    int64_t n = 0;
    for (; n + 4 <= tokens; n += 4) {
      DotRows<kType, 2, 4>(from, count, k, x + n * x_stride, x_stride, out + n * out_stride + r, out_stride);
    }
    if (n + 2 <= tokens) {
      DotRows<kType, 4, 2>(from, count, k, x + n * x_stride, x_stride, out + n * out_stride + r, out_stride);
      n += 2;
    }
    if (n < tokens) {
      DotRows<kType, 4, 1>(from, count, k, x + n * x_stride, x_stride, out + n * out_stride + r, out_stride);
    }
  }
}

void DenseRowsImpl(DType dtype, const std::byte* w, int64_t rows, int64_t k, const float* x, int64_t x_stride,
                   int64_t tokens, float* out, int64_t out_stride) {
  switch (dtype) {
    case DType::kF16:
      return DenseRowsOf<DType::kF16>(w, rows, k, x, x_stride, tokens, out, out_stride);
    case DType::kBf16:
      return DenseRowsOf<DType::kBf16>(w, rows, k, x, x_stride, tokens, out, out_stride);
    case DType::kF32:
      return DenseRowsOf<DType::kF32>(w, rows, k, x, x_stride, tokens, out, out_stride);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace spmmd::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spmmd::cpu {
namespace {
HWY_EXPORT(DenseRowsImpl);
}  // namespace

void DenseRows(DType dtype, const std::byte* w, int64_t rows, int64_t k, const float* x, int64_t x_stride,
               int64_t tokens, float* out, int64_t out_stride) {
  HWY_DYNAMIC_DISPATCH(DenseRowsImpl)(dtype, w, rows, k, x, x_stride, tokens, out, out_stride);
}
}  // namespace spmmd::cpu
#endif  // HWY_ONCE
