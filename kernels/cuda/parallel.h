// A parallel loop for checks on the host. The library stands alone, so it does not have kernels/base's pool; threads
// are started for the loop, which pays for the seconds that checking a large layer takes.
#ifndef SPMMD_KERNELS_CUDA_PARALLEL_H_
#define SPMMD_KERNELS_CUDA_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace spmmd::cuda {

// Calls body(i) once for every i in [0, count), from at most 16 threads, the caller's included.
template <typename Body>
void ParallelFor(int64_t count, const Body& body) {
  const auto hardware = static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()));
  const int64_t workers = std::clamp<int64_t>(count / 4, 1, std::min<int64_t>(16, hardware));
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next++; i < count; i = next++) body(i);
  };
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < workers; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_PARALLEL_H_
