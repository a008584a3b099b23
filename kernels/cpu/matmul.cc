#include "kernels/cpu/matmul.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/bitmap.h"

namespace spmmd::cpu {
namespace {

float LoadElement(DType dtype, const std::byte* row, int64_t col) {
  uint16_t half;
  float full;
  switch (dtype) {
    case DType::kF16:
      std::memcpy(&half, row + static_cast<size_t>(col) * 2, 2);
      return F16ToFloat(half);
    case DType::kBf16:
      std::memcpy(&half, row + static_cast<size_t>(col) * 2, 2);
      return Bf16ToFloat(half);
    case DType::kF32:
      std::memcpy(&full, row + static_cast<size_t>(col) * 4, 4);
      return full;
  }
  return 0;
}

void StoreElement(DType dtype, std::byte* row, int64_t col, float value) {
  const uint16_t half = dtype == DType::kF16 ? FloatToF16(value) : FloatToBf16(value);
  if (dtype == DType::kF32) {
    std::memcpy(row + static_cast<size_t>(col) * 4, &value, 4);
  } else {
    std::memcpy(row + static_cast<size_t>(col) * 2, &half, 2);
  }
}

absl::Status CheckOperands(const PackedLayer& w, int64_t n, const Epilogue& epilogue, const MutableDenseView& y) {
  if (!CanExecute(w.format)) {
    return absl::UnimplementedError(absl::StrCat("format: ", std::string(Name(w.format)), " has no CPU kernel"));
  }
  if (y.rows != n) return absl::InvalidArgumentError(absl::StrCat("y: ", y.rows, " rows, expected N = ", n));
  if (y.cols != w.m) return absl::InvalidArgumentError(absl::StrCat("y: ", y.cols, " columns, expected M = ", w.m));
  if (!IsValid(y.dtype)) return absl::InvalidArgumentError("y: unknown dtype");
  if (y.row_stride < y.cols) return absl::InvalidArgumentError("y: row_stride is less than M");
  if (!epilogue.bias.empty() && epilogue.bias.size() != static_cast<size_t>(w.m)) {
    return absl::InvalidArgumentError(absl::StrCat("bias: ", epilogue.bias.size(), " elements, expected M = ", w.m));
  }
  if (!IsValid(epilogue.activation)) return absl::InvalidArgumentError("activation: unknown value");
  return absl::OkStatus();
}

}  // namespace

bool CanExecute(Format format) { return format == Format::kBitmap || format == Format::kDense; }

absl::Status Matmul(const PackedLayer& w, const DenseView& x, const Epilogue& epilogue, const MutableDenseView& y,
                    ThreadPool& pool, LaunchInfo* info) {
  SPMMD_RETURN_IF_ERROR(CheckOperands(w, x.rows, epilogue, y));
  if (x.cols != w.k) return absl::InvalidArgumentError(absl::StrCat("x: ", x.cols, " columns, expected K = ", w.k));
  if (!IsValid(x.dtype)) return absl::InvalidArgumentError("x: unknown dtype");
  if (x.row_stride < x.cols) return absl::InvalidArgumentError("x: row_stride is less than K");
  const int64_t row_blocks = (w.m + bitmap::kTileRows - 1) / bitmap::kTileRows;
  std::vector<float> xf(static_cast<size_t>(x.rows * x.cols));
  for (int64_t n = 0; n < x.rows; ++n) {
    for (int64_t k = 0; k < x.cols; ++k) {
      xf[static_cast<size_t>(n * x.cols + k)] = LoadElement(x.dtype, x.row(n), k);
    }
  }
  pool.ParallelFor(row_blocks, [&](int64_t block, int /*worker*/) {
    const int64_t row0 = block * bitmap::kTileRows;
    const int64_t rows = std::min(bitmap::kTileRows, w.m - row0);
    std::vector<float> acc(static_cast<size_t>(rows * x.rows), 0.0f);
    if (w.format == Format::kDense) {
      const std::byte* values = w.sections[0].data.data();
      for (int64_t r = 0; r < rows; ++r) {
        const std::byte* row = values + static_cast<size_t>((row0 + r) * w.k) * SizeOf(w.dtype);
        for (int64_t k = 0; k < w.k; ++k) {
          const float value = LoadElement(w.dtype, row, k);
          for (int64_t n = 0; n < x.rows; ++n) {
            acc[static_cast<size_t>(n * rows + r)] += value * xf[static_cast<size_t>(n * x.cols + k)];
          }
        }
      }
    } else {
      const bitmap::View view = bitmap::MakeView(w);
      for (int64_t k = 0; k < w.k; ++k) {
        auto at = static_cast<int64_t>(view.piece_start(block, k));
        for (int64_t s = 0; s < view.strips(block); ++s) {
          for (uint64_t mask = view.column_masks(block, k)[s]; mask != 0; mask &= mask - 1) {
            const int64_t r = s * bitmap::kStripRows + std::countr_zero(mask);
            const float value = LoadElement(w.dtype, view.values, at++);
            for (int64_t n = 0; n < x.rows; ++n) {
              acc[static_cast<size_t>(n * rows + r)] += value * xf[static_cast<size_t>(n * x.cols + k)];
            }
          }
        }
      }
    }
    for (int64_t n = 0; n < x.rows; ++n) {
      for (int64_t r = 0; r < rows; ++r) {
        const float bias = epilogue.bias.empty() ? 0.0f : epilogue.bias[static_cast<size_t>(row0 + r)];
        const double sum = acc[static_cast<size_t>(n * rows + r)] + bias;
        StoreElement(y.dtype, y.row(n), row0 + r, static_cast<float>(ActivateDouble(epilogue.activation, sum)));
      }
    }
  });
  if (info != nullptr) {
    info->kernel = w.format == Format::kDense ? "dense_scalar" : "bitmap_scalar";
    info->bytes = static_cast<int64_t>(w.bytes().total() + static_cast<size_t>(x.rows * x.cols) * SizeOf(x.dtype) +
                                       static_cast<size_t>(y.rows * y.cols) * SizeOf(y.dtype));
    info->flops = 2 * w.nnz * x.rows;
  }
  return absl::OkStatus();
}

absl::Status MatmulSparse(const PackedLayer& w, const SparseVector& x, const Epilogue& epilogue,
                          const MutableDenseView& y, ThreadPool& pool, LaunchInfo* info) {
  if (x.indices.size() != x.values.size()) {
    return absl::InvalidArgumentError(absl::StrCat("x: ", x.indices.size(), " indices, ", x.values.size(), " values"));
  }
  SPMMD_RETURN_IF_ERROR(CheckOperands(w, 1, epilogue, y));
  std::vector<float> dense(static_cast<size_t>(w.k), 0.0f);
  for (size_t i = 0; i < x.indices.size(); ++i) {
    if (x.indices[i] >= static_cast<uint64_t>(w.k)) {
      return absl::InvalidArgumentError(absl::StrCat("x.indices[", i, "]: ", x.indices[i], " is not below K = ", w.k));
    }
    if (i > 0 && x.indices[i] <= x.indices[i - 1]) {
      return absl::InvalidArgumentError(
          absl::StrCat("x.indices[", i, "]: ", x.indices[i], " after ", x.indices[i - 1], ": not strictly ascending"));
    }
    dense[x.indices[i]] = x.values[i];
  }
  return Matmul(w, {reinterpret_cast<const std::byte*>(dense.data()), DType::kF32, 1, w.k, w.k}, epilogue, y, pool,
                info);
}

void Sparsify(const DenseView& x, int64_t row, float threshold, std::vector<uint32_t>* indices,
              std::vector<float>* values) {
  indices->clear();
  values->clear();
  for (int64_t k = 0; k < x.cols; ++k) {
    const float value = LoadElement(x.dtype, x.row(row), k);
    if (!(std::abs(value) > threshold) && value == value) continue;  // a NaN is kept
    indices->push_back(static_cast<uint32_t>(k));
    values->push_back(value);
  }
}

}  // namespace spmmd::cpu
