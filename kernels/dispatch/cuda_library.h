// libspmmd_cuda.so, loaded at run time: the functions of kernels/cuda/spmmd_cuda.h as a table, and conversions between
// its plain types and ours.
#ifndef SPMMD_KERNELS_DISPATCH_CUDA_LIBRARY_H_
#define SPMMD_KERNELS_DISPATCH_CUDA_LIBRARY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/spmmd_cuda.h"
#include "kernels/format/packed_layer.h"

namespace spmmd {

// Every function of the ABI, without its spmmd_cuda_ prefix.
#define SPMMD_CUDA_FUNCTIONS(X) \
  X(abi_version)                \
  X(cublaslt_version)           \
  X(last_error)                 \
  X(device_count)               \
  X(get_device_info)            \
  X(device_open)                \
  X(device_close)               \
  X(memory_info)                \
  X(malloc)                     \
  X(free)                       \
  X(host_malloc)                \
  X(host_free)                  \
  X(host_register)              \
  X(host_unregister)            \
  X(memcpy_async)               \
  X(memcpy_2d_async)            \
  X(copy_kernel)                \
  X(memset_async)               \
  X(ipc_export)                 \
  X(ipc_open)                   \
  X(ipc_close)                  \
  X(address_range)              \
  X(stream_create)              \
  X(stream_destroy)             \
  X(stream_synchronize)         \
  X(stream_wait_event)          \
  X(event_create)               \
  X(event_destroy)              \
  X(event_record)               \
  X(event_synchronize)          \
  X(event_query)                \
  X(event_elapsed_us)           \
  X(graph_begin)                \
  X(graph_end)                  \
  X(graph_launch)               \
  X(graph_destroy)              \
  X(read_probe)                 \
  X(format_supported)           \
  X(layer_device_bytes)         \
  X(layer_upload)               \
  X(layer_clone)                \
  X(pack_bitmap_gpu)            \
  X(layer_read)                 \
  X(layer_unpacked_bytes)       \
  X(layer_unpack)               \
  X(layer_free)                 \
  X(kernel_count)               \
  X(kernel_name)                \
  X(find_kernel)                \
  X(select_kernel)              \
  X(can_implement)              \
  X(workspace_bytes)            \
  X(workspace_init)             \
  X(launch)                     \
  X(group_workspace_bytes)      \
  X(launch_group)               \
  X(dense_tune)                 \
  X(dense_use_candidate)        \
  X(elementwise)

// The loaded library. Immutable and thread-safe; stays loaded until the process ends.
struct CudaLibrary {
#define SPMMD_CUDA_MEMBER(name) decltype(&spmmd_cuda_##name) name = nullptr;
  SPMMD_CUDA_FUNCTIONS(SPMMD_CUDA_MEMBER)
#undef SPMMD_CUDA_MEMBER

  // Loads `path`; when empty, libspmmd_cuda.so beside the running program, in its ../lib, then through the system's
  // search path. UNAVAILABLE with the loader's message (no driver, no cublasLt, no such file); FAILED_PRECONDITION for
  // another ABI version.
  static absl::StatusOr<std::shared_ptr<const CudaLibrary>> Load(const std::string& path = "");

  // What decides how long its kernels take, beside the GPU: a hash of the library's file, and the version of cublasLt.
  // Reads the file.
  std::string Identity() const;

  // A function's status with the library's message for it. Call on the thread that called the function, right after it.
  absl::Status ToStatus(spmmd_cuda_status code) const;
};

// `layer` as the ABI wants it. Borrows the layer's bytes.
struct CudaLayerDesc {
  explicit CudaLayerDesc(const PackedLayer& layer);
  CudaLayerDesc(const CudaLayerDesc&) = delete;
  CudaLayerDesc& operator=(const CudaLayerDesc&) = delete;

  spmmd_cuda_layer_desc desc = {};

 private:
  std::vector<spmmd_cuda_section> sections_;
};

}  // namespace spmmd

#endif  // SPMMD_KERNELS_DISPATCH_CUDA_LIBRARY_H_
