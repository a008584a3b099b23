#include "server/app.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_pool.h"
#include "kernels/dispatch/cuda_library.h"
#include "server/device/cpu_device.h"
#include "server/device/cuda_device.h"
#include "server/device/host_memory.h"
#include "server/errors.h"
#include "server/log/log.h"
#include "server/metrics/nvml.h"
#include "server/rpc/credentials.h"
#include "server/rpc/endpoint.h"
#include "server/version.h"

namespace spmmd::server {
namespace {

// When the certificate that is served expires; read at every scrape, so that a rotation shows.
class TlsMetrics final : public prometheus::Collectable {
 public:
  explicit TlsMetrics(std::string cert_file) : cert_file_(std::move(cert_file)) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    const auto expiry = CertificateExpiry(cert_file_);
    if (!expiry.ok()) return {};  // absent, not zero
    prometheus::ClientMetric metric;
    metric.gauge.value = static_cast<double>(absl::ToUnixSeconds(*expiry));
    return {{"spmmd_tls_cert_expiry_timestamp_seconds",
             "When the server's certificate expires, in Unix time",
             prometheus::MetricType::Gauge,
             {metric}}};
  }

 private:
  const std::string cert_file_;
};

}  // namespace

App::App(Options options, std::function<void()> on_device_failure)
    : options_(std::move(options)), on_device_failure_(std::move(on_device_failure)) {}

absl::StatusOr<std::unique_ptr<App>> App::Start(const Options& options, std::function<void()> on_device_failure) {
  std::unique_ptr<App> app(new App(options, std::move(on_device_failure)));
  SPMMD_RETURN_IF_ERROR(app->Init());
  return app;
}

absl::Status App::Init() {
  SetDefaultThreads(options_.cpu_threads);
  metrics_ = std::make_shared<Metrics>();
  SPMMD_RETURN_IF_ERROR(StartDevices());
  metrics_->SetBuildInfo(Version(), Revision(), backend_);
  metrics_->SetShard(options_.shard_index, options_.shard_count);

  std::vector<Device*> devices;
  for (const auto& device : devices_) devices.push_back(device.get());
  LayerCatalog::Options catalog;
  catalog.model_repository = options_.model_repository;
  catalog.max_chunk_bytes = options_.max_chunk_bytes;
  catalog.upload_resume_timeout = options_.upload_resume_timeout;
  if (!options_.cache_dir.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options_.cache_dir, error);
    if (error)
      return absl::FailedPreconditionError(absl::StrCat("--cache-dir: ", options_.cache_dir, ": ", error.message()));
    catalog.cache_dir = options_.cache_dir;
  }
  catalog.cache_limit_bytes = options_.cache_limit_bytes;
  catalog.residency.evict = options_.evict_layers;
  catalog.residency.host_limit_bytes = options_.host_layer_bytes.value_or(UsableMemory() / 4);
  catalog.shard_index = options_.shard_index;
  catalog.shard_count = options_.shard_count;
  catalog_ = std::make_unique<LayerCatalog>(std::move(catalog), std::move(devices), metrics_.get());
  Engine::Options engine;
  engine.max_tokens = options_.max_tokens;
  engine.max_programs = options_.max_programs;
  engine.max_batch_tokens = options_.max_batch_tokens;
  engine_ = std::make_unique<Engine>(engine, catalog_.get(), metrics_.get());

  if (!options_.auth_token_file.empty()) {
    auto auth = AuthTokens::Open(options_.auth_token_file, options_.tls_reload_interval);
    if (!auth.ok()) {
      return {auth.status().code(), absl::StrCat("--auth-token-file: ", auth.status().message())};
    }
    auth_ = *std::move(auth);
    const bool plain_tcp = options_.tls_cert.empty() && !std::ranges::all_of(options_.listen, IsUnix);
    if (plain_tcp) LogWarning("tokens travel in the clear: --auth-token-file without --tls-cert");
  }
  blocking_ = std::make_unique<BlockingRunner>();
  rpc_.engine = engine_.get();
  rpc_.catalog = catalog_.get();
  rpc_.metrics = metrics_.get();
  rpc_.auth = auth_.get();
  rpc_.blocking = blocking_.get();
  StartSharedMemory();
  rpc_.limits.max_message_bytes = options_.max_message_bytes;
  rpc_.limits.max_uploads = options_.max_uploads;
  rpc_.limits.upload_idle_timeout = options_.upload_idle_timeout;
  rpc_.limits.max_stream_in_flight = options_.max_stream_in_flight;
  rpc_.version = Version();
  rpc_.revision = Revision();
  rpc_.backend = backend_;
  SPMMD_RETURN_IF_ERROR(StartMetricsEndpoint());
  oip_ = std::make_unique<OipService>(&rpc_);
  SPMMD_ASSIGN_OR_RETURN(rpc_server_,
                         RpcServer::Start(options_, &rpc_, {{"inference.GRPCInferenceService", oip_.get()}}));
  WatchDevices();
  return absl::OkStatus();
}

void App::StartSharedMemory() {
  RegionPool::Options regions;
  regions.enabled = options_.shared_memory;
  regions.max_regions = options_.max_regions;
  regions.max_bytes = options_.max_region_bytes;
  regions.prefix = options_.shared_memory_prefix;
  if (backend_ == "cuda") {
    regions.open_device_memory = [this](const std::string& handle, const std::string& uuid) {
      return OpenDeviceMemory(handle, uuid);
    };
  }
  regions_ = std::make_unique<RegionPool>(std::move(regions));
  connections_ = std::make_unique<Connections>(regions_.get());
  rpc_.regions = regions_.get();
  rpc_.connections = connections_.get();
  rpc_.limits.max_rings = options_.max_rings;
  rpc_.limits.ring_spin = options_.ring_spin;
  metrics_->SetSharedMemorySource([this] {
    const RegionPool::Usage usage = regions_->usage();
    return SharedMemorySample{usage.posix_regions, usage.posix_bytes, usage.cuda_regions, usage.cuda_bytes,
                              rpc_.rings.load()};
  });
}

absl::StatusOr<std::unique_ptr<DeviceMapping>> App::OpenDeviceMemory(const std::string& handle,
                                                                     const std::string& uuid) {
  std::vector<std::string> served;
  for (const auto& device : devices_) {
    pb::Device description;
    device->Describe(&description);
    // Of the backend "cuda" every device is one of these.
    if (description.uuid() == uuid) return static_cast<CudaDevice&>(*device).OpenMemory(handle);
    served.push_back(description.uuid());
  }
  const std::string list = absl::StrJoin(served, ", ");
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kNoSuchDevice,
                   absl::StrCat("device_uuid: the region is on \"", uuid, "\", this server has ", list),
                   {{"device_uuid", uuid}, {"served", list}});
}

DeviceOptions App::MakeDeviceOptions() const {
  DeviceOptions device;
  device.memory_fraction = options_.device_memory_fraction;
  device.dense_shadows = options_.dense_shadows;
  device.tune_kernels = options_.tune_kernels;
  device.tuning_dir = options_.cache_dir;
  device.queue.max_depth = options_.max_queue_depth;
  device.queue.max_bytes = options_.max_queue_bytes;
  device.queue.max_batch_tokens = options_.max_batch_tokens;
  device.queue.max_delay = options_.max_queue_delay;
  return device;
}

absl::Status App::StartDevices() {
  if (options_.backend != BackendChoice::kCpu) {
    const absl::Status status = StartGpus();
    if (!status.ok() && (options_.backend == BackendChoice::kCuda || !options_.cuda_devices.empty())) {
      return absl::FailedPreconditionError(absl::StrCat("--backend=cuda: ", status.message()));
    }
    if (status.ok()) {
      backend_ = "cuda";
      return absl::OkStatus();
    }
    LogInfo("no GPU: the CPU computes", {{"reason", std::string(status.message())}});
    devices_.clear();
  }
  backend_ = "cpu";
  DeviceOptions device = MakeDeviceOptions();
  device.memory_limit_bytes =
      static_cast<uint64_t>(static_cast<double>(UsableMemory()) * options_.device_memory_fraction);
  devices_.push_back(std::make_unique<CpuDevice>(device, metrics_.get()));
  return absl::OkStatus();
}

absl::Status App::StartGpus() {
  SPMMD_ASSIGN_OR_RETURN(const std::shared_ptr<const CudaLibrary> library, CudaLibrary::Load(options_.cuda_library));
  int32_t count = 0;
  SPMMD_RETURN_IF_ERROR(library->ToStatus(library->device_count(&count)));
  std::vector<int> chosen = options_.cuda_devices;
  if (chosen.empty()) {
    for (int index = 0; index < count; ++index) {
      spmmd_cuda_device_info info;
      SPMMD_RETURN_IF_ERROR(library->ToStatus(library->get_device_info(index, &info)));
      if (info.usable != 0) {
        chosen.push_back(index);
      } else {
        LogWarning("GPU not used: no kernels for its architecture",
                   {{"device", absl::StrCat("cuda:", index)}, {"name", std::string_view(info.name)}});
      }
    }
    if (chosen.empty()) return absl::NotFoundError("no usable GPU");
  }
  DeviceOptions device_options = MakeDeviceOptions();
  device_options.queue.look = options_.device_spin;
  for (const int index : chosen) {
    if (index >= count) {
      return absl::NotFoundError(absl::StrCat("--device=cuda:", index, ": the driver shows ", count, " GPUs"));
    }
    SPMMD_ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> device,
                           CudaDevice::Open(library, index, device_options, metrics_.get()));
    devices_.push_back(std::move(device));
  }
  return absl::OkStatus();
}

void App::WatchDevices() {
  for (const auto& device : devices_) {
    device->OnLost([this, id = device->id()] {
      LogError("device lost", {{"device", id}});
      device_failed_.store(true);
      rpc_server_->SetNotServing();
      if (on_device_failure_ != nullptr) on_device_failure_();
    });
  }
}

absl::Status App::StartMetricsEndpoint() {
  if (options_.metrics_listen.empty()) return absl::OkStatus();
  std::vector<std::shared_ptr<prometheus::Collectable>> collectables = {metrics_};
  if (!options_.tls_cert.empty()) collectables.push_back(std::make_shared<TlsMetrics>(options_.tls_cert));
  if (backend_ == "cuda") {
    std::vector<NvmlMetrics::Gpu> gpus;
    for (const auto& device : devices_) {
      pb::Device description;
      device->Describe(&description);
      gpus.push_back({device->id(), description.uuid()});
    }
    if (auto nvml = NvmlMetrics::Open(gpus); nvml.ok()) {
      collectables.push_back(*std::move(nvml));
    } else {
      LogInfo("no spmmd_gpu_* metrics", {{"reason", std::string(nvml.status().message())}});
    }
  }
  auto endpoint = HttpEndpoint::Start(options_.metrics_listen, std::move(collectables));
  if (!endpoint.ok()) {
    return absl::UnavailableError(absl::StrCat("--metrics-listen: ", ExplainBindFailure(options_.metrics_listen),
                                               "; give another address, or '' for no metrics endpoint"));
  }
  metrics_endpoint_ = *std::move(endpoint);
  metrics_address_ = WithPort(options_.metrics_listen, metrics_endpoint_->port());
  return absl::OkStatus();
}

absl::Status App::LoadAndServe() {
  const absl::Time started = absl::Now();
  int64_t loaded = 0;
  for (const auto& spec : options_.layers) {
    const auto named = [&](const absl::Status& status) {
      return absl::Status(status.code(), absl::StrCat("layer '", spec.name(), "': ", status.message()));
    };
    // Every shard gets the same list and takes its own part of it.
    if (!catalog_->CheckShard(spec.name()).ok()) continue;
    auto upload = catalog_->Begin(spec);
    if (!upload.ok()) return named(upload.status());
    auto layer = (*upload)->Finish();
    if (!layer.ok()) return named(layer.status());
    ++loaded;
    LogInfo("layer loaded", {{"layer", spec.name()},
                             {"format", pb::Format_Name(layer->format())},
                             {"bytes", layer->bytes()},
                             {"reason", layer->format_reason()}});
  }
  if (!options_.layers.empty()) {
    LogInfo("layers loaded", {{"count", loaded}, {"seconds", absl::ToDoubleSeconds(absl::Now() - started)}});
  }
  rpc_server_->SetServing();
  // A device may have been lost on the way.
  if (device_failed_.load()) rpc_server_->SetNotServing();
  return absl::OkStatus();
}

bool App::Drain() {
  rpc_server_->SetNotServing();
  LogInfo("draining", {{"delay_seconds", absl::ToDoubleSeconds(options_.drain_delay)},
                       {"timeout_seconds", absl::ToDoubleSeconds(options_.drain_timeout)}});
  absl::SleepFor(options_.drain_delay);
  const bool clean = rpc_server_->Drain(options_.drain_timeout);
  if (clean) {
    LogInfo("drained");
  } else {
    LogWarning("drain timeout: calls in flight were cancelled");
  }
  return clean;
}

App::~App() {
  // Against the order of dependence: nothing may call what is gone.
  for (const auto& device : devices_) device->OnLost(nullptr);
  metrics_endpoint_.reset();
  rpc_server_.reset();
  if (metrics_ != nullptr) metrics_->SetSharedMemorySource(nullptr);
  if (connections_ != nullptr) connections_->Shutdown();  // rings end, on threads of `blocking_`
  blocking_.reset();
  connections_.reset();
  if (engine_ != nullptr) engine_->Drain();  // a device's thread may still have the request of a call that is over
  engine_.reset();
  catalog_.reset();
  devices_.clear();
}

std::string App::ReadyLine() const {
  return absl::StrCat("spmmd ready grpc=", absl::StrJoin(rpc_server_->addresses(), ","), " metrics=", metrics_address_,
                      " backend=", backend_, " devices=", devices_.size());
}

}  // namespace spmmd::server
