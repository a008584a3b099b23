// Requests of the Open Inference Protocol: from their bytes to the tensors that a device would read. No device, no
// layer: the conversion and the engine's checks of shapes, sizes and regions are what faces the caller.
#include <cstdlib>
#include <memory>
#include <string>

#include "inference/grpc_service.pb.h"
#include "server/engine/program.h"
#include "server/errors.h"
#include "server/oip/convert.h"
#include "server/shm/region.h"

namespace {

using spmmd::DType;
using namespace spmmd::server;  // NOLINT(google-build-using-namespace): short names of one library

constexpr int64_t kMaxTokens = 64;

void Require(bool condition) {
  if (!condition) std::abort();
}

// y = x W^T with K = 8, M = 3.
Model LayerModel() {
  Model model;
  model.name = "layer";
  model.inputs = {{"x", DType::kF16, 8}};
  model.outputs = {{"y", DType::kF16, 3}};
  return model;
}

std::shared_ptr<Plan> MakePlan(bool layer) {
  auto plan = std::make_shared<Plan>();
  if (layer) {
    plan->input_names = {"x"};
    plan->input_dense_only = {false};
    plan->step_names = {"y"};
    plan->steps.resize(1);
    plan->width_class = {0, 1};
    plan->class_cols = {8, 3};
  } else {
    // moved = x + shift, of any width.
    plan->input_names = {"x", "shift"};
    plan->input_dense_only = {true, true};
    plan->step_names = {"moved"};
    plan->steps.resize(1);
    plan->width_class = {0, 0, 0};
    plan->class_cols = {-1};
  }
  return plan;
}

Model ProgramModel() {
  Model model;
  model.name = "program";
  model.program = MakePlan(false);
  model.inputs = {{"x", DType::kF32, -1}, {"shift", DType::kF32, -1}};
  model.outputs = {{"moved", DType::kF32, -1}};
  return model;
}

void Convert(const Model& model, const inference::ModelInferRequest& given) {
  inference::ModelInferRequest request = given;
  spmm::v1::ExecuteRequest execute;
  InferContext context;
  absl::Status status = ToExecute(model, &request, &execute, &context);
  if (!status.ok()) {
    Require(!FieldOf(status).empty() && status.message().find(FieldOf(status)) == 0);
    return;
  }
  Require(execute.inputs_size() == static_cast<int>(model.inputs.size()));
  Require(context.content_paths.size() == model.inputs.size());
  Require(!context.outputs.empty() && context.outputs.size() <= model.outputs.size());

  RegionPool pool({});
  const RegionSet none(&pool);
  Job job;
  job.plan = MakePlan(model.is_layer());
  status = BindInputs(execute, *job.plan, kMaxTokens, &none, /*payloads=*/nullptr, &job);
  const absl::Status told = ToInferError(status, context);
  Require(told.code() == status.code() && ReasonOf(told) == ReasonOf(status));
  // The caller never reads a path of a message that he did not send.
  Require(told.message().find(".dense") == absl::string_view::npos);
  if (!status.ok()) return;
  Require(job.rows >= 0 && job.rows <= kMaxTokens && job.rows == context.rows);
  unsigned sum = 0;
  for (const InputValue& input : job.inputs) {
    const size_t bytes = static_cast<size_t>(input.dense.rows * input.dense.cols) * spmmd::SizeOf(input.dense.dtype);
    for (size_t i = 0; i < bytes; ++i) sum += static_cast<unsigned>(input.dense.data[i]);
  }
  spmm::v1::ExecuteResponse result;
  for (const ModelTensor& output : model.outputs) {
    spmm::v1::NamedOutput& named = *result.add_outputs();
    named.set_name(output.name);
    named.mutable_tensor()->set_dtype(spmm::v1::DATA_TYPE_F32);
    named.mutable_tensor()->set_data(std::string(sum % 16, 'y'));
  }
  inference::ModelInferResponse response;
  ToInferResponse(context, &result, &response);
  Require(response.id() == given.id());
  Require(response.outputs_size() == response.raw_output_contents_size());
  Require(response.outputs_size() == static_cast<int>(context.outputs.size()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  inference::ModelInferRequest request;
  if (!request.ParseFromArray(data, static_cast<int>(size))) return 0;
  Convert(LayerModel(), request);
  Convert(ProgramModel(), request);
  return 0;
}
