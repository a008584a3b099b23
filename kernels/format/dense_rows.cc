#include "kernels/format/dense_rows.h"

#include <bit>
#include <cstring>

#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/format/dense_rows.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spmmd {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

template <typename Bits>
Bits LoadOne(const std::byte* row, int64_t i) {
  Bits bits;
  std::memcpy(&bits, row + static_cast<size_t>(i) * sizeof(Bits), sizeof(Bits));
  return bits;
}

// An element is nonzero when it has a bit besides its sign, and not finite when all bits of `exponent` are set. kTiny:
// the first magnitude that is not tiny; 1 when none is.
template <typename Bits, Bits kTiny = 1>
RowStats ScanBits(const std::byte* row, int64_t count, Bits exponent) {
  const hn::ScalableTag<Bits> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  const auto magnitude_mask = hn::Set(d, kMagnitude);
  const auto exponent_mask = hn::Set(d, exponent);
  const auto zero = hn::Zero(d);
  RowStats stats;
  int64_t zeros = 0, zero_or_tiny = 0;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto bits = hn::LoadU(d, reinterpret_cast<const Bits*>(row) + i);
    const auto magnitude = hn::And(bits, magnitude_mask);
    zeros += static_cast<int64_t>(hn::CountTrue(d, hn::Eq(magnitude, zero)));
    if constexpr (kTiny > 1) {
      zero_or_tiny += static_cast<int64_t>(
          hn::CountTrue(d, hn::Eq(hn::Min(magnitude, hn::Set(d, static_cast<Bits>(kTiny - 1))), magnitude)));
    }
    stats.nonfinite += static_cast<int64_t>(hn::CountTrue(d, hn::Eq(hn::And(bits, exponent_mask), exponent_mask)));
  }
  stats.nnz = i - zeros;
  if constexpr (kTiny > 1) stats.tiny = zero_or_tiny - zeros;
  for (; i < count; ++i) {
    const Bits bits = LoadOne<Bits>(row, i);
    stats.nnz += (bits & kMagnitude) != 0 ? 1 : 0;
    stats.nonfinite += (bits & exponent) == exponent ? 1 : 0;
    stats.tiny += (bits & kMagnitude) != 0 && (bits & kMagnitude) < kTiny ? 1 : 0;
  }
  return stats;
}

RowStats ScanRowImpl(DType dtype, const std::byte* row, int64_t count) {
  constexpr auto kFirstNotTiny = static_cast<uint16_t>(std::bit_cast<uint32_t>(kTinyMagnitude) >> 16);
  switch (dtype) {
    case DType::kF16:
      return ScanBits<uint16_t>(row, count, 0x7c00);
    case DType::kBf16:
      return ScanBits<uint16_t, kFirstNotTiny>(row, count, 0x7f80);
    case DType::kF32:
      return ScanBits<uint32_t>(row, count, 0x7f800000u);
  }
  return {};
}

void WidenRowImpl(DType from_type, const std::byte* from, float* to, int64_t count) {
  int64_t i = 0;
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du32;
  const hn::Rebind<uint16_t, decltype(df)> du16;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  if (from_type == DType::kF32) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  if (from_type == DType::kBf16) {
    for (; i + lanes <= count; i += lanes) {
      const auto bits = hn::PromoteTo(du32, hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from) + i));
      hn::StoreU(hn::BitCast(df, hn::ShiftLeft<16>(bits)), df, to + i);
    }
    for (; i < count; ++i) to[i] = Bf16ToFloat(LoadOne<uint16_t>(from, i));
    return;
  }
#if HWY_TARGET <= HWY_AVX2
  // The instruction handles subnormals, infinities and NaNs; Highway's own promotion flushes subnormals elsewhere.
  const hn::Rebind<hwy::float16_t, decltype(df)> df16;
  for (; i + lanes <= count; i += lanes) {
    const auto bits = hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from) + i);
    hn::StoreU(hn::PromoteTo(df, hn::BitCast(df16, bits)), df, to + i);
  }
#endif
  for (; i < count; ++i) to[i] = F16ToFloat(LoadOne<uint16_t>(from, i));
}

void NarrowRowImpl(const float* from, DType to_type, std::byte* to, int64_t count) {
  int64_t i = 0;
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du32;
  const hn::Rebind<uint16_t, decltype(df)> du16;
  const auto lanes = static_cast<int64_t>(hn::Lanes(df));
  (void)lanes;
  (void)du32;
  (void)du16;
  if (to_type == DType::kF32) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  if (to_type == DType::kBf16) {
#if HWY_TARGET <= HWY_SSSE3
    const auto one = hn::Set(du32, 1u);
    const auto bias = hn::Set(du32, 0x7fffu);
    const auto quiet = hn::Set(du32, 0x40u);
    const auto infinity = hn::Set(du32, 0x7f800000u);
    const auto magnitude = hn::Set(du32, 0x7fffffffu);
    const hn::RebindToSigned<decltype(du32)> di32;
    for (; i + lanes <= count; i += lanes) {
      const auto bits = hn::BitCast(du32, hn::LoadU(df, from + i));
      const auto upper = hn::ShiftRight<16>(bits);
      const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(bias, hn::And(upper, one))));
      // Magnitudes are below 2^31, so that the signed comparison is right.
      const auto is_nan =
          hn::RebindMask(du32, hn::Gt(hn::BitCast(di32, hn::And(bits, magnitude)), hn::BitCast(di32, infinity)));
      const auto result = hn::IfThenElse(is_nan, hn::Or(upper, quiet), rounded);
      hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di32, result)), du16, reinterpret_cast<uint16_t*>(to) + i);
    }
#endif
    for (; i < count; ++i) {
      const uint16_t bits = FloatToBf16(from[i]);
      std::memcpy(to + static_cast<size_t>(i) * 2, &bits, 2);
    }
    return;
  }
#if HWY_TARGET <= HWY_AVX2
  const hn::Rebind<hwy::float16_t, decltype(df)> df16;
  for (; i + lanes <= count; i += lanes) {
    const auto half = hn::DemoteTo(df16, hn::LoadU(df, from + i));
    hn::StoreU(hn::BitCast(du16, half), du16, reinterpret_cast<uint16_t*>(to) + i);
  }
#endif
  for (; i < count; ++i) {
    const uint16_t bits = FloatToF16(from[i]);
    std::memcpy(to + static_cast<size_t>(i) * 2, &bits, 2);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace spmmd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spmmd {
namespace {
HWY_EXPORT(ScanRowImpl);
HWY_EXPORT(WidenRowImpl);
HWY_EXPORT(NarrowRowImpl);
}  // namespace

RowStats ScanRow(DType dtype, const std::byte* row, int64_t count) {
  return HWY_DYNAMIC_DISPATCH(ScanRowImpl)(dtype, row, count);
}
void WidenRow(DType from_type, const std::byte* from, float* to, int64_t count) {
  HWY_DYNAMIC_DISPATCH(WidenRowImpl)(from_type, from, to, count);
}
void NarrowRow(const float* from, DType to_type, std::byte* to, int64_t count) {
  HWY_DYNAMIC_DISPATCH(NarrowRowImpl)(from, to_type, to, count);
}
}  // namespace spmmd
#endif  // HWY_ONCE
