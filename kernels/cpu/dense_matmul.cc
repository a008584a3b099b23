#include "kernels/cpu/dense_matmul.h"

#include <cblas.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/cpu/dense_kernels.h"
#include "kernels/cpu/epilogue.h"
#include "kernels/cpu/workspace.h"
#include "kernels/format/dense_rows.h"

namespace spmmd::cpu {
namespace {

constexpr int64_t kRowsPerTask = 64;

// Tokens of one pass over the weights: their fp32 rows should stay in the L2 cache.
constexpr int64_t kDotPassTokens = 32;
constexpr int64_t kSgemmPassTokens = 512;

struct ThreadScratch {
  Workspace x;
  Workspace weights;
  Workspace out;
};

ThreadScratch& Scratch() {
  static thread_local ThreadScratch scratch;
  return scratch;
}

// OpenBLAS runs on the calling thread only. Its own threads spin for tens of milliseconds after a product, on cores
// that the next sparse product needs; and with one product a worker nothing is serialised either.
void KeepBlasOnThisThread() {
  if (openblas_get_num_threads() != 1) openblas_set_num_threads(1);
}

const float* BiasAt(const Epilogue& epilogue, int64_t row) {
  return epilogue.bias.empty() ? nullptr : epilogue.bias.data() + row;
}

// x as fp32 rows of `stride` elements, zeros behind K.
void WidenTokens(const DenseView& x, int64_t stride, ThreadPool& pool, float* out) {
  pool.ParallelFor(x.rows, [&](int64_t n, int /*worker*/) {
    float* row = out + n * stride;
    WidenRow(x.dtype, x.row(n), row, x.cols);
    std::fill(row + x.cols, row + stride, 0.0f);
  });
}

absl::Status SmallBatch(const PackedLayer& w, const float* x, int64_t x_stride, int64_t tokens,
                        const Epilogue& epilogue, const MutableDenseView& y, ThreadPool& pool) {
  const std::byte* weights = w.sections[0].data.data();
  const int64_t tasks = (w.m + kRowsPerTask - 1) / kRowsPerTask;
  pool.ParallelFor(tasks, [&](int64_t task, int /*worker*/) {
    const int64_t row = task * kRowsPerTask;
    const int64_t rows = std::min(kRowsPerTask, w.m - row);
    alignas(64) float out[kDotPassTokens * kRowsPerTask];
    DenseRows(w.dtype, weights + static_cast<size_t>(row * w.k) * SizeOf(w.dtype), rows, w.k, x, x_stride, tokens, out,
              kRowsPerTask);
    for (int64_t n = 0; n < tokens; ++n) {
      float* values = out + n * kRowsPerTask;
      ApplyEpilogue(values, rows, BiasAt(epilogue, row), epilogue.activation);
      NarrowRow(values, y.dtype, y.row(n) + static_cast<size_t>(row) * SizeOf(y.dtype), rows);
    }
  });
  return absl::OkStatus();
}

// Row panels of W as fp32, one sgemm each.
absl::Status LargeBatch(const PackedLayer& w, const float* x, int64_t x_stride, int64_t tokens,
                        const Epilogue& epilogue, const MutableDenseView& y, ThreadPool& pool) {
  // Several panels a worker, so that none waits long for the last; not so few rows that packing x again for each costs
  // more than a few percent.
  constexpr int64_t kPanelsPerWorker = 4;
  constexpr int64_t kMinPanelRows = 128;
  constexpr int64_t kPanelFloats = int64_t{2} << 20;
  const int64_t share = w.m / (kPanelsPerWorker * pool.size());
  const int64_t most = std::max(kPanelFloats / w.k / kRowsPerTask * kRowsPerTask, kMinPanelRows);
  const int64_t panel_rows = std::clamp((share + kRowsPerTask - 1) / kRowsPerTask * kRowsPerTask, kMinPanelRows, most);
  const std::byte* weights = w.sections[0].data.data();
  KeepBlasOnThisThread();
  std::vector<absl::Status> failures(static_cast<size_t>(pool.size()));
  pool.ParallelFor((w.m + panel_rows - 1) / panel_rows, [&](int64_t task, int worker) {
    const int64_t row = task * panel_rows;
    const int64_t rows = std::min(panel_rows, w.m - row);
    ThreadScratch& scratch = Scratch();
    const std::byte* from = weights + static_cast<size_t>(row * w.k) * SizeOf(w.dtype);
    const float* panel = reinterpret_cast<const float*>(from);
    if (w.dtype != DType::kF32) {
      absl::StatusOr<float*> widened = scratch.weights.Floats(static_cast<size_t>(panel_rows * w.k));
      if (!widened.ok()) {
        failures[static_cast<size_t>(worker)] = widened.status();
        return;
      }
      WidenRow(w.dtype, from, *widened, rows * w.k);
      panel = *widened;
    }
    absl::StatusOr<float*> out = scratch.out.Floats(static_cast<size_t>(tokens * panel_rows));
    if (!out.ok()) {
      failures[static_cast<size_t>(worker)] = out.status();
      return;
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(tokens), static_cast<int>(rows),
                static_cast<int>(w.k), 1.0f, x, static_cast<int>(x_stride), panel, static_cast<int>(w.k), 0.0f, *out,
                static_cast<int>(panel_rows));
    for (int64_t n = 0; n < tokens; ++n) {
      float* values = *out + n * panel_rows;
      ApplyEpilogue(values, rows, BiasAt(epilogue, row), epilogue.activation);
      NarrowRow(values, y.dtype, y.row(n) + static_cast<size_t>(row) * SizeOf(y.dtype), rows);
    }
  });
  for (const absl::Status& failure : failures) SPMMD_RETURN_IF_ERROR(failure);
  return absl::OkStatus();
}

}  // namespace

absl::Status DenseMatmul(const PackedLayer& w, const DenseView& x, const Epilogue& epilogue, const MutableDenseView& y,
                         ThreadPool& pool) {
  const int64_t x_stride = (x.cols + kDensePadding - 1) / kDensePadding * kDensePadding;
  const bool dot = x.rows <= kMaxDotTokens;
  const int64_t pass_tokens = dot ? kDotPassTokens : kSgemmPassTokens;
  for (int64_t begin = 0; begin < x.rows; begin += pass_tokens) {
    const int64_t tokens = std::min(pass_tokens, x.rows - begin);
    SPMMD_ASSIGN_OR_RETURN(float* const widened, Scratch().x.Floats(static_cast<size_t>(tokens * x_stride)));
    WidenTokens({x.row(begin), x.dtype, tokens, x.cols, x.row_stride}, x_stride, pool, widened);
    const MutableDenseView out{y.row(begin), y.dtype, tokens, y.cols, y.row_stride};
    SPMMD_RETURN_IF_ERROR(dot ? SmallBatch(w, widened, x_stride, tokens, epilogue, out, pool)
                              : LargeBatch(w, widened, x_stride, tokens, epilogue, out, pool));
  }
  return absl::OkStatus();
}

}  // namespace spmmd::cpu
