// Dense copies of layers in spare memory, and kernels chosen by measured times. Runs on a GPU, and on every machine
// over the fake library.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "tests/server/device/cuda_harness.h"

namespace spmmd::server {
namespace {

using testing::CudaCore;
using testing::DenseSpec;
using ::testing::HasSubstr;
using testing::MatmulRequest;
using testing::RandomMatrix;
using testing::Series;
using testing::Unmeasured;
using testing::ViewOf;

// More tokens than the sparse kernels are taken for unmeasured.
constexpr int64_t kWide = 96;

class CudaDispatchTest : public testing::CudaTest {
 protected:
  void RegisterBitmap(CudaCore& core, const std::string& name, const DenseMatrix& w, bool deterministic = false) {
    pb::LayerSpec spec = DenseSpec(name, w.view());
    spec.set_format(pb::FORMAT_BITMAP);
    spec.set_deterministic(deterministic);
    const auto layer = core.Register(spec, w.view());
    ASSERT_TRUE(layer.ok()) << layer.status();
  }
  void Check(CudaCore& core, const std::string& name, const DenseMatrix& w, int64_t n) {
    const DenseMatrix x = RandomMatrix(w.dtype(), n, w.cols(), 0, static_cast<uint32_t>(n));
    pb::ExecuteResponse response;
    const absl::Status status = core.Execute(MatmulRequest(name, x.view()), &response);
    ASSERT_TRUE(status.ok()) << status;
    const absl::Status compared =
        CompareToReference(ViewOf(response.outputs(0).tensor()), ReferenceMatmul(w.view(), x.view()),
                           DefaultTolerance(DType::kF32, w.cols()));
    EXPECT_TRUE(compared.ok()) << compared;
  }
  static uint64_t ShadowBytes(CudaCore& core, const std::string& name) {
    pb::Layer layer;
    (*core.catalog.Find(name, 0))->Describe(/*full=*/true, &layer);
    return layer.residency(0).dense_shadow_bytes();
  }
};

TEST_F(CudaDispatchTest, ALayerGetsADenseCopyWhenWideRequestsRecur) {
  CudaCore core(library_, Unmeasured());
  MemoryBudget& budget = core.device->budget();
  const DenseMatrix w = RandomMatrix(DType::kF16, 203, 265, 0.5, 1);
  RegisterBitmap(core, "w", w);
  Check(core, "w", w, kWide);
  Check(core, "w", w, 4);
  EXPECT_EQ(ShadowBytes(core, "w"), 0) << "after one wide request";
  for (int i = 0; i < 4; ++i) Check(core, "w", w, kWide);
  const uint64_t bytes = ShadowBytes(core, "w");
  EXPECT_GE(bytes, 203 * 265 * 2);
  EXPECT_EQ(budget.used(MemoryKind::kShadow), bytes);
  EXPECT_EQ(Series(core.metrics, "spmmd_device_memory_bytes{device=\"cuda:0\",kind=\"shadow\"}"),
            static_cast<double>(bytes));
  for (const int64_t n : {1, 5, 64, 65, 200}) Check(core, "w", w, n);
  pb::UnregisterLayerResponse removed;
  ASSERT_TRUE(testing::UnregisterFrom(core.catalog, "w", 0, &removed).ok());
  EXPECT_EQ(budget.used(MemoryKind::kShadow), 0) << "freed before unregistering answers";
}

// On a device that runs the portable kernels, by its architecture or by order.
class PortableDispatchTest : public CudaDispatchTest {
 protected:
  void SetUp() override {
    setenv("SPMMD_CUDA_PORTABLE", "1", /*overwrite=*/1);
    CudaDispatchTest::SetUp();
  }
  void TearDown() override { unsetenv("SPMMD_CUDA_PORTABLE"); }

  static DenseMatrix TwoOfFour(int64_t m, int64_t k) {
    DenseMatrix w = RandomMatrix(DType::kF16, m, k, 0, 1);
    for (int64_t r = 0; r < m; ++r) {
      auto* const row = reinterpret_cast<uint16_t*>(w.mutable_view().row(r));
      for (int64_t c = 0; c < k; ++c) {
        if (c % 4 >= 2) row[c] = 0;
      }
    }
    return w;
  }
};

TEST_F(PortableDispatchTest, AutoTakesBitmapOrDenseWhateverTheMask) {
  CudaCore core(library_, Unmeasured());
  FormatQuery query;
  query.dtype = DType::kF16;
  query.m = 8192;
  query.k = 4096;
  query.nnz = query.m * query.k / 2;
  query.may_measure = false;
  query.two_of_four = true;
  EXPECT_EQ(core.device->ChooseFormat(query).format, Format::kBitmapGpu);
  query.two_of_four = false;
  query.sparse_activations = true;
  EXPECT_EQ(core.device->ChooseFormat(query).format, Format::kBitmapGpu);
  query.nnz = query.m * query.k;
  EXPECT_EQ(core.device->ChooseFormat(query).format, Format::kDense);
}

TEST_F(PortableDispatchTest, ThreeLayerIsRefusedByName) {
  CudaCore core(library_, Unmeasured());
  EXPECT_FALSE(core.device->CanExecute(Format::kThreeLayer));
  for (const Format format : {Format::kDense, Format::kBitmapGpu, Format::kRowStream, Format::kColumnPiece}) {
    EXPECT_TRUE(core.device->CanExecute(format)) << Name(format);
  }
  const DenseMatrix w = TwoOfFour(64, 128);
  pb::LayerSpec spec = DenseSpec("w", w.view());
  spec.set_format(pb::FORMAT_THREE_LAYER);
  const auto layer = core.Register(spec, w.view());
  ASSERT_FALSE(layer.ok());
  EXPECT_THAT(layer.status().message(), HasSubstr("THREE_LAYER"));
}

// A measured layer is served by what was measured, which on such a device is the portable kernel or cublasLt.
TEST_F(PortableDispatchTest, MeasuresAndServes) {
  DeviceOptions options = Unmeasured();
  options.tune_kernels = true;
  CudaCore core(library_, options);
  const DenseMatrix w = TwoOfFour(203, 264);
  const auto layer = core.Register("w", w.view());
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_THAT(layer->format_reason(), HasSubstr("measured us, BITMAP/DENSE: N = 1 "));
  RegisterBitmap(core, "v", w);
  for (const int64_t n : {1, 5, 64, 65, 200}) {
    Check(core, "w", w, n);
    Check(core, "v", w, n);
  }
}

TEST_F(CudaDispatchTest, ItGoesWhenTheMemoryIsNeeded) {
  DeviceOptions options = Unmeasured();
  options.memory_limit_bytes = uint64_t{96} << 20;
  options.shadow_quiet = absl::InfiniteDuration();
  CudaCore core(library_, options);
  MemoryBudget& budget = core.device->budget();
  const DenseMatrix w = RandomMatrix(DType::kF16, 256, 256, 0.5, 1);
  RegisterBitmap(core, "w", w);
  for (int i = 0; i < 4; ++i) Check(core, "w", w, kWide);  // the last ones are replayed graphs
  ASSERT_GT(ShadowBytes(core, "w"), 0);
  {
    const auto all = budget.Reserve(MemoryKind::kWeights, budget.free() + 1);
    ASSERT_TRUE(all.ok()) << all.status();
    EXPECT_EQ(ShadowBytes(core, "w"), 0);
    EXPECT_EQ(budget.used(MemoryKind::kShadow), 0);
    for (int i = 0; i < 4; ++i) Check(core, "w", w, kWide);
  }
  for (int i = 0; i < 4; ++i) Check(core, "w", w, kWide);
  EXPECT_EQ(ShadowBytes(core, "w"), 0) << "not at once again";
}

TEST_F(CudaDispatchTest, MemoryIsReclaimedWhileItIsInUse) {
  DeviceOptions options = Unmeasured();
  options.memory_limit_bytes = uint64_t{96} << 20;
  options.shadow_quiet = absl::ZeroDuration();
  CudaCore core(library_, options);
  MemoryBudget& budget = core.device->budget();
  const DenseMatrix w = RandomMatrix(DType::kF16, 96, 128, 0.5, 1);
  const DenseMatrix v = RandomMatrix(DType::kF16, 64, 128, 0.5, 2);
  RegisterBitmap(core, "w", w);
  RegisterBitmap(core, "v", v);
  for (int i = 0; i < 3; ++i) Check(core, "w", w, kWide);
  std::atomic<bool> done{false};
  std::atomic<int> made{0};
  std::thread other([&] {
    while (!done) {
      if (budget.used(MemoryKind::kShadow) > 0) ++made;
      const uint64_t all = budget.free() + budget.used(MemoryKind::kShadow);
      // What the runs keep may have grown meanwhile.
      budget.Reserve(MemoryKind::kWeights, all).status().IgnoreError();
    }
  });
  for (int i = 0; i < 60; ++i) {
    Check(core, "w", w, kWide + i % 3);
    Check(core, "v", v, kWide);
  }
  done = true;
  other.join();
  EXPECT_GT(made, 0);
}

TEST_F(CudaDispatchTest, NotWhenSwitchedOffNorForDeterministicLayers) {
  DeviceOptions options = Unmeasured();
  options.dense_shadows = false;
  const DenseMatrix w = RandomMatrix(DType::kF16, 96, 128, 0.5, 1);
  {
    CudaCore core(library_, options);
    RegisterBitmap(core, "w", w);
    for (int i = 0; i < 4; ++i) Check(core, "w", w, kWide);
    EXPECT_EQ(ShadowBytes(core, "w"), 0);
  }
  CudaCore core(library_, Unmeasured());
  RegisterBitmap(core, "w", w, /*deterministic=*/true);
  for (int i = 0; i < 4; ++i) Check(core, "w", w, kWide);
  EXPECT_EQ(ShadowBytes(core, "w"), 0);
}

TEST_F(CudaDispatchTest, KernelsAreMeasuredOnceAndKept) {
  const std::filesystem::path directory = std::filesystem::path(::testing::TempDir()) / "cuda_dispatch_test";
  std::filesystem::remove_all(directory);
  DeviceOptions options = Unmeasured();
  options.tune_kernels = true;
  options.tuning_dir = directory.string();
  const DenseMatrix w = RandomMatrix(DType::kBf16, 64, 80, 0.5, 1);
  const auto file = [&]() -> std::filesystem::path {
    for (const auto& entry : std::filesystem::directory_iterator(directory / "tuning")) return entry.path();
    return {};
  };
  std::string first;
  std::string last_reason;
  for (int start = 0; start < 3; ++start) {
    CudaCore core(library_, options);
    const auto layer = core.Register("w", w.view());
    ASSERT_TRUE(layer.ok()) << layer.status();
    EXPECT_THAT(layer->format_reason(), HasSubstr("measured us, BITMAP/DENSE: N = 1 "));
    EXPECT_EQ(core.device->budget().used(MemoryKind::kWorkspace), 0);
    for (const int64_t n : {1, 3, 40, 300}) {
      for (int i = 0; i < 3; ++i) Check(core, "w", w, n);
    }
    std::ifstream in(file(), std::ios::binary);
    const std::string text(std::istreambuf_iterator<char>(in), {});
    if (start == 0) {
      first = text;
    } else if (start == 1) {
      EXPECT_EQ(layer->format_reason(), last_reason) << "measured again";
      EXPECT_EQ(text, first);
      // Damaged: measured again, and whole again.
      std::ofstream(file(), std::ios::binary) << text.substr(0, text.size() / 2);
    } else {
      EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), std::count(first.begin(), first.end(), '\n'));
    }
    last_reason = layer->format_reason();
  }
  std::filesystem::remove_all(directory);
}

TEST_F(CudaDispatchTest, WithoutSpareMemoryNothingIsMeasured) {
  DeviceOptions options = Unmeasured();
  options.tune_kernels = true;
  options.memory_limit_bytes = uint64_t{64} << 20;
  CudaCore core(library_, options);
  const DenseMatrix w = RandomMatrix(DType::kF16, 64, 80, 0.5, 1);
  const auto layer = core.Register("w", w.view());
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->format(), pb::FORMAT_DENSE);
  EXPECT_THAT(layer->format_reason(), HasSubstr("as fast dense"));
}

}  // namespace
}  // namespace spmmd::server
