// One packed format into another.
#ifndef SPMMD_KERNELS_FORMAT_CONVERT_H_
#define SPMMD_KERNELS_FORMAT_CONVERT_H_

#include "absl/status/statusor.h"
#include "kernels/format/packed_layer.h"

namespace spmmd {

// The same matrix in format `to`, bit-exact for every nonzero, NaN and infinities included. A layer that is in that
// format already comes back sharing its bytes. Goes through a dense matrix: M * K elements of host memory for the
// duration. DATA_LOSS when `layer` is not valid, INVALID_ARGUMENT when `to` cannot hold its dtype, RESOURCE_EXHAUSTED.
absl::StatusOr<PackedLayer> Convert(const PackedLayer& layer, Format to);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_FORMAT_CONVERT_H_
