// Keeps the process alive when memory that it shares with others goes away under it.
//
// Another process may truncate a shared-memory object that is mapped here, and writing to a page of a full /dev/shm
// fails in the same way: the access raises SIGBUS. POSIX objects cannot be sealed against that, and a check before an
// access would come too early. So the handler puts zero pages where the memory is gone, marks the mapping as broken,
// and the access goes on; whoever reads the result looks at the mark before believing it.
#ifndef SPMMD_SERVER_SHM_SIGBUS_GUARD_H_
#define SPMMD_SERVER_SHM_SIGBUS_GUARD_H_

#include <atomic>
#include <cstddef>

namespace spmmd::server {

class SigbusGuard {
 public:
  // Mappings guarded at a time, in the whole process.
  static constexpr int kMaxMappings = 4096;

  SigbusGuard() = default;
  ~SigbusGuard() { Remove(); }
  SigbusGuard(const SigbusGuard&) = delete;
  SigbusGuard& operator=(const SigbusGuard&) = delete;

  // Guards a mapping of whole pages; installs the handler when it is the first of the process. False when there are
  // kMaxMappings already. Once the mapping is broken, all that lies between the first page that was gone and the
  // mapping's end is private zero pages. Remove() it before the mapping goes.
  bool Add(std::byte* begin, size_t bytes);
  void Remove();

  bool broken() const { return broken_.load(std::memory_order_acquire); }

 private:
  int slot_ = -1;
  std::atomic<bool> broken_{false};
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_SHM_SIGBUS_GUARD_H_
