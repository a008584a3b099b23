// The row-stream SpMV against float64: odd shapes, every density, value code, dtype, token count and epilogue; outputs
// poisoned before and fenced around; activations of any size; determinism; graphs.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/format/packed_layer.h"
#include "kernels/format/reference.h"
#include "kernels/format/row_stream.h"
#include "tests/kernels/cuda/gpu.h"

namespace spmmd::gpu_test {
namespace {

using row_stream::Coding;

struct Weights {
  int64_t m = 1;
  int64_t k = 1;
  double density = 0.5;
  double column_skew = 0;  // sigma of a log-normal density factor a column
  double row_skew = 0;
  double exponent_spread = 0;  // sigma of a log-normal factor a weight: many escapes
};

DenseMatrix Draw(const Weights& w, DType dtype, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  std::vector<double> column(w.k, 1.0);
  if (w.column_skew > 0) {
    for (double& c : column) c = std::exp(w.column_skew * normal(rng));
  }
  DenseMatrix out = *DenseMatrix::Create(dtype, w.m, w.k);
  for (int64_t r = 0; r < w.m; ++r) {
    const double row = w.row_skew > 0 ? std::exp(w.row_skew * normal(rng)) : 1.0;
    auto* to = reinterpret_cast<uint16_t*>(out.mutable_view().row(r));
    for (int64_t c = 0; c < w.k; ++c) {
      if (uniform(rng) >= w.density * row * column[c]) continue;
      double v = normal(rng);
      if (w.exponent_spread > 0) v *= std::exp(w.exponent_spread * normal(rng));
      to[c] = dtype == DType::kF16 ? FloatToF16(static_cast<float>(v)) : FloatToBf16(static_cast<float>(v));
    }
  }
  return out;
}

struct Options {
  DType x_dtype = DType::kF16;
  DType y_dtype = DType::kF32;
  int64_t n = 1;
  Activation activation = Activation::kNone;
  bool bias = false;
  int64_t x_offset = 0;  // elements before the first activation
  int64_t x_pad = 0;     // elements added to X's row stride
  int64_t y_pad = 0;
  double x_scale = 1;
  uint32_t flags = 0;
};

class SpmvTest : public GpuTest {
 protected:
  void Check(const PackedLayer& packed, const DenseMatrix& w, const Options& o, uint32_t seed) {
    const LayerPtr layer = Upload(packed);
    ASSERT_NE(layer, nullptr);
    CheckLayer(layer.get(), w, o, seed);
  }

  void CheckLayer(spmmd_cuda_layer* layer, const DenseMatrix& w, const Options& o, uint32_t seed) {
    const int64_t m = w.rows();
    const int64_t k = w.cols();
    std::mt19937 rng(seed);
    std::normal_distribution<double> normal;
    DenseMatrix wide = *DenseMatrix::Create(DType::kF32, o.n, k);
    for (int64_t n = 0; n < o.n; ++n) {
      auto* row = reinterpret_cast<float*>(wide.mutable_view().row(n));
      for (int64_t c = 0; c < k; ++c) row[c] = static_cast<float>(normal(rng) * o.x_scale);
    }
    DenseMatrix x = *DenseMatrix::Create(o.x_dtype, o.n, k);
    ASSERT_TRUE(ConvertDense(wide.view(), x.mutable_view()).ok());
    std::vector<float> bias;
    for (int64_t i = 0; o.bias && i < m; ++i) bias.push_back(static_cast<float>(normal(rng)));
    const Reference reference = ReferenceMatmul(w.view(), x.view(), bias, o.activation);

    const size_t x_size = SizeOf(o.x_dtype);
    const size_t y_size = SizeOf(o.y_dtype);
    const int64_t x_stride = k + o.x_pad;
    const int64_t y_stride = m + o.y_pad;
    DeviceBuffer x_device(static_cast<size_t>(o.x_offset + o.n * x_stride) * x_size);
    x_device.Fill(0xff);  // NaN wherever no activation is
    for (int64_t n = 0; n < o.n; ++n) {
      x_device.Upload(x.view().row(n), static_cast<size_t>(k) * x_size,
                      static_cast<size_t>(o.x_offset + n * x_stride) * x_size);
    }
    const size_t fence = 64 * y_size;
    DeviceBuffer y_device(fence + static_cast<size_t>(o.n * y_stride) * y_size + fence);
    y_device.Fill(0xff);
    DeviceBuffer bias_device(bias.size() * 4);
    bias_device.Upload(bias.data(), bias.size() * 4);

    spmmd_cuda_matmul call = {};
    call.x = x_device.data() + static_cast<size_t>(o.x_offset) * x_size;
    call.n = o.n;
    call.x_stride = x_stride;
    call.x_dtype = static_cast<int32_t>(o.x_dtype);
    call.y_dtype = static_cast<int32_t>(o.y_dtype);
    call.bias = o.bias ? reinterpret_cast<const float*>(bias_device.data()) : nullptr;
    call.activation = static_cast<int32_t>(o.activation);
    call.flags = o.flags;
    call.y = y_device.data() + fence;
    call.y_stride = y_stride;
    const int32_t kernel = gpu().cuda->find_kernel("row_stream_spmv");
    ASSERT_GE(kernel, 0);
    uint64_t bytes = 0;
    GPU_OK(gpu().cuda->workspace_bytes(layer, kernel, &call, &bytes));
    workspace_.Reserve(bytes);
    call.workspace = workspace_.data();
    call.workspace_bytes = workspace_.bytes();
    GPU_OK(gpu().cuda->launch(layer, kernel, &call, gpu().stream));
    const std::vector<std::byte> first = y_device.Download();
    GPU_OK(gpu().cuda->launch(layer, kernel, &call, gpu().stream));
    EXPECT_EQ(first, y_device.Download()) << "two launches differ";

    const DenseView y{first.data() + fence, o.y_dtype, o.n, m, y_stride};
    // An element whose products overflow float32 is beyond the contract; none of the tests draws one.
    const absl::Status status = CompareToReference(y, reference, DefaultTolerance(o.y_dtype, k), 1e-6 * o.x_scale);
    EXPECT_TRUE(status.ok()) << status;
    for (size_t i = 0; i < first.size(); ++i) {
      const bool before = i < fence;
      const size_t at = before ? 0 : i - fence;
      const bool inside = !before && at < static_cast<size_t>(o.n * y_stride) * y_size &&
                          at % (static_cast<size_t>(y_stride) * y_size) < static_cast<size_t>(m) * y_size;
      if (!inside) {
        ASSERT_EQ(first[i], std::byte{0xff}) << "wrote outside y at byte " << i;
      }
    }
  }

  Workspace workspace_;
};

std::vector<Coding> CodingsOf(DType dtype) {
  if (dtype == DType::kF16) return {Coding::kVerbatim};
  return {Coding::kVerbatim, Coding::kCode2, Coding::kCode3};
}

std::string Label(const Weights& w, DType dtype, Coding coding) {
  return std::to_string(w.m) + "x" + std::to_string(w.k) + " density " + std::to_string(w.density) + " " +
         std::string(Name(dtype)) + " code " + std::to_string(static_cast<int>(coding));
}

TEST_F(SpmvTest, EveryShapeAndDensity) {
  uint32_t seed = 1;
  std::vector<std::pair<int64_t, int64_t>> shapes = {{1, 1},     {1, 4096},   {5, 8},      {37, 100},
                                                     {300, 777}, {513, 1000}, {2048, 257}, {1000, 2048}};
  if (FewCases()) shapes = {{5, 8}, {37, 100}};
  for (const auto& [m, k] : shapes) {
    for (const double density : {0.0, 0.05, 0.3, 0.5, 1.0}) {
      for (const DType dtype : {DType::kF16, DType::kBf16}) {
        const Weights weights{m, k, density};
        const DenseMatrix w = Draw(weights, dtype, ++seed);
        for (const Coding coding : CodingsOf(dtype)) {
          SCOPED_TRACE(Label(weights, dtype, coding));
          row_stream::Options tuning;
          tuning.coding = coding;
          Options o;
          o.x_dtype = dtype;
          Check(*row_stream::Pack(w.view(), {}, tuning), w, o, ++seed);
        }
      }
    }
  }
}

TEST_F(SpmvTest, EveryDtypeTokenCountAndEpilogue) {
  uint32_t seed = 1000;
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    const Weights weights{203, 515, 0.4};
    const DenseMatrix w = Draw(weights, dtype, ++seed);
    for (const Coding coding : CodingsOf(dtype)) {
      for (const int run_bits : {2, 4}) {
        row_stream::Options tuning;
        tuning.coding = coding;
        tuning.run_bits = run_bits;
        const PackedLayer packed = *row_stream::Pack(w.view(), {}, tuning);
        const LayerPtr layer = Upload(packed);
        ASSERT_NE(layer, nullptr);
        for (const DType x_dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
          for (const DType y_dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
            for (const int64_t n : {1, 2, 3, 7}) {
              if (FewCases() && (n == 7 || (x_dtype != y_dtype && n != 2))) continue;
              SCOPED_TRACE(Label(weights, dtype, coding) + " run " + std::to_string(run_bits) + " x " +
                           std::string(Name(x_dtype)) + " y " + std::string(Name(y_dtype)) + " n " + std::to_string(n));
              Options o;
              o.x_dtype = x_dtype;
              o.y_dtype = y_dtype;
              o.n = n;
              o.activation = static_cast<Activation>(seed % 5);
              o.bias = seed % 2 == 0;
              o.x_pad = seed % 3;
              o.y_pad = seed % 4;
              o.x_offset = seed % 9;
              CheckLayer(layer.get(), w, o, ++seed);
            }
          }
        }
      }
    }
  }
}

TEST_F(SpmvTest, EveryTilingAndVariant) {
  uint32_t seed = 2000;
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    const Weights weights{FewCases() ? 80 : 330, FewCases() ? 300 : 700, 0.5, 0.5, 0.5};
    const DenseMatrix w = Draw(weights, dtype, ++seed);
    std::vector<std::pair<int, int>> tilings = {{1, 1}, {8, 4}, {37, 5}, {32, 12}, {73, 12}, {128, 16}, {512, 16}};
    if (FewCases()) tilings = {{8, 4}, {37, 5}, {73, 12}};
    for (const Coding coding : CodingsOf(dtype)) {
      for (const auto& [rows, warps] : tilings) {
        for (const bool sorted : {false, true}) {
          row_stream::Options tuning;
          tuning.coding = coding;
          tuning.rows_per_tile = rows;
          tuning.warps = warps;
          tuning.sort_rows = sorted;
          tuning.run_bits = rows % 2 == 0 ? 2 : 4;
          const LayerPtr layer = Upload(*row_stream::Pack(w.view(), {}, tuning));
          ASSERT_NE(layer, nullptr);
          for (uint32_t variant = 0; variant < 2; ++variant) {
            for (const uint32_t chain : {0u, SPMMD_CUDA_FLAG_CHAIN}) {
              if (FewCases() && chain != 0 && sorted) continue;
              SCOPED_TRACE(Label(weights, dtype, coding) + " rows " + std::to_string(rows) + " warps " +
                           std::to_string(warps) + " variant " + std::to_string(variant));
              Options o;
              o.x_dtype = dtype;
              o.flags = chain | (variant + 1) << SPMMD_CUDA_FLAG_VARIANT_SHIFT;
              CheckLayer(layer.get(), w, o, ++seed);
            }
          }
        }
      }
    }
  }
}

TEST_F(SpmvTest, WideMatrixInSegments) {
  uint32_t seed = 3000;
  for (const int64_t segment : {int64_t{64}, int64_t{0}}) {
    const Weights weights{segment == 0 ? 3 : 90, segment == 0 ? 100003 : 1001, 0.4};
    const DenseMatrix w = Draw(weights, DType::kBf16, ++seed);
    for (const Coding coding : CodingsOf(DType::kBf16)) {
      row_stream::Options tuning;
      tuning.coding = coding;
      tuning.segment_columns = segment;
      const LayerPtr layer = Upload(*row_stream::Pack(w.view(), {}, tuning));
      ASSERT_NE(layer, nullptr);
      for (const DType x_dtype : {DType::kBf16, DType::kF32}) {
        for (const int64_t n : {1, 2, 3}) {
          SCOPED_TRACE(Label(weights, DType::kBf16, coding) + " n " + std::to_string(n));
          Options o;
          o.x_dtype = x_dtype;
          o.n = n;
          CheckLayer(layer.get(), w, o, ++seed);
        }
      }
    }
  }
}

TEST_F(SpmvTest, EscapesAndSkew) {
  uint32_t seed = 4000;
  for (const double spread : {1.0, 4.0}) {
    const Weights weights{150, 1200, 0.5, 1.0, 1.0, spread};
    const DenseMatrix w = Draw(weights, DType::kBf16, ++seed);
    for (const Coding coding : {Coding::kCode2, Coding::kCode3}) {
      SCOPED_TRACE(Label(weights, DType::kBf16, coding) + " spread " + std::to_string(spread));
      row_stream::Options tuning;
      tuning.coding = coding;
      const PackedLayer packed = *row_stream::Pack(w.view(), {}, tuning);
      if (spread == 4.0) {
        EXPECT_GT(row_stream::CountEscapes(packed), packed.nnz / 10);
      }
      for (const int64_t n : {1, 3}) {
        Options o;
        o.x_dtype = DType::kBf16;
        o.n = n;
        Check(packed, w, o, ++seed);
      }
    }
  }
}

// Coded layers scale activations by 2^64 inside: sizes at both ends of the exponent range must come out right.
TEST_F(SpmvTest, ActivationsOfAnySize) {
  uint32_t seed = 5000;
  const Weights weights{100, 300, 0.5};
  const DenseMatrix w = Draw(weights, DType::kBf16, ++seed);
  for (const Coding coding : CodingsOf(DType::kBf16)) {
    row_stream::Options tuning;
    tuning.coding = coding;
    const LayerPtr layer = Upload(*row_stream::Pack(w.view(), {}, tuning));
    ASSERT_NE(layer, nullptr);
    for (const DType x_dtype : {DType::kBf16, DType::kF32}) {
      for (const double scale : {0x1p-60, 0x1p-30, 0x1p30, 0x1p61, 0x1p63, 0x1p100}) {
        SCOPED_TRACE(Label(weights, DType::kBf16, coding) + " scale " + std::to_string(std::log2(scale)));
        Options o;
        o.x_dtype = x_dtype;
        o.x_scale = scale;
        CheckLayer(layer.get(), w, o, ++seed);
      }
    }
  }
}

TEST_F(SpmvTest, CapturesIntoAGraph) {
  const Weights weights{256, 512, 0.5};
  const DenseMatrix w = Draw(weights, DType::kF16, 7);
  const LayerPtr layer = Upload(*row_stream::Pack(w.view(), {}));
  ASSERT_NE(layer, nullptr);
  DenseMatrix x = *DenseMatrix::Create(DType::kF16, 1, 512);
  DeviceBuffer x_device(512 * 2);
  DeviceBuffer y_device(256 * 4);
  y_device.Fill(0xff);
  spmmd_cuda_matmul call = {};
  call.x = x_device.data();
  call.n = 1;
  call.x_stride = 512;
  call.x_dtype = static_cast<int32_t>(DType::kF16);
  call.y_dtype = static_cast<int32_t>(DType::kF32);
  call.y = y_device.data();
  call.y_stride = 256;
  uint64_t bytes = 0;
  GPU_OK(gpu().cuda->workspace_bytes(layer.get(), SPMMD_CUDA_KERNEL_AUTO, &call, &bytes));
  workspace_.Reserve(bytes);
  call.workspace = workspace_.data();
  call.workspace_bytes = workspace_.bytes();
  spmmd_cuda_stream stream = nullptr;
  GPU_OK(gpu().cuda->stream_create(gpu().device, &stream));
  spmmd_cuda_graph graph = nullptr;
  GPU_OK(gpu().cuda->graph_begin(gpu().device, stream));
  GPU_OK(gpu().cuda->launch(layer.get(), SPMMD_CUDA_KERNEL_AUTO, &call, stream));
  GPU_OK(gpu().cuda->graph_end(gpu().device, stream, &graph));
  for (const float value : {1.0f, -2.5f}) {  // a replay reads what is there then
    for (int64_t c = 0; c < 512; ++c) reinterpret_cast<uint16_t*>(x.mutable_view().row(0))[c] = FloatToF16(value);
    x_device.Upload(x.view().data, 512 * 2);
    GPU_OK(gpu().cuda->graph_launch(gpu().device, graph, stream));
    GPU_OK(gpu().cuda->stream_synchronize(gpu().device, stream));
    const std::vector<std::byte> y = y_device.Download();
    const Reference reference = ReferenceMatmul(w.view(), x.view());
    const absl::Status status =
        CompareToReference({y.data(), DType::kF32, 1, 256, 256}, reference, DefaultTolerance(DType::kF32, 512));
    EXPECT_TRUE(status.ok()) << status;
  }
  GPU_OK(gpu().cuda->graph_destroy(gpu().device, graph));
  GPU_OK(gpu().cuda->stream_destroy(gpu().device, stream));
}

TEST_F(SpmvTest, GroupsShareALaunch) {
  const int64_t k = 900;
  const std::vector<int64_t> rows = {300, 17, 520};
  for (const Coding coding : CodingsOf(DType::kBf16)) {
    const DenseMatrix x = Draw({3, k, 1.0}, DType::kBf16, 5);
    DeviceBuffer x_device(x.bytes());
    x_device.Upload(x.view().data, x.bytes());
    for (const int64_t n : {1, 3}) {
      std::vector<LayerPtr> layers;
      std::vector<const spmmd_cuda_layer*> raw;
      std::vector<std::unique_ptr<DeviceBuffer>> outputs;
      std::vector<spmmd_cuda_matmul> calls;
      uint64_t bytes = 0;
      const int32_t kernel = gpu().cuda->find_kernel("row_stream_spmv");
      for (size_t i = 0; i < rows.size(); ++i) {
        const DenseMatrix w = Draw({rows[i], k, 0.5}, DType::kBf16, static_cast<uint32_t>(20 + i));
        row_stream::Options tuning;
        tuning.coding = coding;
        tuning.run_bits = 2;
        tuning.warps = 6;
        tuning.rows_per_tile = static_cast<int>(10 + 7 * i);
        layers.push_back(Upload(*row_stream::Pack(w.view(), {}, tuning)));
        ASSERT_NE(layers.back(), nullptr);
        raw.push_back(layers.back().get());
        outputs.push_back(std::make_unique<DeviceBuffer>(static_cast<size_t>(rows[i] * n) * 4));
        outputs.back()->Fill(0xff);
        spmmd_cuda_matmul call = {};
        call.x = x_device.data();
        call.n = n;
        call.x_stride = k;
        call.x_dtype = static_cast<int32_t>(DType::kBf16);
        call.y_dtype = static_cast<int32_t>(DType::kF32);
        call.y = outputs.back()->data();
        call.y_stride = rows[i];
        GPU_OK(gpu().cuda->workspace_bytes(raw.back(), kernel, &call, &bytes));
        workspace_.Reserve(bytes);
        call.workspace = workspace_.data();
        call.workspace_bytes = workspace_.bytes();
        calls.push_back(call);
      }
      GPU_OK(gpu().cuda->launch_group(raw.data(), kernel, calls.data(), 3, gpu().stream));
      for (size_t i = 0; i < rows.size(); ++i) {
        const std::vector<std::byte> grouped = outputs[i]->Download();
        outputs[i]->Fill(0xff);
        GPU_OK(gpu().cuda->launch(raw[i], kernel, &calls[i], gpu().stream));
        EXPECT_EQ(grouped, outputs[i]->Download()) << "layer " << i << " differs from its own launch";
      }
      calls[1].x_stride += 1;
      EXPECT_EQ(gpu().cuda->launch_group(raw.data(), kernel, calls.data(), 3, gpu().stream),
                SPMMD_CUDA_INVALID_ARGUMENT);
    }
  }
}

TEST_F(SpmvTest, RefusesDamagedLayers) {
  const DenseMatrix w = Draw({64, 128, 0.5}, DType::kF16, 9);
  const PackedLayer packed = *row_stream::Pack(w.view(), {});
  CudaLayerDesc desc(packed);
  desc.desc.params[row_stream::kParamRowsPerTile] = 0;
  spmmd_cuda_layer* layer = nullptr;
  EXPECT_EQ(gpu().cuda->layer_upload(gpu().device, &desc.desc, &layer), SPMMD_CUDA_DATA_LOSS);
  desc.desc.params[row_stream::kParamRowsPerTile] = packed.params[row_stream::kParamRowsPerTile];
  desc.desc.nnz += 1;
  EXPECT_EQ(gpu().cuda->layer_upload(gpu().device, &desc.desc, &layer), SPMMD_CUDA_DATA_LOSS);
  EXPECT_EQ(layer, nullptr);
}

}  // namespace
}  // namespace spmmd::gpu_test
