// The .safetensors reader.
#include <cstdlib>

#include "kernels/base/thread_pool.h"
#include "kernels/format/safetensors.h"

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  spmmd::SetDefaultThreads(1);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = spmmd::SafetensorsFile::Parse({reinterpret_cast<const std::byte*>(data), size}, nullptr);
  if (!file.ok()) return 0;
  size_t bytes = 0;
  for (const auto& [name, tensor] : file->tensors()) {
    bytes += tensor.data.size();
    const auto matrix = spmmd::SafetensorsToMatrix(name, tensor);
    if (matrix.ok() && matrix->bytes() != tensor.data.size()) std::abort();
  }
  if (bytes > size) std::abort();  // tensors never overlap
  return 0;
}
