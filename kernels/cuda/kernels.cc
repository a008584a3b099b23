// The table of kernels and formats, the checks that hold for every call, and the automatic choice.
#include "kernels/cuda/kernels.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "kernels/cuda/column_piece_spmspv.h"
#include "kernels/cuda/rlc_csc_spmspv.h"
#include "kernels/cuda/row_stream_spmv.h"
#include "kernels/cuda/spmm_pair.h"
#include "kernels/cuda/spmm_portable.h"
#include "kernels/cuda/spmm_stream.h"
#include "kernels/cuda/three_layer_spmm.h"

namespace spmmd::cuda {
namespace {

// Order is the kernel's number in the ABI of one build; callers find kernels by name.
const Kernel* const kKernels[] = {
    &kDenseCublasLt,
    &kSpmmTile,
    &kSpmmPair,
    &kSpmmStream,
    &kRowStreamSpmv,
    &kColumnPieceSpmspv,
    &kColumnPieceSpmspvIndexed,
    &kRlcCscSpmspv,
    &kThreeLayerSpmm,
    &kSpmmPortable,
};

// Made for compute capability 9.0 and for nothing else. The others run everywhere, kSpmmPortable everywhere else.
const Kernel* const kHopperKernels[] = {&kSpmmTile, &kSpmmPair, &kSpmmStream, &kThreeLayerSpmm};

const FormatHooks kFormats[] = {
    {kFormatDense, "DENSE", ValidateDense},
    {kFormatBitmapGpu, "BITMAP", ValidateBitmapGpu},
    {kFormatRowStream, "ROW_STREAM", ValidateRowStream},
    {kFormatColumnPiece, "RLC_CSC (column pieces)", ValidateColumnPiece},
    {kFormatRlcCsc, "RLC_CSC", ValidateRlcCsc},
    {kFormatThreeLayer, "THREE_LAYER", ValidateThreeLayer, /*hopper_only=*/true},
};

bool RunsOn(const Kernel& kernel, const spmmd_cuda_device& device) {
  if (device.hopper) return &kernel != &kSpmmPortable;
  return std::find(std::begin(kHopperKernels), std::end(kHopperKernels), &kernel) == std::end(kHopperKernels);
}

bool IsDtype(int32_t dtype) { return dtype >= kF16 && dtype <= kF32; }

bool IsAligned(const void* pointer, uint64_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

}  // namespace

int32_t KernelCount() { return static_cast<int32_t>(std::size(kKernels)); }

const Kernel* KernelAt(int32_t index) { return index >= 0 && index < KernelCount() ? kKernels[index] : nullptr; }

const FormatHooks* FindFormat(int32_t format) {
  const auto* found = std::find_if(std::begin(kFormats), std::end(kFormats),
                                   [format](const FormatHooks& hooks) { return hooks.format == format; });
  return found == std::end(kFormats) ? nullptr : found;
}

Status CheckFormat(const spmmd_cuda_device& device, int32_t format) {
  const FormatHooks* hooks = FindFormat(format);
  if (hooks == nullptr) return Unimplemented("format: no GPU kernel executes format " + std::to_string(format));
  if (hooks->hopper_only && !device.hopper) {
    return Unimplemented(std::string("format: the kernels for ") + hooks->name +
                         " need compute capability 9.0, and the device runs the portable ones");
  }
  return {};
}

Status CheckCall(const spmmd_cuda_layer& layer, const Call& call) {
  const bool sparse = call.x_indices != nullptr;
  if (!(call.x_threshold >= 0)) return InvalidArgument("x_threshold: negative or NaN");
  if (call.n < 0 || call.n > kMaxTokens) {
    return InvalidArgument("n: " + std::to_string(call.n) + " is outside [0, " + std::to_string(kMaxTokens) + "]");
  }
  if (!IsDtype(call.y_dtype)) return InvalidArgument("y_dtype: unknown value " + std::to_string(call.y_dtype));
  if (call.activation < 0 || call.activation >= kActivationCount) {
    return InvalidArgument("activation: unknown value " + std::to_string(call.activation));
  }
  if (sparse) {
    if (call.n != 1) return InvalidArgument("n: a sparse activation is one vector, n must be 1");
    if (call.x_nnz < 0 || call.x_nnz > layer.k) {
      return InvalidArgument("x_nnz: " + std::to_string(call.x_nnz) + " is outside [0, K = " + std::to_string(layer.k) +
                             "]");
    }
  } else {
    if (!IsDtype(call.x_dtype)) return InvalidArgument("x_dtype: unknown value " + std::to_string(call.x_dtype));
    if (call.n > 1 && (call.x_stride < layer.k || call.x_stride > kMaxStride)) {
      return InvalidArgument("x_stride: " + std::to_string(call.x_stride) +
                             " is outside [K = " + std::to_string(layer.k) + ", 2^40]");
    }
    if (!IsAligned(call.x, ElementSize(call.x_dtype))) return InvalidArgument("x: not aligned to its element type");
  }
  if (call.n > 1 && (call.y_stride < layer.m || call.y_stride > kMaxStride)) {
    return InvalidArgument("y_stride: " + std::to_string(call.y_stride) +
                           " is outside [M = " + std::to_string(layer.m) + ", 2^40]");
  }
  if (!IsAligned(call.y, ElementSize(call.y_dtype))) return InvalidArgument("y: not aligned to its element type");
  if (!IsAligned(call.bias, 4)) return InvalidArgument("bias: not aligned to 4 bytes");
  return {};
}

Status CheckKernel(const spmmd_cuda_layer& layer, const Kernel& kernel, const Call& call) {
  if (kernel.format != layer.format) {
    return Unimplemented(std::string("kernel ") + kernel.name + " reads format " + std::to_string(kernel.format) +
                         ", the layer's is " + std::to_string(layer.format));
  }
  if (!RunsOn(kernel, *layer.device)) {
    return Unimplemented(std::string("kernel ") + kernel.name + " is not for devices of compute capability " +
                         std::to_string(layer.device->compute_major) + "." +
                         std::to_string(layer.device->compute_minor) + (layer.device->hopper ? "" : " (portable)"));
  }
  if (!kernel.skips_columns && (call.x_threshold > 0 || (call.flags & SPMMD_CUDA_FLAG_ACCUMULATE) != 0)) {
    return Unimplemented(std::string("kernel ") + kernel.name + " takes neither x_threshold nor ACCUMULATE");
  }
  const bool sparse = call.x_indices != nullptr;
  if (kernel.sparse_input != sparse) {
    return Unimplemented(std::string("kernel ") + kernel.name + " takes " + (kernel.sparse_input ? "sparse" : "dense") +
                         " activations");
  }
  return kernel.can_implement(layer, call);
}

Status SelectKernel(const spmmd_cuda_layer& layer, const Call& call, int32_t* index) {
  int32_t first = -1;
  for (int32_t i = KernelCount() - 1; i >= 0; --i) {
    if (!CheckKernel(layer, *kKernels[i], call).ok()) continue;
    first = i;
    if (kKernels[i]->preferred != nullptr && kKernels[i]->preferred(layer, call)) break;
  }
  if (first >= 0) {
    *index = first;
    return {};
  }
  return Unimplemented("no kernel for format " + std::to_string(layer.format) + " with " +
                       (call.x_indices != nullptr ? "sparse" : "dense") +
                       " activations and n = " + std::to_string(call.n));
}

}  // namespace spmmd::cuda
