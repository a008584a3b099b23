// Programs executed against a double-precision reference, and what the engine does around them.
#include "server/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "kernels/base/activation.h"
#include "tests/server/core/core_harness.h"

namespace spmmd::server {
namespace {

using testing::AddMatmul;
using testing::Bytes;
using testing::Core;
using testing::CoreOptions;
using testing::DenseSpec;
using ::testing::HasSubstr;
using testing::MatmulRequest;
using testing::RandomMatrix;
using testing::Series;
using testing::SetTensor;
using testing::ViewOf;

DenseMatrix AsFp32(const Reference& reference) {
  DenseMatrix out = *DenseMatrix::Create(DType::kF32, reference.n, reference.m);
  for (size_t i = 0; i < reference.y.size(); ++i) {
    reinterpret_cast<float*>(out.mutable_view().data)[i] = static_cast<float>(reference.y[i]);
  }
  return out;
}

TEST(EngineTest, MatmulWithEveryActivationAndType) {
  Core core;
  std::vector<float> bias(70);
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = 0.1f * static_cast<float>(i) - 3;
  for (const DType weight_type : {DType::kF16, DType::kBf16, DType::kF32}) {
    const DenseMatrix w = RandomMatrix(weight_type, 70, 90, 0.5, 1);
    pb::LayerSpec spec = DenseSpec("w", w.view());
    spec.set_has_bias(true);
    ASSERT_TRUE(core.Register(spec, w.view(), bias).ok());
    for (const DType type : {DType::kF16, DType::kBf16, DType::kF32}) {
      for (const auto& [wire, activation] :
           std::vector<std::pair<pb::Activation, Activation>>{{pb::ACTIVATION_UNSPECIFIED, Activation::kNone},
                                                              {pb::ACTIVATION_RELU, Activation::kRelu},
                                                              {pb::ACTIVATION_GELU, Activation::kGelu},
                                                              {pb::ACTIVATION_GELU_TANH, Activation::kGeluTanh},
                                                              {pb::ACTIVATION_SILU, Activation::kSilu}}) {
        const DenseMatrix x = RandomMatrix(type, 3, 90, 0, 2);
        pb::ExecuteRequest request = MatmulRequest("w", x.view());
        request.mutable_program()->mutable_steps(0)->mutable_matmul()->set_activation(wire);
        request.mutable_program()->mutable_outputs(0)->set_dtype(ToProto(type));
        pb::ExecuteResponse response;
        ASSERT_TRUE(core.Execute(request, &response).ok());
        const DenseView y = ViewOf(response.outputs(0).tensor());
        EXPECT_EQ(y.dtype, type);
        EXPECT_TRUE(
            CompareToReference(y, ReferenceMatmul(w.view(), x.view(), bias, activation), DefaultTolerance(type, 90))
                .ok());
        request.mutable_program()->mutable_steps(0)->mutable_matmul()->set_ignore_bias(true);
        ASSERT_TRUE(core.Execute(request, &response).ok());
        EXPECT_TRUE(CompareToReference(ViewOf(response.outputs(0).tensor()),
                                       ReferenceMatmul(w.view(), x.view(), {}, activation), DefaultTolerance(type, 90))
                        .ok());
      }
    }
  }
}

TEST(EngineTest, MlpInOneCallMatchesTheReference) {
  Core core;
  const DenseMatrix gate = RandomMatrix(DType::kF16, 96, 64, 0.5, 1);
  const DenseMatrix up = RandomMatrix(DType::kF16, 96, 64, 0.6, 2);
  const DenseMatrix down = RandomMatrix(DType::kF16, 64, 96, 0.7, 3);
  ASSERT_TRUE(core.Register("gate", gate.view()).ok());
  ASSERT_TRUE(core.Register("up", up.view()).ok());
  ASSERT_TRUE(core.Register("down", down.view()).ok());
  pb::ExecuteRequest request;
  pb::Program* program = request.mutable_program();
  program->add_inputs("x");
  AddMatmul(program, "g", "gate", "x")->set_activation(pb::ACTIVATION_SILU);
  AddMatmul(program, "u", "up", "x");
  pb::Step* step = program->add_steps();
  step->set_name("h");
  step->mutable_mul()->set_left("g");
  step->mutable_mul()->set_right("u");
  AddMatmul(program, "d", "down", "h");
  step = program->add_steps();
  step->set_name("y");  // residual
  step->mutable_add()->set_left("d");
  step->mutable_add()->set_right("x");
  step->mutable_add()->set_activation(pb::ACTIVATION_RELU);
  // The same step twice in different types, an intermediate, and the result.
  program->add_outputs()->set_step("y");
  program->add_outputs()->set_step("g");
  program->mutable_outputs(1)->set_dtype(pb::DATA_TYPE_BF16);
  program->add_outputs()->set_step("g");
  program->add_outputs()->set_step("u");
  program->mutable_outputs(3)->set_dtype(pb::DATA_TYPE_F16);

  for (const int64_t n : {1, 5, 33}) {
    const DenseMatrix x = RandomMatrix(DType::kF32, n, 64, 0, 4);
    request.clear_inputs();
    request.add_inputs()->set_name("x");
    SetTensor(x.view(), request.mutable_inputs(0)->mutable_dense());
    pb::ExecuteResponse response;
    const absl::Status status = core.Execute(request, &response);
    ASSERT_TRUE(status.ok()) << status;
    const Reference g = ReferenceMatmul(gate.view(), x.view(), {}, Activation::kSilu);
    const Reference u = ReferenceMatmul(up.view(), x.view());
    Reference h = g;
    for (size_t i = 0; i < h.y.size(); ++i) h.y[i] = g.y[i] * u.y[i];
    Reference y = ReferenceMatmul(down.view(), AsFp32(h).view());
    for (size_t i = 0; i < y.y.size(); ++i) {
      const double residual = reinterpret_cast<const float*>(x.view().data)[i];
      y.y[i] = std::max(0.0, y.y[i] + residual);
      y.scale[i] += std::abs(residual);
    }
    // The chain's error is that of its intermediates, carried through.
    EXPECT_TRUE(CompareToReference(ViewOf(response.outputs(0).tensor()), y, 1e-5).ok())
        << CompareToReference(ViewOf(response.outputs(0).tensor()), y, 1e-5);
    EXPECT_TRUE(CompareToReference(ViewOf(response.outputs(1).tensor()), g, DefaultTolerance(DType::kBf16, 64)).ok());
    EXPECT_TRUE(CompareToReference(ViewOf(response.outputs(2).tensor()), g, DefaultTolerance(DType::kF32, 64)).ok());
    EXPECT_TRUE(CompareToReference(ViewOf(response.outputs(3).tensor()), u, DefaultTolerance(DType::kF16, 64)).ok());
    EXPECT_EQ(response.outputs(3).name(), "u");
    EXPECT_GT(response.timing().kernel().nanos(), 0);
  }
}

TEST(EngineTest, ElementwiseOverInputsOfAnyType) {
  Core core;
  for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {300, 3}, {2, 40000}}) {
    const DenseMatrix a = RandomMatrix(DType::kF16, rows, cols, 0, 1);
    const DenseMatrix b = RandomMatrix(DType::kBf16, rows, cols, 0, 2);
    pb::ExecuteRequest request;
    pb::Program* program = request.mutable_program();
    program->add_inputs("a");
    program->add_inputs("b");
    pb::Step* step = program->add_steps();
    step->set_name("p");
    step->mutable_mul()->set_left("a");
    step->mutable_mul()->set_right("b");
    step->mutable_mul()->set_activation(pb::ACTIVATION_GELU);
    program->add_outputs()->set_step("p");
    for (const auto& [name, matrix] : {std::pair<const char*, const DenseMatrix*>{"b", &b}, {"a", &a}}) {
      request.add_inputs()->set_name(name);
      SetTensor(matrix->view(), request.mutable_inputs(request.inputs_size() - 1)->mutable_dense());
    }
    pb::ExecuteResponse response;
    ASSERT_TRUE(core.Execute(request, &response).ok());
    const DenseView y = ViewOf(response.outputs(0).tensor());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const double expected = ActivateDouble(
            Activation::kGelu, static_cast<float>(ElementAsDouble(a.view(), r, c) * ElementAsDouble(b.view(), r, c)));
        ASSERT_NEAR(ElementAsDouble(y, r, c), expected, 1e-6 * (1 + std::abs(expected))) << r << "," << c;
      }
    }
  }
}

TEST(EngineTest, NoRowsGiveEmptyOutputs) {
  Core core;
  ASSERT_TRUE(core.Register("w", RandomMatrix(DType::kF16, 8, 6, 0.5, 1).view()).ok());
  pb::ExecuteRequest request = MatmulRequest("w", RandomMatrix(DType::kF32, 1, 6, 0, 1).view());
  request.mutable_inputs(0)->mutable_dense()->set_shape(0, 0);
  request.mutable_inputs(0)->mutable_dense()->set_data("");
  pb::ExecuteResponse response;
  ASSERT_TRUE(core.Execute(request, &response).ok());
  EXPECT_THAT(response.outputs(0).tensor().shape(), ::testing::ElementsAre(0, 8));
  EXPECT_TRUE(response.outputs(0).tensor().has_data());
  EXPECT_TRUE(response.outputs(0).tensor().data().empty());
}

// Sparse inputs and thresholds give what the dense product of the same, zeroed rows gives, whichever kernel runs.
TEST(EngineTest, SparseActivationsMatchTheReference) {
  Core core;
  const DenseMatrix w = RandomMatrix(DType::kF16, 130, 200, 0.5, 1);
  std::vector<float> bias(130, 0.5f);
  for (const pb::Format format : {pb::FORMAT_BITMAP, pb::FORMAT_DENSE}) {
    pb::LayerSpec spec = DenseSpec("w", w.view());
    spec.set_has_bias(true);
    spec.set_format(format);
    ASSERT_TRUE(core.Register(spec, w.view(), bias).ok());
    for (const double sparsity : {0.0, 0.5, 0.95, 1.0}) {
      for (const int64_t n : {1, 4}) {
        const DenseMatrix x = RandomMatrix(DType::kF32, n, 200, sparsity, 7);
        const Reference reference = ReferenceMatmul(w.view(), x.view(), bias, Activation::kRelu);
        pb::ExecuteRequest request = MatmulRequest("w", x.view());
        pb::Matmul* matmul = request.mutable_program()->mutable_steps(0)->mutable_matmul();
        matmul->set_activation(pb::ACTIVATION_RELU);
        matmul->set_activation_threshold(0);
        pb::ExecuteResponse response;
        ASSERT_TRUE(core.Execute(request, &response).ok());
        EXPECT_TRUE(CompareToReference(ViewOf(response.outputs(0).tensor()), reference, 1e-5).ok()) << sparsity;

        // The same rows as a sparse tensor.
        matmul->clear_activation_threshold();
        std::vector<uint64_t> offsets{0};
        std::vector<uint32_t> indices;
        std::vector<float> values;
        for (int64_t r = 0; r < n; ++r) {
          for (int64_t c = 0; c < 200; ++c) {
            const auto value = static_cast<float>(ElementAsDouble(x.view(), r, c));
            if (value == 0) continue;
            indices.push_back(static_cast<uint32_t>(c));
            values.push_back(value);
          }
          offsets.push_back(values.size());
        }
        pb::SparseTensor* sparse = request.mutable_inputs(0)->mutable_sparse();
        sparse->set_dtype(pb::DATA_TYPE_F32);
        sparse->add_shape(n);
        sparse->add_shape(200);
        if (n > 1) sparse->set_row_offsets(Bytes(offsets));
        sparse->set_indices(Bytes(indices));
        sparse->set_values(Bytes(values));
        ASSERT_TRUE(core.Execute(request, &response).ok());
        EXPECT_TRUE(CompareToReference(ViewOf(response.outputs(0).tensor()), reference, 1e-5).ok()) << sparsity;
      }
    }
  }
}

TEST(EngineTest, LayersThresholdAppliesUnlessTheStepHasItsOwn) {
  Core core;
  const DenseMatrix w = RandomMatrix(DType::kF32, 32, 64, 0.5, 1);
  pb::LayerSpec spec = DenseSpec("w", w.view());
  spec.set_activation_threshold(0.8f);
  ASSERT_TRUE(core.Register(spec, w.view()).ok());
  for (const int64_t n : {1, 20}) {
    const DenseMatrix x = RandomMatrix(DType::kF32, n, 64, 0, 2);
    const auto thresholded = [&](float threshold) {
      DenseMatrix out = *DenseMatrix::Create(DType::kF32, n, 64);
      for (int64_t i = 0; i < n * 64; ++i) {
        const float value = reinterpret_cast<const float*>(x.view().data)[i];
        reinterpret_cast<float*>(out.mutable_view().data)[i] = std::abs(value) > threshold ? value : 0;
      }
      return ReferenceMatmul(w.view(), out.view());
    };
    pb::ExecuteRequest request = MatmulRequest("w", x.view());
    pb::ExecuteResponse response;
    ASSERT_TRUE(core.Execute(request, &response).ok());
    EXPECT_TRUE(CompareToReference(ViewOf(response.outputs(0).tensor()), thresholded(0.8f), 1e-5).ok());
    request.mutable_program()->mutable_steps(0)->mutable_matmul()->set_activation_threshold(0.2f);
    ASSERT_TRUE(core.Execute(request, &response).ok());
    EXPECT_TRUE(CompareToReference(ViewOf(response.outputs(0).tensor()), thresholded(0.2f), 1e-5).ok());
  }
}

TEST(EngineTest, OutputsHaveALimit) {
  CoreOptions options;
  options.engine.max_output_bytes = 1000;
  Core core(options);
  ASSERT_TRUE(core.Register("w", RandomMatrix(DType::kF16, 50, 8, 0.5, 1).view()).ok());
  pb::ExecuteResponse response;
  EXPECT_TRUE(core.Execute(MatmulRequest("w", RandomMatrix(DType::kF32, 5, 8, 0, 1).view()), &response).ok());
  const absl::Status status = core.Execute(MatmulRequest("w", RandomMatrix(DType::kF32, 6, 8, 0, 1).view()), &response);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "TOO_LARGE");
  EXPECT_THAT(std::string(status.message()), HasSubstr("1200 bytes, the limit is 1000"));
}

TEST(EngineTest, WorkspaceIsWithinTheBudget) {
  const DenseMatrix w = RandomMatrix(DType::kF16, 64, 64, 0.5, 1);
  CoreOptions options;
  options.device_memory = w.bytes() + 4096;
  Core core(options);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  pb::ExecuteRequest request = MatmulRequest("w", RandomMatrix(DType::kF32, 4, 64, 0, 1).view());
  AddMatmul(request.mutable_program(), "z", "w", "y");
  request.mutable_program()->mutable_outputs(0)->set_step("z");
  pb::ExecuteResponse response;
  ASSERT_TRUE(core.Execute(request, &response).ok());
  const uint64_t baseline = core.device.budget().used();
  for (int i = 0; i < 3; ++i) {
    pb::ExecuteRequest big = request;
    SetTensor(RandomMatrix(DType::kF32, 400, 64, 0, 1).view(), big.mutable_inputs(0)->mutable_dense());
    big.mutable_inputs(0)->mutable_dense()->mutable_shape()->Clear();
    big.mutable_inputs(0)->mutable_dense()->add_shape(400);
    big.mutable_inputs(0)->mutable_dense()->add_shape(64);
    const absl::Status status = core.Execute(big, &response);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(ReasonOf(status), "DEVICE_MEMORY");
    EXPECT_EQ(core.device.budget().used(), baseline);
    EXPECT_TRUE(core.Execute(request, &response).ok());
  }
}

TEST(EngineTest, ThresholdedActivationsAreWithinTheBudget) {
  const DenseMatrix w = RandomMatrix(DType::kF16, 16, 1024, 0.5, 1);
  CoreOptions options;
  options.device_memory = w.bytes() + (uint64_t{10} << 20);
  Core core(options);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  const uint64_t weights = core.device.budget().used();
  const auto execute = [&](int64_t tokens) {
    pb::ExecuteRequest request = MatmulRequest("w", RandomMatrix(DType::kF16, tokens, 1024, 0, 1).view());
    request.mutable_program()->mutable_steps(0)->mutable_matmul()->set_activation_threshold(0.01f);
    pb::ExecuteResponse response;
    return core.Execute(request, &response);
  };
  const auto kept = [&] { return core.device.budget().used() - weights; };
  ASSERT_TRUE(execute(2).ok());
  EXPECT_GT(kept(), uint64_t{2} * 1024 * 8) << "two rows of eight bytes an entry are kept for the next run";
  ASSERT_TRUE(execute(600).ok());  // 4.7 MiB of entries, and 2.3 MiB scattered: too much to keep
  EXPECT_LE(kept(), uint64_t{3} << 20);
  const absl::Status status = execute(2000);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(ReasonOf(status), "DEVICE_MEMORY");
  EXPECT_LE(kept(), uint64_t{3} << 20);
  EXPECT_TRUE(execute(2).ok());
}

TEST(EngineTest, QueueFullExpiredAndCancelledRequestsLeaveNoTrace) {
  CoreOptions options;
  options.queue.max_depth = 100;
  Core core(options);
  const DenseMatrix w = RandomMatrix(DType::kF16, 64, 64, 0.5, 1);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  const pb::ExecuteRequest request = MatmulRequest("w", RandomMatrix(DType::kF32, 1, 64, 0, 1).view());
  const std::string launches = R"(spmmd_queue_depth{device="cpu:0"})";
  core.device.Hold();
  pb::ExecuteResponse first_response;
  std::thread first([&] { EXPECT_TRUE(core.Execute(request, &first_response).ok()); });
  core.device.AwaitRuns(1);

  std::vector<pb::ExecuteResponse> responses(100);
  std::vector<absl::Status> statuses(100);
  std::vector<Engine::Call> calls;
  const absl::Time deadline = absl::Now() + absl::Seconds(1);
  for (size_t i = 0; i < 100; ++i) {
    calls.push_back(core.engine.Execute(request, &responses[i], deadline,
                                        [&statuses, i](absl::Status status) { statuses[i] = std::move(status); }));
  }
  EXPECT_EQ(Series(core.metrics, launches), 100);
  for (int i = 0; i < 36; ++i) {
    pb::ExecuteResponse response;
    const absl::Status refused = core.Execute(request, &response);
    EXPECT_EQ(ReasonOf(refused), "QUEUE_FULL");
    EXPECT_TRUE(RetryDelayOf(refused).has_value());
  }
  absl::SleepFor(deadline - absl::Now() + absl::Milliseconds(1));
  // Cancelled past its deadline: that is why.
  core.engine.Cancel(calls[7]);
  EXPECT_EQ(statuses[7].code(), absl::StatusCode::kDeadlineExceeded);
  core.engine.Cancel(nullptr);
  core.device.Release();
  first.join();
  core.engine.Drain();
  for (const absl::Status& status : statuses) EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(core.device.runs(), 1);
  EXPECT_EQ(Series(core.metrics, launches), 0);
  EXPECT_EQ(Series(core.metrics, R"(spmmd_queue_bytes{device="cpu:0"})"), 0);
  EXPECT_EQ(Series(core.metrics, R"(spmmd_rejected_total{reason="QUEUE_FULL"})"), 36);
  EXPECT_EQ(Series(core.metrics, R"(spmmd_rejected_total{reason="DEADLINE"})"), 100);
  calls.clear();
  EXPECT_TRUE(core.Unregister("w").ok());
}

TEST(EngineTest, HandleOfAnEndedCallKeepsNoLayer) {
  Core core;
  ASSERT_TRUE(core.Register("w", RandomMatrix(DType::kF16, 8, 8, 0.5, 1).view()).ok());
  const pb::ExecuteRequest request = MatmulRequest("w", RandomMatrix(DType::kF32, 1, 8, 0, 1).view());
  pb::ExecuteResponse response;
  const Engine::Call call = core.engine.Execute(request, &response, absl::InfiniteFuture(), [](absl::Status) {});
  EXPECT_TRUE(core.Unregister("w").ok());  // would wait for a lease
  core.engine.Cancel(call);
}

TEST(EngineTest, RegisteredProgramFollowsTheNewestVersion) {
  Core core;
  const DenseMatrix w1 = RandomMatrix(DType::kF16, 16, 32, 0.5, 1);
  const DenseMatrix w2 = RandomMatrix(DType::kF16, 24, 32, 0.5, 2);
  const DenseMatrix x = RandomMatrix(DType::kF32, 2, 32, 0, 3);
  ASSERT_TRUE(core.Register("w", w1.view()).ok());
  pb::RegisterProgramRequest registration;
  *registration.mutable_program() = MatmulRequest("w", x.view()).program();
  pb::RegisterProgramResponse registered;
  ASSERT_TRUE(core.engine.RegisterProgram(registration, &registered).ok());
  pb::ExecuteRequest request = MatmulRequest("w", x.view());
  request.set_program_id(registered.program_id());
  pb::ExecuteResponse response;
  ASSERT_TRUE(core.Execute(request, &response).ok());
  EXPECT_TRUE(
      CompareToReference(ViewOf(response.outputs(0).tensor()), ReferenceMatmul(w1.view(), x.view()), 1e-5).ok());
  ASSERT_TRUE(core.Register("w", w2.view()).ok());
  ASSERT_TRUE(core.Execute(request, &response).ok());
  EXPECT_TRUE(
      CompareToReference(ViewOf(response.outputs(0).tensor()), ReferenceMatmul(w2.view(), x.view()), 1e-5).ok());
  // A kept program holds no layer.
  ASSERT_TRUE(core.Unregister("w").ok());
  EXPECT_EQ(core.device.budget().used(MemoryKind::kWeights), 0u);
  EXPECT_EQ(ReasonOf(core.Execute(request, &response)), "LAYER_NOT_FOUND");

  pb::UnregisterProgramRequest unregister;
  unregister.set_program_id(registered.program_id());
  EXPECT_TRUE(core.engine.UnregisterProgram(unregister).ok());
  EXPECT_EQ(core.engine.UnregisterProgram(unregister).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(core.Execute(request, &response)), "PROGRAM_NOT_FOUND");
  registration.mutable_program()->clear_steps();
  EXPECT_EQ(FieldOf(core.engine.RegisterProgram(registration, &registered)), "program.steps");
  EXPECT_EQ(FieldOf(core.engine.RegisterProgram({}, &registered)), "program");
}

TEST(EngineTest, ProgramsAreBounded) {
  CoreOptions options;
  options.engine.max_programs = 2;
  Core core(options);
  ASSERT_TRUE(core.Register("w", RandomMatrix(DType::kF16, 8, 8, 0.5, 1).view()).ok());
  pb::RegisterProgramRequest request;
  *request.mutable_program() = MatmulRequest("w", RandomMatrix(DType::kF32, 1, 8, 0, 1).view()).program();
  pb::RegisterProgramResponse response;
  EXPECT_TRUE(core.engine.RegisterProgram(request, &response).ok());
  request.mutable_program()->mutable_steps(0)->mutable_matmul()->set_activation(pb::ACTIVATION_RELU);
  EXPECT_TRUE(core.engine.RegisterProgram(request, &response).ok());
  EXPECT_TRUE(core.engine.RegisterProgram(request, &response).ok()) << "one that is there takes no further place";
  request.mutable_program()->mutable_steps(0)->mutable_matmul()->set_activation(pb::ACTIVATION_SILU);
  EXPECT_EQ(ReasonOf(core.engine.RegisterProgram(request, &response)), "TOO_MANY_PROGRAMS");
}

TEST(EngineTest, AProgramHasOneIdEverywhereAndIsKeptForAllWhoRegisteredIt) {
  Core core;
  Core replica;
  const DenseMatrix w = RandomMatrix(DType::kF16, 8, 8, 0.5, 1);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  ASSERT_TRUE(replica.Register("w", w.view()).ok());
  const DenseMatrix x = RandomMatrix(DType::kF32, 1, 8, 0, 1);
  pb::ExecuteRequest request = MatmulRequest("w", x.view());
  pb::RegisterProgramRequest registration;
  *registration.mutable_program() = request.program();
  pb::RegisterProgramResponse first;
  pb::RegisterProgramResponse second;
  pb::RegisterProgramResponse elsewhere;
  ASSERT_TRUE(core.engine.RegisterProgram(registration, &first).ok());
  ASSERT_TRUE(core.engine.RegisterProgram(registration, &second).ok());
  ASSERT_TRUE(replica.engine.RegisterProgram(registration, &elsewhere).ok());
  EXPECT_EQ(first.program_id(), second.program_id());
  EXPECT_EQ(first.program_id(), elsewhere.program_id());
  registration.mutable_program()->mutable_steps(0)->mutable_matmul()->set_ignore_bias(true);
  ASSERT_TRUE(core.engine.RegisterProgram(registration, &second).ok());
  EXPECT_NE(first.program_id(), second.program_id());

  request.set_program_id(first.program_id());
  pb::ExecuteResponse response;
  pb::UnregisterProgramRequest unregister;
  unregister.set_program_id(first.program_id());
  EXPECT_TRUE(core.engine.UnregisterProgram(unregister).ok());
  EXPECT_TRUE(core.Execute(request, &response).ok()) << "the other registration still needs it";
  EXPECT_TRUE(core.engine.UnregisterProgram(unregister).ok());
  EXPECT_EQ(ReasonOf(core.Execute(request, &response)), "PROGRAM_NOT_FOUND");
}

TEST(EngineTest, BenchmarkFillsTheLayersTable) {
  Core core;
  ASSERT_TRUE(core.Register("w", RandomMatrix(DType::kF16, 64, 64, 0.5, 1).view()).ok());
  pb::BenchmarkRequest request;
  request.mutable_layer()->set_name("w");
  request.add_tokens(1);
  request.add_tokens(3);
  request.set_repetitions(5);
  pb::BenchmarkResponse response;
  const uint64_t used = core.device.budget().used(MemoryKind::kWeights);
  ASSERT_TRUE(core.engine.Benchmark(request, &response).ok());
  ASSERT_EQ(response.speeds_size(), 2);
  for (const auto& speed : response.speeds()) {
    EXPECT_GT(speed.seconds_p50(), 0);
    EXPECT_LE(speed.seconds_p10(), speed.seconds_p50());
    EXPECT_LE(speed.seconds_p50(), speed.seconds_p90());
    EXPECT_GT(speed.dense_seconds_p50(), 0);
    EXPECT_GT(speed.bytes(), 0u);
    EXPECT_FALSE(speed.kernel().empty());
  }
  EXPECT_EQ(response.speeds(1).tokens(), 3);
  EXPECT_EQ(core.device.budget().used(MemoryKind::kWeights), used);  // the baseline is gone
  pb::GetLayerRequest get;
  get.mutable_layer()->set_name("w");
  pb::GetLayerResponse layer;
  ASSERT_TRUE(core.catalog.Get(get, &layer).ok());
  EXPECT_EQ(layer.layer().speeds_size(), 2);

  request.set_tokens(1, 0);
  EXPECT_EQ(FieldOf(core.engine.Benchmark(request, &response)), "tokens[1]");
  request.set_tokens(1, 1);
  request.set_repetitions(-1);
  EXPECT_EQ(FieldOf(core.engine.Benchmark(request, &response)), "repetitions");
  request.set_repetitions(10000);
  EXPECT_EQ(core.engine.Benchmark(request, &response, absl::Now()).code(), absl::StatusCode::kDeadlineExceeded);
  request.mutable_layer()->set_name("nope");
  EXPECT_EQ(core.engine.Benchmark(request, &response).code(), absl::StatusCode::kNotFound);

  pb::WarmLayerRequest warm;
  warm.mutable_layer()->set_name("w");
  pb::WarmLayerResponse warmed;
  EXPECT_TRUE(core.engine.Warm(warm, &warmed).ok());
  EXPECT_EQ(warmed.layer().name(), "w");
}

TEST(EngineTest, DescribesItsDevicesAndLimits) {
  Core core;
  pb::DeviceInfoResponse devices;
  core.engine.DescribeDevices(&devices);
  ASSERT_EQ(devices.devices_size(), 1);
  EXPECT_EQ(devices.devices(0).id(), "cpu:0");
  EXPECT_EQ(devices.devices(0).backend(), "cpu");
  EXPECT_EQ(devices.devices(0).memory_budget_bytes(), uint64_t{1} << 30);
  EXPECT_GT(devices.devices(0).memory_total_bytes(), 0u);
  EXPECT_FALSE(devices.devices(0).architecture().empty());
  EXPECT_TRUE(devices.devices(0).healthy());
  pb::ServerInfoResponse server;
  core.engine.DescribeServer(&server);
  EXPECT_EQ(server.backend(), "cpu");
  EXPECT_THAT(server.formats(), ::testing::Contains(pb::FORMAT_BITMAP));
  EXPECT_THAT(server.formats(), ::testing::Contains(pb::FORMAT_DENSE));
  EXPECT_EQ(server.limits().max_tokens(), 65536);
}

// Execute, cancel, register and unregister from several threads at once; results that come are right, and everything is
// back to zero afterwards.
TEST(EngineTest, ChurnEndsAtTheBaseline) {
  CoreOptions options;
  options.queue.max_depth = 4;
  Core core(options);
  const DenseMatrix w = RandomMatrix(DType::kF16, 96, 64, 0.5, 1);
  const DenseMatrix x = RandomMatrix(DType::kF32, 2, 64, 0, 2);
  const Reference reference = ReferenceMatmul(w.view(), x.view());
  const pb::ExecuteRequest request = MatmulRequest("w", x.view());
  std::atomic<bool> stop{false};
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<uint32_t>(t));
      while (!stop) {
        pb::ExecuteResponse response;
        absl::Status status;
        absl::Notification finished;
        const Engine::Call call = core.engine.Execute(
            request, &response,
            random() % 4 == 0 ? absl::Now() + absl::Microseconds(random() % 300) : absl::InfiniteFuture(),
            [&](absl::Status s) {
              status = std::move(s);
              finished.Notify();
            });
        if (random() % 3 == 0) core.engine.Cancel(call);
        finished.WaitForNotification();
        if (status.ok()) {
          ASSERT_TRUE(CompareToReference(ViewOf(response.outputs(0).tensor()), reference, 1e-5).ok());
          ++right;
        } else {
          ASSERT_THAT(status.code(),
                      ::testing::AnyOf(absl::StatusCode::kNotFound, absl::StatusCode::kCancelled,
                                       absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kResourceExhausted,
                                       absl::StatusCode::kUnavailable))
              << status;
        }
      }
    });
  }
  for (int i = 0; i < 60 || right < 50; ++i) {
    ASSERT_TRUE(core.Register("w", w.view()).ok());
    std::this_thread::yield();
    ASSERT_TRUE(core.Unregister("w").ok());
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  core.engine.Drain();
  EXPECT_EQ(core.device.budget().used(MemoryKind::kWeights), 0u);
  EXPECT_EQ(Series(core.metrics, R"(spmmd_queue_depth{device="cpu:0"})"), 0);
  EXPECT_EQ(Series(core.metrics, R"(spmmd_queue_bytes{device="cpu:0"})"), 0);
  EXPECT_EQ(Series(core.metrics, R"(spmmd_layers{state="ready"})"), 0);
  EXPECT_EQ(Series(core.metrics, "spmmd_upload_bytes"), 0);
}

}  // namespace
}  // namespace spmmd::server
