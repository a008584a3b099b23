#include "kernels/cpu/matmul.h"

#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/bitmap_kernels.h"
#include "kernels/cpu/bitmap_matmul.h"
#include "kernels/cpu/dense_matmul.h"
#include "kernels/cpu/kernel_names.h"
#include "kernels/format/bitmap.h"
#include "kernels/format/dense_rows.h"

namespace spmmd::cpu {
namespace {

absl::Status CheckOperands(const PackedLayer& w, int64_t n, const Epilogue& epilogue, const MutableDenseView& y) {
  if (!CanExecute(w.format)) {
    return absl::UnimplementedError(absl::StrCat("format: ", std::string(Name(w.format)), " has no CPU kernel"));
  }
  if (y.rows != n) return absl::InvalidArgumentError(absl::StrCat("y: ", y.rows, " rows, expected N = ", n));
  if (y.cols != w.m) return absl::InvalidArgumentError(absl::StrCat("y: ", y.cols, " columns, expected M = ", w.m));
  if (!IsValid(y.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("y: unknown dtype ", static_cast<int>(y.dtype)));
  }
  if (y.row_stride < y.cols) {
    return absl::InvalidArgumentError(absl::StrCat("y: row_stride ", y.row_stride, " is less than M = ", y.cols));
  }
  if (!epilogue.bias.empty() && epilogue.bias.size() != static_cast<size_t>(w.m)) {
    return absl::InvalidArgumentError(absl::StrCat("bias: ", epilogue.bias.size(), " elements, expected M = ", w.m));
  }
  if (!IsValid(epilogue.activation)) {
    return absl::InvalidArgumentError(
        absl::StrCat("activation: unknown value ", static_cast<int>(epilogue.activation)));
  }
  return absl::OkStatus();
}

absl::Status CheckTokens(const DenseView& x, int64_t k) {
  if (x.rows < 0) return absl::InvalidArgumentError(absl::StrCat("x: N = ", x.rows, " is negative"));
  if (x.cols != k) return absl::InvalidArgumentError(absl::StrCat("x: ", x.cols, " columns, expected K = ", k));
  if (!IsValid(x.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("x: unknown dtype ", static_cast<int>(x.dtype)));
  }
  if (x.row_stride < x.cols) {
    return absl::InvalidArgumentError(absl::StrCat("x: row_stride ", x.row_stride, " is less than K = ", x.cols));
  }
  return absl::OkStatus();
}

absl::Status CheckSparse(const SparseVector& x, int64_t k) {
  if (x.indices.size() != x.values.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("x: ", x.indices.size(), " indices, but ", x.values.size(), " values"));
  }
  for (size_t i = 0; i < x.indices.size(); ++i) {
    if (x.indices[i] >= static_cast<uint64_t>(k)) {
      return absl::InvalidArgumentError(absl::StrCat("x.indices[", i, "]: ", x.indices[i], " is not below K = ", k));
    }
    if (i > 0 && x.indices[i] <= x.indices[i - 1]) {
      return absl::InvalidArgumentError(absl::StrCat("x.indices[", i, "]: ", x.indices[i], " after ", x.indices[i - 1],
                                                     ": indices must ascend strictly"));
    }
  }
  return absl::OkStatus();
}

int64_t BytesOf(int64_t elements, DType dtype) { return elements * static_cast<int64_t>(SizeOf(dtype)); }

}  // namespace

bool CanExecute(Format format) { return format == Format::kBitmap || format == Format::kDense; }

absl::Status Matmul(const PackedLayer& w, const DenseView& x, const Epilogue& epilogue, const MutableDenseView& y,
                    ThreadPool& pool, LaunchInfo* info) {
  SPMMD_RETURN_IF_ERROR(CheckOperands(w, x.rows, epilogue, y));
  SPMMD_RETURN_IF_ERROR(CheckTokens(x, w.k));
  BitmapRun run;
  SPMMD_RETURN_IF_ERROR(w.format == Format::kDense ? DenseMatmul(w, x, epilogue, y, pool)
                                                   : BitmapMatmul(w, x, epilogue, y, pool, &run));
  if (info != nullptr) {
    if (w.format == Format::kBitmap) {
      const bool dot = run.decode == Decode::kBf16Dot;
      info->kernel = KernelName(x.rows <= 1 ? (dot ? Kernel::kBitmapSpmvDot : Kernel::kBitmapSpmv)
                                            : (dot ? Kernel::kBitmapSpmmDot : Kernel::kBitmapSpmm));
    } else {
      info->kernel = KernelName(x.rows <= kMaxDotTokens ? Kernel::kDenseDot : Kernel::kDenseSgemm);
    }
    info->bytes =
        static_cast<int64_t>(w.bytes().total()) + BytesOf(x.rows * x.cols, x.dtype) + BytesOf(y.rows * y.cols, y.dtype);
    info->flops = 2 * w.nnz * x.rows;
  }
  return absl::OkStatus();
}

absl::Status MatmulSparse(const PackedLayer& w, const SparseVector& x, const Epilogue& epilogue,
                          const MutableDenseView& y, ThreadPool& pool, LaunchInfo* info) {
  SPMMD_RETURN_IF_ERROR(CheckOperands(w, 1, epilogue, y));
  SPMMD_RETURN_IF_ERROR(CheckSparse(x, w.k));
  if (w.format == Format::kDense) {
    // Dense rows hold every column: nothing can be skipped.
    std::vector<float> dense(static_cast<size_t>(w.k), 0.0f);
    for (size_t i = 0; i < x.indices.size(); ++i) dense[x.indices[i]] = x.values[i];
    return Matmul(w, {reinterpret_cast<const std::byte*>(dense.data()), DType::kF32, 1, w.k, w.k}, epilogue, y, pool,
                  info);
  }
  BitmapRun run;
  SPMMD_RETURN_IF_ERROR(BitmapMatmulSparse(w, x, epilogue, y, pool, info == nullptr ? nullptr : &run));
  if (info != nullptr) {
    const int64_t touched_nnz = run.touched_nnz;
    info->kernel = KernelName(run.decode == Decode::kBf16Dot ? Kernel::kBitmapSpmspvDot : Kernel::kBitmapSpmspv);
    const auto columns = static_cast<int64_t>(x.indices.size());
    const int64_t blocks = (w.m + bitmap::kTileRows - 1) / bitmap::kTileRows;
    const int64_t strips = (w.m + bitmap::kStripRows - 1) / bitmap::kStripRows;
    info->bytes =
        BytesOf(touched_nnz, w.dtype) +
        columns * (strips * static_cast<int64_t>(sizeof(uint64_t)) + blocks * static_cast<int64_t>(sizeof(uint32_t))) +
        columns * static_cast<int64_t>(sizeof(uint32_t) + sizeof(float)) + BytesOf(w.m, y.dtype);
    info->flops = 2 * touched_nnz;
  }
  return absl::OkStatus();
}

void Sparsify(const DenseView& x, int64_t row, float threshold, std::vector<uint32_t>* indices,
              std::vector<float>* values) {
  indices->clear();
  values->clear();
  constexpr int64_t kChunk = 1024;
  float buffer[kChunk];
  for (int64_t begin = 0; begin < x.cols; begin += kChunk) {
    const int64_t count = std::min(kChunk, x.cols - begin);
    WidenRow(x.dtype, x.row(row) + static_cast<size_t>(begin) * SizeOf(x.dtype), buffer, count);
    for (int64_t i = 0; i < count; ++i) {
      if (std::abs(buffer[i]) <= threshold) continue;  // a NaN is kept
      indices->push_back(static_cast<uint32_t>(begin + i));
      values->push_back(buffer[i]);
    }
  }
}

}  // namespace spmmd::cpu
