// The table of measured times: which entry stands for a width, and its file, whole, damaged and of another machine.
#include "kernels/dispatch/cuda_tuning.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

namespace spmmd {
namespace {

const char* KernelName(int32_t kernel) { return kernel == 0 ? "first" : "second"; }
int32_t FindKernel(const char* name) {
  return std::strcmp(name, "first") == 0 ? 0 : std::strcmp(name, "second") == 0 ? 1 : -1;
}
uint64_t OldCublasLt() { return 1; }
uint64_t NewCublasLt() { return 2; }
int32_t AbiVersion() { return SPMMD_CUDA_ABI_VERSION; }

CudaLibrary Library(uint64_t (*cublaslt)()) {
  CudaLibrary library;
  library.kernel_name = KernelName;
  library.find_kernel = FindKernel;
  library.cublaslt_version = cublaslt;
  library.abi_version = AbiVersion;
  return library;
}

class CudaTuningTest : public ::testing::Test {
 protected:
  static constexpr char kDevice[] = "Fake GPU";

  CudaTuningTest() {
    const CudaWidths widths = {{1, 1, 10.5, 13.25, 3}, {64, 0, 20, 15, 0}, {1024, -1, 0, 99, -1}};
    table_.Put(shape_, widths);
    table_.Put(CudaShape::Of(DType::kBf16, 7, 9, 0), {{1, -1, 0, 0, -1}});
  }

  absl::Status LoadText(const std::string& text) {
    std::ofstream(path_, std::ios::binary) << text;
    CudaTuningTable read(&library_);
    const absl::Status status = read.Load(path_, kDevice);
    EXPECT_EQ(read.size(), status.ok() ? 2 : 0) << status;
    return status;
  }
  std::string FileText() {
    std::ifstream in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  const CudaLibrary library_ = Library(OldCublasLt);
  const CudaShape shape_ = CudaShape::Of(DType::kF16, 4096, 1024, 4096 * 1024 / 2);
  CudaTuningTable table_{&library_};
  const std::string path_ = ::testing::TempDir() + "cuda_tuning_test.tsv";
};

TEST_F(CudaTuningTest, ShapesDifferByStepsOfDensity) {
  EXPECT_EQ(shape_.density_pct, 50);
  EXPECT_EQ(CudaShape::Of(DType::kF16, 100, 100, 5240), CudaShape::Of(DType::kF16, 100, 100, 4760));
  EXPECT_NE(CudaShape::Of(DType::kF16, 100, 100, 5260), CudaShape::Of(DType::kF16, 100, 100, 5000));
  EXPECT_NE(CudaShape::Of(DType::kF16, 100, 100, 5000), CudaShape::Of(DType::kBf16, 100, 100, 5000));
  EXPECT_EQ(CudaShape::Of(DType::kF16, 1 << 18, 1 << 18, (int64_t{1} << 36)).density_pct, 100);
}

TEST_F(CudaTuningTest, AWidthIsStoodForByTheNextMeasured) {
  const CudaWidths& widths = *table_.Find(shape_);
  EXPECT_EQ(WidthFor(widths, 1).tokens, 1);
  EXPECT_EQ(WidthFor(widths, 2).tokens, 64);
  EXPECT_EQ(WidthFor(widths, 64).tokens, 64);
  EXPECT_EQ(WidthFor(widths, 65).tokens, 1024);
  EXPECT_EQ(WidthFor(widths, 1 << 20).tokens, 1024);
  EXPECT_FALSE(widths[0].dense_is_faster());
  EXPECT_TRUE(widths[1].dense_is_faster());
  EXPECT_TRUE(widths[2].dense_is_faster());
  EXPECT_EQ(table_.Find(CudaShape::Of(DType::kF16, 4096, 1024, 0)), nullptr);
}

TEST_F(CudaTuningTest, AFileComesBackAsItWas) {
  ASSERT_TRUE(table_.Save(path_, kDevice).ok());
  CudaTuningTable read(&library_);
  const absl::Status status = read.Load(path_, kDevice);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(read.size(), 2);
  const auto widths = read.Find(shape_);
  ASSERT_NE(widths, nullptr);
  ASSERT_EQ(widths->size(), 3);
  EXPECT_EQ((*widths)[0].kernel, 1);
  EXPECT_EQ((*widths)[0].sparse_us, 10.5);
  EXPECT_EQ((*widths)[0].dense_us, 13.25);
  EXPECT_EQ((*widths)[0].dense_candidate, 3);
  EXPECT_EQ((*widths)[2].kernel, -1);
  // Written again, the same bytes.
  const std::string before = FileText();
  ASSERT_TRUE(read.Save(path_, kDevice).ok());
  EXPECT_EQ(FileText(), before);
}

TEST_F(CudaTuningTest, AFileOfAnotherMachineIsNotTaken) {
  ASSERT_TRUE(table_.Save(path_, kDevice).ok());
  CudaTuningTable read(&library_);
  EXPECT_EQ(read.Load(path_, "Other GPU").code(), absl::StatusCode::kFailedPrecondition);
  const CudaLibrary newer = Library(NewCublasLt);
  CudaTuningTable upgraded(&newer);
  EXPECT_EQ(upgraded.Load(path_, kDevice).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(read.size() + upgraded.size(), 0);
  EXPECT_EQ(read.Load(path_ + ".none", kDevice).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(table_.Save("/proc/none/file", kDevice).code(), absl::StatusCode::kUnavailable);
}

TEST_F(CudaTuningTest, ADamagedFileIsNotTaken) {
  ASSERT_TRUE(table_.Save(path_, kDevice).ok());
  const std::string good = FileText();
  ASSERT_TRUE(LoadText(good).ok());
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    EXPECT_EQ(LoadText(bad).code(), absl::StatusCode::kDataLoss) << at;
  }
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_EQ(LoadText(good.substr(0, size)).code(), absl::StatusCode::kDataLoss) << size;
  }
}

}  // namespace
}  // namespace spmmd
