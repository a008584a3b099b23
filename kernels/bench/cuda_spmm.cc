#include "kernels/bench/cuda_spmm.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_pool.h"
#include "kernels/dispatch/cuda_library.h"
#include "kernels/format/reference.h"

namespace spmmd::bench {
namespace {

constexpr size_t kRotateBytes = size_t{260} << 20;  // more than four times the L2 of an H200
constexpr int64_t kCheckedRows = 192;
constexpr int kMaxCandidates = 16;

uint64_t Mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return x ^ x >> 33;
}

// Element i of a stream of independent normals, by Box-Muller: parallel and reproducible.
float Normal(uint64_t seed, uint64_t i) {
  const uint64_t bits = Mix(seed * 0x9e3779b97f4a7c15ULL + i);
  const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
  const float v = static_cast<float>(bits & 0xffffff) * 0x1p-24f;
  return std::sqrt(-2.f * std::log(u)) * std::cos(6.2831853f * v);
}

uint16_t Narrow(DType dtype, float v) { return dtype == DType::kBf16 ? FloatToBf16(v) : FloatToF16(v); }

DenseMatrix RandomActivations(DType dtype, int64_t rows, int64_t cols) {
  DenseMatrix x = *DenseMatrix::Create(dtype, rows, cols);
  DefaultThreadPool().ParallelFor(rows, [&](int64_t r, int /*worker*/) {
    auto* row = reinterpret_cast<uint16_t*>(x.mutable_view().row(r));
    for (int64_t c = 0; c < cols; ++c) row[c] = Narrow(dtype, Normal(77, static_cast<uint64_t>(r * cols + c)));
  });
  return x;
}

// Scores |w| * column scale below the sparsity quantile (of a sample of a million) become zero.
absl::StatusOr<DenseMatrix> PrunedWeights(const CudaSpmmOptions& options, int64_t m, int64_t k, double sparsity) {
  SPMMD_ASSIGN_OR_RETURN(DenseMatrix w, DenseMatrix::Create(options.dtype, m, k));
  std::vector<float> scale(static_cast<size_t>(k), 1.f);
  for (int64_t c = 0; options.mask_sigma > 0 && c < k; ++c) {
    scale[static_cast<size_t>(c)] =
        std::exp(static_cast<float>(options.mask_sigma) * Normal(5, static_cast<uint64_t>(c)));
  }
  const auto weight = [&](int64_t r, int64_t c) { return Normal(1234, static_cast<uint64_t>(r * k + c)); };
  std::vector<float> sample(size_t{1} << 20);
  for (size_t i = 0; i < sample.size(); ++i) {
    const uint64_t at = Mix(i) % static_cast<uint64_t>(m * k);
    const auto c = static_cast<int64_t>(at % static_cast<uint64_t>(k));
    sample[i] = std::fabs(Normal(1234, at)) * scale[static_cast<size_t>(c)];
  }
  const auto cut = sample.begin() + static_cast<int64_t>(sparsity * static_cast<double>(sample.size() - 1));
  std::nth_element(sample.begin(), cut, sample.end());
  const float threshold = *cut;
  DefaultThreadPool().ParallelFor(m, [&](int64_t r, int /*worker*/) {
    auto* row = reinterpret_cast<uint16_t*>(w.mutable_view().row(r));
    for (int64_t c = 0; c < k; ++c) {
      const float v = weight(r, c);
      if (std::fabs(v) * scale[static_cast<size_t>(c)] > threshold) row[c] = Narrow(options.dtype, 0.02f * v);
    }
  });
  return w;
}

struct Times {
  double p10 = 0;
  double p50 = 0;
  double p90 = 0;
};

Times Summarize(std::vector<double> us) {
  std::sort(us.begin(), us.end());
  const auto at = [&](double q) { return us[static_cast<size_t>(q * static_cast<double>(us.size() - 1) + 0.5)]; };
  return {at(0.1), at(0.5), at(0.9)};
}

class Bench {
 public:
  Bench(const CudaSpmmOptions& options, std::shared_ptr<const CudaLibrary> cuda, std::FILE* csv)
      : options_(options), cuda_(std::move(cuda)), csv_(csv) {}
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  // Device memory goes with the process.

  absl::Status Run() {
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->device_open(0, &device_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->stream_create(device_, &stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_create(device_, 1, &begin_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_create(device_, 1, &end_)));
    SPMMD_RETURN_IF_ERROR(MeasureCeiling());
    std::fprintf(csv_,
                 "op,format,kernel,dtype,M,K,N,sparsity,activation_sparsity,us_p50,us_p10,us_p90,bytes,GBps,"
                 "ceiling_pct,dense_us,ratio_vs_dense,rel_error\n");
    for (const auto& [m, k] : options_.shapes) {
      for (const double sparsity : options_.sparsities) SPMMD_RETURN_IF_ERROR(RunLayer(m, k, sparsity));
    }
    return absl::OkStatus();
  }

 private:
  // A layer's copies on the device, and how one launch of it is made.
  struct Resident {
    std::vector<spmmd_cuda_layer*> copies;
    size_t bytes = 0;
  };
  struct Contender {
    std::string format;
    std::string kernel;
    const Resident* layer = nullptr;
    int32_t index = -1;
    spmmd_cuda_matmul call = {};
    spmmd_cuda_graph graph = nullptr;
    int launches = 0;
    std::vector<double> us;
  };

  absl::Status Ok(spmmd_cuda_status code) const { return cuda_->ToStatus(code); }

  absl::StatusOr<void*> Allocate(size_t bytes) {
    void* pointer = nullptr;
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->malloc(device_, bytes, &pointer)));
    return pointer;
  }

  absl::Status MeasureCeiling() {
    constexpr size_t kBytes = size_t{2} << 30;
    SPMMD_ASSIGN_OR_RETURN(void* buffer, Allocate(kBytes));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->memset_async(device_, buffer, 1, kBytes, stream_)));
    std::vector<double> us;
    for (int i = 0; i < 7; ++i) {
      SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_record(device_, begin_, stream_)));
      SPMMD_RETURN_IF_ERROR(Ok(cuda_->read_probe(device_, buffer, kBytes, stream_)));
      SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_record(device_, end_, stream_)));
      SPMMD_ASSIGN_OR_RETURN(const double elapsed, Elapsed());
      us.push_back(elapsed);
    }
    ceiling_ = static_cast<double>(kBytes) / (Summarize(us).p50 * 1e-6);
    std::fprintf(stderr, "read ceiling %.0f GB/s\n", ceiling_ * 1e-9);
    return Ok(cuda_->free(device_, buffer));
  }

  absl::StatusOr<double> Elapsed() {
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_synchronize(device_, end_)));
    double us = 0;
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_elapsed_us(device_, begin_, end_, &us)));
    return us;
  }

  absl::StatusOr<Resident> MakeResident(const PackedLayer& packed) {
    Resident resident;
    const CudaLayerDesc desc(packed);
    spmmd_cuda_layer* layer = nullptr;
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->layer_upload(device_, &desc.desc, &layer)));
    resident.copies.push_back(layer);
    resident.bytes = packed.bytes().total();
    while (resident.copies.size() * resident.bytes < kRotateBytes) {
      SPMMD_RETURN_IF_ERROR(Ok(cuda_->layer_clone(resident.copies.front(), &layer)));
      resident.copies.push_back(layer);
    }
    return resident;
  }

  void Free(Resident& resident) {
    for (spmmd_cuda_layer* layer : resident.copies) cuda_->layer_free(layer);
    resident.copies.clear();
  }

  absl::Status Prepare(Contender& contender) {
    spmmd_cuda_matmul& call = contender.call;
    uint64_t bytes = 0;
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->workspace_bytes(contender.layer->copies.front(), contender.index, &call, &bytes)));
    if (bytes > workspace_bytes_) {
      if (workspace_ != nullptr) SPMMD_RETURN_IF_ERROR(Ok(cuda_->free(device_, workspace_)));
      SPMMD_ASSIGN_OR_RETURN(workspace_, Allocate(bytes));
      workspace_bytes_ = bytes;
      SPMMD_RETURN_IF_ERROR(Ok(cuda_->workspace_init(device_, workspace_, bytes, stream_)));
    }
    call.workspace = workspace_;
    call.workspace_bytes = workspace_bytes_;
    return absl::OkStatus();
  }

  absl::Status Record(Contender& contender) {
    SPMMD_RETURN_IF_ERROR(Prepare(contender));
    const auto& copies = contender.layer->copies;
    contender.launches = static_cast<int>(std::max<size_t>(contender.call.n >= 512 ? 2 : 8, copies.size()));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->graph_begin(device_, stream_)));
    absl::Status status;
    for (int i = 0; i < contender.launches && status.ok(); ++i) {
      status =
          Ok(cuda_->launch(copies[static_cast<size_t>(i) % copies.size()], contender.index, &contender.call, stream_));
    }
    const absl::Status ended = Ok(cuda_->graph_end(device_, stream_, &contender.graph));
    SPMMD_RETURN_IF_ERROR(status);
    SPMMD_RETURN_IF_ERROR(ended);
    return Replay(contender).status();  // warms up
  }

  absl::StatusOr<double> Replay(const Contender& contender) {
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_record(device_, begin_, stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->graph_launch(device_, contender.graph, stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_record(device_, end_, stream_)));
    SPMMD_ASSIGN_OR_RETURN(const double us, Elapsed());
    return us / contender.launches;
  }

  absl::Status Discard(Contender& contender) {
    if (contender.graph == nullptr) return absl::OkStatus();
    const spmmd_cuda_graph graph = std::exchange(contender.graph, nullptr);
    return Ok(cuda_->graph_destroy(device_, graph));
  }

  // Leaves the fastest of cublasLt's candidates selected.
  absl::Status TuneDense(Contender& dense) {
    int best = 0;
    double best_us = 0;
    for (int candidate = 0; candidate < kMaxCandidates; ++candidate) {
      const spmmd_cuda_status code = cuda_->dense_use_candidate(dense.layer->copies.front(), &dense.call, candidate);
      if (code == SPMMD_CUDA_NOT_FOUND) break;
      SPMMD_RETURN_IF_ERROR(Ok(code));
      SPMMD_RETURN_IF_ERROR(Record(dense));
      std::vector<double> us;
      for (int i = 0; i < 3; ++i) {
        SPMMD_ASSIGN_OR_RETURN(const double once, Replay(dense));
        us.push_back(once);
      }
      SPMMD_RETURN_IF_ERROR(Discard(dense));
      const double median = Summarize(us).p50;
      if (candidate == 0 || median < best_us) {
        best = candidate;
        best_us = median;
      }
    }
    return Ok(cuda_->dense_use_candidate(dense.layer->copies.front(), &dense.call, best));
  }

  // Relative Frobenius error of sampled output rows, NaN when an output was never written.
  absl::StatusOr<double> Error(const Contender& contender, const DenseView& w, const DenseView& x) {
    const int64_t m = w.rows;
    const int64_t n = contender.call.n;
    const size_t bytes = static_cast<size_t>(n * m) * 2;
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->memset_async(device_, contender.call.y, 0xff, bytes, stream_)));
    SPMMD_RETURN_IF_ERROR(
        Ok(cuda_->launch(contender.layer->copies.front(), contender.index, &contender.call, stream_)));
    SPMMD_ASSIGN_OR_RETURN(DenseMatrix y, DenseMatrix::Create(options_.dtype, n, m));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->memcpy_async(device_, y.mutable_view().data, contender.call.y, bytes, stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->stream_synchronize(device_, stream_)));
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < std::min(kCheckedRows, m); ++i) rows.push_back(i * m / std::min(kCheckedRows, m));
    if (reference_n_ != n) {
      reference_ = ReferenceRows(w, rows, x);
      reference_n_ = n;
    }
    double difference = 0;
    double norm = 0;
    for (int64_t token = 0; token < n; ++token) {
      for (size_t i = 0; i < rows.size(); ++i) {
        const double want = reference_.y[static_cast<size_t>(token) * rows.size() + i];
        const double d = ElementAsDouble(y.view(), token, rows[i]) - want;
        difference += d * d;
        norm += want * want;
      }
    }
    return std::sqrt(difference / norm);
  }

  absl::Status RunLayer(int64_t m, int64_t k, double sparsity) {
    SPMMD_ASSIGN_OR_RETURN(DenseMatrix w, PrunedWeights(options_, m, k, sparsity));
    Resident dense;
    std::vector<std::pair<Format, Resident>> sparse;
    {
      SPMMD_ASSIGN_OR_RETURN(PackedLayer packed, Pack(Format::kDense, w.view()));
      SPMMD_ASSIGN_OR_RETURN(dense, MakeResident(packed));
    }
    for (const Format format : options_.formats) {
      SPMMD_ASSIGN_OR_RETURN(PackedLayer packed, Pack(format, w.view()));
      SPMMD_ASSIGN_OR_RETURN(Resident resident, MakeResident(packed));
      std::fprintf(stderr, "%s %lldx%lld sparsity %.2f: %.4f bytes an element\n", std::string(Name(format)).c_str(),
                   static_cast<long long>(m), static_cast<long long>(k), sparsity,
                   static_cast<double>(resident.bytes) / (static_cast<double>(m) * static_cast<double>(k)));
      sparse.emplace_back(format, std::move(resident));
    }
    reference_n_ = -1;
    const int64_t most = *std::max_element(options_.tokens.begin(), options_.tokens.end());
    const DenseMatrix x = RandomActivations(options_.dtype, most, k);
    SPMMD_ASSIGN_OR_RETURN(void* x_device, Allocate(x.bytes()));
    SPMMD_ASSIGN_OR_RETURN(void* y_device, Allocate(static_cast<size_t>(most * m) * 2));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->memcpy_async(device_, x_device, x.view().data, x.bytes(), stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->stream_synchronize(device_, stream_)));
    for (const int64_t n : options_.tokens) {
      DenseView x_view = x.view();
      x_view.rows = n;
      SPMMD_RETURN_IF_ERROR(RunTokens(w.view(), x_view, sparsity, dense, sparse, x_device, y_device));
    }
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->free(device_, x_device)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->free(device_, y_device)));
    Free(dense);
    for (auto& [format, resident] : sparse) Free(resident);
    return absl::OkStatus();
  }

  absl::Status RunTokens(const DenseView& w, const DenseView& x, double sparsity, const Resident& dense,
                         const std::vector<std::pair<Format, Resident>>& sparse, void* x_device, void* y_device) {
    spmmd_cuda_matmul call = {};
    call.x = x_device;
    call.n = x.rows;
    call.x_stride = w.cols;
    call.x_dtype = static_cast<int32_t>(options_.dtype);
    call.y_dtype = static_cast<int32_t>(options_.dtype);
    call.y = y_device;
    call.y_stride = w.rows;
    std::vector<Contender> contenders;
    contenders.push_back(
        {"DENSE", "dense_cublaslt", &dense, cuda_->find_kernel("dense_cublaslt"), call, nullptr, 0, {}});
    SPMMD_RETURN_IF_ERROR(TuneDense(contenders.front()));
    for (const auto& [format, resident] : sparse) {
      for (int32_t kernel = 0; kernel < cuda_->kernel_count(); ++kernel) {
        if (cuda_->can_implement(resident.copies.front(), kernel, &call) != SPMMD_CUDA_OK) continue;
        const std::string name = cuda_->kernel_name(kernel);
        contenders.push_back({std::string(Name(format)), name, &resident, kernel, call, nullptr, 0, {}});
        if (!options_.chain) continue;
        contenders.push_back({std::string(Name(format)), name + "+chain", &resident, kernel, call, nullptr, 0, {}});
        contenders.back().call.flags |= SPMMD_CUDA_FLAG_CHAIN;
      }
    }
    // The largest workspace first: a graph keeps the pointer it was recorded with.
    for (Contender& contender : contenders) SPMMD_RETURN_IF_ERROR(Prepare(contender));
    for (Contender& contender : contenders) SPMMD_RETURN_IF_ERROR(Record(contender));
    for (int round = 0; round < options_.rounds; ++round) {
      for (Contender& contender : contenders) {
        SPMMD_ASSIGN_OR_RETURN(const double us, Replay(contender));
        contender.us.push_back(us);
      }
    }
    const double dense_us = Summarize(contenders.front().us).p50;
    for (Contender& contender : contenders) {
      SPMMD_ASSIGN_OR_RETURN(const double error, Error(contender, w, x));
      const Times times = Summarize(contender.us);
      const double bytes =
          static_cast<double>(contender.layer->bytes) + static_cast<double>(x.rows * (w.rows + w.cols)) * 2;
      std::fprintf(csv_, "spmm,%s,%s,%s,%lld,%lld,%lld,%.2f,0,%.2f,%.2f,%.2f,%.0f,%.0f,%.1f,%.2f,%.3f,%.2e\n",
                   contender.format.c_str(), contender.kernel.c_str(), std::string(Name(options_.dtype)).c_str(),
                   static_cast<long long>(w.rows), static_cast<long long>(w.cols), static_cast<long long>(x.rows),
                   sparsity, times.p50, times.p10, times.p90, bytes, bytes / times.p50 * 1e-3,
                   bytes / (times.p50 * 1e-6) / ceiling_ * 100, dense_us, dense_us / times.p50, error);
      std::fflush(csv_);
      SPMMD_RETURN_IF_ERROR(Discard(contender));
    }
    return absl::OkStatus();
  }

  const CudaSpmmOptions& options_;
  const std::shared_ptr<const CudaLibrary> cuda_;
  std::FILE* const csv_;
  spmmd_cuda_device* device_ = nullptr;
  spmmd_cuda_stream stream_ = nullptr;
  spmmd_cuda_event begin_ = nullptr;
  spmmd_cuda_event end_ = nullptr;
  void* workspace_ = nullptr;
  uint64_t workspace_bytes_ = 0;
  double ceiling_ = 0;  // bytes per second
  int64_t reference_n_ = -1;
  Reference reference_;
};

}  // namespace

absl::Status RunCudaSpmm(const CudaSpmmOptions& options, std::FILE* csv) {
  if (options.dtype == DType::kF32) return absl::InvalidArgumentError("dtype: fp32 weights do not run on a GPU");
  if (options.shapes.empty() || options.tokens.empty() || options.sparsities.empty()) {
    return absl::InvalidArgumentError("shapes, tokens and sparsity: give at least one each");
  }
  for (const int64_t n : options.tokens) {
    if (n < 1) return absl::InvalidArgumentError(absl::StrCat("tokens: ", n, " is not positive"));
  }
  SPMMD_ASSIGN_OR_RETURN(const std::shared_ptr<const CudaLibrary> cuda, CudaLibrary::Load(options.library));
  Bench bench(options, cuda, csv);
  return bench.Run();
}

}  // namespace spmmd::bench
