// The .npy reader.
#include <cstdlib>

#include "kernels/base/thread_pool.h"
#include "kernels/format/npy.h"

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  spmmd::SetDefaultThreads(1);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::StatusOr<spmmd::NpyArray> array = spmmd::ParseNpy({reinterpret_cast<const std::byte*>(data), size});
  if (!array.ok()) return 0;
  const absl::StatusOr<spmmd::DenseMatrix> matrix = spmmd::NpyToMatrix(*array);
  if (matrix.ok() && matrix->bytes() != array->data.size()) std::abort();
  return 0;
}
