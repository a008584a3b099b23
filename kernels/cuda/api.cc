// The exported functions: argument checks, the current device, and the last error of the thread.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kernels/cuda/bitmap_gpu_pack.h"
#include "kernels/cuda/dense_cublaslt.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/internal.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/layer.h"
#include "kernels/cuda/read_probe.h"
#include "kernels/cuda/small_copy.h"

using spmmd::cuda::FromCublas;
using spmmd::cuda::FromCuda;
using spmmd::cuda::InvalidArgument;
using spmmd::cuda::Kernel;
using spmmd::cuda::ScopedDevice;
using spmmd::cuda::Status;
using spmmd::cuda::Unimplemented;

namespace {

thread_local std::string last_error;

spmmd_cuda_status Return(const Status& status) {
  last_error = status.message();
  return status.code();
}

// Runs body() and turns what it returns, or what the standard library throws, into a status.
template <typename Body>
spmmd_cuda_status Guard(const Body& body) {
  try {
    return Return(body());
  } catch (const std::bad_alloc&) {
    return Return({SPMMD_CUDA_RESOURCE_EXHAUSTED, "out of host memory"});
  } catch (const std::exception& error) {  // no thread to be had, a mutex that failed
    return Return({SPMMD_CUDA_RESOURCE_EXHAUSTED, error.what()});
  }
}

// As Guard, with the device current.
template <typename Body>
spmmd_cuda_status OnDevice(const spmmd_cuda_device* device, const Body& body) {
  return Guard([&]() -> Status {
    if (device == nullptr) return InvalidArgument("device: null");
    const ScopedDevice scope(device->index);
    SPMMD_CUDA_TRY(scope.status());
    return body();
  });
}

// The common case: one runtime call.
#define SPMMD_CUDA_FORWARD(device, call) OnDevice(device, [&]() -> Status { return FromCuda((call), #call); })

Status NotNull(const void* pointer, const char* name) {
  return pointer == nullptr ? InvalidArgument(std::string(name) + ": null") : Status();
}

cudaStream_t Stream(spmmd_cuda_stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t Event(spmmd_cuda_event event) { return static_cast<cudaEvent_t>(event); }

// Older GPUs have neither the tensor-core steps nor the asynchronous copies that the portable kernels are made of.
bool IsSupported(const cudaDeviceProp& properties) { return properties.major >= 8; }

// Whether the kernels made for compute capability 9.0 run there. SPMMD_CUDA_PORTABLE=1 says no on any device.
bool IsHopper(const cudaDeviceProp& properties) {
  const char* const portable = std::getenv("SPMMD_CUDA_PORTABLE");
  if (portable != nullptr && std::strcmp(portable, "0") != 0 && *portable != '\0') return false;
  return properties.major == 9 && properties.minor == 0;
}

// Resolves AUTO and checks the call.
Status Resolve(const spmmd_cuda_layer* layer, int32_t index, const spmmd_cuda_matmul* call, const Kernel** kernel) {
  if (layer == nullptr) return InvalidArgument("layer: null");
  if (call == nullptr) return InvalidArgument("call: null");
  SPMMD_CUDA_TRY(spmmd::cuda::CheckCall(*layer, *call));
  if (index == SPMMD_CUDA_KERNEL_AUTO) SPMMD_CUDA_TRY(spmmd::cuda::SelectKernel(*layer, *call, &index));
  *kernel = spmmd::cuda::KernelAt(index);
  if (*kernel == nullptr) return InvalidArgument("kernel: no kernel " + std::to_string(index));
  return spmmd::cuda::CheckKernel(*layer, **kernel, *call);
}

uint64_t WorkspaceBytes(const spmmd_cuda_layer& layer, const Kernel& kernel, const spmmd_cuda_matmul& call) {
  return call.n == 0 ? 0 : spmmd::cuda::kCounterBytes + kernel.scratch_bytes(layer, call);
}

// Code for older architectures does not wait for what runs before it, so it must not be launched early.
spmmd_cuda_matmul Chainable(const spmmd_cuda_device& device, const spmmd_cuda_matmul& call) {
  spmmd_cuda_matmul chainable = call;
  if (!device.hopper) chainable.flags &= ~SPMMD_CUDA_FLAG_CHAIN;
  return chainable;
}

// Resolves a kernel for layers that share a launch and checks each call on its own.
Status ResolveGroup(const spmmd_cuda_layer* const* layers, int32_t index, const spmmd_cuda_matmul* calls, int32_t count,
                    const Kernel** kernel) {
  if (layers == nullptr || calls == nullptr) return InvalidArgument("layers or calls: null");
  if (count < 1) return InvalidArgument("count: " + std::to_string(count) + " is less than 1");
  for (int32_t i = 0; i < count; ++i) {
    const Kernel* found = nullptr;
    SPMMD_CUDA_TRY(Resolve(layers[i], index, &calls[i], &found));
    if (i > 0 && found != *kernel) return InvalidArgument("layers: the kernel differs within the group");
    *kernel = found;
  }
  if ((*kernel)->launch_group == nullptr) {
    return Unimplemented(std::string("kernel ") + (*kernel)->name + " has no grouped launch");
  }
  if ((*kernel)->check_group != nullptr) return (*kernel)->check_group(layers, calls, count);
  return {};
}

// `need`: bytes of workspace.
Status CheckPointers(const Kernel& kernel, const spmmd_cuda_matmul& call, uint64_t need) {
  if (kernel.sparse_input ? call.x_nnz > 0 && call.x_values == nullptr : call.x == nullptr) {
    return InvalidArgument("x: null");
  }
  if (call.y == nullptr) return InvalidArgument("y: null");
  if (call.workspace == nullptr || call.workspace_bytes < need) {
    return InvalidArgument("workspace: " + std::to_string(call.workspace_bytes) + " bytes, needs " +
                           std::to_string(need));
  }
  if (reinterpret_cast<uintptr_t>(call.workspace) % 256 != 0) {
    return InvalidArgument("workspace: not 256-byte aligned");
  }
  return {};
}

}  // namespace

extern "C" {

int32_t spmmd_cuda_abi_version(void) { return SPMMD_CUDA_ABI_VERSION; }

uint64_t spmmd_cuda_cublaslt_version(void) { return cublasLtGetVersion(); }

const char* spmmd_cuda_last_error(void) { return last_error.c_str(); }

spmmd_cuda_status spmmd_cuda_device_count(int32_t* count) {
  return Guard([&]() -> Status {
    if (count == nullptr) return InvalidArgument("count: null");
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
      cudaGetLastError();
      *count = 0;
      return {};
    }
    SPMMD_CUDA_CHECK(error);
    *count = devices;
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_get_device_info(int32_t index, spmmd_cuda_device_info* info) {
  return Guard([&]() -> Status {
    if (info == nullptr) return InvalidArgument("info: null");
    cudaDeviceProp properties;
    SPMMD_CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
    const ScopedDevice scope(index);
    SPMMD_CUDA_TRY(scope.status());
    *info = {};
    // Times of other kernels are not this device's, so that the one that runs them by order has a name of its own.
    const bool by_order = properties.major == 9 && properties.minor == 0 && !IsHopper(properties);
    std::snprintf(info->name, sizeof(info->name), "%.100s%s", properties.name, by_order ? " (portable)" : "");
    SPMMD_CUDA_CHECK(cudaDeviceGetPCIBusId(info->pci_bus_id, sizeof(info->pci_bus_id), index));
    static_assert(sizeof(info->uuid) == sizeof(properties.uuid.bytes));
    std::memcpy(info->uuid, properties.uuid.bytes, sizeof(info->uuid));
    info->compute_major = properties.major;
    info->compute_minor = properties.minor;
    info->multiprocessors = properties.multiProcessorCount;
    info->usable = !IsSupported(properties) ? 0 : IsHopper(properties) ? 1 : 2;
    info->l2_bytes = static_cast<uint64_t>(properties.l2CacheSize);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    SPMMD_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    info->free_memory = free_bytes;
    info->total_memory = total_bytes;
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_device_open(int32_t index, spmmd_cuda_device** device) {
  return Guard([&]() -> Status {
    if (device == nullptr) return InvalidArgument("device: null");
    cudaDeviceProp properties;
    SPMMD_CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
    if (!IsSupported(properties)) {
      return Unimplemented(std::string("device ") + properties.name + " has compute capability " +
                           std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                           "; there are kernels for 8.0 and later");
    }
    const ScopedDevice scope(index);
    SPMMD_CUDA_TRY(scope.status());
    auto opened = std::make_unique<spmmd::cuda::OpenDevice>();
    opened->index = index;
    opened->multiprocessors = properties.multiProcessorCount;
    opened->compute_major = properties.major;
    opened->compute_minor = properties.minor;
    opened->hopper = IsHopper(properties);
    opened->max_shared_bytes = properties.sharedMemPerBlockOptin;
    opened->shared_bytes_per_multiprocessor = properties.sharedMemPerMultiprocessor;
    opened->l2_bytes = static_cast<uint64_t>(properties.l2CacheSize);
    SPMMD_CUDA_TRY(opened->pool.Open(index));
    SPMMD_CUDA_TRY(opened->transfer.Open(index));
    SPMMD_CUBLAS_CHECK(cublasLtCreate(&opened->cublaslt));
    *device = opened.release();
    return {};
  });
}

void spmmd_cuda_device_close(spmmd_cuda_device* device) {
  if (device == nullptr) return;
  const ScopedDevice scope(device->index);
  cublasLtDestroy(device->cublaslt);
  delete &spmmd::cuda::Opened(device);
}

spmmd_cuda_status spmmd_cuda_memory_info(spmmd_cuda_device* device, uint64_t* free_bytes, uint64_t* total_bytes) {
  return OnDevice(device, [&]() -> Status {
    size_t free_now = 0;
    size_t total = 0;
    SPMMD_CUDA_CHECK(cudaMemGetInfo(&free_now, &total));
    uint64_t unused = 0;
    SPMMD_CUDA_TRY(spmmd::cuda::Opened(device).pool.Unused(&unused));
    if (free_bytes != nullptr) *free_bytes = free_now + unused;
    if (total_bytes != nullptr) *total_bytes = total;
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_malloc(spmmd_cuda_device* device, uint64_t bytes, void** pointer) {
  return OnDevice(device, [&]() -> Status {
    SPMMD_CUDA_TRY(NotNull(pointer, "pointer"));
    // Not from the pool: workspaces stay for long, and memory of a pool cannot be exported.
    return spmmd::cuda::DeviceMalloc(device, bytes, pointer);
  });
}

spmmd_cuda_status spmmd_cuda_free(spmmd_cuda_device* device, void* pointer) {
  return SPMMD_CUDA_FORWARD(device, cudaFree(pointer));
}

spmmd_cuda_status spmmd_cuda_host_malloc(spmmd_cuda_device* device, uint64_t bytes, void** pointer) {
  return OnDevice(device, [&]() -> Status {
    SPMMD_CUDA_TRY(NotNull(pointer, "pointer"));
    SPMMD_CUDA_CHECK(cudaHostAlloc(pointer, bytes, cudaHostAllocPortable));
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_host_free(spmmd_cuda_device* device, void* pointer) {
  return SPMMD_CUDA_FORWARD(device, cudaFreeHost(pointer));
}

spmmd_cuda_status spmmd_cuda_host_register(spmmd_cuda_device* device, void* pointer, uint64_t bytes) {
  return SPMMD_CUDA_FORWARD(device, cudaHostRegister(pointer, bytes, cudaHostRegisterPortable));
}

spmmd_cuda_status spmmd_cuda_host_unregister(spmmd_cuda_device* device, void* pointer) {
  return SPMMD_CUDA_FORWARD(device, cudaHostUnregister(pointer));
}

spmmd_cuda_status spmmd_cuda_memcpy_async(spmmd_cuda_device* device, void* to, const void* from, uint64_t bytes,
                                          spmmd_cuda_stream stream) {
  return SPMMD_CUDA_FORWARD(device, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, Stream(stream)));
}

spmmd_cuda_status spmmd_cuda_copy_kernel(spmmd_cuda_device* device, void* to, const void* from, uint64_t bytes,
                                         spmmd_cuda_stream stream) {
  return OnDevice(device, [&]() -> Status {
    if (to == nullptr || from == nullptr) return InvalidArgument("to or from: null");
    return spmmd::cuda::LaunchSmallCopy(to, from, bytes, Stream(stream));
  });
}

spmmd_cuda_status spmmd_cuda_memcpy_2d_async(spmmd_cuda_device* device, void* to, uint64_t to_pitch, const void* from,
                                             uint64_t from_pitch, uint64_t row_bytes, uint64_t rows,
                                             spmmd_cuda_stream stream) {
  return SPMMD_CUDA_FORWARD(
      device, cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, row_bytes, rows, cudaMemcpyDefault, Stream(stream)));
}

spmmd_cuda_status spmmd_cuda_memset_async(spmmd_cuda_device* device, void* pointer, int32_t byte, uint64_t bytes,
                                          spmmd_cuda_stream stream) {
  return SPMMD_CUDA_FORWARD(device, cudaMemsetAsync(pointer, byte, bytes, Stream(stream)));
}

spmmd_cuda_status spmmd_cuda_ipc_export(spmmd_cuda_device* device, void* pointer, uint8_t handle[64]) {
  return OnDevice(device, [&]() -> Status {
    SPMMD_CUDA_TRY(NotNull(pointer, "pointer"));
    SPMMD_CUDA_TRY(NotNull(handle, "handle"));
    cudaIpcMemHandle_t ipc;
    static_assert(sizeof(ipc) == 64);
    SPMMD_CUDA_CHECK(cudaIpcGetMemHandle(&ipc, pointer));
    std::memcpy(handle, &ipc, sizeof(ipc));
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_ipc_open(spmmd_cuda_device* device, const uint8_t handle[64], void** pointer) {
  return OnDevice(device, [&]() -> Status {
    SPMMD_CUDA_TRY(NotNull(handle, "handle"));
    SPMMD_CUDA_TRY(NotNull(pointer, "pointer"));
    cudaIpcMemHandle_t ipc;
    std::memcpy(&ipc, handle, sizeof(ipc));
    SPMMD_CUDA_CHECK(cudaIpcOpenMemHandle(pointer, ipc, cudaIpcMemLazyEnablePeerAccess));
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_address_range(spmmd_cuda_device* device, const void* pointer, void** base,
                                           uint64_t* bytes) {
  return OnDevice(device, [&]() -> Status {
    SPMMD_CUDA_TRY(NotNull(base, "base"));
    SPMMD_CUDA_TRY(NotNull(bytes, "bytes"));
    using GetAddressRange = CUresult (*)(CUdeviceptr*, size_t*, CUdeviceptr);
    static const auto get = []() -> GetAddressRange {
      void* function = nullptr;
      cudaDriverEntryPointQueryResult result;
      if (cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 12000, cudaEnableDefault, &result) !=
              cudaSuccess ||
          result != cudaDriverEntryPointSuccess) {
        return nullptr;
      }
      return reinterpret_cast<GetAddressRange>(function);
    }();
    if (get == nullptr) return {SPMMD_CUDA_UNAVAILABLE, "the driver has no cuMemGetAddressRange"};
    CUdeviceptr start = 0;
    size_t size = 0;
    if (get(&start, &size, reinterpret_cast<CUdeviceptr>(pointer)) != CUDA_SUCCESS) {
      return {SPMMD_CUDA_INVALID_ARGUMENT, "not device memory"};
    }
    *base = reinterpret_cast<void*>(start);
    *bytes = size;
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_ipc_close(spmmd_cuda_device* device, void* pointer) {
  return SPMMD_CUDA_FORWARD(device, cudaIpcCloseMemHandle(pointer));
}

spmmd_cuda_status spmmd_cuda_stream_create(spmmd_cuda_device* device, spmmd_cuda_stream* stream) {
  return OnDevice(device, [&]() -> Status {
    SPMMD_CUDA_TRY(NotNull(stream, "stream"));
    SPMMD_CUDA_CHECK(cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking));
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_stream_destroy(spmmd_cuda_device* device, spmmd_cuda_stream stream) {
  return SPMMD_CUDA_FORWARD(device, cudaStreamDestroy(Stream(stream)));
}

spmmd_cuda_status spmmd_cuda_stream_synchronize(spmmd_cuda_device* device, spmmd_cuda_stream stream) {
  return SPMMD_CUDA_FORWARD(device, cudaStreamSynchronize(Stream(stream)));
}

spmmd_cuda_status spmmd_cuda_stream_wait_event(spmmd_cuda_device* device, spmmd_cuda_stream stream,
                                               spmmd_cuda_event event) {
  return SPMMD_CUDA_FORWARD(device, cudaStreamWaitEvent(Stream(stream), Event(event), 0));
}

spmmd_cuda_status spmmd_cuda_event_create(spmmd_cuda_device* device, int32_t timing, spmmd_cuda_event* event) {
  return OnDevice(device, [&]() -> Status {
    SPMMD_CUDA_TRY(NotNull(event, "event"));
    SPMMD_CUDA_CHECK(cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event),
                                              timing != 0 ? cudaEventDefault : cudaEventDisableTiming));
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_event_destroy(spmmd_cuda_device* device, spmmd_cuda_event event) {
  return SPMMD_CUDA_FORWARD(device, cudaEventDestroy(Event(event)));
}

spmmd_cuda_status spmmd_cuda_event_record(spmmd_cuda_device* device, spmmd_cuda_event event, spmmd_cuda_stream stream) {
  return OnDevice(device, [&]() -> Status {
    // In a capture a plain record is an edge of the graph; an external one is recorded anew by every replay.
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    SPMMD_CUDA_CHECK(cudaStreamIsCapturing(Stream(stream), &capture));
    const unsigned flags = capture == cudaStreamCaptureStatusNone ? cudaEventRecordDefault : cudaEventRecordExternal;
    SPMMD_CUDA_CHECK(cudaEventRecordWithFlags(Event(event), Stream(stream), flags));
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_event_synchronize(spmmd_cuda_device* device, spmmd_cuda_event event) {
  return SPMMD_CUDA_FORWARD(device, cudaEventSynchronize(Event(event)));
}

spmmd_cuda_status spmmd_cuda_event_query(spmmd_cuda_device* device, spmmd_cuda_event event, int32_t* done) {
  return OnDevice(device, [&]() -> Status {
    SPMMD_CUDA_TRY(NotNull(event, "event"));
    SPMMD_CUDA_TRY(NotNull(done, "done"));
    const cudaError_t error = cudaEventQuery(Event(event));
    *done = error == cudaSuccess ? 1 : 0;
    return error == cudaErrorNotReady ? Status() : FromCuda(error, "cudaEventQuery");
  });
}

spmmd_cuda_status spmmd_cuda_event_elapsed_us(spmmd_cuda_device* device, spmmd_cuda_event start, spmmd_cuda_event end,
                                              double* microseconds) {
  return OnDevice(device, [&]() -> Status {
    SPMMD_CUDA_TRY(NotNull(start, "start"));
    SPMMD_CUDA_TRY(NotNull(end, "end"));
    SPMMD_CUDA_TRY(NotNull(microseconds, "microseconds"));
    float milliseconds = 0;
    SPMMD_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, Event(start), Event(end)));
    *microseconds = static_cast<double>(milliseconds) * 1e3;
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_graph_begin(spmmd_cuda_device* device, spmmd_cuda_stream stream) {
  return SPMMD_CUDA_FORWARD(device, cudaStreamBeginCapture(Stream(stream), cudaStreamCaptureModeThreadLocal));
}

spmmd_cuda_status spmmd_cuda_graph_end(spmmd_cuda_device* device, spmmd_cuda_stream stream, spmmd_cuda_graph* graph) {
  return OnDevice(device, [&]() -> Status {
    SPMMD_CUDA_TRY(NotNull(graph, "graph"));
    cudaGraph_t recorded = nullptr;
    SPMMD_CUDA_CHECK(cudaStreamEndCapture(Stream(stream), &recorded));
    const Status status =
        FromCuda(cudaGraphInstantiate(reinterpret_cast<cudaGraphExec_t*>(graph), recorded, 0), "cudaGraphInstantiate");
    SPMMD_CUDA_CHECK(cudaGraphDestroy(recorded));
    return status;
  });
}

spmmd_cuda_status spmmd_cuda_graph_launch(spmmd_cuda_device* device, spmmd_cuda_graph graph, spmmd_cuda_stream stream) {
  return OnDevice(device, [&]() -> Status {
    SPMMD_CUDA_TRY(NotNull(graph, "graph"));
    SPMMD_CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), Stream(stream)));
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_graph_destroy(spmmd_cuda_device* device, spmmd_cuda_graph graph) {
  return SPMMD_CUDA_FORWARD(device, cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)));
}

spmmd_cuda_status spmmd_cuda_read_probe(spmmd_cuda_device* device, const void* pointer, uint64_t bytes,
                                        spmmd_cuda_stream stream) {
  return OnDevice(device, [&]() -> Status {
    SPMMD_CUDA_TRY(NotNull(pointer, "pointer"));
    return spmmd::cuda::LaunchReadProbe(*device, pointer, bytes, Stream(stream));
  });
}

spmmd_cuda_status spmmd_cuda_format_supported(const spmmd_cuda_device* device, int32_t format) {
  return Guard([&]() -> Status {
    if (device == nullptr) return InvalidArgument("device: null");
    return spmmd::cuda::CheckFormat(*device, format);
  });
}

spmmd_cuda_status spmmd_cuda_layer_device_bytes(const spmmd_cuda_layer_desc* desc, uint64_t* bytes) {
  return Guard([&]() -> Status {
    if (desc == nullptr || bytes == nullptr) return InvalidArgument("desc or bytes: null");
    SPMMD_CUDA_TRY(spmmd::cuda::CheckDesc(*desc));
    *bytes = spmmd::cuda::DeviceBytes(*desc);
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_layer_upload(spmmd_cuda_device* device, const spmmd_cuda_layer_desc* desc,
                                          spmmd_cuda_layer** layer) {
  return Guard([&]() -> Status {
    if (device == nullptr || desc == nullptr || layer == nullptr) return InvalidArgument("device, desc or layer: null");
    SPMMD_CUDA_TRY(spmmd::cuda::CheckFormat(*device, desc->format));
    SPMMD_CUDA_TRY(spmmd::cuda::CheckDesc(*desc));
    return spmmd::cuda::UploadLayer(device, *desc, *spmmd::cuda::FindFormat(desc->format), layer);
  });
}

spmmd_cuda_status spmmd_cuda_pack_bitmap_gpu(spmmd_cuda_device* device, const spmmd_cuda_dense_weights* weights,
                                             spmmd_cuda_stream stream, spmmd_cuda_packed_info* info,
                                             spmmd_cuda_layer** layer) {
  return OnDevice(device, [&]() -> Status {
    if (weights == nullptr || layer == nullptr) return InvalidArgument("weights or layer: null");
    if (weights->data == nullptr) return InvalidArgument("data: null");
    return spmmd::cuda::PackBitmapGpu(device, *weights, Stream(stream), info, layer);
  });
}

spmmd_cuda_status spmmd_cuda_layer_clone(const spmmd_cuda_layer* layer, spmmd_cuda_layer** copy) {
  return Guard([&]() -> Status {
    if (layer == nullptr || copy == nullptr) return InvalidArgument("layer or copy: null");
    return spmmd::cuda::CloneLayer(*layer, copy);
  });
}

spmmd_cuda_status spmmd_cuda_layer_read(const spmmd_cuda_layer* layer, uint32_t section, void* to, uint64_t bytes) {
  return Guard([&]() -> Status {
    if (layer == nullptr || (to == nullptr && bytes > 0)) return InvalidArgument("layer or to: null");
    return spmmd::cuda::ReadSection(*layer, section, to, bytes);
  });
}

spmmd_cuda_status spmmd_cuda_layer_unpacked_bytes(const spmmd_cuda_layer* layer, uint64_t* bytes) {
  return Guard([&]() -> Status {
    if (layer == nullptr || bytes == nullptr) return InvalidArgument("layer or bytes: null");
    *bytes = spmmd::cuda::UnpackedBytes(*layer);
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_layer_unpack(const spmmd_cuda_layer* layer, spmmd_cuda_stream stream,
                                          spmmd_cuda_layer** dense) {
  return Guard([&]() -> Status {
    if (layer == nullptr || dense == nullptr) return InvalidArgument("layer or dense: null");
    return spmmd::cuda::UnpackLayer(*layer, Stream(stream), dense);
  });
}

void spmmd_cuda_layer_free(spmmd_cuda_layer* layer) {
  if (layer != nullptr) spmmd::cuda::FreeLayer(layer);
}

int32_t spmmd_cuda_kernel_count(void) { return spmmd::cuda::KernelCount(); }

const char* spmmd_cuda_kernel_name(int32_t kernel) {
  const Kernel* found = spmmd::cuda::KernelAt(kernel);
  return found == nullptr ? "" : found->name;
}

int32_t spmmd_cuda_find_kernel(const char* name) {
  for (int32_t i = 0; name != nullptr && i < spmmd::cuda::KernelCount(); ++i) {
    if (std::strcmp(spmmd::cuda::KernelAt(i)->name, name) == 0) return i;
  }
  return -1;
}

spmmd_cuda_status spmmd_cuda_select_kernel(const spmmd_cuda_layer* layer, const spmmd_cuda_matmul* call,
                                           int32_t* kernel) {
  return Guard([&]() -> Status {
    if (layer == nullptr || call == nullptr || kernel == nullptr) return InvalidArgument("layer, call or kernel: null");
    SPMMD_CUDA_TRY(spmmd::cuda::CheckCall(*layer, *call));
    return spmmd::cuda::SelectKernel(*layer, *call, kernel);
  });
}

spmmd_cuda_status spmmd_cuda_can_implement(const spmmd_cuda_layer* layer, int32_t kernel,
                                           const spmmd_cuda_matmul* call) {
  return Guard([&]() -> Status {
    const Kernel* found = nullptr;
    return Resolve(layer, kernel, call, &found);
  });
}

spmmd_cuda_status spmmd_cuda_workspace_bytes(const spmmd_cuda_layer* layer, int32_t kernel,
                                             const spmmd_cuda_matmul* call, uint64_t* bytes) {
  return Guard([&]() -> Status {
    if (bytes == nullptr) return InvalidArgument("bytes: null");
    const Kernel* found = nullptr;
    SPMMD_CUDA_TRY(Resolve(layer, kernel, call, &found));
    *bytes = WorkspaceBytes(*layer, *found, *call);
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_workspace_init(spmmd_cuda_device* device, void* workspace, uint64_t bytes,
                                            spmmd_cuda_stream stream) {
  return OnDevice(device, [&]() -> Status {
    if (bytes == 0) return {};
    SPMMD_CUDA_TRY(NotNull(workspace, "workspace"));
    SPMMD_CUDA_CHECK(cudaMemsetAsync(workspace, 0, std::min(bytes, spmmd::cuda::kCounterBytes), Stream(stream)));
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_launch(const spmmd_cuda_layer* layer, int32_t kernel, const spmmd_cuda_matmul* call,
                                    spmmd_cuda_stream stream) {
  return Guard([&]() -> Status {
    const Kernel* found = nullptr;
    SPMMD_CUDA_TRY(Resolve(layer, kernel, call, &found));
    if (call->n == 0) return {};
    SPMMD_CUDA_TRY(CheckPointers(*found, *call, WorkspaceBytes(*layer, *found, *call)));
    const ScopedDevice scope(layer->device->index);
    SPMMD_CUDA_TRY(scope.status());
    return found->launch(*layer, Chainable(*layer->device, *call), Stream(stream));
  });
}

spmmd_cuda_status spmmd_cuda_group_workspace_bytes(const spmmd_cuda_layer* const* layers, int32_t kernel,
                                                   const spmmd_cuda_matmul* calls, int32_t count, uint64_t* bytes) {
  return Guard([&]() -> Status {
    if (bytes == nullptr) return InvalidArgument("bytes: null");
    const Kernel* found = nullptr;
    SPMMD_CUDA_TRY(ResolveGroup(layers, kernel, calls, count, &found));
    *bytes = calls[0].n == 0 ? 0 : spmmd::cuda::kCounterBytes + found->group_scratch_bytes(layers, calls, count);
    return {};
  });
}

spmmd_cuda_status spmmd_cuda_launch_group(const spmmd_cuda_layer* const* layers, int32_t kernel,
                                          const spmmd_cuda_matmul* calls, int32_t count, spmmd_cuda_stream stream) {
  return Guard([&]() -> Status {
    const Kernel* found = nullptr;
    SPMMD_CUDA_TRY(ResolveGroup(layers, kernel, calls, count, &found));
    if (calls[0].n == 0) return {};
    const uint64_t need = spmmd::cuda::kCounterBytes + found->group_scratch_bytes(layers, calls, count);
    for (int32_t i = 0; i < count; ++i) {
      if (i > 0 && calls[i].y == nullptr) return InvalidArgument("calls[" + std::to_string(i) + "].y: null");
    }
    SPMMD_CUDA_TRY(CheckPointers(*found, calls[0], need));
    const ScopedDevice scope(layers[0]->device->index);
    SPMMD_CUDA_TRY(scope.status());
    std::vector<spmmd_cuda_matmul> chainable;
    for (int32_t i = 0; i < count; ++i) chainable.push_back(Chainable(*layers[0]->device, calls[i]));
    return found->launch_group(layers, chainable.data(), count, Stream(stream));
  });
}

spmmd_cuda_status spmmd_cuda_dense_tune(const spmmd_cuda_layer* layer, const spmmd_cuda_matmul* call,
                                        spmmd_cuda_stream stream) {
  return Guard([&]() -> Status {
    const Kernel* found = nullptr;
    SPMMD_CUDA_TRY(Resolve(layer, spmmd_cuda_find_kernel(spmmd::cuda::kDenseCublasLt.name), call, &found));
    if (call->n == 0) return {};
    SPMMD_CUDA_TRY(CheckPointers(*found, *call, WorkspaceBytes(*layer, *found, *call)));
    const ScopedDevice scope(layer->device->index);
    SPMMD_CUDA_TRY(scope.status());
    return spmmd::cuda::TuneDense(*layer, *call, Stream(stream));
  });
}

spmmd_cuda_status spmmd_cuda_dense_use_candidate(const spmmd_cuda_layer* layer, const spmmd_cuda_matmul* call,
                                                 int32_t index) {
  return Guard([&]() -> Status {
    const Kernel* found = nullptr;
    SPMMD_CUDA_TRY(Resolve(layer, spmmd_cuda_find_kernel(spmmd::cuda::kDenseCublasLt.name), call, &found));
    const ScopedDevice scope(layer->device->index);
    SPMMD_CUDA_TRY(scope.status());
    return spmmd::cuda::UseDenseCandidate(*layer, *call, index);
  });
}

spmmd_cuda_status spmmd_cuda_elementwise(spmmd_cuda_device* device, const spmmd_cuda_elementwise_call* call,
                                         spmmd_cuda_stream stream) {
  return OnDevice(device, [&]() -> Status {
    if (call == nullptr) return InvalidArgument("call: null");
    return spmmd::cuda::LaunchElementwise(*call, Stream(stream));
  });
}

}  // extern "C"
