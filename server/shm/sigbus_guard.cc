#include "server/shm/sigbus_guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <mutex>

namespace spmmd::server {
namespace {

// What the handler looks at: no lock, no allocation. `begin` is written last and cleared first.
struct Mapping {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<std::atomic<bool>*> broken{nullptr};
};
Mapping mappings[SigbusGuard::kMaxMappings];
struct sigaction previous;

void OnSigbus(int signal, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (Mapping& mapping : mappings) {
    const uintptr_t begin = mapping.begin.load(std::memory_order_acquire);
    const uintptr_t end = mapping.end.load(std::memory_order_acquire);
    if (begin == 0 || address < begin || address >= end) continue;
    static const uintptr_t page = static_cast<uintptr_t>(getpagesize());
    const uintptr_t from = address / page * page;
    void* const zeros = mmap(reinterpret_cast<void*>(from), end - from, PROT_READ | PROT_WRITE,
                             MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (zeros == MAP_FAILED) break;
    mapping.broken.load(std::memory_order_acquire)->store(true, std::memory_order_release);
    errno = saved_errno;
    return;
  }
  errno = saved_errno;
  // Not ours: what would have happened without this handler.
  if ((previous.sa_flags & SA_SIGINFO) != 0 && previous.sa_sigaction != nullptr) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    previous.sa_handler(signal);
  } else {
    std::signal(SIGBUS, SIG_DFL);  // the access is tried again and ends the process
  }
}

void Install() {
  static std::once_flag once;
  std::call_once(once, [] {
    static_cast<void>(getpagesize());
    struct sigaction action = {};
    action.sa_sigaction = OnSigbus;
    // On the thread's alternative stack where it has one; other signals may come meanwhile.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &previous);
  });
}

std::mutex slots_mutex;

}  // namespace

bool SigbusGuard::Add(std::byte* begin, size_t bytes) {
  Install();
  const std::lock_guard<std::mutex> lock(slots_mutex);
  for (int slot = 0; slot < kMaxMappings; ++slot) {
    Mapping& mapping = mappings[slot];
    if (mapping.begin.load(std::memory_order_relaxed) != 0) continue;
    mapping.broken.store(&broken_, std::memory_order_relaxed);
    mapping.end.store(reinterpret_cast<uintptr_t>(begin) + bytes, std::memory_order_release);
    mapping.begin.store(reinterpret_cast<uintptr_t>(begin), std::memory_order_release);
    slot_ = slot;
    return true;
  }
  return false;
}

void SigbusGuard::Remove() {
  if (slot_ < 0) return;
  const std::lock_guard<std::mutex> lock(slots_mutex);
  mappings[slot_].begin.store(0, std::memory_order_release);
  slot_ = -1;
}

}  // namespace spmmd::server
