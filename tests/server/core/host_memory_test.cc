#include "server/device/host_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

namespace spmmd::server {
namespace {

constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();

class CgroupTest : public ::testing::Test {
 protected:
  CgroupTest() : root_(std::filesystem::path(::testing::TempDir()) / ("cgroup_test_" + std::to_string(getpid()))) {
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }
  ~CgroupTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& file, const std::string& text) {
    std::filesystem::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text << '\n';
  }
  uint64_t Limit(const std::string& membership) {
    Write("membership", membership);
    return CgroupMemoryLimit(root_.string(), (root_ / "membership").string());
  }

  std::filesystem::path root_;
};

TEST_F(CgroupTest, TheSmallestLimitFromTheGroupUpwardsCounts) {
  Write("system.slice/memory.max", "5000");
  Write("system.slice/spmmd.service/memory.max", "max");
  Write("other/memory.max", "7");
  EXPECT_EQ(Limit("0::/system.slice/spmmd.service"), 5000u);
  Write("system.slice/spmmd.service/memory.max", "4000");
  EXPECT_EQ(Limit("0::/system.slice/spmmd.service"), 4000u);
  EXPECT_EQ(Limit("0::/"), kNone);
}

TEST_F(CgroupTest, AContainersOwnGroupIsAtTheRoot) {
  Write("memory.max", "3000");
  EXPECT_EQ(Limit("0::/"), 3000u);
  EXPECT_EQ(Limit("0::/docker/0123"), 3000u) << "the host's path, which does not exist here";
}

TEST_F(CgroupTest, VersionOneHasAMemoryHierarchy) {
  Write("memory/docker/0123/memory.limit_in_bytes", "2000");
  Write("memory/memory.limit_in_bytes", "9223372036854771712");
  EXPECT_EQ(Limit("12:cpu,cpuacct:/x\n9:memory:/docker/0123\n0::/x"), 2000u);
}

TEST_F(CgroupTest, NonsenseIsNoLimit) {
  EXPECT_EQ(Limit(""), kNone);
  EXPECT_EQ(Limit("nonsense\n::\n0::"), kNone);
  EXPECT_EQ(CgroupMemoryLimit(root_.string(), (root_ / "missing").string()), kNone);
}

TEST(UsableMemoryTest, IsAtMostWhatTheHostHas) {
  EXPECT_GT(UsableMemory(), uint64_t{64} << 20);
  EXPECT_LE(UsableMemory(),
            static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)));
}

}  // namespace
}  // namespace spmmd::server
