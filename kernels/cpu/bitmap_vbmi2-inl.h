// BITMAP kernels for 16-bit values on AVX-512 with VBMI2 (Ice Lake, Zen 4 and later). Included by bitmap_kernels.cc for
// that target only, inside its namespace.
//
// A step is 32 rows of one column: VPEXPANDW puts the packed values into their rows, two instructions widen the even
// and the odd rows to fp32 where they are, two fused multiply-adds add them to the sums with x[k] broadcast. Zen 4
// takes 4.6 cycles a step for bf16 and 5.5 for fp16 when data is in its caches, which keeps two cores at their memory
// bandwidth.
//
// What makes it fast, each found by measurement:
// - Eight columns are expanded before the first multiply-add is issued: mixed, the expansions wait behind dependent
//   multiply-adds in the scheduler, and a step takes twice as long. KeepHere() stops the compiler from mixing them
//   again.
// - The sums of a group are loaded and stored once per eight columns.
// - SpMV passes over 1024 rows of eight columns at a time, whose 4 KiB of sums stay in the L1 cache. Meanwhile exactly
// the
//   lines of the next eight columns are prefetched into L2. Prefetching into L1 wakes the hardware prefetchers, which
//   on SpMspV fetch the skipped columns as well.
// What bounds a step are the four 256-bit FP pipes: expansion, widening and multiply-adds take 16 (bf16) or 19 (fp16)
// of their slots.
#ifndef HWY_TARGET
#error "Include from bitmap_kernels.cc"
#endif

constexpr int64_t kColumnsAtOnce = 8;
constexpr int64_t kPassStrips = 16;
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

HWY_INLINE const uint16_t* Piece(const BitmapBlock& block, int64_t column) {
  return reinterpret_cast<const uint16_t*>(block.values) + block.piece_start(column);
}

// Fetches the pieces and masks of up to eight columns, spread evenly over a number of steps.
class Prefetcher {
 public:
  // The first columns of `range` from `begin` on.
  Prefetcher(const ColumnRange& range, int64_t begin, int64_t steps) {
    count_ = range.block == nullptr ? 0 : HWY_MIN(kColumnsAtOnce, range.count - begin);
    if (count_ <= 0) return;
    const BitmapBlock& block = *range.block;
    steps_per_column_ = HWY_MAX(steps / count_, 1);
    const int64_t mask_lines = (block.strips * static_cast<int64_t>(sizeof(uint64_t)) + 63) / 64;
    mask_bytes_ = (mask_lines + steps_per_column_ - 1) / steps_per_column_ * 64;
    for (int64_t j = 0; j < count_; ++j) {
      const int64_t column = range.id(begin + j);
      Column& to = columns_[j];
      to.values = reinterpret_cast<const char*>(Piece(block, column));
      to.end = reinterpret_cast<const char*>(block.values) + block.piece_end(column) * sizeof(uint16_t);
      to.masks = reinterpret_cast<const char*>(block.masks + column * block.strips);
      to.masks_end = to.masks + mask_lines * 64;
      const int64_t lines = (to.end - to.values + 127) / 64;
      to.bytes = (lines + steps_per_column_ - 1) / steps_per_column_ * 64;
    }
  }

  HWY_INLINE void Step() {
    if (current_ >= count_) return;
    Column& column = columns_[current_];
    const char* const end = HWY_MIN(column.values + column.bytes, column.end);
    for (; column.values < end; column.values += 64) PrefetchToL2(column.values);
    const char* const masks_end = HWY_MIN(column.masks + mask_bytes_, column.masks_end);
    for (; column.masks < masks_end; column.masks += 64) PrefetchToL2(column.masks);
    if (++step_ == steps_per_column_) {
      step_ = 0;
      ++current_;
    }
  }

 private:
  struct Column {
    const char* values;
    const char* end;
    const char* masks;
    const char* masks_end;
    int64_t bytes;  // a step
  };
  Column columns_[kColumnsAtOnce];
  int64_t count_ = 0;
  int64_t steps_per_column_ = 1;
  int64_t mask_bytes_ = 0;
  int64_t current_ = 0;
  int64_t step_ = 0;
};

// Adds eight columns to the sums of `strips` strips and advances their pieces. masks: [8][kStride].
template <Decode kDecode, int64_t kStride>
HWY_INLINE void EightColumns(const uint64_t* HWY_RESTRICT masks, const uint16_t** pieces, const float* x,
                             int64_t strips, Prefetcher& prefetcher, float* HWY_RESTRICT acc) {
#define SPMMD_DECLARE(j)                \
  const uint16_t* piece##j = pieces[j]; \
  const __m512 x##j = _mm512_set1_ps(x[j]);
  SPMMD_EIGHT(SPMMD_DECLARE)
#undef SPMMD_DECLARE
  for (int64_t s = 0; s < strips; ++s) {
    prefetcher.Step();
#define SPMMD_EXPAND(j)                                                                    \
  const uint64_t mask##j = masks[j * kStride + s];                                         \
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
      pieces[j] = Piece(block, range.id(c0 + HWY_MIN(j, cols - 1)));
      column_x[j] = j < cols ? x[c0 + j] : 0.0f;
    }
    const bool more = c0 + cols < range.count;
    Prefetcher prefetcher(more ? range : next, more ? c0 + cols : 0, block.strips);
    for (int64_t strip = 0; strip < block.strips; strip += kPassStrips) {
      const int64_t strips = HWY_MIN(kPassStrips, block.strips - strip);
      float* pass_acc = acc + strip * bitmap::kStripRows;
      if (range.ids == nullptr && block.strips == kFullStrips && cols == kColumnsAtOnce) {
        const uint64_t* masks = block.masks + (range.first + c0) * kFullStrips + strip;
        EightColumns<kDecode, kFullStrips>(masks, pieces, column_x, strips, prefetcher, pass_acc);
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
      EightColumns<kDecode, kPassStrips>(gathered, pieces, column_x, strips, prefetcher, pass_acc);
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
