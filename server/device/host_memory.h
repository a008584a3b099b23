// How much memory this process may use.
#ifndef SPMMD_SERVER_DEVICE_HOST_MEMORY_H_
#define SPMMD_SERVER_DEVICE_HOST_MEMORY_H_

#include <cstdint>
#include <string>

namespace spmmd::server {

// The host's physical memory, or less where a control group (a container's, or a service's) allows less.
uint64_t UsableMemory();

// The smallest limit of the control groups that `membership` (a file like /proc/self/cgroup) says this process is in,
// and of all groups above them, under `root` (/sys/fs/cgroup); UINT64_MAX when there is none. Versions 1 and 2.
uint64_t CgroupMemoryLimit(const std::string& root, const std::string& membership);

// Lets malloc keep the blocks of large messages for the next ones, instead of returning them to the system at each
// free: fresh pages of a 16 MiB payload cost more than copying it. Blocks above 32 MiB still come and go. Settings in
// malloc's environment variables (MALLOC_TRIM_THRESHOLD_ and the like) win. Call it first of all.
void KeepFreedBlocks();

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_HOST_MEMORY_H_
