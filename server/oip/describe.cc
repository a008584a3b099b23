#include "server/oip/describe.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status_macros.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

inference::DataType ToDataType(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return inference::TYPE_FP16;
    case DType::kBf16:
      return inference::TYPE_BF16;
    case DType::kF32:
      return inference::TYPE_FP32;
  }
  return inference::TYPE_INVALID;
}

// Every version of a model's name that is served, newest first.
std::vector<std::string> VersionsOf(const RpcContext& rpc, const Model& model) {
  std::vector<std::string> versions;
  if (!model.is_layer()) return {absl::StrCat(model.version)};
  pb::ListLayersRequest request;
  request.set_name_prefix(model.name);
  pb::ListLayersResponse page;
  do {
    request.set_page_token(page.next_page_token());
    page.Clear();
    if (!rpc.catalog->List(request, &page).ok()) break;
    for (const pb::Layer& layer : page.layers()) {
      // Sorted by name: the name itself comes before those that it begins.
      if (layer.name() != model.name) return versions;
      versions.push_back(absl::StrCat(layer.version()));
    }
  } while (!page.next_page_token().empty());
  return versions;
}

void WriteTensor(const ModelTensor& tensor, inference::ModelMetadataResponse::TensorMetadata* out) {
  out->set_name(tensor.name);
  out->set_datatype(std::string(ToDatatype(tensor.dtype)));
  out->add_shape(-1);
  out->add_shape(tensor.cols);
}

absl::Status CheckRepository(const std::string& name) {
  if (name.empty()) return absl::OkStatus();
  return FieldError("repository_name", "there is one repository, without a name");
}

}  // namespace

bool IsLive(const RpcContext& rpc) {
  return absl::c_any_of(rpc.catalog->devices(), [](const Device* device) { return device->healthy(); });
}

bool IsReady(const RpcContext& rpc) { return rpc.healthy.load(); }

bool IsReady(const RpcContext& rpc, const inference::ModelReadyRequest& request) {
  if (rpc.state.load() != ServingState::kServing) return false;
  const absl::StatusOr<Model> model =
      FindModel(*rpc.catalog, *rpc.engine, request.name(), request.version(), "name", "version");
  return model.ok() && model->healthy();
}

void DescribeServer(const RpcContext& rpc, inference::ServerMetadataResponse* response) {
  response->set_name("spmmd");
  response->set_version(rpc.version);
  for (const char* extension : {"model_repository", "model_repository(unload_dependents)", "schedule_policy",
                                "model_configuration", "parameters", "statistics"}) {
    response->add_extensions(extension);
  }
  if (!rpc.regions->options().enabled) return;
  response->add_extensions("system_shared_memory");
  if (rpc.regions->options().open_device_memory != nullptr) response->add_extensions("cuda_shared_memory");
}

absl::Status DescribeModel(const RpcContext& rpc, const inference::ModelMetadataRequest& request,
                           inference::ModelMetadataResponse* response) {
  SPMMD_ASSIGN_OR_RETURN(const Model model,
                         FindModel(*rpc.catalog, *rpc.engine, request.name(), request.version(), "name", "version"));
  response->set_name(model.name);
  for (std::string& version : VersionsOf(rpc, model)) response->add_versions(std::move(version));
  response->set_platform(std::string(kOipPlatform));
  for (const ModelTensor& input : model.inputs) WriteTensor(input, response->add_inputs());
  for (const ModelTensor& output : model.outputs) WriteTensor(output, response->add_outputs());
  return absl::OkStatus();
}

absl::Status DescribeConfig(const RpcContext& rpc, const inference::ModelConfigRequest& request,
                            inference::ModelConfigResponse* response) {
  SPMMD_ASSIGN_OR_RETURN(const Model model,
                         FindModel(*rpc.catalog, *rpc.engine, request.name(), request.version(), "name", "version"));
  inference::ModelConfig& config = *response->mutable_config();
  config.set_name(model.name);
  config.set_platform(std::string(kOipPlatform));
  config.set_backend(std::string(kOipPlatform));
  config.mutable_version_policy()->mutable_all();
  config.set_max_batch_size(
      static_cast<int32_t>(std::min<int64_t>(rpc.engine->options().max_tokens, std::numeric_limits<int32_t>::max())));
  for (const ModelTensor& tensor : model.inputs) {
    inference::ModelInput& input = *config.add_input();
    input.set_name(tensor.name);
    input.set_data_type(ToDataType(tensor.dtype));
    input.add_dims(tensor.cols);
  }
  for (const ModelTensor& tensor : model.outputs) {
    inference::ModelOutput& output = *config.add_output();
    output.set_name(tensor.name);
    output.set_data_type(ToDataType(tensor.dtype));
    output.add_dims(tensor.cols);
  }
  config.mutable_model_transaction_policy()->set_decoupled(false);
  if (model.is_layer() && model.layer->deterministic()) return absl::OkStatus();
  inference::ModelDynamicBatching& batching = *config.mutable_dynamic_batching();
  const absl::Duration delay = rpc.catalog->devices().front()->executor().options().max_delay;
  batching.set_max_queue_delay_microseconds(static_cast<uint64_t>(absl::ToInt64Microseconds(delay)));
  batching.set_priority_levels(2);
  batching.set_default_priority_level(1);
  return absl::OkStatus();
}

absl::Status DescribeStatistics(const OipContext& oip, const inference::ModelStatisticsRequest& request,
                                inference::ModelStatisticsResponse* response) {
  std::vector<Model> models;
  if (request.name().empty()) {
    if (!request.version().empty()) return FieldError("version", "takes a name beside it");
    models = ListModels(*oip.rpc.catalog, *oip.rpc.engine);
  } else {
    SPMMD_ASSIGN_OR_RETURN(Model model, FindModel(*oip.rpc.catalog, *oip.rpc.engine, request.name(), request.version(),
                                                  "name", "version"));
    if (request.version().empty()) {
      for (const std::string& version : VersionsOf(oip.rpc, model)) {
        auto found = FindModel(*oip.rpc.catalog, *oip.rpc.engine, request.name(), version, "name", "version");
        if (found.ok()) models.push_back(*std::move(found));
      }
    } else {
      models.push_back(std::move(model));
    }
  }
  for (const Model& model : models) {
    inference::ModelStatistics& stats = *response->add_model_stats();
    stats.set_name(model.name);
    stats.set_version(absl::StrCat(model.version));
    std::shared_ptr<const ModelNumbers> numbers = oip.statistics.Find(model);
    if (numbers == nullptr) numbers = std::make_shared<ModelNumbers>();
    numbers->Describe(&stats);
    if (!model.is_layer()) continue;
    pb::Layer layer;
    model.layer->Describe(/*full=*/false, &layer);
    for (const pb::LayerResidency& residency : layer.residency()) {
      inference::MemoryUsage& usage = *stats.add_memory_usage();
      const std::vector<std::string> device = absl::StrSplit(residency.device(), ':');  // "cuda:1"
      int64_t id = 0;
      if (device.size() == 2 && absl::SimpleAtoi(device[1], &id)) usage.set_id(id);
      usage.set_type(device.front() == "cuda" ? "GPU" : "CPU");
      usage.set_byte_size(residency.bytes());
    }
  }
  return absl::OkStatus();
}

absl::Status DescribeRepository(const RpcContext& rpc, const inference::RepositoryIndexRequest& request,
                                inference::RepositoryIndexResponse* response) {
  SPMMD_RETURN_IF_ERROR(CheckRepository(request.repository_name()));
  const bool serving = rpc.state.load() == ServingState::kServing;
  for (const Model& model : ListModels(*rpc.catalog, *rpc.engine)) {
    const bool ready = serving && model.healthy();
    if (request.ready() && !ready) continue;
    inference::RepositoryIndexResponse::ModelIndex& entry = *response->add_models();
    entry.set_name(model.name);
    entry.set_version(absl::StrCat(model.version));
    entry.set_state(ready ? "READY" : "UNAVAILABLE");
    if (!ready) entry.set_reason(serving ? "its device is lost" : "the server is not serving");
  }
  return absl::OkStatus();
}

}  // namespace spmmd::server
