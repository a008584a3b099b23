#include "client/cli/parse.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace spmmd::cli {
namespace {

template <typename Enum>
using Spelling = std::pair<absl::string_view, Enum>;

constexpr std::array kDataTypes = {Spelling<v1::DataType>{"fp16", v1::DATA_TYPE_F16},
                                   Spelling<v1::DataType>{"bf16", v1::DATA_TYPE_BF16},
                                   Spelling<v1::DataType>{"fp32", v1::DATA_TYPE_F32}};
constexpr std::array kFormats = {
    Spelling<v1::Format>{"auto", v1::FORMAT_UNSPECIFIED}, Spelling<v1::Format>{"dense", v1::FORMAT_DENSE},
    Spelling<v1::Format>{"bitmap", v1::FORMAT_BITMAP},    Spelling<v1::Format>{"three_layer", v1::FORMAT_THREE_LAYER},
    Spelling<v1::Format>{"rlc_csc", v1::FORMAT_RLC_CSC},  Spelling<v1::Format>{"row_stream", v1::FORMAT_ROW_STREAM}};
constexpr std::array kPlacements = {Spelling<v1::Placement>{"single", v1::PLACEMENT_SINGLE},
                                    Spelling<v1::Placement>{"replicated", v1::PLACEMENT_REPLICATED},
                                    Spelling<v1::Placement>{"sharded", v1::PLACEMENT_SHARDED}};
constexpr std::array kActivations = {Spelling<v1::Activation>{"none", v1::ACTIVATION_UNSPECIFIED},
                                     Spelling<v1::Activation>{"relu", v1::ACTIVATION_RELU},
                                     Spelling<v1::Activation>{"gelu", v1::ACTIVATION_GELU},
                                     Spelling<v1::Activation>{"gelu_tanh", v1::ACTIVATION_GELU_TANH},
                                     Spelling<v1::Activation>{"silu", v1::ACTIVATION_SILU}};

template <typename Enum, size_t kSize>
absl::StatusOr<Enum> ParseEnum(const std::array<Spelling<Enum>, kSize>& spellings, const std::string& text) {
  std::vector<absl::string_view> expected;
  for (const auto& [name, value] : spellings) {
    if (absl::EqualsIgnoreCase(name, text)) return value;
    expected.push_back(name);
  }
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not one of ", absl::StrJoin(expected, ", ")));
}

absl::Status PruningError(const std::string& text, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat("'", text, "': ", problem,
                                                 "; expected magnitude:SPARSITY (0 <= SPARSITY < 1), nm:N:M (1 <= N < "
                                                 "M <= 64) or none"));
}

// A generated enumerator's name without its type's prefix.
std::string Strip(const std::string& name, absl::string_view prefix) {
  return absl::StartsWith(name, prefix) ? name.substr(prefix.size()) : absl::StrCat("UNKNOWN(", name, ")");
}

}  // namespace

absl::Status ParsePruning(const std::string& text, v1::LayerSpec& spec) {
  const std::vector<std::string> fields = absl::StrSplit(text, ':');
  if (text == "none") {
    spec.clear_pruning();
    return absl::OkStatus();
  }
  if (fields[0] == "magnitude") {
    double sparsity = 0;
    if (fields.size() != 2 || !absl::SimpleAtod(fields[1], &sparsity)) return PruningError(text, "no sparsity");
    if (!(sparsity >= 0 && sparsity < 1)) return PruningError(text, "sparsity out of range");
    spec.mutable_magnitude()->set_sparsity(sparsity);
    return absl::OkStatus();
  }
  if (fields[0] == "nm") {
    int32_t n = 0;
    int32_t m = 0;
    if (fields.size() != 3 || !absl::SimpleAtoi(fields[1], &n) || !absl::SimpleAtoi(fields[2], &m)) {
      return PruningError(text, "no N and M");
    }
    if (n < 1 || n >= m || m > 64) return PruningError(text, "N or M out of range");
    spec.mutable_nm()->set_n(n);
    spec.mutable_nm()->set_m(m);
    return absl::OkStatus();
  }
  return PruningError(text, "unknown method");
}

absl::StatusOr<v1::DataType> ParseDataType(const std::string& text) { return ParseEnum(kDataTypes, text); }
DType ToDType(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_F16:
      return DType::kF16;
    case v1::DATA_TYPE_BF16:
      return DType::kBf16;
    default:
      return DType::kF32;
  }
}
absl::StatusOr<v1::Format> ParseFormat(const std::string& text) { return ParseEnum(kFormats, text); }
absl::StatusOr<v1::Placement> ParsePlacement(const std::string& text) { return ParseEnum(kPlacements, text); }
absl::StatusOr<v1::Activation> ParseActivation(const std::string& text) { return ParseEnum(kActivations, text); }

std::string ToString(v1::DataType dtype) {
  for (const auto& [name, value] : kDataTypes) {
    if (value == dtype) return std::string(name);
  }
  return "unspecified";
}

std::string ToString(v1::Format format) {
  return format == v1::FORMAT_UNSPECIFIED ? "AUTO" : Strip(v1::Format_Name(format), "FORMAT_");
}

std::string ToString(v1::LayerState state) {
  return absl::AsciiStrToLower(Strip(v1::LayerState_Name(state), "LAYER_STATE_"));
}

std::string ToString(v1::Placement placement) {
  if (placement == v1::PLACEMENT_UNSPECIFIED) return "single";
  return absl::AsciiStrToLower(Strip(v1::Placement_Name(placement), "PLACEMENT_"));
}

absl::StatusOr<v1::LayerRef> ParseLayerRef(const std::string& text) {
  v1::LayerRef ref;
  const size_t at = text.rfind('@');
  ref.set_name(text.substr(0, at));
  int64_t version = 0;
  if (at != std::string::npos && (!absl::SimpleAtoi(text.substr(at + 1), &version) || version < 1)) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "': expected NAME or NAME@VERSION with VERSION >= 1"));
  }
  ref.set_version(version);
  if (ref.name().empty()) return absl::InvalidArgumentError("the layer's name is empty");
  return ref;
}

absl::StatusOr<FileAndTensor> ParseFile(const std::string& text) {
  if (absl::EndsWith(text, ".npy")) return FileAndTensor{text, "", true};
  if (absl::EndsWith(text, kPackedExtension)) return FileAndTensor{text, "", false, true};
  for (const absl::string_view extension : {".safetensors.index.json", ".safetensors"}) {
    if (absl::EndsWith(text, extension)) return FileAndTensor{text, "", false};
    const size_t found = text.find(absl::StrCat(extension, ":"));
    if (found == std::string::npos) continue;
    FileAndTensor file{text.substr(0, found + extension.size()), text.substr(found + extension.size() + 1), false};
    if (file.tensor.empty()) return absl::InvalidArgumentError(absl::StrCat("'", text, "': no tensor after the colon"));
    return file;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "'", text, "': expected FILE.npy, FILE.safetensors[:TENSOR], FILE.safetensors.index.json:TENSOR or FILE",
      kPackedExtension));
}

}  // namespace spmmd::cli
