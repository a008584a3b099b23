#include "kernels/cuda/dense_cublaslt.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/layer.h"

namespace spmmd::cuda {
namespace {

constexpr uint64_t kCublasWorkspace = uint64_t{32} << 20;
constexpr int kCandidates = 16;
constexpr int kTuneRuns = 5;

cudaDataType_t CudaType(int32_t dtype) {
  return dtype == kF32 ? CUDA_R_32F : dtype == kBf16 ? CUDA_R_16BF : CUDA_R_16F;
}

// cublasLt multiplies X as it lies in memory when it has the weights' dtype and 16-byte aligned rows.
bool NeedsConversion(const spmmd_cuda_layer& layer, const Call& call) {
  return call.x_dtype != layer.dtype || reinterpret_cast<uintptr_t>(call.x) % 16 != 0 ||
         (call.n > 1 ? call.x_stride : layer.k) % 8 != 0;
}

// It stores Y itself when it can: no bias or activation, a dtype it pairs with the weights', aligned rows.
bool NeedsEpilogue(const spmmd_cuda_layer& layer, const Call& call) {
  return call.bias != nullptr || call.activation != 0 || (call.y_dtype != layer.dtype && call.y_dtype != kF32) ||
         reinterpret_cast<uintptr_t>(call.y) % 16 != 0 ||
         (call.n > 1 ? call.y_stride : layer.m) * static_cast<int64_t>(ElementSize(call.y_dtype)) % 16 != 0;
}

// Where a call's pieces lie in its workspace, behind the counters.
struct Plan {
  bool convert;
  bool epilogue;
  uint64_t x_offset;
  uint64_t y_offset;
  uint64_t bytes;
};

Plan MakePlan(const spmmd_cuda_layer& layer, const Call& call) {
  Plan plan = {};
  plan.convert = NeedsConversion(layer, call);
  plan.epilogue = NeedsEpilogue(layer, call);
  plan.bytes = kCublasWorkspace;
  plan.x_offset = plan.bytes;
  if (plan.convert) plan.bytes += RoundUp(static_cast<uint64_t>(call.n) * DensePitch(layer.k) * 2, 256);
  plan.y_offset = plan.bytes;
  if (plan.epilogue) plan.bytes += RoundUp(static_cast<uint64_t>(call.n * layer.m) * 4, 256);
  return plan;
}

// Column-major for cublasLt: Y^T [M, n] = W [M, K] (stored transposed, leading dimension pitch) * X^T [K, n].
class Problem {
 public:
  static Status Create(const spmmd_cuda_layer& layer, const Call& call, const Plan& plan, Problem* problem) {
    SPMMD_CUBLAS_CHECK(cublasLtMatmulDescCreate(&problem->matmul_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t transpose = CUBLAS_OP_T;
    SPMMD_CUBLAS_CHECK(
        cublasLtMatmulDescSetAttribute(problem->matmul_, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose)));
    const auto m = static_cast<uint64_t>(layer.m);
    const auto n = static_cast<uint64_t>(call.n);
    const auto pitch = static_cast<int64_t>(DensePitch(layer.k));
    const bool single = call.n == 1;
    const int64_t x_stride = plan.convert || single ? pitch : call.x_stride;
    const int64_t y_stride = plan.epilogue || single ? layer.m : call.y_stride;
    const cudaDataType_t weight_type = CudaType(layer.dtype);
    // Multiplying over the padded K adds exact zeros: both operands are zero there. X that is used in place has no
    // padding, so then K itself is a multiple of 8 or the conversion is on.
    const uint64_t k = plan.convert ? static_cast<uint64_t>(pitch) : static_cast<uint64_t>(layer.k);
    SPMMD_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&problem->w_, weight_type, k, m, pitch));
    SPMMD_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&problem->x_, weight_type, k, n, x_stride));
    SPMMD_CUBLAS_CHECK(
        cublasLtMatrixLayoutCreate(&problem->y_, CudaType(plan.epilogue ? kF32 : call.y_dtype), m, n, y_stride));
    return {};
  }
  Problem() = default;
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;
  ~Problem() {
    if (y_ != nullptr) cublasLtMatrixLayoutDestroy(y_);
    if (x_ != nullptr) cublasLtMatrixLayoutDestroy(x_);
    if (w_ != nullptr) cublasLtMatrixLayoutDestroy(w_);
    if (matmul_ != nullptr) cublasLtMatmulDescDestroy(matmul_);
  }

  Status Candidates(cublasLtHandle_t handle, int want, std::vector<cublasLtMatmulAlgo_t>* algorithms) const {
    cublasLtMatmulPreference_t preference = nullptr;
    SPMMD_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    Status status =
        FromCublas(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                        &kCublasWorkspace, sizeof(kCublasWorkspace)),
                   "cublasLtMatmulPreferenceSetAttribute");
    std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(want));
    int found = 0;
    if (status.ok()) {
      status = FromCublas(
          cublasLtMatmulAlgoGetHeuristic(handle, matmul_, w_, x_, y_, y_, preference, want, results.data(), &found),
          "cublasLtMatmulAlgoGetHeuristic");
    }
    cublasLtMatmulPreferenceDestroy(preference);
    SPMMD_CUDA_TRY(status);
    for (int i = 0; i < found; ++i) {
      if (results[static_cast<size_t>(i)].state == CUBLAS_STATUS_SUCCESS) {
        algorithms->push_back(results[static_cast<size_t>(i)].algo);
      }
    }
    if (algorithms->empty()) return Unimplemented("cublasLt has no algorithm for this shape");
    return {};
  }

  Status Run(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm, const void* w, const void* x, void* y,
             void* workspace, cudaStream_t stream) const {
    const float one = 1.f;
    const float zero = 0.f;
    SPMMD_CUBLAS_CHECK(cublasLtMatmul(handle, matmul_, &one, w, w_, x, x_, &zero, y, y_, y, y_, &algorithm, workspace,
                                      kCublasWorkspace, stream));
    return {};
  }

 private:
  cublasLtMatmulDesc_t matmul_ = nullptr;
  cublasLtMatrixLayout_t w_ = nullptr;
  cublasLtMatrixLayout_t x_ = nullptr;
  cublasLtMatrixLayout_t y_ = nullptr;
};

auto CacheKey(const spmmd_cuda_layer& layer, const Call& call, const Plan& plan) {
  return std::make_tuple(layer.m, call.n, layer.k, layer.dtype, plan.epilogue ? kF32 : call.y_dtype);
}

struct Operands {
  const void* w;
  const void* x;
  void* y;
  void* workspace;
  float* accumulators;  // where y is when an epilogue follows
};

// Converts X if the plan says so.
Status Prepare(const spmmd_cuda_layer& layer, const Call& call, const Plan& plan, cudaStream_t stream,
               Operands* operands) {
  uint8_t* scratch = static_cast<uint8_t*>(call.workspace) + kCounterBytes;
  operands->w = layer.SectionData(kDenseValuesSection);
  operands->workspace = scratch;
  operands->accumulators = reinterpret_cast<float*>(scratch + plan.y_offset);
  operands->y = plan.epilogue ? operands->accumulators : call.y;
  operands->x = call.x;
  if (plan.convert) {
    operands->x = scratch + plan.x_offset;
    SPMMD_CUDA_TRY(LaunchConvertActivations(call, layer.k, layer.dtype, static_cast<int64_t>(DensePitch(layer.k)),
                                            scratch + plan.x_offset, stream));
  }
  return {};
}

Status CanImplement(const spmmd_cuda_layer& /*layer*/, const Call& /*call*/) { return {}; }

uint64_t ScratchBytes(const spmmd_cuda_layer& layer, const Call& call) {
  // Pointers may be null here: assume the worst for what their alignment decides.
  Plan plan = MakePlan(layer, call);
  if (!plan.convert) plan.bytes += RoundUp(static_cast<uint64_t>(call.n) * DensePitch(layer.k) * 2, 256);
  if (!plan.epilogue) plan.bytes += RoundUp(static_cast<uint64_t>(call.n * layer.m) * 4, 256);
  return plan.bytes;
}

Status Launch(const spmmd_cuda_layer& layer, const Call& call, cudaStream_t stream) {
  const Plan plan = MakePlan(layer, call);
  Problem problem;
  SPMMD_CUDA_TRY(Problem::Create(layer, call, plan, &problem));
  cublasLtMatmulAlgo_t algorithm;
  {
    const std::lock_guard<std::mutex> lock(layer.device->dense_mutex);
    auto& cache = layer.device->dense_algorithms;
    auto found = cache.find(CacheKey(layer, call, plan));
    if (found == cache.end()) {
      std::vector<cublasLtMatmulAlgo_t> candidates;
      SPMMD_CUDA_TRY(problem.Candidates(layer.device->cublaslt, 1, &candidates));
      found = cache.emplace(CacheKey(layer, call, plan), candidates.front()).first;
    }
    algorithm = found->second;
  }
  Operands operands;
  SPMMD_CUDA_TRY(Prepare(layer, call, plan, stream, &operands));
  SPMMD_CUDA_TRY(
      problem.Run(layer.device->cublaslt, algorithm, operands.w, operands.x, operands.y, operands.workspace, stream));
  if (plan.epilogue) SPMMD_CUDA_TRY(LaunchEpilogue(call, layer.m, operands.accumulators, stream));
  return {};
}

}  // namespace

Status TuneDense(const spmmd_cuda_layer& layer, const Call& call, cudaStream_t stream) {
  const Plan plan = MakePlan(layer, call);
  Problem problem;
  SPMMD_CUDA_TRY(Problem::Create(layer, call, plan, &problem));
  std::vector<cublasLtMatmulAlgo_t> candidates;
  SPMMD_CUDA_TRY(problem.Candidates(layer.device->cublaslt, kCandidates, &candidates));
  Operands operands;
  SPMMD_CUDA_TRY(Prepare(layer, call, plan, stream, &operands));
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  SPMMD_CUDA_CHECK(cudaEventCreate(&begin));
  if (Status status = FromCuda(cudaEventCreate(&end), "cudaEventCreate"); !status.ok()) {
    cudaEventDestroy(begin);
    return status;
  }
  Status status;
  const cublasLtMatmulAlgo_t* best = nullptr;
  float best_time = 0;
  for (const cublasLtMatmulAlgo_t& candidate : candidates) {
    std::vector<float> times;
    for (int run = 0; run < kTuneRuns + 1 && status.ok(); ++run) {  // the first one warms up
      float milliseconds = 0;
      status = FromCuda(cudaEventRecord(begin, stream), "cudaEventRecord");
      if (status.ok()) {
        status = problem.Run(layer.device->cublaslt, candidate, operands.w, operands.x, operands.y, operands.workspace,
                             stream);
      }
      if (status.ok()) status = FromCuda(cudaEventRecord(end, stream), "cudaEventRecord");
      if (status.ok()) status = FromCuda(cudaEventSynchronize(end), "cudaEventSynchronize");
      if (status.ok()) status = FromCuda(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
      if (run > 0) times.push_back(milliseconds);
    }
    if (!status.ok()) break;
    std::nth_element(times.begin(), times.begin() + kTuneRuns / 2, times.end());
    if (best == nullptr || times[kTuneRuns / 2] < best_time) {
      best = &candidate;
      best_time = times[kTuneRuns / 2];
    }
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  SPMMD_CUDA_TRY(status);
  const std::lock_guard<std::mutex> lock(layer.device->dense_mutex);
  layer.device->dense_algorithms.insert_or_assign(CacheKey(layer, call, plan), *best);
  return {};
}

Status UseDenseCandidate(const spmmd_cuda_layer& layer, const Call& call, int index) {
  const Plan plan = MakePlan(layer, call);
  Problem problem;
  SPMMD_CUDA_TRY(Problem::Create(layer, call, plan, &problem));
  std::vector<cublasLtMatmulAlgo_t> candidates;
  SPMMD_CUDA_TRY(problem.Candidates(layer.device->cublaslt, kCandidates, &candidates));
  if (index < 0 || index >= static_cast<int>(candidates.size())) {
    return {SPMMD_CUDA_NOT_FOUND, "cublasLt offers " + std::to_string(candidates.size()) + " candidates"};
  }
  const std::lock_guard<std::mutex> lock(layer.device->dense_mutex);
  layer.device->dense_algorithms.insert_or_assign(CacheKey(layer, call, plan), candidates[static_cast<size_t>(index)]);
  return {};
}

const Kernel kDenseCublasLt = {"dense_cublaslt", kFormatDense, false, CanImplement, ScratchBytes, Launch};

}  // namespace spmmd::cuda
