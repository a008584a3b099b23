#include "server/oip/datatype.h"

namespace spmmd::server {

std::optional<DType> FromDatatype(absl::string_view datatype) {
  if (datatype == "FP16") return DType::kF16;
  if (datatype == "BF16") return DType::kBf16;
  if (datatype == "FP32") return DType::kF32;
  return std::nullopt;
}

absl::string_view ToDatatype(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return "FP16";
    case DType::kBf16:
      return "BF16";
    case DType::kF32:
      return "FP32";
  }
  return "";
}

}  // namespace spmmd::server
