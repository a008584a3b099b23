// The .safetensors reader, and the compressed-tensors forms inside.
#include <cstdlib>

#include "kernels/base/thread_pool.h"
#include "kernels/format/compressed_tensors.h"
#include "kernels/format/safetensors.h"

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  spmmd::SetDefaultThreads(1);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto file = spmmd::SafetensorsFile::Parse({reinterpret_cast<const std::byte*>(data), size}, nullptr);
  if (!file.ok()) return 0;
  size_t bytes = 0;
  for (const auto& [name, tensor] : file->tensors()) {
    bytes += tensor.data.size();
    const auto matrix = spmmd::SafetensorsToMatrix(name, tensor);
    if (matrix.ok() && matrix->bytes() != tensor.data.size()) std::abort();
  }
  if (bytes > size) std::abort();  // tensors never overlap
  spmmd::SafetensorsCheckpoint checkpoint = spmmd::SafetensorsCheckpoint::FromFile(*std::move(file));
  for (const std::string& name : spmmd::CheckpointWeightNames(checkpoint)) {
    const auto matrix = spmmd::ReadCheckpointWeight(&checkpoint, name);
    // A bitmask form is smaller than its matrix by at most the bits: nothing small makes something huge.
    if (matrix.ok() && matrix->bytes() > 64 * size + 64) std::abort();
  }
  return 0;
}
