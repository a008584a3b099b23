// Matmuls with BITMAP layers: operands checked by the caller (matmul.cc), work spread over the pool.
#ifndef SPMMD_KERNELS_CPU_BITMAP_MATMUL_H_
#define SPMMD_KERNELS_CPU_BITMAP_MATMUL_H_

#include "absl/status/status.h"
#include "kernels/base/thread_pool.h"
#include "kernels/cpu/matmul.h"

namespace spmmd::cpu {

absl::Status BitmapMatmul(const PackedLayer& w, const DenseView& x, const Epilogue& epilogue, const MutableDenseView& y,
                          ThreadPool& pool);

// Sets *touched_nnz to the nonzeros of the columns that x names, when it is not null.
absl::Status BitmapMatmulSparse(const PackedLayer& w, const SparseVector& x, const Epilogue& epilogue,
                                const MutableDenseView& y, ThreadPool& pool, int64_t* touched_nnz);

}  // namespace spmmd::cpu

#endif  // SPMMD_KERNELS_CPU_BITMAP_MATMUL_H_
