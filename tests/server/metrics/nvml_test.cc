#include "server/metrics/nvml.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "prometheus/text_serializer.h"

namespace spmmd::server {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const char kUuid[] = "GPU-01234567-89ab-cdef-0123-456789abcdef";

class NvmlTest : public ::testing::Test {
 protected:
  ~NvmlTest() override { unsetenv("FAKE_NVML"); }

  static std::string Scrape(const std::vector<NvmlMetrics::Gpu>& gpus, const char* failing = "") {
    setenv("FAKE_NVML", failing, 1);
    auto metrics = NvmlMetrics::Open(gpus, FAKE_NVML_LIBRARY);
    if (!metrics.ok()) return std::string(metrics.status().message());
    return prometheus::TextSerializer().Serialize((*metrics)->Collect());
  }
};

TEST_F(NvmlTest, ReportsInBaseUnitsUnderOurNames) {
  const std::string text = Scrape({{"cuda:2", kUuid}});
  EXPECT_THAT(text, HasSubstr("spmmd_gpu_temperature_celsius{device=\"cuda:2\"} 61\n"));
  EXPECT_THAT(text, HasSubstr("spmmd_gpu_power_watts{device=\"cuda:2\"} 512.5\n"));
  EXPECT_THAT(text, HasSubstr("spmmd_gpu_power_limit_watts{device=\"cuda:2\"} 700\n"));
  EXPECT_THAT(text, HasSubstr("spmmd_gpu_clock_hertz{device=\"cuda:2\",clock=\"sm\"} 1980000000\n"));
  EXPECT_THAT(text, HasSubstr("spmmd_gpu_clock_hertz{device=\"cuda:2\",clock=\"memory\"} 3201000000\n"));
  EXPECT_THAT(text, HasSubstr("spmmd_gpu_utilization_ratio{device=\"cuda:2\"} 0.75\n"));
  EXPECT_THAT(text, HasSubstr("spmmd_gpu_memory_bytes{device=\"cuda:2\",kind=\"used\"} 600\n"));
  EXPECT_THAT(text, HasSubstr("spmmd_gpu_memory_bytes{device=\"cuda:2\",kind=\"total\"} 1000\n"));
  EXPECT_THAT(text, HasSubstr("# TYPE spmmd_gpu_ecc_errors_total counter\n"));
  EXPECT_THAT(text, HasSubstr("spmmd_gpu_ecc_errors_total{device=\"cuda:2\",type=\"uncorrected\"} 2\n"));
}

TEST_F(NvmlTest, WhatIsNotKnownIsAbsentNotZero) {
  const std::string text = Scrape({{"cuda:0", kUuid}}, "power,ecc");
  EXPECT_THAT(text, HasSubstr("spmmd_gpu_temperature_celsius"));
  EXPECT_THAT(text, Not(HasSubstr("power")));
  EXPECT_THAT(text, Not(HasSubstr("ecc")));
  EXPECT_THAT(text, Not(HasSubstr("throttled"))) << "the stand-in lacks that function";
}

TEST_F(NvmlTest, AGpuThatNvmlDoesNotKnowIsLeftOut) {
  const std::string text = Scrape({{"cuda:0", "MIG-unknown"}, {"cuda:1", kUuid}});
  EXPECT_THAT(text, Not(HasSubstr("cuda:0")));
  EXPECT_THAT(text, HasSubstr("cuda:1"));
  EXPECT_EQ(Scrape({{"cuda:0", "MIG-unknown"}}), "NVML knows none of the GPUs");
}

TEST_F(NvmlTest, SaysWhyThereIsNone) {
  EXPECT_EQ(Scrape({{"cuda:0", kUuid}}, "init"), "nvmlInit returned 9");
  EXPECT_THAT(std::string(NvmlMetrics::Open({}, "/no/such/library.so").status().message()),
              HasSubstr("/no/such/library.so"));
  EXPECT_THAT(std::string(NvmlMetrics::Open({}, "libm.so.6").status().message()), HasSubstr("is not NVML"));
}

// With a GPU and its driver: SPMMD_GPU_UUID as `nvidia-smi -L` shows it.
TEST(NvmlGpuTest, TheRealLibraryGivesEverything) {
  const char* uuid = std::getenv("SPMMD_GPU_UUID");
  if (uuid == nullptr) GTEST_SKIP() << "SPMMD_GPU_UUID names no GPU";
  auto metrics = NvmlMetrics::Open({{"cuda:0", uuid}});
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  const std::string text = prometheus::TextSerializer().Serialize((*metrics)->Collect());
  std::fputs(text.c_str(), stdout);
  for (const char* name : {"temperature_celsius", "power_watts", "power_limit_watts", "clock_hertz",
                           "utilization_ratio", "memory_bytes", "ecc_errors_total", "throttled"}) {
    EXPECT_THAT(text, HasSubstr(std::string("\nspmmd_gpu_") + name + "{device=\"cuda:0\"")) << name;
  }
}

}  // namespace
}  // namespace spmmd::server
