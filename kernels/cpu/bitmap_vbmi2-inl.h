// BITMAP kernels for 16-bit values on AVX-512 with VBMI2 (Ice Lake, Zen 4 and later). Included by bitmap_kernels.cc for
// that target only, inside its namespace.
//
// A step is 32 rows of one column: VPEXPANDW puts the packed values into their rows, two instructions widen the even
// and the odd rows to fp32 where they are, two fused multiply-adds add them to the sums with x[k] broadcast. Zen 4
// takes 4.1 cycles a step for bf16 and 5.2 for fp16 when data is in its caches, which keeps two cores at their memory
// bandwidth.
//
// What makes it fast, each found by measurement:
// - Eight columns are expanded before the first multiply-add is issued: mixed, the expansions wait behind dependent
//   multiply-adds in the scheduler, and a step takes twice as long. KeepHere() stops the compiler from mixing them
//   again.
// - The sums of a group are loaded and stored once per eight columns.
// - Values are prefetched into L2 two column groups ahead. Prefetching into L1 wakes the hardware prefetchers, which on
//   SpMspV fetch the skipped columns as well.
#ifndef HWY_TARGET
#error "Include from bitmap_kernels.cc"
#endif

constexpr int64_t kColumnsAtOnce = 8;
constexpr int64_t kFullStrips = bitmap::kStripsPerTile;

// Names each of eight columns' registers; arrays would go through memory.
#define SPMMD_EIGHT(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7)

HWY_INLINE void KeepHere(__m512i& v) { asm volatile("" : "+v"(v)); }

struct EvenOdd {
  __m512 even;
  __m512 odd;
};

template <Decode kDecode>
HWY_INLINE EvenOdd Widen(__m512i v) {
  if constexpr (kDecode == Decode::kBf16) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  } else if constexpr (kDecode == Decode::kF16Scaled) {
    // Sign-extended and shifted left by 13, exponent and mantissa are where binary32 has them; the mask removes the
    // copies of the sign. The multiplication does it for the even rows on ports that the odd rows' shift does not use.
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(0x8fffe000u));
    const __m512i even = _mm512_madd_epi16(v, _mm512_set1_epi32(1 << 13));
    const __m512i odd = _mm512_srai_epi32(v, 3);
    return {_mm512_castsi512_ps(_mm512_and_si512(even, mask)), _mm512_castsi512_ps(_mm512_and_si512(odd, mask))};
  } else {
    return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)),
            _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16)))};
  }
}

HWY_INLINE void PrefetchToL2(const void* address) { _mm_prefetch(static_cast<const char*>(address), _MM_HINT_T1); }

// What EightColumns prefetches while it works: during strip s, `lines(s)` cache lines from values(s), one from
// masks(s).
struct NoPrefetch {
  HWY_INLINE void Strip(int64_t /*s*/) {}
};

// Consecutive columns: their values and masks are consecutive too.
struct PrefetchConsecutive {
  const char* values;
  const char* masks;
  int64_t lines;

  PrefetchConsecutive(const BitmapBlock& block, int64_t begin, int64_t end) {
    const uint64_t from = block.piece_start(begin);
    const auto bytes = static_cast<int64_t>((block.piece_end(end - 1) - from) * sizeof(uint16_t));
    values = reinterpret_cast<const char*>(block.values) + from * sizeof(uint16_t);
    masks = reinterpret_cast<const char*>(block.masks + begin * block.strips);
    lines = (bytes + 64 * block.strips - 1) / (64 * block.strips);
  }
  HWY_INLINE void Strip(int64_t /*s*/) {
    for (int64_t i = 0; i < lines; ++i, values += 64) PrefetchToL2(values);
    PrefetchToL2(masks);
    masks += 64;
  }
};

// Listed columns: each is fetched during two strips.
struct PrefetchListed {
  const char* values[kColumnsAtOnce];
  const char* masks[kColumnsAtOnce];
  int64_t lines[kColumnsAtOnce];

  PrefetchListed(const BitmapBlock& block, const uint32_t* columns, int64_t count) {
    for (int64_t j = 0; j < kColumnsAtOnce; ++j) {
      const int64_t column = columns[j < count ? j : count - 1];
      const uint64_t from = block.piece_start(column);
      const auto bytes = static_cast<int64_t>((block.piece_end(column) - from) * sizeof(uint16_t));
      values[j] = reinterpret_cast<const char*>(block.values) + from * sizeof(uint16_t);
      masks[j] = reinterpret_cast<const char*>(block.masks + column * block.strips);
      lines[j] = (bytes + 127) / 128;
    }
  }
  HWY_INLINE void Strip(int64_t s) {
    const int64_t j = s / 2;
    const int64_t second = s % 2;
    const char* from = values[j] + second * lines[j] * 64;
    for (int64_t i = 0; i < lines[j]; ++i) PrefetchToL2(from + 64 * i);
    PrefetchToL2(masks[j] + second * 64);
  }
};

// Adds eight columns to the sums of `strips` strips. masks: [8][kFullStrips].
template <Decode kDecode, class Prefetch>
HWY_INLINE void EightColumns(const uint64_t* HWY_RESTRICT masks, const uint16_t* const* pieces, const float* x,
                             int64_t strips, Prefetch prefetch, float* HWY_RESTRICT acc) {
#define SPMMD_DECLARE(j)                \
  const uint16_t* piece##j = pieces[j]; \
  const __m512 x##j = _mm512_set1_ps(x[j]);
  SPMMD_EIGHT(SPMMD_DECLARE)
#undef SPMMD_DECLARE
  for (int64_t s = 0; s < strips; ++s) {
    prefetch.Strip(s);
#define SPMMD_EXPAND(j)                                                                    \
  const uint64_t mask##j = masks[j * kFullStrips + s];                                     \
  const auto low_mask##j = static_cast<uint32_t>(mask##j);                                 \
  const auto high_mask##j = static_cast<uint32_t>(mask##j >> 32);                          \
  __m512i low##j = _mm512_maskz_expand_epi16(low_mask##j, _mm512_loadu_si512(piece##j));   \
  piece##j += __builtin_popcount(low_mask##j);                                             \
  __m512i high##j = _mm512_maskz_expand_epi16(high_mask##j, _mm512_loadu_si512(piece##j)); \
  piece##j += __builtin_popcount(high_mask##j);                                            \
  KeepHere(low##j);                                                                        \
  KeepHere(high##j);
    SPMMD_EIGHT(SPMMD_EXPAND)
#undef SPMMD_EXPAND
    __m512 sum0 = _mm512_load_ps(acc), sum1 = _mm512_load_ps(acc + 16);
    __m512 sum2 = _mm512_load_ps(acc + 32), sum3 = _mm512_load_ps(acc + 48);
#define SPMMD_ADD(j)                               \
  {                                                \
    const EvenOdd low = Widen<kDecode>(low##j);    \
    const EvenOdd high = Widen<kDecode>(high##j);  \
    sum0 = _mm512_fmadd_ps(low.even, x##j, sum0);  \
    sum1 = _mm512_fmadd_ps(low.odd, x##j, sum1);   \
    sum2 = _mm512_fmadd_ps(high.even, x##j, sum2); \
    sum3 = _mm512_fmadd_ps(high.odd, x##j, sum3);  \
  }
    SPMMD_EIGHT(SPMMD_ADD)
#undef SPMMD_ADD
    _mm512_store_ps(acc, sum0);
    _mm512_store_ps(acc + 16, sum1);
    _mm512_store_ps(acc + 32, sum2);
    _mm512_store_ps(acc + 48, sum3);
    acc += bitmap::kStripRows;
  }
}
#undef SPMMD_EIGHT

HWY_INLINE const uint16_t* Piece(const BitmapBlock& block, int64_t column) {
  return reinterpret_cast<const uint16_t*>(block.values) + block.piece_start(column);
}

// Up to eight columns whose masks are not [8][kFullStrips] in memory: copied to where they are. Columns beyond `count`
// get empty masks.
struct GatheredColumns {
  alignas(64) uint64_t masks[kColumnsAtOnce * kFullStrips];
  const uint16_t* pieces[kColumnsAtOnce];
  float x[kColumnsAtOnce];

  HWY_INLINE void Set(const BitmapBlock& block, int64_t j, int64_t column, float value) {
    const uint64_t* from = block.masks + column * block.strips;
    if (block.strips == kFullStrips) {
      for (int64_t s = 0; s < kFullStrips; s += 8) {
        _mm512_store_si512(masks + j * kFullStrips + s, _mm512_loadu_si512(from + s));
      }
    } else {
      for (int64_t s = 0; s < block.strips; ++s) masks[j * kFullStrips + s] = from[s];
    }
    pieces[j] = Piece(block, column);
    x[j] = value;
  }
  HWY_INLINE void ClearFrom(int64_t count) {
    for (int64_t j = count; j < kColumnsAtOnce; ++j) {
      for (int64_t s = 0; s < kFullStrips; ++s) masks[j * kFullStrips + s] = 0;
      pieces[j] = pieces[0];
      x[j] = 0.0f;
    }
  }
};

// Distance of the prefetches: two groups of eight columns, about 16 KiB of values at 50 %.
constexpr int64_t kPrefetchColumns = 2 * kColumnsAtOnce;

template <Decode kDecode>
void SpmvRange16(const BitmapBlock& block, int64_t begin, int64_t end, const float* x, float* acc) {
  for (int64_t c = begin; c < end; c += kColumnsAtOnce) {
    const int64_t count = HWY_MIN(kColumnsAtOnce, end - c);
    if (count == kColumnsAtOnce && block.strips == kFullStrips) {
      const uint16_t* pieces[kColumnsAtOnce];
      for (int64_t j = 0; j < kColumnsAtOnce; ++j) pieces[j] = Piece(block, c + j);
      // Beyond `end` too: whoever works there next finds it in the shared cache at least.
      const int64_t ahead = HWY_MIN(c + kPrefetchColumns, block.k - 1);
      const PrefetchConsecutive prefetch(block, ahead, HWY_MIN(ahead + kColumnsAtOnce, block.k));
      EightColumns<kDecode>(block.masks + c * kFullStrips, pieces, x + (c - begin), kFullStrips, prefetch, acc);
    } else {
      GatheredColumns columns;
      for (int64_t j = 0; j < count; ++j) columns.Set(block, j, c + j, x[c - begin + j]);
      columns.ClearFrom(count);
      EightColumns<kDecode>(columns.masks, columns.pieces, columns.x, block.strips, NoPrefetch(), acc);
    }
  }
}

template <Decode kDecode>
void SpmspvRange16(const BitmapBlock& block, const uint32_t* ids, const float* x, int64_t total, float* acc) {
  GatheredColumns columns;
  for (int64_t i = 0; i < total; i += kColumnsAtOnce) {
    const int64_t count = HWY_MIN(kColumnsAtOnce, total - i);
    for (int64_t j = 0; j < count; ++j) columns.Set(block, j, ids[i + j], x[i + j]);
    if (count == kColumnsAtOnce) {
      const int64_t ahead = HWY_MIN(i + kPrefetchColumns, total - 1);
      const PrefetchListed prefetch(block, ids + ahead, total - ahead);
      EightColumns<kDecode>(columns.masks, columns.pieces, columns.x, block.strips, prefetch, acc);
    } else {
      columns.ClearFrom(count);
      EightColumns<kDecode>(columns.masks, columns.pieces, columns.x, block.strips, NoPrefetch(), acc);
    }
  }
}

// Columns whose value cursors are kept in the L1 cache together with their mask lines.
constexpr int64_t kSubtileCols = 128;

// Adds kCount columns to the sums of one group: expands them all, then multiplies.
template <Decode kDecode, int kTokens, int kCount>
HWY_INLINE void AddColumns(const uint32_t* masks, int64_t mask_stride, const uint16_t* values, uint32_t* cursors,
                           const float* HWY_RESTRICT x, __m512* sums) {
  __m512i raw[kCount];
  HWY_UNROLL(32)
  for (int j = 0; j < kCount; ++j) {
    const uint32_t mask = masks[j * mask_stride];
    const uint16_t* from = values + cursors[j];
    raw[j] = _mm512_maskz_expand_epi16(mask, _mm512_loadu_si512(from));
    cursors[j] += static_cast<uint32_t>(__builtin_popcount(mask));
    PrefetchToL2(from + 64);
    KeepHere(raw[j]);
  }
  HWY_UNROLL(32)
  for (int j = 0; j < kCount; ++j) {
    const EvenOdd w = Widen<kDecode>(raw[j]);
    HWY_UNROLL(32)
    for (int n = 0; n < kTokens; ++n) {
      const __m512 token = _mm512_set1_ps(x[j * kTokens + n]);
      sums[2 * n] = _mm512_fmadd_ps(w.even, token, sums[2 * n]);
      sums[2 * n + 1] = _mm512_fmadd_ps(w.odd, token, sums[2 * n + 1]);
    }
  }
}

template <Decode kDecode, int kTokens>
void SpmmRange16(const BitmapBlock& block, int64_t begin, int64_t end, const float* x, float* acc) {
  constexpr int kCount = 4;
  const int64_t groups = block.groups();
  for (int64_t c0 = begin; c0 < end; c0 += kSubtileCols) {
    const int64_t cols = HWY_MIN(kSubtileCols, end - c0);
    const uint64_t first = block.piece_start(c0);
    const uint16_t* values = reinterpret_cast<const uint16_t*>(block.values) + first;
    uint32_t cursors[kSubtileCols];
    for (int64_t c = 0; c < cols; ++c) cursors[c] = static_cast<uint32_t>(block.piece_start(c0 + c) - first);
    // The head of every piece of the next columns, which nothing else fetches in time.
    for (int64_t c = c0 + cols; c < HWY_MIN(c0 + cols + kSubtileCols, block.k); ++c) {
      PrefetchToL2(Piece(block, c));
      PrefetchToL2(Piece(block, c) + 32);
      PrefetchToL2(block.masks + c * block.strips);
      PrefetchToL2(block.masks + c * block.strips + 8);
    }
    const auto* masks = reinterpret_cast<const uint32_t*>(block.masks + c0 * block.strips);
    float* group_acc = acc;
    for (int64_t g = 0; g < groups; ++g, group_acc += kTokens * kGroupRows) {
      __m512 sums[2 * kTokens];
      HWY_UNROLL(32)
      for (int i = 0; i < 2 * kTokens; ++i) sums[i] = _mm512_load_ps(group_acc + 16 * i);
      const float* token = x + (c0 - begin) * kTokens;
      int64_t c = 0;
      for (; c + kCount <= cols; c += kCount) {
        AddColumns<kDecode, kTokens, kCount>(masks + c * groups + g, groups, values, cursors + c, token + c * kTokens,
                                             sums);
      }
      for (; c < cols; ++c) {
        AddColumns<kDecode, kTokens, 1>(masks + c * groups + g, groups, values, cursors + c, token + c * kTokens, sums);
      }
      HWY_UNROLL(32)
      for (int i = 0; i < 2 * kTokens; ++i) _mm512_store_ps(group_acc + 16 * i, sums[i]);
    }
  }
}
