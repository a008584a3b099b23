// The index of sharded checkpoints: no accepted file name leaves the directory.
#include <cstdlib>
#include <filesystem>
#include <string>

#include "kernels/format/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto index = spmmd::ParseSafetensorsIndex({reinterpret_cast<const char*>(data), size});
  if (!index.ok()) return 0;
  for (const auto& [tensor, file] : *index) {
    const std::filesystem::path joined = (std::filesystem::path("/base/dir") / file).lexically_normal();
    if (joined.string().rfind("/base/dir/", 0) != 0) std::abort();
  }
  return 0;
}
