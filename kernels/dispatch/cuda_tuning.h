// What was measured on one GPU: for a shape of layer and a number of tokens, the fastest BITMAP_GPU kernel and the
// fastest of cublasLt's algorithms on the dense matrix. Dispatch decides by it, and it outlives the process in a file.
#ifndef SPMMD_KERNELS_DISPATCH_CUDA_TUNING_H_
#define SPMMD_KERNELS_DISPATCH_CUDA_TUNING_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/call_once.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/base/dtype.h"
#include "kernels/dispatch/cuda_library.h"

namespace spmmd {

// Layers that take equal times: the density counts in steps of 5 %.
struct CudaShape {
  DType dtype = DType::kF16;
  int64_t m = 0;
  int64_t k = 0;
  int density_pct = 0;

  // m, k >= 1.
  static CudaShape Of(DType dtype, int64_t m, int64_t k, int64_t nnz);
  auto operator<=>(const CudaShape&) const = default;
};

// Microseconds of one plain launch with the weights in memory, not in L2; activations and outputs of the weights' type.
struct CudaWidth {
  int64_t tokens = 0;
  int32_t kernel = -1;       // the fastest BITMAP_GPU kernel; -1: none measured
  double sparse_us = 0;      // its time
  double dense_us = 0;       // of cublasLt; 0: not measured
  int dense_candidate = -1;  // of cublasLt's heuristic, for spmmd_cuda_dense_use_candidate

  // A sparse kernel has to gain something: 3 % is within what measuring single launches leaves open.
  bool dense_is_faster() const { return dense_us > 0 && (kernel < 0 || 0.97 * dense_us < sparse_us); }
};

// Ascending in tokens.
using CudaWidths = std::vector<CudaWidth>;

// The numbers of tokens that are measured.
inline constexpr int64_t kTunedTokens[] = {1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024};

// The entry that stands for `tokens`: the first measured with as many or more, else the last. `widths` is not empty.
const CudaWidth& WidthFor(const CudaWidths& widths, int64_t tokens);

// Thread-safe.
class CudaTuningTable {
 public:
  // `cuda` names the kernels and must outlive the table.
  explicit CudaTuningTable(const CudaLibrary* cuda) : cuda_(cuda) {}

  // Null when the shape was not measured.
  std::shared_ptr<const CudaWidths> Find(const CudaShape& shape) const;
  void Put(const CudaShape& shape, CudaWidths widths);
  size_t size() const;

  // Text, a line for each shape and width, under a line that names what it is true for: `device` (a GPU's name) and the
  // library's Identity(). Written beside the file and renamed.
  absl::Status Save(const std::string& path, absl::string_view device) const;
  // Adds what the file has. NOT_FOUND without a file; FAILED_PRECONDITION when it is true for another device or
  // library; DATA_LOSS naming the line when it is damaged: nothing of it is taken then.
  absl::Status Load(const std::string& path, absl::string_view device);

 private:
  // The first line of its files.
  std::string Head(absl::string_view device) const;

  const CudaLibrary* const cuda_;
  mutable absl::once_flag identified_;
  mutable std::string identity_;  // of the library, once it was needed
  mutable absl::Mutex mutex_;
  std::map<CudaShape, std::shared_ptr<const CudaWidths>> shapes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spmmd

#endif  // SPMMD_KERNELS_DISPATCH_CUDA_TUNING_H_
