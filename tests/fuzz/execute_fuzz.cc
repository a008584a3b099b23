// Requests on the wire: what the skim accepts, and what it makes of it, is what protobuf would make of the same bytes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "server/pb.h"
#include "server/rpc/execute_skim.h"
#include "spmm/v1/sparse_matmul.pb.h"

namespace {

using namespace spmmd::server;  // NOLINT(google-build-using-namespace): short names of one library

void Require(bool condition) {
  if (!condition) std::abort();
}

std::string Deterministic(const google::protobuf::MessageLite& message) {
  std::string bytes;
  Require(message.SerializeToString(&bytes));
  return bytes;
}

// Puts back what was cut out; false when what is left is no message.
bool Join(const SkimmedRequest& skimmed, pb::ExecuteRequest* out) {
  if (!out->ParseFromString(skimmed.rest)) return false;
  if (!skimmed.program.empty() && !out->mutable_program()->ParseFromString(skimmed.program)) return false;
  Require(skimmed.inputs.size() <= static_cast<size_t>(out->inputs_size()));
  for (size_t i = 0; i < skimmed.inputs.size(); ++i) {
    if (!skimmed.inputs[i].present()) continue;
    pb::Tensor& tensor = *out->mutable_inputs(static_cast<int>(i))->mutable_dense();
    Require(tensor.content_case() == pb::Tensor::kData && tensor.data().empty());
    uint64_t bytes = 0;
    for (const auto& piece : skimmed.inputs[i].pieces) {
      tensor.mutable_data()->append(reinterpret_cast<const char*>(piece.data()), piece.size());
      bytes += piece.size();
    }
    Require(bytes == skimmed.inputs[i].bytes);
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const bool stream = (data[0] & 1) != 0;
  const uint64_t min_bytes = 1 + (data[0] >> 1) % 16;
  const size_t step = 1 + data[1] % 64;
  const absl::string_view bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  std::vector<absl::string_view> slices;
  for (size_t at = 0; at < bytes.size(); at += step) {
    slices.push_back(bytes.substr(at, step));
    if (slices.size() % 3 == 0) slices.emplace_back();
  }
  SkimmedRequest skimmed;
  pb::ExecuteRequest joined;
  if (stream) {
    uint64_t id = 0;
    if (!SkimExecuteStreamRequest(slices, min_bytes, &id, &skimmed)) return 0;
    pb::ExecuteStreamRequest whole;
    const bool valid = whole.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
    Require(Join(skimmed, &joined) == valid);
    if (!valid) return 0;
    Require(whole.request_id() == id && whole.has_request());
    Require(Deterministic(whole.request()) == Deterministic(joined));
    return 0;
  }
  if (!SkimExecuteRequest(slices, min_bytes, &skimmed)) return 0;
  pb::ExecuteRequest whole;
  const bool valid = whole.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  Require(Join(skimmed, &joined) == valid);
  if (valid) Require(Deterministic(whole) == Deterministic(joined));
  return 0;
}
