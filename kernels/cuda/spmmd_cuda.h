/* The C ABI of libspmmd_cuda.so: devices, memory, streams, resident layers and kernels.
 *
 * The server, the benchmark and the Python in-process path load this library with dlopen, so that one binary starts on
 * hosts with and without a GPU driver. Plain C: no exception and no C++ type crosses it. The library itself needs the
 * NVIDIA driver, libcublasLt (found at load time through the usual search path) and nothing of spmmd.
 *
 * Conventions
 * - Every function that can fail returns a status: SPMMD_CUDA_OK or one of the canonical gRPC codes below. The message
 *   of the calling thread's last failure is spmmd_cuda_last_error().
 * - Sizes are 64-bit. Dtypes, formats and activations are the numbers of kernels/base/dtype.h (1 fp16, 2 bf16, 3 fp32),
 *   kernels/format/packed_layer.h (Format) and kernels/cpu/matmul.h (Activation: 0 none, 1 ReLU, 2 GELU by erf,
 *   3 GELU by tanh, 4 SiLU).
 * - Thread safety: all functions may be called from any thread. A layer may be used by several streams at once; a
 *   workspace may be used by one launch at a time.
 * - spmmd_cuda_launch neither allocates nor synchronises and may be captured into a CUDA graph.
 */
#ifndef SPMMD_KERNELS_CUDA_SPMMD_CUDA_H_
#define SPMMD_KERNELS_CUDA_SPMMD_CUDA_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(SPMMD_CUDA_BUILDING)
#define SPMMD_CUDA_API __attribute__((visibility("default")))
#else
#define SPMMD_CUDA_API
#endif

/* Raised by every incompatible change of this header. A loader refuses any other value. */
#define SPMMD_CUDA_ABI_VERSION 1

enum {
  SPMMD_CUDA_OK = 0,
  SPMMD_CUDA_INVALID_ARGUMENT = 3,
  SPMMD_CUDA_NOT_FOUND = 5,
  SPMMD_CUDA_RESOURCE_EXHAUSTED = 8,
  SPMMD_CUDA_FAILED_PRECONDITION = 9,
  SPMMD_CUDA_UNIMPLEMENTED = 12,
  SPMMD_CUDA_INTERNAL = 13,
  SPMMD_CUDA_UNAVAILABLE = 14,
  SPMMD_CUDA_DATA_LOSS = 15
};
typedef int32_t spmmd_cuda_status;

typedef struct spmmd_cuda_device spmmd_cuda_device; /* one opened GPU */
typedef struct spmmd_cuda_layer spmmd_cuda_layer;   /* one weight matrix resident on a GPU */
typedef void* spmmd_cuda_stream;                    /* a cudaStream_t */
typedef void* spmmd_cuda_event;                     /* a cudaEvent_t */

SPMMD_CUDA_API int32_t spmmd_cuda_abi_version(void);
/* The cublasLt that is loaded: what was measured with another one may not hold. */
SPMMD_CUDA_API uint64_t spmmd_cuda_cublaslt_version(void);
/* Message of the last failure on this thread; empty string if there was none. Valid until the next call. */
SPMMD_CUDA_API const char* spmmd_cuda_last_error(void);

/* ---- Devices ---------------------------------------------------------------------------------------------------- */

typedef struct {
  char name[128];
  char pci_bus_id[32];
  uint8_t uuid[16];
  int32_t compute_major;
  int32_t compute_minor;
  int32_t multiprocessors;
  int32_t usable; /* 0: no; 1: runs the kernels made for compute capability 9.0; 2: the portable ones */
  uint64_t total_memory;
  uint64_t free_memory;
  uint64_t l2_bytes;
} spmmd_cuda_device_info;

/* Number of GPUs the driver shows; 0 (with SPMMD_CUDA_OK) when there is no driver or no GPU. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_device_count(int32_t* count);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_get_device_info(int32_t index, spmmd_cuda_device_info* info);
/* UNIMPLEMENTED below compute capability 8.0. Devices of 9.0 run the kernels made for them, all others the portable
 * ones; so does every device when it is opened with SPMMD_CUDA_PORTABLE=1 in the environment (a 9.0's name then ends
 * in " (portable)"), for tests and comparisons. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_device_open(int32_t index, spmmd_cuda_device** device);
/* Every layer, stream, event and allocation of the device must be gone. Null is allowed. */
SPMMD_CUDA_API void spmmd_cuda_device_close(spmmd_cuda_device* device);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_memory_info(spmmd_cuda_device* device, uint64_t* free_bytes,
                                                        uint64_t* total_bytes);

/* ---- Memory, streams, events ------------------------------------------------------------------------------------ */

SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_malloc(spmmd_cuda_device* device, uint64_t bytes, void** pointer);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_free(spmmd_cuda_device* device, void* pointer);
/* Page-locked host memory. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_host_malloc(spmmd_cuda_device* device, uint64_t bytes, void** pointer);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_host_free(spmmd_cuda_device* device, void* pointer);
/* Page-locks memory of the caller (a POSIX shared-memory region, say). */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_host_register(spmmd_cuda_device* device, void* pointer, uint64_t bytes);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_host_unregister(spmmd_cuda_device* device, void* pointer);
/* Any direction; asynchronous for page-locked and device memory. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_memcpy_async(spmmd_cuda_device* device, void* to, const void* from,
                                                         uint64_t bytes, spmmd_cuda_stream stream);
/* The same by a kernel, for a few KiB between kernels of a stream or graph: it starts sooner than a copy engine. Device
 * or page-locked memory, 16-byte aligned, a multiple of 16 bytes (INVALID_ARGUMENT otherwise). */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_copy_kernel(spmmd_cuda_device* device, void* to, const void* from,
                                                        uint64_t bytes, spmmd_cuda_stream stream);
/* rows x row_bytes between pitched buffers. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_memcpy_2d_async(spmmd_cuda_device* device, void* to, uint64_t to_pitch,
                                                            const void* from, uint64_t from_pitch, uint64_t row_bytes,
                                                            uint64_t rows, spmmd_cuda_stream stream);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_memset_async(spmmd_cuda_device* device, void* pointer, int32_t byte,
                                                         uint64_t bytes, spmmd_cuda_stream stream);
/* CUDA IPC: a 64-byte cudaIpcMemHandle_t of memory that another process owns. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_ipc_export(spmmd_cuda_device* device, void* pointer, uint8_t handle[64]);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_ipc_open(spmmd_cuda_device* device, const uint8_t handle[64],
                                                     void** pointer);
/* The whole allocation that device memory lies in; of memory from ipc_open too. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_address_range(spmmd_cuda_device* device, const void* pointer, void** base,
                                                          uint64_t* bytes);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_ipc_close(spmmd_cuda_device* device, void* pointer);

SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_stream_create(spmmd_cuda_device* device, spmmd_cuda_stream* stream);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_stream_destroy(spmmd_cuda_device* device, spmmd_cuda_stream stream);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_stream_synchronize(spmmd_cuda_device* device, spmmd_cuda_stream stream);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_stream_wait_event(spmmd_cuda_device* device, spmmd_cuda_stream stream,
                                                              spmmd_cuda_event event);
/* timing != 0: usable with spmmd_cuda_event_elapsed_us. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_event_create(spmmd_cuda_device* device, int32_t timing,
                                                         spmmd_cuda_event* event);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_event_destroy(spmmd_cuda_device* device, spmmd_cuda_event event);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_event_record(spmmd_cuda_device* device, spmmd_cuda_event event,
                                                         spmmd_cuda_stream stream);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_event_synchronize(spmmd_cuda_device* device, spmmd_cuda_event event);
/* done = 1 when everything before the record has finished. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_event_query(spmmd_cuda_device* device, spmmd_cuda_event event,
                                                        int32_t* done);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_event_elapsed_us(spmmd_cuda_device* device, spmmd_cuda_event start,
                                                             spmmd_cuda_event end, double* microseconds);

/* Everything launched on `stream` between begin and end is recorded instead of run, and replayed by graph_launch. */
typedef void* spmmd_cuda_graph; /* a cudaGraphExec_t */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_graph_begin(spmmd_cuda_device* device, spmmd_cuda_stream stream);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_graph_end(spmmd_cuda_device* device, spmmd_cuda_stream stream,
                                                      spmmd_cuda_graph* graph);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_graph_launch(spmmd_cuda_device* device, spmmd_cuda_graph graph,
                                                         spmmd_cuda_stream stream);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_graph_destroy(spmmd_cuda_device* device, spmmd_cuda_graph graph);

/* Launches a kernel that only reads `bytes` of device memory, 16-byte aligned (the read ceiling of a device). */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_read_probe(spmmd_cuda_device* device, const void* pointer, uint64_t bytes,
                                                       spmmd_cuda_stream stream);

/* ---- Layers ----------------------------------------------------------------------------------------------------- */

typedef struct {
  uint32_t id; /* Section::id of the format */
  uint32_t reserved;
  const void* data; /* host memory */
  uint64_t size;
} spmmd_cuda_section;

/* A PackedLayer, field by field. */
typedef struct {
  int32_t format;
  int32_t dtype;
  uint32_t layout_version;
  uint32_t num_sections;
  int64_t m;
  int64_t k;
  int64_t nnz;
  int64_t params[8];
  const spmmd_cuda_section* sections;
} spmmd_cuda_layer_desc;

/* Whether kernels of this device read the format; UNIMPLEMENTED, saying why, when none does. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_format_supported(const spmmd_cuda_device* device, int32_t format);
/* Bytes of device memory the layer will take. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_layer_device_bytes(const spmmd_cuda_layer_desc* desc, uint64_t* bytes);
/* Validates the packed bytes (DATA_LOSS naming what is wrong: a kernel never meets a layer that could make it read out
 * of bounds), allocates, copies and returns once the copy is done. RESOURCE_EXHAUSTED names the bytes needed. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_layer_upload(spmmd_cuda_device* device, const spmmd_cuda_layer_desc* desc,
                                                         spmmd_cuda_layer** layer);
/* A second copy of a resident layer on the same device (benchmarks rotate copies so that L2 holds none). */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_layer_clone(const spmmd_cuda_layer* layer, spmmd_cuda_layer** copy);
/* A dense matrix [m, k] in device memory. */
typedef struct {
  const void* data;
  int64_t m;
  int64_t k;
  int64_t row_stride; /* elements, >= k; any alignment of the element type */
  int32_t dtype;      /* fp16 or bf16 */
  int32_t chunk_cols; /* of BITMAP_GPU: 128 or 256 */
  int32_t allow_nonfinite;
  int32_t reserved;
} spmmd_cuda_dense_weights;
/* What packing on the device came to. */
typedef struct {
  int64_t nnz;
  int64_t max_chunk_bytes; /* PackedLayer::params[1] */
  uint64_t chunk_bytes;    /* of section 1 */
  uint64_t offset_bytes;   /* of section 2 */
} spmmd_cuda_packed_info;
/* Packs a matrix into a resident BITMAP_GPU layer whose sections are, byte for byte, what the CPU packer makes of it.
 * Allocates, synchronises `stream` and returns once the layer is ready; `data` may be freed then. INVALID_ARGUMENT
 * names the field, or how many weights are NaN or infinite when those are not allowed. `info` may be null. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_pack_bitmap_gpu(spmmd_cuda_device* device,
                                                            const spmmd_cuda_dense_weights* weights,
                                                            spmmd_cuda_stream stream, spmmd_cuda_packed_info* info,
                                                            spmmd_cuda_layer** layer);
/* The packed bytes of one section as they were uploaded, back to host memory; `bytes` is the section's size. NOT_FOUND
 * when the layer has no such section. Returns once the copy is done. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_layer_read(const spmmd_cuda_layer* layer, uint32_t section, void* to,
                                                       uint64_t bytes);
/* Bytes of device memory that layer_unpack takes. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_layer_unpacked_bytes(const spmmd_cuda_layer* layer, uint64_t* bytes);
/* A DENSE layer of the same matrix, made on the device from a BITMAP_GPU layer; UNIMPLEMENTED for other formats.
 * Allocates, and returns before it is filled: launches that come after it on `stream` may use it. Not for capture. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_layer_unpack(const spmmd_cuda_layer* layer, spmmd_cuda_stream stream,
                                                         spmmd_cuda_layer** dense);
/* No launch that uses the layer may be pending. Null is allowed. */
SPMMD_CUDA_API void spmmd_cuda_layer_free(spmmd_cuda_layer* layer);

/* ---- Kernels ---------------------------------------------------------------------------------------------------- */

/* Launched with programmatic dependent launch: the prologue and the first weight loads may overlap the end of the
 * kernel before it in the stream. Correct in any stream; pays in chains of matmuls. Portable kernels ignore it. */
#define SPMMD_CUDA_FLAG_CHAIN 1u
/* y += W * x instead of y = ...: fp32 y, no bias, no activation. SpMspV kernels only. */
#define SPMMD_CUDA_FLAG_ACCUMULATE 2u
/* The same result every time, bit for bit, where a kernel's default is not (SpMspV with ACCUMULATE). */
#define SPMMD_CUDA_FLAG_DETERMINISTIC 4u
/* Benchmarks only: bits 8..11 hold 1 + the number of a kernel's internal variant; 0 leaves the choice to the kernel. */
#define SPMMD_CUDA_FLAG_VARIANT_SHIFT 8

/* Y = activation(X * W^T + bias). All pointers are device memory. */
typedef struct {
  /* Dense activations [n, K], row stride in elements (>= K), any alignment of the element type; or null for ... */
  const void* x;
  int64_t n;
  int64_t x_stride;
  int32_t x_dtype;
  int32_t y_dtype;
  /* ... one sparse activation vector: ascending indices < K and fp32 values, n = 1. */
  const uint32_t* x_indices;
  const float* x_values;
  int64_t x_nnz;
  const float* bias; /* [M] fp32, or null */
  int32_t activation;
  uint32_t flags;
  void* y; /* [n, M], row stride in elements (>= M): every element of the n rows is written */
  int64_t y_stride;
  /* From spmmd_cuda_workspace_bytes; 256-byte aligned; prepared once with spmmd_cuda_workspace_init. */
  void* workspace;
  uint64_t workspace_bytes;
  /* Dense x with an SpMspV kernel: activations with |x| <= x_threshold count as zero. 0 elsewhere. */
  float x_threshold;
} spmmd_cuda_matmul;

/* Let dispatch choose. */
#define SPMMD_CUDA_KERNEL_AUTO (-1)

/* Kernels are numbered from 0; names are static strings ("spmm_tile", "dense_cublaslt", ...). */
SPMMD_CUDA_API int32_t spmmd_cuda_kernel_count(void);
SPMMD_CUDA_API const char* spmmd_cuda_kernel_name(int32_t kernel);
/* -1 when there is no such kernel. */
SPMMD_CUDA_API int32_t spmmd_cuda_find_kernel(const char* name);
/* The kernel AUTO takes for this layer and call; UNIMPLEMENTED when the format has none for it. Pointers in `call` are
 * not read: null is allowed for all of them, but x == NULL with x_nnz >= 0 and x_indices set asks for a sparse one. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_select_kernel(const spmmd_cuda_layer* layer, const spmmd_cuda_matmul* call,
                                                          int32_t* kernel);
/* INVALID_ARGUMENT / UNIMPLEMENTED naming the field and the limit when `kernel` cannot run this call. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_can_implement(const spmmd_cuda_layer* layer, int32_t kernel,
                                                          const spmmd_cuda_matmul* call);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_workspace_bytes(const spmmd_cuda_layer* layer, int32_t kernel,
                                                            const spmmd_cuda_matmul* call, uint64_t* bytes);
/* Zeroes what kernels expect zeroed (and leave zeroed). Once after allocation; again only after a failed launch. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_workspace_init(spmmd_cuda_device* device, void* workspace, uint64_t bytes,
                                                           spmmd_cuda_stream stream);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_launch(const spmmd_cuda_layer* layer, int32_t kernel,
                                                   const spmmd_cuda_matmul* call, spmmd_cuda_stream stream);
/* One launch for `count` (1..4) layers that read the same activations (q, k and v; gate and up): calls[i] belongs to
 * layers[i] and may differ from the others in y, y_stride, y_dtype, bias and activation; the workspace is calls[0]'s.
 * All layers need the kernel's format on one device with equal K and dtype, and for row_stream_spmv equal value code,
 * run bits and warps (INVALID_ARGUMENT otherwise: launch them one by one). UNIMPLEMENTED for kernels without groups. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_group_workspace_bytes(const spmmd_cuda_layer* const* layers, int32_t kernel,
                                                                  const spmmd_cuda_matmul* calls, int32_t count,
                                                                  uint64_t* bytes);
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_launch_group(const spmmd_cuda_layer* const* layers, int32_t kernel,
                                                         const spmmd_cuda_matmul* calls, int32_t count,
                                                         spmmd_cuda_stream stream);
/* Measures cublasLt's candidates for this call on a DENSE layer and keeps the fastest for later launches of the same
 * shape (without it the first candidate of cublasLt's heuristic runs). Synchronises; not for capture. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_dense_tune(const spmmd_cuda_layer* layer, const spmmd_cuda_matmul* call,
                                                       spmmd_cuda_stream stream);

/* Makes later launches of this call's shape use candidate `index` of cublasLt's heuristic; NOT_FOUND past the last one.
 * For benchmarks that time every candidate their own way. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_dense_use_candidate(const spmmd_cuda_layer* layer,
                                                                const spmmd_cuda_matmul* call, int32_t index);

/* ---- Element by element ------------------------------------------------------------------------------------------ */

enum { SPMMD_CUDA_OP_COPY = 0, SPMMD_CUDA_OP_ADD = 1, SPMMD_CUDA_OP_MUL = 2 };

/* y = activation(left op right), computed in fp32 and rounded to nearest even; COPY reads `left` alone. All pointers
 * are device memory of rows x cols elements with row strides in elements (>= cols). `y` may be an operand of its dtype.
 */
typedef struct {
  const void* left;
  const void* right; /* ADD and MUL */
  void* y;
  int64_t rows;
  int64_t cols;
  int64_t left_stride;
  int64_t right_stride;
  int64_t y_stride;
  int32_t left_dtype;
  int32_t right_dtype;
  int32_t y_dtype;
  int32_t op;
  int32_t activation;
  /* COPY: elements with |left| <= threshold become 0, a NaN stays; >= 0. */
  float threshold;
} spmmd_cuda_elementwise_call;
/* Asynchronous; needs no workspace; may be captured. */
SPMMD_CUDA_API spmmd_cuda_status spmmd_cuda_elementwise(spmmd_cuda_device* device,
                                                        const spmmd_cuda_elementwise_call* call,
                                                        spmmd_cuda_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SPMMD_KERNELS_CUDA_SPMMD_CUDA_H_ */
