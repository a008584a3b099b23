// Layers on a device: checked, copied, owned.
#ifndef SPMMD_KERNELS_CUDA_LAYER_H_
#define SPMMD_KERNELS_CUDA_LAYER_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/cuda/internal.h"

namespace spmmd::cuda {

// What every format may assume: shapes and dtype in range, section pointers present, ids unique.
Status CheckDesc(const LayerDesc& desc);
uint64_t DeviceBytes(const LayerDesc& desc);
// A layer with room for the sections (id, bytes on the device), not yet filled; desc.sections is not read.
Status AllocateLayer(spmmd_cuda_device* device, const LayerDesc& desc,
                     const std::vector<std::pair<uint32_t, uint64_t>>& sections, spmmd_cuda_layer** out);
// `desc` has passed CheckDesc.
Status UploadLayer(spmmd_cuda_device* device, const LayerDesc& desc, const FormatHooks& hooks, spmmd_cuda_layer** out);
Status CloneLayer(const spmmd_cuda_layer& layer, spmmd_cuda_layer** out);
// A section's bytes as they were uploaded.
Status ReadSection(const spmmd_cuda_layer& layer, uint32_t section, void* to, uint64_t bytes);
void FreeLayer(spmmd_cuda_layer* layer);
// The layer as DENSE: bytes of its block, and the layer itself, filled by work on `stream`.
uint64_t UnpackedBytes(const spmmd_cuda_layer& layer);
Status UnpackLayer(const spmmd_cuda_layer& layer, cudaStream_t stream, spmmd_cuda_layer** out);

// DENSE on a device: row pitch in elements. A multiple of 8 keeps every row 16-byte aligned, which cublasLt's
// tensor-core kernels need; the padding is zero.
inline uint64_t DensePitch(int64_t k) { return RoundUp(static_cast<uint64_t>(k), 8); }
inline constexpr uint32_t kDenseValuesSection = 1;

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_LAYER_H_
