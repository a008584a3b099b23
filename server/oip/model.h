// What the Open Inference Protocol calls a model: a registered layer, or a registered program.
//
// A layer is a model of its own name and versions, with one input "x" [-1, K] and one output "y" [-1, M] in the layer's
// type; x may as well come in any other type that Execute takes, and y comes back in the type of x. A program is a
// model by its id, version "1", with the program's inputs (FP32 or any other type) and outputs.
#ifndef SPMMD_SERVER_OIP_MODEL_H_
#define SPMMD_SERVER_OIP_MODEL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/dtype.h"
#include "server/catalog/catalog.h"
#include "server/engine/engine.h"
#include "server/oip/datatype.h"

namespace spmmd::server {

inline constexpr absl::string_view kLayerInput = "x";
inline constexpr absl::string_view kLayerOutput = "y";
inline constexpr absl::string_view kOipPlatform = "spmmd";

struct ModelTensor {
  std::string name;
  DType dtype = DType::kF32;  // the one declared
  int64_t cols = -1;          // -1: any
};

struct Model {
  std::string name;
  int64_t version = 1;
  // One of them.
  std::shared_ptr<const ServedLayer> layer;
  std::shared_ptr<const Plan> program;
  // Lives as long as the registration: another layer may get the same name and version later.
  std::shared_ptr<const void> identity;

  std::vector<ModelTensor> inputs;
  std::vector<ModelTensor> outputs;

  bool is_layer() const { return program == nullptr; }
  // Whether requests for it would find a device.
  bool healthy() const;
};

// The layer or, when there is none of that name, the program. An empty version is the newest. INVALID_ARGUMENT naming
// `name_field` or `version_field`; NOT_FOUND; FAILED_PRECONDITION for a layer of another shard, and for a program that
// returns one step twice: its outputs have no names of their own.
absl::StatusOr<Model> FindModel(const LayerCatalog& catalog, Engine& engine, const std::string& name,
                                absl::string_view version, absl::string_view name_field,
                                absl::string_view version_field);

// Every layer (newest version first) and program that FindModel finds, by name.
std::vector<Model> ListModels(const LayerCatalog& catalog, Engine& engine);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_OIP_MODEL_H_
