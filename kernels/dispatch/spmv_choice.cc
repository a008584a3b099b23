#include "kernels/dispatch/spmv_choice.h"

#include <algorithm>
#include <limits>

namespace spmmd {
namespace {

constexpr double kMi = 1024.0 * 1024.0;
constexpr double kH200BytesPerSecond = 4.59e12;
// Adding a vector to another in a launch of its own.
constexpr double kAddUs = 2.0;

double Us(const SpmvCost& cost, double bytes, double elements) {
  return cost.fixed_us + cost.us_per_mib * bytes / kMi + cost.us_per_mi_element * elements / kMi;
}

}  // namespace

SpmvTuning H200SpmvTuning(bool chained) {
  // Least squares of relative errors; SpMV within 3 % on average (worst 12), SpMspV within 1.5 (4), dense 4 (10).
  SpmvTuning tuning;
  tuning.spmv = chained ? SpmvCost{2.90, 0.156, 0.175} : SpmvCost{3.91, 0.149, 0.196};
  tuning.spmspv_overwrite = chained ? SpmvCost{4.56, 0.151, 0.177} : SpmvCost{5.18, 0.145, 0.190};
  tuning.spmspv_accumulate = chained ? SpmvCost{3.33, 0.152, 0.183} : SpmvCost{4.12, 0.150, 0.181};
  tuning.dense = {4.78, 0.242, 0.0};
  return tuning;
}

SpmvTuning ScaledSpmvTuning(double bytes_per_second, bool chained) {
  SpmvTuning tuning = H200SpmvTuning(chained);
  if (!(bytes_per_second > 0)) return tuning;
  const double factor = kH200BytesPerSecond / bytes_per_second;
  for (SpmvCost* cost : {&tuning.spmv, &tuning.spmspv_overwrite, &tuning.spmspv_accumulate, &tuning.dense}) {
    cost->us_per_mib *= factor;
  }
  return tuning;
}

double PredictSpmvUs(const SpmvTuning& tuning, const SpmvCopies& copies, SpmvKernel kernel, int64_t active_columns,
                     bool accumulate) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const double add = accumulate ? kAddUs : 0.0;
  switch (kernel) {
    case SpmvKernel::kSpmv:
      if (copies.row_stream_bytes <= 0) return kNever;
      return Us(tuning.spmv, static_cast<double>(copies.row_stream_bytes), static_cast<double>(copies.nnz)) + add;
    case SpmvKernel::kDense:
      if (copies.dense_bytes <= 0) return kNever;
      return Us(tuning.dense, static_cast<double>(copies.dense_bytes), 0) + add;
    case SpmvKernel::kSpmspv: {
      if (copies.column_piece_bytes <= 0 || copies.k <= 0) return kNever;
      const double active = static_cast<double>(std::clamp<int64_t>(active_columns, 0, copies.k));
      return Us(accumulate ? tuning.spmspv_accumulate : tuning.spmspv_overwrite,
                static_cast<double>(copies.column_piece_bytes) * active / static_cast<double>(copies.k),
                static_cast<double>(copies.m) * active);
    }
  }
  return kNever;
}

std::optional<SpmvChoice> ChooseSpmv(const SpmvTuning& tuning, const SpmvCopies& copies, int64_t active_columns,
                                     bool accumulate) {
  SpmvChoice best{SpmvKernel::kDense, std::numeric_limits<double>::infinity()};
  for (const SpmvKernel kernel : {SpmvKernel::kSpmv, SpmvKernel::kSpmspv, SpmvKernel::kDense}) {
    const double us = PredictSpmvUs(tuning, copies, kernel, active_columns, accumulate);
    if (us < best.us) best = {kernel, us};
  }
  if (best.us == std::numeric_limits<double>::infinity()) return std::nullopt;
  return best;
}

int64_t LargestSpmspvColumns(const SpmvTuning& tuning, const SpmvCopies& copies, bool accumulate) {
  // The cost of kSpmspv grows with the active columns, the others' does not: bisect.
  const auto wins = [&](int64_t active) {
    const std::optional<SpmvChoice> choice = ChooseSpmv(tuning, copies, active, accumulate);
    return choice.has_value() && choice->kernel == SpmvKernel::kSpmspv;
  };
  if (copies.k <= 0 || !wins(0)) return -1;
  int64_t low = 0;
  int64_t high = copies.k + 1;  // wins(low), and not known to win from high on
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (wins(middle) ? low : high) = middle;
  }
  return low;
}

}  // namespace spmmd
