// Validate of every format, and what follows it: a layer that is accepted must unpack to exactly its nonzeros, and
// where a CPU kernel takes the format, must multiply without touching a byte outside.
#include <cstdlib>
#include <vector>

#include "kernels/base/thread_pool.h"
#include "kernels/cpu/matmul.h"
#include "kernels/format/packed_layer.h"
#include "tests/fuzz/layer_bytes.h"

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  spmmd::SetDefaultThreads(1);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::optional<spmmd::PackedLayer> layer = spmmd::fuzz::LayerFromBytes(data, size);
  if (!layer.has_value()) return 0;
  const absl::Status status = spmmd::Validate(*layer);
  if (!status.ok()) {
    if (!absl::IsDataLoss(status)) std::abort();
    return 0;
  }
  const absl::StatusOr<spmmd::DenseMatrix> dense = spmmd::Unpack(*layer);
  if (!dense.ok()) std::abort();
  // DENSE says nothing of its zeros. Elsewhere a damaged value may be a stored zero, so nnz is an upper bound.
  if (layer->format != spmmd::Format::kDense && spmmd::ScanDense(dense->view()).nnz > layer->nnz) std::abort();
  if (!spmmd::cpu::CanExecute(layer->format)) return 0;
  const int64_t tokens = 2;
  const spmmd::DenseMatrix x = *spmmd::DenseMatrix::Create(spmmd::DType::kF32, tokens, layer->k);
  spmmd::DenseMatrix y = *spmmd::DenseMatrix::Create(spmmd::DType::kF32, tokens, layer->m);
  if (!spmmd::cpu::Matmul(*layer, x.view(), {}, y.mutable_view(), spmmd::DefaultThreadPool()).ok()) std::abort();
  return 0;
}
