// Builds programs: small computations over registered layers that run in one call.
#ifndef SPMMD_CLIENT_CPP_PROGRAM_H_
#define SPMMD_CLIENT_CPP_PROGRAM_H_

#include <cstdint>
#include <optional>
#include <string_view>

#include "spmm/v1/sparse_matmul.pb.h"

namespace spmmd::client {

namespace v1 = ::spmm::v1;

// Version 0 takes the newest version that is ready.
v1::LayerRef MakeLayerRef(std::string_view name, int64_t version = 0);

// How a matmul step runs.
struct MatmulStep {
  v1::Activation activation = v1::ACTIVATION_UNSPECIFIED;
  // |x| <= this counts as zero and its column is skipped (SpMspV). Unset takes the layer's own default.
  std::optional<float> activation_threshold{};
  bool ignore_bias = false;
  int64_t version = 0;
};

// A gated MLP, down(silu(gate(x)) * up(x)):
//
//   const v1::Program mlp = ProgramBuilder()
//                               .Input("x")
//                               .Matmul("g", "mlp.gate", "x", {.activation = v1::ACTIVATION_SILU})
//                               .Matmul("u", "mlp.up", "x")
//                               .Mul("h", "g", "u")
//                               .Matmul("y", "mlp.down", "h")
//                               .Output("y")
//                               .Build();
//
// A step reads inputs and steps added before it. Names are checked by the server, which names the wrong one.
class ProgramBuilder {
 public:
  ProgramBuilder& Input(std::string_view name);
  // activation(input * W^T + bias)
  ProgramBuilder& Matmul(std::string_view step, std::string_view layer, std::string_view input,
                         const MatmulStep& options = {});
  // activation(left + right) and activation(left * right), element by element.
  ProgramBuilder& Add(std::string_view step, std::string_view left, std::string_view right,
                      v1::Activation activation = v1::ACTIVATION_UNSPECIFIED);
  ProgramBuilder& Mul(std::string_view step, std::string_view left, std::string_view right,
                      v1::Activation activation = v1::ACTIVATION_UNSPECIFIED);
  // Only outputs asked for travel back. The type unspecified is F32.
  ProgramBuilder& Output(std::string_view step, v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED);

  v1::Program Build() const { return program_; }

 private:
  v1::Program program_;
};

}  // namespace spmmd::client

#endif  // SPMMD_CLIENT_CPP_PROGRAM_H_
