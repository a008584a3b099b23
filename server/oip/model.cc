#include "server/oip/model.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

constexpr absl::string_view kProgramVersion = "1";

Model LayerModel(std::shared_ptr<const ServedLayer> layer) {
  Model model;
  const LayerContent& content = layer->content();
  model.name = layer->name();
  model.version = layer->version();
  model.inputs.push_back({std::string(kLayerInput), content.dtype, content.k});
  model.outputs.push_back({std::string(kLayerOutput), content.dtype, content.m});
  model.identity = layer;
  model.layer = std::move(layer);
  return model;
}

absl::StatusOr<Model> ProgramModel(const std::string& id, Engine::ProgramView program) {
  const std::shared_ptr<const Plan>& plan = program.plan;
  Model model;
  model.name = id;
  const auto cols_of = [&](size_t value) { return plan->class_cols[static_cast<size_t>(plan->width_class[value])]; };
  for (size_t i = 0; i < plan->input_names.size(); ++i) {
    model.inputs.push_back({plan->input_names[i], DType::kF32, cols_of(i)});
  }
  absl::flat_hash_set<int> steps;
  for (const PlanOutput& output : plan->outputs) {
    const std::string& name = plan->step_names[static_cast<size_t>(output.step)];
    if (!steps.insert(output.step).second) {
      return MakeError(absl::StatusCode::kFailedPrecondition, reason::kUnsupported,
                       absl::StrCat("program \"", id, "\" returns \"", name, "\" twice, so it is no model"));
    }
    model.outputs.push_back({name, output.dtype, cols_of(plan->input_names.size() + static_cast<size_t>(output.step))});
  }
  model.identity = std::move(program.identity);
  model.program = plan;
  return model;
}

}  // namespace

bool Model::healthy() const {
  const auto well = [](const auto* device) { return device->healthy(); };
  if (!is_layer()) {
    return program->sharded ? absl::c_all_of(program->devices, well) : absl::c_any_of(program->devices, well);
  }
  const LayerContent& content = layer->content();
  const auto copy_well = [](const LayerContent::Copy& copy) { return copy.device->healthy(); };
  return content.sharded() ? absl::c_all_of(content.copies, copy_well) : absl::c_any_of(content.copies, copy_well);
}

absl::StatusOr<Model> FindModel(const LayerCatalog& catalog, Engine& engine, const std::string& name,
                                absl::string_view version, absl::string_view name_field,
                                absl::string_view version_field) {
  if (name.empty()) return FieldError(name_field, "must not be empty");
  int64_t number = 0;
  if (!version.empty() && (!absl::SimpleAtoi(version, &number) || number < 1)) {
    return FieldError(version_field,
                      absl::StrCat("\"", version.substr(0, 32), "\" is not a version: a number from 1 on"));
  }
  absl::StatusOr<std::shared_ptr<const ServedLayer>> layer = catalog.Find(name, number);
  if (layer.ok()) return LayerModel(*std::move(layer));
  absl::StatusOr<Engine::ProgramView> program = engine.DescribeProgram(name);
  if (!program.ok()) {
    // The plan's own error, when the id is known: a layer of the program is gone, for instance.
    return AtField(name_field,
                   ReasonOf(program.status()) == reason::kProgramNotFound ? layer.status() : program.status());
  }
  if (!version.empty() && version != kProgramVersion) {
    return MakeError(absl::StatusCode::kNotFound, reason::kProgramNotFound,
                     absl::StrCat(version_field, ": program \"", name, "\" has version ", kProgramVersion, " only"));
  }
  return ProgramModel(name, *std::move(program));
}

std::vector<Model> ListModels(const LayerCatalog& catalog, Engine& engine) {
  std::vector<Model> models;
  pb::ListLayersRequest request;
  pb::ListLayersResponse page;
  do {
    request.set_page_token(page.next_page_token());
    page.Clear();
    if (!catalog.List(request, &page).ok()) break;
    for (const pb::Layer& listed : page.layers()) {
      // One that was unregistered meanwhile is left out.
      auto layer = catalog.Find(listed.name(), listed.version());
      if (layer.ok()) models.push_back(LayerModel(*std::move(layer)));
    }
  } while (!page.next_page_token().empty());
  for (const std::string& id : engine.ProgramIds()) {
    absl::StatusOr<Engine::ProgramView> program = engine.DescribeProgram(id);
    if (!program.ok()) continue;
    absl::StatusOr<Model> model = ProgramModel(id, *std::move(program));
    if (model.ok()) models.push_back(*std::move(model));
  }
  std::stable_sort(models.begin(), models.end(), [](const Model& a, const Model& b) { return a.name < b.name; });
  return models;
}

}  // namespace spmmd::server
