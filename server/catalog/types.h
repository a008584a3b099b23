// The wire's enums as the kernels' enums, and back.
#ifndef SPMMD_SERVER_CATALOG_TYPES_H_
#define SPMMD_SERVER_CATALOG_TYPES_H_

#include <optional>

#include "kernels/base/activation.h"
#include "kernels/base/dtype.h"
#include "kernels/format/packed_layer.h"
#include "server/pb.h"
#include "spmm/v1/types.pb.h"

namespace spmmd::server {

// Nullopt for UNSPECIFIED and for values that this server does not know (open enums carry any number).
std::optional<DType> FromProto(pb::DataType dtype);
std::optional<Format> FromProto(pb::Format format);
// UNSPECIFIED is kNone; nullopt for unknown values.
std::optional<Activation> FromProto(pb::Activation activation);

pb::DataType ToProto(DType dtype);
// Layouts of one wire format that differ by backend have one name on the wire.
pb::Format ToProto(Format format);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_CATALOG_TYPES_H_
