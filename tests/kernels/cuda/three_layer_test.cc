// three_layer_spmm against float64: odd shapes, densities, masks, dtypes, alignments, epilogues; outputs poisoned
// before and fenced around; long codes; determinism; damaged layers.
#include "kernels/format/three_layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/format/prune.h"
#include "kernels/format/reference.h"
#include "tests/kernels/cuda/gpu.h"

namespace spmmd::gpu_test {
namespace {

enum class MaskKind { kUniform, kColumnSkew, kRowSkew, kTwoFour, kBands };

// N(0, 1) values: of a uniform mask each is there with probability `density`; skewed masks vary it by column or row;
// bands are full in one half of the columns and empty in the other, tile by tile.
DenseMatrix MakeWeights(DType dtype, int64_t rows, int64_t cols, double density, MaskKind mask, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  std::vector<double> scale(static_cast<size_t>(std::max(rows, cols)));
  for (double& s : scale) s = std::exp(static_cast<double>(normal(rng)));
  DenseMatrix wide = *DenseMatrix::Create(DType::kF32, rows, cols);
  for (int64_t r = 0; r < rows; ++r) {
    auto* row = reinterpret_cast<float*>(wide.mutable_view().row(r));
    for (int64_t c = 0; c < cols; ++c) {
      double p = density;
      if (mask == MaskKind::kColumnSkew) p *= scale[static_cast<size_t>(c)];
      if (mask == MaskKind::kRowSkew) p *= scale[static_cast<size_t>(r)];
      if (mask == MaskKind::kBands) p = c / 64 % 2 == 0 ? 1.0 : 0.0;
      if (mask == MaskKind::kTwoFour) p = 1.0;
      if (uniform(rng) < p) row[c] = normal(rng);
    }
  }
  DenseMatrix out = *DenseMatrix::Create(dtype, rows, cols);
  EXPECT_TRUE(ConvertDense(wide.view(), out.mutable_view()).ok());
  if (mask == MaskKind::kTwoFour) {
    EXPECT_TRUE(PruneNm(out.mutable_view(), 2, 4).ok());
  }
  return out;
}

struct Options {
  DType x_dtype = DType::kF16;
  DType y_dtype = DType::kF16;
  Activation activation = Activation::kNone;
  bool bias = false;
  int64_t x_pad = 0;     // elements added to X's row stride
  int64_t x_offset = 0;  // elements by which X's first row is shifted
  int64_t y_pad = 0;
  int64_t y_offset = 0;
  uint32_t flags = 0;
  int launches = 1;
};

class ThreeLayerSpmmTest : public GpuTest {
 protected:
  void Check(const DenseMatrix& w, int64_t n, const Options& options, uint32_t seed) {
    Check(*Pack(Format::kThreeLayer, w.view()), w, n, options, seed);
  }
  void Check(const PackedLayer& packed, const DenseMatrix& w, int64_t n, const Options& options, uint32_t seed) {
    const LayerPtr layer = Upload(packed);
    ASSERT_NE(layer, nullptr);
    const int64_t m = w.rows();
    const int64_t k = w.cols();
    SCOPED_TRACE(::testing::Message() << "M=" << m << " K=" << k << " N=" << n << " " << Name(w.dtype()) << " x "
                                      << Name(options.x_dtype) << " y " << Name(options.y_dtype));
    const DenseMatrix x = MakeWeights(options.x_dtype, n, k, 1.0, MaskKind::kUniform, seed);
    std::vector<float> bias;
    if (options.bias) {
      std::mt19937 rng(seed + 1);
      std::normal_distribution<float> normal;
      for (int64_t i = 0; i < m; ++i) bias.push_back(normal(rng));
    }
    // The multiplication is of X rounded to the weights' dtype.
    DenseMatrix rounded = *DenseMatrix::Create(w.dtype(), n, k);
    ASSERT_TRUE(ConvertDense(x.view(), rounded.mutable_view()).ok());
    const Reference reference = ReferenceMatmul(w.view(), rounded.view(), bias, options.activation);

    const size_t x_size = SizeOf(options.x_dtype);
    const size_t y_size = SizeOf(options.y_dtype);
    const int64_t x_stride = k + options.x_pad;
    const int64_t y_stride = m + options.y_pad;
    DeviceBuffer x_device(static_cast<size_t>(options.x_offset + n * x_stride) * x_size);
    x_device.Fill(0xff);  // NaN wherever no activation is
    for (int64_t r = 0; r < n; ++r) {
      x_device.Upload(x.view().row(r), static_cast<size_t>(k) * x_size,
                      static_cast<size_t>(options.x_offset + r * x_stride) * x_size);
    }
    DeviceBuffer y_device(static_cast<size_t>(options.y_offset + n * y_stride + 64) * y_size);
    DeviceBuffer bias_device(bias.size() * 4);
    if (options.bias) bias_device.Upload(bias.data(), bias.size() * 4);

    spmmd_cuda_matmul call = {};
    call.x = x_device.data() + static_cast<size_t>(options.x_offset) * x_size;
    call.n = n;
    call.x_stride = x_stride;
    call.x_dtype = static_cast<int32_t>(options.x_dtype);
    call.y_dtype = static_cast<int32_t>(options.y_dtype);
    call.y = y_device.data() + static_cast<size_t>(options.y_offset) * y_size;
    call.y_stride = y_stride;
    call.bias = options.bias ? reinterpret_cast<const float*>(bias_device.data()) : nullptr;
    call.activation = static_cast<int32_t>(options.activation);
    call.flags = options.flags;
    uint64_t bytes = 0;
    GPU_OK(gpu().cuda->workspace_bytes(layer.get(), Kernel(), &call, &bytes));
    workspace_.Reserve(bytes);
    call.workspace = workspace_.data();
    call.workspace_bytes = bytes;
    std::vector<std::byte> first;
    for (int launch = 0; launch < options.launches; ++launch) {
      y_device.Fill(0xff);
      GPU_OK(gpu().cuda->launch(layer.get(), Kernel(), &call, gpu().stream));
      const std::vector<std::byte> y = y_device.Download();
      CheckOutput(y, n, m, options, reference, k);
      if (launch == 0) first = y;
      EXPECT_EQ(first, y) << "launch " << launch << " differs from the first";
      if (HasFailure()) return;
    }
  }

  static int32_t Kernel() { return gpu().cuda->find_kernel("three_layer_spmm"); }

  static void CheckOutput(const std::vector<std::byte>& y, int64_t n, int64_t m, const Options& options,
                          const Reference& reference, int64_t k) {
    const size_t size = SizeOf(options.y_dtype);
    const int64_t stride = m + options.y_pad;
    const DenseView view{y.data() + static_cast<size_t>(options.y_offset) * size, options.y_dtype, n, m, stride};
    const absl::Status status = CompareToReference(view, reference, DefaultTolerance(options.y_dtype, k));
    EXPECT_TRUE(status.ok()) << status;
    // Nothing outside the n x m outputs was touched.
    std::vector<bool> inside(y.size());
    for (int64_t r = 0; r < n; ++r) {
      const size_t begin = static_cast<size_t>(options.y_offset + r * stride) * size;
      std::fill_n(inside.begin() + static_cast<int64_t>(begin), static_cast<size_t>(m) * size, true);
    }
    for (size_t i = 0; i < y.size(); ++i) {
      if (!inside[i] && y[i] != std::byte{0xff}) {
        ADD_FAILURE() << "byte " << i << " outside the output was written";
        return;
      }
    }
  }

  Workspace workspace_;
};

TEST_F(ThreeLayerSpmmTest, OneTile) {
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    for (const MaskKind mask : {MaskKind::kTwoFour, MaskKind::kUniform}) {
      Options options;
      options.x_dtype = dtype;
      options.y_dtype = DType::kF32;
      Check(MakeWeights(dtype, 64, 128, 0.5, mask, 1), 8, options, 2);
    }
  }
}

TEST_F(ThreeLayerSpmmTest, RandomShapesDensitiesAndTypes) {
  std::mt19937 rng(20241130);
  const auto pick = [&](auto... values) {
    const std::vector<std::common_type_t<decltype(values)...>> all = {values...};
    return all[rng() % all.size()];
  };
  for (int round = 0; round < 80 && !HasFailure(); ++round) {
    const auto m = static_cast<int64_t>(rng() % 300 + 1);
    const auto k = static_cast<int64_t>(rng() % 300 + 1);
    const auto n = static_cast<int64_t>(rng() % 70 + 1);
    const DenseMatrix w = MakeWeights(pick(DType::kF16, DType::kBf16), m, k, pick(0.0, 0.02, 0.3, 0.5, 0.7, 1.0),
                                      pick(MaskKind::kUniform, MaskKind::kUniform, MaskKind::kColumnSkew,
                                           MaskKind::kRowSkew, MaskKind::kTwoFour, MaskKind::kBands),
                                      static_cast<uint32_t>(round));
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
    Check(w, n, options, static_cast<uint32_t>(round));
  }
}

// Whole blocks and shared ones, more CTAs than blocks and fewer, every padded number of tokens.
TEST_F(ThreeLayerSpmmTest, LargeShapesAreDeterministic) {
  const struct {
    int64_t m, k;
    double density;
    MaskKind mask;
  } shapes[] = {{4096, 1024, 0.5, MaskKind::kUniform}, {2500, 2100, 0.5, MaskKind::kColumnSkew},
                {70, 20000, 0.4, MaskKind::kUniform},  {16, 9000, 1.0, MaskKind::kUniform},
                {20000, 130, 0.5, MaskKind::kRowSkew}, {2112, 2300, 0.5, MaskKind::kTwoFour},
                {50700, 128, 0.5, MaskKind::kTwoFour}};
  for (const auto& shape : shapes) {
    const DenseMatrix w = MakeWeights(DType::kBf16, shape.m, shape.k, shape.density, shape.mask, 7);
    const PackedLayer packed = *Pack(Format::kThreeLayer, w.view());
    for (const int64_t n : {5, 16, 32, 64}) {
      Options options;
      options.x_dtype = DType::kBf16;
      options.y_dtype = DType::kF32;
      options.launches = 2;
      Check(packed, w, n, options, 3);
      if (HasFailure()) return;
    }
  }
}

// More code bytes than a stage has room for: a tile whose moves lie far apart in threads that each have many.
TEST_F(ThreeLayerSpmmTest, CodesThatAreNotStaged) {
  // Full groups in the first half of each tile, empty ones in the second: 2048 moves a tile.
  const DenseMatrix w = MakeWeights(DType::kF16, 130, 400, 0.5, MaskKind::kBands, 4);
  const PackedLayer packed = *Pack(Format::kThreeLayer, w.view());
  EXPECT_GT(packed.params[three_layer::kParamMaxCodeBytes], 2048);
  Check(packed, w, 20, {}, 5);
}

TEST_F(ThreeLayerSpmmTest, DamagedLayersAreRefusedBeforeTheyReachTheDevice) {
  const DenseMatrix w = MakeWeights(DType::kF16, 100, 300, 0.5, MaskKind::kUniform, 2);
  std::mt19937 rng(5);
  for (int round = 0; round < 300; ++round) {
    PackedLayer damaged = *Pack(Format::kThreeLayer, w.view());
    Buffer& data = damaged.sections[static_cast<size_t>(round) % damaged.sections.size()].data;
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
