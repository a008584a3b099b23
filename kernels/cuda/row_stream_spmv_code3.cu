#include "kernels/cuda/row_stream_spmv.cuh"

namespace spmmd::cuda {

const void* RowStreamKernelCode3(const RowStreamKernelKey& key) {
  return row_stream_kernel::PickKernel<row_stream::Coding::kCode3, true>(key);
}

}  // namespace spmmd::cuda
