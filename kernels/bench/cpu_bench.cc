#include "kernels/bench/cpu_bench.h"

#include <cblas.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_pool.h"
#include "kernels/bench/read_ceiling.h"
#include "kernels/cpu/matmul.h"
#include "kernels/format/reference.h"

namespace spmmd::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Idle OpenBLAS threads spin before they sleep: 2^26 clock ticks unless OPENBLAS_THREAD_TIMEOUT says otherwise, as
// main() sees to. Our threads need the cores back first.
void LetBlasThreadsSleep() { std::this_thread::sleep_for(std::chrono::milliseconds(40)); }

double Percentile(std::vector<double> samples, double share) {
  const std::ptrdiff_t rank = std::lround(share * static_cast<double>(samples.size() - 1));
  std::nth_element(samples.begin(), samples.begin() + rank, samples.end());
  return samples[static_cast<size_t>(rank)];
}

template <class Call>
double Microseconds(Call&& call) {
  const Clock::time_point start = Clock::now();
  call();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// Copies of `bytes` that together exceed every cache level several times.
int CopiesFor(size_t bytes) {
  const long reported = sysconf(_SC_LEVEL3_CACHE_SIZE);  // NOLINT(google-runtime-int)
  const size_t cache = std::max<size_t>(reported > 0 ? static_cast<size_t>(reported) : 0, size_t{32} << 20);
  return static_cast<int>(std::clamp<size_t>(4 * cache / std::max<size_t>(bytes, 1) + 1, 2, 64));
}

absl::StatusOr<PackedLayer> CopyLayer(const PackedLayer& layer) {
  PackedLayer copy = layer;
  for (Section& section : copy.sections) {
    SPMMD_ASSIGN_OR_RETURN(Buffer data, Buffer::Allocate(section.data.size()));
    std::memcpy(data.mutable_data(), section.data.data(), section.data.size());
    section.data = std::move(data);
  }
  return copy;
}

// The threads that OpenBLAS started with, OPENBLAS_NUM_THREADS or all cores. Asked once, before the DENSE path of the
// library under test sets them to one.
int BlasThreads() {
  static const int threads = openblas_get_num_threads();
  return threads;
}

// OpenBLAS fp32 for Y [N, M] = X [N, K] * W^T, by the fastest of its routes.
class DenseBaseline {
 public:
  static absl::StatusOr<DenseBaseline> Create(const DenseView& weights, const DenseView& tokens) {
    DenseBaseline dense;
    dense.m_ = weights.rows;
    dense.k_ = weights.cols;
    dense.n_ = tokens.rows;
    const size_t bytes = static_cast<size_t>(dense.m_ * dense.k_) * sizeof(float);
    for (int i = CopiesFor(bytes); i > 0; --i) {
      SPMMD_ASSIGN_OR_RETURN(DenseMatrix copy, DenseMatrix::Create(DType::kF32, dense.m_, dense.k_));
      SPMMD_RETURN_IF_ERROR(ConvertDense(weights, copy.mutable_view()));
      dense.weights_.push_back(std::move(copy));
    }
    SPMMD_ASSIGN_OR_RETURN(dense.x_, DenseMatrix::Create(DType::kF32, dense.n_, dense.k_));
    SPMMD_RETURN_IF_ERROR(ConvertDense(tokens, dense.x_.mutable_view()));
    SPMMD_ASSIGN_OR_RETURN(dense.transposed_x_, DenseMatrix::Create(DType::kF32, dense.k_, dense.n_));
    auto* transposed = reinterpret_cast<float*>(dense.transposed_x_.mutable_view().data);
    for (int64_t n = 0; n < dense.n_; ++n) {
      for (int64_t k = 0; k < dense.k_; ++k) transposed[k * dense.n_ + n] = dense.X()[n * dense.k_ + k];
    }
    SPMMD_ASSIGN_OR_RETURN(dense.y_, DenseMatrix::Create(DType::kF32, dense.n_, dense.m_));
    dense.ChooseRoute();
    return dense;
  }

  void Run() {
    openblas_set_num_threads(BlasThreads());
    Run(route_);
  }

 private:
  enum Route { kGemv, kGemm, kTransposedGemm };

  const float* X() const { return reinterpret_cast<const float*>(x_.view().data); }

  void Run(Route route) {
    const auto* w = reinterpret_cast<const float*>(weights_[next_++ % weights_.size()].view().data);
    auto* y = reinterpret_cast<float*>(y_.mutable_view().data);
    const auto m = static_cast<blasint>(m_), n = static_cast<blasint>(n_), k = static_cast<blasint>(k_);
    switch (route) {
      case kGemv:
        for (int64_t i = 0; i < n_; ++i) {
          cblas_sgemv(CblasRowMajor, CblasNoTrans, m, k, 1.0f, w, k, X() + i * k_, 1, 0.0f, y + i * m_, 1);
        }
        break;
      case kGemm:
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, m, k, 1.0f, X(), k, w, k, 0.0f, y, m);
        break;
      case kTransposedGemm:  // gives Y^T [M, N]: a caller could live with it
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, n, k, 1.0f, w, k,
                    reinterpret_cast<const float*>(transposed_x_.view().data), n, 0.0f, y, n);
        break;
    }
  }

  void ChooseRoute() {
    openblas_set_num_threads(BlasThreads());
    double best = HUGE_VAL;
    for (const Route route : {kGemv, kGemm, kTransposedGemm}) {
      if (n_ == 1 && route != kGemv) continue;  // sgemm of one token is several times slower than sgemv
      Run(route);
      double us = HUGE_VAL;
      for (int i = 0; i < 3; ++i) us = std::min(us, Microseconds([&] { Run(route); }));
      if (us < best) {
        best = us;
        route_ = route;
      }
    }
  }

  int64_t m_ = 0, k_ = 0, n_ = 0;
  std::vector<DenseMatrix> weights_;
  DenseMatrix x_, transposed_x_, y_;
  size_t next_ = 0;
  Route route_ = kGemv;
};

// One layer in one format with the operands of one configuration.
struct Subject {
  std::vector<PackedLayer> layers;
  DenseMatrix x;
  std::vector<uint32_t> indices;
  std::vector<float> values;
  DenseMatrix y;
  cpu::LaunchInfo info;
  size_t next = 0;

  const PackedLayer& Next() { return layers[next++ % layers.size()]; }

  absl::Status Dense(cpu::LaunchInfo* launch = nullptr) {
    return cpu::Matmul(Next(), x.view(), {}, y.mutable_view(), DefaultThreadPool(), launch);
  }
  absl::Status Sparse(cpu::LaunchInfo* launch = nullptr) {
    return cpu::MatmulSparse(Next(), {indices, values}, {}, y.mutable_view(), DefaultThreadPool(), launch);
  }
};

// Rounds to values of a narrower dtype: what the library takes as fp32, but came as that.
void RoundTo(DType dtype, std::vector<float>& values) {
  for (float& value : values) {
    if (dtype == DType::kBf16) value = Bf16ToFloat(FloatToBf16(value));
    if (dtype == DType::kF16) value = F16ToFloat(FloatToF16(value));
  }
}

struct Timings {
  std::vector<double> own, spmv, dense;
};

absl::Status TakeTurns(const BenchOptions& options, bool sparse, Subject& subject, DenseBaseline& dense,
                       Timings* timings) {
  absl::Status status;
  const auto time = [&](std::vector<double>& samples, auto&& call) {
    // Brings x, code and predictors back, and either side's threads from their sleep to cores of their own.
    constexpr auto kWarmUp = std::chrono::milliseconds(8);
    const Clock::time_point start = Clock::now();
    do {
      call();
    } while (Clock::now() - start < kWarmUp);
    for (int i = 0; i < options.calls; ++i) samples.push_back(Microseconds(call));
  };
  for (int round = 0; round < options.rounds && status.ok(); ++round) {
    time(timings->dense, [&] { dense.Run(); });
    LetBlasThreadsSleep();
    if (sparse) {
      time(timings->own, [&] { status.Update(subject.Sparse()); });
      time(timings->spmv, [&] { status.Update(subject.Dense()); });
    } else {
      time(timings->own, [&] { status.Update(subject.Dense()); });
    }
  }
  return status;
}

absl::StatusOr<double> RelativeError(const DenseView& weights, bool sparse, Subject& subject) {
  constexpr int64_t kSampleRows = 96;
  const int64_t count = std::min(weights.rows, kSampleRows);
  std::vector<int64_t> rows(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) rows[static_cast<size_t>(i)] = i * weights.rows / count;
  DenseMatrix x = subject.x;
  if (sparse) {
    SPMMD_ASSIGN_OR_RETURN(x, DenseMatrix::Create(DType::kF32, 1, weights.cols));
    auto* dense = reinterpret_cast<float*>(x.mutable_view().data);
    for (size_t i = 0; i < subject.indices.size(); ++i) dense[subject.indices[i]] = subject.values[i];
  }
  const Reference reference = ReferenceRows(weights, rows, x.view());
  // A poisoned output shows what a call leaves unwritten.
  std::memset(subject.y.mutable_view().data, 0xff, subject.y.bytes());
  SPMMD_RETURN_IF_ERROR(sparse ? subject.Sparse(&subject.info) : subject.Dense(&subject.info));
  SPMMD_ASSIGN_OR_RETURN(DenseMatrix sample, DenseMatrix::Create(DType::kF32, subject.y.rows(), count));
  auto* to = reinterpret_cast<float*>(sample.mutable_view().data);
  for (int64_t n = 0; n < subject.y.rows(); ++n) {
    const auto* from = reinterpret_cast<const float*>(subject.y.view().row(n));
    for (int64_t i = 0; i < count; ++i) to[n * count + i] = from[rows[static_cast<size_t>(i)]];
  }
  return MaxRelativeError(sample.view(), reference);
}

absl::Status RunShape(const BenchOptions& options, int64_t m, int64_t k, double sparsity,
                      const std::function<void(const Row&)>& emit) {
  const bool spmspv = options.op == "spmspv";
  SPMMD_ASSIGN_OR_RETURN(const DenseMatrix weights,
                         RandomWeights(options.dtype, m, k, sparsity, options.mask, options.seed));
  std::vector<Subject> subjects;
  for (const Format format : options.formats) {
    Subject subject;
    SPMMD_ASSIGN_OR_RETURN(PackedLayer layer, Pack(format, weights.view()));
    for (int i = CopiesFor(layer.bytes().total()) - 1; i > 0; --i) {
      SPMMD_ASSIGN_OR_RETURN(PackedLayer copy, CopyLayer(layer));
      subject.layers.push_back(std::move(copy));
    }
    subject.layers.push_back(std::move(layer));
    subjects.push_back(std::move(subject));
  }
  const std::vector<int64_t> tokens = options.op == "spmm" ? options.tokens : std::vector<int64_t>{1};
  const std::vector<double> x_sparsity = spmspv ? options.activation_sparsity : std::vector<double>{0.0};
  for (const int64_t n : tokens) {
    for (const DType x_dtype : options.x_dtypes) {
      SPMMD_ASSIGN_OR_RETURN(const DenseMatrix x, RandomTokens(x_dtype, n, k, options.seed + 1));
      SPMMD_ASSIGN_OR_RETURN(DenseBaseline dense, DenseBaseline::Create(weights.view(), x.view()));
      for (const double zeros : x_sparsity) {
        for (size_t i = 0; i < subjects.size(); ++i) {
          Subject& subject = subjects[i];
          subject.x = x;
          SPMMD_ASSIGN_OR_RETURN(subject.y, DenseMatrix::Create(DType::kF32, n, m));
          RandomSparseVector(k, zeros, options.seed + 2, &subject.indices, &subject.values);
          RoundTo(x_dtype, subject.values);
          Row row;
          SPMMD_ASSIGN_OR_RETURN(row.rel_error, RelativeError(weights.view(), spmspv, subject));
          Timings timings;
          SPMMD_RETURN_IF_ERROR(TakeTurns(options, spmspv, subject, dense, &timings));
          const PackedLayer& layer = subject.layers[0];
          row.op = options.op;
          row.format = std::string(Name(layer.format));
          row.kernel = std::string(subject.info.kernel);
          row.dtype = std::string(Name(layer.dtype));
          row.x_dtype = std::string(Name(x_dtype));
          row.m = m;
          row.k = k;
          row.n = n;
          row.sparsity = layer.sparsity();
          row.activation_sparsity =
              spmspv ? 1.0 - static_cast<double>(subject.indices.size()) / static_cast<double>(k) : 0.0;
          row.us_p50 = Percentile(timings.own, 0.5);
          row.us_p10 = Percentile(timings.own, 0.1);
          row.us_p90 = Percentile(timings.own, 0.9);
          row.bytes = subject.info.bytes;
          row.gbps = static_cast<double>(row.bytes) / row.us_p50 / 1e3;
          row.ceiling_gbps = ReadCeilingGbps(DefaultThreadPool());
          row.ceiling_pct = 100 * row.gbps / row.ceiling_gbps;
          row.dense_us = Percentile(timings.dense, 0.5);
          row.packed_share = static_cast<double>(layer.bytes().total()) / static_cast<double>(layer.dense_bytes());
          if (spmspv) row.own_spmv_us = Percentile(timings.spmv, 0.5);
          emit(row);
        }
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

const char* BlasCoreType() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512bw")) return nullptr;
  for (const char* known : {"SkylakeX", "Cooperlake", "SapphireRapids"}) {
    if (std::strcmp(openblas_get_corename(), known) == 0) return nullptr;
  }
  return __builtin_cpu_supports("avx512bf16") ? "Cooperlake" : "SkylakeX";
#else
  return nullptr;
#endif
}

std::vector<std::string> CpuNotes() {
  return {
      absl::StrCat("backend cpu, ", DefaultThreadPool().size(), " threads"),
      absl::StrCat("dense baseline: OpenBLAS fp32, core type ", openblas_get_corename(), ", ", BlasThreads(),
                   " threads, fastest of sgemv, sgemm and sgemm giving the transpose"),
      absl::StrFormat("read ceiling: %.1f GB/s at the start, measured again for every row",
                      ReadCeilingGbps(DefaultThreadPool())),
      "medians of calls that alternate with the baseline's, weights rotated over more than the last-level cache; y "
      "fp32",
  };
}

absl::Status RunCpu(const BenchOptions& options, const std::function<void(const Row&)>& emit) {
  for (const Format format : options.formats) {
    if (!cpu::CanExecute(format)) {
      return absl::InvalidArgumentError(absl::StrCat("formats: ", std::string(Name(format)), " has no CPU kernel"));
    }
  }
  for (const auto& [m, k] : options.shapes) {
    for (const double sparsity : options.sparsity) SPMMD_RETURN_IF_ERROR(RunShape(options, m, k, sparsity, emit));
  }
  return absl::OkStatus();
}

}  // namespace spmmd::bench
