#include "kernels/base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace spmmd {
namespace {

inline void CpuRelax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Relax iterations before a waiting thread gives its core up: 15 to 50 us, depending on how long a CPU's pause takes.
// Longer than the gap between two matmuls of one decode step, shorter than what an idle server would notice.
constexpr int kSpins = 1000;

// The bodies that this thread is inside of, innermost first: how a nested call is recognised.
struct Frame {
  const void* pool;
  int worker;
  const Frame* outer;
};
thread_local const Frame* innermost_frame = nullptr;

}  // namespace

// `word` is the whole protocol: [epoch:47][open:1][joined:16]. The caller publishes a job's fields, then opens a new
// epoch. A worker that sees an open epoch joins it (joined + 1) before it may touch the fields. The caller closes the
// epoch when no task is left to hand out, and returns once joined is back to zero. A worker that wakes up late finds
// the epoch closed and never looks at the job, so a short loop does not wait for sleepers.
struct ThreadPool::State {  // NOLINT(clang-analyzer-optin.performance.Padding): no line is shared on purpose
  static constexpr uint64_t kJoinedOne = 1;
  static constexpr uint64_t kJoinedMask = 0xffff;
  static constexpr uint64_t kOpen = uint64_t{1} << 16;
  static constexpr int kEpochShift = 17;

  int size = 1;
  std::vector<std::thread> threads;

  // Serialises callers.
  std::mutex caller_mutex;

  alignas(64) std::atomic<uint64_t> word{0};
  std::atomic<bool> stopping{false};

  alignas(64) std::atomic<int64_t> next{0};
  int64_t tasks = 0;
  absl::FunctionRef<void(int64_t, int)>* body = nullptr;

  alignas(64) std::atomic<int> sleepers{0};
  std::mutex sleep_mutex;
  std::condition_variable wake;

  void RunTasks(int worker) {
    const Frame frame{this, worker, innermost_frame};
    innermost_frame = &frame;
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) (*body)(task, worker);
    innermost_frame = frame.outer;
  }

  // Waits for an open epoch other than `seen` or for the end; returns the word that ended the wait.
  uint64_t AwaitWork(uint64_t seen) {
    const auto ready = [&](uint64_t w) { return (w & kOpen) != 0 && (w >> kEpochShift) != seen; };
    for (int i = 0; i < kSpins; ++i) {
      const uint64_t w = word.load(std::memory_order_acquire);
      if (ready(w) || stopping.load(std::memory_order_relaxed)) return w;
      CpuRelax();
    }
    // Sequentially consistent on both sides: either the caller sees this sleeper, or this thread sees the new epoch.
    std::unique_lock<std::mutex> lock(sleep_mutex);
    sleepers.fetch_add(1);
    uint64_t w = word.load();
    while (!ready(w) && !stopping.load()) {
      wake.wait(lock);
      w = word.load();
    }
    sleepers.fetch_sub(1);
    return w;
  }

  void WorkerLoop(int worker) {
    // Whatever rounding or flush-to-zero mode the creating thread was in: results must not depend on who computes them.
    std::fesetenv(FE_DFL_ENV);
    uint64_t seen = 0;
    while (true) {
      uint64_t w = AwaitWork(seen);
      if (stopping.load(std::memory_order_acquire)) return;
      const uint64_t epoch = w >> kEpochShift;
      while ((w & kOpen) != 0 && (w >> kEpochShift) == epoch) {
        if (word.compare_exchange_weak(w, w + kJoinedOne, std::memory_order_acq_rel)) {
          RunTasks(worker);
          word.fetch_sub(kJoinedOne, std::memory_order_release);
          break;
        }
      }
      seen = epoch;
    }
  }

  void Run(int64_t task_count, absl::FunctionRef<void(int64_t, int)> task_body) {
    tasks = task_count;
    body = &task_body;
    next.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (word.load(std::memory_order_relaxed) >> kEpochShift) + 1;
    word.store((epoch << kEpochShift) | kOpen);
    if (sleepers.load() > 0) {
      const std::lock_guard<std::mutex> lock(sleep_mutex);
      const int64_t useful = std::min<int64_t>(task_count - 1, size - 1);
      if (useful >= sleepers.load()) {
        wake.notify_all();
      } else {
        for (int64_t i = 0; i < useful; ++i) wake.notify_one();
      }
    }
    RunTasks(0);
    word.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; (word.load(std::memory_order_acquire) & kJoinedMask) != 0; ++spins) {
      // The tail of the last tasks: short, unless a worker lost its core.
      if (spins < kSpins) {
        CpuRelax();
      } else {
        std::this_thread::yield();
      }
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  constexpr int kMaxThreads = 4096;
  if (threads <= 0) threads = static_cast<int>(std::thread::hardware_concurrency());
  state_->size = std::clamp(threads, 1, kMaxThreads);
  state_->threads.reserve(static_cast<size_t>(state_->size - 1));
  for (int worker = 1; worker < state_->size; ++worker) {
    state_->threads.emplace_back([state = state_.get(), worker] { state->WorkerLoop(worker); });
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard<std::mutex> lock(state_->sleep_mutex);
    state_->stopping.store(true);
  }
  state_->wake.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

int ThreadPool::size() const { return state_->size; }

void ThreadPool::ParallelFor(int64_t tasks, absl::FunctionRef<void(int64_t task, int worker)> body) {
  if (tasks <= 0) return;
  for (const Frame* frame = innermost_frame; frame != nullptr; frame = frame->outer) {
    if (frame->pool != state_.get()) continue;
    for (int64_t task = 0; task < tasks; ++task) body(task, frame->worker);
    return;
  }
  const std::lock_guard<std::mutex> lock(state_->caller_mutex);
  if (tasks == 1 || state_->size == 1) {
    state_->tasks = tasks;
    state_->body = &body;
    state_->next.store(0, std::memory_order_relaxed);
    state_->RunTasks(0);
    return;
  }
  state_->Run(tasks, body);
}

namespace {
std::atomic<int> default_threads{0};
}  // namespace

ThreadPool& DefaultThreadPool() {
  // Never destroyed: threads must not be joined from static destructors, whose order against other users is unknown.
  static ThreadPool* const pool = new ThreadPool(default_threads.load());
  return *pool;
}

void SetDefaultThreads(int threads) { default_threads.store(threads); }

}  // namespace spmmd
