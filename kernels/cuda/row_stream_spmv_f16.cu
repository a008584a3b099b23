#include "kernels/cuda/row_stream_spmv.cuh"

namespace spmmd::cuda {

const void* RowStreamKernelF16(const RowStreamKernelKey& key) {
  return row_stream_kernel::PickKernel<row_stream::Coding::kVerbatim, false>(key);
}

}  // namespace spmmd::cuda
