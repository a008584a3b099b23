#include "server/device/cuda_device.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/bitmap_gpu.h"
#include "kernels/format/bitmap_gpu_layout.h"
#include "kernels/format/column_piece_layout.h"
#include "server/device/cuda_dispatch.h"
#include "server/device/cuda_runner.h"
#include "server/device/dense_shadows.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

class IpcMapping final : public DeviceMapping {
 public:
  IpcMapping(CudaContext* context, const Device* device, void* opened)
      : context_(*context), device_(device), opened_(opened) {}
  ~IpcMapping() override { context_.cuda().ipc_close(context_.device(), opened_); }

  // Finds out how much memory the handle stands for.
  absl::Status Measure() {
    return context_.Check(context_.cuda().address_range(context_.device(), opened_, &base_, &bytes_));
  }
  // The handle stands for the whole allocation, wherever in it the pointer was that it was made of.
  std::byte* data() const override { return static_cast<std::byte*>(base_); }
  uint64_t size() const override { return bytes_; }
  const Device* device() const override { return device_; }

 private:
  CudaContext& context_;
  const Device* const device_;
  void* const opened_;
  void* base_ = nullptr;
  uint64_t bytes_ = 0;
};

DeviceOptions WithLimit(DeviceOptions options, const spmmd_cuda_device_info& info) {
  if (options.memory_limit_bytes == 0) {
    options.memory_limit_bytes =
        static_cast<uint64_t>(static_cast<double>(info.total_memory) * options.memory_fraction);
  }
  // What other processes hold is not ours to give out.
  options.memory_limit_bytes = std::min<uint64_t>(options.memory_limit_bytes, info.free_memory);
  return options;
}

// As nvidia-smi writes it.
std::string UuidText(const uint8_t (&uuid)[16]) {
  const std::string hex = absl::BytesToHexString({reinterpret_cast<const char*>(uuid), sizeof(uuid)});
  return absl::StrCat("GPU-", hex.substr(0, 8), "-", hex.substr(8, 4), "-", hex.substr(12, 4), "-", hex.substr(16, 4),
                      "-", hex.substr(20));
}

// Bytes of a bias on the device: a whole number of the allocator's units.
uint64_t BiasBytes(size_t count) { return (count * sizeof(float) + 255) / 256 * 256; }

}  // namespace

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Open(std::shared_ptr<const CudaLibrary> library, int index,
                                                             const DeviceOptions& options, Metrics* metrics) {
  SPMMD_ASSIGN_OR_RETURN(std::unique_ptr<CudaContext> context, CudaContext::Open(library, index));
  std::unique_ptr<CudaDevice> device(new CudaDevice(std::move(context), options, metrics));
  SPMMD_RETURN_IF_ERROR(device->Init(library, options));
  return device;
}

CudaDevice::CudaDevice(std::unique_ptr<CudaContext> context, const DeviceOptions& options, Metrics* metrics)
    : Device(context->id(), "cuda", WithLimit(options, context->info()), context->info().total_memory, metrics),
      context_(std::move(context)) {
  const spmmd_cuda_device_info& info = context_->info();
  name_ = info.name;
  architecture_ = absl::StrCat(info.compute_major, ".", info.compute_minor);
  uuid_ = UuidText(info.uuid);
}

absl::Status CudaDevice::Init(const std::shared_ptr<const CudaLibrary>& library, const DeviceOptions& options) {
  dispatch_ = std::make_unique<CudaDispatch>(library, context_.get(), &budget(), options,
                                             [this](const std::function<void()>& work) { runner_->Exclusively(work); });
  DenseShadows::Options shadows;
  shadows.enabled = options.dense_shadows;
  shadows.quiet = options.shadow_quiet;
  shadows_ = std::make_unique<DenseShadows>(context_.get(), &budget(), shadows);
  SPMMD_ASSIGN_OR_RETURN(runner_,
                         CudaRunner::Create(context_.get(), &budget(), &dispatch_->table(), shadows_.get(), metrics()));
  if (options.measure_bandwidth) {
    SPMMD_ASSIGN_OR_RETURN(const double bandwidth, MeasureReadBandwidth());
    set_measured_bandwidth(bandwidth);
  }
  HostBufferPool::Options buffers;
  buffers.allocate = [context = context_](uint64_t bytes) -> std::byte* {
    void* data = nullptr;
    if (context->cuda().host_malloc(context->device(), bytes, &data) != SPMMD_CUDA_OK) return nullptr;
    return static_cast<std::byte*>(data);
  };
  // A response on its way may have one when the device is gone already.
  buffers.free = [context = context_](std::byte* data) { context->cuda().host_free(context->device(), data); };
  set_host_buffers(HostBufferPool::Create(std::move(buffers)));
  Start();
  started_ = true;
  monitor_ = std::thread([this] { Monitor(); });
  return absl::OkStatus();
}

CudaDevice::~CudaDevice() {
  context_->OnLost(nullptr);
  if (monitor_.joinable()) {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
      stop_.Signal();
    }
    monitor_.join();
  }
  if (started_) Shutdown();
  host_buffers().Close();
}

void CudaDevice::Monitor() {
  while (!context_->lost()) {
    {
      absl::MutexLock lock(&mutex_);
      if (!stopping_) stop_.WaitWithTimeout(&mutex_, kProbeInterval);
      if (stopping_) return;
    }
    // Marks the device lost; that other errors are passing, requests will see for themselves.
    context_->Probe().IgnoreError();
  }
}

absl::StatusOr<double> CudaDevice::MeasureReadBandwidth() {
  const CudaLibrary& cuda = context_->cuda();
  spmmd_cuda_device* const device = context_->device();
  constexpr int kRuns = 8;
  // Many times what the L2 cache holds.
  const uint64_t bytes = std::min<uint64_t>(uint64_t{1} << 30, budget().free() / 4) / 4096 * 4096;
  if (bytes < 8 * context_->info().l2_bytes || bytes == 0) return 0.0;
  SPMMD_ASSIGN_OR_RETURN(const CudaMemory memory,
                         CudaMemory::Allocate(context_.get(), &budget(), MemoryKind::kWorkspace, bytes));
  spmmd_cuda_stream stream = nullptr;
  spmmd_cuda_event events[2] = {};
  double best = 0;
  const auto measure = [&]() -> absl::Status {
    SPMMD_RETURN_IF_ERROR(context_->Check(cuda.stream_create(device, &stream)));
    for (spmmd_cuda_event& event : events) {
      SPMMD_RETURN_IF_ERROR(context_->Check(cuda.event_create(device, /*timing=*/1, &event)));
    }
    SPMMD_RETURN_IF_ERROR(context_->Check(cuda.memset_async(device, memory.data(), 1, bytes, stream)));
    for (int run = 0; run < kRuns; ++run) {
      SPMMD_RETURN_IF_ERROR(context_->Check(cuda.event_record(device, events[0], stream)));
      SPMMD_RETURN_IF_ERROR(context_->Check(cuda.read_probe(device, memory.data(), bytes, stream)));
      SPMMD_RETURN_IF_ERROR(context_->Check(cuda.event_record(device, events[1], stream)));
      SPMMD_RETURN_IF_ERROR(context_->Check(cuda.event_synchronize(device, events[1])));
      double microseconds = 0;
      SPMMD_RETURN_IF_ERROR(context_->Check(cuda.event_elapsed_us(device, events[0], events[1], &microseconds)));
      if (microseconds > 0) best = std::max(best, static_cast<double>(bytes) / microseconds * 1e6);
    }
    return absl::OkStatus();
  };
  const absl::Status status = measure();
  for (const spmmd_cuda_event event : events) {
    if (event != nullptr) cuda.event_destroy(device, event);
  }
  if (stream != nullptr) {
    cuda.stream_synchronize(device, stream);
    cuda.stream_destroy(device, stream);
  }
  SPMMD_RETURN_IF_ERROR(status);
  return best;
}

bool CudaDevice::CanExecute(Format format) const {
  return context_->cuda().format_supported(context_->device(), static_cast<int32_t>(format)) == SPMMD_CUDA_OK;
}

Format CudaDevice::Layout(Format format) const {
  switch (format) {
    case Format::kBitmap:
      return Format::kBitmapGpu;
    // Celty's format in the order that the faster of its kernels consumes.
    case Format::kRlcCsc:
      return Format::kColumnPiece;
    default:
      return format;
  }
}

FormatChoice CudaDevice::ChooseFormat(const FormatQuery& query) const {
  return dispatch_->Choose(query, measured_bandwidth(), [&](Format format) {
    return EstimateBytes(format, query.dtype, query.m, query.k, query.nnz);
  });
}

void CudaDevice::Tune(DType dtype, const ResidentLayer& layer) {
  dispatch_->Times(CudaShape::Of(dtype, layer.m(), layer.k(), layer.nnz()),
                   /*sparse=*/layer.format() == Format::kBitmapGpu, /*again=*/true);
}

uint64_t CudaDevice::EstimateBytes(Format format, DType dtype, int64_t m, int64_t k, int64_t max_nnz) const {
  const auto rows = static_cast<uint64_t>(m);
  const auto cols = static_cast<uint64_t>(k);
  const uint64_t value_bytes = static_cast<uint64_t>(max_nnz) * SizeOf(dtype);
  const auto padded = [](uint64_t bytes, double factor) {
    return static_cast<uint64_t>(static_cast<double>(bytes) * factor);
  };
  constexpr uint64_t kSlack = 4096;  // sections start at 256-byte boundaries
  switch (format) {
    case Format::kBitmapGpu: {
      const int chunk_cols = bitmap_gpu::DefaultChunkCols(m, k);
      const uint64_t chunks = (rows + bitmap_gpu::kChunkRows - 1) / bitmap_gpu::kChunkRows *
                              ((cols + static_cast<uint64_t>(chunk_cols) - 1) / static_cast<uint64_t>(chunk_cols));
      // Value rows are padded to the longest stream of a chunk: 7 % (256 columns) to 14 % (128) at 50 %, and a row
      // more.
      return chunks * static_cast<uint64_t>(bitmap_gpu::HeaderBytes(chunk_cols) + bitmap_gpu::kRowBytes + 4) +
             padded(value_bytes, 1.2) + kSlack;
    }
    case Format::kColumnPiece: {
      const uint64_t pieces = (rows + column_piece::kBlockRows - 1) / column_piece::kBlockRows * cols;
      return pieces * (column_piece::kBitmapBytes + column_piece::kUnitBytes + sizeof(column_piece::Descriptor)) +
             padded(value_bytes, 1.3) + kSlack;
    }
    case Format::kThreeLayer:
      // 2:4 slots and codes for every element, and what does not fit them.
      return padded(rows * cols, 1.25) + padded(value_bytes, 0.5) + kSlack;
    case Format::kRowStream:
    case Format::kRlcCsc:
      // Values, runs, and slots that bridge gaps or end a piece.
      return padded(value_bytes, 1.35) + rows * 64 + rows * cols / 16 + kSlack;
    default:
      return rows * ((cols + 7) / 8 * 8) * SizeOf(dtype) + kSlack;
  }
}

absl::StatusOr<std::unique_ptr<ResidentLayer>> CudaDevice::Load(PackedLayer packed, std::vector<float> bias,
                                                                MemoryBudget::Reservation weights) {
  if (!CanExecute(packed.format) || !CanStore(packed.dtype)) {
    return MakeError(absl::StatusCode::kUnimplemented, reason::kUnsupported,
                     absl::StrCat("backend cuda has no kernel for format ", std::string(Name(packed.format)),
                                  " with values of type ", std::string(Name(packed.dtype))));
  }
  if (context_->lost()) return context_->LostError();
  const CudaLibrary& cuda = context_->cuda();
  const CudaLayerDesc desc(packed);
  uint64_t layer_bytes = 0;
  SPMMD_RETURN_IF_ERROR(context_->Check(cuda.layer_device_bytes(&desc.desc, &layer_bytes)));
  const uint64_t bytes = layer_bytes + BiasBytes(bias.size());
  if (bytes > weights.bytes()) SPMMD_RETURN_IF_ERROR(budget().Grow(weights, bytes - weights.bytes()));
  weights.ShrinkTo(bytes);
  CudaMemory device_bias;
  if (!bias.empty()) {
    SPMMD_ASSIGN_OR_RETURN(device_bias,
                           CudaMemory::Allocate(context_.get(), nullptr, MemoryKind::kWeights, BiasBytes(bias.size())));
    // Pageable memory on the null stream: done once that is synchronised.
    SPMMD_RETURN_IF_ERROR(context_->Check(
        cuda.memcpy_async(context_->device(), device_bias.data(), bias.data(), bias.size() * sizeof(float), nullptr)));
    SPMMD_RETURN_IF_ERROR(context_->Check(cuda.stream_synchronize(context_->device(), nullptr)));
  }
  spmmd_cuda_layer* layer = nullptr;
  SPMMD_RETURN_IF_ERROR(context_->Check(cuda.layer_upload(context_->device(), &desc.desc, &layer)));
  PackedLayer shell;
  shell.format = packed.format;
  shell.layout_version = packed.layout_version;
  shell.dtype = packed.dtype;
  shell.m = packed.m;
  shell.k = packed.k;
  shell.nnz = packed.nnz;
  shell.params = packed.params;
  for (const Section& section : packed.sections) {
    Section& kept = shell.sections.emplace_back();
    kept.id = section.id;
    kept.section_class = section.section_class;
    kept.padding = section.padding;
    // The size, for reading back; no memory stands behind it.
    kept.data = Buffer::Borrow({static_cast<const std::byte*>(nullptr), section.data.size()}, nullptr);
  }
  return std::make_unique<CudaLayer>(std::move(shell), layer, std::move(device_bias), context_.get(), shadows_.get(),
                                     std::move(weights));
}

absl::StatusOr<StoredLayer> CudaDevice::Save(const ResidentLayer& layer) const {
  const auto& resident = static_cast<const CudaLayer&>(layer);
  const CudaLibrary& cuda = context_->cuda();
  StoredLayer stored;
  stored.packed = resident.shell();
  for (Section& section : stored.packed.sections) {
    const size_t bytes = section.data.size();
    SPMMD_ASSIGN_OR_RETURN(section.data, Buffer::Allocate(bytes));
    SPMMD_RETURN_IF_ERROR(
        context_->Check(cuda.layer_read(resident.handle(), section.id, section.data.mutable_data(), bytes)));
  }
  if (resident.bias() != nullptr) {
    stored.bias.resize(static_cast<size_t>(layer.m()));
    SPMMD_RETURN_IF_ERROR(context_->Check(cuda.memcpy_async(context_->device(), stored.bias.data(), resident.bias(),
                                                            stored.bias.size() * sizeof(float), nullptr)));
    SPMMD_RETURN_IF_ERROR(context_->Check(cuda.stream_synchronize(context_->device(), nullptr)));
  }
  return stored;
}

absl::StatusOr<DenseMatrix> CudaDevice::ReadBack(const ResidentLayer& layer) const {
  SPMMD_ASSIGN_OR_RETURN(const StoredLayer stored, Save(layer));
  return Unpack(stored.packed);
}

absl::StatusOr<std::unique_ptr<DeviceMapping>> CudaDevice::OpenMemory(const std::string& handle) {
  if (context_->lost()) return context_->LostError();
  const CudaLibrary& cuda = context_->cuda();
  uint8_t bytes[64];
  if (handle.size() != sizeof(bytes)) return FieldError("cuda_ipc", "is no handle");
  std::copy(handle.begin(), handle.end(), bytes);
  void* pointer = nullptr;
  if (const spmmd_cuda_status code = cuda.ipc_open(context_->device(), bytes, &pointer); code != SPMMD_CUDA_OK) {
    const std::string problem = cuda.last_error();
    SPMMD_RETURN_IF_ERROR(context_->Probe());
    return FieldError("cuda_ipc", absl::StrCat("cannot be opened on ", id(), ": ", problem));
  }
  auto mapping = std::make_unique<IpcMapping>(context_.get(), this, pointer);
  SPMMD_RETURN_IF_ERROR(mapping->Measure());
  return mapping;
}

absl::Status CudaDevice::Run(absl::Span<Job* const> jobs) { return runner_->Run(jobs); }

}  // namespace spmmd::server
