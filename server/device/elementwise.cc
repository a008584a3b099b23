#include "server/device/elementwise.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace spmmd::server {
namespace {

// Elements handled at a time, so that operands of other types are widened inside the first-level cache.
constexpr int64_t kBlock = 1024;
// Elements a task has, at least: about 10 us of work.
constexpr int64_t kGrain = 16384;

using Block = std::array<float, kBlock>;

// The elements [begin, begin + count) of a row as fp32: in place when they are fp32 already.
const float* Widen(const DenseView& x, int64_t row, int64_t begin, int64_t count, Block& scratch) {
  const std::byte* from = x.row(row) + static_cast<size_t>(begin) * SizeOf(x.dtype);
  if (x.dtype == DType::kF32) return reinterpret_cast<const float*>(from);
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, from + static_cast<size_t>(i) * 2, 2);
    scratch[static_cast<size_t>(i)] = x.dtype == DType::kF16 ? F16ToFloat(bits) : Bf16ToFloat(bits);
  }
  return scratch.data();
}

void Narrow(const float* from, const MutableDenseView& y, int64_t row, int64_t begin, int64_t count) {
  std::byte* to = y.row(row) + static_cast<size_t>(begin) * SizeOf(y.dtype);
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t bits = y.dtype == DType::kF16 ? FloatToF16(from[i]) : FloatToBf16(from[i]);
    std::memcpy(to + static_cast<size_t>(i) * 2, &bits, 2);
  }
}

void Activate(Activation activation, float* x, int64_t count) {
  constexpr float kInvSqrt2 = 0.707106781f;
  constexpr float kSqrt2OverPi = 0.797884561f;
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      for (int64_t i = 0; i < count; ++i) x[i] = x[i] < 0 ? 0 : x[i];  // NaN stays
      return;
    case Activation::kGelu:
      for (int64_t i = 0; i < count; ++i) x[i] = 0.5f * x[i] * std::erfc(-x[i] * kInvSqrt2);
      return;
    case Activation::kGeluTanh:
      for (int64_t i = 0; i < count; ++i) {
        x[i] = 0.5f * x[i] * (1.0f + std::tanh(kSqrt2OverPi * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
      }
      return;
    case Activation::kSilu:
      for (int64_t i = 0; i < count; ++i) x[i] = x[i] / (1.0f + std::exp(-x[i]));
      return;
  }
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
    Block result_scratch;
    for (int64_t row = first_row; row < last_row; ++row) {
      for (int64_t col = first_col; col < last_col; col += kBlock) {
        const int64_t count = std::min(kBlock, last_col - col);
        const float* a = Widen(left, row, col, count, left_scratch);
        const float* b = Widen(right, row, col, count, right_scratch);
        float* result = y.dtype == DType::kF32 ? reinterpret_cast<float*>(y.row(row)) + col : result_scratch.data();
        Combine(op, a, b, result, count);
        Activate(activation, result, count);
        if (y.dtype != DType::kF32) Narrow(result, y, row, col, count);
      }
    }
  });
}

}  // namespace spmmd::server
