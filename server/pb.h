// Short name for the generated code of proto/spmm/v1. The messages themselves are the server's vocabulary: there is no
// second set of structs for what they already say.
#ifndef SPMMD_SERVER_PB_H_
#define SPMMD_SERVER_PB_H_

namespace spmm::v1 {}

namespace spmmd::server {
namespace pb = ::spmm::v1;
}  // namespace spmmd::server

#endif  // SPMMD_SERVER_PB_H_
