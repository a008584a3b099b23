#include "kernels/format/reference.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/base/thread_pool.h"

namespace spmmd {
namespace {

std::vector<double> RowAsDouble(const DenseView& view, int64_t row) {
  std::vector<double> values(static_cast<size_t>(view.cols));
  for (int64_t c = 0; c < view.cols; ++c) values[static_cast<size_t>(c)] = ElementAsDouble(view, row, c);
  return values;
}

}  // namespace

Reference ReferenceRows(const DenseView& w, absl::Span<const int64_t> rows, const DenseView& x,
                        absl::Span<const float> bias, Activation activation) {
  Reference reference;
  reference.n = x.rows;
  reference.m = static_cast<int64_t>(rows.size());
  reference.y.resize(static_cast<size_t>(reference.n * reference.m));
  reference.scale.resize(reference.y.size());
  std::vector<std::vector<double>> tokens;
  tokens.reserve(static_cast<size_t>(x.rows));
  for (int64_t n = 0; n < x.rows; ++n) tokens.push_back(RowAsDouble(x, n));
  DefaultThreadPool().ParallelFor(reference.m, [&](int64_t i, int /*worker*/) {
    const int64_t m = rows[static_cast<size_t>(i)];
    const std::vector<double> weights = RowAsDouble(w, m);
    for (int64_t n = 0; n < x.rows; ++n) {
      const std::vector<double>& token = tokens[static_cast<size_t>(n)];
      double sum = bias.empty() ? 0.0 : bias[static_cast<size_t>(m)];
      double scale = std::abs(sum);
      for (size_t k = 0; k < weights.size(); ++k) {
        if (weights[k] == 0) continue;  // a pruned weight multiplies nothing, an infinite activation included
        sum += weights[k] * token[k];
        scale += std::abs(weights[k] * token[k]);
      }
      const auto at = static_cast<size_t>(n * reference.m + i);
      reference.y[at] = ActivateDouble(activation, sum);
      reference.scale[at] = scale;
    }
  });
  return reference;
}

Reference ReferenceMatmul(const DenseView& w, const DenseView& x, absl::Span<const float> bias, Activation activation) {
  std::vector<int64_t> rows(static_cast<size_t>(w.rows));
  std::iota(rows.begin(), rows.end(), 0);
  return ReferenceRows(w, rows, x, bias, activation);
}

Reference ReferenceMatmulSparse(const DenseView& w, absl::Span<const uint32_t> indices, absl::Span<const float> values,
                                absl::Span<const float> bias, Activation activation) {
  std::vector<float> x(static_cast<size_t>(w.cols), 0.0f);
  for (size_t i = 0; i < indices.size(); ++i) x[indices[i]] = values[i];
  const DenseView view{reinterpret_cast<const std::byte*>(x.data()), DType::kF32, 1, w.cols, w.cols};
  return ReferenceMatmul(w, view, bias, activation);
}

double DefaultTolerance(DType output, int64_t k) {
  // Worst case of k ordered fp32 additions is k * 2^-24; the typical error grows with sqrt(k). Twice the latter with a
  // floor leaves a wide margin for correct kernels and none for a wrong element.
  const double accumulation =
      std::ldexp(1.0, -24) * (8.0 + 2.0 * std::sqrt(static_cast<double>(std::max<int64_t>(k, 1))));
  const double rounding = output == DType::kF16    ? std::ldexp(1.0, -11)
                          : output == DType::kBf16 ? std::ldexp(1.0, -8)
                                                   : 0;
  return accumulation + 1.01 * rounding;
}

absl::Status CompareToReference(const DenseView& y, const Reference& reference, double rtol, double atol) {
  if (y.rows != reference.n || y.cols != reference.m) {
    return absl::InternalError(
        absl::StrCat("shape [", y.rows, ", ", y.cols, "] against reference [", reference.n, ", ", reference.m, "]"));
  }
  int64_t mismatches = 0;
  std::string first;
  for (int64_t n = 0; n < reference.n; ++n) {
    for (int64_t m = 0; m < reference.m; ++m) {
      const auto at = static_cast<size_t>(n * reference.m + m);
      const double got = ElementAsDouble(y, n, m);
      const double want = reference.y[at];
      const double limit = atol + rtol * reference.scale[at];
      const bool same = std::isnan(want) ? std::isnan(got) : got == want || std::abs(got - want) <= limit;
      if (same) continue;
      if (mismatches++ == 0) {
        first = absl::StrCat("y[", n, "][", m, "] = ", got, ", reference ", want, ", limit ", limit);
      }
    }
  }
  if (mismatches == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(first, " (", mismatches, " of ", reference.y.size(), " mismatch)"));
}

double MaxRelativeError(const DenseView& y, const Reference& reference) {
  double worst = 0;
  for (int64_t n = 0; n < reference.n; ++n) {
    for (int64_t m = 0; m < reference.m; ++m) {
      const auto at = static_cast<size_t>(n * reference.m + m);
      if (reference.scale[at] <= 0) continue;
      const double error = std::abs(ElementAsDouble(y, n, m) - reference.y[at]) / reference.scale[at];
      worst = std::isnan(error) ? HUGE_VAL : std::max(worst, error);
    }
  }
  return worst;
}

}  // namespace spmmd
