#include "kernels/format/dense.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_pool.h"
#include "kernels/format/dense_rows.h"

namespace spmmd {
namespace {

template <typename Bits>
Bits Load(const std::byte* row, int64_t col) {
  Bits bits;
  std::memcpy(&bits, row + static_cast<size_t>(col) * sizeof(Bits), sizeof(Bits));
  return bits;
}

// All exponent bits set: infinity or NaN.
template <DType kType, typename Bits>
constexpr bool IsNonfinite(Bits bits) {
  constexpr auto kExponent = static_cast<Bits>(kType == DType::kF16    ? 0x7c00u
                                               : kType == DType::kBf16 ? 0x7f80u
                                                                       : 0x7f800000u);
  return (bits & kExponent) == kExponent;
}

int64_t FirstNonfiniteInRow(const DenseView& w, int64_t r) {
  for (int64_t c = 0; c < w.cols; ++c) {
    const std::byte* row = w.row(r);
    const bool bad = w.dtype == DType::kF16    ? IsNonfinite<DType::kF16>(Load<uint16_t>(row, c))
                     : w.dtype == DType::kBf16 ? IsNonfinite<DType::kBf16>(Load<uint16_t>(row, c))
                                               : IsNonfinite<DType::kF32>(Load<uint32_t>(row, c));
    if (bad) return c;
  }
  return -1;
}

float ElementAsFloat(const std::byte* row, DType dtype, int64_t col) {
  switch (dtype) {
    case DType::kF16:
      return F16ToFloat(Load<uint16_t>(row, col));
    case DType::kBf16:
      return Bf16ToFloat(Load<uint16_t>(row, col));
    case DType::kF32:
      return Load<float>(row, col);
  }
  return 0.0f;
}

void ConvertRow(const std::byte* from, DType from_type, std::byte* to, DType to_type, int64_t cols) {
  if (from_type == to_type) {
    std::memcpy(to, from, static_cast<size_t>(cols) * SizeOf(from_type));
    return;
  }
  constexpr int64_t kChunk = 1024;  // through fp32, in pieces that stay in the L1 cache
  float buffer[kChunk];
  for (int64_t c = 0; c < cols; c += kChunk) {
    const int64_t count = std::min(kChunk, cols - c);
    WidenRow(from_type, from + static_cast<size_t>(c) * SizeOf(from_type), buffer, count);
    NarrowRow(buffer, to_type, to + static_cast<size_t>(c) * SizeOf(to_type), count);
  }
}

// Rows a task: enough work to pay for handing it out.
int64_t RowsPerTask(int64_t cols) { return std::max<int64_t>(1, (int64_t{1} << 16) / std::max<int64_t>(cols, 1)); }

}  // namespace

absl::Status CheckShape(int64_t m, int64_t k) {
  if (m < 1 || m > kMaxDim) {
    return absl::InvalidArgumentError(absl::StrCat("M: ", m, " is outside [1, ", kMaxDim, "]"));
  }
  if (k < 1 || k > kMaxDim) {
    return absl::InvalidArgumentError(absl::StrCat("K: ", k, " is outside [1, ", kMaxDim, "]"));
  }
  if (m * k > kMaxElements) {
    return absl::InvalidArgumentError(absl::StrCat("M*K: ", m, " * ", k, " exceeds ", kMaxElements));
  }
  return absl::OkStatus();
}

absl::StatusOr<DenseMatrix> DenseMatrix::Create(DType dtype, int64_t rows, int64_t cols) {
  SPMMD_RETURN_IF_ERROR(CheckShape(rows, cols));
  if (!IsValid(dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("dtype: unknown value ", static_cast<int>(dtype)));
  }
  DenseMatrix matrix;
  SPMMD_ASSIGN_OR_RETURN(matrix.buffer_, Buffer::Allocate(static_cast<size_t>(rows * cols) * SizeOf(dtype)));
  matrix.dtype_ = dtype;
  matrix.rows_ = rows;
  matrix.cols_ = cols;
  return matrix;
}

double ElementAsDouble(const DenseView& view, int64_t row, int64_t col) {
  return ElementAsFloat(view.row(row), view.dtype, col);
}

DenseStats ScanDense(const DenseView& w) {
  const int64_t rows_per_task = RowsPerTask(w.cols);
  const int64_t tasks = (w.rows + rows_per_task - 1) / rows_per_task;
  std::vector<DenseStats> partial(static_cast<size_t>(std::max<int64_t>(tasks, 0)));
  DefaultThreadPool().ParallelFor(tasks, [&](int64_t task, int /*worker*/) {
    DenseStats& stats = partial[static_cast<size_t>(task)];
    const int64_t end = std::min(w.rows, (task + 1) * rows_per_task);
    for (int64_t r = task * rows_per_task; r < end; ++r) {
      const RowStats row = ScanRow(w.dtype, w.row(r), w.cols);
      stats.nnz += row.nnz;
      if (row.nonfinite != 0 && stats.nonfinite == 0) {
        stats.first_nonfinite_row = r;
        stats.first_nonfinite_col = FirstNonfiniteInRow(w, r);
      }
      stats.nonfinite += row.nonfinite;
    }
  });
  DenseStats total;
  for (const DenseStats& stats : partial) {
    total.nnz += stats.nnz;
    if (stats.nonfinite != 0 && total.nonfinite == 0) {
      total.first_nonfinite_row = stats.first_nonfinite_row;
      total.first_nonfinite_col = stats.first_nonfinite_col;
    }
    total.nonfinite += stats.nonfinite;
  }
  return total;
}

absl::Status CheckFinite(const DenseView& w) {
  const DenseStats stats = ScanDense(w);
  if (stats.nonfinite == 0) return absl::OkStatus();
  const double value = ElementAsDouble(w, stats.first_nonfinite_row, stats.first_nonfinite_col);
  return absl::InvalidArgumentError(absl::StrCat("weights: ", value != value ? "NaN" : "infinity", " at row ",
                                                 stats.first_nonfinite_row, ", column ", stats.first_nonfinite_col,
                                                 " (", stats.nonfinite, " non-finite in all)"));
}

absl::Status ConvertDense(const DenseView& from, const MutableDenseView& to) {
  if (from.rows != to.rows || from.cols != to.cols) {
    return absl::InvalidArgumentError(
        absl::StrCat("shape: cannot convert [", from.rows, ", ", from.cols, "] into [", to.rows, ", ", to.cols, "]"));
  }
  if (!IsValid(from.dtype) || !IsValid(to.dtype)) return absl::InvalidArgumentError("dtype: unknown value");
  const int64_t rows_per_task = RowsPerTask(from.cols);
  const int64_t tasks = (from.rows + rows_per_task - 1) / rows_per_task;
  DefaultThreadPool().ParallelFor(tasks, [&](int64_t task, int /*worker*/) {
    const int64_t end = std::min(from.rows, (task + 1) * rows_per_task);
    for (int64_t r = task * rows_per_task; r < end; ++r) {
      ConvertRow(from.row(r), from.dtype, to.row(r), to.dtype, from.cols);
    }
  });
  return absl::OkStatus();
}

}  // namespace spmmd
