// Activations with what a threshold removes left out: the rows that SpMspV takes, built row by row in memory that is
// accounted as workspace and kept from run to run while it is small.
#ifndef SPMMD_SERVER_DEVICE_THRESHOLDED_ROWS_H_
#define SPMMD_SERVER_DEVICE_THRESHOLDED_ROWS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/format/dense.h"
#include "server/device/memory_budget.h"
#include "server/engine/plan.h"

namespace spmmd::server {

class ThresholdedRows {
 public:
  static constexpr uint64_t kRetainedBytes = uint64_t{4} << 20;

  explicit ThresholdedRows(MemoryBudget* budget) : budget_(budget) {}

  // The entries of x with |x| > threshold; NaNs stay. RESOURCE_EXHAUSTED when the budget has no room. The result lives
  // until the next call or EndRun().
  absl::StatusOr<const SparseRows*> FromDense(const DenseView& x, float threshold);
  absl::StatusOr<const SparseRows*> FromSparse(const SparseRows& x, float threshold);

  // Frees what is too much to keep.
  void EndRun();

 private:
  absl::Status Begin(int64_t rows, int64_t cols);
  // Room for `entries` in all, over all rows.
  absl::Status ReserveEntries(uint64_t entries);

  MemoryBudget* budget_;
  SparseRows rows_;
  MemoryBudget::Reservation entries_memory_;
  uint64_t entries_ = 0;  // capacity
  MemoryBudget::Reservation offsets_memory_;
  // One row, before its length is known.
  std::vector<uint32_t> row_indices_;
  std::vector<float> row_values_;
  MemoryBudget::Reservation row_memory_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_THRESHOLDED_ROWS_H_
