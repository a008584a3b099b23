#include "server/device/thresholded_rows.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/cpu/matmul.h"

namespace spmmd::server {
namespace {

constexpr uint64_t kEntryBytes = sizeof(uint32_t) + sizeof(float);

// Makes `memory` stand for at least `bytes`. The old share is given back last: while a vector grows, both exist.
absl::Status Cover(MemoryBudget* budget, uint64_t bytes, MemoryBudget::Reservation* memory) {
  if (bytes <= memory->bytes()) return absl::OkStatus();
  SPMMD_ASSIGN_OR_RETURN(*memory, budget->Reserve(MemoryKind::kWorkspace, bytes));
  return absl::OkStatus();
}

}  // namespace

absl::Status ThresholdedRows::Begin(int64_t rows, int64_t cols) {
  SPMMD_RETURN_IF_ERROR(Cover(budget_, (static_cast<uint64_t>(rows) + 1) * sizeof(uint64_t), &offsets_memory_));
  rows_.rows = rows;
  rows_.cols = cols;
  rows_.offsets.reserve(static_cast<size_t>(rows) + 1);
  rows_.offsets.assign(1, 0);
  rows_.owned_indices.clear();
  rows_.values.clear();
  return absl::OkStatus();
}

absl::Status ThresholdedRows::ReserveEntries(uint64_t entries) {
  if (entries <= entries_) return absl::OkStatus();
  const uint64_t all = static_cast<uint64_t>(rows_.rows) * static_cast<uint64_t>(rows_.cols);
  const uint64_t grown = std::max(entries, std::min(2 * entries_, all));
  SPMMD_ASSIGN_OR_RETURN(MemoryBudget::Reservation memory,
                         budget_->Reserve(MemoryKind::kWorkspace, grown * kEntryBytes));
  rows_.owned_indices.reserve(grown);
  rows_.values.reserve(grown);
  entries_memory_ = std::move(memory);
  entries_ = grown;
  return absl::OkStatus();
}

absl::StatusOr<const SparseRows*> ThresholdedRows::FromDense(const DenseView& x, float threshold) {
  SPMMD_RETURN_IF_ERROR(Begin(x.rows, x.cols));
  SPMMD_RETURN_IF_ERROR(Cover(budget_, static_cast<uint64_t>(x.cols) * kEntryBytes, &row_memory_));
  row_indices_.reserve(static_cast<size_t>(x.cols));
  row_values_.reserve(static_cast<size_t>(x.cols));
  for (int64_t row = 0; row < x.rows; ++row) {
    cpu::Sparsify(x, row, threshold, &row_indices_, &row_values_);
    SPMMD_RETURN_IF_ERROR(ReserveEntries(rows_.values.size() + row_values_.size()));
    rows_.owned_indices.insert(rows_.owned_indices.end(), row_indices_.begin(), row_indices_.end());
    rows_.values.insert(rows_.values.end(), row_values_.begin(), row_values_.end());
    rows_.offsets.push_back(rows_.values.size());
  }
  rows_.indices = rows_.owned_indices;
  return &rows_;
}

absl::StatusOr<const SparseRows*> ThresholdedRows::FromSparse(const SparseRows& x, float threshold) {
  SPMMD_RETURN_IF_ERROR(Begin(x.rows, x.cols));
  SPMMD_RETURN_IF_ERROR(ReserveEntries(x.values.size()));
  for (size_t row = 0; row < static_cast<size_t>(x.rows); ++row) {
    for (uint64_t i = x.offsets[row]; i < x.offsets[row + 1]; ++i) {
      if (std::abs(x.values[i]) <= threshold) continue;
      rows_.owned_indices.push_back(x.indices[i]);
      rows_.values.push_back(x.values[i]);
    }
    rows_.offsets.push_back(rows_.values.size());
  }
  rows_.indices = rows_.owned_indices;
  return &rows_;
}

void ThresholdedRows::EndRun() {
  if (entries_memory_.bytes() + offsets_memory_.bytes() + row_memory_.bytes() <= kRetainedBytes) return;
  rows_ = SparseRows();
  row_indices_ = std::vector<uint32_t>();
  row_values_ = std::vector<float>();
  entries_ = 0;
  entries_memory_.Release();
  offsets_memory_.Release();
  row_memory_.Release();
}

}  // namespace spmmd::server
