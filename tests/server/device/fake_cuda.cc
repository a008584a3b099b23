// See fake_cuda.h. Every call is synchronous. Device memory is poisoned when it is allocated, so that reading what
// nobody wrote shows; a workspace whose counters were not zeroed is refused.
#include "tests/server/device/fake_cuda.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/activation.h"
#include "kernels/base/dtype.h"
#include "kernels/cuda/spmmd_cuda.h"
#include "kernels/format/packed_layer.h"

struct spmmd_cuda_device {
  int32_t index = 0;
};

struct spmmd_cuda_layer {
  spmmd_cuda_device* device = nullptr;
  spmmd::PackedLayer packed;
  std::vector<float> dense;
  uint64_t bytes = 0;
};

namespace {

constexpr int kMaxDevices = 8;
constexpr uint64_t kTotalMemory = uint64_t{1} << 30;
constexpr uint64_t kCounterBytes = 256 * 1024;
constexpr std::array<const char*, 5> kKernels = {"fake_dense", "fake_bitmap", "fake_row_stream", "fake_column_piece",
                                                 "fake_column_piece_indexed"};

std::array<std::atomic<bool>, kMaxDevices> broken;
std::array<std::atomic<uint64_t>, kMaxDevices> allocated;
std::atomic<int32_t> launches_to_fail;
std::atomic<int64_t> launches;
std::atomic<int64_t> last_tokens;
std::atomic<int64_t> groups;
std::mutex blocks_mutex;
std::map<void*, uint64_t> blocks;
thread_local std::string last_error;
std::atomic<bool> graphs_fail;
std::atomic<int64_t> replays;
std::atomic<int64_t> open_handles;
// The calls of a graph that is being recorded on this thread.
using Recording = std::vector<std::function<spmmd_cuda_status()>>;
thread_local Recording* recording = nullptr;

spmmd_cuda_status Fail(spmmd_cuda_status code, std::string message) {
  last_error = std::move(message);
  return code;
}

spmmd_cuda_status CheckDevice(const spmmd_cuda_device* device) {
  // For processes that only their environment can reach.
  static const char* const break_file = std::getenv("SPMMD_FAKE_CUDA_BREAK_FILE");
  if (broken[static_cast<size_t>(device->index)] || (break_file != nullptr && access(break_file, F_OK) == 0)) {
    return Fail(SPMMD_CUDA_INTERNAL, "an illegal memory access was encountered");
  }
  return SPMMD_CUDA_OK;
}

#define FAKE_CHECK(device)                                                                               \
  do {                                                                                                   \
    if (const spmmd_cuda_status checked = CheckDevice(device); checked != SPMMD_CUDA_OK) return checked; \
  } while (false)

spmmd_cuda_status Take(spmmd_cuda_device* device, uint64_t bytes) {
  std::atomic<uint64_t>& used = allocated[static_cast<size_t>(device->index)];
  if (used.fetch_add(bytes) + bytes > kTotalMemory) {
    used.fetch_sub(bytes);
    return Fail(SPMMD_CUDA_RESOURCE_EXHAUSTED, "out of memory");
  }
  return SPMMD_CUDA_OK;
}

float Load(const void* from, int32_t dtype, int64_t at) {
  if (dtype == 3) return static_cast<const float*>(from)[at];
  const uint16_t bits = static_cast<const uint16_t*>(from)[at];
  return dtype == 1 ? spmmd::F16ToFloat(bits) : spmmd::Bf16ToFloat(bits);
}

void Store(void* to, int32_t dtype, int64_t at, float value) {
  if (dtype == 3) {
    static_cast<float*>(to)[at] = value;
  } else {
    static_cast<uint16_t*>(to)[at] = dtype == 1 ? spmmd::FloatToF16(value) : spmmd::FloatToBf16(value);
  }
}

float Activate(int32_t activation, float v) {
  switch (activation) {
    case 1:
      return v < 0 ? 0.0f : v;
    case 2:
      return 0.5f * v * std::erfc(-v * 0.70710678f);
    case 3:
      return 0.5f * v * (1.0f + std::tanh(0.79788456f * (v + 0.044715f * v * v * v)));
    case 4:
      return v / (1.0f + std::exp(-v));
    default:
      return v;
  }
}

int32_t KernelOf(const spmmd_cuda_layer& layer, const spmmd_cuda_matmul& call) {
  switch (layer.packed.format) {
    case spmmd::Format::kDense:
      return 0;
    case spmmd::Format::kBitmapGpu:
      return 1;
    case spmmd::Format::kRowStream:
      return 2;
    default:
      return call.x_indices != nullptr ? 4 : 3;
  }
}

// As the real library has it.
bool IsPortable() {
  const char* const portable = std::getenv("SPMMD_CUDA_PORTABLE");
  return portable != nullptr && std::strcmp(portable, "1") == 0;
}

double Now() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

extern "C" {

void fake_cuda_break(int32_t device) { broken[static_cast<size_t>(device)] = true; }
void fake_cuda_repair(int32_t device) { broken[static_cast<size_t>(device)] = false; }
void fake_cuda_fail_launches(int32_t count) { launches_to_fail = count; }
uint64_t fake_cuda_allocated(int32_t device) { return allocated[static_cast<size_t>(device)]; }
void fake_cuda_fail_graphs(int32_t fail) { graphs_fail = fail != 0; }
int64_t fake_cuda_replays(void) { return replays; }
int64_t fake_cuda_launches(void) { return launches; }
int64_t fake_cuda_last_tokens(void) { return last_tokens; }
int64_t fake_cuda_groups(void) { return groups; }

int32_t spmmd_cuda_abi_version(void) { return SPMMD_CUDA_ABI_VERSION; }
uint64_t spmmd_cuda_cublaslt_version(void) { return 1; }
const char* spmmd_cuda_last_error(void) { return last_error.c_str(); }

spmmd_cuda_status spmmd_cuda_device_count(int32_t* count) {
  const char* text = std::getenv("SPMMD_FAKE_CUDA_DEVICES");
  *count = text == nullptr ? 1 : std::clamp(std::atoi(text), 0, kMaxDevices);
  return SPMMD_CUDA_OK;
}

spmmd_cuda_status spmmd_cuda_get_device_info(int32_t index, spmmd_cuda_device_info* info) {
  *info = {};
  std::strcpy(info->name, "Fake GPU");
  for (size_t i = 0; i < sizeof(info->uuid); ++i) info->uuid[i] = static_cast<uint8_t>(i);
  info->uuid[15] = static_cast<uint8_t>(index);
  info->compute_major = 9;
  info->usable = IsPortable() ? 2 : 1;
  info->total_memory = kTotalMemory;
  info->free_memory = kTotalMemory - allocated[static_cast<size_t>(index)];
  info->l2_bytes = 4096;
  return SPMMD_CUDA_OK;
}

spmmd_cuda_status spmmd_cuda_device_open(int32_t index, spmmd_cuda_device** device) {
  *device = new spmmd_cuda_device{index};
  return SPMMD_CUDA_OK;
}
void spmmd_cuda_device_close(spmmd_cuda_device* device) { delete device; }

spmmd_cuda_status spmmd_cuda_memory_info(spmmd_cuda_device* device, uint64_t* free_bytes, uint64_t* total_bytes) {
  FAKE_CHECK(device);
  if (free_bytes != nullptr) *free_bytes = kTotalMemory - allocated[static_cast<size_t>(device->index)];
  if (total_bytes != nullptr) *total_bytes = kTotalMemory;
  return SPMMD_CUDA_OK;
}

spmmd_cuda_status spmmd_cuda_malloc(spmmd_cuda_device* device, uint64_t bytes, void** pointer) {
  FAKE_CHECK(device);
  if (const spmmd_cuda_status status = Take(device, bytes); status != SPMMD_CUDA_OK) return status;
  *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*pointer, 0xcd, bytes);
  const std::lock_guard<std::mutex> lock(blocks_mutex);
  blocks[*pointer] = bytes;
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_free(spmmd_cuda_device* device, void* pointer) {
  {
    const std::lock_guard<std::mutex> lock(blocks_mutex);
    const auto block = blocks.find(pointer);
    if (block == blocks.end()) return Fail(SPMMD_CUDA_INVALID_ARGUMENT, "free: not allocated");
    allocated[static_cast<size_t>(device->index)] -= block->second;
    blocks.erase(block);
  }
  std::free(pointer);
  FAKE_CHECK(device);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_host_malloc(spmmd_cuda_device* device, uint64_t bytes, void** pointer) {
  FAKE_CHECK(device);
  *pointer = std::malloc(bytes);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_host_free(spmmd_cuda_device* /*device*/, void* pointer) {
  std::free(pointer);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_host_register(spmmd_cuda_device* device, void* /*pointer*/, uint64_t /*bytes*/) {
  FAKE_CHECK(device);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_host_unregister(spmmd_cuda_device* /*device*/, void* /*pointer*/) { return SPMMD_CUDA_OK; }
spmmd_cuda_status spmmd_cuda_memcpy_async(spmmd_cuda_device* device, void* to, const void* from, uint64_t bytes,
                                          spmmd_cuda_stream stream) {
  if (recording != nullptr) {
    recording->push_back([=] { return spmmd_cuda_memcpy_async(device, to, from, bytes, stream); });
    return SPMMD_CUDA_OK;
  }
  FAKE_CHECK(device);
  std::memcpy(to, from, bytes);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_copy_kernel(spmmd_cuda_device* device, void* to, const void* from, uint64_t bytes,
                                         spmmd_cuda_stream stream) {
  if (bytes % 16 != 0) return Fail(SPMMD_CUDA_INVALID_ARGUMENT, "bytes");
  return spmmd_cuda_memcpy_async(device, to, from, bytes, stream);
}
spmmd_cuda_status spmmd_cuda_memcpy_2d_async(spmmd_cuda_device* device, void* to, uint64_t to_pitch, const void* from,
                                             uint64_t from_pitch, uint64_t row_bytes, uint64_t rows,
                                             spmmd_cuda_stream /*stream*/) {
  FAKE_CHECK(device);
  for (uint64_t row = 0; row < rows; ++row) {
    std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, row_bytes);
  }
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_memset_async(spmmd_cuda_device* device, void* pointer, int32_t byte, uint64_t bytes,
                                          spmmd_cuda_stream /*stream*/) {
  FAKE_CHECK(device);
  std::memset(pointer, byte, bytes);
  return SPMMD_CUDA_OK;
}
// Within one process: a handle is the address of the block that the pointer lies in.
spmmd_cuda_status spmmd_cuda_address_range(spmmd_cuda_device* device, const void* pointer, void** base,
                                           uint64_t* bytes) {
  FAKE_CHECK(device);
  const std::lock_guard<std::mutex> lock(blocks_mutex);
  auto block = blocks.upper_bound(const_cast<void*>(pointer));
  if (block == blocks.begin()) return Fail(SPMMD_CUDA_INVALID_ARGUMENT, "not device memory");
  --block;
  const auto* const begin = static_cast<const char*>(block->first);
  if (static_cast<const char*>(pointer) >= begin + block->second) {
    return Fail(SPMMD_CUDA_INVALID_ARGUMENT, "not device memory");
  }
  *base = block->first;
  *bytes = block->second;
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_ipc_export(spmmd_cuda_device* device, void* pointer, uint8_t handle[64]) {
  void* base = nullptr;
  uint64_t bytes = 0;
  if (const spmmd_cuda_status status = spmmd_cuda_address_range(device, pointer, &base, &bytes);
      status != SPMMD_CUDA_OK) {
    return status;
  }
  std::memset(handle, 0, 64);
  std::memcpy(handle, &base, sizeof(base));
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_ipc_open(spmmd_cuda_device* device, const uint8_t handle[64], void** pointer) {
  FAKE_CHECK(device);
  void* base = nullptr;
  std::memcpy(&base, handle, sizeof(base));
  const std::lock_guard<std::mutex> lock(blocks_mutex);
  if (!blocks.contains(base)) return Fail(SPMMD_CUDA_INVALID_ARGUMENT, "invalid resource handle");
  *pointer = base;
  ++open_handles;
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_ipc_close(spmmd_cuda_device* /*device*/, void* /*pointer*/) {
  --open_handles;
  return SPMMD_CUDA_OK;
}
int64_t fake_cuda_open_handles(void) { return open_handles; }

spmmd_cuda_status spmmd_cuda_stream_create(spmmd_cuda_device* device, spmmd_cuda_stream* stream) {
  FAKE_CHECK(device);
  *stream = new char;
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_stream_destroy(spmmd_cuda_device* /*device*/, spmmd_cuda_stream stream) {
  delete static_cast<char*>(stream);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_stream_synchronize(spmmd_cuda_device* device, spmmd_cuda_stream /*stream*/) {
  FAKE_CHECK(device);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_stream_wait_event(spmmd_cuda_device* device, spmmd_cuda_stream /*stream*/,
                                               spmmd_cuda_event /*event*/) {
  FAKE_CHECK(device);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_event_create(spmmd_cuda_device* device, int32_t /*timing*/, spmmd_cuda_event* event) {
  FAKE_CHECK(device);
  *event = new double(0);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_event_destroy(spmmd_cuda_device* /*device*/, spmmd_cuda_event event) {
  delete static_cast<double*>(event);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_event_record(spmmd_cuda_device* device, spmmd_cuda_event event, spmmd_cuda_stream stream) {
  if (recording != nullptr) {
    recording->push_back([=] { return spmmd_cuda_event_record(device, event, stream); });
    return SPMMD_CUDA_OK;
  }
  FAKE_CHECK(device);
  *static_cast<double*>(event) = Now();
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_event_synchronize(spmmd_cuda_device* device, spmmd_cuda_event /*event*/) {
  FAKE_CHECK(device);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_event_query(spmmd_cuda_device* device, spmmd_cuda_event /*event*/, int32_t* done) {
  FAKE_CHECK(device);
  *done = 1;
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_event_elapsed_us(spmmd_cuda_device* device, spmmd_cuda_event start, spmmd_cuda_event end,
                                              double* microseconds) {
  FAKE_CHECK(device);
  *microseconds = *static_cast<double*>(end) - *static_cast<double*>(start);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_graph_begin(spmmd_cuda_device* device, spmmd_cuda_stream /*stream*/) {
  FAKE_CHECK(device);
  if (graphs_fail) return Fail(SPMMD_CUDA_INTERNAL, "graphs fail");
  recording = new Recording;
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_graph_end(spmmd_cuda_device* device, spmmd_cuda_stream /*stream*/,
                                       spmmd_cuda_graph* graph) {
  *graph = std::exchange(recording, nullptr);
  FAKE_CHECK(device);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_graph_launch(spmmd_cuda_device* device, spmmd_cuda_graph graph,
                                          spmmd_cuda_stream /*stream*/) {
  FAKE_CHECK(device);
  ++replays;
  for (const auto& call : *static_cast<Recording*>(graph)) {
    if (const spmmd_cuda_status status = call(); status != SPMMD_CUDA_OK) return status;
  }
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_graph_destroy(spmmd_cuda_device* /*device*/, spmmd_cuda_graph graph) {
  delete static_cast<Recording*>(graph);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_read_probe(spmmd_cuda_device* device, const void* /*pointer*/, uint64_t /*bytes*/,
                                        spmmd_cuda_stream /*stream*/) {
  FAKE_CHECK(device);
  return SPMMD_CUDA_OK;
}

spmmd_cuda_status spmmd_cuda_format_supported(const spmmd_cuda_device* /*device*/, int32_t format) {
  if (!IsPortable() || format != static_cast<int32_t>(spmmd::Format::kThreeLayer)) return SPMMD_CUDA_OK;
  return Fail(SPMMD_CUDA_UNIMPLEMENTED, "format: not on this device");
}
spmmd_cuda_status spmmd_cuda_layer_device_bytes(const spmmd_cuda_layer_desc* desc, uint64_t* bytes) {
  *bytes = 256;
  for (uint32_t i = 0; i < desc->num_sections; ++i) *bytes += (desc->sections[i].size + 255) / 256 * 256;
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_layer_upload(spmmd_cuda_device* device, const spmmd_cuda_layer_desc* desc,
                                          spmmd_cuda_layer** layer) {
  FAKE_CHECK(device);
  auto made = std::make_unique<spmmd_cuda_layer>();
  made->device = device;
  spmmd::PackedLayer& packed = made->packed;
  packed.format = static_cast<spmmd::Format>(desc->format);
  packed.layout_version = desc->layout_version;
  packed.dtype = static_cast<spmmd::DType>(desc->dtype);
  packed.m = desc->m;
  packed.k = desc->k;
  packed.nnz = desc->nnz;
  std::copy(std::begin(desc->params), std::end(desc->params), packed.params.begin());
  for (uint32_t i = 0; i < desc->num_sections; ++i) {
    spmmd::Section section;
    section.id = desc->sections[i].id;
    section.data = *spmmd::Buffer::Allocate(desc->sections[i].size);
    if (desc->sections[i].size > 0) {
      std::memcpy(section.data.mutable_data(), desc->sections[i].data, desc->sections[i].size);
    }
    packed.sections.push_back(std::move(section));
  }
  const auto dense = spmmd::Unpack(packed);
  if (!dense.ok()) return Fail(SPMMD_CUDA_DATA_LOSS, std::string(dense.status().message()));
  for (int64_t i = 0; i < packed.m * packed.k; ++i) {
    made->dense.push_back(Load(dense->view().data, desc->dtype, i));
  }
  spmmd_cuda_layer_device_bytes(desc, &made->bytes);
  if (const spmmd_cuda_status status = Take(device, made->bytes); status != SPMMD_CUDA_OK) return status;
  *layer = made.release();
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_layer_clone(const spmmd_cuda_layer* /*layer*/, spmmd_cuda_layer** /*copy*/) {
  return Fail(SPMMD_CUDA_UNIMPLEMENTED, "clone");
}
spmmd_cuda_status spmmd_cuda_layer_read(const spmmd_cuda_layer* layer, uint32_t section, void* to, uint64_t bytes) {
  FAKE_CHECK(layer->device);
  const spmmd::Section* found = layer->packed.FindSection(section);
  if (found == nullptr) return Fail(SPMMD_CUDA_NOT_FOUND, "no such section");
  if (found->data.size() != bytes) return Fail(SPMMD_CUDA_INVALID_ARGUMENT, "bytes: not the section's size");
  if (bytes > 0) std::memcpy(to, found->data.data(), bytes);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_layer_unpacked_bytes(const spmmd_cuda_layer* layer, uint64_t* bytes) {
  *bytes = static_cast<uint64_t>(layer->packed.m * layer->packed.k) * 2 + 256;
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_layer_unpack(const spmmd_cuda_layer* layer, spmmd_cuda_stream /*stream*/,
                                          spmmd_cuda_layer** dense) {
  FAKE_CHECK(layer->device);
  if (layer->packed.format != spmmd::Format::kBitmapGpu) return Fail(SPMMD_CUDA_UNIMPLEMENTED, "format");
  auto made = std::make_unique<spmmd_cuda_layer>();
  made->device = layer->device;
  made->packed.format = spmmd::Format::kDense;
  made->packed.dtype = layer->packed.dtype;
  made->packed.m = layer->packed.m;
  made->packed.k = layer->packed.k;
  made->packed.nnz = layer->packed.nnz;
  made->dense = layer->dense;
  spmmd_cuda_layer_unpacked_bytes(layer, &made->bytes);
  if (const spmmd_cuda_status status = Take(made->device, made->bytes); status != SPMMD_CUDA_OK) return status;
  *dense = made.release();
  return SPMMD_CUDA_OK;
}
void spmmd_cuda_layer_free(spmmd_cuda_layer* layer) {
  if (layer == nullptr) return;
  allocated[static_cast<size_t>(layer->device->index)] -= layer->bytes;
  delete layer;
}

spmmd_cuda_status spmmd_cuda_pack_bitmap_gpu(spmmd_cuda_device* device, const spmmd_cuda_dense_weights* weights,
                                             spmmd_cuda_stream /*stream*/, spmmd_cuda_packed_info* /*info*/,
                                             spmmd_cuda_layer** layer) {
  FAKE_CHECK(device);
  const spmmd::DenseView view = {static_cast<const std::byte*>(weights->data),
                                 static_cast<spmmd::DType>(weights->dtype), weights->m, weights->k,
                                 weights->row_stride};
  const auto packed = spmmd::Pack(spmmd::Format::kBitmapGpu, view);
  if (!packed.ok()) return Fail(SPMMD_CUDA_INVALID_ARGUMENT, std::string(packed.status().message()));
  auto made = std::make_unique<spmmd_cuda_layer>();
  made->device = device;
  made->packed = *packed;
  for (int64_t r = 0; r < view.rows; ++r) {
    for (int64_t c = 0; c < view.cols; ++c) made->dense.push_back(Load(view.row(r), weights->dtype, c));
  }
  made->bytes = packed->bytes().total();
  if (const spmmd_cuda_status status = Take(device, made->bytes); status != SPMMD_CUDA_OK) return status;
  *layer = made.release();
  return SPMMD_CUDA_OK;
}

int32_t spmmd_cuda_kernel_count(void) { return static_cast<int32_t>(kKernels.size()); }
const char* spmmd_cuda_kernel_name(int32_t kernel) { return kKernels[static_cast<size_t>(kernel)]; }
int32_t spmmd_cuda_find_kernel(const char* name) {
  const auto* found = std::find_if(kKernels.begin(), kKernels.end(),
                                   [name](const char* kernel) { return std::strcmp(kernel, name) == 0; });
  return found == kKernels.end() ? -1 : static_cast<int32_t>(found - kKernels.begin());
}
spmmd_cuda_status spmmd_cuda_select_kernel(const spmmd_cuda_layer* layer, const spmmd_cuda_matmul* call,
                                           int32_t* kernel) {
  *kernel = KernelOf(*layer, *call);
  if (*kernel < 3 && (call->x_threshold != 0 || call->x_indices != nullptr)) {
    return Fail(SPMMD_CUDA_UNIMPLEMENTED, "no kernel of this format takes sparse activations");
  }
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_can_implement(const spmmd_cuda_layer* layer, int32_t kernel,
                                           const spmmd_cuda_matmul* call) {
  return kernel == KernelOf(*layer, *call) ? SPMMD_CUDA_OK : Fail(SPMMD_CUDA_UNIMPLEMENTED, "kernel");
}
spmmd_cuda_status spmmd_cuda_workspace_bytes(const spmmd_cuda_layer* layer, int32_t /*kernel*/,
                                             const spmmd_cuda_matmul* call, uint64_t* bytes) {
  *bytes = kCounterBytes + static_cast<uint64_t>(call->n * layer->packed.k);
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_workspace_init(spmmd_cuda_device* device, void* workspace, uint64_t bytes,
                                            spmmd_cuda_stream /*stream*/) {
  FAKE_CHECK(device);
  std::memset(workspace, 0, std::min(bytes, kCounterBytes));
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_launch(const spmmd_cuda_layer* layer, int32_t kernel, const spmmd_cuda_matmul* call,
                                    spmmd_cuda_stream stream) {
  if (recording != nullptr) {
    recording->push_back([=, copy = *call] { return spmmd_cuda_launch(layer, kernel, &copy, stream); });
    return SPMMD_CUDA_OK;
  }
  FAKE_CHECK(layer->device);
  const auto* counters = static_cast<const uint8_t*>(call->workspace);
  if (launches_to_fail > 0) {
    --launches_to_fail;
    std::memset(call->workspace, 1, kCounterBytes);  // given up half way
    return Fail(SPMMD_CUDA_INTERNAL, "the launch failed");
  }
  if (std::any_of(counters, counters + kCounterBytes, [](uint8_t byte) { return byte != 0; })) {
    return Fail(SPMMD_CUDA_INVALID_ARGUMENT, "workspace: its counters are not zero");
  }
  ++launches;
  last_tokens = call->n;
  const int64_t k = layer->packed.k;
  std::vector<float> x(static_cast<size_t>(k));
  for (int64_t n = 0; n < call->n; ++n) {
    std::fill(x.begin(), x.end(), 0.0f);
    if (call->x_indices != nullptr) {
      for (int64_t i = 0; i < call->x_nnz; ++i) x[call->x_indices[i]] = call->x_values[i];
    } else {
      for (int64_t i = 0; i < k; ++i) {
        const float value = Load(call->x, call->x_dtype, n * call->x_stride + i);
        x[static_cast<size_t>(i)] = std::abs(value) <= call->x_threshold ? 0.0f : value;
      }
    }
    for (int64_t m = 0; m < layer->packed.m; ++m) {
      float sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += layer->dense[static_cast<size_t>(m * k + i)] * x[static_cast<size_t>(i)];
      if (call->bias != nullptr) sum += call->bias[m];
      Store(call->y, call->y_dtype, n * call->y_stride + m, Activate(call->activation, sum));
    }
  }
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_group_workspace_bytes(const spmmd_cuda_layer* const* layers, int32_t kernel,
                                                   const spmmd_cuda_matmul* calls, int32_t count, uint64_t* bytes) {
  if (kernel != 1 && kernel != 2) return Fail(SPMMD_CUDA_UNIMPLEMENTED, "this kernel has no groups");
  if (count < 1 || count > 4) return Fail(SPMMD_CUDA_INVALID_ARGUMENT, "count");
  for (int32_t i = 1; i < count; ++i) {
    if (layers[i]->packed.k != layers[0]->packed.k || layers[i]->packed.dtype != layers[0]->packed.dtype ||
        layers[i]->packed.format != layers[0]->packed.format) {
      return Fail(SPMMD_CUDA_INVALID_ARGUMENT, "layers: they do not go together");
    }
  }
  return spmmd_cuda_workspace_bytes(layers[0], kernel, calls, bytes);
}
spmmd_cuda_status spmmd_cuda_launch_group(const spmmd_cuda_layer* const* layers, int32_t kernel,
                                          const spmmd_cuda_matmul* calls, int32_t count, spmmd_cuda_stream stream) {
  uint64_t bytes = 0;
  if (const spmmd_cuda_status status = spmmd_cuda_group_workspace_bytes(layers, kernel, calls, count, &bytes);
      status != SPMMD_CUDA_OK) {
    return status;
  }
  if (recording == nullptr) ++groups;
  for (int32_t i = 0; i < count; ++i) {
    if (calls[i].x != calls[0].x) return Fail(SPMMD_CUDA_INVALID_ARGUMENT, "x: differs within the group");
    if (const spmmd_cuda_status status = spmmd_cuda_launch(layers[i], kernel, &calls[i], stream);
        status != SPMMD_CUDA_OK) {
      return status;
    }
  }
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_dense_tune(const spmmd_cuda_layer* /*layer*/, const spmmd_cuda_matmul* /*call*/,
                                        spmmd_cuda_stream /*stream*/) {
  return SPMMD_CUDA_OK;
}
spmmd_cuda_status spmmd_cuda_dense_use_candidate(const spmmd_cuda_layer* /*layer*/, const spmmd_cuda_matmul* /*call*/,
                                                 int32_t index) {
  return index < 2 ? SPMMD_CUDA_OK : Fail(SPMMD_CUDA_NOT_FOUND, "candidates");
}

spmmd_cuda_status spmmd_cuda_elementwise(spmmd_cuda_device* device, const spmmd_cuda_elementwise_call* call,
                                         spmmd_cuda_stream stream) {
  if (recording != nullptr) {
    recording->push_back([=, copy = *call] { return spmmd_cuda_elementwise(device, &copy, stream); });
    return SPMMD_CUDA_OK;
  }
  FAKE_CHECK(device);
  for (int64_t row = 0; row < call->rows; ++row) {
    for (int64_t col = 0; col < call->cols; ++col) {
      float v = Load(call->left, call->left_dtype, row * call->left_stride + col);
      if (call->op == SPMMD_CUDA_OP_COPY) {
        if (std::abs(v) <= call->threshold) v = 0;
      } else {
        const float right = Load(call->right, call->right_dtype, row * call->right_stride + col);
        v = call->op == SPMMD_CUDA_OP_ADD ? v + right : v * right;
      }
      Store(call->y, call->y_dtype, row * call->y_stride + col, Activate(call->activation, v));
    }
  }
  return SPMMD_CUDA_OK;
}

}  // extern "C"
