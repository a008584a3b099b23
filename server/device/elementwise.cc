#include "server/device/elementwise.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/epilogue.h"
#include "kernels/format/dense_rows.h"

namespace spmmd::server {
namespace {

// Elements handled at a time, so that operands of other types are widened inside the first-level cache. A multiple of
// 16, as ApplyEpilogue wants.
constexpr int64_t kBlock = 1024;
// Elements a task has, at least: about 10 us of work.
constexpr int64_t kGrain = 16384;

struct alignas(64) Block {
  float values[kBlock];
};

// The elements [begin, begin + count) of a row as fp32: in place when they are fp32 already.
const float* Widen(const DenseView& x, int64_t row, int64_t begin, int64_t count, Block& scratch) {
  const std::byte* from = x.row(row) + static_cast<size_t>(begin) * SizeOf(x.dtype);
  if (x.dtype == DType::kF32) return reinterpret_cast<const float*>(from);
  WidenRow(x.dtype, from, scratch.values, count);
  return scratch.values;
}

void Combine(ElementwiseOp op, const float* left, const float* right, float* y, int64_t count) {
  if (op == ElementwiseOp::kAdd) {
    for (int64_t i = 0; i < count; ++i) y[i] = left[i] + right[i];
  } else {
    for (int64_t i = 0; i < count; ++i) y[i] = left[i] * right[i];
  }
}

}  // namespace

void Elementwise(ElementwiseOp op, Activation activation, const DenseView& left, const DenseView& right,
                 const MutableDenseView& y, ThreadPool& pool) {
  const int64_t chunks_a_row = (y.cols + kGrain - 1) / kGrain;
  // Short rows share a task.
  const int64_t rows_a_task = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, y.cols));
  const int64_t row_tasks = (y.rows + rows_a_task - 1) / rows_a_task;
  pool.ParallelFor(row_tasks * chunks_a_row, [&](int64_t task, int /*worker*/) {
    const int64_t first_row = task / chunks_a_row * rows_a_task;
    const int64_t last_row = std::min(y.rows, first_row + rows_a_task);
    const int64_t first_col = task % chunks_a_row * kGrain;
    const int64_t last_col = std::min(y.cols, first_col + kGrain);
    Block left_scratch;
    Block right_scratch;
    Block result;
    for (int64_t row = first_row; row < last_row; ++row) {
      for (int64_t col = first_col; col < last_col; col += kBlock) {
        const int64_t count = std::min(kBlock, last_col - col);
        const float* a = Widen(left, row, col, count, left_scratch);
        const float* b = Widen(right, row, col, count, right_scratch);
        Combine(op, a, b, result.values, count);
        // ApplyEpilogue works in whole vectors: what lies behind the last element must be initialised.
        std::fill(result.values + count, result.values + (count + 15) / 16 * 16, 0.0f);
        cpu::ApplyEpilogue(result.values, count, nullptr, activation);
        std::byte* to = y.row(row) + static_cast<size_t>(col) * SizeOf(y.dtype);
        if (y.dtype == DType::kF32) {
          std::memcpy(to, result.values, static_cast<size_t>(count) * sizeof(float));
        } else {
          NarrowRow(result.values, y.dtype, to, count);
        }
      }
    }
  });
}

}  // namespace spmmd::server
