// Work is cut into (row block, column tile) pairs: 4096 x 256 weights, about 40 us of one core for one token. Where
// those are few for the threads, each is cut into ranges of strips. A pair yields partial sums; a block's are added in
// column order, so that the result depends neither on the number of threads nor on which of them was first.
#include "kernels/cpu/bitmap_matmul.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/bitmap_kernels.h"
#include "kernels/cpu/epilogue.h"
#include "kernels/cpu/workspace.h"
#include "kernels/format/bitmap.h"
#include "kernels/format/dense_rows.h"

namespace spmmd::cpu {
namespace {

// Tokens of one pass over the weights. With more, a tile's sums would not fit a usual L2 cache beside its weights.
constexpr int64_t kPassTokens = int64_t{4} * kMaxTileTokens;

// Beyond this much memory for partial sums, threads take whole row blocks instead.
constexpr size_t kMaxPartialFloats = size_t{16} << 20;

// Tasks that a thread should have, and the fewest strips of one. Several tokens take long enough that one thread which
// is held up should not hold up the rest (4096x4096, 8 tokens, 16 threads: 405 us instead of 600). One token is bound
// by memory, and finding where a column's values begin reads the masks above once more: as few tasks as keep all
// threads busy (1536x384: 21 us instead of 43; but 4096x4096 from memory, 70 % zeros, takes 290 us in four times as
// many tasks, and 155 in whole tiles).
constexpr int64_t TasksPerThread(int64_t tokens) { return tokens == 1 ? 1 : 4; }
constexpr int64_t kMinTaskStrips = 4;

// Up to this many weights times tokens (about 20 us of one core) the calling thread does everything itself: waking
// others would take as long.
constexpr int64_t kSerialWork = int64_t{1} << 19;

// True when the calling thread treats subnormal numbers as zeros, which kF16Scaled cannot work with. (Pool threads
// never do. kBf16Dot meets none.)
bool SubnormalsAreZeros() {
#if defined(__x86_64__)
  constexpr unsigned kDenormalsAreZeros = 0x0040;
  return (_mm_getcsr() & kDenormalsAreZeros) != 0;
#else
  return false;
#endif
}

// The decoder that takes any x.
Decode GeneralDecode(DType dtype) {
  return dtype == DType::kF16 ? Decode::kF16 : dtype == DType::kBf16 ? Decode::kBf16 : Decode::kF32;
}

// The fastest decoder for the weights, which need not take every x (Fit).
Decode FastDecode(const PackedLayer& w) {
  if (w.params[bitmap::kNonfiniteParam] == 0) {
    if (w.dtype == DType::kF16 && HasScaledF16() && !SubnormalsAreZeros()) return Decode::kF16Scaled;
    if (w.dtype == DType::kBf16 && w.params[bitmap::kNoTinyParam] != 0 && HasBf16Dot()) return Decode::kBf16Dot;
  }
  return GeneralDecode(w.dtype);
}

// Multiplies by kScaledF16Factor in place. False, with `values` in an undefined state, when one is too large or not
// finite.
bool ScaleForF16(float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
    values[i] *= kScaledF16Factor;
  }
  return largest < std::bit_cast<uint32_t>(kScaledF16Limit);
}

// 0 when all of kCount values are zeros or finite bf16 values of at least kBf16DotMinX.
template <int64_t kCount>
uint32_t UnfitForBf16Dot(const float* values) {
  constexpr uint32_t kFirst = std::bit_cast<uint32_t>(kBf16DotMinX), kInfinity = 0x7f800000u;
  uint32_t unfit = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(values[i]);
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Of two numbers below 2^31, the first is smaller when the difference has the highest bit.
    const uint32_t in_range = ~(magnitude - kFirst) & (magnitude - kInfinity);
    const uint32_t zero = magnitude - 1;  // magnitude is 2^31 - 1 at most
    unfit |= (bits << 16) | (~(in_range | zero) & 0x80000000u);
  }
  return unfit;
}

bool FitsBf16Dot(const float* values, int64_t count) {
  constexpr int64_t kChunk = 256;  // most x that do not fit show it at once
  int64_t i = 0;
  for (; i + kChunk <= count; i += kChunk) {
    if (UnfitForBf16Dot<kChunk>(values + i) != 0) return false;
  }
  for (; i < count; ++i) {
    if (UnfitForBf16Dot<1>(values + i) != 0) return false;
  }
  return true;
}

// Makes `values` the x of a decoder, in place. False, with them in an undefined state, when it cannot take them.
bool Fit(Decode decode, float* values, int64_t count) {
  if (decode == Decode::kF16Scaled) return ScaleForF16(values, count);
  return decode != Decode::kBf16Dot || FitsBf16Dot(values, count);
}

// How the tokens of one pass are cut into tiles that SpmmRange takes.
struct TokenTile {
  int64_t token = 0;   // first
  int valid = 0;       // tokens of x; the others are zeros
  int padded = 0;      // TileTokens(valid)
  int64_t offset = 0;  // padded tokens of the tiles before: where x and the sums of this tile begin, in units of tokens
};

std::vector<TokenTile> CutTokens(int64_t token, int64_t count) {
  const int64_t tiles = (count + kMaxTileTokens - 1) / kMaxTileTokens;
  std::vector<TokenTile> cut;
  cut.reserve(static_cast<size_t>(tiles));
  int64_t offset = 0;
  for (int64_t left = tiles; left > 0; --left) {
    TokenTile tile;
    tile.token = token;
    tile.padded = TileTokens(static_cast<int>((count + left - 1) / left));
    tile.valid = static_cast<int>(std::min<int64_t>(tile.padded, count));
    tile.offset = offset;
    offset += tile.padded;
    token += tile.valid;
    count -= tile.valid;
    cut.push_back(tile);
  }
  return cut;
}

// Fills one tile's activations, [K][padded] or what SpmmRange wants of the decoder; false when Fit refuses.
bool TransposeTokens(const DenseView& x, const TokenTile& tile, Decode decode, ThreadPool& pool, float* out) {
  const int64_t k = x.cols;
  if (tile.padded == 1) {
    WidenRow(x.dtype, x.row(tile.token), out, k);
    return Fit(decode, out, k);
  }
  constexpr int64_t kChunk = 512;  // even
  std::atomic<bool> fits{true};
  pool.ParallelFor((k + kChunk - 1) / kChunk, [&](int64_t chunk, int /*worker*/) {
    const int64_t begin = chunk * kChunk;
    const int64_t count = std::min(kChunk, k - begin);
    float row[kChunk];
    const bool pairs = decode == Decode::kBf16Dot;
    float* to = out + begin / (pairs ? 2 : 1) * tile.padded;
    for (int n = 0; n < tile.padded; ++n) {
      if (n < tile.valid) {
        WidenRow(x.dtype, x.row(tile.token + n) + static_cast<size_t>(begin) * SizeOf(x.dtype), row, count);
        if (!Fit(decode, row, count)) fits.store(false, std::memory_order_relaxed);
      } else {
        std::fill(row, row + count, 0.0f);
      }
      if (!pairs) {
        for (int64_t i = 0; i < count; ++i) to[i * tile.padded + n] = row[i];
        continue;
      }
      if (count % 2 != 0) row[count] = 0.0f;
      for (int64_t i = 0; i < count; i += 2) {
        to[i / 2 * tile.padded + n] = std::bit_cast<float>(Bf16Pair(row[i], row[i + 1]));
      }
    }
  });
  return fits.load();
}

// How a layer's product is cut into tasks: row block by row block, in it column tile by column tile, in those by
// strips.
struct Cut {
  const bitmap::View& view;
  int64_t row_parts;

  Cut(const bitmap::View& layer, int64_t tokens, const ThreadPool& pool) : view(layer) {
    const int64_t pairs = view.blocks * view.column_tiles;
    const int64_t wanted = (TasksPerThread(tokens) * pool.size() + pairs - 1) / pairs;
    row_parts = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(view.strips(0) / kMinTaskStrips, 1));
  }
  int64_t tasks() const { return view.blocks * view.column_tiles * row_parts; }
  int64_t block(int64_t task) const { return task / row_parts / view.column_tiles; }
  int64_t tile(int64_t task) const { return task / row_parts % view.column_tiles; }
  BitmapBlock rows(int64_t task) const {
    const int64_t strips = view.strips(block(task)), part = task % row_parts;
    return {view, block(task), strips * part / row_parts, strips * (part + 1) / row_parts};
  }
};

// Runs `accumulate(task, rows, sums)` for every task of `cut` (or, with `rows` whole, for the first of every pair),
// then `finish(block, row0, rows, sums, parts)` for every range of rows, relative to its block. The sums of one pair
// are tile after tile as in TokenTile; accumulate adds to those of `rows`, beginning with zeros.
template <class Accumulate, class Finish>
absl::Status RunTasks(const Cut& cut, absl::Span<const TokenTile> tiles, ThreadPool& pool, Workspace& workspace,
                      const Accumulate& accumulate, const Finish& finish) {
  const bitmap::View& view = cut.view;
  const int64_t padded_tokens = tiles.back().offset + tiles.back().padded;
  const int64_t block_floats = bitmap::kTileRows * padded_tokens;
  const int64_t parts = view.column_tiles;
  const auto part_floats = static_cast<size_t>(view.blocks * parts * block_floats);
  constexpr int64_t kBlocksPerThread = 8;
  if (view.blocks < kBlocksPerThread * pool.size() && part_floats <= kMaxPartialFloats) {
    SPMMD_ASSIGN_OR_RETURN(float* const sums, workspace.Floats(part_floats));
    const bool serial = view.m * view.k * padded_tokens <= kSerialWork;
    const auto run = [&](int64_t tasks, absl::FunctionRef<void(int64_t, int)> body) {
      if (!serial) return pool.ParallelFor(tasks, body);
      for (int64_t task = 0; task < tasks; ++task) body(task, 0);
    };
    run(cut.tasks(), [&](int64_t task, int /*worker*/) {
      float* mine = sums + task / cut.row_parts * block_floats;
      const BitmapBlock rows = cut.rows(task);
      if (rows.begin == rows.end) return;
      for (const TokenTile& tile : tiles) {
        float* first = mine + tile.offset * bitmap::kTileRows + rows.begin * bitmap::kStripRows * tile.padded;
        const int64_t count = (rows.end - rows.begin) * bitmap::kStripRows * tile.padded;
        std::memset(first, 0, static_cast<size_t>(count) * sizeof(float));
      }
      accumulate(task, rows, mine);
    });
    constexpr int64_t kFinishRows = 512;  // divides kTileRows
    run((view.m + kFinishRows - 1) / kFinishRows, [&](int64_t task, int /*worker*/) {
      const int64_t block = task * kFinishRows / bitmap::kTileRows;
      const int64_t row0 = task * kFinishRows % bitmap::kTileRows;
      finish(block, row0, std::min(kFinishRows, view.rows(block) - row0), sums + block * parts * block_floats, parts);
    });
    return absl::OkStatus();
  }
  const auto worker_floats = static_cast<size_t>(2 * block_floats);
  SPMMD_ASSIGN_OR_RETURN(float* const scratch, workspace.Floats(worker_floats * static_cast<size_t>(pool.size())));
  pool.ParallelFor(view.blocks, [&](int64_t block, int worker) {
    float* total = scratch + static_cast<size_t>(worker) * worker_floats;
    float* sums = total + block_floats;
    const BitmapBlock rows(view, block);
    for (int64_t part = 0; part < parts; ++part) {
      float* to = part == 0 ? total : sums;
      std::memset(to, 0, static_cast<size_t>(block_floats) * sizeof(float));
      accumulate((block * parts + part) * cut.row_parts, rows, to);
      if (part != 0) AddPart(sums, block_floats, total);
    }
    finish(block, 0, view.rows(block), total, 1);
  });
  return absl::OkStatus();
}

// The task that this thread will most likely take after one: threads that keep pace take every size()th.
class NextTask {
 public:
  NextTask(const Cut& cut, int64_t task, const ThreadPool& pool) {
    const int64_t next = task + pool.size();
    if (next >= cut.tasks()) return;
    tile_ = cut.tile(next);
    block_.emplace(cut.rows(next));
  }
  NextTask(const NextTask&) = delete;  // Columns() points into it
  NextTask& operator=(const NextTask&) = delete;

  // Its columns; of a sparse x the listed ones, where first[tile] is the position of a column tile's first.
  ColumnRange Columns() const {
    if (!block_.has_value()) return {};
    const int64_t begin = tile_ * bitmap::kTileCols;
    return {&*block_, nullptr, begin, std::min(bitmap::kTileCols, block_->k - begin)};
  }
  ColumnRange Columns(const uint32_t* ids, const std::vector<int64_t>& first) const {
    if (!block_.has_value()) return {};
    const int64_t begin = first[static_cast<size_t>(tile_)];
    return {&*block_, ids + begin, 0, first[static_cast<size_t>(tile_) + 1] - begin};
  }

 private:
  std::optional<BitmapBlock> block_;
  int64_t tile_ = 0;
};

const float* BiasAt(const Epilogue& epilogue, int64_t row) {
  return epilogue.bias.empty() ? nullptr : epilogue.bias.data() + row;
}

struct ThreadScratch {
  Workspace x;
  Workspace sums;
};

ThreadScratch& Scratch() {
  static thread_local ThreadScratch scratch;
  return scratch;
}

absl::Status MatmulPass(const PackedLayer& w, const bitmap::View& view, const DenseView& x, int64_t token,
                        int64_t count, const Epilogue& epilogue, const MutableDenseView& y, ThreadPool& pool,
                        Decode* ran) {
  ThreadScratch& scratch = Scratch();
  const std::vector<TokenTile> tiles = CutTokens(token, count);
  const int64_t padded_tokens = tiles.back().offset + tiles.back().padded;
  SPMMD_ASSIGN_OR_RETURN(float* const tokens, scratch.x.Floats(static_cast<size_t>(view.k * padded_tokens)));
  const auto transpose = [&](Decode decode) {
    return std::all_of(tiles.begin(), tiles.end(), [&](const TokenTile& tile) {
      return TransposeTokens(x, tile, decode, pool, tokens + tile.offset * view.k);
    });
  };
  Decode decode = FastDecode(w);
  if (!transpose(decode)) {
    decode = GeneralDecode(w.dtype);
    transpose(decode);
  }
  *ran = decode;
  const RowOrder order = RowOrderOf(decode);
  const Cut cut(view, padded_tokens, pool);
  return RunTasks(
      cut, tiles, pool, scratch.sums,
      [&](int64_t task, const BitmapBlock& rows, float* sums) {
        const int64_t begin = cut.tile(task) * bitmap::kTileCols;
        const int64_t end = std::min(view.k, begin + bitmap::kTileCols);
        const int64_t first_row = rows.begin * bitmap::kStripRows;
        if (padded_tokens == 1) {
          const NextTask next(cut, task, pool);
          SpmvRange({&rows, nullptr, begin, end - begin}, next.Columns(), decode, tokens + begin, sums + first_row);
          return;
        }
        const int64_t columns_per_x = decode == Decode::kBf16Dot ? 2 : 1;
        for (const TokenTile& tile : tiles) {
          const float* tile_x = tokens + tile.offset * view.k + begin / columns_per_x * tile.padded;
          SpmmRange(rows, decode, begin, end, tile_x, tile.padded,
                    sums + tile.offset * bitmap::kTileRows + first_row * tile.padded);
        }
      },
      [&](int64_t block, int64_t row0, int64_t count, const float* sums, int64_t parts) {
        const int64_t row = block * bitmap::kTileRows + row0;
        for (const TokenTile& tile : tiles) {
          const PartialSums partial{sums + tile.offset * bitmap::kTileRows + row0 * tile.padded, parts,
                                    bitmap::kTileRows * padded_tokens, tile.padded, order};
          for (int n = 0; n < tile.valid; ++n) {
            FinishToken(partial, n, count, BiasAt(epilogue, row), epilogue.activation, y.dtype,
                        y.row(tile.token + n) + static_cast<size_t>(row) * SizeOf(y.dtype));
          }
        }
      });
}

}  // namespace

absl::Status BitmapMatmul(const PackedLayer& w, const DenseView& x, const Epilogue& epilogue, const MutableDenseView& y,
                          ThreadPool& pool, BitmapRun* run) {
  const bitmap::View view = bitmap::MakeView(w);
  const int64_t passes = (x.rows + kPassTokens - 1) / kPassTokens;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t begin = x.rows * pass / passes;
    const int64_t end = x.rows * (pass + 1) / passes;
    Decode decode = GeneralDecode(w.dtype);
    SPMMD_RETURN_IF_ERROR(MatmulPass(w, view, x, begin, end - begin, epilogue, y, pool, &decode));
    if (run != nullptr) run->decode = decode;
  }
  return absl::OkStatus();
}

absl::Status BitmapMatmulSparse(const PackedLayer& w, const SparseVector& x, const Epilogue& epilogue,
                                const MutableDenseView& y, ThreadPool& pool, BitmapRun* run) {
  const bitmap::View view = bitmap::MakeView(w);
  ThreadScratch& scratch = Scratch();
  Decode decode = FastDecode(w);
  const float* values = x.values.data();
  if (decode != GeneralDecode(w.dtype)) {
    SPMMD_ASSIGN_OR_RETURN(float* const fitted, scratch.x.Floats(x.values.size() + 1));
    std::copy(x.values.begin(), x.values.end(), fitted);
    if (Fit(decode, fitted, static_cast<int64_t>(x.values.size()))) {
      values = fitted;
    } else {
      decode = GeneralDecode(w.dtype);
    }
  }
  // First listed column of every column tile, and the end.
  std::vector<int64_t> first(static_cast<size_t>(view.column_tiles) + 1);
  for (size_t tile = 0; tile < first.size(); ++tile) {
    first[tile] = std::lower_bound(x.indices.begin(), x.indices.end(), tile * bitmap::kTileCols) - x.indices.begin();
  }
  const RowOrder order = RowOrderOf(decode);
  std::atomic<int64_t> touched{0};
  const Cut cut(view, 1, pool);
  const TokenTile token = {0, 1, 1, 0};
  absl::Status status = RunTasks(
      cut, {&token, 1}, pool, scratch.sums,
      [&](int64_t task, const BitmapBlock& rows, float* sums) {
        const auto tile = static_cast<size_t>(cut.tile(task));
        const int64_t begin = first[tile];
        const int64_t end = first[tile + 1];
        const NextTask next(cut, task, pool);
        SpmvRange({&rows, x.indices.data() + begin, 0, end - begin}, next.Columns(x.indices.data(), first), decode,
                  values + begin, sums + rows.begin * bitmap::kStripRows);
        if (run == nullptr || rows.begin != 0) return;
        int64_t nnz = 0;
        for (int64_t i = begin; i < end; ++i) {
          nnz += static_cast<int64_t>(rows.piece_end(x.indices[static_cast<size_t>(i)]) -
                                      rows.piece_start(x.indices[static_cast<size_t>(i)]));
        }
        touched.fetch_add(nnz, std::memory_order_relaxed);
      },
      [&](int64_t block, int64_t row0, int64_t count, const float* sums, int64_t parts) {
        const int64_t row = block * bitmap::kTileRows + row0;
        FinishToken({sums + row0, parts, bitmap::kTileRows, 1, order}, 0, count, BiasAt(epilogue, row),
                    epilogue.activation, y.dtype, y.row(0) + static_cast<size_t>(row) * SizeOf(y.dtype));
      });
  if (run != nullptr) *run = {decode, touched.load()};
  return status;
}

}  // namespace spmmd::cpu
