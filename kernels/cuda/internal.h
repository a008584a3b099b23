// What the translation units of libspmmd_cuda.so share. Nothing here is visible outside the library, and nothing here
// depends on Abseil: the library stands alone.
#ifndef SPMMD_KERNELS_CUDA_INTERNAL_H_
#define SPMMD_KERNELS_CUDA_INTERNAL_H_

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda/spmmd_cuda.h"

namespace spmmd::cuda {

// A canonical code and a message; OK has no message.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(spmmd_cuda_status code, std::string message) : code_(code), message_(std::move(message)) {}
  bool ok() const { return code_ == SPMMD_CUDA_OK; }
  spmmd_cuda_status code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  spmmd_cuda_status code_ = SPMMD_CUDA_OK;
  std::string message_;
};

inline Status InvalidArgument(std::string message) { return {SPMMD_CUDA_INVALID_ARGUMENT, std::move(message)}; }
inline Status Unimplemented(std::string message) { return {SPMMD_CUDA_UNIMPLEMENTED, std::move(message)}; }
inline Status DataLoss(std::string message) { return {SPMMD_CUDA_DATA_LOSS, std::move(message)}; }

// OK, or the canonical code for a CUDA / cuBLAS error, naming the failed call.
Status FromCuda(cudaError_t error, const char* what);
Status FromCublas(cublasStatus_t error, const char* what);

#define SPMMD_CUDA_TRY(expr)                                           \
  do {                                                                 \
    if (::spmmd::cuda::Status try_status = (expr); !try_status.ok()) { \
      return try_status;                                               \
    }                                                                  \
  } while (false)
#define SPMMD_CUDA_CHECK(expr) SPMMD_CUDA_TRY(::spmmd::cuda::FromCuda((expr), #expr))
#define SPMMD_CUBLAS_CHECK(expr) SPMMD_CUDA_TRY(::spmmd::cuda::FromCublas((expr), #expr))

// The numbers of kernels/base/dtype.h, kernels/format/packed_layer.h and kernels/cpu/matmul.h.
inline constexpr int32_t kF16 = 1, kBf16 = 2, kF32 = 3;
inline constexpr int32_t kFormatDense = 1, kFormatThreeLayer = 2, kFormatRlcCsc = 3, kFormatRowStream = 5,
                         kFormatBitmapGpu = 8, kFormatColumnPiece = 9;
inline constexpr int32_t kActivationCount = 5;

inline uint64_t ElementSize(int32_t dtype) { return dtype == kF32 ? 4 : 2; }
inline uint64_t RoundUp(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Makes a device current for a scope. Kernels assume the layer's device is current.
class ScopedDevice {
 public:
  explicit ScopedDevice(int index);
  ~ScopedDevice();
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;
  const Status& status() const { return status_; }

 private:
  int previous_ = -1;
  Status status_;
};

using LayerDesc = spmmd_cuda_layer_desc;
using Call = spmmd_cuda_matmul;

const spmmd_cuda_section* FindSection(const LayerDesc& desc, uint32_t id);

// Every workspace starts with this many bytes that are zero between launches (counters, arrival words); what a kernel
// keeps in the rest has no meaning between launches.
inline constexpr uint64_t kCounterBytes = 1024 * 1024;
inline constexpr int64_t kMaxCounters = kCounterBytes / 4;

// One row of the kernel table (kernels.cc). `call` has passed CheckCall when these run.
struct Kernel {
  const char* name;
  int32_t format;
  bool sparse_input;
  Status (*can_implement)(const spmmd_cuda_layer& layer, const Call& call);
  // Bytes behind the counters.
  uint64_t (*scratch_bytes)(const spmmd_cuda_layer& layer, const Call& call);
  // Asynchronous on `stream`; the workspace is there and large enough; n >= 1.
  Status (*launch)(const spmmd_cuda_layer& layer, const Call& call, cudaStream_t stream);
  bool skips_columns = false;  // an SpMspV kernel: takes x_threshold and SPMMD_CUDA_FLAG_ACCUMULATE
  // One launch for layers that share their activations, each call checked on its own; null when the kernel has none.
  Status (*launch_group)(const spmmd_cuda_layer* const* layers, const Call* calls, int count,
                         cudaStream_t stream) = nullptr;
  uint64_t (*group_scratch_bytes)(const spmmd_cuda_layer* const* layers, const Call* calls, int count) = nullptr;
  // Whether these go together, beyond what each call is checked for; null: launch_group says so.
  Status (*check_group)(const spmmd_cuda_layer* const* layers, const Call* calls, int count) = nullptr;
  // Among kernels that can run a call AUTO takes the first that answers true here, else the first of the table.
  bool (*preferred)(const spmmd_cuda_layer& layer, const Call& call) = nullptr;
};

// How a format gets onto a device.
struct FormatHooks {
  int32_t format;
  const char* name;
  // Proves that no kernel can leave the packed bytes.
  Status (*validate)(const LayerDesc& desc);
  bool hopper_only = false;  // its kernels need compute capability 9.0
};

extern const Kernel kSpmmTile;
extern const Kernel kDenseCublasLt;

Status ValidateBitmapGpu(const LayerDesc& desc);
Status ValidateDense(const LayerDesc& desc);

}  // namespace spmmd::cuda

struct spmmd_cuda_device {
  int index = 0;
  int multiprocessors = 0;
  int compute_major = 0;
  int compute_minor = 0;
  bool hopper = true;             // runs the kernels for compute capability 9.0, else the portable ones
  uint64_t max_shared_bytes = 0;  // per block, opt-in
  uint64_t shared_bytes_per_multiprocessor = 0;
  uint64_t l2_bytes = 0;
  cublasLtHandle_t cublaslt = nullptr;
  // Chosen cublasLt algorithm by (m, n, k, weight dtype, output dtype).
  std::mutex dense_mutex;
  std::map<std::tuple<int64_t, int64_t, int64_t, int32_t, int32_t>, cublasLtMatmulAlgo_t> dense_algorithms;
};

struct spmmd_cuda_layer {
  spmmd_cuda_device* device = nullptr;
  int32_t format = 0;
  int32_t dtype = 0;
  int64_t m = 0;
  int64_t k = 0;
  int64_t nnz = 0;
  int64_t params[8] = {};
  // One allocation, sections at 256-byte boundaries with 256 readable bytes behind the last.
  uint8_t* block = nullptr;
  uint64_t block_bytes = 0;
  struct Section {
    uint32_t id;
    uint64_t offset;
    uint64_t size;
  };
  std::vector<Section> sections;

  // Null when the layer has no such section.
  const uint8_t* SectionData(uint32_t id) const {
    for (const Section& section : sections) {
      if (section.id == id) return block + section.offset;
    }
    return nullptr;
  }
};

#endif  // SPMMD_KERNELS_CUDA_INTERNAL_H_
