// Every kernel with dense activations against float64: odd shapes, densities, dtypes, alignments, epilogues; outputs
// poisoned before and fenced around; determinism; graphs; bad input.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/format/bitmap_gpu.h"
#include "kernels/format/packed_layer.h"
#include "kernels/format/reference.h"
#include "tests/kernels/cuda/dense_call.h"
#include "tests/kernels/cuda/gpu.h"

namespace spmmd::gpu_test {
namespace {

DenseMatrix RandomMatrix(DType dtype, int64_t rows, int64_t cols, double density, double sigma, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  std::vector<double> scale(static_cast<size_t>(cols));
  for (double& s : scale) s = std::exp(sigma * static_cast<double>(normal(rng)));
  DenseMatrix wide = *DenseMatrix::Create(DType::kF32, rows, cols);
  for (int64_t r = 0; r < rows; ++r) {
    auto* row = reinterpret_cast<float*>(wide.mutable_view().row(r));
    for (int64_t c = 0; c < cols; ++c) {
      if (uniform(rng) < density * scale[static_cast<size_t>(c)]) row[c] = normal(rng);
    }
  }
  DenseMatrix out = *DenseMatrix::Create(dtype, rows, cols);
  EXPECT_TRUE(ConvertDense(wide.view(), out.mutable_view()).ok());
  return out;
}

class SpmmTest : public GpuTest {
 protected:
  // All kernels that take this layer, against the reference.
  void Check(const PackedLayer& packed, const DenseMatrix& w, int64_t n, const Options& options, uint32_t seed) {
    const LayerPtr layer = Upload(packed);
    ASSERT_NE(layer, nullptr);
    const DenseMatrix x = RandomMatrix(options.x_dtype, n, w.cols(), 1.0, 0.0, seed);
    DenseCall call(w, x, options, seed);
    int ran = 0;
    for (int32_t kernel = 0; kernel < gpu().cuda->kernel_count(); ++kernel) {
      if (gpu().cuda->can_implement(layer.get(), kernel, &call.call) != SPMMD_CUDA_OK) continue;
      SCOPED_TRACE(::testing::Message() << gpu().cuda->kernel_name(kernel) << " M=" << w.rows() << " K=" << w.cols()
                                        << " N=" << n << " " << Name(w.dtype()) << " x " << Name(options.x_dtype)
                                        << " y " << Name(options.y_dtype));
      call.Run(layer.get(), kernel, workspace_);
      if (HasFailure()) return;
      ++ran;
    }
    // Not every layer has every cut.
    EXPECT_GE(ran, options.flags >> SPMMD_CUDA_FLAG_VARIANT_SHIFT == 0 ? 1 : 0);
  }

  // The layer in every format that kernels with dense activations execute. Not dense under racecheck: that breaks
  // cuBLASLt's kernels, which then read where they must not.
  static std::vector<PackedLayer> PackAll(const DenseMatrix& w) {
    std::vector<PackedLayer> layers;
    const char* sanitizer = std::getenv("SPMMD_GPU_SANITIZER");
    if (sanitizer == nullptr || std::strcmp(sanitizer, "racecheck") != 0) {
      layers.push_back(*Pack(Format::kDense, w.view()));
    }
    for (const int chunk_cols : {128, 256}) layers.push_back(*bitmap_gpu::Pack(w.view(), {}, chunk_cols));
    return layers;
  }

  Workspace workspace_;
};

TEST_F(SpmmTest, RandomShapesDensitiesAndTypes) {
  std::mt19937 rng(20240601);
  const auto pick = [&](auto... values) {
    const std::vector<std::common_type_t<decltype(values)...>> all = {values...};
    return all[rng() % all.size()];
  };
  const int rounds = std::getenv("SPMMD_GPU_SANITIZER") == nullptr ? 60 : 12;  // a sanitizer takes its time
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    const auto m = static_cast<int64_t>(rng() % 300 + 1);
    const auto k = static_cast<int64_t>(rng() % 300 + 1);
    const auto n = static_cast<int64_t>(rng() % 130 + 1);
    const DType dtype = pick(DType::kF16, DType::kBf16);
    const DenseMatrix w =
        RandomMatrix(dtype, m, k, pick(0.0, 0.02, 0.3, 0.5, 0.7, 1.0), pick(0.0, 1.0), static_cast<uint32_t>(round));
    Options options;
    options.x_dtype = pick(DType::kF16, DType::kBf16, DType::kF32);
    options.y_dtype = pick(DType::kF16, DType::kBf16, DType::kF32);
    options.activation = pick(Activation::kNone, Activation::kNone, Activation::kRelu, Activation::kGelu,
                              Activation::kGeluTanh, Activation::kSilu);
    options.bias = pick(false, true);
    options.x_pad = pick(0, 0, 1, 8);
    options.x_offset = pick(0, 0, 1, 3);
    options.y_pad = pick(0, 0, 1, 8);
    options.y_offset = pick(0, 0, 1);
    options.flags = pick(0u, SPMMD_CUDA_FLAG_CHAIN);
    for (const PackedLayer& packed : PackAll(w)) Check(packed, w, n, options, static_cast<uint32_t>(round));
  }
}

// Shapes on which the schedules take every path: whole rounds, leftovers, splits of K, fewer row blocks than CTAs.
TEST_F(SpmmTest, LargeShapesOnEveryScheduleAreDeterministic) {
  const struct {
    int64_t m, k;
    double density;
    double sigma;
  } shapes[] = {{4096, 2048, 0.5, 0.0}, {2500, 4100, 0.5, 1.0}, {130, 20000, 0.4, 0.0}, {40, 9000, 1.0, 0.0},
                {16, 30000, 0.5, 0.0},  {9000, 300, 0.3, 0.5},  {2112, 9300, 0.5, 0.0}};
  for (const auto& shape : shapes) {
    const DenseMatrix w = RandomMatrix(DType::kBf16, shape.m, shape.k, shape.density, shape.sigma, 7);
    const std::vector<PackedLayer> layers = PackAll(w);
    for (const int64_t n : {2, 8, 13, 32, 64, 300}) {
      if (n > 64 && shape.m * shape.k > 3'000'000) continue;  // the reference takes too long
      Options options;
      options.x_dtype = DType::kBf16;
      options.y_dtype = DType::kF32;
      options.launches = 2;
      for (const PackedLayer& packed : layers) {
        Check(packed, w, n, options, 3);
        if (HasFailure()) return;
      }
    }
  }
}

// More than 64 tokens on each cut that spmm_tile knows: whole tiles, leftovers, and pairs of CTAs whose sums pass
// through the rings of X, in one round and in several.
TEST_F(SpmmTest, WideTilesOnEveryCut) {
  const struct { int64_t m, k, n; } problems[] = {{2500, 700, 300}, {700, 1111, 100}, {70, 520, 513}, {130, 700, 100}};
  const bool sanitized = std::getenv("SPMMD_GPU_SANITIZER") != nullptr;
  for (const auto& [m, k, n] : problems) {
    if (sanitized && m != 130) continue;
    const DenseMatrix w = RandomMatrix(DType::kF16, m, k, 0.5, 0.5, 11);
    for (const int chunk_cols : {128, 256}) {
      if (sanitized && chunk_cols != 128) continue;
      const PackedLayer packed = *bitmap_gpu::Pack(w.view(), {}, chunk_cols);
      for (uint32_t variant = 0; variant <= 6; ++variant) {
        SCOPED_TRACE(::testing::Message() << "cut " << variant);
        Options options;
        options.flags = variant << SPMMD_CUDA_FLAG_VARIANT_SHIFT;
        options.launches = sanitized ? 1 : 2;
        Check(packed, w, n, options, 5);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(SpmmTest, AnOutlierDenseChunkFits) {
  DenseMatrix w = RandomMatrix(DType::kF16, 600, 3000, 0.5, 0.0, 1);
  for (int64_t r = 32; r < 48; ++r) {
    auto* row = reinterpret_cast<uint16_t*>(w.mutable_view().row(r));
    for (int c = 512; c < 1024; ++c) row[c] = FloatToF16(0.5f + static_cast<float>(c % 7));
  }
  for (const PackedLayer& packed : PackAll(w)) {
    for (const int64_t n : {8, 32, 64}) Check(packed, w, n, {}, 9);
  }
}

TEST_F(SpmmTest, InfinityAndNanInXStayInTheirToken) {
  const DenseMatrix w = RandomMatrix(DType::kF16, 64, 256, 1.0, 0.0, 1);
  DenseMatrix x = RandomMatrix(DType::kF16, 4, 256, 1.0, 0.0, 2);
  reinterpret_cast<uint16_t*>(x.mutable_view().row(1))[17] = 0x7e00;
  const Reference reference = ReferenceMatmul(w.view(), x.view());
  for (const PackedLayer& packed : PackAll(w)) {
    const LayerPtr layer = Upload(packed);
    DeviceBuffer x_device(x.bytes());
    x_device.Upload(x.view().data, x.bytes());
    DeviceBuffer y(4 * 64 * 4);
    y.Fill(0xff);  // cuBLASLt writes by the copy engine, which initcheck does not see
    spmmd_cuda_matmul call = {};
    call.x = x_device.data();
    call.n = 4;
    call.x_stride = 256;
    call.x_dtype = 1;
    call.y_dtype = 3;
    call.y = y.data();
    call.y_stride = 64;
    uint64_t bytes = 0;
    GPU_OK(gpu().cuda->workspace_bytes(layer.get(), SPMMD_CUDA_KERNEL_AUTO, &call, &bytes));
    workspace_.Reserve(bytes);
    call.workspace = workspace_.data();
    call.workspace_bytes = bytes;
    GPU_OK(gpu().cuda->launch(layer.get(), SPMMD_CUDA_KERNEL_AUTO, &call, gpu().stream));
    const std::vector<std::byte> out = y.Download();
    const DenseView view{out.data(), DType::kF32, 4, 64, 64};
    const absl::Status status = CompareToReference(view, reference, DefaultTolerance(DType::kF32, 256));
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST_F(SpmmTest, ReplaysFromAGraph) {
  const DenseMatrix w = RandomMatrix(DType::kF16, 1000, 5000, 0.5, 0.0, 4);
  const DenseMatrix x = RandomMatrix(DType::kF16, 8, 5000, 1.0, 0.0, 5);
  const Reference reference = ReferenceMatmul(w.view(), x.view());
  for (const PackedLayer& packed : PackAll(w)) {
    for (const uint32_t flags : {0u, SPMMD_CUDA_FLAG_CHAIN}) {
      const LayerPtr layer = Upload(packed);
      DeviceBuffer x_device(x.bytes());
      x_device.Upload(x.view().data, x.bytes());
      DeviceBuffer y(8 * 1000 * 4);
      spmmd_cuda_matmul call = {};
      call.x = x_device.data();
      call.n = 8;
      call.x_stride = 5000;
      call.x_dtype = 1;
      call.y_dtype = 3;
      call.y = y.data();
      call.y_stride = 1000;
      call.flags = flags;
      uint64_t bytes = 0;
      GPU_OK(gpu().cuda->workspace_bytes(layer.get(), SPMMD_CUDA_KERNEL_AUTO, &call, &bytes));
      workspace_.Reserve(bytes);
      call.workspace = workspace_.data();
      call.workspace_bytes = bytes;
      spmmd_cuda_graph graph = nullptr;
      GPU_OK(gpu().cuda->graph_begin(gpu().device, gpu().stream));
      for (int i = 0; i < 5; ++i) {
        GPU_OK(gpu().cuda->launch(layer.get(), SPMMD_CUDA_KERNEL_AUTO, &call, gpu().stream));
      }
      GPU_OK(gpu().cuda->graph_end(gpu().device, gpu().stream, &graph));
      for (int replay = 0; replay < 3; ++replay) {
        y.Fill(0xff);
        GPU_OK(gpu().cuda->graph_launch(gpu().device, graph, gpu().stream));
        const std::vector<std::byte> out = y.Download();
        const DenseView view{out.data(), DType::kF32, 8, 1000, 1000};
        const absl::Status status = CompareToReference(view, reference, DefaultTolerance(DType::kF32, 5000));
        EXPECT_TRUE(status.ok()) << status;
      }
      GPU_OK(gpu().cuda->graph_destroy(gpu().device, graph));
    }
  }
}

// Layers of one launch: each its own shape, epilogue and types, bit for bit in its own place.
TEST_F(SpmmTest, GroupsShareALaunch) {
  struct Own {
    DenseMatrix w;
    LayerPtr layer{nullptr, nullptr};
    std::vector<float> bias;
    std::unique_ptr<DeviceBuffer> bias_device;
    std::unique_ptr<DeviceBuffer> y;
    Options options;
  };
  const int64_t shapes[][5] = {{500, 70, 16, 0, 900},
                               {64, 64, 0, 0, 128},
                               {1500, 300, 300, 0, 2000},
                               {33, 1000, 1, 17, 300},
                               {4096, 1024, 1024, 0, 256}};
  std::mt19937 rng(3);
  int ran = 0;
  for (const auto& shape : shapes) {
    const int64_t k = shape[4];
    for (const int chunk_cols : {128, 256}) {
      for (const int64_t n : {1, 8, 13, 32}) {
        const DType dtype = rng() % 2 == 0 ? DType::kF16 : DType::kBf16;
        const DenseMatrix x = RandomMatrix(dtype, n, k, 1.0, 0.0, 11);
        DeviceBuffer x_device(x.bytes());
        x_device.Upload(x.view().data, x.bytes());
        std::vector<Own> owns;
        std::vector<const spmmd_cuda_layer*> layers;
        std::vector<spmmd_cuda_matmul> calls;
        for (int i = 0; i < 4 && shape[i] > 0; ++i) {
          Own& own = owns.emplace_back();
          const int64_t m = shape[i];
          own.w = RandomMatrix(dtype, m, k, 0.5, i == 1 ? 1.0 : 0.0, static_cast<uint32_t>(i));
          own.layer = Upload(*bitmap_gpu::Pack(own.w.view(), {}, chunk_cols));
          own.options.y_dtype = i == 1 ? DType::kF32 : dtype;
          own.options.activation = i == 0 ? Activation::kSilu : Activation::kNone;
          own.options.y_pad = i == 2 ? 8 : 0;
          if (i == 2) own.bias.assign(static_cast<size_t>(m), 0.25f);
          own.bias_device = std::make_unique<DeviceBuffer>(own.bias.size() * 4);
          if (!own.bias.empty()) own.bias_device->Upload(own.bias.data(), own.bias.size() * 4);
          own.y = std::make_unique<DeviceBuffer>(static_cast<size_t>(n * (m + own.options.y_pad) + 64) *
                                                 SizeOf(own.options.y_dtype));
          own.y->Fill(0xff);
          spmmd_cuda_matmul& call = calls.emplace_back();
          call.x = x_device.data();
          call.n = n;
          call.x_stride = k;
          call.x_dtype = static_cast<int32_t>(dtype);
          call.y_dtype = static_cast<int32_t>(own.options.y_dtype);
          call.y = own.y->data();
          call.y_stride = m + own.options.y_pad;
          call.activation = static_cast<int32_t>(own.options.activation);
          if (!own.bias.empty()) call.bias = reinterpret_cast<const float*>(own.bias_device->data());
          layers.push_back(own.layer.get());
        }
        const auto count = static_cast<int32_t>(layers.size());
        for (int32_t kernel = 0; kernel < gpu().cuda->kernel_count(); ++kernel) {
          uint64_t bytes = 0;
          if (gpu().cuda->group_workspace_bytes(layers.data(), kernel, calls.data(), count, &bytes) != SPMMD_CUDA_OK) {
            continue;
          }
          SCOPED_TRACE(::testing::Message() << gpu().cuda->kernel_name(kernel) << " M=" << shape[0] << ".. K=" << k
                                            << " N=" << n << " chunks of " << chunk_cols);
          workspace_.Reserve(bytes);
          calls[0].workspace = workspace_.data();
          calls[0].workspace_bytes = bytes;
          for (const Own& own : owns) own.y->Fill(0xff);
          GPU_OK(gpu().cuda->launch_group(layers.data(), kernel, calls.data(), count, gpu().stream));
          for (const Own& own : owns) {
            const Reference reference = ReferenceMatmul(own.w.view(), x.view(), own.bias, own.options.activation);
            CheckOutput(own.y->Download(), n, own.w.rows(), own.options, reference, k);
          }
          if (HasFailure()) return;
          ++ran;
        }
      }
    }
  }
  spmmd_cuda_device_info info = {};
  GPU_OK(gpu().cuda->get_device_info(0, &info));
  if (info.usable == 1) {
    EXPECT_GE(ran, 40);
  }
}

TEST_F(SpmmTest, GroupsThatDoNotGoTogetherAreRefused) {
  const LayerPtr first = Upload(*bitmap_gpu::Pack(RandomMatrix(DType::kF16, 64, 300, 0.5, 0.0, 1).view(), {}, 128));
  const LayerPtr wide = Upload(*bitmap_gpu::Pack(RandomMatrix(DType::kF16, 64, 300, 0.5, 0.0, 1).view(), {}, 256));
  const LayerPtr other_k = Upload(*bitmap_gpu::Pack(RandomMatrix(DType::kF16, 64, 290, 0.5, 0.0, 1).view(), {}, 128));
  const LayerPtr bf16 = Upload(*bitmap_gpu::Pack(RandomMatrix(DType::kBf16, 64, 300, 0.5, 0.0, 1).view(), {}, 128));
  spmmd_cuda_matmul call = {};
  call.n = 4;
  call.x_stride = 300;
  call.x_dtype = 1;
  call.y_dtype = 1;
  call.y_stride = 64;
  for (const char* name : {"spmm_pair", "spmm_stream"}) {
    const int32_t kernel = gpu().cuda->find_kernel(name);
    uint64_t bytes = 0;
    const auto ask = [&](std::vector<const spmmd_cuda_layer*> layers, std::vector<spmmd_cuda_matmul> calls) {
      return gpu().cuda->group_workspace_bytes(layers.data(), kernel, calls.data(), static_cast<int32_t>(layers.size()),
                                               &bytes);
    };
    if (gpu().cuda->can_implement(first.get(), kernel, &call) != SPMMD_CUDA_OK) GTEST_SKIP() << "no such kernel here";
    GPU_OK(ask({first.get(), first.get()}, {call, call}));
    for (const LayerPtr* other : {&wide, &other_k, &bf16}) {
      EXPECT_EQ(ask({first.get(), other->get()}, {call, call}), SPMMD_CUDA_INVALID_ARGUMENT);
    }
    spmmd_cuda_matmul longer = call;
    longer.n = 5;
    EXPECT_EQ(ask({first.get(), first.get()}, {call, longer}), SPMMD_CUDA_INVALID_ARGUMENT);
    EXPECT_EQ(ask({first.get(), first.get(), first.get(), first.get(), first.get()}, {call, call, call, call, call}),
              SPMMD_CUDA_INVALID_ARGUMENT);
  }
}

class SpmmInputTest : public SpmmTest {
 protected:
  void SetUp() override {
    SpmmTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    packed_ = *Pack(Format::kBitmapGpu, RandomMatrix(DType::kF16, 40, 50, 0.5, 0.0, 1).view());
    layer_ = Upload(packed_);
    call_.n = 4;
    call_.x_stride = 50;
    call_.x_dtype = 1;
    call_.y_dtype = 1;
    call_.y_stride = 40;
  }

  void ExpectRefused(const std::string& field) {
    int32_t kernel = -1;
    EXPECT_EQ(gpu().cuda->select_kernel(layer_.get(), &call_, &kernel), SPMMD_CUDA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(gpu().cuda->last_error()).rfind(field + ":", 0), 0u) << gpu().cuda->last_error();
  }

  PackedLayer packed_;
  LayerPtr layer_{nullptr, nullptr};
  spmmd_cuda_matmul call_ = {};
};

TEST_F(SpmmInputTest, NamesTheFieldOfABadCall) {
  const spmmd_cuda_matmul good = call_;
  call_.n = -1;
  ExpectRefused("n");
  call_ = good;
  call_.x_stride = 49;
  ExpectRefused("x_stride");
  call_ = good;
  call_.y_stride = 39;
  ExpectRefused("y_stride");
  call_ = good;
  call_.x_dtype = 0;
  ExpectRefused("x_dtype");
  call_ = good;
  call_.y_dtype = 4;
  ExpectRefused("y_dtype");
  call_ = good;
  call_.activation = 9;
  ExpectRefused("activation");
  call_ = good;
  call_.x = reinterpret_cast<const void*>(uintptr_t{1});
  ExpectRefused("x");
}

TEST_F(SpmmInputTest, ZeroTokensDoNothing) {
  call_.n = 0;
  GPU_OK(gpu().cuda->launch(layer_.get(), SPMMD_CUDA_KERNEL_AUTO, &call_, gpu().stream));
}

TEST_F(SpmmInputTest, ALaunchNeedsItsWorkspace) {
  EXPECT_EQ(gpu().cuda->launch(layer_.get(), SPMMD_CUDA_KERNEL_AUTO, &call_, gpu().stream),
            SPMMD_CUDA_INVALID_ARGUMENT);
}

TEST_F(SpmmInputTest, CorruptLayersAreRefusedBeforeTheyReachTheDevice) {
  std::mt19937 rng(5);
  for (int round = 0; round < 200; ++round) {
    PackedLayer damaged = *Pack(Format::kBitmapGpu, RandomMatrix(DType::kF16, 40, 300, 0.5, 0.0, 2).view());
    Buffer& data = damaged.sections[static_cast<size_t>(round % 2)].data;
    data.mutable_data()[rng() % data.size()] ^= static_cast<std::byte>(1u << (rng() % 8));
    const CudaLayerDesc desc(damaged);
    spmmd_cuda_layer* layer = nullptr;
    const spmmd_cuda_status code = gpu().cuda->layer_upload(gpu().device, &desc.desc, &layer);
    // The library and the format's own Validate agree.
    EXPECT_EQ(code == SPMMD_CUDA_OK, Validate(damaged).ok()) << gpu().cuda->last_error();
    EXPECT_TRUE(code == SPMMD_CUDA_OK || code == SPMMD_CUDA_DATA_LOSS) << code;
    gpu().cuda->layer_free(layer);
  }
}

}  // namespace
}  // namespace spmmd::gpu_test
