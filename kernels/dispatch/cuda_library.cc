#include "kernels/dispatch/cuda_library.h"

#include <dlfcn.h>
#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace spmmd {
namespace {

constexpr char kFileName[] = "libspmmd_cuda.so";

std::vector<std::string> Candidates(const std::string& path) {
  if (!path.empty()) return {path};
  std::vector<std::string> paths;
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {
    for (const std::filesystem::path& folder : {program.parent_path(), program.parent_path() / ".." / "lib"}) {
      const std::filesystem::path file = folder / kFileName;
      if (std::filesystem::exists(file, error)) paths.push_back(file.lexically_normal().string());
    }
  }
  paths.emplace_back(kFileName);
  return paths;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const CudaLibrary>> CudaLibrary::Load(const std::string& path) {
  std::string failures;
  void* handle = nullptr;
  for (const std::string& candidate : Candidates(path)) {
    handle = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) break;
    const char* message = dlerror();
    absl::StrAppend(&failures, failures.empty() ? "" : "; ", message == nullptr ? candidate : std::string(message));
  }
  if (handle == nullptr) return absl::UnavailableError(absl::StrCat("CUDA backend: ", failures));
  auto library = std::make_shared<CudaLibrary>();
#define SPMMD_CUDA_RESOLVE(name)                                                                         \
  library->name = reinterpret_cast<decltype(&spmmd_cuda_##name)>(dlsym(handle, "spmmd_cuda_" #name));    \
  if (library->name == nullptr) {                                                                        \
    return absl::FailedPreconditionError("CUDA backend: the library has no function spmmd_cuda_" #name); \
  }
  SPMMD_CUDA_FUNCTIONS(SPMMD_CUDA_RESOLVE)
#undef SPMMD_CUDA_RESOLVE
  if (library->abi_version() != SPMMD_CUDA_ABI_VERSION) {
    return absl::FailedPreconditionError(absl::StrCat("CUDA backend: the library's ABI version is ",
                                                      library->abi_version(), ", this program's is ",
                                                      SPMMD_CUDA_ABI_VERSION));
  }
  return library;
}

std::string CudaLibrary::Identity() const {
  XXH3_state_t* const state = XXH3_createState();
  XXH3_64bits_reset(state);
  Dl_info info = {};
  if (dladdr(reinterpret_cast<void*>(abi_version), &info) != 0 && info.dli_fname != nullptr) {
    std::ifstream file(info.dli_fname, std::ios::binary);
    std::vector<char> block(size_t{1} << 20);
    while (file) {
      file.read(block.data(), static_cast<std::streamsize>(block.size()));
      XXH3_64bits_update(state, block.data(), static_cast<size_t>(file.gcount()));
    }
  }
  const uint64_t hash = XXH3_64bits_digest(state);
  XXH3_freeState(state);
  return absl::StrCat(absl::Hex(hash, absl::kZeroPad16), "-cublaslt-", cublaslt_version());
}

absl::Status CudaLibrary::ToStatus(spmmd_cuda_status code) const {
  if (code == SPMMD_CUDA_OK) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(code), last_error());
}

CudaLayerDesc::CudaLayerDesc(const PackedLayer& layer) {
  for (const Section& section : layer.sections) {
    sections_.push_back({section.id, 0, section.data.data(), section.data.size()});
  }
  desc.format = static_cast<int32_t>(layer.format);
  desc.dtype = static_cast<int32_t>(layer.dtype);
  desc.layout_version = layer.layout_version;
  desc.num_sections = static_cast<uint32_t>(sections_.size());
  desc.m = layer.m;
  desc.k = layer.k;
  desc.nnz = layer.nnz;
  std::copy(layer.params.begin(), layer.params.end(), desc.params);
  desc.sections = sections_.data();
}

}  // namespace spmmd
