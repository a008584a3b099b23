// The bandwidth that a kernel on this machine could reach at best.
#ifndef SPMMD_KERNELS_BENCH_READ_CEILING_H_
#define SPMMD_KERNELS_BENCH_READ_CEILING_H_

#include "kernels/base/thread_pool.h"

namespace spmmd::bench {

// Best of several passes in which all threads of `pool` read a buffer larger than the caches and add it up; 1e9
// bytes/s.
double ReadCeilingGbps(ThreadPool& pool);

}  // namespace spmmd::bench

#endif  // SPMMD_KERNELS_BENCH_READ_CEILING_H_
