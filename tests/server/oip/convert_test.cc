// From ModelInferRequest to ExecuteRequest and back, without a wire.
#include "server/oip/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "server/errors.h"
#include "tests/server/core/core_harness.h"

namespace spmmd::server::testing {
namespace {

using ::testing::StartsWith;

class ConvertTest : public ::testing::Test {
 protected:
  ConvertTest() {
    const DenseMatrix w = RandomMatrix(DType::kF16, 24, 40, 0.5, 1);
    EXPECT_TRUE(core_.Register("a/b", w.view()).ok());
  }

  Model Layer() { return *FindModel(core_.catalog, core_.engine, "a/b", "", "model_name", "model_version"); }
  static inference::ModelInferRequest Request(int64_t rows, const std::string& datatype, size_t element) {
    inference::ModelInferRequest request;
    request.set_model_name("a/b");
    request.set_id("seven");
    auto* input = request.add_inputs();
    input->set_name("x");
    input->set_datatype(datatype);
    input->add_shape(rows);
    input->add_shape(40);
    request.add_raw_input_contents(std::string(static_cast<size_t>(rows) * 40 * element, '\0'));
    return request;
  }

  Core core_;
};

TEST_F(ConvertTest, TensorsAreMovedNotCopied) {
  inference::ModelInferRequest request = Request(4, "FP16", 2);
  const char* const sent = request.raw_input_contents(0).data();
  pb::ExecuteRequest execute;
  InferContext context;
  ASSERT_TRUE(ToExecute(Layer(), &request, &execute, &context).ok());
  EXPECT_EQ(execute.inputs(0).dense().data().data(), sent);

  pb::ExecuteResponse result;
  ASSERT_TRUE(core_.Execute(execute, &result).ok());
  const char* const computed = result.outputs(0).tensor().data().data();
  inference::ModelInferResponse response;
  ToInferResponse(context, &result, &response);
  EXPECT_EQ(response.raw_output_contents(0).data(), computed);
  EXPECT_EQ(response.raw_output_contents(0).size(), size_t{4} * 24 * 2);
  EXPECT_EQ(response.id(), "seven");
  EXPECT_EQ(response.model_name(), "a/b");
  EXPECT_EQ(response.model_version(), "1");
  EXPECT_EQ(response.outputs(0).datatype(), "FP16");
}

TEST_F(ConvertTest, NamesTheVersionThatItFound) {
  inference::ModelInferRequest request = Request(1, "FP32", 4);
  pb::ExecuteRequest execute;
  InferContext context;
  ASSERT_TRUE(ToExecute(Layer(), &request, &execute, &context).ok());
  EXPECT_EQ(execute.program().steps(0).matmul().layer().version(), 1);
  EXPECT_EQ(execute.program().outputs(0).dtype(), pb::DATA_TYPE_F32);
}

TEST_F(ConvertTest, PrioritiesAreTritons) {
  for (const auto& [level, priority] : {std::pair{uint64_t{0}, pb::PRIORITY_UNSPECIFIED},
                                        {uint64_t{1}, pb::PRIORITY_UNSPECIFIED},
                                        {uint64_t{2}, pb::PRIORITY_BACKGROUND},
                                        {UINT64_MAX, pb::PRIORITY_BACKGROUND}}) {
    inference::ModelInferRequest request = Request(1, "FP32", 4);
    (*request.mutable_parameters())["priority"].set_uint64_param(level);
    pb::ExecuteRequest execute;
    InferContext context;
    ASSERT_TRUE(ToExecute(Layer(), &request, &execute, &context).ok());
    EXPECT_EQ(execute.priority(), priority) << level;
  }
}

TEST_F(ConvertTest, AnEndlessTimeoutDoesNotOverflow) {
  inference::ModelInferRequest request = Request(1, "FP32", 4);
  (*request.mutable_parameters())["timeout"].set_uint64_param(UINT64_MAX);
  pb::ExecuteRequest execute;
  InferContext context;
  ASSERT_TRUE(ToExecute(Layer(), &request, &execute, &context).ok());
  EXPECT_GT(context.timeout, absl::Hours(24 * 365));
  EXPECT_LT(absl::Now() + context.timeout, absl::InfiniteFuture());
}

TEST_F(ConvertTest, ErrorsGetThePathsOfTheRequestThatWasSent) {
  inference::ModelInferRequest request = Request(1, "FP32", 4);
  request.add_outputs()->set_name("y");
  pb::ExecuteRequest execute;
  InferContext context;
  ASSERT_TRUE(ToExecute(Layer(), &request, &execute, &context).ok());
  for (const auto& [engine, caller] : {
           std::pair{"inputs[0].dense.shape[1]", "inputs[0].shape[1]"},
           {"inputs[0].dense.data", "raw_input_contents[0]"},
           {"inputs[0].dense.region.region", "inputs[0].parameters[shared_memory_region]"},
           {"inputs[0].dense.region.offset", "inputs[0].parameters[shared_memory_offset]"},
           {"inputs[0].dense.region.size", "inputs[0].parameters[shared_memory_byte_size]"},
           {"program.outputs[0].region.size", "outputs[0].parameters[shared_memory_byte_size]"},
           {"program.steps[0].matmul.layer", "model_name"},
           {"program.steps[0].matmul.activation_threshold", "parameters[activation_threshold]"},
           {"program_id", "model_name"},
           {"inputs", "inputs"},
       }) {
    const absl::Status invalid = ToInferError(FieldError(engine, "is bad", "SOME_REASON"), context);
    EXPECT_EQ(FieldOf(invalid), caller);
    EXPECT_EQ(invalid.message(), std::string(caller) + ": is bad");
    EXPECT_EQ(ReasonOf(invalid), "SOME_REASON");
    const absl::Status missing = ToInferError(
        MakeError(absl::StatusCode::kNotFound, "SOME_REASON", std::string(engine) + ": is not there"), context);
    EXPECT_EQ(missing.message(), std::string(caller) + ": is not there");
    EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(ReasonOf(missing), "SOME_REASON");
  }
  const absl::Status full = Exhausted(reason::kQueueFull, "queue full: 5 requests wait, limit 5", absl::Seconds(1));
  EXPECT_EQ(ToInferError(full, context), full);
  EXPECT_TRUE(ToInferError(absl::OkStatus(), context).ok());
}

TEST_F(ConvertTest, AnOutputMayHaveMoreRoomThanItNeeds) {
  inference::ModelInferRequest request = Request(2, "BF16", 2);
  auto& parameters = *request.add_outputs()->mutable_parameters();
  request.mutable_outputs(0)->set_name("y");
  parameters["shared_memory_region"].set_string_param("r");
  parameters["shared_memory_byte_size"].set_int64_param(4096);
  pb::ExecuteRequest execute;
  InferContext context;
  inference::ModelInferRequest copy = request;
  ASSERT_TRUE(ToExecute(Layer(), &copy, &execute, &context).ok());
  EXPECT_EQ(execute.program().outputs(0).region().size(), uint64_t{2} * 24 * 2);
  parameters["shared_memory_byte_size"].set_int64_param(2 * 24 * 2 - 1);
  execute.Clear();
  context = {};
  EXPECT_EQ(FieldOf(ToExecute(Layer(), &request, &execute, &context)),
            "outputs[0].parameters[shared_memory_byte_size]");
}

TEST_F(ConvertTest, AProgramThatReturnsAStepTwiceIsNoModel) {
  pb::RegisterProgramRequest request;
  request.mutable_program()->add_inputs("x");
  AddMatmul(request.mutable_program(), "y", "a/b", "x");
  for (const pb::DataType dtype : {pb::DATA_TYPE_F32, pb::DATA_TYPE_F16}) {
    request.mutable_program()->add_outputs()->set_step("y");
    request.mutable_program()->mutable_outputs()->rbegin()->set_dtype(dtype);
  }
  pb::RegisterProgramResponse registered;
  ASSERT_TRUE(core_.engine.RegisterProgram(request, &registered).ok());
  const auto model = FindModel(core_.catalog, core_.engine, registered.program_id(), "", "name", "version");
  EXPECT_EQ(model.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ListModels(core_.catalog, core_.engine).size(), 1u);
}

TEST_F(ConvertTest, AProgramWhoseLayerIsGoneSaysSo) {
  pb::RegisterProgramRequest request;
  request.mutable_program()->add_inputs("x");
  AddMatmul(request.mutable_program(), "y", "a/b", "x");
  request.mutable_program()->add_outputs()->set_step("y");
  pb::RegisterProgramResponse registered;
  ASSERT_TRUE(core_.engine.RegisterProgram(request, &registered).ok());
  ASSERT_TRUE(FindModel(core_.catalog, core_.engine, registered.program_id(), "", "name", "version").ok());
  ASSERT_TRUE(core_.Unregister("a/b").ok());
  const auto model = FindModel(core_.catalog, core_.engine, registered.program_id(), "", "name", "version");
  EXPECT_EQ(model.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(model.status().message()), ::testing::HasSubstr("a/b"));
}

}  // namespace
}  // namespace spmmd::server::testing
