#include "kernels/format/prune.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/thread_pool.h"

namespace spmmd {
namespace {

constexpr int64_t kBlockElements = 1 << 18;
constexpr size_t kBins = size_t{1} << 16;
using Histogram = std::vector<int64_t>;

// Magnitudes order like their bit patterns without the sign.
constexpr uint16_t Magnitude(uint16_t bits) { return bits & 0x7fffu; }
constexpr uint32_t Magnitude(uint32_t bits) { return bits & 0x7fffffffu; }

// Calls body(begin_row, end_row, worker) for blocks of rows on the default pool.
template <typename Body>
void ParallelRows(const MutableDenseView& w, Body body) {
  const int64_t block = std::max<int64_t>(1, kBlockElements / w.cols);
  DefaultThreadPool().ParallelFor((w.rows + block - 1) / block, [&](int64_t task, int worker) {
    body(task * block, std::min(w.rows, (task + 1) * block), worker);
  });
}

// Counts bin(magnitude) over all elements; a bin of kBins or more is left out.
template <typename T, typename Bin>
Histogram CountBins(const MutableDenseView& w, Bin bin) {
  std::vector<std::vector<uint32_t>> partial(static_cast<size_t>(DefaultThreadPool().size()));
  Histogram total(kBins);
  std::vector<Histogram> sums(partial.size());
  ParallelRows(w, [&](int64_t begin, int64_t end, int worker) {
    const auto index = static_cast<size_t>(worker);
    if (sums[index].empty()) {
      sums[index].resize(kBins);
      partial[index].resize(kBins + 1);
    }
    // 32-bit counters, and one row at a time so that none overflows (a row has at most kMaxDim elements).
    static_assert(kMaxDim < (int64_t{1} << 32));
    uint32_t* counts = partial[index].data();
    int64_t pending = 0;
    const auto flush = [&] {
      for (size_t i = 0; i < kBins; ++i) sums[index][i] += counts[i];
      std::fill_n(counts, kBins + 1, 0u);
      pending = 0;
    };
    for (int64_t row = begin; row < end; ++row) {
      if (pending + w.cols >= (int64_t{1} << 32)) flush();
      const T* values = reinterpret_cast<const T*>(w.row(row));
      for (int64_t col = 0; col < w.cols; ++col) ++counts[std::min<size_t>(bin(Magnitude(values[col])), kBins)];
      pending += w.cols;
    }
    flush();
  });
  for (const Histogram& sum : sums) {
    for (size_t i = 0; i < sum.size(); ++i) total[i] += sum[i];
  }
  return total;
}

// The bin that holds the target-th smallest element (1-based), and how many elements lie in the bins below it.
struct Selected {
  size_t bin;
  int64_t below;
};
Selected SelectBin(const Histogram& histogram, int64_t target) {
  int64_t below = 0;
  for (size_t bin = 0; bin < histogram.size(); ++bin) {
    if (below + histogram[bin] >= target) return {bin, below};
    below += histogram[bin];
  }
  return {histogram.size() - 1, below};
}

// Zeroes everything below `threshold`, and of the elements equal to it the last `equal_to_zero` in row-major order.
template <typename T>
void ZeroBelow(const MutableDenseView& w, T threshold, int64_t equal_to_zero) {
  std::vector<int64_t> equal_in_row(static_cast<size_t>(w.rows));
  ParallelRows(w, [&](int64_t begin, int64_t end, int /*worker*/) {
    for (int64_t row = begin; row < end; ++row) {
      T* values = reinterpret_cast<T*>(w.row(row));
      int64_t equal = 0;
      for (int64_t col = 0; col < w.cols; ++col) {
        const T magnitude = Magnitude(values[col]);
        equal += magnitude == threshold;
        values[col] = magnitude < threshold ? T{0} : values[col];
      }
      equal_in_row[static_cast<size_t>(row)] = equal;
    }
  });
  for (int64_t row = w.rows - 1; row >= 0 && equal_to_zero > 0; --row) {
    const int64_t in_row = std::min(equal_in_row[static_cast<size_t>(row)], equal_to_zero);
    equal_to_zero -= in_row;
    T* values = reinterpret_cast<T*>(w.row(row));
    int64_t left = in_row;
    for (int64_t col = w.cols - 1; col >= 0 && left > 0; --col) {
      if (Magnitude(values[col]) == threshold) {
        values[col] = 0;
        --left;
      }
    }
  }
}

void PruneMagnitude16(const MutableDenseView& w, int64_t target) {
  const Selected selected =
      SelectBin(CountBins<uint16_t>(w, [](uint16_t magnitude) { return size_t{magnitude}; }), target);
  ZeroBelow(w, static_cast<uint16_t>(selected.bin), target - selected.below);
}

void PruneMagnitude32(const MutableDenseView& w, int64_t target) {
  const Selected high =
      SelectBin(CountBins<uint32_t>(w, [](uint32_t magnitude) { return size_t{magnitude >> 16}; }), target);
  const int64_t rest = target - high.below;
  const Selected low = SelectBin(
      CountBins<uint32_t>(
          w, [&](uint32_t magnitude) { return (magnitude >> 16) == high.bin ? size_t{magnitude & 0xffffu} : kBins; }),
      rest);
  ZeroBelow(w, static_cast<uint32_t>((high.bin << 16) | low.bin), rest - low.below);
}

template <typename T>
void PruneGroup(T* values, int count, int n) {
  std::array<uint64_t, 64> keys;  // magnitude, then earlier first
  for (int i = 0; i < count; ++i) {
    keys[static_cast<size_t>(i)] = (uint64_t{Magnitude(values[i])} << 8) | static_cast<uint64_t>(63 - i);
  }
  std::nth_element(keys.begin(), keys.begin() + n, keys.begin() + count, std::greater<>());
  for (int i = n; i < count; ++i) values[63 - static_cast<int>(keys[static_cast<size_t>(i)] & 0xffu)] = 0;
}

template <typename T>
void PruneNmRows(const MutableDenseView& w, int n, int m) {
  ParallelRows(w, [&](int64_t begin, int64_t end, int /*worker*/) {
    for (int64_t row = begin; row < end; ++row) {
      T* values = reinterpret_cast<T*>(w.row(row));
      for (int64_t col = 0; col < w.cols; col += m) {
        const int count = static_cast<int>(std::min<int64_t>(m, w.cols - col));
        if (count > n) PruneGroup(values + col, count, n);
      }
    }
  });
}

// Of a row's bits.
template <typename Bits>
bool IsTwoOfFourRow(const Bits* row, int64_t cols) {
  for (int64_t c = 0; c < cols; c += 4) {
    int nonzero = 0;
    for (int64_t i = c; i < std::min(cols, c + 4); ++i) nonzero += IsNonzeroBits(row[i]) ? 1 : 0;
    if (nonzero > 2) return false;
  }
  return true;
}

}  // namespace

absl::Status PruneMagnitude(const MutableDenseView& w, double sparsity) {
  if (!(sparsity >= 0.0 && sparsity < 1.0)) {
    return absl::InvalidArgumentError(absl::StrCat("sparsity: ", sparsity, " is not in [0, 1)"));
  }
  const int64_t total = w.rows * w.cols;
  const int64_t target = std::min<int64_t>(total, std::llround(sparsity * static_cast<double>(total)));
  if (target == 0) return absl::OkStatus();
  if (SizeOf(w.dtype) == 4) {
    PruneMagnitude32(w, target);
  } else {
    PruneMagnitude16(w, target);
  }
  return absl::OkStatus();
}

absl::Status PruneNm(const MutableDenseView& w, int n, int m) {
  if (m < 2 || m > 64) return absl::InvalidArgumentError(absl::StrCat("m: ", m, " is not in [2, 64]"));
  if (n < 1 || n >= m) return absl::InvalidArgumentError(absl::StrCat("n: ", n, " is not in [1, ", m, ")"));
  if (SizeOf(w.dtype) == 4) {
    PruneNmRows<uint32_t>(w, n, m);
  } else {
    PruneNmRows<uint16_t>(w, n, m);
  }
  return absl::OkStatus();
}

bool IsTwoOfFour(const DenseView& w) {
  const int64_t rows_per_task = std::max<int64_t>(1, (int64_t{1} << 16) / std::max<int64_t>(w.cols, 1));
  const int64_t tasks = (w.rows + rows_per_task - 1) / rows_per_task;
  std::atomic<bool> holds{true};
  DefaultThreadPool().ParallelFor(tasks, [&](int64_t task, int /*worker*/) {
    const int64_t end = std::min(w.rows, (task + 1) * rows_per_task);
    for (int64_t r = task * rows_per_task; r < end && holds.load(std::memory_order_relaxed); ++r) {
      const bool row = w.dtype == DType::kF32 ? IsTwoOfFourRow(reinterpret_cast<const uint32_t*>(w.row(r)), w.cols)
                                              : IsTwoOfFourRow(reinterpret_cast<const uint16_t*>(w.row(r)), w.cols);
      if (!row) holds.store(false, std::memory_order_relaxed);
    }
  });
  return holds.load();
}

}  // namespace spmmd
