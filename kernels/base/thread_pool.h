// A persistent pool for data-parallel loops. Workers spin briefly and then sleep, so that a decode step made of many
// short matmuls does not pay a futex wake-up for each.
#ifndef SPMMD_KERNELS_BASE_THREAD_POOL_H_
#define SPMMD_KERNELS_BASE_THREAD_POOL_H_

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"

namespace spmmd {

class ThreadPool {
 public:
  // `threads` is the total parallelism, the calling thread included; 0 takes std::thread::hardware_concurrency().
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  // Calls body(task, worker) once for every task in [0, tasks), worker in [0, size()), and returns when all are done.
  // Tasks are handed out dynamically. A body must not throw. Calls from several threads are serialised; a nested call
  // from inside a body runs its tasks inline on that worker.
  void ParallelFor(int64_t tasks, absl::FunctionRef<void(int64_t task, int worker)> body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The process-wide pool (hardware concurrency, or the last SetDefaultThreads before first use).
ThreadPool& DefaultThreadPool();
// Takes effect only before the first DefaultThreadPool(); 0 means hardware concurrency.
void SetDefaultThreads(int threads);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_BASE_THREAD_POOL_H_
