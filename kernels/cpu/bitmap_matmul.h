// Matmuls with BITMAP layers: operands checked by the caller (matmul.cc), work spread over the pool.
#ifndef SPMMD_KERNELS_CPU_BITMAP_MATMUL_H_
#define SPMMD_KERNELS_CPU_BITMAP_MATMUL_H_

#include "absl/status/status.h"
#include "kernels/base/thread_pool.h"
#include "kernels/cpu/bitmap_kernels.h"
#include "kernels/cpu/matmul.h"

namespace spmmd::cpu {

// What ran.
struct BitmapRun {
  Decode decode = Decode::kF32;  // of the last tokens, when there are many
  int64_t touched_nnz = 0;       // BitmapMatmulSparse: nonzeros of the columns that x names
};

absl::Status BitmapMatmul(const PackedLayer& w, const DenseView& x, const Epilogue& epilogue, const MutableDenseView& y,
                          ThreadPool& pool, BitmapRun* run);

// Counts the touched nonzeros only when `run` is not null.
absl::Status BitmapMatmulSparse(const PackedLayer& w, const SparseVector& x, const Epilogue& epilogue,
                                const MutableDenseView& y, ThreadPool& pool, BitmapRun* run);

}  // namespace spmmd::cpu

#endif  // SPMMD_KERNELS_CPU_BITMAP_MATMUL_H_
