#include "client/cpp/program.h"

#include <string>

namespace spmmd::client {
namespace {

void Fill(v1::Elementwise& op, std::string_view left, std::string_view right, v1::Activation activation) {
  op.set_left(std::string(left));
  op.set_right(std::string(right));
  op.set_activation(activation);
}

}  // namespace

v1::LayerRef MakeLayerRef(std::string_view name, int64_t version) {
  v1::LayerRef ref;
  ref.set_name(std::string(name));
  ref.set_version(version);
  return ref;
}

ProgramBuilder& ProgramBuilder::Input(std::string_view name) {
  program_.add_inputs(std::string(name));
  return *this;
}

ProgramBuilder& ProgramBuilder::Matmul(std::string_view step, std::string_view layer, std::string_view input,
                                       const MatmulStep& options) {
  v1::Step& added = *program_.add_steps();
  added.set_name(std::string(step));
  v1::Matmul& matmul = *added.mutable_matmul();
  *matmul.mutable_layer() = MakeLayerRef(layer, options.version);
  matmul.set_input(std::string(input));
  matmul.set_activation(options.activation);
  matmul.set_ignore_bias(options.ignore_bias);
  if (options.activation_threshold.has_value()) matmul.set_activation_threshold(*options.activation_threshold);
  return *this;
}

ProgramBuilder& ProgramBuilder::Add(std::string_view step, std::string_view left, std::string_view right,
                                    v1::Activation activation) {
  v1::Step& added = *program_.add_steps();
  added.set_name(std::string(step));
  Fill(*added.mutable_add(), left, right, activation);
  return *this;
}

ProgramBuilder& ProgramBuilder::Mul(std::string_view step, std::string_view left, std::string_view right,
                                    v1::Activation activation) {
  v1::Step& added = *program_.add_steps();
  added.set_name(std::string(step));
  Fill(*added.mutable_mul(), left, right, activation);
  return *this;
}

ProgramBuilder& ProgramBuilder::Output(std::string_view step, v1::DataType dtype) {
  v1::OutputSpec& output = *program_.add_outputs();
  output.set_step(std::string(step));
  output.set_dtype(dtype);
  return *this;
}

}  // namespace spmmd::client
