// The binary layout of a ring: how a caller on the server's host executes registered programs through shared memory,
// without a gRPC call for each (SparseMatmul.OpenRing). Version 1.
//
// A ring lies in a POSIX shared-memory region of the caller's, at an offset that is a multiple of 4096: a Header, then
// `entries` Submissions, then as many Completions. Everything is little-endian; counters are 32 bits and wrap around.
// Tensors lie anywhere else in the same region. The server fills in the header before it answers OpenRing.
//
// One thread of the caller at a time submits, one at a time consumes.
//
// To submit: wait until `submitted - consumed < entries`; write submissions[submitted % entries]; store `submitted + 1`
// with release; a full fence; when `server_waiting` is not 0, set it to 0 and FUTEX_WAKE it.
// To consume: load `completed` with acquire; while it differs from `consumed`, read completions[consumed % entries] and
// store `consumed + 1` with release. To sleep until there is one: set `client_waiting` to 1, a full fence, look at
// `completed` and `state` once more, FUTEX_WAIT on `client_waiting` being 1 with a timeout, then set it to 0. After
// consuming, a full fence, and wake the server as after submitting.
// Entries complete in any order; `user_data` says which one it was. The server takes at most `entries` whose
// completions have not been consumed.
//
// `state` is kOpen until the ring is closed (CloseRing, the end of the caller's connection, a drain) or fails (a
// counter that cannot be, memory that is gone); nothing is taken after that. The server trusts nothing in here: it
// copies a submission before it checks it, and keeps its own counters.
//
// The futexes are shared ones (without FUTEX_PRIVATE_FLAG). `deadline_ns` is CLOCK_MONOTONIC.
#ifndef SPMMD_PROTO_RING_RING_LAYOUT_H_
#define SPMMD_PROTO_RING_RING_LAYOUT_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <ctime>

namespace spmmd::ring {

inline constexpr uint64_t kMagic = 0x474e49524d4d5053;  // "SPMMRING"
inline constexpr uint32_t kVersion = 1;
inline constexpr uint64_t kAlignment = 4096;
inline constexpr uint32_t kMinEntries = 2;
inline constexpr uint32_t kMaxEntries = 4096;
// Inputs and outputs of an entry together.
inline constexpr int kMaxTensors = 16;

enum State : uint32_t { kOpen = 1, kClosed = 2, kFailed = 3 };

// A dense tensor [rows, cols] without gaps; rows are the entry's.
struct Tensor {
  uint64_t offset;  // in the region
  uint32_t cols;
  uint32_t dtype;  // spmm.v1.DataType: 1 fp16, 2 bf16, 3 fp32
};
static_assert(sizeof(Tensor) == 16);

struct Submission {
  uint64_t user_data;           // comes back with the completion
  uint64_t deadline_ns;         // CLOCK_MONOTONIC; 0 is none
  uint32_t program;             // position in OpenRingRequest.program_ids
  uint32_t rows;                // N
  uint8_t inputs;               // as many as the program has, in its order
  uint8_t outputs;              // the same
  uint8_t priority;             // spmm.v1.Priority; 0 is interactive
  uint8_t reserved[37];         // zero
  Tensor tensors[kMaxTensors];  // inputs, then outputs
};
static_assert(sizeof(Submission) == 320 && offsetof(Submission, tensors) == 64);

struct Completion {
  uint64_t user_data;
  int32_t code;  // canonical gRPC code; 0 is OK
  uint32_t reserved;
  uint64_t queue_ns;  // as in ExecuteTiming
  uint64_t kernel_ns;
  uint64_t total_ns;
  uint64_t retry_ns;  // RetryInfo; 0 is none
  uint32_t reason_bytes;
  uint32_t message_bytes;
  uint8_t reserved2[8];
  char reason[64];    // ErrorInfo.reason
  char message[192];  // cut when it is longer
};
static_assert(sizeof(Completion) == 320 && offsetof(Completion, reason) == 64);

struct Header {
  uint64_t magic;
  uint32_t version;
  uint32_t entries;
  uint64_t submissions_offset;  // from the header
  uint64_t completions_offset;
  uint32_t state;  // State; written by the server
  // Each counter on a cache line of its own; who writes it.
  alignas(64) uint32_t submitted;  // caller
  alignas(64) uint32_t taken;      // server
  alignas(64) uint32_t completed;  // server
  alignas(64) uint32_t consumed;   // caller
  alignas(64) uint32_t server_waiting;
  alignas(64) uint32_t client_waiting;
};
static_assert(offsetof(Header, submitted) == 64 && offsetof(Header, taken) == 128 &&
              offsetof(Header, completed) == 192 && offsetof(Header, consumed) == 256 &&
              offsetof(Header, server_waiting) == 320 && offsetof(Header, client_waiting) == 384 &&
              sizeof(Header) <= kAlignment && alignof(Header) == 64);

inline constexpr uint64_t kSubmissionsOffset = kAlignment;
constexpr uint64_t CompletionsOffset(uint32_t entries) {
  return kSubmissionsOffset + uint64_t{entries} * sizeof(Submission);
}
// Of the whole ring.
constexpr uint64_t Bytes(uint32_t entries) {
  return CompletionsOffset(entries) + uint64_t{entries} * sizeof(Completion);
}

inline uint32_t Load(uint32_t& word) { return std::atomic_ref<uint32_t>(word).load(std::memory_order_acquire); }
inline void Store(uint32_t& word, uint32_t value) {
  std::atomic_ref<uint32_t>(word).store(value, std::memory_order_release);
}

// Sleeps while `word` is `value`, at most that long.
inline void FutexWait(uint32_t& word, uint32_t value, int64_t nanoseconds) {
  timespec timeout{static_cast<time_t>(nanoseconds / 1'000'000'000), static_cast<long>(nanoseconds % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}
// Wakes who sleeps on `word`, if anybody does: to be called after the news has been stored.
inline void WakeIfWaiting(uint32_t& word) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (Load(word) == 0) return;
  Store(word, 0);
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace spmmd::ring

#endif  // SPMMD_PROTO_RING_RING_LAYOUT_H_
