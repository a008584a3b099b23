#include "kernels/bench/workload.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_pool.h"
#include "kernels/format/dense_rows.h"
#include "kernels/format/prune.h"

namespace spmmd::bench {
namespace {

// splitmix64: one generator a row, so that rows can be made in parallel.
class Random {
 public:
  Random(uint64_t seed, uint64_t stream) : state_(seed * 0x9e3779b97f4a7c15u ^ (stream + 1) * 0xd1342543de82ef95u) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // Sum of eight uniforms: close enough to a normal distribution, and much cheaper than one.
  float Normal() {
    const uint64_t a = Next();
    const uint64_t b = Next();
    int64_t sum = 0;
    for (int shift = 0; shift < 64; shift += 16) {
      sum += static_cast<int64_t>((a >> shift) & 0xffff) + static_cast<int64_t>((b >> shift) & 0xffff);
    }
    constexpr double kDeviation = 65536.0 * 0.81649658092772603;  // sqrt(8 / 12)
    return static_cast<float>((static_cast<double>(sum) - 4 * 65535.0) / kDeviation);
  }

 private:
  uint64_t state_;
};

std::vector<float> ColumnScales(int64_t k, double sigma, uint64_t seed) {
  std::vector<float> scales(static_cast<size_t>(k), 1.0f);
  Random random(seed, ~uint64_t{0});
  if (sigma > 0) {
    for (float& scale : scales) scale = static_cast<float>(std::exp(sigma * random.Normal()));
  }
  return scales;
}

// The score below which a share `sparsity` of all weights lies, from a sample.
float Threshold(const std::vector<float>& scales, double sparsity, uint64_t seed) {
  constexpr size_t kSample = size_t{1} << 20;
  std::vector<float> scores(kSample);
  Random random(seed, ~uint64_t{1});
  for (size_t i = 0; i < kSample; ++i) scores[i] = std::abs(random.Normal()) * scales[i % scales.size()];
  const auto rank = std::min(static_cast<size_t>(sparsity * kSample), kSample - 1);
  std::nth_element(scores.begin(), scores.begin() + static_cast<std::ptrdiff_t>(rank), scores.end());
  return sparsity <= 0 ? -1.0f : scores[rank];
}

}  // namespace

absl::StatusOr<DenseMatrix> RandomWeights(DType dtype, int64_t m, int64_t k, double sparsity, Mask mask,
                                          uint64_t seed) {
  if (!(sparsity >= 0 && sparsity <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("sparsity: ", sparsity, " is outside [0, 1]"));
  }
  SPMMD_ASSIGN_OR_RETURN(DenseMatrix weights, DenseMatrix::Create(dtype, m, k));
  const std::vector<float> scales = ColumnScales(k, mask.sigma, seed);
  const float threshold = mask.two_four ? -1.0f : sparsity >= 1 ? HUGE_VALF : Threshold(scales, sparsity, seed);
  const float deviation = 1.0f / std::sqrt(static_cast<float>(k));
  const MutableDenseView view = weights.mutable_view();
  DefaultThreadPool().ParallelFor(m, [&](int64_t r, int /*worker*/) {
    Random random(seed, static_cast<uint64_t>(r));
    std::vector<float> row(static_cast<size_t>(k));
    for (size_t c = 0; c < row.size(); ++c) {
      const float w = random.Normal();
      row[c] = std::abs(w) * scales[c] > threshold ? w * deviation : 0.0f;
    }
    NarrowRow(row.data(), dtype, view.row(r), k);
  });
  if (mask.two_four) SPMMD_RETURN_IF_ERROR(PruneNm(view, 2, 4));
  return weights;
}

absl::StatusOr<DenseMatrix> RandomTokens(DType dtype, int64_t n, int64_t k, uint64_t seed) {
  SPMMD_ASSIGN_OR_RETURN(DenseMatrix tokens, DenseMatrix::Create(dtype, n, k));
  const MutableDenseView view = tokens.mutable_view();
  std::vector<float> row(static_cast<size_t>(k));
  for (int64_t r = 0; r < n; ++r) {
    Random random(seed, static_cast<uint64_t>(r));
    for (float& x : row) x = random.Normal();
    NarrowRow(row.data(), dtype, view.row(r), k);
  }
  return tokens;
}

void RandomSparseVector(int64_t k, double sparsity, uint64_t seed, std::vector<uint32_t>* indices,
                        std::vector<float>* values) {
  indices->clear();
  values->clear();
  Random random(seed, 0);
  auto wanted = static_cast<int64_t>(std::llround((1 - sparsity) * static_cast<double>(k)));
  for (int64_t i = 0; i < k && wanted > 0; ++i) {  // selection sampling: every subset is equally likely
    if (random.Next() % static_cast<uint64_t>(k - i) < static_cast<uint64_t>(wanted)) {
      indices->push_back(static_cast<uint32_t>(i));
      values->push_back(random.Normal());
      --wanted;
    }
  }
}

}  // namespace spmmd::bench
