// The protocol's names of element types.
#ifndef SPMMD_SERVER_OIP_DATATYPE_H_
#define SPMMD_SERVER_OIP_DATATYPE_H_

#include <optional>

#include "absl/strings/string_view.h"
#include "kernels/base/dtype.h"

namespace spmmd::server {

// "FP16", "BF16", "FP32"; nullopt for all else.
std::optional<DType> FromDatatype(absl::string_view datatype);
absl::string_view ToDatatype(DType dtype);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_OIP_DATATYPE_H_
