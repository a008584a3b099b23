#include "server/oip/convert.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "google/protobuf/map.h"
#include "kernels/base/status_macros.h"
#include "server/catalog/types.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

using inference::InferParameter;
using inference::ModelInferRequest;
using Parameters = google::protobuf::Map<std::string, InferParameter>;

// Triton's names.
constexpr char kRegion[] = "shared_memory_region";
constexpr char kRegionBytes[] = "shared_memory_byte_size";
constexpr char kRegionOffset[] = "shared_memory_offset";

std::string ParameterPath(absl::string_view owner, absl::string_view name) {
  return absl::StrCat(owner, owner.empty() ? "" : ".", "parameters[", name, "]");
}

const InferParameter* FindParameter(const Parameters& parameters, const char* name) {
  const auto it = parameters.find(name);
  return it == parameters.end() ? nullptr : &it->second;
}

// A number from 0 on, of either integer type: clients differ. Absent: nullopt.
absl::StatusOr<std::optional<uint64_t>> ReadUnsigned(const Parameters& parameters, absl::string_view owner,
                                                     const char* name) {
  const InferParameter* parameter = FindParameter(parameters, name);
  if (parameter == nullptr) return std::nullopt;
  switch (parameter->parameter_choice_case()) {
    case InferParameter::kUint64Param:
      return parameter->uint64_param();
    case InferParameter::kInt64Param:
      if (parameter->int64_param() >= 0) return static_cast<uint64_t>(parameter->int64_param());
      return FieldError(ParameterPath(owner, name), absl::StrCat(parameter->int64_param(), " is negative"));
    default:
      return FieldError(ParameterPath(owner, name), "expected int64_param or uint64_param");
  }
}

absl::StatusOr<bool> ReadBool(const Parameters& parameters, const char* name) {
  const InferParameter* parameter = FindParameter(parameters, name);
  if (parameter == nullptr) return false;
  if (parameter->has_bool_param()) return parameter->bool_param();
  return FieldError(ParameterPath("", name), "expected bool_param");
}

// The slice that a tensor's parameters name; nullopt when they name none.
absl::StatusOr<std::optional<pb::RegionSlice>> ReadSlice(const Parameters& parameters, absl::string_view owner) {
  const InferParameter* region = FindParameter(parameters, kRegion);
  if (region == nullptr) return std::nullopt;
  if (!region->has_string_param()) return FieldError(ParameterPath(owner, kRegion), "expected string_param");
  SPMMD_ASSIGN_OR_RETURN(const std::optional<uint64_t> size, ReadUnsigned(parameters, owner, kRegionBytes));
  SPMMD_ASSIGN_OR_RETURN(const std::optional<uint64_t> offset, ReadUnsigned(parameters, owner, kRegionOffset));
  if (!size.has_value()) return FieldError(ParameterPath(owner, kRegionBytes), "must be set");
  pb::RegionSlice slice;
  slice.set_region(region->string_param());
  slice.set_offset(offset.value_or(0));
  slice.set_size(*size);
  return slice;
}

// Elements of a shape, when it is one that can have some.
std::optional<uint64_t> ElementsOf(const google::protobuf::RepeatedField<int64_t>& shape) {
  uint64_t elements = 1;
  for (const int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(elements, static_cast<uint64_t>(extent), &elements)) return std::nullopt;
  }
  return elements;
}

std::string ShapeText(const google::protobuf::RepeatedField<int64_t>& shape) {
  std::string text = "[";
  for (int i = 0; i < shape.size() && i < 8; ++i) absl::StrAppend(&text, i == 0 ? "" : ",", shape.Get(i));
  return text + (shape.size() > 8 ? ",...]" : "]");
}

// The bytes of `contents`, of which only fp32_contents can be any.
absl::Status TakeContents(const ModelInferRequest::InferInputTensor& input, DType dtype, const std::string& path,
                          pb::Tensor* tensor) {
  const inference::InferTensorContents& contents = input.contents();
  if (dtype != DType::kF32) {
    return FieldError(absl::StrCat(path, ".contents"),
                      absl::StrCat(ToDatatype(dtype), " has no typed contents: it travels in raw_input_contents"));
  }
  if (contents.bool_contents_size() + contents.int_contents_size() + contents.int64_contents_size() +
          contents.uint_contents_size() + contents.uint64_contents_size() + contents.fp64_contents_size() +
          contents.bytes_contents_size() >
      0) {
    return FieldError(absl::StrCat(path, ".contents"), "FP32 takes fp32_contents only");
  }
  const auto& values = contents.fp32_contents();
  // A shape that has no number of elements is left to the engine, which says what is wrong with it.
  const std::optional<uint64_t> elements = ElementsOf(input.shape());
  if (elements.has_value() && *elements != static_cast<uint64_t>(values.size())) {
    return FieldError(absl::StrCat(path, ".contents.fp32_contents"),
                      absl::StrCat("expected ", *elements, " elements for shape ", ShapeText(input.shape()), ", got ",
                                   values.size()));
  }
  tensor->mutable_data()->assign(reinterpret_cast<const char*>(values.data()),
                                 static_cast<size_t>(values.size()) * sizeof(float));
  return absl::OkStatus();
}

absl::Status TakeInputs(const Model& model, ModelInferRequest* request, pb::ExecuteRequest* execute,
                        InferContext* context) {
  const bool raw = request->raw_input_contents_size() > 0;
  int next_raw = 0;
  std::vector<bool> given(model.inputs.size());
  for (int i = 0; i < request->inputs_size(); ++i) {
    const ModelInferRequest::InferInputTensor& input = request->inputs(i);
    const std::string path = absl::StrCat("inputs[", i, "]");
    const auto named = absl::c_find_if(model.inputs, [&](const auto& tensor) { return tensor.name == input.name(); });
    if (named == model.inputs.end()) {
      return FieldError(absl::StrCat(path, ".name"), absl::StrCat("the model has no input \"", input.name(), "\""));
    }
    const auto index = static_cast<size_t>(named - model.inputs.begin());
    if (given[index]) {
      return FieldError(absl::StrCat(path, ".name"), absl::StrCat("\"", input.name(), "\" is given twice"));
    }
    given[index] = true;
    const std::optional<DType> dtype = FromDatatype(input.datatype());
    if (!dtype.has_value()) {
      return FieldError(absl::StrCat(path, ".datatype"),
                        absl::StrCat("\"", input.datatype(), "\" is not one of FP16, BF16, FP32"));
    }
    // Before the engine looks at the size, which does not say as much.
    if (input.shape_size() == 2 && named->cols >= 0 && input.shape(1) != named->cols) {
      return FieldError(absl::StrCat(path, ".shape[1]"),
                        absl::StrCat(input.shape(1), " columns, expected ", named->cols));
    }
    SPMMD_ASSIGN_OR_RETURN(std::optional<pb::RegionSlice> slice, ReadSlice(input.parameters(), path));

    pb::NamedInput& out = *execute->add_inputs();
    out.set_name(input.name());
    pb::Tensor& tensor = *out.mutable_dense();
    tensor.set_dtype(ToProto(*dtype));
    *tensor.mutable_shape() = input.shape();
    if (i == 0 && input.shape_size() > 0) context->rows = input.shape(0);
    if (input.has_contents() && (raw || slice.has_value())) {
      return FieldError(absl::StrCat(path, ".contents"),
                        absl::StrCat("must not be set beside ", raw ? "raw_input_contents" : kRegion));
    }
    if (slice.has_value()) {
      *tensor.mutable_region() = *std::move(slice);
      context->content_paths.push_back(path);
    } else if (raw) {
      const std::string raw_path = absl::StrCat("raw_input_contents[", next_raw, "]");
      if (next_raw == request->raw_input_contents_size()) {
        return FieldError("raw_input_contents", absl::StrCat(next_raw, " entries, but none for input \"", input.name(),
                                                             "\", which is not in shared memory"));
      }
      *tensor.mutable_data() = std::move(*request->mutable_raw_input_contents(next_raw++));
      context->content_paths.push_back(raw_path);
    } else if (input.has_contents()) {
      SPMMD_RETURN_IF_ERROR(TakeContents(input, *dtype, path, &tensor));
      context->content_paths.push_back(absl::StrCat(path, ".contents.fp32_contents"));
    } else {
      return FieldError(path, "has no data: neither raw_input_contents, nor contents, nor shared memory");
    }
  }
  if (next_raw < request->raw_input_contents_size()) {
    return FieldError("raw_input_contents", absl::StrCat(request->raw_input_contents_size(), " entries for ", next_raw,
                                                         " inputs that are not in shared memory"));
  }
  for (size_t index = 0; index < given.size(); ++index) {
    if (!given[index]) {
      return FieldError("inputs", absl::StrCat("input \"", model.inputs[index].name, "\" of the model is missing"));
    }
  }
  return absl::OkStatus();
}

// The bytes that an output of this request has; nullopt when the engine will refuse the request.
std::optional<uint64_t> OutputBytes(const ModelTensor& output, DType dtype, int64_t rows, int64_t input_cols) {
  const int64_t cols = output.cols >= 0 ? output.cols : input_cols;
  uint64_t bytes = 0;
  if (rows < 0 || cols < 0 ||
      __builtin_mul_overflow(static_cast<uint64_t>(rows), static_cast<uint64_t>(cols) * SizeOf(dtype), &bytes)) {
    return std::nullopt;
  }
  return bytes;
}

absl::Status TakeOutputs(const Model& model, const ModelInferRequest& request, const std::vector<DType>& dtypes,
                         std::vector<std::optional<pb::RegionSlice>>* slices, InferContext* context) {
  slices->resize(model.outputs.size());
  if (request.outputs_size() == 0) {
    for (size_t o = 0; o < model.outputs.size(); ++o) context->outputs.push_back({static_cast<int>(o), -1, false});
    return absl::OkStatus();
  }
  // Of a program without a matmul: what comes in decides. Where inputs differ, the engine has the last word.
  int64_t input_cols = -1;
  if (request.inputs_size() > 0 && request.inputs(0).shape_size() == 2) input_cols = request.inputs(0).shape(1);
  std::vector<bool> given(model.outputs.size());
  for (int i = 0; i < request.outputs_size(); ++i) {
    const ModelInferRequest::InferRequestedOutputTensor& output = request.outputs(i);
    const std::string path = absl::StrCat("outputs[", i, "]");
    const auto named = absl::c_find_if(model.outputs, [&](const auto& tensor) { return tensor.name == output.name(); });
    if (named == model.outputs.end()) {
      return FieldError(absl::StrCat(path, ".name"), absl::StrCat("the model has no output \"", output.name(), "\""));
    }
    const auto index = static_cast<size_t>(named - model.outputs.begin());
    if (given[index]) {
      return FieldError(absl::StrCat(path, ".name"), absl::StrCat("\"", output.name(), "\" is given twice"));
    }
    given[index] = true;
    SPMMD_ASSIGN_OR_RETURN(const std::optional<uint64_t> classes,
                           ReadUnsigned(output.parameters(), path, "classification"));
    if (classes.value_or(0) > 0) {
      return FieldError(ParameterPath(path, "classification"), "outputs are tensors, not classes");
    }
    SPMMD_ASSIGN_OR_RETURN(std::optional<pb::RegionSlice> slice, ReadSlice(output.parameters(), path));
    if (slice.has_value()) {
      // The place may be larger than the output, as Triton has it. What has no size is refused by the engine.
      const std::optional<uint64_t> bytes = OutputBytes(*named, dtypes[index], context->rows, input_cols);
      if (bytes.has_value()) {
        if (slice->size() < *bytes) {
          return FieldError(ParameterPath(path, kRegionBytes),
                            absl::StrCat("expected at least ", *bytes, " bytes, got ", slice->size()));
        }
        slice->set_size(*bytes);
      }
    }
    context->outputs.push_back({static_cast<int>(index), i, slice.has_value()});
    (*slices)[index] = std::move(slice);
  }
  return absl::OkStatus();
}

// Activation, bias and threshold of a layer's matmul, by the request's parameters.
absl::Status SetMatmulOptions(const Parameters& parameters, pb::Matmul* matmul) {
  if (const InferParameter* parameter = FindParameter(parameters, "activation"); parameter != nullptr) {
    const std::string path = ParameterPath("", "activation");
    if (!parameter->has_string_param()) return FieldError(path, "expected string_param");
    static constexpr std::pair<absl::string_view, pb::Activation> kActivations[] = {
        {"none", pb::ACTIVATION_UNSPECIFIED},
        {"relu", pb::ACTIVATION_RELU},
        {"gelu", pb::ACTIVATION_GELU},
        {"gelu_tanh", pb::ACTIVATION_GELU_TANH},
        {"silu", pb::ACTIVATION_SILU}};
    const auto* const known = absl::c_find_if(
        kActivations, [&](const auto& activation) { return activation.first == parameter->string_param(); });
    if (known == std::end(kActivations)) {
      return FieldError(path, absl::StrCat("\"", parameter->string_param().substr(0, 32),
                                           "\" is not one of none, relu, gelu, gelu_tanh, silu"));
    }
    matmul->set_activation(known->second);
  }
  SPMMD_ASSIGN_OR_RETURN(const bool ignore_bias, ReadBool(parameters, "ignore_bias"));
  matmul->set_ignore_bias(ignore_bias);
  if (const InferParameter* parameter = FindParameter(parameters, "activation_threshold"); parameter != nullptr) {
    if (!parameter->has_double_param()) {
      return FieldError(ParameterPath("", "activation_threshold"), "expected double_param");
    }
    matmul->set_activation_threshold(static_cast<float>(parameter->double_param()));
  }
  return absl::OkStatus();
}

absl::Status SetRequestOptions(const Parameters& parameters, pb::ExecuteRequest* execute, InferContext* context) {
  // Triton: 0 is the default level, 1 the most urgent one.
  SPMMD_ASSIGN_OR_RETURN(const std::optional<uint64_t> priority, ReadUnsigned(parameters, "", "priority"));
  if (priority.value_or(0) > 1) execute->set_priority(pb::PRIORITY_BACKGROUND);
  SPMMD_ASSIGN_OR_RETURN(const std::optional<uint64_t> timeout, ReadUnsigned(parameters, "", "timeout"));
  // A century is as good as none, and adds up.
  constexpr uint64_t kLongest = uint64_t{100} * 366 * 24 * 3600 * 1'000'000;
  context->timeout = absl::Microseconds(static_cast<int64_t>(std::min(timeout.value_or(0), kLongest)));
  SPMMD_ASSIGN_OR_RETURN(context->wants_final_mark, ReadBool(parameters, "triton_enable_empty_final_response"));
  return absl::OkStatus();
}

// Where a path of the ExecuteRequest came from; nullopt for one that is the same in both.
std::optional<std::string> TranslatePath(absl::string_view path, const InferContext& context) {
  if (absl::StartsWith(path, "program.steps[0].matmul.activation_threshold")) {
    return ParameterPath("", "activation_threshold");
  }
  if (absl::StartsWith(path, "program.steps") || absl::StartsWith(path, "program_id")) return "model_name";
  const auto region_field = [](absl::string_view owner, absl::string_view rest) {
    if (absl::ConsumePrefix(&rest, ".offset")) return ParameterPath(owner, kRegionOffset);
    if (absl::ConsumePrefix(&rest, ".size")) return ParameterPath(owner, kRegionBytes);
    return ParameterPath(owner, kRegion);
  };
  // "outputs[O].region..." and, of a layer, "program.outputs[O].region..."
  absl::string_view rest = path;
  absl::ConsumePrefix(&rest, "program.");
  for (const InferContext::Output& output : context.outputs) {
    absl::string_view tail = rest;
    if (!absl::ConsumePrefix(&tail, absl::StrCat("outputs[", output.index, "]"))) continue;
    const std::string owner = output.requested < 0 ? "outputs" : absl::StrCat("outputs[", output.requested, "]");
    return absl::ConsumePrefix(&tail, ".region") ? region_field(owner, tail) : owner;
  }
  if (absl::StartsWith(path, "program.outputs")) return "outputs";
  for (size_t i = 0; i < context.content_paths.size(); ++i) {
    const std::string owner = absl::StrCat("inputs[", i, "]");
    absl::string_view tail = path;
    if (!absl::ConsumePrefix(&tail, absl::StrCat(owner, ".dense"))) continue;
    if (absl::ConsumePrefix(&tail, ".region")) return region_field(owner, tail);
    if (absl::ConsumePrefix(&tail, ".data")) return context.content_paths[i];
    return absl::StrCat(owner, tail);
  }
  return std::nullopt;
}

}  // namespace

absl::Status ToExecute(const Model& model, ModelInferRequest* request, pb::ExecuteRequest* execute,
                       InferContext* context) {
  context->model_name = model.name;
  context->model_version = model.version;
  context->id = request->id();
  SPMMD_RETURN_IF_ERROR(SetRequestOptions(request->parameters(), execute, context));
  SPMMD_RETURN_IF_ERROR(TakeInputs(model, request, execute, context));
  std::vector<DType> dtypes;
  for (const ModelTensor& output : model.outputs) dtypes.push_back(output.dtype);
  if (model.is_layer()) dtypes[0] = *FromProto(execute->inputs(0).dense().dtype());
  std::vector<std::optional<pb::RegionSlice>> slices;
  SPMMD_RETURN_IF_ERROR(TakeOutputs(model, *request, dtypes, &slices, context));

  if (model.is_layer()) {
    pb::Program& program = *execute->mutable_program();
    program.add_inputs(std::string(kLayerInput));
    pb::Step& step = *program.add_steps();
    step.set_name(std::string(kLayerOutput));
    pb::Matmul& matmul = *step.mutable_matmul();
    matmul.mutable_layer()->set_name(model.name);
    matmul.mutable_layer()->set_version(model.version);
    matmul.set_input(std::string(kLayerInput));
    SPMMD_RETURN_IF_ERROR(SetMatmulOptions(request->parameters(), &matmul));
  } else {
    for (const char* name : {"activation", "ignore_bias", "activation_threshold"}) {
      if (FindParameter(request->parameters(), name) != nullptr) {
        return FieldError(ParameterPath("", name), "is for layers; a program has its own");
      }
    }
    execute->set_program_id(model.name);
  }
  for (size_t o = 0; o < model.outputs.size(); ++o) {
    pb::OutputSpec& spec = model.is_layer() ? *execute->mutable_program()->add_outputs() : *execute->add_outputs();
    spec.set_step(model.outputs[o].name);
    spec.set_dtype(ToProto(dtypes[o]));
    if (slices[o].has_value()) *spec.mutable_region() = *std::move(slices[o]);
  }
  return absl::OkStatus();
}

absl::Status ToInferError(const absl::Status& status, const InferContext& context) {
  if (status.ok()) return status;
  const absl::string_view message = status.message();
  std::string path = FieldOf(status);
  if (path.empty()) path = std::string(message.substr(0, std::min(message.find(": "), message.size())));
  const std::optional<std::string> translated = TranslatePath(path, context);
  if (!translated.has_value()) return status;
  absl::string_view problem = message;
  if (!absl::ConsumePrefix(&problem, absl::StrCat(path, ": "))) return status;
  if (!FieldOf(status).empty()) return FieldError(*translated, problem, ReasonOf(status));
  absl::Status out(status.code(), absl::StrCat(*translated, ": ", problem));
  status.ForEachPayload([&out](absl::string_view url, const absl::Cord& payload) { out.SetPayload(url, payload); });
  return out;
}

void ToInferResponse(const InferContext& context, pb::ExecuteResponse* result,
                     inference::ModelInferResponse* response) {
  response->set_model_name(context.model_name);
  response->set_model_version(absl::StrCat(context.model_version));
  response->set_id(context.id);
  for (const InferContext::Output& output : context.outputs) {
    pb::Tensor& tensor = *result->mutable_outputs(output.index)->mutable_tensor();
    inference::ModelInferResponse::InferOutputTensor& out = *response->add_outputs();
    out.set_name(result->outputs(output.index).name());
    out.set_datatype(std::string(ToDatatype(FromProto(tensor.dtype()).value_or(DType::kF32))));
    *out.mutable_shape() = tensor.shape();
    std::string& bytes = *response->add_raw_output_contents();
    if (output.region) {
      auto& parameters = *out.mutable_parameters();
      parameters[kRegion].set_string_param(tensor.region().region());
      parameters[kRegionBytes].set_int64_param(static_cast<int64_t>(tensor.region().size()));
      parameters[kRegionOffset].set_int64_param(static_cast<int64_t>(tensor.region().offset()));
    } else {
      bytes = std::move(*tensor.mutable_data());
    }
  }
  if (context.wants_final_mark) (*response->mutable_parameters())["triton_final_response"].set_bool_param(true);
}

}  // namespace spmmd::server
