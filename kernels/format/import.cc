#include "kernels/format/import.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_pool.h"

namespace spmmd {
namespace {

template <typename T>
T Load(Bytes bytes, int64_t index) {
  T value;
  std::memcpy(&value, bytes.data() + static_cast<size_t>(index) * sizeof(T), sizeof(T));
  return value;
}

// Calls body with a value of the dtype's storage type.
template <typename Body>
void WithStorageType(DType dtype, Body body) {
  if (SizeOf(dtype) == 4) {
    body(uint32_t{});
  } else {
    body(uint16_t{});
  }
}

absl::Status CheckDType(DType dtype) {
  if (IsValid(dtype)) return absl::OkStatus();
  return absl::InvalidArgumentError("dtype: must be fp16, bf16 or fp32");
}

absl::Status CheckBytes(const char* part, Bytes bytes, uint64_t expected) {
  if (bytes.size() == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(part, ": has ", bytes.size(), " bytes where ", expected, " are needed"));
}

// Checks that the part holds whole elements, at most m * k of them, and returns how many.
absl::StatusOr<int64_t> CountElements(const char* part, Bytes bytes, size_t element_bytes, int64_t m, int64_t k) {
  if (bytes.size() % element_bytes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(part, ": ", bytes.size(), " bytes are no whole number of ", element_bytes, "-byte elements"));
  }
  const uint64_t count = bytes.size() / element_bytes;
  if (count > static_cast<uint64_t>(m * k)) {
    return absl::InvalidArgumentError(absl::StrCat(part, ": ", count, " entries where M * K is ", m * k));
  }
  return static_cast<int64_t>(count);
}

// Keeps the error of the smallest position, whichever worker finds it, so that messages do not depend on timing.
class FirstError {
 public:
  void Report(int64_t position) {
    int64_t seen = position_.load(std::memory_order_relaxed);
    while (position < seen && !position_.compare_exchange_weak(seen, position, std::memory_order_relaxed)) {
    }
  }
  bool found() const { return position() != kNone; }
  int64_t position() const { return position_.load(std::memory_order_relaxed); }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> position_{kNone};
};

// Splits [0, items) into blocks of about `block` and runs body(begin, end) on the default pool.
template <typename Body>
void ParallelBlocks(int64_t items, int64_t block, Body body) {
  const int64_t tasks = (items + block - 1) / block;
  DefaultThreadPool().ParallelFor(
      tasks, [&](int64_t task, int /*worker*/) { body(task * block, std::min(items, (task + 1) * block)); });
}

constexpr int64_t kBlockElements = 1 << 18;

// Rows so that a block holds about kBlockElements.
int64_t BlockRows(int64_t k) { return std::max<int64_t>(1, kBlockElements / k); }

// Bits [bit, bit + count) of a bitmap, count <= 64, without touching bytes behind the last bit's.
uint64_t LoadBits(Bytes bitmap, int64_t bit, int count) {
  const auto first_byte = static_cast<size_t>(bit / 8);
  const int shift = static_cast<int>(bit % 8);
  const size_t byte_count = static_cast<size_t>(shift + count + 7) / 8;
  uint64_t low = 0;
  std::memcpy(&low, bitmap.data() + first_byte, std::min<size_t>(byte_count, 8));
  uint64_t bits = low >> shift;
  if (byte_count > 8) {  // then shift > 0
    bits |= static_cast<uint64_t>(std::to_integer<uint8_t>(bitmap[first_byte + 8])) << (64 - shift);
  }
  return count == 64 ? bits : bits & ((uint64_t{1} << count) - 1);
}

// Expands bitmap rows of row_bits (>= k) bits each.
absl::StatusOr<DenseMatrix> ExpandBitmap(DType dtype, int64_t m, int64_t k, int64_t row_bits, Bytes bitmap,
                                         Bytes values) {
  SPMMD_ASSIGN_OR_RETURN(const int64_t count, CountElements("VALUES", values, SizeOf(dtype), m, k));
  std::vector<int64_t> row_starts(static_cast<size_t>(m) + 1);
  ParallelBlocks(m, BlockRows(k), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t row_count = 0;
      for (int64_t col = 0; col < k; col += 64) {
        const int width = static_cast<int>(std::min<int64_t>(64, k - col));
        row_count += std::popcount(LoadBits(bitmap, row * row_bits + col, width));
      }
      row_starts[static_cast<size_t>(row) + 1] = row_count;
    }
  });
  for (size_t row = 0; row < static_cast<size_t>(m); ++row) row_starts[row + 1] += row_starts[row];
  if (row_starts.back() != count) {
    return absl::InvalidArgumentError(
        absl::StrCat("BITMAP: ", row_starts.back(), " bits are set where VALUES has ", count, " elements"));
  }
  SPMMD_ASSIGN_OR_RETURN(DenseMatrix matrix, DenseMatrix::Create(dtype, m, k));
  const MutableDenseView out = matrix.mutable_view();
  WithStorageType(dtype, [&](auto type) {
    using T = decltype(type);
    ParallelBlocks(m, BlockRows(k), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const std::byte* source = values.data() + static_cast<size_t>(row_starts[static_cast<size_t>(row)]) * sizeof(T);
        for (int64_t col = 0; col < k; col += 64) {
          const int width = static_cast<int>(std::min<int64_t>(64, k - col));
          std::byte* target = out.row(row) + static_cast<size_t>(col) * sizeof(T);
          for (uint64_t bits = LoadBits(bitmap, row * row_bits + col, width); bits != 0; bits &= bits - 1) {
            std::memcpy(target + static_cast<size_t>(std::countr_zero(bits)) * sizeof(T), source, sizeof(T));
            source += sizeof(T);
          }
        }
      }
    });
  });
  return matrix;
}

}  // namespace

absl::StatusOr<DenseMatrix> ImportDense(DType dtype, int64_t m, int64_t k, Bytes values) {
  SPMMD_RETURN_IF_ERROR(CheckDType(dtype));
  SPMMD_RETURN_IF_ERROR(CheckShape(m, k));
  SPMMD_RETURN_IF_ERROR(CheckBytes("VALUES", values, static_cast<uint64_t>(m * k) * SizeOf(dtype)));
  SPMMD_ASSIGN_OR_RETURN(DenseMatrix matrix, DenseMatrix::Create(dtype, m, k));
  const MutableDenseView out = matrix.mutable_view();
  const size_t row_bytes = static_cast<size_t>(k) * SizeOf(dtype);
  ParallelBlocks(m, BlockRows(k), [&](int64_t begin, int64_t end) {
    std::memcpy(out.row(begin), values.data() + static_cast<size_t>(begin) * row_bytes,
                static_cast<size_t>(end - begin) * row_bytes);
  });
  return matrix;
}

absl::StatusOr<DenseMatrix> ImportCsr(DType dtype, int64_t m, int64_t k, Bytes row_offsets, Bytes column_indices,
                                      Bytes values) {
  SPMMD_RETURN_IF_ERROR(CheckDType(dtype));
  SPMMD_RETURN_IF_ERROR(CheckShape(m, k));
  SPMMD_ASSIGN_OR_RETURN(const int64_t nnz, CountElements("VALUES", values, SizeOf(dtype), m, k));
  SPMMD_RETURN_IF_ERROR(CheckBytes("ROW_OFFSETS", row_offsets, (static_cast<uint64_t>(m) + 1) * sizeof(uint64_t)));
  SPMMD_RETURN_IF_ERROR(CheckBytes("COLUMN_INDICES", column_indices, static_cast<uint64_t>(nnz) * sizeof(uint32_t)));
  uint64_t previous = 0;
  for (int64_t row = 0; row <= m; ++row) {
    const auto offset = Load<uint64_t>(row_offsets, row);
    if (offset < previous || offset > static_cast<uint64_t>(nnz) || (row == 0 && offset != 0) ||
        (row == m && offset != static_cast<uint64_t>(nnz))) {
      return absl::InvalidArgumentError(absl::StrCat("ROW_OFFSETS[", row, "]: ", offset,
                                                     " (offsets start at 0, never decrease and end at ", nnz, ")"));
    }
    previous = offset;
  }
  FirstError error;
  ParallelBlocks(m, BlockRows(k), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto last = static_cast<int64_t>(Load<uint64_t>(row_offsets, row + 1));
      int64_t previous_column = -1;
      for (auto i = static_cast<int64_t>(Load<uint64_t>(row_offsets, row)); i < last; ++i) {
        const auto column = int64_t{Load<uint32_t>(column_indices, i)};
        if (column <= previous_column || column >= k) return error.Report(i);
        previous_column = column;
      }
    }
  });
  if (error.found()) {
    return absl::InvalidArgumentError(
        absl::StrCat("COLUMN_INDICES[", error.position(), "]: ", Load<uint32_t>(column_indices, error.position()),
                     " (columns ascend strictly within a row and are below K = ", k, ")"));
  }
  SPMMD_ASSIGN_OR_RETURN(DenseMatrix matrix, DenseMatrix::Create(dtype, m, k));
  const MutableDenseView out = matrix.mutable_view();
  WithStorageType(dtype, [&](auto type) {
    using T = decltype(type);
    ParallelBlocks(m, BlockRows(k), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        T* target = reinterpret_cast<T*>(out.row(row));
        const auto last = static_cast<int64_t>(Load<uint64_t>(row_offsets, row + 1));
        for (auto i = static_cast<int64_t>(Load<uint64_t>(row_offsets, row)); i < last; ++i) {
          target[Load<uint32_t>(column_indices, i)] = Load<T>(values, i);
        }
      }
    });
  });
  return matrix;
}

absl::StatusOr<DenseMatrix> ImportCoo(DType dtype, int64_t m, int64_t k, Bytes row_indices, Bytes column_indices,
                                      Bytes values) {
  SPMMD_RETURN_IF_ERROR(CheckDType(dtype));
  SPMMD_RETURN_IF_ERROR(CheckShape(m, k));
  SPMMD_ASSIGN_OR_RETURN(const int64_t nnz, CountElements("VALUES", values, SizeOf(dtype), m, k));
  SPMMD_RETURN_IF_ERROR(CheckBytes("ROW_INDICES", row_indices, static_cast<uint64_t>(nnz) * sizeof(uint32_t)));
  SPMMD_RETURN_IF_ERROR(CheckBytes("COLUMN_INDICES", column_indices, static_cast<uint64_t>(nnz) * sizeof(uint32_t)));
  SPMMD_ASSIGN_OR_RETURN(DenseMatrix matrix, DenseMatrix::Create(dtype, m, k));
  // One bit a position: a value of zero must not hide a duplicate.
  SPMMD_ASSIGN_OR_RETURN(Buffer seen_buffer, Buffer::Allocate(static_cast<size_t>((m * k + 63) / 64) * 8));
  const absl::Span<uint64_t> seen = seen_buffer.MutableAs<uint64_t>();
  const MutableDenseView out = matrix.mutable_view();
  absl::Status status;
  WithStorageType(dtype, [&](auto type) {
    using T = decltype(type);
    T* target = reinterpret_cast<T*>(out.data);
    for (int64_t i = 0; i < nnz; ++i) {
      const auto row = int64_t{Load<uint32_t>(row_indices, i)};
      const auto column = int64_t{Load<uint32_t>(column_indices, i)};
      if (row >= m) {
        status = absl::InvalidArgumentError(absl::StrCat("ROW_INDICES[", i, "]: ", row, " is not below M = ", m));
        return;
      }
      if (column >= k) {
        status = absl::InvalidArgumentError(absl::StrCat("COLUMN_INDICES[", i, "]: ", column, " is not below K = ", k));
        return;
      }
      const int64_t position = row * k + column;
      uint64_t& word = seen[static_cast<size_t>(position / 64)];
      const uint64_t bit = uint64_t{1} << (position % 64);
      if ((word & bit) != 0) {
        status = absl::InvalidArgumentError(
            absl::StrCat("COLUMN_INDICES[", i, "]: position (", row, ", ", column, ") comes twice"));
        return;
      }
      word |= bit;
      target[position] = Load<T>(values, i);
    }
  });
  if (!status.ok()) return status;
  return matrix;
}

absl::StatusOr<DenseMatrix> ImportBitmap(DType dtype, int64_t m, int64_t k, Bytes bitmap, Bytes values) {
  SPMMD_RETURN_IF_ERROR(CheckDType(dtype));
  SPMMD_RETURN_IF_ERROR(CheckShape(m, k));
  SPMMD_RETURN_IF_ERROR(CheckBytes("BITMAP", bitmap, static_cast<uint64_t>((m * k + 7) / 8)));
  if (m * k % 8 != 0 && (std::to_integer<uint32_t>(bitmap.back()) >> (m * k % 8)) != 0) {
    return absl::InvalidArgumentError("BITMAP: bits are set behind the last element");
  }
  return ExpandBitmap(dtype, m, k, k, bitmap, values);
}

absl::StatusOr<DenseMatrix> ImportRowBitmap(DType dtype, int64_t m, int64_t k, Bytes bitmap, Bytes values) {
  SPMMD_RETURN_IF_ERROR(CheckDType(dtype));
  SPMMD_RETURN_IF_ERROR(CheckShape(m, k));
  const int64_t row_bytes = (k + 7) / 8;
  SPMMD_RETURN_IF_ERROR(CheckBytes("BITMAP", bitmap, static_cast<uint64_t>(m * row_bytes)));
  if (k % 8 != 0) {
    for (int64_t row = 0; row < m; ++row) {
      if ((std::to_integer<uint32_t>(bitmap[static_cast<size_t>((row + 1) * row_bytes - 1)]) >> (k % 8)) != 0) {
        return absl::InvalidArgumentError(absl::StrCat("BITMAP: bits are set behind the last column of row ", row));
      }
    }
  }
  return ExpandBitmap(dtype, m, k, row_bytes * 8, bitmap, values);
}

absl::StatusOr<DenseMatrix> ConvertToDType(const DenseView& w, DType dtype) {
  SPMMD_RETURN_IF_ERROR(CheckDType(dtype));
  SPMMD_ASSIGN_OR_RETURN(DenseMatrix out, DenseMatrix::Create(dtype, w.rows, w.cols));
  SPMMD_RETURN_IF_ERROR(ConvertDense(w, out.mutable_view()));
  if (dtype == w.dtype || dtype == DType::kF32) return out;
  // Only narrowing can overflow; the scan costs one pass over the narrow copy.
  if (ScanDense(out.view()).nonfinite == 0) return out;
  FirstError error;
  const DenseView narrow = out.view();
  ParallelBlocks(w.rows, BlockRows(w.cols), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t col = 0; col < w.cols; ++col) {
        if (std::isinf(ElementAsDouble(narrow, row, col)) && std::isfinite(ElementAsDouble(w, row, col))) {
          return error.Report(row * w.cols + col);
        }
      }
    }
  });
  if (error.found()) {
    const int64_t row = error.position() / w.cols;
    const int64_t col = error.position() % w.cols;
    return absl::InvalidArgumentError(absl::StrCat("VALUES: element (", row, ", ", col,
                                                   ") = ", ElementAsDouble(w, row, col), " does not fit ",
                                                   std::string(Name(dtype))));
  }
  return out;
}

}  // namespace spmmd
