#include "server/engine/program.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "server/catalog/types.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

// Plans one program. The wire names are resolved in order, so that a name that is not known yet but comes later can be
// called what it is.
class Planner {
 public:
  Planner(const pb::Program& program, const LayerCatalog& catalog) : program_(program), catalog_(catalog) {}

  absl::StatusOr<std::shared_ptr<const Plan>> Run() {
    SPMMD_RETURN_IF_ERROR(CheckCount("program.inputs", program_.inputs_size(), kMaxInputs));
    SPMMD_RETURN_IF_ERROR(CheckCount("program.steps", program_.steps_size(), kMaxSteps));
    SPMMD_RETURN_IF_ERROR(CheckCount("program.outputs", program_.outputs_size(), kMaxOutputs));
    for (int i = 0; i < program_.inputs_size(); ++i) {
      SPMMD_RETURN_IF_ERROR(Declare(absl::StrCat("program.inputs[", i, "]"), program_.inputs(i), i));
      plan_->input_names.push_back(program_.inputs(i));
      NewValue(-1);
    }
    plan_->input_dense_only.resize(plan_->input_names.size());
    for (int s = 0; s < program_.steps_size(); ++s) {
      const std::string path = absl::StrCat("program.steps[", s, "]");
      SPMMD_RETURN_IF_ERROR(Declare(absl::StrCat(path, ".name"), program_.steps(s).name(), ValueOfStep(s)));
      plan_->step_names.push_back(program_.steps(s).name());
    }
    for (int s = 0; s < program_.steps_size(); ++s) {
      SPMMD_RETURN_IF_ERROR(PlanStepAt(s, absl::StrCat("program.steps[", s, "]")));
    }
    SPMMD_RETURN_IF_ERROR(PlanOutputs());
    CompressClasses();
    if (layers_.empty()) plan_->devices = catalog_.devices();
    if (plan_->sharded) SPMMD_RETURN_IF_ERROR(CheckSharded());
    return std::shared_ptr<const Plan>(std::move(plan_));
  }

 private:
  int ValueOfStep(int step) const { return program_.inputs_size() + step; }

  static absl::Status CheckCount(const char* field, int count, int limit) {
    if (count >= 1 && count <= limit) return absl::OkStatus();
    return FieldError(field, absl::StrCat(count, " entries, expected 1 to ", limit));
  }

  absl::Status Declare(const std::string& path, const std::string& name, int value) {
    if (name.empty()) return FieldError(path, "must not be empty");
    if (name.size() > kMaxNameLength) {
      return FieldError(path, absl::StrCat(name.size(), " characters, the limit is ", kMaxNameLength));
    }
    for (size_t i = 0; i < name.size(); ++i) {
      const char c = name[i];
      if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '_' && c != '-') {
        return FieldError(path, absl::StrCat("character ", i, " is not one of [A-Za-z0-9._-]"));
      }
    }
    if (!values_.emplace(name, value).second) {
      return FieldError(path, absl::StrCat("duplicate name \"", name, "\""));
    }
    return absl::OkStatus();
  }

  // The value that step `reader` reads under a name.
  absl::StatusOr<int> Read(const std::string& path, const std::string& name, int reader) {
    if (name.empty()) return FieldError(path, "must name an input or an earlier step");
    const auto entry = values_.find(name);
    if (entry == values_.end()) return FieldError(path, absl::StrCat("\"", name, "\" is neither an input nor a step"));
    const int value = entry->second;
    if (value == ValueOfStep(reader)) {
      return FieldError(path, absl::StrCat("cyclic: step \"", name, "\" reads itself"));
    }
    if (value > ValueOfStep(reader)) {
      return FieldError(path, absl::StrCat("cyclic: step \"", name,
                                           "\" comes later; a step reads inputs and earlier "
                                           "steps only"));
    }
    if (value >= program_.inputs_size()) {
      plan_->steps[static_cast<size_t>(value - program_.inputs_size())].last_use = reader;
    }
    return value;
  }

  // Width classes: a union-find over values, with the number of columns at the root.
  void NewValue(int64_t cols) {
    plan_->width_class.push_back(static_cast<int>(plan_->width_class.size()));
    plan_->class_cols.push_back(cols);
  }
  int Root(int value) const {
    while (plan_->width_class[static_cast<size_t>(value)] != value) {
      value = plan_->width_class[static_cast<size_t>(value)];
    }
    return value;
  }
  int64_t& Cols(int value) { return plan_->class_cols[static_cast<size_t>(Root(value))]; }

  absl::Status PlanStepAt(int s, const std::string& path) {
    const pb::Step& step = program_.steps(s);
    switch (step.op_case()) {
      case pb::Step::kMatmul:
        return PlanMatmul(step.matmul(), s, absl::StrCat(path, ".matmul"));
      case pb::Step::kAdd:
        return PlanElementwise(PlanStep::Op::kAdd, step.add(), s, absl::StrCat(path, ".add"));
      case pb::Step::kMul:
        return PlanElementwise(PlanStep::Op::kMul, step.mul(), s, absl::StrCat(path, ".mul"));
      case pb::Step::OP_NOT_SET:
        break;
    }
    return FieldError(path, "one of matmul, add, mul must be set");
  }

  absl::StatusOr<Activation> ReadActivation(pb::Activation activation, const std::string& path) {
    const std::optional<Activation> known = FromProto(activation);
    if (!known.has_value()) {
      return FieldError(absl::StrCat(path, ".activation"),
                        absl::StrCat("unknown value ", static_cast<int>(activation)));
    }
    return *known;
  }

  absl::Status PlanMatmul(const pb::Matmul& matmul, int s, const std::string& path) {
    PlanStep step;
    step.op = PlanStep::Op::kMatmul;
    SPMMD_ASSIGN_OR_RETURN(step.layer, LayerOf(matmul.layer(), absl::StrCat(path, ".layer")));
    const ServedLayer& layer = *leases_[static_cast<size_t>(step.layer)];
    SPMMD_ASSIGN_OR_RETURN(step.left, Read(absl::StrCat(path, ".input"), matmul.input(), s));
    if (int64_t& cols = Cols(step.left); cols < 0) {
      cols = layer.content().k;
    } else if (cols != layer.content().k) {
      return FieldError(absl::StrCat(path, ".input"),
                        absl::StrCat("\"", matmul.input(), "\" has ", cols, " columns, layer ", layer.name(),
                                     " has K = ", layer.content().k));
    }
    SPMMD_ASSIGN_OR_RETURN(step.activation, ReadActivation(matmul.activation(), path));
    step.use_bias = layer.content().has_bias && !matmul.ignore_bias();
    if (matmul.has_activation_threshold()) {
      const float threshold = matmul.activation_threshold();
      if (!(threshold >= 0 && std::isfinite(threshold))) {
        return FieldError(absl::StrCat(path, ".activation_threshold"),
                          absl::StrCat(threshold, " is not a finite number of 0 or more"));
      }
      step.activation_threshold = threshold;
    } else {
      step.activation_threshold = layer.activation_threshold();
    }
    plan_->steps.push_back(step);
    NewValue(layer.content().m);
    return absl::OkStatus();
  }

  absl::Status PlanElementwise(PlanStep::Op op, const pb::Elementwise& elementwise, int s, const std::string& path) {
    PlanStep step;
    step.op = op;
    SPMMD_ASSIGN_OR_RETURN(step.left, Read(absl::StrCat(path, ".left"), elementwise.left(), s));
    SPMMD_ASSIGN_OR_RETURN(step.right, Read(absl::StrCat(path, ".right"), elementwise.right(), s));
    SPMMD_ASSIGN_OR_RETURN(step.activation, ReadActivation(elementwise.activation(), path));
    for (const int value : {step.left, step.right}) {
      if (value < program_.inputs_size()) plan_->input_dense_only[static_cast<size_t>(value)] = true;
    }
    const int64_t left = Cols(step.left);
    const int64_t right = Cols(step.right);
    if (left >= 0 && right >= 0 && left != right) {
      return FieldError(absl::StrCat(path, ".right"),
                        absl::StrCat("\"", elementwise.right(), "\" has ", right, " columns, \"", elementwise.left(),
                                     "\" has ", left));
    }
    plan_->width_class[static_cast<size_t>(Root(step.right))] = Root(step.left);
    Cols(step.left) = std::max(left, right);
    plan_->steps.push_back(step);
    NewValue(-1);
    plan_->width_class.back() = Root(step.left);
    return absl::OkStatus();
  }

  absl::StatusOr<int> LayerOf(const pb::LayerRef& ref, const std::string& path) {
    if (ref.name().empty()) return FieldError(absl::StrCat(path, ".name"), "must not be empty");
    if (ref.version() < 0) {
      return FieldError(absl::StrCat(path, ".version"), absl::StrCat(ref.version(), " is negative"));
    }
    const std::pair<std::string, int64_t> key(ref.name(), ref.version());
    if (const auto known = layers_.find(key); known != layers_.end()) return known->second;
    absl::StatusOr<std::shared_ptr<const ServedLayer>> layer = catalog_.Find(ref.name(), ref.version());
    if (!layer.ok()) return AtField(path, layer.status());
    SPMMD_RETURN_IF_ERROR(Place((*layer)->content(), ref.name(), path));
    plan_->layers.push_back(*layer);
    leases_.push_back(*std::move(layer));
    const int index = static_cast<int>(leases_.size()) - 1;
    layers_.emplace(key, index);
    return index;
  }

  // Leaves the devices where this layer is too.
  absl::Status Place(const LayerContent& content, const std::string& name, const std::string& path) {
    std::vector<Device*> devices;
    for (const LayerContent::Copy& copy : content.copies) devices.push_back(copy.device);
    const std::vector<Device*> before = plan_->devices;
    if (layers_.empty()) {
      plan_->devices = std::move(devices);
      plan_->sharded = content.sharded();
      return absl::OkStatus();
    }
    if (content.sharded() || plan_->sharded) {
      if (content.sharded() && plan_->sharded && devices == before) return absl::OkStatus();
    } else {
      plan_->devices.clear();
      for (Device* device : before) {
        if (std::find(devices.begin(), devices.end(), device) != devices.end()) plan_->devices.push_back(device);
      }
      if (!plan_->devices.empty()) return absl::OkStatus();
    }
    const auto ids = [](const std::vector<Device*>& list, bool sharded) {
      std::vector<std::string> names;
      names.reserve(list.size());
      for (const Device* device : list) names.push_back(device->id());
      return absl::StrCat(sharded ? "sharded over " : "on ", absl::StrJoin(names, ", "));
    };
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kUnsupported,
                     absl::StrCat(path, ": layer ", name, " is ", ids(devices, content.sharded()),
                                  ", the program's earlier layers are ", ids(before, plan_->sharded)));
  }

  // Every device computes its columns of every step from what all devices can read: the program's inputs.
  absl::Status CheckSharded() {
    std::vector<bool> whole(plan_->input_names.size());
    plan_->input_sliced.resize(plan_->input_names.size());
    const int inputs = program_.inputs_size();
    for (int s = 0; s < program_.steps_size(); ++s) {
      const PlanStep& step = plan_->steps[static_cast<size_t>(s)];
      const std::string path = absl::StrCat("program.steps[", s, "]");
      if (step.op == PlanStep::Op::kMatmul) {
        if (step.left >= inputs) {
          return MakeError(
              absl::StatusCode::kFailedPrecondition, reason::kUnsupported,
              absl::StrCat(path, ".matmul.input: \"", program_.steps(s).matmul().input(),
                           "\" is a step's value, which is spread over the devices of the program's sharded "
                           "layers; a matmul needs it whole: make two requests"));
        }
        whole[static_cast<size_t>(step.left)] = true;
        continue;
      }
      for (const int value : {step.left, step.right}) {
        if (value < inputs) plan_->input_sliced[static_cast<size_t>(value)] = true;
      }
    }
    for (size_t i = 0; i < whole.size(); ++i) {
      if (whole[i] && plan_->input_sliced[i]) {
        return MakeError(absl::StatusCode::kFailedPrecondition, reason::kUnsupported,
                         absl::StrCat("program.inputs[", i, "]: \"", plan_->input_names[i],
                                      "\" is read by a matmul with a sharded layer, which needs it whole, and by an "
                                      "element-wise step, which needs it in parts: give it twice"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status PlanOutputs() {
    for (int o = 0; o < program_.outputs_size(); ++o) {
      const pb::OutputSpec& output = program_.outputs(o);
      const std::string path = absl::StrCat("program.outputs[", o, "]");
      const auto value = values_.find(output.step());
      if (value == values_.end()) {
        return FieldError(absl::StrCat(path, ".step"), absl::StrCat("\"", output.step(), "\" is not a step"));
      }
      if (value->second < program_.inputs_size()) {
        return FieldError(absl::StrCat(path, ".step"),
                          absl::StrCat("\"", output.step(), "\" is an input; outputs are steps"));
      }
      PlanOutput planned;
      planned.step = value->second - program_.inputs_size();
      if (output.dtype() != pb::DATA_TYPE_UNSPECIFIED) {
        const std::optional<DType> dtype = FromProto(output.dtype());
        if (!dtype.has_value()) {
          return FieldError(absl::StrCat(path, ".dtype"),
                            absl::StrCat("unknown value ", static_cast<int>(output.dtype())));
        }
        planned.dtype = *dtype;
      }
      plan_->outputs.push_back(planned);
    }
    return absl::OkStatus();
  }

  // Every value points to its root; columns stay at the root's index.
  void CompressClasses() {
    for (size_t value = 0; value < plan_->width_class.size(); ++value) {
      plan_->width_class[value] = Root(static_cast<int>(value));
    }
  }

  const pb::Program& program_;
  const LayerCatalog& catalog_;
  std::shared_ptr<Plan> plan_ = std::make_shared<Plan>();
  absl::flat_hash_map<std::string, int> values_;
  std::map<std::pair<std::string, int64_t>, int> layers_;
  std::vector<std::shared_ptr<const ServedLayer>> leases_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const Plan>> PlanProgram(const pb::Program& program, const LayerCatalog& catalog) {
  return Planner(program, catalog).Run();
}

}  // namespace spmmd::server
