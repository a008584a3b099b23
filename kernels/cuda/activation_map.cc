#include "kernels/cuda/activation_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <string>

#include "kernels/cuda/elementwise.h"

namespace spmmd::cuda {

bool NeedsConversion(const spmmd_cuda_layer& layer, const Call& call) {
  return call.x_dtype != layer.dtype || reinterpret_cast<uintptr_t>(call.x) % 16 != 0 ||
         (call.n > 1 ? call.x_stride : 8) % 8 != 0;
}

uint64_t ConvertedPitch(const spmmd_cuda_layer& layer) { return RoundUp(static_cast<uint64_t>(layer.k), 8); }

uint64_t ConvertedBytes(const spmmd_cuda_layer& layer, const Call& call) {
  return static_cast<uint64_t>(call.n) * ConvertedPitch(layer) * 2;
}

Status PrepareActivations(const spmmd_cuda_layer& layer, const Call& call, void* workspace, cudaStream_t stream,
                          Activations* activations) {
  const auto pitch = static_cast<int64_t>(ConvertedPitch(layer));
  if (!NeedsConversion(layer, call)) {
    // The stride of a single row is not used, but a map wants a valid one.
    *activations = {static_cast<const uint16_t*>(call.x), call.n == 1 ? pitch : call.x_stride};
    return {};
  }
  *activations = {static_cast<const uint16_t*>(workspace), pitch};
  return LaunchConvertActivations(call, layer.k, layer.dtype, pitch, workspace, stream);
}

Status EncodeActivations(const void* x, int64_t k, int64_t tokens, int64_t stride, int padded, bool is_bf16,
                         CUtensorMap* map) {
  static const auto encode = []() -> PFN_cuTensorMapEncodeTiled_v12000 {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      return nullptr;
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  if (encode == nullptr) return {SPMMD_CUDA_UNAVAILABLE, "the driver has no cuTensorMapEncodeTiled"};
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(tokens)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[2] = {kActivationBoxCols, static_cast<cuuint32_t>(padded)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(map, is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(x),
             sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return {SPMMD_CUDA_INTERNAL, "cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result))};
  }
  return {};
}

}  // namespace spmmd::cuda
