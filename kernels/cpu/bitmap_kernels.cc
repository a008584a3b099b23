#include "kernels/cpu/bitmap_kernels.h"

#include <bit>
#include <cstring>

#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/bitmap_kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spmmd::cpu {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;
constexpr int kLanes = static_cast<int>(HWY_LANES(float)) < static_cast<int>(kGroupRows)
                           ? static_cast<int>(HWY_LANES(float))
                           : static_cast<int>(kGroupRows);
constexpr uint32_t kLaneMask = kLanes == 32 ? ~0u : (1u << kLanes) - 1;

// Values of a column above the strips that a call works on: set bits of its first `count` mask words.
HWY_INLINE int64_t ValuesBefore(const uint64_t* masks, int64_t count) {
  int64_t values = 0;
  int64_t i = 0;
#if HWY_TARGET == HWY_AVX3_DL
  __m512i sums = _mm512_setzero_si512();
  for (; i + 8 <= count; i += 8) sums = _mm512_add_epi64(sums, _mm512_popcnt_epi64(_mm512_loadu_si512(masks + i)));
  values = _mm512_reduce_add_epi64(sums);
#endif
  for (; i < count; ++i) values += __builtin_popcountll(masks[i]);
  return values;
}

// Index into the values of the first that belongs to column `column` and to the block's strips.
HWY_INLINE uint64_t FirstValue(const BitmapBlock& block, int64_t column) {
  const uint64_t start = block.piece_start(column);
  if (block.begin == 0) return start;
  return start + static_cast<uint64_t>(ValuesBefore(block.masks + column * block.strips, block.begin));
}

constexpr int64_t kGroupsAStrip = bitmap::kStripRows / kGroupRows;

#if HWY_TARGET == HWY_AVX3_DL
#include "kernels/cpu/bitmap_vbmi2-inl.h"  // NOLINT(build/include)
#endif

template <Decode kDecode>
struct StoredType {
  using Type = uint16_t;
};
template <>
struct StoredType<Decode::kF32> {
  using Type = float;
};
template <Decode kDecode>
using Stored = typename StoredType<kDecode>::Type;

#if HWY_TARGET == HWY_AVX2
// For each 8-bit mask the source lane of every lane; 0x80 marks a zero.
struct ExpandTable {
  alignas(8) int8_t lanes[256][8];
  constexpr ExpandTable() : lanes() {
    for (int mask = 0; mask < 256; ++mask) {
      int next = 0;
      for (int lane = 0; lane < 8; ++lane) {
        lanes[mask][lane] = ((mask >> lane) & 1) != 0 ? static_cast<int8_t>(next++) : static_cast<int8_t>(-128);
      }
    }
  }
};
constexpr ExpandTable kExpandTable;
#endif

// The next popcount(bits) values at `from`, widened, in the lanes whose bits are set; zeros elsewhere. Reads up to one
// full vector of values.
template <Decode kDecode>
HWY_INLINE FloatVec ExpandLanes(const Stored<kDecode>* from, uint32_t bits) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  __m512 packed;
  if constexpr (kDecode == Decode::kF32) {
    packed = _mm512_loadu_ps(from);
  } else {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    if constexpr (kDecode == Decode::kBf16) {
      packed = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
    } else {
      packed = _mm512_cvtph_ps(raw);
    }
  }
  return FloatVec{_mm512_maskz_expand_ps(static_cast<__mmask16>(bits), packed)};
#elif HWY_TARGET == HWY_AVX2
  __m256 packed;
  if constexpr (kDecode == Decode::kF32) {
    packed = _mm256_loadu_ps(from);
  } else {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    if constexpr (kDecode == Decode::kBf16) {
      packed = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
    } else {
      packed = _mm256_cvtph_ps(raw);
    }
  }
  const __m256i lanes =
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kExpandTable.lanes[bits])));
  const __m256i zeroed = _mm256_srai_epi32(lanes, 31);
  return FloatVec{_mm256_andnot_ps(_mm256_castsi256_ps(zeroed), _mm256_permutevar8x32_ps(packed, lanes))};
#else
  HWY_ALIGN float lanes[kLanes] = {};
  for (; bits != 0; bits &= bits - 1, ++from) {
    float value;
    if constexpr (kDecode == Decode::kF32) {
      value = *from;
    } else if constexpr (kDecode == Decode::kBf16) {
      value = Bf16ToFloat(*from);
    } else {
      value = F16ToFloat(*from);
    }
    lanes[__builtin_ctz(bits)] = value;
  }
  return hn::Load(FloatTag(), lanes);
#endif
}

// Vectors of rows that one step takes: as many sums as leave registers for the weights.
constexpr int VectorsPerStep(int tokens) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  return tokens <= 10 ? 2 : 1;
#else
  return tokens <= 2 ? 4 : tokens <= 4 ? 2 : 1;
#endif
}

constexpr int64_t kCursorCols = 128;  // columns whose cursors and mask lines stay in the L1 cache

template <Decode kDecode, int kTokens>
void AddRange(const ColumnRange& columns, const float* x, float* acc) {
  const BitmapBlock& block = *columns.block;
  constexpr int kVectors = VectorsPerStep(kTokens);
  constexpr int kStepRows = kVectors * kLanes;
  static_assert(kGroupRows % kStepRows == 0);
  const FloatTag d;
  const auto* values = reinterpret_cast<const Stored<kDecode>*>(block.values);
  const int64_t groups = (block.end - block.begin) * kGroupsAStrip;
  const auto* masks = reinterpret_cast<const uint32_t*>(block.masks + block.begin);
  for (int64_t c0 = 0; c0 < columns.count; c0 += kCursorCols) {
    const int64_t cols = HWY_MIN(kCursorCols, columns.count - c0);
    uint64_t cursors[kCursorCols];
    const uint32_t* column_masks[kCursorCols];
    for (int64_t c = 0; c < cols; ++c) {
      const int64_t column = columns.id(c0 + c);
      cursors[c] = FirstValue(block, column);
      column_masks[c] = masks + column * block.strips * kGroupsAStrip;
    }
    for (int64_t g = 0; g < groups; ++g) {
      for (int part = 0; part < kGroupRows; part += kStepRows) {
        FloatVec sums[kTokens * kVectors];
        float* at = acc + g * kTokens * kGroupRows + part;
        HWY_UNROLL(32)
        for (int n = 0; n < kTokens; ++n) {
          HWY_UNROLL(32)
          for (int v = 0; v < kVectors; ++v) {
            sums[n * kVectors + v] = hn::Load(d, at + n * kGroupRows + int64_t{v} * kLanes);
          }
        }
        for (int64_t c = 0; c < cols; ++c) {
          const uint32_t bits = column_masks[c][g] >> part;
          const Stored<kDecode>* from = values + cursors[c];
          FloatVec w[kVectors];
          HWY_UNROLL(32)
          for (int v = 0; v < kVectors; ++v) {
            const uint32_t lane_bits = (bits >> (v * kLanes)) & kLaneMask;
            w[v] = ExpandLanes<kDecode>(from, lane_bits);
            from += __builtin_popcount(lane_bits);
          }
          cursors[c] = static_cast<uint64_t>(from - values);
          const float* token = x + (c0 + c) * kTokens;
          HWY_UNROLL(32)
          for (int n = 0; n < kTokens; ++n) {
            const FloatVec xn = hn::Set(d, token[n]);
            HWY_UNROLL(32)
            for (int v = 0; v < kVectors; ++v) {
              sums[n * kVectors + v] = hn::MulAdd(w[v], xn, sums[n * kVectors + v]);
            }
          }
        }
        HWY_UNROLL(32)
        for (int n = 0; n < kTokens; ++n) {
          HWY_UNROLL(32)
          for (int v = 0; v < kVectors; ++v) {
            hn::Store(sums[n * kVectors + v], d, at + n * kGroupRows + int64_t{v} * kLanes);
          }
        }
      }
    }
  }
}

bool HasScaledF16Impl() { return HWY_TARGET == HWY_AVX3_DL; }

bool HasBf16DotImpl() {
#if HWY_TARGET == HWY_AVX3_DL
  // Intel's multiplies half as fast as fused multiply-add: on Emerald Rapids a step takes 6 cycles with it and 4.3
  // without.
  static const bool fast = __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512bf16") && Bf16DotIsAChain();
  return fast;
#else
  return false;
#endif
}

RowOrder RowOrderOfImpl(Decode decode) {
  if (HWY_TARGET != HWY_AVX3_DL || decode == Decode::kF32) return RowOrder::kNatural;
  return decode == Decode::kBf16Dot ? RowOrder::kFours : RowOrder::kEvenOdd;
}

void SpmvRangeImpl(const ColumnRange& columns, const ColumnRange& next, Decode decode, const float* x, float* acc) {
  (void)next;  // the hardware's own prefetching is enough for the slower targets
  switch (decode) {
#if HWY_TARGET == HWY_AVX3_DL
    case Decode::kF16:
      return SpmvRange16<Decode::kF16>(columns, next, x, acc);
    case Decode::kF16Scaled:
      return SpmvRange16<Decode::kF16Scaled>(columns, next, x, acc);
    case Decode::kBf16:
      return SpmvRange16<Decode::kBf16>(columns, next, x, acc);
    case Decode::kBf16Dot:
      return SpmvRange16<Decode::kBf16Dot>(columns, next, x, acc);
#else
    case Decode::kF16:
    case Decode::kF16Scaled:
      return AddRange<Decode::kF16, 1>(columns, x, acc);
    case Decode::kBf16:
    case Decode::kBf16Dot:
      return AddRange<Decode::kBf16, 1>(columns, x, acc);
#endif
    case Decode::kF32:
      return AddRange<Decode::kF32, 1>(columns, x, acc);
  }
}

template <int kTokens>
void SpmmTokens(const BitmapBlock& block, Decode decode, int64_t begin, int64_t end, const float* x, float* acc) {
  switch (decode) {
#if HWY_TARGET == HWY_AVX3_DL
    case Decode::kF16:
      return SpmmRange16<Decode::kF16, kTokens>(block, begin, end, x, acc);
    case Decode::kF16Scaled:
      return SpmmRange16<Decode::kF16Scaled, kTokens>(block, begin, end, x, acc);
    case Decode::kBf16:
      return SpmmRange16<Decode::kBf16, kTokens>(block, begin, end, x, acc);
    case Decode::kBf16Dot:
      return SpmmRange16<Decode::kBf16Dot, kTokens>(block, begin, end, x, acc);
#else
    case Decode::kF16:
    case Decode::kF16Scaled:
      return AddRange<Decode::kF16, kTokens>({&block, nullptr, begin, end - begin}, x, acc);
    case Decode::kBf16:
    case Decode::kBf16Dot:
      return AddRange<Decode::kBf16, kTokens>({&block, nullptr, begin, end - begin}, x, acc);
#endif
    case Decode::kF32:
      return AddRange<Decode::kF32, kTokens>({&block, nullptr, begin, end - begin}, x, acc);
  }
}

void SpmmRangeImpl(const BitmapBlock& block, Decode decode, int64_t begin, int64_t end, const float* x, int tokens,
                   float* acc) {
  switch (tokens) {
    case 1:
      return SpmvRangeImpl({&block, nullptr, begin, end - begin}, {}, decode, x, acc);
    case 2:
      return SpmmTokens<2>(block, decode, begin, end, x, acc);
    case 3:
      return SpmmTokens<3>(block, decode, begin, end, x, acc);
    case 4:
      return SpmmTokens<4>(block, decode, begin, end, x, acc);
    case 6:
      return SpmmTokens<6>(block, decode, begin, end, x, acc);
    case 8:
      return SpmmTokens<8>(block, decode, begin, end, x, acc);
    case 10:
      return SpmmTokens<10>(block, decode, begin, end, x, acc);
    default:
      return SpmmTokens<12>(block, decode, begin, end, x, acc);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace spmmd::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spmmd::cpu {
namespace {
HWY_EXPORT(HasScaledF16Impl);
HWY_EXPORT(HasBf16DotImpl);
HWY_EXPORT(RowOrderOfImpl);
HWY_EXPORT(SpmvRangeImpl);
HWY_EXPORT(SpmmRangeImpl);
}  // namespace

bool HasScaledF16() { return HWY_DYNAMIC_DISPATCH(HasScaledF16Impl)(); }

bool HasBf16Dot() { return HWY_DYNAMIC_DISPATCH(HasBf16DotImpl)(); }

RowOrder RowOrderOf(Decode decode) { return HWY_DYNAMIC_DISPATCH(RowOrderOfImpl)(decode); }

void SpmvRange(const ColumnRange& columns, const ColumnRange& next, Decode decode, const float* x, float* acc) {
  HWY_DYNAMIC_DISPATCH(SpmvRangeImpl)(columns, next, decode, x, acc);
}

int TileTokens(int tokens) {
  for (const int size : {1, 2, 3, 4, 6, 8, 10}) {
    if (tokens <= size) return size;
  }
  return kMaxTileTokens;
}

void SpmmRange(const BitmapBlock& block, Decode decode, int64_t begin, int64_t end, const float* x, int tokens,
               float* acc) {
  HWY_DYNAMIC_DISPATCH(SpmmRangeImpl)(block, decode, begin, end, x, tokens, acc);
}
}  // namespace spmmd::cpu
#endif  // HWY_ONCE
