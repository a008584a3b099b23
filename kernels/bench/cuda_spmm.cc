#include "kernels/bench/cuda_spmm.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/bench/workload.h"
#include "kernels/dispatch/cuda_library.h"
#include "kernels/dispatch/cuda_tuner.h"
#include "kernels/dispatch/cuda_tuning.h"
#include "kernels/format/reference.h"

namespace spmmd::bench {
namespace {

constexpr size_t kRotateBytes = size_t{260} << 20;  // more than four times the L2 of an H200
constexpr int64_t kCheckedRows = 192;
constexpr int64_t kCheckedTokens = 80;  // the first ones; more than one launch of 64
constexpr int kMaxCandidates = 16;

struct Times {
  double p10 = 0;
  double p50 = 0;
  double p90 = 0;
};

Times Summarize(std::vector<double> us) {
  std::sort(us.begin(), us.end());
  const auto at = [&](double q) {
    return us[static_cast<size_t>(std::lround(q * static_cast<double>(us.size() - 1)))];
  };
  return {at(0.1), at(0.5), at(0.9)};
}

class Bench {
 public:
  Bench(const BenchOptions& options, std::shared_ptr<const CudaLibrary> cuda,
        const std::function<void(const Row&)>& emit)
      : options_(options), cuda_(std::move(cuda)), emit_(emit) {}
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  // Device memory goes with the process.

  absl::Status Run() {
    int32_t devices = 0;
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->device_count(&devices)));
    if (devices == 0) return absl::UnavailableError("no GPU");
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->device_open(0, &device_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->stream_create(device_, &stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_create(device_, 1, &begin_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_create(device_, 1, &end_)));
    SPMMD_RETURN_IF_ERROR(MeasureCeiling());
    for (const auto& [m, k] : options_.shapes) {
      for (const double sparsity : options_.sparsity) SPMMD_RETURN_IF_ERROR(RunLayer(m, k, sparsity));
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

  // What the first kCheckedTokens tokens of x give on sampled rows of W.
  void MakeReference(const DenseView& w, DenseView x) {
    checked_rows_.clear();
    for (int64_t i = 0; i < std::min(kCheckedRows, w.rows); ++i) {
      checked_rows_.push_back(i * w.rows / std::min(kCheckedRows, w.rows));
    }
    x.rows = std::min(x.rows, kCheckedTokens);
    reference_ = ReferenceRows(w, checked_rows_, x);
  }

  // max |y - ref| / sum|w||x| over what MakeReference covers; NaN when an output was not written.
  absl::StatusOr<double> Error(const Contender& contender, int64_t m) {
    const int64_t n = contender.call.n;
    const size_t bytes = static_cast<size_t>(n * m) * 2;
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->memset_async(device_, contender.call.y, 0xff, bytes, stream_)));
    SPMMD_RETURN_IF_ERROR(
        Ok(cuda_->launch(contender.layer->copies.front(), contender.index, &contender.call, stream_)));
    SPMMD_ASSIGN_OR_RETURN(DenseMatrix y, DenseMatrix::Create(options_.dtype, n, m));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->memcpy_async(device_, y.mutable_view().data, contender.call.y, bytes, stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->stream_synchronize(device_, stream_)));
    double worst = 0;
    for (int64_t token = 0; token < std::min(n, kCheckedTokens); ++token) {
      for (size_t i = 0; i < checked_rows_.size(); ++i) {
        const size_t at = static_cast<size_t>(token) * checked_rows_.size() + i;
        const double difference = std::fabs(ElementAsDouble(y.view(), token, checked_rows_[i]) - reference_.y[at]);
        if (std::isnan(difference)) return difference;
        if (reference_.scale[at] > 0) worst = std::max(worst, difference / reference_.scale[at]);
      }
    }
    return worst;
  }

  absl::Status RunLayer(int64_t m, int64_t k, double sparsity) {
    SPMMD_ASSIGN_OR_RETURN(DenseMatrix w, RandomWeights(options_.dtype, m, k, sparsity, options_.mask, options_.seed));
    Resident dense;
    std::vector<std::pair<Format, Resident>> sparse;
    {
      SPMMD_ASSIGN_OR_RETURN(PackedLayer packed, Pack(Format::kDense, w.view()));
      SPMMD_ASSIGN_OR_RETURN(dense, MakeResident(packed));
    }
    for (Format format : options_.formats) {
      if (format == Format::kBitmap) format = Format::kBitmapGpu;
      SPMMD_ASSIGN_OR_RETURN(PackedLayer packed, Pack(format, w.view()));
      SPMMD_ASSIGN_OR_RETURN(Resident resident, MakeResident(packed));
      sparse.emplace_back(format, std::move(resident));
    }
    widths_ = nullptr;
    if (options_.automatic) {
      const CudaTuner tuner(cuda_, device_, [](const std::function<void()>& work) { work(); });
      const auto start = std::chrono::steady_clock::now();
      SPMMD_ASSIGN_OR_RETURN(
          CudaWidths widths,
          tuner.Measure(CudaShape::Of(options_.dtype, m, k, ScanDense(w.view()).nnz), /*sparse=*/true));
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      std::fprintf(stderr, "measured %dx%d in %.3f s\n", static_cast<int>(m), static_cast<int>(k), took.count());
      widths_ = std::make_unique<CudaWidths>(std::move(widths));
    }
    const int64_t most = *std::max_element(options_.tokens.begin(), options_.tokens.end());
    SPMMD_ASSIGN_OR_RETURN(const DenseMatrix x, RandomTokens(options_.dtype, most, k, options_.seed + 1));
    MakeReference(w.view(), x.view());
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

  // What dispatch takes for a BITMAP layer that has a dense copy.
  void AddAuto(const Resident& dense, const std::vector<std::pair<Format, Resident>>& sparse,
               const spmmd_cuda_matmul& call, std::vector<Contender>* contenders) {
    const auto bitmap =
        std::find_if(sparse.begin(), sparse.end(), [](const auto& entry) { return entry.first == Format::kBitmapGpu; });
    if (bitmap == sparse.end()) return;
    const CudaWidth& width = WidthFor(*widths_, call.n);
    const bool take_dense = width.dense_is_faster();
    const int32_t kernel = take_dense ? cuda_->find_kernel("dense_cublaslt") : width.kernel;
    contenders->push_back(
        {kAuto, cuda_->kernel_name(kernel), take_dense ? &dense : &bitmap->second, kernel, call, nullptr, 0, {}});
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
        contenders.push_back({std::string(Name(format)), name + "+chain", &resident, kernel, call, nullptr, 0, {}});
        contenders.back().call.flags |= SPMMD_CUDA_FLAG_CHAIN;
        for (int variant = 1; variant <= options_.variants; ++variant) {
          spmmd_cuda_matmul forced = call;
          forced.flags |= static_cast<uint32_t>(variant) << SPMMD_CUDA_FLAG_VARIANT_SHIFT;
          if (cuda_->can_implement(resident.copies.front(), kernel, &forced) != SPMMD_CUDA_OK) continue;
          contenders.push_back(
              {std::string(Name(format)), absl::StrCat(name, "#", variant), &resident, kernel, forced, nullptr, 0, {}});
        }
      }
    }
    if (widths_ != nullptr) AddAuto(dense, sparse, call, &contenders);
    // The largest workspace first: a graph keeps the pointer it was recorded with.
    for (Contender& contender : contenders) SPMMD_RETURN_IF_ERROR(Prepare(contender));
    for (Contender& contender : contenders) {
      // Dense has been recorded with the candidate that this benchmark found; dispatch has its own.
      if (contender.format == kAuto && contender.layer == &dense && WidthFor(*widths_, x.rows).dense_candidate >= 0) {
        SPMMD_RETURN_IF_ERROR(Ok(cuda_->dense_use_candidate(dense.copies.front(), &contender.call,
                                                            WidthFor(*widths_, x.rows).dense_candidate)));
      }
      SPMMD_RETURN_IF_ERROR(Record(contender));
    }
    for (int round = 0; round < options_.rounds; ++round) {
      for (Contender& contender : contenders) {
        SPMMD_ASSIGN_OR_RETURN(const double us, Replay(contender));
        contender.us.push_back(us);
      }
    }
    const double dense_us = Summarize(contenders.front().us).p50;
    for (Contender& contender : contenders) {
      SPMMD_ASSIGN_OR_RETURN(const double error, Error(contender, w.rows));
      const Times times = Summarize(contender.us);
      Row row;
      row.op = "spmm";
      row.format = contender.format;
      row.kernel = contender.kernel;
      row.dtype = row.x_dtype = std::string(Name(options_.dtype));
      row.m = w.rows;
      row.k = w.cols;
      row.n = x.rows;
      row.sparsity = sparsity;
      row.us_p50 = times.p50;
      row.us_p10 = times.p10;
      row.us_p90 = times.p90;
      row.bytes = static_cast<int64_t>(contender.layer->bytes) + x.rows * (w.rows + w.cols) * 2;
      row.gbps = static_cast<double>(row.bytes) / times.p50 * 1e-3;
      row.ceiling_gbps = ceiling_ / 1e9;
      row.ceiling_pct = row.gbps / row.ceiling_gbps * 100;
      row.dense_us = dense_us;
      row.rel_error = error;
      row.packed_share = static_cast<double>(contender.layer->bytes) / static_cast<double>(dense.bytes);
      emit_(row);
      SPMMD_RETURN_IF_ERROR(Discard(contender));
    }
    return absl::OkStatus();
  }

  static constexpr char kAuto[] = "AUTO";

  const BenchOptions& options_;
  const std::shared_ptr<const CudaLibrary> cuda_;
  const std::function<void(const Row&)>& emit_;
  spmmd_cuda_device* device_ = nullptr;
  spmmd_cuda_stream stream_ = nullptr;
  spmmd_cuda_event begin_ = nullptr;
  spmmd_cuda_event end_ = nullptr;
  void* workspace_ = nullptr;
  uint64_t workspace_bytes_ = 0;
  double ceiling_ = 0;                  // bytes per second
  std::unique_ptr<CudaWidths> widths_;  // of the layer, when AUTO runs too
  std::vector<int64_t> checked_rows_;
  Reference reference_;
};

}  // namespace

std::vector<std::string> CudaNotes() {
  std::vector<std::string> notes;
  const auto cuda = CudaLibrary::Load();
  spmmd_cuda_device_info info = {};
  if (cuda.ok() && (*cuda)->get_device_info(0, &info) == SPMMD_CUDA_OK) {
    notes.push_back(absl::StrCat("GPU: ", info.name, ", ", info.multiprocessors, " multiprocessors, ",
                                 info.l2_bytes >> 20, " MiB of L2"));
  }
  notes.push_back("Baseline: the fastest of cublasLt's candidates on the same pruned matrix, turn by turn");
  notes.push_back("Weights rotate over copies of at least 260 MB; times are medians over CUDA-graph replays");
  notes.push_back("+chain: launched with programmatic dependent launch");
  return notes;
}

absl::Status RunCudaSpmm(const BenchOptions& options, const std::function<void(const Row&)>& emit) {
  if (options.dtype == DType::kF32) return absl::InvalidArgumentError("dtype: fp32 weights do not run on a GPU");
  SPMMD_ASSIGN_OR_RETURN(const std::shared_ptr<const CudaLibrary> cuda, CudaLibrary::Load());
  Bench bench(options, cuda, emit);
  return bench.Run();
}

}  // namespace spmmd::bench
