// Damaged layers of every format on the GPU: either the upload refuses them, or every kernel that takes them runs to
// its end and writes its outputs and nothing else. Under compute-sanitizer's memcheck this shows that no packed bytes
// make a kernel leave its buffers.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/format/bitmap_gpu.h"
#include "kernels/format/packed_layer.h"
#include "tests/kernels/cuda/gpu.h"

namespace spmmd::gpu_test {
namespace {

constexpr int64_t kFence = 64;  // elements before and behind the outputs

DenseMatrix Random(DType dtype, int64_t rows, int64_t cols, bool two_of_four, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  DenseMatrix wide = *DenseMatrix::Create(DType::kF32, rows, cols);
  for (int64_t r = 0; r < rows; ++r) {
    auto* const row = reinterpret_cast<float*>(wide.mutable_view().row(r));
    for (int64_t c = 0; c < cols; ++c) {
      if (two_of_four ? c % 4 < 2 : rng() % 2 == 0) row[c] = normal(rng);
    }
  }
  DenseMatrix out = *DenseMatrix::Create(dtype, rows, cols);
  EXPECT_TRUE(ConvertDense(wide.view(), out.mutable_view()).ok());
  return out;
}

// Something that a damaged file, or a hostile one, may have: bits, numbers or sizes that are not what was packed.
void Damage(PackedLayer& packed, std::mt19937& rng) {
  const auto section = [&]() -> Section& { return packed.sections[rng() % packed.sections.size()]; };
  switch (rng() % 6) {
    case 0:
    case 1:
    case 2: {  // bits
      Buffer& data = section().data;
      for (unsigned flips = rng() % 4 + 1; data.size() > 0 && flips > 0; --flips) {
        data.mutable_data()[rng() % data.size()] ^= static_cast<std::byte>(1u << (rng() % 8));
      }
      break;
    }
    case 3: {  // a word of any value: an offset, a count, a mask
      Buffer& data = section().data;
      if (data.size() < 4) break;
      const uint32_t words[] = {0, 1, 0xffffffffu, 0x7fffffffu, 0x80000000u, static_cast<uint32_t>(rng())};
      std::memcpy(data.mutable_data() + rng() % (data.size() / 4) * 4, &words[rng() % std::size(words)], 4);
      break;
    }
    case 4: {  // a number of the header
      const int64_t values[] = {0, -1, 1, int64_t{1} << 40, static_cast<int64_t>(rng() % 1000)};
      const int64_t value = values[rng() % std::size(values)];
      switch (rng() % 4) {
        case 0:
          packed.params[rng() % packed.params.size()] = value;
          break;
        case 1:
          packed.m = packed.m / 2 + 1;
          break;
        case 2:
          packed.k += static_cast<int64_t>(rng() % 300);
          break;
        default:
          packed.nnz = value;
      }
      break;
    }
    default: {  // a section cut off
      Section& cut = section();
      const size_t bytes = cut.data.size() == 0 ? 0 : rng() % cut.data.size();
      Buffer shorter = *Buffer::Allocate(bytes);
      std::copy_n(cut.data.data(), bytes, shorter.mutable_data());
      cut.data = std::move(shorter);
    }
  }
}

class CorruptLayerCudaTest : public GpuTest {
 protected:
  // All kernels that take the layer; dense and sparse activations.
  void RunAll(const spmmd_cuda_layer* layer, int64_t m, int64_t k) {
    constexpr int64_t kTokens = 9;
    DeviceBuffer x(static_cast<size_t>(kTokens * k) * 2);
    x.Fill(0x3c);
    DeviceBuffer y(static_cast<size_t>(2 * kFence + kTokens * m) * 4);
    std::vector<uint32_t> indices;
    for (int64_t c = 0; c < k; c += 3) indices.push_back(static_cast<uint32_t>(c));
    DeviceBuffer x_indices(indices.size() * 4);
    x_indices.Upload(indices.data(), indices.size() * 4);
    DeviceBuffer x_values(indices.size() * 4);
    x_values.Fill(0x3f);
    for (const int64_t n : {int64_t{1}, kTokens}) {
      for (const bool sparse : {false, true}) {
        if (sparse && n > 1) continue;
        spmmd_cuda_matmul call = {};
        call.n = n;
        call.x_stride = k;
        call.x_dtype = 1;
        call.y_dtype = 3;
        call.y = y.data() + kFence * 4;
        call.y_stride = m;
        if (sparse) {
          call.x_indices = reinterpret_cast<const uint32_t*>(x_indices.data());
          call.x_values = reinterpret_cast<const float*>(x_values.data());
          call.x_nnz = static_cast<int64_t>(indices.size());
        } else {
          call.x = x.data();
        }
        for (int32_t kernel = 0; kernel < gpu().cuda->kernel_count(); ++kernel) {
          if (gpu().cuda->can_implement(layer, kernel, &call) != SPMMD_CUDA_OK) continue;
          SCOPED_TRACE(gpu().cuda->kernel_name(kernel));
          uint64_t bytes = 0;
          GPU_OK(gpu().cuda->workspace_bytes(layer, kernel, &call, &bytes));
          workspace_.Reserve(bytes);
          call.workspace = workspace_.data();
          call.workspace_bytes = bytes;
          y.Fill(0xff);
          GPU_OK(gpu().cuda->launch(layer, kernel, &call, gpu().stream));
          const std::vector<std::byte> out = y.Download();
          const auto untouched = [](std::byte b) { return b == std::byte{0xff}; };
          ASSERT_TRUE(std::all_of(out.begin(), out.begin() + kFence * 4, untouched));
          ASSERT_TRUE(std::all_of(out.begin() + (kFence + n * m) * 4, out.end(), untouched));
          ++ran_;
        }
      }
    }
  }

  void Fuzz(const std::vector<PackedLayer>& layers, bool run = true) {
    std::mt19937 rng(17);
    const bool slow = std::getenv("SPMMD_GPU_SANITIZER") != nullptr;
    int refused = 0;
    int accepted = 0;
    for (const PackedLayer& packed : layers) {
      for (int round = 0; round < (slow ? 25 : 150); ++round) {
        PackedLayer damaged = packed;
        for (Section& section : damaged.sections) {
          const Buffer& whole = section.data;
          Buffer copy = *Buffer::Allocate(whole.size());
          std::copy_n(whole.data(), whole.size(), copy.mutable_data());
          section.data = std::move(copy);
        }
        Damage(damaged, rng);
        SCOPED_TRACE(::testing::Message() << Name(packed.format) << " round " << round);
        const CudaLayerDesc desc(damaged);
        spmmd_cuda_layer* layer = nullptr;
        const spmmd_cuda_status code = gpu().cuda->layer_upload(gpu().device, &desc.desc, &layer);
        if (code != SPMMD_CUDA_OK) {
          ++refused;
          EXPECT_TRUE(code == SPMMD_CUDA_DATA_LOSS || code == SPMMD_CUDA_INVALID_ARGUMENT) << code;
          EXPECT_STRNE(gpu().cuda->last_error(), "");
          continue;
        }
        ++accepted;
        if (run) RunAll(layer, damaged.m, damaged.k);
        spmmd_cuda_layer* dense = nullptr;
        if (gpu().cuda->layer_unpack(layer, gpu().stream, &dense) == SPMMD_CUDA_OK) {
          GPU_OK(gpu().cuda->stream_synchronize(gpu().device, gpu().stream));
          gpu().cuda->layer_free(dense);
        }
        gpu().cuda->layer_free(layer);
        if (HasFailure()) return;
      }
    }
    // Both ends were tried: damage that shows, and damage that could be anybody's weights.
    EXPECT_GT(refused, 0);
    EXPECT_GT(accepted, 0);
    if (run) {
      EXPECT_GE(ran_, accepted);
    }
  }

  bool Supported(Format format) const {
    return gpu().cuda->format_supported(gpu().device, static_cast<int32_t>(format)) == SPMMD_CUDA_OK;
  }

  Workspace workspace_;
  int ran_ = 0;
};

TEST_F(CorruptLayerCudaTest, BitmapGpu) {
  std::mt19937 rng(1);
  std::vector<PackedLayer> layers;
  for (const int chunk_cols : {128, 256}) {
    layers.push_back(*bitmap_gpu::Pack(Random(DType::kF16, 70, 700, false, rng).view(), {}, chunk_cols));
  }
  Fuzz(layers);
}

TEST_F(CorruptLayerCudaTest, RowStream) {
  std::mt19937 rng(2);
  Fuzz({*Pack(Format::kRowStream, Random(DType::kF16, 100, 500, false, rng).view()),
        *Pack(Format::kRowStream, Random(DType::kBf16, 100, 500, false, rng).view())});
}

TEST_F(CorruptLayerCudaTest, ColumnPiece) {
  std::mt19937 rng(3);
  Fuzz({*Pack(Format::kColumnPiece, Random(DType::kF16, 600, 90, false, rng).view()),
        *Pack(Format::kColumnPiece, Random(DType::kBf16, 30, 90, false, rng).view())});
}

TEST_F(CorruptLayerCudaTest, RlcCsc) {
  std::mt19937 rng(4);
  Fuzz({*Pack(Format::kRlcCsc, Random(DType::kF16, 300, 90, false, rng).view())});
}

TEST_F(CorruptLayerCudaTest, ThreeLayer) {
  if (!Supported(Format::kThreeLayer)) GTEST_SKIP() << "no kernel of this device reads THREE_LAYER";
  std::mt19937 rng(5);
  Fuzz({*Pack(Format::kThreeLayer, Random(DType::kF16, 130, 300, false, rng).view()),
        *Pack(Format::kThreeLayer, Random(DType::kBf16, 70, 300, true, rng).view())});
}

TEST_F(CorruptLayerCudaTest, Dense) {
  std::mt19937 rng(6);
  // cublasLt's kernels do not read what this library validates, and break under racecheck.
  Fuzz({*Pack(Format::kDense, Random(DType::kF16, 40, 50, false, rng).view())},
       /*run=*/std::getenv("SPMMD_GPU_SANITIZER") == nullptr);
}

// The ABI's other half: what a caller may get wrong and the library can see.
TEST_F(CorruptLayerCudaTest, NullPlacesForResultsAreRefused) {
  const auto& cuda = *gpu().cuda;
  const auto refused = [](spmmd_cuda_status code) { return code == SPMMD_CUDA_INVALID_ARGUMENT; };
  EXPECT_TRUE(refused(cuda.malloc(gpu().device, 16, nullptr)));
  EXPECT_TRUE(refused(cuda.host_malloc(gpu().device, 16, nullptr)));
  EXPECT_TRUE(refused(cuda.stream_create(gpu().device, nullptr)));
  EXPECT_TRUE(refused(cuda.event_create(gpu().device, 1, nullptr)));
  EXPECT_TRUE(refused(cuda.device_count(nullptr)));
  EXPECT_TRUE(refused(cuda.get_device_info(0, nullptr)));
  EXPECT_TRUE(refused(cuda.get_device_info(-1, nullptr)));
  EXPECT_TRUE(refused(cuda.device_open(0, nullptr)));
  EXPECT_TRUE(refused(cuda.read_probe(gpu().device, nullptr, 1 << 20, gpu().stream)));
  EXPECT_TRUE(refused(cuda.workspace_init(gpu().device, nullptr, 16, gpu().stream)));
  EXPECT_TRUE(refused(cuda.layer_device_bytes(nullptr, nullptr)));
  EXPECT_TRUE(refused(cuda.launch(nullptr, 0, nullptr, gpu().stream)));
  EXPECT_TRUE(refused(cuda.elementwise(gpu().device, nullptr, gpu().stream)));
  EXPECT_TRUE(refused(cuda.format_supported(nullptr, 1)));
  DeviceBuffer memory(64);
  void* base = nullptr;
  uint64_t bytes = 0;
  uint8_t handle[64] = {};
  EXPECT_TRUE(refused(cuda.ipc_export(gpu().device, memory.data(), nullptr)));
  EXPECT_TRUE(refused(cuda.ipc_open(gpu().device, nullptr, &base)));
  EXPECT_TRUE(refused(cuda.ipc_open(gpu().device, handle, nullptr)));
  EXPECT_TRUE(refused(cuda.address_range(gpu().device, memory.data(), nullptr, &bytes)));
  EXPECT_TRUE(refused(cuda.address_range(gpu().device, memory.data(), &base, nullptr)));
  spmmd_cuda_event event = nullptr;
  GPU_OK(cuda.event_create(gpu().device, 1, &event));
  GPU_OK(cuda.event_record(gpu().device, event, gpu().stream));
  GPU_OK(cuda.event_synchronize(gpu().device, event));
  EXPECT_TRUE(refused(cuda.event_query(gpu().device, event, nullptr)));
  EXPECT_TRUE(refused(cuda.event_elapsed_us(gpu().device, event, event, nullptr)));
  GPU_OK(cuda.event_destroy(gpu().device, event));
  EXPECT_TRUE(refused(cuda.graph_launch(gpu().device, nullptr, gpu().stream)));
  EXPECT_TRUE(refused(cuda.graph_end(gpu().device, gpu().stream, nullptr)));
  // The device is as it was.
  GPU_OK(cuda.stream_synchronize(gpu().device, gpu().stream));
}

}  // namespace
}  // namespace spmmd::gpu_test
