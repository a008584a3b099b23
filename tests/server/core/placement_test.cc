// Layers on several devices: one of them, a copy on each, or rows split over all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/server/core/core_harness.h"

namespace spmmd::server {
namespace {

using testing::AddMatmul;
using testing::DenseSpec;
using ::testing::HasSubstr;
using testing::HeldDevice;
using testing::MatmulRequest;
using testing::RandomMatrix;
using testing::SetTensor;
using testing::ViewOf;

class PlacementTest : public ::testing::Test {
 protected:
  void Start(const std::vector<uint64_t>& budgets) {
    std::vector<Device*> devices;
    for (size_t i = 0; i < budgets.size(); ++i) {
      DeviceOptions options;
      options.memory_limit_bytes = budgets[i];
      options.measure_bandwidth = false;
      devices_.push_back(std::make_unique<HeldDevice>(options, &metrics_, static_cast<int>(i)));
      devices.push_back(devices_.back().get());
    }
    LayerCatalog::Options options;
    options.upload_limit_bytes = uint64_t{1} << 30;
    catalog_ = std::make_unique<LayerCatalog>(options, devices, &metrics_);
    engine_ = std::make_unique<Engine>(Engine::Options(), catalog_.get(), &metrics_);
  }
  absl::StatusOr<pb::Layer> Register(const std::string& name, const DenseMatrix& w, pb::Placement placement,
                                     const std::vector<float>& bias = {}) {
    pb::LayerSpec spec = DenseSpec(name, w.view());
    spec.set_placement(placement);
    spec.set_has_bias(!bias.empty());
    return testing::RegisterIn(*catalog_, spec, w.view(), bias);
  }
  absl::Status Execute(const pb::ExecuteRequest& request, pb::ExecuteResponse* response,
                       absl::Time deadline = absl::InfiniteFuture()) {
    return testing::ExecuteOn(*engine_, request, response, deadline);
  }
  uint64_t Used(size_t device) { return devices_[device]->budget().used(MemoryKind::kWeights); }

  Metrics metrics_;
  std::vector<std::unique_ptr<HeldDevice>> devices_;
  std::unique_ptr<LayerCatalog> catalog_;
  std::unique_ptr<Engine> engine_;
};

constexpr uint64_t kMiB = uint64_t{1} << 20;

TEST_F(PlacementTest, SingleGoesWhereMostMemoryIsFree) {
  Start({16 * kMiB, 32 * kMiB});
  const DenseMatrix w = RandomMatrix(DType::kF16, 256, 256, 0.5, 1);
  auto layer = Register("a", w, pb::PLACEMENT_SINGLE);
  ASSERT_TRUE(layer.ok());
  ASSERT_EQ(layer->residency_size(), 1);
  EXPECT_EQ(layer->residency(0).device(), "cpu:1");
  EXPECT_EQ(Used(0), 0);
  EXPECT_EQ(Used(1), layer->residency(0).bytes());
}

TEST_F(PlacementTest, ReplicasServeFromTheLeastBusyDevice) {
  Start({32 * kMiB, 32 * kMiB});
  const DenseMatrix w = RandomMatrix(DType::kF16, 128, 64, 0.5, 1);
  const auto layer = Register("w", w, pb::PLACEMENT_REPLICATED);
  ASSERT_TRUE(layer.ok()) << layer.status();
  ASSERT_EQ(layer->residency_size(), 2);
  EXPECT_EQ(layer->residency(1).device(), "cpu:1");
  EXPECT_EQ(layer->residency(1).row_end(), 128);
  EXPECT_EQ(Used(0), Used(1));
  const DenseMatrix x = RandomMatrix(DType::kF16, 2, 64, 0, 2);
  const pb::ExecuteRequest request = MatmulRequest("w", x.view());
  // While one device is busy, the other serves.
  devices_[0]->Hold();
  pb::ExecuteResponse slow;
  std::thread occupier([&] { EXPECT_TRUE(Execute(request, &slow).ok()); });
  devices_[0]->AwaitRuns(1);
  for (int i = 0; i < 3; ++i) {
    pb::ExecuteResponse response;
    ASSERT_TRUE(Execute(request, &response).ok());
    EXPECT_TRUE(CompareToReference(ViewOf(response.outputs(0).tensor()), ReferenceMatmul(w.view(), x.view()),
                                   DefaultTolerance(DType::kF32, 64))
                    .ok());
  }
  EXPECT_EQ(devices_[1]->runs(), 3);
  devices_[0]->Release();
  occupier.join();
  ASSERT_TRUE(testing::UnregisterFrom(*catalog_, "w").ok());
  EXPECT_EQ(Used(0) + Used(1), 0);
}

TEST_F(PlacementTest, ShardsComputeTheirRows) {
  Start({32 * kMiB, 32 * kMiB, 32 * kMiB});
  std::vector<float> bias(700);
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = 0.01f * static_cast<float>(i) - 3;
  const DenseMatrix gate = RandomMatrix(DType::kF16, 700, 96, 0.5, 1);
  const DenseMatrix up = RandomMatrix(DType::kF16, 700, 96, 0.6, 2);
  const auto layer = Register("gate", gate, pb::PLACEMENT_SHARDED, bias);
  ASSERT_TRUE(layer.ok()) << layer.status();
  ASSERT_TRUE(Register("up", up, pb::PLACEMENT_SHARDED).ok());
  ASSERT_EQ(layer->residency_size(), 3);
  EXPECT_EQ(layer->residency(0).row_begin(), 0);
  EXPECT_EQ(layer->residency(0).row_end(), layer->residency(1).row_begin());
  EXPECT_EQ(layer->residency(1).row_end(), layer->residency(2).row_begin());
  EXPECT_EQ(layer->residency(2).row_end(), 700);
  EXPECT_EQ(layer->residency(0).row_end() % 64, 0);
  const int64_t nnz = static_cast<int64_t>(layer->nnz());
  EXPECT_EQ(nnz, ScanDense(gate.view()).nnz);

  // y = relu(silu(gate x + bias) * (up x) + z), with z given in parts.
  pb::ExecuteRequest request;
  pb::Program* program = request.mutable_program();
  program->add_inputs("x");
  program->add_inputs("z");
  AddMatmul(program, "g", "gate", "x")->set_activation(pb::ACTIVATION_SILU);
  AddMatmul(program, "u", "up", "x");
  pb::Step* step = program->add_steps();
  step->set_name("h");
  step->mutable_mul()->set_left("g");
  step->mutable_mul()->set_right("u");
  step = program->add_steps();
  step->set_name("y");
  step->mutable_add()->set_left("h");
  step->mutable_add()->set_right("z");
  step->mutable_add()->set_activation(pb::ACTIVATION_RELU);
  program->add_outputs()->set_step("y");
  program->add_outputs()->set_step("g");
  program->mutable_outputs(1)->set_dtype(pb::DATA_TYPE_BF16);
  for (const int64_t n : {1, 7}) {
    const DenseMatrix x = RandomMatrix(DType::kF16, n, 96, 0, 3);
    const DenseMatrix z = RandomMatrix(DType::kF32, n, 700, 0, 4);
    request.clear_inputs();
    request.add_inputs()->set_name("x");
    SetTensor(x.view(), request.mutable_inputs(0)->mutable_dense());
    request.add_inputs()->set_name("z");
    SetTensor(z.view(), request.mutable_inputs(1)->mutable_dense());
    pb::ExecuteResponse response;
    const absl::Status status = Execute(request, &response);
    ASSERT_TRUE(status.ok()) << status;
    const Reference g = ReferenceMatmul(gate.view(), x.view(), bias, Activation::kSilu);
    const Reference u = ReferenceMatmul(up.view(), x.view());
    Reference y = g;
    for (size_t i = 0; i < y.y.size(); ++i) {
      const double add = reinterpret_cast<const float*>(z.view().data)[i];
      y.y[i] = std::max(0.0, g.y[i] * u.y[i] + add);
      y.scale[i] = g.scale[i] * u.scale[i] + std::abs(add);
    }
    EXPECT_TRUE(CompareToReference(ViewOf(response.outputs(0).tensor()), y, 1e-5).ok());
    EXPECT_TRUE(CompareToReference(ViewOf(response.outputs(1).tensor()), g, DefaultTolerance(DType::kBf16, 96)).ok());
    EXPECT_GT(response.timing().kernel().nanos(), 0);
  }
  for (const auto& device : devices_) EXPECT_EQ(device->runs(), 2);
}

TEST_F(PlacementTest, WhatShardsCannotDoIsSaid) {
  Start({32 * kMiB, 32 * kMiB});
  const DenseMatrix square = RandomMatrix(DType::kF16, 128, 128, 0.5, 1);
  ASSERT_TRUE(Register("sharded", square, pb::PLACEMENT_SHARDED).ok());
  ASSERT_TRUE(Register("single", square, pb::PLACEMENT_SINGLE).ok());
  const DenseMatrix x = RandomMatrix(DType::kF16, 1, 128, 0, 2);
  pb::ExecuteResponse response;
  pb::ExecuteRequest chain = MatmulRequest("sharded", x.view());
  AddMatmul(chain.mutable_program(), "z", "sharded", "y");
  const absl::Status deep = Execute(chain, &response);
  EXPECT_EQ(deep.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(deep.message()), HasSubstr("program.steps[1].matmul.input: \"y\""));
  EXPECT_THAT(std::string(deep.message()), HasSubstr("make two requests"));
  pb::ExecuteRequest mixed = MatmulRequest("sharded", x.view());
  AddMatmul(mixed.mutable_program(), "z", "single", "x");
  const absl::Status status = Execute(mixed, &response);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("sharded over cpu:0, cpu:1"));
  pb::ExecuteRequest residual = MatmulRequest("sharded", x.view());
  pb::Step* step = residual.mutable_program()->add_steps();
  step->set_name("r");
  step->mutable_add()->set_left("y");
  step->mutable_add()->set_right("x");
  EXPECT_EQ(Execute(residual, &response).code(), absl::StatusCode::kFailedPrecondition);
  const DenseMatrix thin = RandomMatrix(DType::kF16, 1, 128, 0.5, 3);
  const auto refused = Register("thin", thin, pb::PLACEMENT_SHARDED);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(refused.status()), "spec.placement");
}

TEST_F(PlacementTest, ARegistrationThatFitsOnOneDeviceOnlyLeavesNothing) {
  Start({64 * kMiB, kMiB / 4});
  const DenseMatrix w = RandomMatrix(DType::kF16, 1024, 1024, 0.5, 1);
  for (const pb::Placement placement : {pb::PLACEMENT_REPLICATED, pb::PLACEMENT_SHARDED}) {
    const auto refused = Register("w", w, placement);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
    EXPECT_EQ(Used(0) + Used(1), 0);
  }
  EXPECT_TRUE(Register("w", w, pb::PLACEMENT_SINGLE).ok());
}

TEST_F(PlacementTest, CancelAndDeadlineReachEveryShard) {
  Start({32 * kMiB, 32 * kMiB});
  const DenseMatrix w = RandomMatrix(DType::kF16, 128, 64, 0.5, 1);
  ASSERT_TRUE(Register("w", w, pb::PLACEMENT_SHARDED).ok());
  const DenseMatrix x = RandomMatrix(DType::kF16, 1, 64, 0, 2);
  const pb::ExecuteRequest request = MatmulRequest("w", x.view());
  for (const auto& device : devices_) device->Hold();
  pb::ExecuteResponse first;
  std::thread occupier([&] { EXPECT_TRUE(Execute(request, &first).ok()); });
  for (const auto& device : devices_) device->AwaitRuns(1);
  pb::ExecuteResponse second;
  absl::Status result;
  absl::Notification ended;
  const Engine::Call call = engine_->Execute(request, &second, absl::InfiniteFuture(), [&](absl::Status status) {
    result = std::move(status);
    ended.Notify();
  });
  EXPECT_EQ(devices_[0]->executor().depth() + devices_[1]->executor().depth(), 2);
  engine_->Cancel(call);
  ended.WaitForNotification();
  EXPECT_EQ(result.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(devices_[0]->executor().depth() + devices_[1]->executor().depth(), 0);
  for (const auto& device : devices_) device->Release();
  occupier.join();
  engine_->Drain();
  ASSERT_TRUE(testing::UnregisterFrom(*catalog_, "w").ok());
  EXPECT_EQ(Used(0) + Used(1), 0);
}

}  // namespace
}  // namespace spmmd::server
