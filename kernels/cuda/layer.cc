// Layers on a device: checked, copied, owned.
#include "kernels/cuda/layer.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/bitmap_gpu_unpack.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/internal.h"

namespace spmmd::cuda {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 24;       // kernels/format/dense.h
constexpr int64_t kMaxElements = int64_t{1} << 36;  // kernels/format/dense.h
constexpr uint64_t kSectionAlignment = 256;
constexpr uint64_t kTailBytes = 256;  // readable behind the last section, as behind every host Buffer

std::string Number(int64_t value) { return std::to_string(value); }

bool IsPitched(const LayerDesc& desc, const spmmd_cuda_section& section) {
  return desc.format == kFormatDense && section.id == kDenseValuesSection;
}

// How a section lies in host memory and on the device.
HostTransfer::Shape ShapeOf(int64_t m, int64_t k, bool pitched, uint64_t size) {
  if (!pitched) return {1, size, size};
  return {static_cast<uint64_t>(m), static_cast<uint64_t>(k) * 2, DensePitch(k) * 2};
}

uint64_t SizeOnDevice(const LayerDesc& desc, const spmmd_cuda_section& section) {
  return IsPitched(desc, section) ? static_cast<uint64_t>(desc.m) * DensePitch(desc.k) * 2 : section.size;
}

}  // namespace

const spmmd_cuda_section* FindSection(const LayerDesc& desc, uint32_t id) {
  for (uint32_t i = 0; i < desc.num_sections; ++i) {
    if (desc.sections[i].id == id) return &desc.sections[i];
  }
  return nullptr;
}

Status ValidateDense(const LayerDesc& desc) {
  if (desc.dtype == kF32) return Unimplemented("dtype: fp32 weights are not executed on a GPU; use fp16 or bf16");
  const spmmd_cuda_section* values = FindSection(desc, kDenseValuesSection);
  const uint64_t want = static_cast<uint64_t>(desc.m) * static_cast<uint64_t>(desc.k) * ElementSize(desc.dtype);
  if (values == nullptr || values->size != want) {
    return DataLoss("DENSE section values: missing or not " + std::to_string(want) + " bytes");
  }
  return {};
}

Status CheckDesc(const LayerDesc& desc) {
  if (desc.m < 1 || desc.m > kMaxDim) return InvalidArgument("m: " + Number(desc.m) + " is outside [1, 2^24]");
  if (desc.k < 1 || desc.k > kMaxDim) return InvalidArgument("k: " + Number(desc.k) + " is outside [1, 2^24]");
  if (desc.m * desc.k > kMaxElements) return InvalidArgument("m * k: exceeds 2^36");
  if (desc.nnz < 0 || desc.nnz > desc.m * desc.k)
    return InvalidArgument("nnz: " + Number(desc.nnz) + " is out of range");
  if (desc.dtype < kF16 || desc.dtype > kF32) return InvalidArgument("dtype: unknown value " + Number(desc.dtype));
  if (desc.num_sections > 64) return InvalidArgument("num_sections: more than 64");
  if (desc.num_sections > 0 && desc.sections == nullptr) return InvalidArgument("sections: null");
  for (uint32_t i = 0; i < desc.num_sections; ++i) {
    const spmmd_cuda_section& section = desc.sections[i];
    if (section.size > 0 && section.data == nullptr) {
      return InvalidArgument("sections[" + std::to_string(i) + "].data: null");
    }
    if (section.size > uint64_t{1} << 44) return InvalidArgument("sections[" + std::to_string(i) + "].size: too large");
    if (FindSection(desc, section.id) != &section) {
      return DataLoss("section " + std::to_string(section.id) + ": appears twice");
    }
  }
  return {};
}

uint64_t DeviceBytes(const LayerDesc& desc) {
  uint64_t bytes = kTailBytes;
  for (uint32_t i = 0; i < desc.num_sections; ++i) {
    bytes += RoundUp(SizeOnDevice(desc, desc.sections[i]), kSectionAlignment);
  }
  return bytes;
}

Status AllocateLayer(spmmd_cuda_device* device, const LayerDesc& desc,
                     const std::vector<std::pair<uint32_t, uint64_t>>& sections, spmmd_cuda_layer** out) {
  auto layer = std::make_unique<spmmd_cuda_layer>();
  layer->device = device;
  layer->format = desc.format;
  layer->dtype = desc.dtype;
  layer->m = desc.m;
  layer->k = desc.k;
  layer->nnz = desc.nnz;
  std::memcpy(layer->params, desc.params, sizeof(layer->params));
  uint64_t bytes = 0;
  for (const auto& [id, size] : sections) {
    layer->sections.push_back({id, bytes, size});
    bytes += RoundUp(size, kSectionAlignment);
  }
  layer->block_bytes = bytes + kTailBytes;
  if (Status status = Opened(device).pool.Allocate(layer->block_bytes, &layer->block); !status.ok()) {
    return {status.code(),
            "layer needs " + std::to_string(layer->block_bytes) + " bytes of device memory: " + status.message()};
  }
  *out = layer.release();
  return {};
}

Status UploadLayer(spmmd_cuda_device* device, const LayerDesc& desc, const FormatHooks& hooks, spmmd_cuda_layer** out) {
  SPMMD_CUDA_TRY(hooks.validate(desc));
  const ScopedDevice scope(device->index);
  SPMMD_CUDA_TRY(scope.status());
  std::vector<std::pair<uint32_t, uint64_t>> sizes;
  for (uint32_t i = 0; i < desc.num_sections; ++i) {
    sizes.emplace_back(desc.sections[i].id, SizeOnDevice(desc, desc.sections[i]));
  }
  spmmd_cuda_layer* layer = nullptr;
  SPMMD_CUDA_TRY(AllocateLayer(device, desc, sizes, &layer));
  const auto fail = [&](Status status) {
    FreeLayer(layer);
    return status;
  };
  OpenDevice& opened = Opened(device);
  // What lies between the sections and behind the last.
  if (Status status = opened.pool.Zero(layer->block, layer->block_bytes); !status.ok()) return fail(std::move(status));
  for (uint32_t i = 0; i < desc.num_sections; ++i) {
    const spmmd_cuda_section& section = desc.sections[i];
    if (section.size == 0) continue;
    Status status =
        opened.transfer.ToDevice(layer->block + layer->sections[i].offset, static_cast<const uint8_t*>(section.data),
                                 ShapeOf(desc.m, desc.k, IsPitched(desc, section), section.size));
    if (!status.ok()) return fail({status.code(), "copy of a section: " + status.message()});
  }
  *out = layer;
  return {};
}

Status CloneLayer(const spmmd_cuda_layer& layer, spmmd_cuda_layer** out) {
  const ScopedDevice scope(layer.device->index);
  SPMMD_CUDA_TRY(scope.status());
  auto copy = std::make_unique<spmmd_cuda_layer>(layer);
  copy->block = nullptr;
  LayerPool& pool = Opened(layer.device).pool;
  SPMMD_CUDA_TRY(pool.Allocate(copy->block_bytes, &copy->block));
  if (Status status = pool.Copy(copy->block, layer.block, layer.block_bytes); !status.ok()) {
    pool.Free(copy->block);
    return status;
  }
  *out = copy.release();
  return {};
}

Status ReadSection(const spmmd_cuda_layer& layer, uint32_t section, void* to, uint64_t bytes) {
  const ScopedDevice scope(layer.device->index);
  SPMMD_CUDA_TRY(scope.status());
  for (const spmmd_cuda_layer::Section& found : layer.sections) {
    if (found.id != section) continue;
    const uint8_t* from = layer.block + found.offset;
    const bool pitched = layer.format == kFormatDense && section == kDenseValuesSection;
    const HostTransfer::Shape shape = ShapeOf(layer.m, layer.k, pitched, found.size);
    const uint64_t size = shape.rows * shape.row_bytes;
    if (bytes != size) {
      return InvalidArgument("bytes: " + std::to_string(bytes) + ", the section has " + std::to_string(size));
    }
    // A layer may have been unpacked on the default stream, for which the transfer's do not wait.
    SPMMD_CUDA_CHECK(cudaStreamSynchronize(nullptr));
    return Opened(layer.device).transfer.ToHost(static_cast<uint8_t*>(to), from, shape);
  }
  return {SPMMD_CUDA_NOT_FOUND, "the layer has no section " + std::to_string(section)};
}

uint64_t UnpackedBytes(const spmmd_cuda_layer& layer) {
  return RoundUp(static_cast<uint64_t>(layer.m) * DensePitch(layer.k) * 2, kSectionAlignment) + kTailBytes;
}

Status UnpackLayer(const spmmd_cuda_layer& layer, cudaStream_t stream, spmmd_cuda_layer** out) {
  if (layer.format != kFormatBitmapGpu) {
    return Unimplemented("format: only BITMAP_GPU is unpacked on the GPU, the layer's is " +
                         std::to_string(layer.format));
  }
  const ScopedDevice scope(layer.device->index);
  SPMMD_CUDA_TRY(scope.status());
  LayerDesc desc = {};
  desc.format = kFormatDense;
  desc.dtype = layer.dtype;
  desc.m = layer.m;
  desc.k = layer.k;
  desc.nnz = layer.nnz;
  const uint64_t bytes = static_cast<uint64_t>(layer.m) * DensePitch(layer.k) * 2;
  spmmd_cuda_layer* dense = nullptr;
  SPMMD_CUDA_TRY(AllocateLayer(layer.device, desc, {{kDenseValuesSection, bytes}}, &dense));
  Status status = FromCuda(cudaMemsetAsync(dense->block + bytes, 0, dense->block_bytes - bytes, stream),
                           "cudaMemset of a layer's end");
  if (status.ok()) status = LaunchUnpackBitmapGpu(layer, dense->block, stream);
  // It may be freed before it is filled.
  Status ordered = Opened(layer.device).pool.FreeAfter(stream);
  if (status.ok()) status = std::move(ordered);
  if (!status.ok()) {
    FreeLayer(dense);
    return status;
  }
  *out = dense;
  return {};
}

void FreeLayer(spmmd_cuda_layer* layer) {
  const ScopedDevice scope(layer->device->index);
  Opened(layer->device).pool.Free(layer->block);
  delete layer;
}

}  // namespace spmmd::cuda
