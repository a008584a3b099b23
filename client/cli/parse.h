// The small languages of spmmctl's arguments. Every function answers INVALID_ARGUMENT with what was expected.
#ifndef SPMMD_CLIENT_CLI_PARSE_H_
#define SPMMD_CLIENT_CLI_PARSE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/dtype.h"
#include "spmm/v1/layer_catalog.pb.h"
#include "spmm/v1/sparse_matmul.pb.h"
#include "spmm/v1/types.pb.h"

namespace spmmd::cli {

namespace v1 = ::spmm::v1;

// "magnitude:0.5", "nm:2:4" or "none", into the spec's pruning.
absl::Status ParsePruning(const std::string& text, v1::LayerSpec& spec);

// "fp16", "bf16", "fp32".
absl::StatusOr<v1::DataType> ParseDataType(const std::string& text);
DType ToDType(v1::DataType dtype);  // of what ParseDataType gives
// "auto", "dense", "bitmap", "three_layer", "rlc_csc", "row_stream"; any case.
absl::StatusOr<v1::Format> ParseFormat(const std::string& text);
// "single", "replicated", "sharded".
absl::StatusOr<v1::Placement> ParsePlacement(const std::string& text);
// "none", "relu", "gelu", "gelu_tanh", "silu".
absl::StatusOr<v1::Activation> ParseActivation(const std::string& text);

// The inverse, as tables and JSON spell them: "fp16", "BITMAP" ("AUTO" when unspecified), "ready", "single".
std::string ToString(v1::DataType dtype);
std::string ToString(v1::Format format);
std::string ToString(v1::LayerState state);
std::string ToString(v1::Placement placement);

// "NAME" or "NAME@VERSION".
absl::StatusOr<v1::LayerRef> ParseLayerRef(const std::string& text);

// What `spmmctl pack` calls its files.
inline constexpr char kPackedExtension[] = ".spmmpk";

// "W.npy", "W.safetensors", "W.safetensors:TENSOR", "W.safetensors.index.json:TENSOR", "W.spmmpk".
struct FileAndTensor {
  std::string path;
  std::string tensor;  // empty when not given
  bool is_npy = false;
  bool is_packed = false;
};
absl::StatusOr<FileAndTensor> ParseFile(const std::string& text);

}  // namespace spmmd::cli

#endif  // SPMMD_CLIENT_CLI_PARSE_H_
