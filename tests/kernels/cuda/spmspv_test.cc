// SpMspV over column pieces against float64: every activation density from none to all, dense input with a threshold
// and indexed input, overwrite, accumulate and deterministic modes; outputs poisoned before and fenced around.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/format/column_piece.h"
#include "kernels/format/packed_layer.h"
#include "kernels/format/reference.h"
#include "tests/kernels/cuda/gpu.h"

namespace spmmd::gpu_test {
namespace {

DenseMatrix Draw(int64_t m, int64_t k, double density, double skew, DType dtype, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  DenseMatrix w = *DenseMatrix::Create(dtype, m, k);
  std::vector<double> column(k, 1.0);
  if (skew > 0) {
    for (double& c : column) c = std::exp(skew * normal(rng));
  }
  for (int64_t r = 0; r < m; ++r) {
    auto* row = reinterpret_cast<uint16_t*>(w.mutable_view().row(r));
    for (int64_t c = 0; c < k; ++c) {
      if (uniform(rng) >= density * column[c]) continue;
      const auto v = static_cast<float>(normal(rng));
      row[c] = dtype == DType::kF16 ? FloatToF16(v) : FloatToBf16(v);
    }
  }
  return w;
}

struct Options {
  DType x_dtype = DType::kF16;
  DType y_dtype = DType::kF32;
  bool indexed = false;
  const char* kernel = nullptr;  // null: column_piece_spmspv or its indexed form
  int64_t n = 1;
  double x_density = 0.5;
  float threshold = 0;
  double x_scale = 1;
  Activation activation = Activation::kNone;
  bool bias = false;
  int64_t y_offset = 0;
  uint32_t flags = 0;
};

class SpmspvTest : public GpuTest {
 protected:
  void Check(const DenseMatrix& w, const Options& o, uint32_t seed) {
    const LayerPtr layer = Upload(*Pack(Format::kColumnPiece, w.view()));
    ASSERT_NE(layer, nullptr);
    CheckLayer(layer.get(), w, o, seed);
  }

  void CheckLayer(spmmd_cuda_layer* layer, const DenseMatrix& w, const Options& o, uint32_t seed) {
    const int64_t m = w.rows();
    const int64_t k = w.cols();
    std::mt19937 rng(seed);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform;
    const DType x_dtype = o.indexed ? DType::kF32 : o.x_dtype;
    DenseMatrix wide = *DenseMatrix::Create(DType::kF32, o.n, k);
    for (int64_t n = 0; n < o.n; ++n) {
      auto* row = reinterpret_cast<float*>(wide.mutable_view().row(n));
      for (int64_t c = 0; c < k; ++c) {
        if (uniform(rng) < o.x_density) row[c] = static_cast<float>(normal(rng) * o.x_scale);
      }
    }
    DenseMatrix x = *DenseMatrix::Create(x_dtype, o.n, k);
    ASSERT_TRUE(ConvertDense(wide.view(), x.mutable_view()).ok());
    // What the kernel should see: x with everything up to the threshold zeroed.
    DenseMatrix seen = *DenseMatrix::Create(DType::kF32, o.n, k);
    std::vector<uint32_t> indices;
    std::vector<float> values;
    for (int64_t n = 0; n < o.n; ++n) {
      for (int64_t c = 0; c < k; ++c) {
        const auto v = static_cast<float>(ElementAsDouble(x.view(), n, c));
        if (std::abs(v) <= o.threshold) continue;
        reinterpret_cast<float*>(seen.mutable_view().row(n))[c] = v;
        indices.push_back(static_cast<uint32_t>(c));
        values.push_back(v);
      }
    }
    std::vector<float> bias;
    for (int64_t i = 0; o.bias && i < m; ++i) bias.push_back(static_cast<float>(normal(rng)));
    Reference reference = ReferenceMatmul(w.view(), seen.view(), bias, o.activation);
    std::vector<float> old(static_cast<size_t>(o.n * m));
    const bool accumulate = (o.flags & SPMMD_CUDA_FLAG_ACCUMULATE) != 0;
    for (size_t i = 0; accumulate && i < old.size(); ++i) {
      old[i] = static_cast<float>(normal(rng));
      reference.y[i] += old[i];
      reference.scale[i] += std::abs(old[i]);
    }

    DeviceBuffer x_device(x.bytes());
    x_device.Upload(x.view().data, x.bytes());
    DeviceBuffer index_device(indices.size() * 4);
    DeviceBuffer value_device(values.size() * 4);
    if (!indices.empty()) {
      index_device.Upload(indices.data(), indices.size() * 4);
      value_device.Upload(values.data(), values.size() * 4);
    }
    DeviceBuffer bias_device(bias.size() * 4);
    if (o.bias) bias_device.Upload(bias.data(), bias.size() * 4);
    const size_t y_size = SizeOf(o.y_dtype);
    const size_t fence = (64 + static_cast<size_t>(o.y_offset)) * y_size;
    DeviceBuffer y_device(fence + static_cast<size_t>(o.n * m) * y_size + 64 * y_size);

    spmmd_cuda_matmul call = {};
    call.x = o.indexed ? nullptr : x_device.data();
    call.n = o.n;
    call.x_stride = k;
    call.x_dtype = static_cast<int32_t>(x_dtype);
    call.y_dtype = static_cast<int32_t>(o.y_dtype);
    if (o.indexed) {
      call.x_indices = reinterpret_cast<const uint32_t*>(index_device.data());
      call.x_values = reinterpret_cast<const float*>(value_device.data());
      call.x_nnz = static_cast<int64_t>(indices.size());
    }
    call.bias = o.bias ? reinterpret_cast<const float*>(bias_device.data()) : nullptr;
    call.activation = static_cast<int32_t>(o.activation);
    call.flags = o.flags;
    call.x_threshold = o.indexed ? 0.f : o.threshold;
    call.y = y_device.data() + fence;
    call.y_stride = m;
    const char* name = o.indexed ? "column_piece_spmspv_indexed" : "column_piece_spmspv";
    const int32_t kernel = gpu().cuda->find_kernel(o.kernel != nullptr ? o.kernel : name);
    ASSERT_GE(kernel, 0);
    uint64_t bytes = 0;
    GPU_OK(gpu().cuda->workspace_bytes(layer, kernel, &call, &bytes));
    workspace_.Reserve(bytes);
    call.workspace = workspace_.data();
    call.workspace_bytes = workspace_.bytes();
    std::vector<std::byte> results[2];
    for (std::vector<std::byte>& result : results) {
      y_device.Fill(0xff);
      if (accumulate) y_device.Upload(old.data(), old.size() * 4, fence);
      GPU_OK(gpu().cuda->launch(layer, kernel, &call, gpu().stream));
      result = y_device.Download();
    }
    const bool ordered = o.kernel == nullptr && !accumulate;  // Celty adds atomically
    if (ordered || (o.flags & SPMMD_CUDA_FLAG_DETERMINISTIC) != 0) {
      EXPECT_EQ(results[0], results[1]) << "two launches differ";
    }
    for (const std::vector<std::byte>& result : results) {
      const DenseView y{result.data() + fence, o.y_dtype, o.n, m, m};
      // Activations of another type than the weights travel as the sum of two rounded parts.
      const double split = std::ldexp(1.0, w.dtype() == DType::kBf16 ? -16 : -20);
      const absl::Status status = CompareToReference(
          y, reference, DefaultTolerance(o.y_dtype, k) + (x_dtype == w.dtype() ? 0 : split), 1e-6 * o.x_scale);
      EXPECT_TRUE(status.ok()) << status;
      for (size_t i = 0; i < result.size(); ++i) {
        if (i < fence || i >= fence + static_cast<size_t>(o.n * m) * y_size) {
          ASSERT_EQ(result[i], std::byte{0xff}) << "wrote outside y at byte " << i;
        }
      }
    }
  }

  Workspace workspace_;
};

TEST_F(SpmspvTest, EveryShapeDensityAndMode) {
  uint32_t seed = 1;
  std::vector<std::pair<int64_t, int64_t>> shapes = {{1, 1},      {1, 3000},   {37, 100},  {512, 256},
                                                     {513, 1000}, {1500, 777}, {700, 5000}};
  if (FewCases()) shapes = {{37, 100}, {700, 900}};
  for (const auto& [m, k] : shapes) {
    for (const double density : {0.0, 0.3, 0.5, 1.0}) {
      if (FewCases() && density != 0.5) continue;
      for (const DType dtype : {DType::kF16, DType::kBf16}) {
        const DenseMatrix w = Draw(m, k, density, 0, dtype, ++seed);
        const LayerPtr layer = Upload(*Pack(Format::kColumnPiece, w.view()));
        ASSERT_NE(layer, nullptr);
        for (const double x_density : {0.0, 0.01, 0.5, 1.0}) {
          for (const bool indexed : {false, true}) {
            for (const uint32_t flags :
                 {0u, SPMMD_CUDA_FLAG_ACCUMULATE, SPMMD_CUDA_FLAG_ACCUMULATE | SPMMD_CUDA_FLAG_DETERMINISTIC,
                  SPMMD_CUDA_FLAG_CHAIN}) {
              SCOPED_TRACE(testing::Message()
                           << m << "x" << k << " density " << density << " " << Name(dtype) << " x density "
                           << x_density << " indexed " << indexed << " flags " << flags);
              Options o;
              o.x_dtype = dtype;
              o.x_density = x_density;
              o.indexed = indexed;
              o.flags = flags;
              o.y_offset = seed % 4;
              CheckLayer(layer.get(), w, o, ++seed);
            }
          }
        }
      }
    }
  }
}

TEST_F(SpmspvTest, EveryDtypeThresholdAndEpilogue) {
  uint32_t seed = 1000;
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    const DenseMatrix w = Draw(600, 900, 0.5, 1.0, dtype, ++seed);
    const LayerPtr layer = Upload(*Pack(Format::kColumnPiece, w.view()));
    ASSERT_NE(layer, nullptr);
    for (const DType x_dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
      for (const DType y_dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
        for (const float threshold : {0.f, 0.5f, 100.f}) {
          for (const int64_t n : {1, 3}) {
            SCOPED_TRACE(testing::Message() << Name(dtype) << " x " << Name(x_dtype) << " y " << Name(y_dtype)
                                            << " threshold " << threshold << " n " << n);
            Options o;
            o.x_dtype = x_dtype;
            o.y_dtype = y_dtype;
            o.threshold = threshold;
            o.n = n;
            o.activation = static_cast<Activation>(seed % 5);
            o.bias = seed % 2 == 0;
            CheckLayer(layer.get(), w, o, ++seed);
          }
        }
      }
    }
  }
}

TEST_F(SpmspvTest, EveryVariant) {
  uint32_t seed = 2000;
  const DenseMatrix w = Draw(FewCases() ? 600 : 2000, FewCases() ? 700 : 3000, 0.4, 0.5, DType::kF16, ++seed);
  const LayerPtr layer = Upload(*Pack(Format::kColumnPiece, w.view()));
  ASSERT_NE(layer, nullptr);
  for (uint32_t variant = 0; variant < 5; ++variant) {
    for (const uint32_t flags :
         {0u, SPMMD_CUDA_FLAG_ACCUMULATE, SPMMD_CUDA_FLAG_ACCUMULATE | SPMMD_CUDA_FLAG_DETERMINISTIC}) {
      Options o;
      o.flags = flags | (variant + 1) << SPMMD_CUDA_FLAG_VARIANT_SHIFT;
      CheckLayer(layer.get(), w, o, ++seed);
    }
  }
}

// Overwrite mode has thread blocks that wait for others: two streams that fill the device at once must both come to an
// end, with the same bits every time.
TEST_F(SpmspvTest, TwoStreamsAtOnce) {
  const int64_t m = 4096;
  const int64_t k = FewCases() ? 256 : 2048;
  const DenseMatrix w = Draw(m, k, 0.5, 0, DType::kF16, 77);
  const DenseMatrix x = Draw(1, k, 0.5, 0, DType::kF16, 78);
  const LayerPtr layer = Upload(*Pack(Format::kColumnPiece, w.view()));
  ASSERT_NE(layer, nullptr);
  DeviceBuffer x_device(x.bytes());
  x_device.Upload(x.view().data, x.bytes());
  const int32_t kernel = gpu().cuda->find_kernel("column_piece_spmspv");
  spmmd_cuda_stream streams[2] = {gpu().stream, nullptr};
  GPU_OK(gpu().cuda->stream_create(gpu().device, &streams[1]));
  DeviceBuffer y0(m * 4);
  DeviceBuffer y1(m * 4);
  DeviceBuffer* const y[2] = {&y0, &y1};
  Workspace workspace[2];
  spmmd_cuda_matmul call = {};
  call.x = x_device.data();
  call.n = 1;
  call.x_stride = k;
  call.x_dtype = static_cast<int32_t>(DType::kF16);
  call.y_dtype = static_cast<int32_t>(DType::kF32);
  call.y_stride = m;
  uint64_t bytes = 0;
  GPU_OK(gpu().cuda->workspace_bytes(layer.get(), kernel, &call, &bytes));
  for (Workspace& own : workspace) own.Reserve(bytes);
  GPU_OK(gpu().cuda->stream_synchronize(gpu().device, gpu().stream));
  for (int i = 0; i < (FewCases() ? 2 : 200); ++i) {
    for (int s = 0; s < 2; ++s) {
      call.y = y[s]->data();
      call.workspace = workspace[s].data();
      call.workspace_bytes = workspace[s].bytes();
      GPU_OK(gpu().cuda->launch(layer.get(), kernel, &call, streams[s]));
    }
  }
  for (const spmmd_cuda_stream stream : streams) GPU_OK(gpu().cuda->stream_synchronize(gpu().device, stream));
  const std::vector<std::byte> first = y0.Download();
  EXPECT_EQ(first, y1.Download());
  const absl::Status status = CompareToReference({first.data(), DType::kF32, 1, m, m},
                                                 ReferenceMatmul(w.view(), x.view()), DefaultTolerance(DType::kF32, k));
  EXPECT_TRUE(status.ok()) << status;
  gpu().cuda->stream_destroy(gpu().device, streams[1]);
}

// fp16 weights with activations far outside fp16's range, and tiny ones.
TEST_F(SpmspvTest, ActivationsOfAnySize) {
  uint32_t seed = 3000;
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    const DenseMatrix w = Draw(300, 400, 0.5, 0, dtype, ++seed);
    const LayerPtr layer = Upload(*Pack(Format::kColumnPiece, w.view()));
    ASSERT_NE(layer, nullptr);
    for (const double scale : {0x1p-40, 0x1p-10, 0x1p20, 0x1p60}) {
      for (const bool indexed : {false, true}) {
        SCOPED_TRACE(testing::Message() << Name(dtype) << " scale 2^" << std::log2(scale) << " indexed " << indexed);
        Options o;
        o.x_dtype = DType::kF32;
        o.x_scale = scale;
        o.indexed = indexed;
        CheckLayer(layer.get(), w, o, ++seed);
      }
    }
  }
}

TEST_F(SpmspvTest, GroupsShareALaunch) {
  for (const uint32_t flags : {0u, SPMMD_CUDA_FLAG_ACCUMULATE, SPMMD_CUDA_FLAG_CHAIN}) {
    const int64_t k = 1200;
    const std::vector<int64_t> rows = {700, 64, 1100};
    const DenseMatrix x = Draw(1, k, 0.5, 0, DType::kF16, 5);
    DeviceBuffer x_device(x.bytes());
    x_device.Upload(x.view().data, x.bytes());
    std::vector<DenseMatrix> weights;
    std::vector<LayerPtr> layers;
    std::vector<const spmmd_cuda_layer*> raw;
    std::vector<std::unique_ptr<DeviceBuffer>> outputs;
    std::vector<spmmd_cuda_matmul> calls;
    for (size_t i = 0; i < rows.size(); ++i) {
      weights.push_back(Draw(rows[i], k, 0.5, 0, DType::kF16, static_cast<uint32_t>(20 + i)));
      layers.push_back(Upload(*Pack(Format::kColumnPiece, weights.back().view())));
      ASSERT_NE(layers.back(), nullptr);
      raw.push_back(layers.back().get());
      outputs.push_back(std::make_unique<DeviceBuffer>(static_cast<size_t>(rows[i]) * 4));
      outputs.back()->Fill(flags == SPMMD_CUDA_FLAG_ACCUMULATE ? 0 : 0xff);
      spmmd_cuda_matmul call = {};
      call.x = x_device.data();
      call.n = 1;
      call.x_stride = k;
      call.x_dtype = static_cast<int32_t>(DType::kF16);
      call.y_dtype = static_cast<int32_t>(DType::kF32);
      call.flags = flags;
      call.y = outputs.back()->data();
      call.y_stride = rows[i];
      calls.push_back(call);
    }
    const int32_t kernel = gpu().cuda->find_kernel("column_piece_spmspv");
    uint64_t bytes = 0;
    GPU_OK(gpu().cuda->group_workspace_bytes(raw.data(), kernel, calls.data(), 3, &bytes));
    workspace_.Reserve(bytes);
    calls[0].workspace = workspace_.data();
    calls[0].workspace_bytes = workspace_.bytes();
    GPU_OK(gpu().cuda->launch_group(raw.data(), kernel, calls.data(), 3, gpu().stream));
    for (size_t i = 0; i < rows.size(); ++i) {
      const std::vector<std::byte> y = outputs[i]->Download();
      const absl::Status status =
          CompareToReference({y.data(), DType::kF32, 1, rows[i], rows[i]}, ReferenceMatmul(weights[i].view(), x.view()),
                             DefaultTolerance(DType::kF32, k));
      EXPECT_TRUE(status.ok()) << "layer " << i << ": " << status;
    }
    EXPECT_EQ(gpu().cuda->launch_group(raw.data(), kernel, calls.data(), 0, gpu().stream), SPMMD_CUDA_INVALID_ARGUMENT);
  }
}

// The published kernel, under every split of K and both kinds of buffer.
TEST_F(SpmspvTest, Celty) {
  uint32_t seed = 4000;
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    for (const auto& [m, k] : std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {300, 700}, {256, 64}, {513, 2100}}) {
      if (FewCases() && m * k > 16384) continue;
      for (const double density : {0.0, 0.1, 0.5, 1.0}) {
        const DenseMatrix w = Draw(m, k, density, 0.5, dtype, ++seed);
        const LayerPtr layer = Upload(*Pack(Format::kRlcCsc, w.view()));
        ASSERT_NE(layer, nullptr);
        for (uint32_t variant = 0; variant < 10; ++variant) {
          SCOPED_TRACE(testing::Message()
                       << m << "x" << k << " density " << density << " " << Name(dtype) << " variant " << variant);
          Options o;
          o.kernel = "rlc_csc_spmspv";
          o.x_dtype = dtype;
          o.x_density = 0.25 * (seed % 5);
          o.y_dtype = seed % 2 == 0 ? DType::kF32 : DType::kF16;
          o.bias = seed % 3 == 0;
          o.flags = (variant + 1) << SPMMD_CUDA_FLAG_VARIANT_SHIFT;
          CheckLayer(layer.get(), w, o, ++seed);
        }
      }
    }
  }
}

TEST_F(SpmspvTest, RefusesBadCalls) {
  const DenseMatrix w = Draw(64, 128, 0.5, 0, DType::kF16, 9);
  const PackedLayer packed = *Pack(Format::kColumnPiece, w.view());
  const LayerPtr layer = Upload(packed);
  ASSERT_NE(layer, nullptr);
  DeviceBuffer buffer(4096);
  spmmd_cuda_matmul call = {};
  call.x = buffer.data();
  call.n = 1;
  call.x_stride = 128;
  call.x_dtype = static_cast<int32_t>(DType::kF16);
  call.y_dtype = static_cast<int32_t>(DType::kF16);
  call.y = buffer.data();
  call.y_stride = 64;
  const int32_t kernel = gpu().cuda->find_kernel("column_piece_spmspv");
  EXPECT_EQ(gpu().cuda->can_implement(layer.get(), kernel, &call), SPMMD_CUDA_OK);
  call.flags = SPMMD_CUDA_FLAG_ACCUMULATE;  // into fp16
  EXPECT_EQ(gpu().cuda->can_implement(layer.get(), kernel, &call), SPMMD_CUDA_INVALID_ARGUMENT);
  call.flags = 0;
  call.x_threshold = -1;
  EXPECT_EQ(gpu().cuda->can_implement(layer.get(), kernel, &call), SPMMD_CUDA_INVALID_ARGUMENT);
  CudaLayerDesc desc(packed);
  desc.desc.params[0] = 17;
  spmmd_cuda_layer* damaged = nullptr;
  EXPECT_EQ(gpu().cuda->layer_upload(gpu().device, &desc.desc, &damaged), SPMMD_CUDA_DATA_LOSS);
  desc.desc.params[0] = 1;  // fewer units than the pieces have
  EXPECT_EQ(gpu().cuda->layer_upload(gpu().device, &desc.desc, &damaged), SPMMD_CUDA_DATA_LOSS);
}

}  // namespace
}  // namespace spmmd::gpu_test
