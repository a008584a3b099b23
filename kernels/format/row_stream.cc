#include "kernels/format/row_stream.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_pool.h"
#include "kernels/format/row_stream_decode.h"

namespace spmmd::row_stream {
namespace {

uint16_t LoadU16(const std::byte* p) {
  uint16_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The nonzeros of one row inside one segment.
struct RowNonzeros {
  explicit RowNonzeros(int64_t columns) : column(columns), value(columns) {}
  std::vector<uint16_t> column;
  std::vector<uint16_t> value;
  int count = 0;

  void Extract(const DenseView& w, int64_t row, int64_t first, int64_t columns) {
    const std::byte* p = w.row(row) + first * 2;
    int n = 0;
    for (int64_t k = 0; k < columns; ++k) {  // branch-free: at 50 % sparsity a branch would mispredict every other time
      const uint16_t v = LoadU16(p + 2 * k);
      column[n] = static_cast<uint16_t>(k);
      value[n] = v;
      n += IsNonzeroBits(v) ? 1 : 0;
    }
    count = n;
  }
};

// What one pass over a row's segment learns, enough to choose every parameter.
struct SegmentStats {
  uint32_t nnz = 0;
  uint32_t slots[2] = {0, 0};    // with run_bits 2 and 4, fillers included
  uint32_t escapes[2] = {0, 0};  // with kCode2 and kCode3 at the best base
  uint8_t base[2] = {0, 0};
};

// Counts of (exponent, trailing zeros of the significand) of one row, and the window that holds most of them.
class ExponentHistogram {
 public:
  void Count(const RowNonzeros& nz) {
    for (int i = 0; i < nz.count; ++i) {
      const uint16_t v = nz.value[i];
      const int exponent = (v >> 7) & 0xff;
      low_ = std::min(low_, exponent);
      high_ = std::max(high_, exponent);
      ++count_[exponent][std::countr_zero(static_cast<uint32_t>(0x80 | (v & 0x7f)))];
    }
  }

  void BestBase(Coding coding, int total, uint8_t* base, uint32_t* escapes) const {
    *base = 0;
    *escapes = 0;
    if (total == 0) return;
    int best_held = -1;
    const int window = FieldMax(coding);
    const int last = std::min(254 - window, high_);
    for (int b = std::clamp(low_ - 1, 0, last); b <= last; ++b) {
      int held = 0;
      for (int e = b + 1; e <= b + window; ++e) held += Sum(e, 0);
      if (b == 0) {
        held += Sum(0, 0);
      } else {
        for (int shift = 1; shift <= 7 && b + 1 - shift >= 1; ++shift) held += Sum(b + 1 - shift, shift);
      }
      if (held > best_held) {
        best_held = held;
        *base = static_cast<uint8_t>(b);
      }
    }
    *escapes = static_cast<uint32_t>(total - best_held);
  }

  void Reset() {
    for (int e = std::max(low_, 0); e <= high_; ++e) std::fill(std::begin(count_[e]), std::end(count_[e]), 0);
    low_ = 256;
    high_ = -1;
  }

 private:
  // Values of exponent e whose significand ends in at least `zeros` zeros.
  int Sum(int e, int zeros) const {
    int n = 0;
    if (e < low_ || e > high_) return 0;
    for (int z = zeros; z < 8; ++z) n += static_cast<int>(count_[e][z]);
    return n;
  }

  uint32_t count_[256][8] = {};
  int low_ = 256;
  int high_ = -1;
};

int RunIndex(int run_bits) { return run_bits == 2 ? 0 : 1; }

struct Plan {
  Coding coding = Coding::kVerbatim;
  int run_bits = 2;
  int rows_per_tile = 32;
  int warps = 8;
  bool sorted = false;
  bool uniform = true;

  int pieces() const { return kWarpLanes * warps / rows_per_tile; }
};

class Packer {
 public:
  Packer(const DenseView& w, const PackOptions& options, const Options& tuning)
      : w_(w), options_(options), tuning_(tuning) {}

  absl::StatusOr<PackedLayer> Run() {
    SPMMD_RETURN_IF_ERROR(CheckInput());
    segments_ = 1;
    segment_columns_ = w_.cols;
    const int64_t limit = tuning_.segment_columns > 0 ? tuning_.segment_columns : kMaxSegmentColumns;
    if (w_.cols > limit) {
      segments_ = CeilDiv(w_.cols, limit);
      segment_columns_ = std::min(limit, CeilDiv(CeilDiv(w_.cols, segments_), 8) * 8);
      segments_ = CeilDiv(w_.cols, segment_columns_);
    }
    CollectStats();
    ChoosePlan();
    return Emit();
  }

 private:
  absl::Status CheckInput() const {
    SPMMD_RETURN_IF_ERROR(CheckShape(w_.rows, w_.cols));
    if (w_.dtype != DType::kF16 && w_.dtype != DType::kBf16) {
      return absl::InvalidArgumentError(
          absl::StrCat("dtype: ROW_STREAM stores fp16 and bf16 weights, not ", std::string(Name(w_.dtype))));
    }
    if (tuning_.coding.has_value() && *tuning_.coding != Coding::kVerbatim && w_.dtype != DType::kBf16) {
      return absl::InvalidArgumentError("coding: coded values need bf16 weights");
    }
    if (tuning_.run_bits != 0 && tuning_.run_bits != 2 && tuning_.run_bits != 4) {
      return absl::InvalidArgumentError(absl::StrCat("run_bits: 2 or 4, not ", tuning_.run_bits));
    }
    if (tuning_.warps < 0 || tuning_.warps > kMaxWarps) {
      return absl::InvalidArgumentError(absl::StrCat("warps: at most ", kMaxWarps, ", not ", tuning_.warps));
    }
    const int row_limit = std::min(kMaxRowsPerTile, kWarpLanes * (tuning_.warps > 0 ? tuning_.warps : kMaxWarps));
    if (tuning_.rows_per_tile < 0 || tuning_.rows_per_tile > row_limit) {
      return absl::InvalidArgumentError(
          absl::StrCat("rows_per_tile: at most ", row_limit, ", not ", tuning_.rows_per_tile));
    }
    if (tuning_.segment_columns != 0 && (tuning_.segment_columns < 8 || tuning_.segment_columns > kMaxSegmentColumns)) {
      return absl::InvalidArgumentError(
          absl::StrCat("segment_columns: 8 to ", kMaxSegmentColumns, ", not ", tuning_.segment_columns));
    }
    return options_.allow_nonfinite ? absl::OkStatus() : CheckFinite(w_);
  }

  int64_t SegmentColumns(int64_t segment) const {
    return segment + 1 < segments_ ? segment_columns_ : w_.cols - segment * segment_columns_;
  }

  void CollectStats() {
    stats_.resize(static_cast<size_t>(w_.rows * segments_));
    const bool coded = w_.dtype == DType::kBf16 && tuning_.coding != Coding::kVerbatim;
    ThreadPool& pool = DefaultThreadPool();
    const int64_t rows_per_task = std::max<int64_t>(1, (int64_t{1} << 18) / w_.cols);
    pool.ParallelFor(CeilDiv(w_.rows, rows_per_task), [&](int64_t task, int) {
      RowNonzeros nz(segment_columns_ + 1);
      auto histogram = std::make_unique<ExponentHistogram>();
      const int64_t end = std::min(w_.rows, (task + 1) * rows_per_task);
      for (int64_t row = task * rows_per_task; row < end; ++row) {
        for (int64_t segment = 0; segment < segments_; ++segment) {
          nz.Extract(w_, row, segment * segment_columns_, SegmentColumns(segment));
          SegmentStats& stats = stats_[row * segments_ + segment];
          stats.nnz = static_cast<uint32_t>(nz.count);
          uint32_t fillers2 = 0;
          uint32_t fillers4 = 0;
          int previous = -1;
          for (int i = 0; i < nz.count; ++i) {
            const uint32_t gap = static_cast<uint32_t>(nz.column[i] - previous - 1);
            fillers2 += gap >> 2;
            fillers4 += gap >> 4;
            previous = nz.column[i];
          }
          stats.slots[0] = stats.nnz + fillers2;
          stats.slots[1] = stats.nnz + fillers4;
          if (!coded) continue;
          histogram->Count(nz);
          histogram->BestBase(Coding::kCode2, nz.count, &stats.base[0], &stats.escapes[0]);
          histogram->BestBase(Coding::kCode3, nz.count, &stats.base[1], &stats.escapes[1]);
          histogram->Reset();
        }
      }
    });
    for (const SegmentStats& stats : stats_) {
      nnz_ += stats.nnz;
      escapes_[0] += stats.escapes[0];
      escapes_[1] += stats.escapes[1];
    }
  }

  uint32_t RowSlots(int64_t row, int run_bits) const {
    uint32_t slots = 0;
    for (int64_t s = 0; s < segments_; ++s) slots += stats_[row * segments_ + s].slots[RunIndex(run_bits)];
    return slots;
  }

  // Bytes of the escape list a stored escape costs: lists are as long as the tile's longest, hence more than 4.
  static constexpr double kBytesPerEscape = 7.0;

  // Predicted cost of a plan in bytes of the stream. Only compared, never shown. The constants were fitted to a sweep
  // of tilings over eight LLM shapes on an H200: the plan it picks is within 1 % of the best of the sweep on average.
  double Cost(const Plan& plan, const std::vector<uint32_t>& lengths, double stored_bytes) const {
    const double tiles = static_cast<double>(CeilDiv(static_cast<int64_t>(lengths.size()), plan.rows_per_tile));
    const double per_sm = tiles / tuning_.multiprocessors;
    const double warps = std::ceil(per_sm) * plan.warps;  // a multiprocessor
    // One wave of tiles beats everything else; the kernel with registers for 32 warps beats the one for 48.
    double wave = 1.0;
    if (warps > 48) {
      const double waves = per_sm * plan.warps / 48;
      wave = 1.5 + 0.3 * (std::ceil(waves) / waves - 1.0);
    } else if (warps > 32) {
      wave = 1.3;
    }
    // Multiprocessors with one tile more than the mean hold the others up.
    const double imbalance = warps > 48 ? 0.0 : std::ceil(per_sm) / per_sm - 1.0;
    // Too few warps on a multiprocessor leave too few bytes in flight.
    const double idle = 0.1 * std::max(0.0, 1.0 - warps / 20.0) + 0.5 * std::max(0.0, 1.0 - warps / 12.0);
    const double threads_lost =
        1.0 - static_cast<double>(plan.pieces() * plan.rows_per_tile) / (kWarpLanes * plan.warps);
    // What staging the activations costs every tile, and what a launch costs, in bytes of the stream.
    const double staging = 0.9 * tiles * static_cast<double>(w_.cols) * 2.0;
    constexpr double kLaunch = 12e6;
    return (stored_bytes + staging + kLaunch) * wave * (1.0 + 0.4 * imbalance) * (1.0 + idle) *
           (1.0 + 0.3 * threads_lost);
  }

  // `lengths`: slots of every row in the order of the tiling; for a uniform plan any order that starts with the
  // longest.
  double StoredBytes(const Plan& plan, const std::vector<uint32_t>& lengths) const {
    const int64_t per_block = static_cast<int64_t>(plan.pieces()) * kBlockSlots;
    const int64_t rows = static_cast<int64_t>(lengths.size());
    const int64_t tiles = CeilDiv(rows, plan.rows_per_tile);
    int64_t blocks = 0;
    if (plan.uniform) {
      blocks = CeilDiv(lengths[0], per_block) * tiles;
    } else {
      for (int64_t first = 0; first < rows; first += plan.rows_per_tile) {
        uint32_t longest = lengths[first];
        if (!plan.sorted) {
          const int64_t end = std::min(rows, first + plan.rows_per_tile);
          longest = *std::max_element(lengths.begin() + first, lengths.begin() + end);
        }
        blocks += CeilDiv(longest, per_block);
      }
    }
    const double escapes = plan.coding == Coding::kVerbatim ? 0.0
                           : plan.coding == Coding::kCode2  ? static_cast<double>(escapes_[0])
                                                            : static_cast<double>(escapes_[1]);
    return static_cast<double>(blocks) * plan.warps * BlockBytes(plan.coding, plan.run_bits) +
           kBytesPerEscape * escapes + static_cast<double>(tiles) * plan.warps * 64.0;
  }

  void ChoosePlan() {
    std::vector<Coding> codings;
    if (tuning_.coding.has_value()) {
      codings = {*tuning_.coding};
    } else if (w_.dtype == DType::kBf16 && nnz_ > 0) {
      codings = {Coding::kCode2, Coding::kCode3, Coding::kVerbatim};
    } else {
      codings = {Coding::kVerbatim};
    }
    // Coding and run width do not depend on the tiling: settle them by bytes with an ideal one. A coded slot costs a
    // little more to decode than a verbatim one (3 bits more than 2), hence the factors.
    double best = std::numeric_limits<double>::infinity();
    double slots[2] = {0, 0};
    for (const SegmentStats& stats : stats_) {
      slots[0] += stats.slots[0];
      slots[1] += stats.slots[1];
    }
    for (const Coding coding : codings) {
      for (const int run_bits : {2, 4}) {
        if (tuning_.run_bits != 0 && tuning_.run_bits != run_bits) continue;
        const double escapes = coding == Coding::kVerbatim ? 0.0
                               : coding == Coding::kCode2  ? static_cast<double>(escapes_[0])
                                                           : static_cast<double>(escapes_[1]);
        const double decode = coding == Coding::kVerbatim ? 1.0 : 1.01;
        const double cost =
            decode * slots[RunIndex(run_bits)] * BlockBytes(coding, run_bits) / (kBlockSlots * kWarpLanes) +
            kBytesPerEscape * escapes;
        if (cost < best) {
          best = cost;
          plan_.coding = coding;
          plan_.run_bits = run_bits;
        }
      }
    }

    std::vector<uint32_t> lengths(w_.rows);
    for (int64_t row = 0; row < w_.rows; ++row) lengths[row] = RowSlots(row, plan_.run_bits);
    std::vector<uint32_t> sorted(lengths);
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    // Longest row first is what `sorted` holds, so a uniform plan over it costs what one over `lengths` costs.
    Plan plan = plan_;
    best = std::numeric_limits<double>::infinity();
    // A per-tile block count is a dependent load before the first byte of the stream: about 0.6 us, so it must save
    // what memory moves in that time.
    constexpr double kTableBytes = 2.5e6;
    const bool forced = tuning_.rows_per_tile != 0;
    // Speed must not be bought with memory: a plan may store a tenth more than the leanest one.
    double leanest = std::numeric_limits<double>::infinity();
    bool weigh = false;  // first pass: find the leanest; second: the fastest of the lean
    const auto consider = [&](int warps, int rows) {
      plan.warps = warps;
      plan.rows_per_tile = rows;
      // A lane's padding runs over the end of the segment: shared memory must hold that much more of x.
      if (!forced && PadColumns(CeilDiv(sorted[0], int64_t{plan.pieces()} * kBlockSlots)) > 4096) return;
      const bool may_sort = tuning_.sort_rows.value_or(true);
      const bool must_sort = tuning_.sort_rows.value_or(false);
      for (int variant = 0; variant < 3; ++variant) {
        plan.sorted = variant == 1;
        plan.uniform = variant == 0;
        if (plan.sorted ? !may_sort : must_sort) continue;
        if (variant == 2 && may_sort) continue;  // sorted tiles are never longer
        const double stored = StoredBytes(plan, plan.sorted || plan.uniform ? sorted : lengths);
        if (!weigh) {
          leanest = std::min(leanest, stored);
          continue;
        }
        if (stored > 1.1 * leanest) continue;
        const double cost = Cost(plan, sorted, stored) + (plan.uniform ? 0.0 : kTableBytes);
        if (cost < best) {
          best = cost;
          plan_ = plan;
        }
      }
    };
    // Exhaustive over rows for layers of ordinary size; a huge M only changes the number of full waves.
    const bool huge = w_.rows > (1 << 17);
    for (const bool second : {false, true}) {
      weigh = second;
      for (int warps = 1; warps <= kMaxWarps; ++warps) {
        if (tuning_.warps != 0 && warps != tuning_.warps) continue;
        if (tuning_.rows_per_tile != 0) {
          if (tuning_.rows_per_tile <= kWarpLanes * warps) consider(warps, tuning_.rows_per_tile);
          continue;
        }
        const int most = static_cast<int>(std::min<int64_t>({w_.rows, int64_t{32} * warps, 256}));
        for (int rows = std::min(most, huge ? 32 : 1); rows <= most; rows += huge ? 16 : 1) {
          if (w_.rows / rows > 4096 && rows < std::min(most, 32)) continue;
          consider(warps, rows);
        }
      }
    }
  }

  absl::StatusOr<PackedLayer> Emit();
  void EmitTile(int64_t tile, const std::vector<uint32_t>& order, const TileHeader& header, std::byte* stream,
                uint16_t* starts, uint8_t* bases, uint32_t* escapes, RowNonzeros& nz, int64_t* filler_slots) const;

  const DenseView w_;
  const PackOptions options_;
  const Options tuning_;
  int64_t segments_ = 1;
  int64_t segment_columns_ = 0;
  std::vector<SegmentStats> stats_;
  int64_t nnz_ = 0;
  int64_t escapes_[2] = {0, 0};
  Plan plan_;
};

void StoreLaneBlock(const LaneBlock& lane_block, Coding coding, int run_bits, int lane, std::byte* block) {
  uint32_t runs[2] = {0, 0};
  for (int s = 0; s < kBlockSlots; ++s) {
    runs[RunWord(run_bits, s)] |= uint32_t{lane_block.run[s]} << RunShift(run_bits, s);
  }
  std::memcpy(block + RunOffset(coding, run_bits, lane), runs, run_bits == 2 ? 4 : 8);
  if (coding == Coding::kVerbatim) {
    std::memcpy(block + int64_t{16} * lane, lane_block.word, 16);
    std::memcpy(block + 512 + int64_t{16} * lane, lane_block.word + 8, 16);
    return;
  }
  uint8_t low[kBlockSlots];
  uint32_t planes = 0;
  uint32_t third = 0;
  for (int s = 0; s < kBlockSlots; ++s) {
    const uint32_t word = lane_block.word[s];
    low[s] = static_cast<uint8_t>(word);
    planes |= (word >> 8 & 1) << FieldBitShift(s) | (word >> 15) << SignBitShift(s);
    third |= (word >> 9 & 1) << ThirdBitShift(s);
  }
  std::memcpy(block + int64_t{16} * lane, low, 16);
  std::memcpy(block + PlaneOffset(run_bits, lane), &planes, 4);
  if (coding == Coding::kCode3) {
    const auto third16 = static_cast<uint16_t>(third);
    std::memcpy(block + ThirdBitOffset(run_bits, lane), &third16, 2);
  }
}

// Cuts one row's slots into pieces and writes them block by block.
class PieceWriter {
 public:
  PieceWriter(const Plan& plan, int64_t blocks, int row_in_tile, std::byte* stream, uint16_t* starts)
      : plan_(plan), blocks_(blocks), row_(row_in_tile), stream_(stream), starts_(starts) {}

  // The next nonzero, at segment column `column`.
  void Add(int column, uint16_t word) {
    const int max_run = (1 << plan_.run_bits) - 1;
    if (slot_ == 0) Start(column);
    while (column - next_ > max_run) {
      Put(max_run, 0);
      ++fillers_;
      if (slot_ == 0) Start(column);  // a new piece starts wherever its first value is
    }
    Put(column - next_, word);
  }

  void Finish() {
    if (fill_ > 0) Flush();
  }
  int64_t fillers() const { return fillers_; }

 private:
  void Start(int column) {
    starts_[piece_ * plan_.rows_per_tile + row_] = static_cast<uint16_t>(column);
    next_ = column;
  }

  void Put(int run, uint16_t word) {
    block_.run[fill_] = static_cast<uint8_t>(run);
    block_.word[fill_] = word;
    next_ += run + 1;
    ++slot_;
    if (++fill_ == kBlockSlots) Flush();
    if (slot_ == blocks_ * kBlockSlots) {
      slot_ = 0;
      ++piece_;
    }
  }

  void Flush() {
    const int thread = piece_ * plan_.rows_per_tile + row_;
    const int64_t block = (slot_ - 1) / kBlockSlots;
    std::byte* to = stream_ + (thread / kWarpLanes * blocks_ + block) * BlockBytes(plan_.coding, plan_.run_bits);
    StoreLaneBlock(block_, plan_.coding, plan_.run_bits, thread % kWarpLanes, to);
    block_ = LaneBlock();
    fill_ = 0;
  }

  const Plan& plan_;
  const int64_t blocks_;
  const int row_;
  std::byte* const stream_;
  uint16_t* const starts_;
  LaneBlock block_;
  int fill_ = 0;      // slots in block_
  int64_t slot_ = 0;  // slots in the current piece
  int piece_ = 0;
  int next_ = 0;  // first column not yet passed
  int64_t fillers_ = 0;
};

// Entry i of a row's escapes: piece i % pieces, round i / pieces. Returns its index into the tile's escape array.
int64_t EscapeIndex(const Plan& plan, int row_in_tile, int64_t i) {
  const int64_t piece = i % plan.pieces();
  const int64_t round = i / plan.pieces();
  const int64_t thread = piece * plan.rows_per_tile + row_in_tile;
  const int64_t unit = round * plan.warps + thread / kWarpLanes;
  return unit * kWarpLanes + thread % kWarpLanes;
}

void Packer::EmitTile(int64_t tile, const std::vector<uint32_t>& order, const TileHeader& header, std::byte* stream,
                      uint16_t* starts, uint8_t* bases, uint32_t* escapes, RowNonzeros& nz,
                      int64_t* filler_slots) const {
  const int64_t row_tile = tile / segments_;
  const int64_t segment = tile % segments_;
  for (int r = 0; r < plan_.rows_per_tile; ++r) {
    const size_t position = static_cast<size_t>(row_tile * plan_.rows_per_tile + r);
    if (position >= order.size()) continue;
    const int64_t row = order[position];
    nz.Extract(w_, row, segment * segment_columns_, SegmentColumns(segment));
    PieceWriter writer(plan_, header.blocks, r, stream, starts);
    if (plan_.coding == Coding::kVerbatim) {
      for (int i = 0; i < nz.count; ++i) writer.Add(nz.column[i], nz.value[i]);
    } else {
      const SegmentStats& stats = stats_[row * segments_ + segment];
      const int base = stats.base[plan_.coding == Coding::kCode2 ? 0 : 1];
      bases[r] = static_cast<uint8_t>(base);
      int64_t escape = 0;
      for (int i = 0; i < nz.count; ++i) {
        uint16_t word;
        if (!Recode(nz.value[i], base, plan_.coding, &word)) {
          escapes[EscapeIndex(plan_, r, escape++)] = uint32_t{nz.column[i]} << 16 | nz.value[i];
        }
        writer.Add(nz.column[i], word);
      }
    }
    writer.Finish();
    *filler_slots += writer.fillers();
  }
}

absl::StatusOr<PackedLayer> Packer::Emit() {
  const int64_t row_tiles = CeilDiv(w_.rows, plan_.rows_per_tile);
  const int64_t tiles = row_tiles * segments_;
  const int run_index = RunIndex(plan_.run_bits);
  const bool coded = plan_.coding != Coding::kVerbatim;
  std::vector<uint32_t> order(w_.rows);
  std::iota(order.begin(), order.end(), 0u);
  if (plan_.sorted) {
    std::vector<uint32_t> lengths(w_.rows);
    for (int64_t row = 0; row < w_.rows; ++row) lengths[row] = RowSlots(row, plan_.run_bits);
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return lengths[a] > lengths[b]; });
  }

  SPMMD_ASSIGN_OR_RETURN(Buffer headers, Buffer::Allocate(static_cast<size_t>(tiles) * sizeof(TileHeader)));
  const absl::Span<TileHeader> header = headers.MutableAs<TileHeader>();
  int64_t max_blocks = 0;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    int64_t slots = 0;
    int64_t units = 0;
    for (int r = 0; r < plan_.rows_per_tile; ++r) {
      const int64_t position = tile / segments_ * plan_.rows_per_tile + r;
      if (position >= w_.rows) break;
      const SegmentStats& stats = stats_[int64_t{order[position]} * segments_ + tile % segments_];
      slots = std::max<int64_t>(slots, stats.slots[run_index]);
      if (coded) {
        // The last entry of a row need not be the one in the highest unit: within a round the highest piece is.
        const int64_t count = stats.escapes[plan_.coding == Coding::kCode2 ? 0 : 1];
        if (count > 0) units = std::max(units, EscapeIndex(plan_, r, count - 1) / kWarpLanes + 1);
        if (count > plan_.pieces()) {
          const int64_t full = count / plan_.pieces() * plan_.pieces();
          units = std::max(units, EscapeIndex(plan_, r, full - 1) / kWarpLanes + 1);
        }
      }
    }
    header[tile].blocks = static_cast<uint32_t>(CeilDiv(slots, int64_t{plan_.pieces()} * kBlockSlots));
    header[tile].escape_units = static_cast<uint32_t>(units);
    max_blocks = std::max<int64_t>(max_blocks, header[tile].blocks);
  }
  if (plan_.uniform) max_blocks = std::max<int64_t>(max_blocks, 1);  // 0 would read as "per tile"
  int64_t blocks = 0;
  int64_t units = 0;
  for (TileHeader& h : header) {
    if (plan_.uniform) h.blocks = static_cast<uint32_t>(max_blocks);
    h.first_block = static_cast<uint32_t>(blocks);
    h.first_escape_unit = static_cast<uint32_t>(units);
    blocks += int64_t{h.blocks} * plan_.warps;
    units += h.escape_units;
    if (blocks > std::numeric_limits<uint32_t>::max() || units > std::numeric_limits<uint32_t>::max()) {
      return absl::ResourceExhaustedError("ROW_STREAM: the layer needs more than 2^32 blocks");
    }
  }

  const int64_t block_bytes = BlockBytes(plan_.coding, plan_.run_bits);
  const int64_t lanes = int64_t{plan_.warps} * kWarpLanes;
  SPMMD_ASSIGN_OR_RETURN(Buffer stream, Buffer::Allocate(static_cast<size_t>(blocks * block_bytes)));
  SPMMD_ASSIGN_OR_RETURN(Buffer starts, Buffer::Allocate(static_cast<size_t>(tiles * lanes) * 2));
  SPMMD_ASSIGN_OR_RETURN(Buffer bases, Buffer::Allocate(coded ? static_cast<size_t>(tiles * plan_.rows_per_tile) : 0));
  SPMMD_ASSIGN_OR_RETURN(Buffer escapes, Buffer::Allocate(static_cast<size_t>(units) * kWarpLanes * 4));
  std::byte* const stream_data = stream.mutable_data();
  auto* const start_data = starts.MutableAs<uint16_t>().data();
  auto* const base_data = bases.MutableAs<uint8_t>().data();
  auto* const escape_data = escapes.MutableAs<uint32_t>().data();
  std::atomic<int64_t> filler_slots{0};
  const int64_t tiles_per_task =
      std::max<int64_t>(1, (int64_t{1} << 17) / std::max<int64_t>(1, plan_.rows_per_tile * segment_columns_));
  DefaultThreadPool().ParallelFor(CeilDiv(tiles, tiles_per_task), [&](int64_t task, int) {
    RowNonzeros nz(segment_columns_ + 1);
    int64_t fillers = 0;
    const int64_t end = std::min(tiles, (task + 1) * tiles_per_task);
    for (int64_t tile = task * tiles_per_task; tile < end; ++tile) {
      const TileHeader& h = header[tile];
      EmitTile(tile, order, h, stream_data + int64_t{h.first_block} * block_bytes, start_data + tile * lanes,
               coded ? base_data + tile * plan_.rows_per_tile : nullptr,
               escape_data + int64_t{h.first_escape_unit} * kWarpLanes, nz, &fillers);
    }
    filler_slots += fillers;
  });

  PackedLayer layer;
  layer.format = Format::kRowStream;
  layer.layout_version = kLayoutVersion;
  layer.dtype = w_.dtype;
  layer.m = w_.rows;
  layer.k = w_.cols;
  layer.nnz = nnz_;
  layer.params[kParamRowsPerTile] = plan_.rows_per_tile;
  layer.params[kParamWarps] = plan_.warps;
  layer.params[kParamRunBits] = plan_.run_bits;
  layer.params[kParamCoding] = static_cast<int64_t>(plan_.coding);
  layer.params[kParamUniformBlocks] = plan_.uniform ? max_blocks : 0;
  layer.params[kParamSegmentColumns] = segment_columns_;
  layer.params[kParamMaxBlocks] = max_blocks;
  // A slot without a nonzero is padding, its share of the run lengths included.
  const int64_t slots = blocks * kBlockSlots * kWarpLanes;
  const auto stream_padding = static_cast<size_t>((slots - nnz_) * block_bytes / (int64_t{kBlockSlots} * kWarpLanes));
  layer.sections.push_back({kStreamSection, SectionClass::kValues, stream_padding, std::move(stream)});
  layer.sections.push_back({kStartSection, SectionClass::kMetadata, 0, std::move(starts)});
  layer.sections.push_back({kTileSection, SectionClass::kMetadata, 0, std::move(headers)});
  if (coded) {
    const int64_t stored = escapes_[plan_.coding == Coding::kCode2 ? 0 : 1];
    layer.sections.push_back({kBaseSection, SectionClass::kMetadata, 0, std::move(bases)});
    layer.sections.push_back({kEscapeSection, SectionClass::kValues,
                              static_cast<size_t>((units * kWarpLanes - stored) * 4), std::move(escapes)});
  }
  if (plan_.sorted) {
    const int64_t positions = row_tiles * plan_.rows_per_tile;
    SPMMD_ASSIGN_OR_RETURN(Buffer rows, Buffer::Allocate(static_cast<size_t>(positions) * 4));
    const absl::Span<uint32_t> out = rows.MutableAs<uint32_t>();
    std::fill(out.begin(), out.end(), kNoRow);
    std::copy(order.begin(), order.end(), out.begin());
    layer.sections.push_back(
        {kRowOrderSection, SectionClass::kMetadata, static_cast<size_t>(positions - w_.rows) * 4, std::move(rows)});
  }
  return layer;
}

absl::Status Corrupt(const char* what) { return absl::DataLossError(absl::StrCat("ROW_STREAM: ", what)); }

absl::StatusOr<View> OpenView(const PackedLayer& layer) {
  if (layer.format != Format::kRowStream) return Corrupt("the layer has another format");
  if (layer.layout_version != kLayoutVersion) return Corrupt("unknown layout version");
  if (layer.dtype != DType::kF16 && layer.dtype != DType::kBf16) return Corrupt("dtype is neither fp16 nor bf16");
  if (!CheckShape(layer.m, layer.k).ok()) return Corrupt("shape out of range");
  Source source;
  source.m = layer.m;
  source.k = layer.k;
  source.nnz = layer.nnz;
  source.bf16 = layer.dtype == DType::kBf16;
  std::copy(layer.params.begin(), layer.params.end(), source.params);
  const auto bytes = [&](uint32_t id) {
    const Section* section = layer.FindSection(id);
    return section == nullptr ? Bytes{} : Bytes{section->data.data(), section->data.size()};
  };
  source.stream = bytes(kStreamSection);
  source.starts = bytes(kStartSection);
  source.tiles = bytes(kTileSection);
  source.bases = bytes(kBaseSection);
  source.escapes = bytes(kEscapeSection);
  source.row_order = bytes(kRowOrderSection);
  View view;
  if (const char* error = Open(source, &view)) return Corrupt(error);
  return view;
}

}  // namespace

absl::StatusOr<PackedLayer> Pack(const DenseView& w, const PackOptions& options, const Options& tuning) {
  return Packer(w, options, tuning).Run();
}

absl::Status Validate(const PackedLayer& layer) {
  SPMMD_ASSIGN_OR_RETURN(const View view, OpenView(layer));
  const char* error = CheckDecode(view, [](int64_t tiles, auto body) {
    DefaultThreadPool().ParallelFor(tiles, [&](int64_t tile, int) { body(tile); });
  });
  return error == nullptr ? absl::OkStatus() : Corrupt(error);
}

absl::Status Unpack(const PackedLayer& layer, const MutableDenseView& out) {
  SPMMD_ASSIGN_OR_RETURN(const View view, OpenView(layer));
  std::atomic<bool> ok{true};
  DefaultThreadPool().ParallelFor(view.shape.tiles(), [&](int64_t tile, int) {
    if (!DecodeTile(view, tile, [&](int64_t row, int64_t column, uint16_t bits) {
          std::memcpy(out.row(row) + column * 2, &bits, 2);
        })) {
      ok = false;
    }
  });
  return ok ? absl::OkStatus() : Corrupt("section stream, bases or escapes: a column or a base is out of range");
}

int64_t CountEscapes(const PackedLayer& layer) {
  const Section* section = layer.FindSection(kEscapeSection);
  if (section == nullptr) return 0;
  const absl::Span<const uint32_t> entries = section->data.As<uint32_t>();
  return std::count_if(entries.begin(), entries.end(), [](uint32_t entry) { return (entry & 0x7fffu) != 0; });
}

}  // namespace spmmd::row_stream
