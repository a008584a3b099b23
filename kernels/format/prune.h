// Pruning in place: zeroes the elements of smallest magnitude. For callers that bring dense weights and no mask of
// their own; methods that look at activations (Wanda, SparseGPT) run where the model is.
#ifndef SPMMD_KERNELS_FORMAT_PRUNE_H_
#define SPMMD_KERNELS_FORMAT_PRUNE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/format/dense.h"

namespace spmmd {

// Zeroes elements, smallest magnitude first and among equal ones the later in row-major order first, until
// round(sparsity * rows * cols) elements are zero. Zeros already there count; none comes back. NaN counts as larger
// than infinity. sparsity in [0, 1), else INVALID_ARGUMENT. Two parallel passes (four for fp32) whatever the sparsity.
absl::Status PruneMagnitude(const MutableDenseView& w, double sparsity);

// Keeps the n elements of largest magnitude of every m neighbours along a row, the earlier ones among equals; a shorter
// last group keeps at most n. 1 <= n < m, 2 <= m <= 64, else INVALID_ARGUMENT.
absl::Status PruneNm(const MutableDenseView& w, int n, int m);

// Whether every aligned group of four neighbours along K has at most two nonzeros, as PruneNm(w, 2, 4) leaves them.
// Ends early when one has more.
bool IsTwoOfFour(const DenseView& w);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_FORMAT_PRUNE_H_
