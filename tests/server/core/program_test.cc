// What the planner and the input checks refuse, and how they say it.
#include "server/engine/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "tests/server/core/core_harness.h"

namespace spmmd::server {
namespace {

using testing::AddMatmul;
using testing::Bytes;
using testing::Core;
using ::testing::HasSubstr;
using testing::RandomMatrix;

class ProgramTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // gate and up: 24 <- 16; down: 16 <- 24.
    ASSERT_TRUE(core_.Register("gate", RandomMatrix(DType::kF16, 24, 16, 0.5, 1).view()).ok());
    ASSERT_TRUE(core_.Register("up", RandomMatrix(DType::kF16, 24, 16, 0.5, 2).view()).ok());
    ASSERT_TRUE(core_.Register("down", RandomMatrix(DType::kF16, 16, 24, 0.5, 3).view()).ok());
  }
  // down(silu(gate(x)) * up(x))
  static pb::Program Mlp() {
    pb::Program program;
    program.add_inputs("x");
    AddMatmul(&program, "g", "gate", "x")->set_activation(pb::ACTIVATION_SILU);
    AddMatmul(&program, "u", "up", "x");
    pb::Step* step = program.add_steps();
    step->set_name("h");
    step->mutable_mul()->set_left("g");
    step->mutable_mul()->set_right("u");
    AddMatmul(&program, "y", "down", "h");
    program.add_outputs()->set_step("y");
    return program;
  }

  Core core_;
};

TEST_F(ProgramTest, MlpIsPlanned) {
  const auto plan = PlanProgram(Mlp(), core_.catalog);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ((*plan)->layers.size(), 3u);
  EXPECT_THAT((*plan)->devices, ::testing::ElementsAre(&core_.device));
  EXPECT_EQ((*plan)->steps[0].last_use, 2);
  EXPECT_EQ((*plan)->steps[3].last_use, -1);
}

struct BadProgram {
  const char* field;
  const char* text;
  std::function<void(pb::Program*)> spoil;
};

TEST_F(ProgramTest, BadProgramsNameTheirField) {
  const std::vector<BadProgram> cases = {
      {"program.inputs", "0 entries", [](auto* p) { p->clear_inputs(); }},
      {"program.inputs", "17 entries",
       [](auto* p) {
         for (int i = 0; i < 16; ++i) p->add_inputs(absl::StrCat("i", i));
       }},
      {"program.steps", "0 entries", [](auto* p) { p->clear_steps(); }},
      {"program.steps", "65 entries",
       [](auto* p) {
         for (int i = 4; i < 65; ++i) *p->add_steps() = p->steps(0);
       }},
      {"program.outputs", "0 entries", [](auto* p) { p->clear_outputs(); }},
      {"program.inputs[1]", "duplicate name \"x\"", [](auto* p) { p->add_inputs("x"); }},
      {"program.steps[1].name", "duplicate name \"g\"", [](auto* p) { p->mutable_steps(1)->set_name("g"); }},
      {"program.steps[2].name", "duplicate name \"x\"", [](auto* p) { p->mutable_steps(2)->set_name("x"); }},
      {"program.steps[0].name", "empty", [](auto* p) { p->mutable_steps(0)->clear_name(); }},
      {"program.steps[0].name", "character 1", [](auto* p) { p->mutable_steps(0)->set_name("a b"); }},
      {"program.steps[0].name", "65 characters", [](auto* p) { p->mutable_steps(0)->set_name(std::string(65, 'a')); }},
      {"program.steps[0]", "one of matmul, add, mul", [](auto* p) { p->mutable_steps(0)->clear_matmul(); }},
      {"program.steps[2].mul.left", "cyclic: step \"h\" reads itself",
       [](auto* p) { p->mutable_steps(2)->mutable_mul()->set_left("h"); }},
      {"program.steps[0].matmul.input", "cyclic: step \"y\" comes later",
       [](auto* p) { p->mutable_steps(0)->mutable_matmul()->set_input("y"); }},
      {"program.steps[2].mul.right", "\"nobody\" is neither",
       [](auto* p) { p->mutable_steps(2)->mutable_mul()->set_right("nobody"); }},
      {"program.steps[3].matmul.input", "must name",
       [](auto* p) { p->mutable_steps(3)->mutable_matmul()->clear_input(); }},
      {"program.steps[3].matmul.input", "has 16 columns, layer down has K = 24",
       [](auto* p) { p->mutable_steps(3)->mutable_matmul()->set_input("x"); }},
      {"program.steps[2].mul.right", "\"x\" has 16 columns, \"g\" has 24",
       [](auto* p) { p->mutable_steps(2)->mutable_mul()->set_right("x"); }},
      {"program.steps[1].matmul.layer.name", "empty",
       [](auto* p) { p->mutable_steps(1)->mutable_matmul()->clear_layer(); }},
      {"program.steps[1].matmul.layer.version", "negative",
       [](auto* p) { p->mutable_steps(1)->mutable_matmul()->mutable_layer()->set_version(-1); }},
      {"program.steps[1].matmul.activation", "unknown value 99",
       [](auto* p) { p->mutable_steps(1)->mutable_matmul()->set_activation(static_cast<pb::Activation>(99)); }},
      {"program.steps[2].mul.activation", "unknown value -5",
       [](auto* p) { p->mutable_steps(2)->mutable_mul()->set_activation(static_cast<pb::Activation>(-5)); }},
      {"program.steps[1].matmul.activation_threshold", "-1",
       [](auto* p) { p->mutable_steps(1)->mutable_matmul()->set_activation_threshold(-1); }},
      {"program.steps[1].matmul.activation_threshold", "nan",
       [](auto* p) { p->mutable_steps(1)->mutable_matmul()->set_activation_threshold(std::nanf("")); }},
      {"program.outputs[0].step", "\"z\" is not a step", [](auto* p) { p->mutable_outputs(0)->set_step("z"); }},
      {"program.outputs[0].step", "is an input", [](auto* p) { p->mutable_outputs(0)->set_step("x"); }},
      {"program.outputs[0].dtype", "unknown value 7",
       [](auto* p) { p->mutable_outputs(0)->set_dtype(static_cast<pb::DataType>(7)); }},
  };
  for (const BadProgram& c : cases) {
    pb::Program program = Mlp();
    c.spoil(&program);
    const absl::Status status = PlanProgram(program, core_.catalog).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.field << " " << c.text << status;
    EXPECT_EQ(FieldOf(status), c.field) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.text));
  }
}

TEST_F(ProgramTest, UnknownLayerIsNotFoundWithItsPath) {
  pb::Program program = Mlp();
  program.mutable_steps(1)->mutable_matmul()->mutable_layer()->set_name("nope");
  absl::Status status = PlanProgram(program, core_.catalog).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(status), "LAYER_NOT_FOUND");
  EXPECT_THAT(std::string(status.message()), HasSubstr("program.steps[1].matmul.layer"));
  program = Mlp();
  program.mutable_steps(1)->mutable_matmul()->mutable_layer()->set_version(2);
  EXPECT_EQ(PlanProgram(program, core_.catalog).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ProgramTest, RegionsOfOutputsAreNoPartOfAPlan) {
  pb::Program program = Mlp();
  program.mutable_outputs(0)->mutable_region()->set_region("r");
  EXPECT_TRUE(PlanProgram(program, core_.catalog).ok());
}

struct BadInput {
  const char* field;
  const char* text;
  std::function<void(pb::ExecuteRequest*)> spoil;
};

TEST_F(ProgramTest, BadDenseInputsNameTheirFieldAndBothNumbers) {
  const std::vector<BadInput> cases = {
      {"target", "one of", [](auto* r) { r->clear_target(); }},
      {"outputs", "only with program_id", [](auto* r) { r->add_outputs(); }},
      {"inputs", "\"x\" of the program is missing", [](auto* r) { r->clear_inputs(); }},
      {"inputs[0].name", "\"z\" is not an input", [](auto* r) { r->mutable_inputs(0)->set_name("z"); }},
      {"inputs[1].name", "given twice", [](auto* r) { *r->add_inputs() = r->inputs(0); }},
      {"inputs[0]", "one of dense, sparse", [](auto* r) { r->mutable_inputs(0)->clear_value(); }},
      {"inputs[0].dense.dtype", "must be set", [](auto* r) { r->mutable_inputs(0)->mutable_dense()->clear_dtype(); }},
      {"inputs[0].dense.dtype", "unknown value 55",
       [](auto* r) { r->mutable_inputs(0)->mutable_dense()->set_dtype(static_cast<pb::DataType>(55)); }},
      {"inputs[0].dense.shape", "1 dimensions",
       [](auto* r) { r->mutable_inputs(0)->mutable_dense()->mutable_shape()->RemoveLast(); }},
      {"inputs[0].dense.shape", "3 dimensions", [](auto* r) { r->mutable_inputs(0)->mutable_dense()->add_shape(1); }},
      {"inputs[0].dense.shape[0]", "-1", [](auto* r) { r->mutable_inputs(0)->mutable_dense()->set_shape(0, -1); }},
      {"inputs[0].dense.shape[0]", "limit of 65536 tokens",
       [](auto* r) { r->mutable_inputs(0)->mutable_dense()->set_shape(0, int64_t{1} << 62); }},
      {"inputs[0].dense.shape[1]", "0 is not within",
       [](auto* r) { r->mutable_inputs(0)->mutable_dense()->set_shape(1, 0); }},
      {"inputs[0].dense.shape[1]", "is not within",
       [](auto* r) { r->mutable_inputs(0)->mutable_dense()->set_shape(1, std::numeric_limits<int64_t>::min()); }},
      {"inputs[0].dense.shape[1]", "is not within",
       [](auto* r) { r->mutable_inputs(0)->mutable_dense()->set_shape(1, int64_t{1} << 40); }},
      {"inputs[0].dense.data", "expected 192 bytes, got 191",
       [](auto* r) { r->mutable_inputs(0)->mutable_dense()->mutable_data()->pop_back(); }},
      {"inputs[0].dense.data", "expected 192 bytes, got 193",
       [](auto* r) { r->mutable_inputs(0)->mutable_dense()->mutable_data()->push_back('x'); }},
      {"inputs[0].dense.data", "expected 192 bytes, got 0",
       [](auto* r) { r->mutable_inputs(0)->mutable_dense()->mutable_data()->clear(); }},
      {"inputs[0].dense", "one of data, region",
       [](auto* r) { r->mutable_inputs(0)->mutable_dense()->clear_content(); }},
      {"inputs[0].dense.shape[1]", "15 columns, expected 16",
       [](auto* r) {
         r->mutable_inputs(0)->mutable_dense()->set_shape(1, 15);
         r->mutable_inputs(0)->mutable_dense()->mutable_data()->resize(3 * 15 * 4);
       }},
  };
  const DenseMatrix x = RandomMatrix(DType::kF32, 3, 16, 0, 4);
  for (const BadInput& c : cases) {
    pb::ExecuteRequest request = testing::MatmulRequest("gate", x.view());
    pb::ExecuteResponse response;
    ASSERT_TRUE(core_.Execute(request, &response).ok());
    c.spoil(&request);
    const absl::Status status = core_.Execute(request, &response);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.field << " " << c.text << status;
    EXPECT_EQ(FieldOf(status), c.field) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.text));
  }
}

TEST_F(ProgramTest, BadSparseInputsNameThePosition) {
  // Two rows: {1: a, 5: b}, {0: c}.
  pb::ExecuteRequest good;
  good.mutable_program()->add_inputs("x");
  AddMatmul(good.mutable_program(), "y", "gate", "x");
  good.mutable_program()->add_outputs()->set_step("y");
  good.add_inputs()->set_name("x");
  pb::SparseTensor* x = good.mutable_inputs(0)->mutable_sparse();
  x->set_dtype(pb::DATA_TYPE_F32);
  x->add_shape(2);
  x->add_shape(16);
  x->set_row_offsets(Bytes(std::vector<uint64_t>{0, 2, 3}));
  x->set_indices(Bytes(std::vector<uint32_t>{1, 5, 0}));
  x->set_values(Bytes(std::vector<float>{1, 2, 3}));
  const std::vector<BadInput> cases = {
      {"inputs[0].sparse.indices[1]", "16 is not below the number of columns, 16",
       [](auto* r) {
         r->mutable_inputs(0)->mutable_sparse()->set_indices(Bytes(std::vector<uint32_t>{1, 16, 0}));
       }},
      {"inputs[0].sparse.indices[1]", "1 after 5 in row 0",
       [](auto* r) {
         r->mutable_inputs(0)->mutable_sparse()->set_indices(Bytes(std::vector<uint32_t>{5, 1, 0}));
       }},
      {"inputs[0].sparse.indices[1]", "5 after 5 in row 0",
       [](auto* r) {
         r->mutable_inputs(0)->mutable_sparse()->set_indices(Bytes(std::vector<uint32_t>{5, 5, 0}));
       }},
      {"inputs[0].sparse.indices", "multiple of 4",
       [](auto* r) { r->mutable_inputs(0)->mutable_sparse()->mutable_indices()->pop_back(); }},
      {"inputs[0].sparse.values", "expected 12 bytes, got 8",
       [](auto* r) {
         r->mutable_inputs(0)->mutable_sparse()->set_values(Bytes(std::vector<float>{1, 2}));
       }},
      {"inputs[0].sparse.row_offsets[0]", "1, expected 0",
       [](auto* r) {
         r->mutable_inputs(0)->mutable_sparse()->set_row_offsets(Bytes(std::vector<uint64_t>{1, 2, 3}));
       }},
      {"inputs[0].sparse.row_offsets[2]", "less than",
       [](auto* r) {
         r->mutable_inputs(0)->mutable_sparse()->set_row_offsets(Bytes(std::vector<uint64_t>{0, 4, 3}));
       }},
      {"inputs[0].sparse.row_offsets[2]", "expected the number of indices, 3",
       [](auto* r) {
         r->mutable_inputs(0)->mutable_sparse()->set_row_offsets(Bytes(std::vector<uint64_t>{0, 2, 2}));
       }},
      {"inputs[0].sparse.row_offsets", "expected 24 bytes, got 0",
       [](auto* r) { r->mutable_inputs(0)->mutable_sparse()->clear_row_offsets(); }},
      {"inputs[0].sparse.dtype", "must be set", [](auto* r) { r->mutable_inputs(0)->mutable_sparse()->clear_dtype(); }},
      {"inputs[0].sparse.shape[0]", "negative",
       [](auto* r) { r->mutable_inputs(0)->mutable_sparse()->set_shape(0, -2); }},
      {"inputs[0].sparse", "element-wise",
       [](auto* r) {
         pb::Step* step = r->mutable_program()->add_steps();
         step->set_name("z");
         step->mutable_add()->set_left("x");
         step->mutable_add()->set_right("x");
       }},
  };
  pb::ExecuteResponse response;
  ASSERT_TRUE(core_.Execute(good, &response).ok());
  for (const BadInput& c : cases) {
    pb::ExecuteRequest request = good;
    c.spoil(&request);
    const absl::Status status = core_.Execute(request, &response);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.field << " " << c.text << status;
    EXPECT_EQ(FieldOf(status), c.field) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.text));
  }
  EXPECT_EQ(core_.device.runs(), 1);  // nothing bad was launched
}

TEST_F(ProgramTest, RowsOfAllInputsMustAgree) {
  pb::ExecuteRequest request;
  request.mutable_program()->add_inputs("a");
  request.mutable_program()->add_inputs("b");
  pb::Step* step = request.mutable_program()->add_steps();
  step->set_name("s");
  step->mutable_add()->set_left("a");
  step->mutable_add()->set_right("b");
  request.mutable_program()->add_outputs()->set_step("s");
  const auto add = [&](const char* name, int64_t rows, int64_t cols) {
    pb::NamedInput* input = request.add_inputs();
    input->set_name(name);
    testing::SetTensor(RandomMatrix(DType::kF32, rows, cols, 0, 1).view(), input->mutable_dense());
  };
  add("a", 2, 5);
  add("b", 3, 5);
  pb::ExecuteResponse response;
  absl::Status status = core_.Execute(request, &response);
  EXPECT_EQ(FieldOf(status), "inputs[1].dense.shape[0]");
  request.clear_inputs();
  // Nothing but the request says how wide they are.
  add("a", 2, 5);
  add("b", 2, 6);
  status = core_.Execute(request, &response);
  EXPECT_EQ(FieldOf(status), "inputs[1].dense.shape[1]");
  request.clear_inputs();
  add("a", 2, 5);
  add("b", 2, 5);
  EXPECT_TRUE(core_.Execute(request, &response).ok());
  EXPECT_EQ(response.outputs(0).tensor().shape(1), 5);
}

}  // namespace
}  // namespace spmmd::server
