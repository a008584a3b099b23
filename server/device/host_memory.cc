#include "server/device/host_memory.h"

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace spmmd::server {
namespace {

// The number in a file; none ("max", or no file) is no limit.
uint64_t ReadLimit(const std::string& file) {
  uint64_t limit = 0;
  std::ifstream in(file);
  return in >> limit && limit > 0 ? limit : std::numeric_limits<uint64_t>::max();
}

}  // namespace

uint64_t CgroupMemoryLimit(const std::string& root, const std::string& membership) {
  uint64_t limit = std::numeric_limits<uint64_t>::max();
  const auto look = [&limit](const std::string& hierarchy, std::string group, const char* file) {
    // In a container the path may be the host's, which is not there: its own group is then mounted at the root.
    for (;; group.erase(group.rfind('/'))) {
      limit = std::min(limit, ReadLimit(absl::StrCat(hierarchy, group, "/", file)));
      if (group.rfind('/') == std::string::npos) break;
    }
  };
  std::ifstream lines(membership);
  for (std::string line; std::getline(lines, line);) {
    // hierarchy-id:controllers:/path
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const std::string group = fields[2] == "/" ? "" : fields[2];
    if (fields[0] == "0" && fields[1].empty()) look(root, group, "memory.max");
    for (const absl::string_view controller : absl::StrSplit(fields[1], ',')) {
      if (controller == "memory") look(absl::StrCat(root, "/memory"), group, "memory.limit_in_bytes");
    }
  }
  return limit;
}

uint64_t UsableMemory() {
  const uint64_t physical =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return std::min(physical, CgroupMemoryLimit("/sys/fs/cgroup", "/proc/self/cgroup"));
}

void KeepFreedBlocks() {
  // Whoever runs this process may set malloc by its environment variables; that stands.
  const auto set = [](int parameter, const char* variable, int value) {
    if (std::getenv(variable) == nullptr) mallopt(parameter, value);
  };
  set(M_MMAP_THRESHOLD, "MALLOC_MMAP_THRESHOLD_", 32 << 20);  // the largest that glibc takes
  set(M_TRIM_THRESHOLD, "MALLOC_TRIM_THRESHOLD_", 256 << 20);
  // What is kept is kept for each arena, and there would be eight a core.
  set(M_ARENA_MAX, "MALLOC_ARENA_MAX", 8);
}

}  // namespace spmmd::server
