// COO: an interchange format, never executed. Sections:
//   1 rows     uint32 [nnz]
//   2 columns  uint32 [nnz]; (row, column) strictly ascending
//   3 values   [nnz] elements, no zeros
// Any dtype. No padding, no params.
#ifndef SPMMD_KERNELS_FORMAT_COO_H_
#define SPMMD_KERNELS_FORMAT_COO_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/format/dense.h"
#include "kernels/format/packed_layer.h"

namespace spmmd::coo {

inline constexpr uint32_t kLayoutVersion = 1;
enum SectionId : uint32_t { kRows = 1, kColumns = 2, kValues = 3 };

// Called by spmmd::Pack, Unpack and Validate, which see to what is common to all formats.
absl::StatusOr<PackedLayer> Pack(const DenseView& w, const PackOptions& options);
absl::Status Unpack(const PackedLayer& layer, const MutableDenseView& out);
absl::Status Validate(const PackedLayer& layer);

}  // namespace spmmd::coo

#endif  // SPMMD_KERNELS_FORMAT_COO_H_
