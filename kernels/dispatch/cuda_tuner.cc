#include "kernels/dispatch/cuda_tuner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/format/bitmap_gpu.h"

namespace spmmd {
namespace {

constexpr int64_t kMaxTokens = *std::max_element(std::begin(kTunedTokens), std::end(kTunedTokens));
// Read between two timed launches, so that weights come from memory: twice the L2 of an H200.
constexpr uint64_t kFlushBytes = uint64_t{120} << 20;
// Random values that tensors are filled with, over and over.
constexpr size_t kPatternElements = size_t{1} << 19;
constexpr uint64_t kWorkspaceBytes = uint64_t{96} << 20;  // beside what grows with the tensors
constexpr int kMaxCandidates = 16;
constexpr int kFinalists = 3;
constexpr int kRounds = 7;

uint64_t DenseBytes(const CudaShape& shape) {
  return static_cast<uint64_t>(shape.m) * static_cast<uint64_t>((shape.k + 7) / 8 * 8) * 2;
}

uint64_t TensorBytes(int64_t cols) { return static_cast<uint64_t>(kMaxTokens) * static_cast<uint64_t>(cols) * 2; }

// To a nanosecond, as the table's file keeps it.
double Median(std::vector<double> us) {
  const auto middle = us.begin() + static_cast<std::ptrdiff_t>(us.size() / 2);
  std::nth_element(us.begin(), middle, us.end());
  return std::round(*middle * 1e3) / 1e3;
}

// One measurement of a shape; frees what it took.
class Measurement {
 public:
  Measurement(const CudaLibrary& cuda, spmmd_cuda_device* device, const CudaShape& shape)
      : cuda_(cuda), device_(device), shape_(shape) {}
  Measurement(const Measurement&) = delete;
  Measurement& operator=(const Measurement&) = delete;
  ~Measurement() {
    if (stream_ != nullptr) cuda_.stream_synchronize(device_, stream_);
    cuda_.layer_free(bitmap_);
    cuda_.layer_free(dense_);
    for (void* pointer : pointers_) cuda_.free(device_, pointer);
    for (const spmmd_cuda_event event : {begin_, end_}) {
      if (event != nullptr) cuda_.event_destroy(device_, event);
    }
    if (stream_ != nullptr) cuda_.stream_destroy(device_, stream_);
  }

  absl::Status Prepare() {
    SPMMD_RETURN_IF_ERROR(Ok(cuda_.stream_create(device_, &stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_.event_create(device_, /*timing=*/1, &begin_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_.event_create(device_, /*timing=*/1, &end_)));
    SPMMD_RETURN_IF_ERROR(MakeWeights());
    SPMMD_ASSIGN_OR_RETURN(x_, Allocate(TensorBytes(shape_.k)));
    SPMMD_RETURN_IF_ERROR(Fill(x_, TensorBytes(shape_.k), /*density_pct=*/100));
    SPMMD_ASSIGN_OR_RETURN(y_, Allocate(TensorBytes(shape_.m)));
    SPMMD_ASSIGN_OR_RETURN(flush_, Allocate(kFlushBytes));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_.memset_async(device_, flush_, 1, kFlushBytes, stream_)));
    workspace_bytes_ = kWorkspaceBytes + 2 * TensorBytes(shape_.k) + 2 * TensorBytes(shape_.m);
    SPMMD_ASSIGN_OR_RETURN(workspace_, Allocate(workspace_bytes_));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_.workspace_init(device_, workspace_, workspace_bytes_, stream_)));
    // An idle GPU takes a moment to reach its clock.
    for (int i = 0; i < 64; ++i) SPMMD_RETURN_IF_ERROR(Ok(cuda_.read_probe(device_, flush_, kFlushBytes, stream_)));
    return Ok(cuda_.stream_synchronize(device_, stream_));
  }

  absl::StatusOr<CudaWidth> Measure(int64_t tokens, bool sparse) {
    CudaWidth width;
    width.tokens = tokens;
    spmmd_cuda_matmul call = {};
    call.x = x_;
    call.n = tokens;
    call.x_stride = shape_.k;
    call.x_dtype = call.y_dtype = static_cast<int32_t>(shape_.dtype);
    call.y = y_;
    call.y_stride = shape_.m;
    call.workspace = workspace_;
    call.workspace_bytes = workspace_bytes_;
    const int32_t cublaslt = DenseKernel(call);
    SPMMD_ASSIGN_OR_RETURN(width.dense_candidate, BestCandidate(cublaslt, call));
    std::vector<Contender> contenders = {{dense_, cublaslt, {}}};
    for (int32_t kernel = 0; sparse && kernel < cuda_.kernel_count(); ++kernel) {
      if (cuda_.can_implement(bitmap_, kernel, &call) != SPMMD_CUDA_OK) continue;
      // The first launch may load its code; the second tells whether it can win.
      SPMMD_RETURN_IF_ERROR(Time(bitmap_, kernel, call).status());
      contenders.push_back({bitmap_, kernel, {}});
    }
    for (int round = 0; round < kRounds; ++round) {
      for (Contender& contender : contenders) {
        SPMMD_ASSIGN_OR_RETURN(const double us, Time(contender.layer, contender.kernel, call));
        contender.us.push_back(us);
      }
    }
    for (Contender& contender : contenders) {
      const double us = Median(std::move(contender.us));
      if (contender.layer == dense_) {
        width.dense_us = us;
      } else if (width.kernel < 0 || us < width.sparse_us) {
        width.kernel = contender.kernel;
        width.sparse_us = us;
      }
    }
    return width;
  }

 private:
  struct Contender {
    const spmmd_cuda_layer* layer;
    int32_t kernel;
    std::vector<double> us;
  };

  absl::Status Ok(spmmd_cuda_status code) const { return cuda_.ToStatus(code); }

  absl::StatusOr<void*> Allocate(uint64_t bytes) {
    void* pointer = nullptr;
    SPMMD_RETURN_IF_ERROR(Ok(cuda_.malloc(device_, bytes, &pointer)));
    pointers_.push_back(pointer);
    return pointer;
  }

  void Free(void* pointer) {
    pointers_.erase(std::find(pointers_.begin(), pointers_.end(), pointer));
    cuda_.free(device_, pointer);
  }

  // Values of both signs between a sixteenth and one, `density_pct` of them not zero: a pattern, copied until it covers
  // all.
  absl::Status Fill(void* to, uint64_t bytes, int density_pct) {
    std::vector<uint16_t> pattern(std::min<size_t>(kPatternElements, bytes / 2));
    uint64_t state = 1;
    for (uint16_t& element : pattern) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const auto bits = static_cast<uint32_t>(state >> 32);
      const float magnitude = 0.0625f + 0.9375f * static_cast<float>(bits & 0xffffu) / 65536.0f;
      const float value = (bits >> 31) != 0 ? -magnitude : magnitude;
      const bool zero = static_cast<int>((bits >> 16 & 0x7fffu) * 100 >> 15) >= density_pct;
      element = zero ? uint16_t{0} : shape_.dtype == DType::kBf16 ? FloatToBf16(value) : FloatToF16(value);
    }
    auto* const base = static_cast<std::byte*>(to);
    uint64_t done = pattern.size() * 2;
    SPMMD_RETURN_IF_ERROR(Ok(cuda_.memcpy_async(device_, base, pattern.data(), done, stream_)));
    for (; done < bytes; done *= 2) {
      SPMMD_RETURN_IF_ERROR(Ok(cuda_.memcpy_async(device_, base + done, base, std::min(done, bytes - done), stream_)));
    }
    return Ok(cuda_.stream_synchronize(device_, stream_));
  }

  absl::Status MakeWeights() {
    const uint64_t bytes = static_cast<uint64_t>(shape_.m * shape_.k) * 2;
    SPMMD_ASSIGN_OR_RETURN(void* const data, Allocate(bytes));
    SPMMD_RETURN_IF_ERROR(Fill(data, bytes, shape_.density_pct));
    spmmd_cuda_dense_weights weights = {};
    weights.data = data;
    weights.m = shape_.m;
    weights.k = shape_.k;
    weights.row_stride = shape_.k;
    weights.dtype = static_cast<int32_t>(shape_.dtype);
    weights.chunk_cols = bitmap_gpu::DefaultChunkCols(shape_.m, shape_.k);
    SPMMD_RETURN_IF_ERROR(Ok(cuda_.pack_bitmap_gpu(device_, &weights, stream_, nullptr, &bitmap_)));
    Free(data);
    return Ok(cuda_.layer_unpack(bitmap_, stream_, &dense_));
  }

  int32_t DenseKernel(const spmmd_cuda_matmul& call) const {
    int32_t kernel = -1;
    return cuda_.select_kernel(dense_, &call, &kernel) == SPMMD_CUDA_OK ? kernel : -1;
  }

  absl::StatusOr<double> Time(const spmmd_cuda_layer* layer, int32_t kernel, const spmmd_cuda_matmul& call) {
    SPMMD_RETURN_IF_ERROR(Ok(cuda_.read_probe(device_, flush_, kFlushBytes, stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_.event_record(device_, begin_, stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_.launch(layer, kernel, &call, stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_.event_record(device_, end_, stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_.event_synchronize(device_, end_)));
    double us = 0;
    SPMMD_RETURN_IF_ERROR(Ok(cuda_.event_elapsed_us(device_, begin_, end_, &us)));
    return us;
  }

  // Leaves the fastest of cublasLt's candidates in use.
  absl::StatusOr<int> BestCandidate(int32_t kernel, const spmmd_cuda_matmul& call) {
    std::vector<std::pair<double, int>> candidates;
    for (int index = 0; index < kMaxCandidates; ++index) {
      const spmmd_cuda_status code = cuda_.dense_use_candidate(dense_, &call, index);
      if (code == SPMMD_CUDA_NOT_FOUND) break;
      SPMMD_RETURN_IF_ERROR(Ok(code));
      if (!Time(dense_, kernel, call).ok()) {  // loads its code; some refuse a shape that the heuristic gave them
        SPMMD_RETURN_IF_ERROR(Ok(cuda_.stream_synchronize(device_, stream_)));
        continue;
      }
      SPMMD_ASSIGN_OR_RETURN(const double us, Time(dense_, kernel, call));
      candidates.emplace_back(us, index);
    }
    if (candidates.empty()) return -1;  // the library has no choice to offer
    std::sort(candidates.begin(), candidates.end());
    double best_us = std::numeric_limits<double>::infinity();
    int best = candidates.front().second;
    for (size_t i = 0; i < std::min<size_t>(kFinalists, candidates.size()); ++i) {
      const int index = candidates[i].second;
      SPMMD_RETURN_IF_ERROR(Ok(cuda_.dense_use_candidate(dense_, &call, index)));
      std::vector<double> us;
      for (int round = 0; round < 3; ++round) {
        SPMMD_ASSIGN_OR_RETURN(const double once, Time(dense_, kernel, call));
        us.push_back(once);
      }
      const double median = Median(std::move(us));
      if (median < best_us) {
        best_us = median;
        best = index;
      }
    }
    SPMMD_RETURN_IF_ERROR(Ok(cuda_.dense_use_candidate(dense_, &call, best)));
    return best;
  }

  const CudaLibrary& cuda_;
  spmmd_cuda_device* const device_;
  const CudaShape shape_;
  spmmd_cuda_stream stream_ = nullptr;
  spmmd_cuda_event begin_ = nullptr;
  spmmd_cuda_event end_ = nullptr;
  std::vector<void*> pointers_;
  spmmd_cuda_layer* bitmap_ = nullptr;
  spmmd_cuda_layer* dense_ = nullptr;
  void* x_ = nullptr;
  void* y_ = nullptr;
  void* flush_ = nullptr;
  void* workspace_ = nullptr;
  uint64_t workspace_bytes_ = 0;
};

}  // namespace

CudaTuner::CudaTuner(std::shared_ptr<const CudaLibrary> cuda, spmmd_cuda_device* device, Exclusively exclusively)
    : cuda_(std::move(cuda)), device_(device), exclusively_(std::move(exclusively)) {}

uint64_t CudaTuner::MemoryBytes(const CudaShape& shape) {
  // The packed layer takes less than twice the dense matrix, whatever its density; two dense matrices are never there
  // at once.
  return 3 * DenseBytes(shape) + kFlushBytes + kWorkspaceBytes + 3 * (TensorBytes(shape.k) + TensorBytes(shape.m)) +
         (uint64_t{8} << 20);
}

absl::StatusOr<CudaWidths> CudaTuner::Measure(const CudaShape& shape, bool sparse) const {
  Measurement measurement(*cuda_, device_, shape);
  SPMMD_RETURN_IF_ERROR(measurement.Prepare());
  CudaWidths widths;
  for (const int64_t tokens : kTunedTokens) {
    absl::StatusOr<CudaWidth> width = CudaWidth();
    exclusively_([&] { width = measurement.Measure(tokens, sparse); });
    if (!width.ok()) return width.status();
    widths.push_back(*width);
  }
  return widths;
}

}  // namespace spmmd
