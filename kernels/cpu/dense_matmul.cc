#include "kernels/cpu/dense_matmul.h"

#include <cblas.h>

#include <algorithm>
#include <cstring>
#include <mutex>

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

// OpenBLAS keeps one set of threads a process.
std::mutex& BlasMutex() {
  static std::mutex* const mutex = new std::mutex;
  return *mutex;
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
  constexpr int64_t kPanelFloats = int64_t{4} << 20;
  const int64_t panel_rows = w.dtype == DType::kF32 ? w.m
                                                    : std::clamp<int64_t>(kPanelFloats / w.k, kRowsPerTask,
                                                                          std::max<int64_t>(w.m, kRowsPerTask));
  const int64_t out_stride = (std::min(panel_rows, w.m) + 15) / 16 * 16;
  ThreadScratch& scratch = Scratch();
  const std::byte* weights = w.sections[0].data.data();
  SPMMD_ASSIGN_OR_RETURN(float* const out, scratch.out.Floats(static_cast<size_t>(tokens * out_stride)));
  for (int64_t row = 0; row < w.m; row += panel_rows) {
    const int64_t rows = std::min(panel_rows, w.m - row);
    const std::byte* from = weights + static_cast<size_t>(row * w.k) * SizeOf(w.dtype);
    const float* panel = reinterpret_cast<const float*>(from);
    if (w.dtype != DType::kF32) {
      SPMMD_ASSIGN_OR_RETURN(float* const widened, scratch.weights.Floats(static_cast<size_t>(rows * w.k)));
      pool.ParallelFor((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int /*worker*/) {
        const int64_t begin = task * kRowsPerTask;
        const int64_t count = std::min(kRowsPerTask, rows - begin);
        WidenRow(w.dtype, from + static_cast<size_t>(begin * w.k) * SizeOf(w.dtype), widened + begin * w.k,
                 count * w.k);
      });
      panel = widened;
    }
    {
      const std::lock_guard<std::mutex> lock(BlasMutex());
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(tokens), static_cast<int>(rows),
                  static_cast<int>(w.k), 1.0f, x, static_cast<int>(x_stride), panel, static_cast<int>(w.k), 0.0f, out,
                  static_cast<int>(out_stride));
    }
    pool.ParallelFor(tokens, [&](int64_t n, int /*worker*/) {
      float* values = out + n * out_stride;
      ApplyEpilogue(values, rows, BiasAt(epilogue, row), epilogue.activation);
      NarrowRow(values, y.dtype, y.row(n) + static_cast<size_t>(row) * SizeOf(y.dtype), rows);
    });
  }
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
