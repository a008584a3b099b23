// Programs on a CUDA device against a double-precision reference, and what the device accounts and reports. Runs on a
// GPU, and on every machine over the fake library.
#include "server/device/cuda_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "tests/server/device/cuda_harness.h"

namespace spmmd::server {
namespace {

using testing::AddMatmul;
using testing::CudaCore;
using testing::DenseSpec;
using ::testing::HasSubstr;
using testing::MatmulRequest;
using testing::RandomMatrix;
using testing::Series;
using testing::SetTensor;
using ::testing::StartsWith;
using testing::Unmeasured;
using testing::ViewOf;

using CudaDeviceTest = testing::CudaTest;

// Kernels round fp32 activations to the weights' type.
double ToleranceOf(DType weights, DType x, DType y, int64_t k) {
  double tolerance = DefaultTolerance(y, k);
  if (x != weights) tolerance += DefaultTolerance(weights, k);
  return tolerance;
}

TEST_F(CudaDeviceTest, DescribesItself) {
  CudaCore core(library_, {});
  pb::DeviceInfoResponse response;
  core.engine.DescribeDevices(&response);
  ASSERT_EQ(response.devices_size(), 1);
  const pb::Device& device = response.devices(0);
  EXPECT_EQ(device.id(), "cuda:0");
  EXPECT_EQ(device.backend(), "cuda");
  EXPECT_THAT(device.uuid(), StartsWith("GPU-"));
  EXPECT_EQ(device.uuid().size(), 40);
  EXPECT_EQ(device.architecture(), "9.0");
  EXPECT_GT(device.memory_budget_bytes(), 0);
  EXPECT_LE(device.memory_budget_bytes(), device.memory_total_bytes() / 10 * 9 + 10);
  EXPECT_GT(device.measured_bandwidth_bytes_per_second(), 0);
  EXPECT_EQ(device.memory_weights_bytes() + device.memory_workspace_bytes() + device.memory_staging_bytes(), 0);
  EXPECT_TRUE(device.healthy());
  std::printf("%s %s %s %.2f TB/s\n", device.name().c_str(), device.uuid().c_str(), device.architecture().c_str(),
              device.measured_bandwidth_bytes_per_second() * 1e-12);
}

TEST_F(CudaDeviceTest, EveryFormatTypeAndWidth) {
  CudaCore core(library_, Unmeasured());
  constexpr int64_t kM = 200;
  constexpr int64_t kK = 264;
  std::vector<float> bias(kM);
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = 0.01f * static_cast<float>(i) - 1;
  for (const pb::Format format :
       {pb::FORMAT_DENSE, pb::FORMAT_BITMAP, pb::FORMAT_ROW_STREAM, pb::FORMAT_RLC_CSC, pb::FORMAT_THREE_LAYER}) {
    for (const DType weights : {DType::kF16, DType::kBf16}) {
      const DenseMatrix w = RandomMatrix(weights, kM, kK, 0.5, 1);
      pb::LayerSpec spec = DenseSpec("w", w.view());
      spec.set_format(format);
      spec.set_has_bias(true);
      const auto layer = core.Register(spec, w.view(), bias);
      ASSERT_TRUE(layer.ok()) << layer.status();
      EXPECT_EQ(layer->format(), format);
      ASSERT_EQ(layer->residency_size(), 1);
      EXPECT_GE(layer->residency(0).bytes(), layer->bytes());
      for (const DType type : {weights, DType::kF32}) {
        for (const int64_t n : {1, 2, 3, 8, 33, 100}) {
          const DenseMatrix x = RandomMatrix(type, n, kK, 0, 2);
          pb::ExecuteRequest request = MatmulRequest("w", x.view());
          pb::Program& program = *request.mutable_program();
          program.mutable_steps(0)->mutable_matmul()->set_activation(pb::ACTIVATION_SILU);
          program.mutable_outputs(0)->set_dtype(ToProto(type));
          pb::ExecuteResponse response;
          const absl::Status status = core.Execute(request, &response);
          ASSERT_TRUE(status.ok()) << status;
          const absl::Status compared = CompareToReference(ViewOf(response.outputs(0).tensor()),
                                                           ReferenceMatmul(w.view(), x.view(), bias, Activation::kSilu),
                                                           ToleranceOf(weights, type, type, kK));
          EXPECT_TRUE(compared.ok()) << pb::Format_Name(format) << " n " << n << ": " << compared;
          EXPECT_GT(response.timing().kernel().nanos(), 0);
        }
      }
    }
  }
}

TEST_F(CudaDeviceTest, MlpInOneCallStaysOnTheDevice) {
  CudaCore core(library_, Unmeasured());
  const DenseMatrix gate = RandomMatrix(DType::kF16, 384, 128, 0.5, 1);
  const DenseMatrix up = RandomMatrix(DType::kF16, 384, 128, 0.6, 2);
  const DenseMatrix down = RandomMatrix(DType::kF16, 128, 384, 0.7, 3);
  for (const auto& [name, w] : {std::pair{"gate", &gate}, {"up", &up}, {"down", &down}}) {
    ASSERT_TRUE(core.Register(name, w->view()).ok());
  }
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
  step->set_name("y");
  step->mutable_add()->set_left("d");
  step->mutable_add()->set_right("x");
  step->mutable_add()->set_activation(pb::ACTIVATION_RELU);
  program->add_outputs()->set_step("y");
  program->add_outputs()->set_step("g");
  program->mutable_outputs(1)->set_dtype(pb::DATA_TYPE_BF16);
  program->add_outputs()->set_step("g");
  program->add_outputs()->set_step("u");
  program->mutable_outputs(3)->set_dtype(pb::DATA_TYPE_F16);

  for (const int64_t n : {1, 5, 70}) {
    const DenseMatrix x = RandomMatrix(DType::kF16, n, 128, 0, 4);
    request.clear_inputs();
    request.add_inputs()->set_name("x");
    SetTensor(x.view(), request.mutable_inputs(0)->mutable_dense());
    pb::ExecuteResponse response;
    const absl::Status status = core.Execute(request, &response);
    ASSERT_TRUE(status.ok()) << status;
    const Reference g = ReferenceMatmul(gate.view(), x.view(), {}, Activation::kSilu);
    const Reference u = ReferenceMatmul(up.view(), x.view());
    DenseMatrix h = *DenseMatrix::Create(DType::kF32, n, 384);
    for (size_t i = 0; i < g.y.size(); ++i) {
      reinterpret_cast<float*>(h.mutable_view().data)[i] = static_cast<float>(g.y[i] * u.y[i]);
    }
    Reference y = ReferenceMatmul(down.view(), h.view());
    for (size_t i = 0; i < y.y.size(); ++i) {
      const double residual = F16ToFloat(reinterpret_cast<const uint16_t*>(x.view().data)[i]);
      y.y[i] = std::max(0.0, y.y[i] + residual);
      y.scale[i] += std::abs(residual);
    }
    const auto compare = [&](int output, const Reference& reference, double tolerance) {
      const absl::Status compared = CompareToReference(ViewOf(response.outputs(output).tensor()), reference, tolerance);
      EXPECT_TRUE(compared.ok()) << "output " << output << " n " << n << ": " << compared;
    };
    compare(0, y, 2 * DefaultTolerance(DType::kF16, 384));  // h is rounded on its way into `down`
    compare(1, g, DefaultTolerance(DType::kBf16, 128));
    compare(2, g, DefaultTolerance(DType::kF32, 128));
    compare(3, u, DefaultTolerance(DType::kF16, 128));
  }
}

// From the second time on a request is replayed as a graph.
TEST_F(CudaDeviceTest, RepeatedRequestsStayRight) {
  CudaCore core(library_, Unmeasured());
  const DenseMatrix up = RandomMatrix(DType::kF16, 320, 192, 0.5, 1);
  const DenseMatrix down = RandomMatrix(DType::kF16, 192, 320, 0.5, 2);
  for (const pb::Format format : {pb::FORMAT_BITMAP, pb::FORMAT_DENSE, pb::FORMAT_ROW_STREAM, pb::FORMAT_RLC_CSC}) {
    for (const auto& [name, w] : {std::pair{"up", &up}, {"down", &down}}) {
      pb::LayerSpec spec = DenseSpec(name, w->view());
      spec.set_format(format);
      const auto layer = core.Register(spec, w->view());
      ASSERT_TRUE(layer.ok()) << layer.status();
    }
    for (int round = 0; round < 4; ++round) {
      for (const int64_t n : {1, 2, 24}) {
        for (const uint32_t seed : {5u, 6u}) {
          const DenseMatrix x = RandomMatrix(DType::kF16, n, 192, 0, seed);
          pb::ExecuteRequest request = MatmulRequest("up", x.view());
          pb::Program& program = *request.mutable_program();
          AddMatmul(&program, "d", "down", "y");
          program.add_outputs()->set_step("d");
          program.mutable_outputs(0)->set_dtype(pb::DATA_TYPE_F16);
          pb::ExecuteResponse response;
          const absl::Status status = core.Execute(request, &response);
          ASSERT_TRUE(status.ok()) << status;
          const Reference h = ReferenceMatmul(up.view(), x.view());
          absl::Status compared =
              CompareToReference(ViewOf(response.outputs(0).tensor()), h, DefaultTolerance(DType::kF16, 192));
          EXPECT_TRUE(compared.ok()) << pb::Format_Name(format) << " round " << round << " n " << n << ": " << compared;
          DenseMatrix between = *DenseMatrix::Create(DType::kF32, n, 320);
          for (size_t i = 0; i < h.y.size(); ++i) {
            reinterpret_cast<float*>(between.mutable_view().data)[i] = static_cast<float>(h.y[i]);
          }
          compared =
              CompareToReference(ViewOf(response.outputs(1).tensor()), ReferenceMatmul(down.view(), between.view()),
                                 2 * DefaultTolerance(DType::kF16, 320));
          EXPECT_TRUE(compared.ok()) << pb::Format_Name(format) << " round " << round << " n " << n << ": " << compared;
          EXPECT_GT(response.timing().kernel().nanos(), 0);
        }
      }
    }
  }
}

// Formats whose kernels take several layers of one input in a launch, and those that do not.
TEST_F(CudaDeviceTest, LayersOfOneInput) {
  CudaCore core(library_, Unmeasured());
  const DenseMatrix q = RandomMatrix(DType::kF16, 256, 192, 0.5, 1);
  const DenseMatrix k = RandomMatrix(DType::kF16, 130, 192, 0.5, 2);
  const DenseMatrix v = RandomMatrix(DType::kF16, 64, 192, 0.7, 3);
  for (const pb::Format format : {pb::FORMAT_ROW_STREAM, pb::FORMAT_RLC_CSC, pb::FORMAT_BITMAP}) {
    for (const auto& [name, w] : {std::pair{"q", &q}, {"k", &k}, {"v", &v}}) {
      pb::LayerSpec spec = DenseSpec(name, w->view());
      spec.set_format(format);
      ASSERT_TRUE(core.Register(spec, w->view()).ok());
    }
    for (const int64_t n : {1, 2, 5}) {
      const DenseMatrix x = RandomMatrix(DType::kF16, n, 192, 0, static_cast<uint32_t>(n));
      pb::ExecuteRequest request = MatmulRequest("q", x.view());
      for (const char* name : {"k", "v"}) {
        AddMatmul(request.mutable_program(), name, name, "x");
        request.mutable_program()->add_outputs()->set_step(name);
      }
      for (int round = 0; round < 3; ++round) {
        pb::ExecuteResponse response;
        const absl::Status status = core.Execute(request, &response);
        ASSERT_TRUE(status.ok()) << status;
        for (int i = 0; i < 3; ++i) {
          const DenseMatrix& w = i == 0 ? q : i == 1 ? k : v;
          const absl::Status compared =
              CompareToReference(ViewOf(response.outputs(i).tensor()), ReferenceMatmul(w.view(), x.view()),
                                 DefaultTolerance(DType::kF32, 192));
          EXPECT_TRUE(compared.ok()) << pb::Format_Name(format) << " n " << n << " output " << i << ": " << compared;
        }
      }
    }
  }
}

pb::ExecuteRequest SparseRequest(const std::string& layer, const DenseMatrix& x) {
  pb::ExecuteRequest request = MatmulRequest(layer, x.view());
  request.clear_inputs();
  request.add_inputs()->set_name("x");
  pb::SparseTensor& sparse = *request.mutable_inputs(0)->mutable_sparse();
  sparse.set_dtype(pb::DATA_TYPE_F32);
  sparse.add_shape(x.rows());
  sparse.add_shape(x.cols());
  std::vector<uint64_t> offsets = {0};
  std::vector<uint32_t> indices;
  std::vector<float> values;
  for (int64_t row = 0; row < x.rows(); ++row) {
    for (int64_t col = 0; col < x.cols(); ++col) {
      const float value = reinterpret_cast<const float*>(x.view().row(row))[col];
      if (value == 0) continue;
      indices.push_back(static_cast<uint32_t>(col));
      values.push_back(value);
    }
    offsets.push_back(indices.size());
  }
  sparse.set_row_offsets(testing::Bytes(offsets));
  sparse.set_indices(testing::Bytes(indices));
  sparse.set_values(testing::Bytes(values));
  return request;
}

TEST_F(CudaDeviceTest, SparseActivationsAndThresholds) {
  CudaCore core(library_, Unmeasured());
  constexpr int64_t kM = 600;
  constexpr int64_t kK = 520;
  const DenseMatrix w = RandomMatrix(DType::kF16, kM, kK, 0.5, 1);
  for (const pb::Format format : {pb::FORMAT_BITMAP, pb::FORMAT_RLC_CSC, pb::FORMAT_DENSE}) {
    pb::LayerSpec spec = DenseSpec("w", w.view());
    spec.set_format(format);
    ASSERT_TRUE(core.Register(spec, w.view()).ok());
    for (const int64_t n : {1, 3}) {
      const DenseMatrix x = RandomMatrix(DType::kF32, n, kK, 0.7, 2);
      for (const float threshold : {-1.0f, 0.0f, 0.5f}) {
        DenseMatrix kept = RandomMatrix(DType::kF32, n, kK, 0.7, 2);
        auto* values = reinterpret_cast<float*>(kept.mutable_view().data);
        for (int64_t i = 0; i < n * kK; ++i) {
          if (std::abs(values[i]) <= threshold) values[i] = 0;
        }
        const Reference reference = ReferenceMatmul(w.view(), kept.view());
        for (pb::ExecuteRequest request : {SparseRequest("w", x), MatmulRequest("w", x.view())}) {
          if (threshold >= 0) {
            request.mutable_program()->mutable_steps(0)->mutable_matmul()->set_activation_threshold(threshold);
          }
          pb::ExecuteResponse response;
          const absl::Status status = core.Execute(request, &response);
          ASSERT_TRUE(status.ok()) << status;
          const absl::Status compared = CompareToReference(ViewOf(response.outputs(0).tensor()), reference,
                                                           ToleranceOf(DType::kF16, DType::kF32, DType::kF32, kK));
          EXPECT_TRUE(compared.ok()) << pb::Format_Name(format) << " n " << n << " threshold " << threshold << ": "
                                     << compared;
        }
      }
    }
  }
}

TEST_F(CudaDeviceTest, ARequestLargerThanTheStagingBuffers) {
  CudaCore core(library_, Unmeasured());
  const DenseMatrix w = RandomMatrix(DType::kF16, 24, 4096, 0.5, 1);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  // 14 MB up: four slots; and, turned around, down.
  const DenseMatrix x = RandomMatrix(DType::kF16, 1700, 4096, 0, 2);
  pb::ExecuteResponse response;
  ASSERT_TRUE(core.Execute(MatmulRequest("w", x.view()), &response).ok());
  EXPECT_TRUE(CompareToReference(ViewOf(response.outputs(0).tensor()), ReferenceMatmul(w.view(), x.view()),
                                 DefaultTolerance(DType::kF32, 4096))
                  .ok());
  const DenseMatrix tall = RandomMatrix(DType::kF16, 4096, 24, 0.5, 3);
  ASSERT_TRUE(core.Register("tall", tall.view()).ok());
  const DenseMatrix narrow = RandomMatrix(DType::kF16, 900, 24, 0, 4);
  ASSERT_TRUE(core.Execute(MatmulRequest("tall", narrow.view()), &response).ok());
  EXPECT_TRUE(CompareToReference(ViewOf(response.outputs(0).tensor()), ReferenceMatmul(tall.view(), narrow.view()),
                                 DefaultTolerance(DType::kF32, 24))
                  .ok());
}

// Large tensors beside the messages: the same bits as in them, from slices of any size, small ones and staged ones too.
TEST_F(CudaDeviceTest, PayloadsBesideTheMessages) {
  CudaCore core(library_, Unmeasured());
  const DenseMatrix w = RandomMatrix(DType::kF16, 264, 512, 0.5, 1);
  const DenseMatrix v = RandomMatrix(DType::kF16, 8, 512, 0.5, 2);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  ASSERT_TRUE(core.Register("v", v.view()).ok());
  std::mt19937 random(3);
  for (const int64_t rows : {1, 5, 40, 300, 6000}) {
    const DenseMatrix x = RandomMatrix(DType::kF16, rows, 512, 0, 4);
    pb::ExecuteRequest request;
    pb::Program& program = *request.mutable_program();
    program.add_inputs("x");
    AddMatmul(&program, "a", "w", "x");
    AddMatmul(&program, "b", "v", "x");
    for (const char* step : {"a", "b", "a"}) program.add_outputs()->set_step(step);
    request.add_inputs()->set_name("x");
    SetTensor(x.view(), request.mutable_inputs(0)->mutable_dense());
    pb::ExecuteResponse expected;
    ASSERT_TRUE(core.Execute(request, &expected).ok());

    const std::string data = request.inputs(0).dense().data();
    request.mutable_inputs(0)->mutable_dense()->mutable_data()->clear();
    for (int repeat = 0; repeat < 3; ++repeat) {  // the later ones may be replayed
      Payloads payloads;
      payloads.inputs.resize(1);
      payloads.inputs[0].bytes = data.size();
      for (size_t at = 0; at < data.size();) {
        const size_t size = std::min<size_t>(data.size() - at, 1 + random() % 40000);
        payloads.inputs[0].pieces.emplace_back(reinterpret_cast<const std::byte*>(data.data()) + at, size);
        at += size;
      }
      Engine::Caller caller;
      caller.payloads = &payloads;
      pb::ExecuteResponse response;
      absl::Notification ended;
      absl::Status status;
      core.engine.Execute(request, &response, absl::InfiniteFuture(), caller, [&](absl::Status result) {
        status = std::move(result);
        ended.Notify();
      });
      ended.WaitForNotification();
      ASSERT_TRUE(status.ok()) << status;
      payloads.outputs.resize(3);
      for (int o = 0; o < 3; ++o) {
        const std::string& whole = expected.outputs(o).tensor().data();
        const HostBuffer& beside = payloads.outputs[static_cast<size_t>(o)];
        EXPECT_EQ(beside.data() != nullptr, whole.size() >= Payloads::kMinBytes);
        const std::string got = beside.data() == nullptr
                                    ? response.outputs(o).tensor().data()
                                    : std::string(reinterpret_cast<const char*>(beside.data()), beside.bytes());
        EXPECT_TRUE(got == whole) << rows << " rows, output " << o;
      }
    }
    // Too few bytes: said as ever.
    Payloads cut_short;
    cut_short.inputs.resize(1);
    cut_short.inputs[0].pieces.emplace_back(reinterpret_cast<const std::byte*>(data.data()), data.size() - 2);
    cut_short.inputs[0].bytes = data.size() - 2;
    Engine::Caller caller;
    caller.payloads = &cut_short;
    pb::ExecuteResponse response;
    core.engine.Execute(request, &response, absl::InfiniteFuture(), caller, [&](const absl::Status& status) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()), HasSubstr("inputs[0].dense.data: expected"));
    });
  }
  EXPECT_GT(core.device->host_buffers().pinned_bytes(), 0);
}

TEST_F(CudaDeviceTest, AutoChoosesByDensityAndActivations) {
  CudaCore core(library_, Unmeasured());
  const DenseMatrix sparse = RandomMatrix(DType::kF16, 2048, 2048, 0.5, 1);
  auto layer = core.Register("sparse", sparse.view());
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->format(), pb::FORMAT_BITMAP);
  EXPECT_THAT(layer->format_reason(), HasSubstr("of the elements are zero"));
  const DenseMatrix small = RandomMatrix(DType::kF16, 1536, 384, 0.5, 1);
  layer = core.Register("small", small.view());
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->format(), pb::FORMAT_DENSE);
  EXPECT_THAT(layer->format_reason(), HasSubstr("as fast dense"));

  FormatQuery query{DType::kF16, 4096, 4096, 4096 * 4096 / 2};
  EXPECT_EQ(core.device->ChooseFormat(query).format, Format::kBitmapGpu);
  query.nnz = 4096 * 4096 / 10 * 9;
  EXPECT_EQ(core.device->ChooseFormat(query).format, Format::kDense);
  query.nnz = 4096 * 4096 / 2;
  query.two_of_four = true;
  EXPECT_EQ(core.device->ChooseFormat(query).format, Format::kThreeLayer);
  query.nnz = 4096 * 4096 / 5;  // better off with what it has
  EXPECT_EQ(core.device->ChooseFormat(query).format, Format::kBitmapGpu);
  query = {DType::kF16, 11008, 4096, 11008 * 4096 / 2, /*sparse_activations=*/true};
  FormatChoice choice = core.device->ChooseFormat(query);
  EXPECT_EQ(choice.format, Format::kColumnPiece);
  EXPECT_THAT(choice.reason, HasSubstr("activation_threshold"));
  // Too small for skipping columns to pay before most of them are skipped.
  query = {DType::kF16, 1024, 1024, 1024 * 1024 / 2, /*sparse_activations=*/true};
  choice = core.device->ChooseFormat(query);
  EXPECT_EQ(choice.format, Format::kRowStream);
  EXPECT_THAT(choice.reason, HasSubstr("activation_threshold"));

  const DenseMatrix fp32 = RandomMatrix(DType::kF32, 16, 16, 0.5, 3);
  const auto refused = core.Register("fp32", fp32.view());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(refused.status()), "spec.store_dtype");
  pb::LayerSpec spec = DenseSpec("fp32", fp32.view());
  spec.set_store_dtype(pb::DATA_TYPE_BF16);
  EXPECT_TRUE(core.Register(spec, fp32.view()).ok());
}

TEST_F(CudaDeviceTest, AccountsForEveryByte) {
  CudaCore core(library_, Unmeasured());
  MemoryBudget& budget = core.device->budget();
  const DenseMatrix w = RandomMatrix(DType::kF16, 512, 512, 0.5, 1);
  pb::LayerSpec spec = DenseSpec("w", w.view());
  spec.set_has_bias(true);
  const auto layer = core.Register(spec, w.view(), std::vector<float>(512, 1.0f));
  ASSERT_TRUE(layer.ok());
  EXPECT_EQ(budget.used(MemoryKind::kWeights), layer->residency(0).bytes());
  EXPECT_EQ(budget.used(), budget.used(MemoryKind::kWeights));

  const DenseMatrix x = RandomMatrix(DType::kF16, 4, 512, 0, 2);
  pb::ExecuteResponse response;
  ASSERT_TRUE(core.Execute(MatmulRequest("w", x.view()), &response).ok());
  EXPECT_GT(budget.used(MemoryKind::kWorkspace), 0);
  EXPECT_GT(budget.used(MemoryKind::kStaging), 0);
  const uint64_t after_one = budget.used();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(core.Execute(MatmulRequest("w", x.view()), &response).ok());
  EXPECT_EQ(budget.used(), after_one);

  EXPECT_EQ(Series(core.metrics, "spmmd_device_memory_bytes{device=\"cuda:0\",kind=\"weights\"}"),
            static_cast<double>(layer->residency(0).bytes()));
  EXPECT_GT(
      Series(core.metrics,
             "spmmd_kernel_bytes_total{device=\"cuda:0\",kernel=\"" + std::string(library_->kernel_name(0)) + "\"}")
              .value_or(0) +
          [&] {
            double sum = 0;
            for (int32_t k = 1; k < library_->kernel_count(); ++k) {
              sum += Series(core.metrics, "spmmd_kernel_bytes_total{device=\"cuda:0\",kernel=\"" +
                                              std::string(library_->kernel_name(k)) + "\"}")
                         .value_or(0);
            }
            return sum;
          }(),
      0);
  pb::UnregisterLayerResponse removed;
  ASSERT_TRUE(testing::UnregisterFrom(core.catalog, "w", 0, &removed).ok());
  EXPECT_EQ(removed.freed_bytes(), layer->residency(0).bytes());
  EXPECT_EQ(budget.used(MemoryKind::kWeights), 0);
}

TEST_F(CudaDeviceTest, RefusesWhatDoesNotFit) {
  DeviceOptions options = Unmeasured();
  options.memory_limit_bytes = uint64_t{8} << 20;
  CudaCore core(library_, options);
  const DenseMatrix w = RandomMatrix(DType::kF16, 2048, 4096, 0.5, 1);
  const auto refused = core.Register("w", w.view());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  EXPECT_EQ(ReasonOf(refused.status()), reason::kDeviceMemory);
  EXPECT_EQ(core.device->budget().used(), 0);
  // A request whose intermediates do not fit fails alone.
  const DenseMatrix small = RandomMatrix(DType::kF16, 64, 64, 0.5, 1);
  pb::LayerSpec spec = DenseSpec("small", small.view());
  spec.set_format(pb::FORMAT_BITMAP);  // AUTO's choice, DENSE, needs cublasLt's workspace
  ASSERT_TRUE(core.Register(spec, small.view()).ok());
  const DenseMatrix wide = RandomMatrix(DType::kF16, 60000, 64, 0, 2);
  pb::ExecuteResponse response;
  EXPECT_EQ(core.Execute(MatmulRequest("small", wide.view()), &response).code(), absl::StatusCode::kResourceExhausted);
  const DenseMatrix x = RandomMatrix(DType::kF16, 2, 64, 0, 2);
  EXPECT_TRUE(core.Execute(MatmulRequest("small", x.view()), &response).ok());
}

TEST_F(CudaDeviceTest, BenchmarksBesideDense) {
  CudaCore core(library_, Unmeasured());
  const DenseMatrix w = RandomMatrix(DType::kBf16, 256, 512, 0.5, 1);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  pb::BenchmarkRequest request;
  request.mutable_layer()->set_name("w");
  request.add_tokens(1);
  request.add_tokens(16);
  request.set_repetitions(3);
  pb::BenchmarkResponse response;
  const absl::Status status = core.engine.Benchmark(request, &response);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(response.speeds_size(), 2);
  for (const pb::LayerSpeed& speed : response.speeds()) {
    EXPECT_GT(speed.seconds_p50(), 0);
    EXPECT_GT(speed.dense_seconds_p50(), 0);
    EXPECT_FALSE(speed.kernel().empty());
  }
}

}  // namespace
}  // namespace spmmd::server
