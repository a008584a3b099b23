// BITMAP kernels for 16-bit values on AVX-512 with VBMI2 (Ice Lake, Zen 4 and later). Included by bitmap_kernels.cc for
// that target only, inside its namespace.
//
// A step is 32 rows of one column: VPEXPANDW puts the packed values into their rows. Then either two instructions widen
// the even and the odd rows to fp32 where they are and two fused multiply-adds add them to the sums with x[k]
// broadcast; or, for bf16 weights and x (kBf16Dot), the rows of two columns are interleaved and VDPBF16PS adds both
// columns' products. In its L2 cache's reach a step takes a Zen 4 core 3.2 cycles with kBf16Dot, 4.3 with kBf16 and 5.4
// with kF16Scaled.
//
// What bounds a step are the two 256-bit FP pipes that multiply: an expansion takes 2.7 of their slots, moving its mask
// one, and the two multiply-adds of 512 bits four, which VDPBF16PS halves; 3.8 cycles with kBf16, when nothing else
// were in the way. Shifts and masking run elsewhere, the multiplication of kF16Scaled does not (but shifting instead
// takes longer). What makes it fast otherwise, each found by measurement:
// - Eight columns are expanded before the first multiply-add is issued: mixed, the expansions wait behind dependent
//   multiply-adds in the scheduler, and a step takes twice as long. KeepHere() stops the compiler from mixing them
//   again.
// - Masks go from memory to mask registers by halves (ExpandMask).
// - The sums of a group are loaded and stored once per eight columns.
// - SpMV passes over 1024 rows of eight columns at a time, whose 4 KiB of sums stay in the L1 cache. Meanwhile the next
//   eight columns are prefetched into L2. When they follow one another in memory, that is one run of lines; listed
//   columns are prefetched each at the place of the one that is being read plus a distance, which touches most lines
//   twice. Neither needs a loop, which would cost more. Prefetching into L1 wakes the hardware prefetchers, which on
//   SpMspV fetch the skipped columns as well.
#ifndef HWY_TARGET
#error "Include from bitmap_kernels.cc"
#endif

constexpr int64_t kColumnsAtOnce = 8;
constexpr int64_t kPassStrips = 16;
constexpr int64_t kFullStrips = bitmap::kStripsPerTile;

// Names each of eight columns' registers; arrays would go through memory.
#define SPMMD_EIGHT(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7)

// Mask bits from memory to the register that an expansion takes them from. In assembly because compilers shift the
// upper half of a 64-bit mask within the mask registers and bring it back for the popcount, on which the next piece
// waits. Straight from memory is faster, but for kBf16Dot (4.3 cycles a step against 4.5; 3.5 against 3.2).
template <Decode kDecode>
HWY_INLINE __mmask32 ExpandMask(const uint32_t& bits) {
  __mmask32 mask;
  if constexpr (kDecode == Decode::kBf16Dot) {
    asm("kmovd %1, %0" : "=k"(mask) : "r"(bits));
  } else {
    asm("kmovd %1, %0" : "=k"(mask) : "m"(bits));
  }
  return mask;
}

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

HWY_INLINE const uint16_t* Piece(const BitmapBlock& block, int64_t column) {
  return reinterpret_cast<const uint16_t*>(block.values) + block.piece_start(column);
}

// Where the values of the block's strips begin if the column's are spread evenly: good enough to prefetch.
HWY_INLINE const uint16_t* PieceNear(const BitmapBlock& block, int64_t column) {
  const auto length = static_cast<int64_t>(block.piece_end(column) - block.piece_start(column));
  return Piece(block, column) + length * block.begin / block.strips;
}

// Where eight columns are that will be wanted after eight others: distances in bytes from their pieces, and their
// masks. When they are eight consecutive ones of a full and whole block, also the lines of their values in a row.
struct Ahead {
  int64_t pieces[kColumnsAtOnce] = {};
  const uint64_t* masks[kColumnsAtOnce];
  const char* lines = nullptr;
  int64_t lines_a_strip = 0;  // of kFullStrips; 0: not in a row

  // The columns of `range` from `begin` on, behind those at `from`. Where there are fewer, columns already at hand are
  // fetched again, which costs little.
  Ahead(const ColumnRange& range, int64_t begin, const uint16_t* const* from, const uint64_t* from_masks) {
    const int64_t count = range.block == nullptr ? 0 : range.count - begin;
    for (int64_t j = 0; j < kColumnsAtOnce; ++j) {
      masks[j] = from_masks;
      if (j >= count) continue;
      const int64_t column = range.id(begin + j);
      pieces[j] =
          reinterpret_cast<const char*>(PieceNear(*range.block, column)) - reinterpret_cast<const char*>(from[j]);
      masks[j] = range.block->masks + column * range.block->strips;
    }
    if (range.ids != nullptr || count < kColumnsAtOnce || range.block->strips != kFullStrips || !range.block->whole()) {
      return;
    }
    const int64_t first = range.id(begin);
    const auto values =
        static_cast<int64_t>(range.block->piece_end(first + kColumnsAtOnce - 1) - range.block->piece_start(first));
    constexpr int64_t kValuesALine = 64 / sizeof(uint16_t);
    lines = reinterpret_cast<const char*>(Piece(*range.block, first));
    lines_a_strip = (values + kFullStrips * kValuesALine - 1) / (kFullStrips * kValuesALine);
  }
};

// sums[i] = fma(pairs.lower[i], x.lower[i], fma(pairs.upper[i], x.upper[i], sums[i])), which is how VDPBF16PS rounds
// (see Bf16DotIsAChain). In assembly because this target's functions must not require AVX512_BF16 as a whole.
HWY_INLINE void AddPairs(__m512i pairs, __m512i x, __m512& sums) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(pairs), "v"(x));
}

// Adds eight columns to the sums of `strips` strips from `strip` on, and advances their pieces. masks: [8][kStride],
// acc: from `strip` on. kLines: how many lines in a row are prefetched each strip, at least ahead.lines_a_strip; 0 goes
// by the distances.
template <Decode kDecode, int64_t kStride, int64_t kLines>
HWY_INLINE void EightColumns(const uint64_t* HWY_RESTRICT masks, const uint16_t** pieces, const float* x, int64_t strip,
                             int64_t strips, const Ahead& ahead, float* HWY_RESTRICT acc) {
  static_assert(kLines % kColumnsAtOnce == 0);
  const int64_t lines_step = ahead.lines_a_strip * 64;
  const char* lines = ahead.lines + strip * lines_step;
#define SPMMD_DECLARE(j)                \
  const uint16_t* piece##j = pieces[j]; \
  const __m512 x##j = _mm512_set1_ps(x[j]);
  SPMMD_EIGHT(SPMMD_DECLARE)
#undef SPMMD_DECLARE
#define SPMMD_PAIR_OF(i, j) _mm512_set1_epi32(static_cast<int>(Bf16Pair(x[i], x[j])))
  const __m512i x01 = SPMMD_PAIR_OF(0, 1), x23 = SPMMD_PAIR_OF(2, 3);
  const __m512i x45 = SPMMD_PAIR_OF(4, 5), x67 = SPMMD_PAIR_OF(6, 7);
#undef SPMMD_PAIR_OF
  for (int64_t s = 0; s < strips; ++s) {
#define SPMMD_EXPAND(j)                                                                                         \
  const auto* halves##j = reinterpret_cast<const uint32_t*>(masks + j * kStride + s);                           \
  if constexpr (kLines == 0) PrefetchToL2(reinterpret_cast<const char*>(piece##j) + ahead.pieces[j]);           \
  if constexpr (kLines > 0) PrefetchToL2(lines + 64 * j);                                                       \
  if constexpr (kLines > 8) PrefetchToL2(lines + 64 * (8 + j));                                                 \
  __m512i low##j = _mm512_maskz_expand_epi16(ExpandMask<kDecode>(halves##j[0]), _mm512_loadu_si512(piece##j));  \
  piece##j += __builtin_popcount(halves##j[0]);                                                                 \
  if constexpr (kLines == 0) PrefetchToL2(reinterpret_cast<const char*>(piece##j) + ahead.pieces[j]);           \
  __m512i high##j = _mm512_maskz_expand_epi16(ExpandMask<kDecode>(halves##j[1]), _mm512_loadu_si512(piece##j)); \
  piece##j += __builtin_popcount(halves##j[1]);                                                                 \
  KeepHere(low##j);                                                                                             \
  KeepHere(high##j);
    SPMMD_EIGHT(SPMMD_EXPAND)
#undef SPMMD_EXPAND
    __m512 sum0 = _mm512_load_ps(acc), sum1 = _mm512_load_ps(acc + 16);
    __m512 sum2 = _mm512_load_ps(acc + 32), sum3 = _mm512_load_ps(acc + 48);
    if constexpr (kDecode == Decode::kBf16Dot) {
#define SPMMD_ADD(i, j)                                             \
  AddPairs(_mm512_unpacklo_epi16(low##j, low##i), x##i##j, sum0);   \
  AddPairs(_mm512_unpackhi_epi16(low##j, low##i), x##i##j, sum1);   \
  AddPairs(_mm512_unpacklo_epi16(high##j, high##i), x##i##j, sum2); \
  AddPairs(_mm512_unpackhi_epi16(high##j, high##i), x##i##j, sum3);
      SPMMD_ADD(0, 1) SPMMD_ADD(2, 3) SPMMD_ADD(4, 5) SPMMD_ADD(6, 7)
#undef SPMMD_ADD
    } else {
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
    }
    _mm512_store_ps(acc, sum0);
    _mm512_store_ps(acc + 16, sum1);
    _mm512_store_ps(acc + 32, sum2);
    _mm512_store_ps(acc + 48, sum3);
    acc += bitmap::kStripRows;
    lines += lines_step;
  }
#define SPMMD_SAVE(j) pieces[j] = piece##j;
  SPMMD_EIGHT(SPMMD_SAVE)
#undef SPMMD_SAVE
}
#undef SPMMD_EIGHT

template <Decode kDecode>
void SpmvRange16(const ColumnRange& range, const ColumnRange& next, const float* x, float* acc) {
  const BitmapBlock& block = *range.block;
  // The masks of one pass, where they are not kFullStrips apart in memory or fewer than eight.
  alignas(64) uint64_t gathered[kColumnsAtOnce * kPassStrips];
  for (int64_t c0 = 0; c0 < range.count; c0 += kColumnsAtOnce) {
    const int64_t cols = HWY_MIN(kColumnsAtOnce, range.count - c0);
    // Columns beyond `cols` have empty masks below, and any piece will do.
    const uint16_t* pieces[kColumnsAtOnce];
    float column_x[kColumnsAtOnce];
    for (int64_t j = 0; j < kColumnsAtOnce; ++j) {
      pieces[j] =
          reinterpret_cast<const uint16_t*>(block.values) + FirstValue(block, range.id(c0 + HWY_MIN(j, cols - 1)));
      column_x[j] = j < cols ? x[c0 + j] : 0.0f;
    }
    const bool more = c0 + cols < range.count;
    const Ahead ahead(more ? range : next, more ? c0 + cols : 0, pieces, block.masks + range.id(c0) * block.strips);
    for (int64_t strip = block.begin; strip < block.end; strip += kPassStrips) {
      const int64_t strips = HWY_MIN(kPassStrips, block.end - strip);
      float* pass_acc = acc + (strip - block.begin) * bitmap::kStripRows;
      for (const uint64_t* masks : ahead.masks) {
        for (int64_t s = 0; s < kPassStrips; s += 8) PrefetchToL2(masks + strip + s);
      }
      if (range.ids == nullptr && block.strips == kFullStrips && cols == kColumnsAtOnce) {
        const uint64_t* masks = block.masks + (range.first + c0) * kFullStrips + strip;
        if (ahead.lines_a_strip == 0 || !block.whole()) {
          EightColumns<kDecode, kFullStrips, 0>(masks, pieces, column_x, strip, strips, ahead, pass_acc);
        } else if (ahead.lines_a_strip <= 8) {  // up to half of the weights
          EightColumns<kDecode, kFullStrips, 8>(masks, pieces, column_x, strip, strips, ahead, pass_acc);
        } else {
          EightColumns<kDecode, kFullStrips, 16>(masks, pieces, column_x, strip, strips, ahead, pass_acc);
        }
        continue;
      }
      for (int64_t j = 0; j < kColumnsAtOnce; ++j) {
        uint64_t* to = gathered + j * kPassStrips;
        if (j >= cols) {
          for (int64_t s = 0; s < kPassStrips; ++s) to[s] = 0;
          continue;
        }
        const uint64_t* from = block.masks + range.id(c0 + j) * block.strips + strip;
        if (strips == kPassStrips) {
          _mm512_store_si512(to, _mm512_loadu_si512(from));
          _mm512_store_si512(to + 8, _mm512_loadu_si512(from + 8));
        } else {
          for (int64_t s = 0; s < strips; ++s) to[s] = from[s];
        }
      }
      EightColumns<kDecode, kPassStrips, 0>(gathered, pieces, column_x, strip, strips, ahead, pass_acc);
    }
  }
}

// Whether VDPBF16PS adds like two fused multiply-adds, the upper element's first. Its definition leaves no other
// reading, but Zen 4's and Emerald Rapids' are the ones that were tried. The CPU must have it.
inline bool Bf16DotIsAChain() {
  // Sums that differ by order, or when only their end is rounded.
  constexpr float kCases[][4] = {{1.0f, 0x1p24f, -0x1p24f, 1.0f},
                                 {0x1p24f, 1.0f, 1.0f, -0x1p24f},
                                 {-0x1p24f, 0x1p24f, 1.5f, 1.25f},
                                 {0x1.fep-2f, 0x1.02p3f, 0x1.aap-20f, 0x1.fffffep5f}};
  for (const auto& c : kCases) {
    const float upper = c[0], lower = c[1], x = 0x1.82p1f;
    for (const float start : {c[2], c[3], -c[0] * x, -c[1] * x}) {
      __m512 sum = _mm512_set1_ps(start);
      AddPairs(_mm512_set1_epi32(static_cast<int>(Bf16Pair(upper, lower))),
               _mm512_set1_epi32(static_cast<int>(Bf16Pair(x, x))), sum);
      const float want = __builtin_fmaf(lower, x, __builtin_fmaf(upper, x, start));
      if (_mm512_cvtss_f32(sum) != want) return false;
    }
  }
  return true;
}

// Columns whose value cursors are kept in the L1 cache together with their mask lines.
constexpr int64_t kSubtileCols = 128;

// Adds kCount columns to the sums of one group: expands them all, then multiplies. x as SpmmRange has it.
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
  if constexpr (kDecode == Decode::kBf16Dot) {
    HWY_UNROLL(32)
    for (int j = 0; j < kCount; j += 2) {
      const __m512i second = j + 1 < kCount ? raw[j + 1] : _mm512_setzero_si512();
      const __m512i first_rows = _mm512_unpacklo_epi16(second, raw[j]);
      const __m512i last_rows = _mm512_unpackhi_epi16(second, raw[j]);
      HWY_UNROLL(32)
      for (int n = 0; n < kTokens; ++n) {
        const __m512i token = _mm512_castps_si512(_mm512_set1_ps(x[j / 2 * kTokens + n]));
        AddPairs(first_rows, token, sums[2 * n]);
        AddPairs(last_rows, token, sums[2 * n + 1]);
      }
    }
  } else {
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
}

template <Decode kDecode, int kTokens>
void SpmmRange16(const BitmapBlock& block, int64_t begin, int64_t end, const float* x, float* acc) {
  constexpr int kCount = 4;  // the tail below goes by its halves
  constexpr int kColumnsPerX = kDecode == Decode::kBf16Dot ? 2 : 1;
  const int64_t groups = (block.end - block.begin) * kGroupsAStrip;
  const int64_t mask_stride = block.strips * kGroupsAStrip;
  for (int64_t c0 = begin; c0 < end; c0 += kSubtileCols) {
    const int64_t cols = HWY_MIN(kSubtileCols, end - c0);
    const uint64_t first = block.piece_start(c0);
    const uint16_t* values = reinterpret_cast<const uint16_t*>(block.values) + first;
    uint32_t cursors[kSubtileCols];
    for (int64_t c = 0; c < cols; ++c) cursors[c] = static_cast<uint32_t>(FirstValue(block, c0 + c) - first);
    // The head of every piece of the next columns, which nothing else fetches in time.
    for (int64_t c = c0 + cols; c < HWY_MIN(c0 + cols + kSubtileCols, block.k); ++c) {
      PrefetchToL2(PieceNear(block, c));
      PrefetchToL2(PieceNear(block, c) + 32);
      PrefetchToL2(block.masks + c * block.strips + block.begin);
      PrefetchToL2(block.masks + c * block.strips + block.begin + 8);
    }
    const auto* masks = reinterpret_cast<const uint32_t*>(block.masks + c0 * block.strips + block.begin);
    float* group_acc = acc;
    for (int64_t g = 0; g < groups; ++g, group_acc += kTokens * kGroupRows) {
      __m512 sums[2 * kTokens];
      HWY_UNROLL(32)
      for (int i = 0; i < 2 * kTokens; ++i) sums[i] = _mm512_load_ps(group_acc + 16 * i);
      const float* token = x + (c0 - begin) / kColumnsPerX * kTokens;
      int64_t c = 0;
      for (; c + kCount <= cols; c += kCount) {
        AddColumns<kDecode, kTokens, kCount>(masks + c * mask_stride + g, mask_stride, values, cursors + c,
                                             token + c / kColumnsPerX * kTokens, sums);
      }
      if (c + 2 <= cols) {
        AddColumns<kDecode, kTokens, 2>(masks + c * mask_stride + g, mask_stride, values, cursors + c,
                                        token + c / kColumnsPerX * kTokens, sums);
        c += 2;
      }
      if (c < cols) {
        AddColumns<kDecode, kTokens, 1>(masks + c * mask_stride + g, mask_stride, values, cursors + c,
                                        token + c / kColumnsPerX * kTokens, sums);
      }
      HWY_UNROLL(32)
      for (int i = 0; i < 2 * kTokens; ++i) _mm512_store_ps(group_acc + 16 * i, sums[i]);
    }
  }
}
