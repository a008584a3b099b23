// BITMAP_GPU packed on the GPU is, byte for byte, what the CPU packer makes, and unpacks to the matrix it was made of:
// odd shapes, densities, skew, dense chunks, strides and alignments; bad input.
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/format/bitmap_gpu.h"
#include "kernels/format/bitmap_gpu_layout.h"
#include "tests/kernels/cuda/gpu.h"

namespace spmmd::gpu_test {
namespace {

// 16-bit patterns, zero with probability 1 - density * scale of the column; some zeros are -0.0.
DenseMatrix RandomBits(DType dtype, int64_t rows, int64_t cols, double density, double sigma, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  std::vector<double> scale(static_cast<size_t>(cols));
  for (double& s : scale) s = std::exp(sigma * normal(rng));
  DenseMatrix out = *DenseMatrix::Create(dtype, rows, cols);
  for (int64_t r = 0; r < rows; ++r) {
    auto* row = reinterpret_cast<uint16_t*>(out.mutable_view().row(r));
    for (int64_t c = 0; c < cols; ++c) {
      const bool nonzero = uniform(rng) < density * scale[static_cast<size_t>(c)];
      row[c] = static_cast<uint16_t>(nonzero ? rng() % 0x3bff + 1 : 0) | static_cast<uint16_t>(rng() % 2 << 15);
    }
  }
  return out;
}

class BitmapGpuPackTest : public GpuTest {
 protected:
  // Unpacking on the device gives `w` back, bit for bit but for -0.0.
  void CheckUnpacked(const spmmd_cuda_layer* layer, const DenseMatrix& w) {
    spmmd_cuda_layer* unpacked = nullptr;
    GPU_OK(gpu().cuda->layer_unpack(layer, gpu().stream, &unpacked));
    const LayerPtr dense(unpacked, gpu().cuda->layer_free);
    GPU_OK(gpu().cuda->stream_synchronize(gpu().device, gpu().stream));
    std::vector<uint16_t> got(static_cast<size_t>(w.rows() * w.cols()));
    GPU_OK(gpu().cuda->layer_read(dense.get(), /*section=*/1, got.data(), got.size() * 2));
    for (int64_t r = 0; r < w.rows(); ++r) {
      const auto* want = reinterpret_cast<const uint16_t*>(w.view().row(r));
      for (int64_t c = 0; c < w.cols(); ++c) {
        const uint16_t bits = (want[c] & 0x7fff) == 0 ? uint16_t{0} : want[c];
        ASSERT_EQ(got[static_cast<size_t>(r * w.cols() + c)], bits) << "row " << r << " column " << c;
      }
    }
  }

  // Packs `w` on the device from rows `pad` elements longer, `offset` elements into an allocation.
  void Check(const DenseMatrix& w, int chunk_cols, int64_t pad, int64_t offset) {
    SCOPED_TRACE(::testing::Message() << w.rows() << "x" << w.cols() << " " << Name(w.dtype()) << " chunks of "
                                      << chunk_cols << ", pad " << pad << ", offset " << offset);
    const PackedLayer want = *bitmap_gpu::Pack(w.view(), {}, chunk_cols);
    const int64_t stride = w.cols() + pad;
    DeviceBuffer device(static_cast<size_t>(offset + w.rows() * stride) * 2);
    device.Fill(0x7f);  // nonzero and not finite in fp16: what lies between the rows must not be read
    for (int64_t r = 0; r < w.rows(); ++r) {
      device.Upload(w.view().row(r), static_cast<size_t>(w.cols()) * 2, static_cast<size_t>(offset + r * stride) * 2);
    }
    spmmd_cuda_dense_weights weights = {};
    weights.data = device.data() + offset * 2;
    weights.m = w.rows();
    weights.k = w.cols();
    weights.row_stride = stride;
    weights.dtype = static_cast<int32_t>(w.dtype());
    weights.chunk_cols = chunk_cols;
    spmmd_cuda_packed_info info = {};
    spmmd_cuda_layer* packed = nullptr;
    GPU_OK(gpu().cuda->pack_bitmap_gpu(gpu().device, &weights, gpu().stream, &info, &packed));
    const LayerPtr layer(packed, gpu().cuda->layer_free);
    EXPECT_EQ(info.nnz, want.nnz);
    EXPECT_EQ(info.max_chunk_bytes, want.params[bitmap_gpu::kParamMaxChunkBytes]);
    const uint64_t sizes[] = {info.chunk_bytes, info.offset_bytes};
    const uint32_t ids[] = {bitmap_gpu::kChunkSection, bitmap_gpu::kOffsetSection};
    for (int i = 0; i < 2; ++i) {
      const Buffer& expected = want.FindSection(ids[i])->data;
      ASSERT_EQ(sizes[i], expected.size());
      std::vector<std::byte> bytes(expected.size());
      GPU_OK(gpu().cuda->layer_read(layer.get(), ids[i], bytes.data(), bytes.size()));
      ASSERT_EQ(std::memcmp(bytes.data(), expected.data(), bytes.size()), 0) << "section " << ids[i];
    }
    CheckUnpacked(layer.get(), w);
  }
};

TEST_F(BitmapGpuPackTest, SameBytesAsTheCpuPacker) {
  std::mt19937 rng(3);
  const double densities[] = {0.0, 0.02, 0.3, 0.5, 0.5, 0.7, 1.0};
  for (int round = 0; round < 80 && !HasFailure(); ++round) {
    const DenseMatrix w = RandomBits(round % 2 == 0 ? DType::kF16 : DType::kBf16, static_cast<int64_t>(rng() % 300 + 1),
                                     static_cast<int64_t>(rng() % 600 + 1), densities[rng() % 7],
                                     rng() % 2 == 0 ? 0.0 : 1.0, static_cast<uint32_t>(round));
    Check(w, rng() % 2 == 0 ? 128 : 256, static_cast<int64_t>(rng() % 3), static_cast<int64_t>(rng() % 2));
  }
}

TEST_F(BitmapGpuPackTest, LargeMatrix) { Check(RandomBits(DType::kF16, 1500, 4100, 0.5, 0.5, 1), 256, 0, 0); }

TEST_F(BitmapGpuPackTest, BadInputIsRefused) {
  DeviceBuffer device(64 * 64 * 2);
  device.Fill(0);
  spmmd_cuda_dense_weights good = {};
  good.data = device.data();
  good.m = 64;
  good.k = 64;
  good.row_stride = 64;
  good.dtype = static_cast<int32_t>(DType::kF16);
  good.chunk_cols = 128;
  const auto expect = [&](const spmmd_cuda_dense_weights& weights, const char* field) {
    spmmd_cuda_layer* layer = nullptr;
    EXPECT_EQ(gpu().cuda->pack_bitmap_gpu(gpu().device, &weights, gpu().stream, nullptr, &layer),
              SPMMD_CUDA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(gpu().cuda->last_error()).find(field), std::string::npos) << gpu().cuda->last_error();
  };
  auto bad = good;
  bad.data = nullptr;
  expect(bad, "data");
  bad = good;
  bad.m = 0;
  expect(bad, "m:");
  bad = good;
  bad.row_stride = 63;
  expect(bad, "row_stride");
  bad = good;
  bad.dtype = static_cast<int32_t>(DType::kF32);
  expect(bad, "dtype");
  bad = good;
  bad.chunk_cols = 64;
  expect(bad, "chunk_cols");
  device.Fill(0xff);  // NaN
  expect(good, "4096 weights are NaN");
  good.allow_nonfinite = 1;
  spmmd_cuda_layer* layer = nullptr;
  GPU_OK(gpu().cuda->pack_bitmap_gpu(gpu().device, &good, gpu().stream, nullptr, &layer));
  gpu().cuda->layer_free(layer);
}

}  // namespace
}  // namespace spmmd::gpu_test
