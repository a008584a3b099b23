// Abseil's locks for ThreadSanitizer. The distribution's Abseil is built without it, so that TSan sees neither who
// holds a Mutex nor what a Notification publishes, and would report every guarded access. The linker routes our calls
// through these wrappers (--wrap in CMakeLists.txt), which tell it. Nothing here is linked in other builds.
#include <sanitizer/tsan_interface.h>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

using absl::CondVar;
using absl::Duration;
using absl::Mutex;
using absl::Notification;

// NOLINTBEGIN(bugprone-reserved-identifier, readability-identifier-naming): names that the linker makes.
extern "C" {

// The deadlock detector inside that Abseil.
const char* __tsan_default_suppressions() { return "race:absl::*::synchronization_internal::GraphCycles\n"; }

void __real__ZN4absl7debian35Mutex4LockEv(Mutex* mutex);
void __wrap__ZN4absl7debian35Mutex4LockEv(Mutex* mutex) {
  __real__ZN4absl7debian35Mutex4LockEv(mutex);
  __tsan_acquire(mutex);
}

bool __real__ZN4absl7debian35Mutex7TryLockEv(Mutex* mutex);
bool __wrap__ZN4absl7debian35Mutex7TryLockEv(Mutex* mutex) {
  const bool locked = __real__ZN4absl7debian35Mutex7TryLockEv(mutex);
  if (locked) __tsan_acquire(mutex);
  return locked;
}

void __real__ZN4absl7debian35Mutex6UnlockEv(Mutex* mutex);
void __wrap__ZN4absl7debian35Mutex6UnlockEv(Mutex* mutex) {
  __tsan_release(mutex);
  __real__ZN4absl7debian35Mutex6UnlockEv(mutex);
}

void __real__ZN4absl7debian35Mutex10ReaderLockEv(Mutex* mutex);
void __wrap__ZN4absl7debian35Mutex10ReaderLockEv(Mutex* mutex) {
  __real__ZN4absl7debian35Mutex10ReaderLockEv(mutex);
  __tsan_acquire(mutex);
}

void __real__ZN4absl7debian35Mutex12ReaderUnlockEv(Mutex* mutex);
void __wrap__ZN4absl7debian35Mutex12ReaderUnlockEv(Mutex* mutex) {
  __tsan_release(mutex);
  __real__ZN4absl7debian35Mutex12ReaderUnlockEv(mutex);
}

void __real__ZN4absl7debian37CondVar4WaitEPNS0_5MutexE(CondVar* condition, Mutex* mutex);
void __wrap__ZN4absl7debian37CondVar4WaitEPNS0_5MutexE(CondVar* condition, Mutex* mutex) {
  __tsan_release(mutex);
  __real__ZN4absl7debian37CondVar4WaitEPNS0_5MutexE(condition, mutex);
  __tsan_acquire(mutex);
}

bool __real__ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE(CondVar* condition, Mutex* mutex,
                                                                                 Duration timeout);
bool __wrap__ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE(CondVar* condition, Mutex* mutex,
                                                                                 Duration timeout) {
  __tsan_release(mutex);
  const bool timed_out =
      __real__ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE(condition, mutex, timeout);
  __tsan_acquire(mutex);
  return timed_out;
}

void __real__ZN4absl7debian312Notification6NotifyEv(Notification* notification);
void __wrap__ZN4absl7debian312Notification6NotifyEv(Notification* notification) {
  __tsan_release(notification);
  __real__ZN4absl7debian312Notification6NotifyEv(notification);
}

void __real__ZNK4absl7debian312Notification19WaitForNotificationEv(const Notification* notification);
void __wrap__ZNK4absl7debian312Notification19WaitForNotificationEv(const Notification* notification) {
  __real__ZNK4absl7debian312Notification19WaitForNotificationEv(notification);
  __tsan_acquire(const_cast<Notification*>(notification));
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier, readability-identifier-naming)
