// Requests that share launches get what they would have got alone, and count as what they are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/server/core/core_harness.h"

namespace spmmd::server {
namespace {

using testing::AddMatmul;
using testing::Core;
using testing::CoreOptions;
using testing::DenseSpec;
using testing::MatmulRequest;
using testing::RandomMatrix;
using testing::Series;
using testing::ViewOf;

// One Execute in flight.
struct Flight {
  pb::ExecuteRequest request;
  pb::ExecuteResponse response;
  absl::Status status;
  absl::Notification ended;
  Engine::Call call;

  void Start(Core& core, absl::Time deadline = absl::InfiniteFuture()) {
    call = core.engine.Execute(request, &response, deadline, [this](absl::Status result) {
      status = std::move(result);
      ended.Notify();
    });
  }
  absl::Status Wait() {
    ended.WaitForNotification();
    return status;
  }
};

class BatchingTest : public ::testing::Test {
 protected:
  // Occupies the device: what is started from here on waits.
  void Occupy(Core& core, const std::string& layer, const DenseView& x) {
    core.device.Hold();
    first_.request = MatmulRequest(layer, x);
    const int before = core.device.runs();
    occupier_ = std::thread([this, &core] { first_.Start(core); });
    core.device.AwaitRuns(before + 1);
  }
  void Release(Core& core) {
    core.device.Release();
    occupier_.join();
    EXPECT_TRUE(first_.Wait().ok());
    core.engine.Drain();
  }

  Flight first_;
  std::thread occupier_;
};

TEST_F(BatchingTest, JoinedRequestsGetTheirOwnRows) {
  Core core;
  const DenseMatrix w = RandomMatrix(DType::kF16, 70, 90, 0.5, 1);
  const DenseMatrix other = RandomMatrix(DType::kF16, 70, 90, 0.5, 2);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  ASSERT_TRUE(core.Register("other", other.view()).ok());
  const DenseMatrix x0 = RandomMatrix(DType::kF16, 1, 90, 0, 3);
  Occupy(core, "other", x0.view());

  constexpr int kCalls = 12;
  std::vector<std::unique_ptr<Flight>> flights;
  std::vector<DenseMatrix> inputs;
  for (int i = 0; i < kCalls; ++i) {
    inputs.push_back(RandomMatrix(DType::kF16, 1 + i % 4, 90, 0, static_cast<uint32_t>(10 + i)));
    flights.push_back(std::make_unique<Flight>());
    flights.back()->request = MatmulRequest("w", inputs.back().view());
    flights.back()->Start(core);
  }
  EXPECT_EQ(core.device.executor().depth(), kCalls);
  const int before = core.device.runs();
  Release(core);
  EXPECT_EQ(core.device.runs() - before, 1);  // all twelve in one
  for (int i = 0; i < kCalls; ++i) {
    ASSERT_TRUE(flights[static_cast<size_t>(i)]->Wait().ok());
    const DenseView x = inputs[static_cast<size_t>(i)].view();
    const DenseView y = ViewOf(flights[static_cast<size_t>(i)]->response.outputs(0).tensor());
    EXPECT_EQ(y.rows, x.rows);
    EXPECT_TRUE(CompareToReference(y, ReferenceMatmul(w.view(), x), DefaultTolerance(DType::kF32, 90)).ok()) << i;
    EXPECT_GT(flights[static_cast<size_t>(i)]->response.timing().kernel().nanos(), 0);
  }
  EXPECT_EQ(Series(core.metrics, "spmmd_batch_tokens_sum"), 1 + 30);
  EXPECT_EQ(Series(core.metrics, "spmmd_batch_tokens_count"), 2);
  EXPECT_EQ(Series(core.metrics, "spmmd_queue_depth{device=\"cpu:0\"}"), 0);
  EXPECT_EQ(Series(core.metrics, "spmmd_queue_bytes{device=\"cpu:0\"}"), 0);
}

TEST_F(BatchingTest, OnlyEqualProgramsAndTypesAreJoined) {
  Core core;
  const DenseMatrix w = RandomMatrix(DType::kF16, 32, 48, 0.5, 1);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  ASSERT_TRUE(core.Register("again", w.view()).ok());  // the same content under another name
  const DenseMatrix half = RandomMatrix(DType::kF16, 1, 48, 0, 2);
  const DenseMatrix single = RandomMatrix(DType::kF32, 1, 48, 0, 3);
  Occupy(core, "w", half.view());
  std::vector<std::unique_ptr<Flight>> flights;
  const auto start = [&](const pb::ExecuteRequest& request) {
    flights.push_back(std::make_unique<Flight>());
    flights.back()->request = request;
    flights.back()->Start(core);
  };
  const pb::ExecuteRequest plain = MatmulRequest("w", half.view());
  pb::ExecuteRequest relu = plain;
  relu.mutable_program()->mutable_steps(0)->mutable_matmul()->set_activation(pb::ACTIVATION_RELU);
  pb::ExecuteRequest rounded = plain;
  rounded.mutable_program()->mutable_outputs(0)->set_dtype(pb::DATA_TYPE_BF16);
  for (int turn = 0; turn < 2; ++turn) {
    start(plain);
    start(relu);
    start(rounded);
    start(MatmulRequest("w", single.view()));
    start(MatmulRequest("again", half.view()));
  }
  const int before = core.device.runs();
  Release(core);
  EXPECT_EQ(core.device.runs() - before, 5);
  for (const auto& flight : flights) EXPECT_TRUE(flight->Wait().ok());
  // Both turns have the same bits.
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(flights[i]->response.outputs(0).tensor().data(), flights[i + 5]->response.outputs(0).tensor().data());
  }
}

TEST_F(BatchingTest, ProgramsOfSeveralStepsAreJoined) {
  Core core;
  const DenseMatrix up = RandomMatrix(DType::kF16, 64, 32, 0.5, 1);
  const DenseMatrix down = RandomMatrix(DType::kF16, 32, 64, 0.5, 2);
  ASSERT_TRUE(core.Register("up", up.view()).ok());
  ASSERT_TRUE(core.Register("down", down.view()).ok());
  const auto request_for = [&](const DenseView& x) {
    pb::ExecuteRequest request = MatmulRequest("up", x);
    pb::Program& program = *request.mutable_program();
    AddMatmul(&program, "d", "down", "y");
    pb::Step* step = program.add_steps();
    step->set_name("z");
    step->mutable_add()->set_left("d");
    step->mutable_add()->set_right("x");
    program.mutable_outputs(0)->set_dtype(pb::DATA_TYPE_F16);
    program.add_outputs()->set_step("z");
    return request;
  };
  // Alone first.
  std::vector<DenseMatrix> inputs;
  std::vector<pb::ExecuteResponse> alone(5);
  for (size_t i = 0; i < alone.size(); ++i) {
    inputs.push_back(RandomMatrix(DType::kF32, 2, 32, 0, static_cast<uint32_t>(i + 5)));
    ASSERT_TRUE(core.Execute(request_for(inputs[i].view()), &alone[i]).ok());
  }
  Occupy(core, "up", inputs[0].view());
  std::vector<std::unique_ptr<Flight>> flights;
  for (const DenseMatrix& x : inputs) {
    flights.push_back(std::make_unique<Flight>());
    flights.back()->request = request_for(x.view());
    flights.back()->Start(core);
  }
  const int before = core.device.runs();
  Release(core);
  EXPECT_EQ(core.device.runs() - before, 1);
  for (size_t i = 0; i < flights.size(); ++i) {
    ASSERT_TRUE(flights[i]->Wait().ok());
    for (int o = 0; o < 2; ++o) {
      const DenseView joined = ViewOf(flights[i]->response.outputs(o).tensor());
      const DenseView single = ViewOf(alone[i].outputs(o).tensor());
      for (int64_t e = 0; e < joined.rows * joined.cols; ++e) {
        const double a = joined.dtype == DType::kF32 ? reinterpret_cast<const float*>(joined.data)[e]
                                                     : F16ToFloat(reinterpret_cast<const uint16_t*>(joined.data)[e]);
        const double b = single.dtype == DType::kF32 ? reinterpret_cast<const float*>(single.data)[e]
                                                     : F16ToFloat(reinterpret_cast<const uint16_t*>(single.data)[e]);
        ASSERT_NEAR(a, b, 1e-2 + 1e-2 * std::abs(b)) << "output " << o << " element " << e;
      }
    }
  }
}

TEST_F(BatchingTest, DeterministicLayersRunAlone) {
  Core core;
  const DenseMatrix w = RandomMatrix(DType::kF16, 64, 64, 0.5, 1);
  pb::LayerSpec spec = DenseSpec("w", w.view());
  spec.set_deterministic(true);
  const auto layer = core.Register(spec, w.view());
  ASSERT_TRUE(layer.ok());
  EXPECT_TRUE(layer->deterministic());
  const DenseMatrix x = RandomMatrix(DType::kF16, 1, 64, 0, 2);
  pb::ExecuteResponse alone;
  ASSERT_TRUE(core.Execute(MatmulRequest("w", x.view()), &alone).ok());
  Occupy(core, "w", x.view());
  std::vector<std::unique_ptr<Flight>> flights;
  for (int i = 0; i < 6; ++i) {
    flights.push_back(std::make_unique<Flight>());
    flights.back()->request = MatmulRequest("w", x.view());
    flights.back()->Start(core);
  }
  const int before = core.device.runs();
  Release(core);
  EXPECT_EQ(core.device.runs() - before, 6);
  for (const auto& flight : flights) {
    ASSERT_TRUE(flight->Wait().ok());
    EXPECT_EQ(flight->response.outputs(0).tensor().data(), alone.outputs(0).tensor().data());
  }
  // The same content without the wish is another layer.
  spec.set_deterministic(false);
  const auto free = core.Register(spec, w.view());
  ASSERT_TRUE(free.ok());
  EXPECT_EQ(free->version(), 2);
  EXPECT_FALSE(free->deterministic());
}

TEST_F(BatchingTest, ABatchThatDoesNotFitRunsAsItsRequests) {
  CoreOptions options;
  options.device_memory = uint64_t{2} << 20;
  Core core(options);
  const DenseMatrix w = RandomMatrix(DType::kF16, 512, 512, 0.5, 1);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  const DenseMatrix x = RandomMatrix(DType::kF32, 100, 512, 0, 2);
  Occupy(core, "w", RandomMatrix(DType::kF16, 1, 512, 0, 3).view());
  std::vector<std::unique_ptr<Flight>> flights;
  for (int i = 0; i < 5; ++i) {  // 500 rows of 512 floats, twice: more than the budget has left
    flights.push_back(std::make_unique<Flight>());
    flights.back()->request = MatmulRequest("w", x.view());
    flights.back()->Start(core);
  }
  const int before = core.device.runs();
  Release(core);
  EXPECT_EQ(core.device.runs() - before, 6);
  const Reference reference = ReferenceMatmul(w.view(), x.view());
  for (const auto& flight : flights) {
    ASSERT_TRUE(flight->Wait().ok()) << flight->status;
    EXPECT_TRUE(
        CompareToReference(ViewOf(flight->response.outputs(0).tensor()), reference, DefaultTolerance(DType::kF32, 512))
            .ok());
  }
  EXPECT_EQ(core.device.budget().used(MemoryKind::kStaging), 0);
}

TEST_F(BatchingTest, PriorityIsChecked) {
  Core core;
  const DenseMatrix w = RandomMatrix(DType::kF16, 16, 16, 0.5, 1);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  const DenseMatrix x = RandomMatrix(DType::kF16, 1, 16, 0, 2);
  pb::ExecuteRequest request = MatmulRequest("w", x.view());
  pb::ExecuteResponse response;
  request.set_priority(pb::PRIORITY_BACKGROUND);
  EXPECT_TRUE(core.Execute(request, &response).ok());
  request.set_priority(static_cast<pb::Priority>(7));
  const absl::Status status = core.Execute(request, &response);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(status), "priority");
}

}  // namespace
}  // namespace spmmd::server
