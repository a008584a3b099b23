#include "kernels/format/convert.h"

#include "kernels/base/status_macros.h"

namespace spmmd {

absl::StatusOr<PackedLayer> Convert(const PackedLayer& layer, Format to) {
  if (layer.format == to) {
    SPMMD_RETURN_IF_ERROR(Validate(layer));
    return layer;
  }
  SPMMD_ASSIGN_OR_RETURN(const DenseMatrix dense, Unpack(layer));
  return Pack(to, dense.view(), {.allow_nonfinite = true});
}

}  // namespace spmmd
