// The baseline of SpMspV: dense weights, of which only the columns with a nonzero activation are read.
#ifndef SPMMD_KERNELS_BENCH_DENSE_COLUMN_SKIP_H_
#define SPMMD_KERNELS_BENCH_DENSE_COLUMN_SKIP_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace spmmd {

// y[m] += W x in fp32 for fp16 weights stored column by column, `columns` [k][m], and fp16 x [k]. m is a multiple of 8.
// Reductions in any order. Asynchronous on `stream`.
void LaunchDenseColumnSkip(const uint16_t* columns, const uint16_t* x, float* y, int m, int k, int multiprocessors,
                           cudaStream_t stream);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_BENCH_DENSE_COLUMN_SKIP_H_
