// Layers' bytes on their way to a device and back, and the memory they are in.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/format/packed_layer.h"
#include "tests/kernels/cuda/gpu.h"

namespace spmmd {
namespace {

using gpu_test::Gpu;
using gpu_test::GpuTest;
using gpu_test::LayerPtr;

// A DENSE fp16 layer of any bytes.
std::vector<uint16_t> RandomWords(int64_t count, uint64_t seed) {
  std::vector<uint16_t> words(static_cast<size_t>(count));
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (uint16_t& word : words) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    word = static_cast<uint16_t>(state >> 48);
  }
  return words;
}

LayerPtr UploadDense(const std::vector<uint16_t>& words, int64_t m, int64_t k) {
  const Gpu& gpu = Gpu::Get();
  spmmd_cuda_section section = {};
  section.id = 1;
  section.data = words.data();
  section.size = words.size() * 2;
  spmmd_cuda_layer_desc desc = {};
  desc.format = static_cast<int32_t>(Format::kDense);
  desc.dtype = static_cast<int32_t>(DType::kF16);
  desc.layout_version = 1;
  desc.num_sections = 1;
  desc.m = m;
  desc.k = k;
  desc.nnz = m * k;
  desc.sections = &section;
  spmmd_cuda_layer* layer = nullptr;
  EXPECT_EQ(gpu.cuda->layer_upload(gpu.device, &desc, &layer), SPMMD_CUDA_OK) << gpu.cuda->last_error();
  return {layer, gpu.cuda->layer_free};
}

// What is wrong: other bytes than `words`, or bytes written behind them; empty when nothing is.
std::string Compare(const spmmd_cuda_layer* layer, const std::vector<uint16_t>& words) {
  const Gpu& gpu = Gpu::Get();
  if (layer == nullptr) return "no layer";
  constexpr size_t kGuard = 64;
  std::vector<uint16_t> got(words.size() + kGuard, 0x5a5a);
  if (gpu.cuda->layer_read(layer, 1, got.data(), words.size() * 2) != SPMMD_CUDA_OK) return gpu.cuda->last_error();
  for (size_t i = 0; i < words.size(); ++i) {
    if (got[i] != words[i]) return "word " + std::to_string(i) + " of " + std::to_string(words.size()) + " differs";
  }
  const bool kept = std::all_of(got.end() - kGuard, got.end(), [](uint16_t word) { return word == 0x5a5a; });
  return kept ? "" : "bytes behind the end were written";
}

class LayerMemoryTest : public GpuTest {
 protected:
  uint64_t FreeBytes() {
    uint64_t bytes = 0;
    EXPECT_EQ(gpu().cuda->memory_info(gpu().device, &bytes, nullptr), SPMMD_CUDA_OK) << gpu().cuda->last_error();
    return bytes;
  }
};

TEST_F(LayerMemoryTest, BytesComeBack) {
  struct Case {
    int64_t m;
    int64_t k;
  };
  // One element, less than a piece of a transfer (1 MiB), exactly one, one and a bit, many; rows with padding on the
  // device, rows across pieces and longer than one.
  const Case cases[] = {{1, 1},       {3, 5},       {64, 8192},   {64, 8200},   {1, 524288},
                        {1, 524289},  {3, 1000003}, {4099, 2051}, {4096, 4096}, {100000, 3},
                        {2, 3 << 19}, {7, 524287},  {1000, 1049}, {8192, 1024}, {513, 16383}};
  for (const Case& c : cases) {
    const std::vector<uint16_t> words = RandomWords(c.m * c.k, static_cast<uint64_t>(c.m + c.k));
    const LayerPtr layer = UploadDense(words, c.m, c.k);
    EXPECT_EQ(Compare(layer.get(), words), "") << c.m << " x " << c.k;
    spmmd_cuda_layer* clone = nullptr;
    GPU_OK(gpu().cuda->layer_clone(layer.get(), &clone));
    const LayerPtr copy(clone, gpu().cuda->layer_free);
    EXPECT_EQ(Compare(copy.get(), words), "") << "clone of " << c.m << " x " << c.k;
  }
}

// Memory that a layer gave back is another's at once; none may see the other's bytes.
TEST_F(LayerMemoryTest, ManyThreadsTakeTurns) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int round = 0; round < (gpu_test::FewCases() ? 4 : 16); ++round) {
        const int64_t m = 700 + 300 * ((t + round) % 4);
        const int64_t k = 1021 + t;
        const std::vector<uint16_t> words = RandomWords(m * k, static_cast<uint64_t>(t * 100 + round));
        const LayerPtr layer = UploadDense(words, m, k);
        EXPECT_EQ(Compare(layer.get(), words), "") << "thread " << t << " round " << round;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// What layers left is there for whoever asks the device: as free bytes, and as memory outside the pool.
TEST_F(LayerMemoryTest, MemoryOfLayersIsGivenBack) {
  const int64_t k = 16384;
  const int64_t m = 16384;
  const uint64_t layer_bytes = static_cast<uint64_t>(m * k) * 2;
  const std::vector<uint16_t> words = RandomWords(m * k, 7);
  const uint64_t before = FreeBytes();
  ASSERT_GT(before, 3 * layer_bytes);
  {
    const LayerPtr a = UploadDense(words, m, k);
    const LayerPtr b = UploadDense(words, m, k);
    EXPECT_LE(FreeBytes() + 2 * layer_bytes, before + (uint64_t{64} << 20));
  }
  EXPECT_GE(FreeBytes() + (uint64_t{64} << 20), before);
  // More than the device has outside the pool while the pool keeps both layers.
  void* all = nullptr;
  GPU_OK(gpu().cuda->malloc(gpu().device, FreeBytes() - (uint64_t{512} << 20), &all));
  EXPECT_EQ(gpu().cuda->free(gpu().device, all), SPMMD_CUDA_OK);
  const LayerPtr again = UploadDense(words, m, k);
  EXPECT_EQ(Compare(again.get(), words), "");
}

}  // namespace
}  // namespace spmmd
