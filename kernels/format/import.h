// Uploaded weights as dense matrices. Every byte comes from a caller: sizes, order, ranges and duplicates are checked,
// and an error names the part as the wire contract spells it (ROW_OFFSETS, COLUMN_INDICES, ...) and the position. Spans
// need no alignment; all numbers are little-endian.
#ifndef SPMMD_KERNELS_FORMAT_IMPORT_H_
#define SPMMD_KERNELS_FORMAT_IMPORT_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/dtype.h"
#include "kernels/format/dense.h"

namespace spmmd {

// Bytes of an upload part.
using Bytes = absl::Span<const std::byte>;

// VALUES: m * k elements, row-major.
absl::StatusOr<DenseMatrix> ImportDense(DType dtype, int64_t m, int64_t k, Bytes values);

// ROW_OFFSETS: m + 1 uint64, the first 0, never decreasing, the last the number of entries; COLUMN_INDICES: uint32,
// strictly ascending within a row, < k; VALUES: one element an entry. Stored zeros are allowed.
absl::StatusOr<DenseMatrix> ImportCsr(DType dtype, int64_t m, int64_t k, Bytes row_offsets, Bytes column_indices,
                                      Bytes values);

// ROW_INDICES: uint32 < m; COLUMN_INDICES: uint32 < k; VALUES: one element an entry. Any order, no position twice.
// Stored zeros are allowed.
absl::StatusOr<DenseMatrix> ImportCoo(DType dtype, int64_t m, int64_t k, Bytes row_indices, Bytes column_indices,
                                      Bytes values);

// BITMAP: ceil(m * k / 8) bytes; bit i % 8 of byte i / 8, least significant first, is element i in row-major order;
// bits past the last element must be 0. VALUES: one element a set bit, row-major order. Stored zeros are allowed.
absl::StatusOr<DenseMatrix> ImportBitmap(DType dtype, int64_t m, int64_t k, Bytes bitmap, Bytes values);

// As ImportBitmap with each row padded to whole bytes: ceil(k / 8) bytes a row (compressed-tensors' layout).
absl::StatusOr<DenseMatrix> ImportRowBitmap(DType dtype, int64_t m, int64_t k, Bytes bitmap, Bytes values);

// The matrix in another dtype, rounded to nearest even. INVALID_ARGUMENT with the position when a finite value would
// become infinite.
absl::StatusOr<DenseMatrix> ConvertToDType(const DenseView& w, DType dtype);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_FORMAT_IMPORT_H_
