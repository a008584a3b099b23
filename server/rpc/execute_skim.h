// Cuts large tensors out of a serialised request, so that they need not be copied to be parsed.
//
// The walk over a request's bytes knows the plain form that serialisers write, in any order of fields, and cuts tensors
// (and the program, which the engine may know by its bytes) out of it; what is left is parsed by protobuf as ever.
// Whatever else it meets (unknown fields, a field twice where that means merging, bytes that are no message) makes it
// give up, and protobuf parses all of it: what is accepted, and what it means, is the same either way.
#ifndef SPMMD_SERVER_RPC_EXECUTE_SKIM_H_
#define SPMMD_SERVER_RPC_EXECUTE_SKIM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/engine/payloads.h"

namespace spmmd::server {

// A request without what was cut out of it.
struct SkimmedRequest {
  std::string rest;                     // an ExecuteRequest; where a tensor was cut out, its `data` is empty
  std::string program;                  // bytes of ExecuteRequest.program; empty: none
  std::vector<Payloads::Input> inputs;  // by the index in ExecuteRequest.inputs, up to the last that was cut out
};
// False: it takes protobuf. `min_bytes`: of a tensor that is cut out.
bool SkimExecuteRequest(absl::Span<const absl::string_view> slices, uint64_t min_bytes, SkimmedRequest* out);
// The same of an ExecuteStreamRequest that has a request.
bool SkimExecuteStreamRequest(absl::Span<const absl::string_view> slices, uint64_t min_bytes, uint64_t* request_id,
                              SkimmedRequest* out);

// What both directions write by hand.
namespace wire {
// Wire types.
inline constexpr uint32_t kVarint = 0;
inline constexpr uint32_t kBytes = 2;
constexpr uint32_t Tag(uint32_t field, uint32_t type) { return field << 3 | type; }
void AppendVarint(uint64_t value, std::string* out);
void AppendField(uint32_t field, absl::string_view bytes, std::string* out);
}  // namespace wire

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_EXECUTE_SKIM_H_
