#include "server/metrics/metrics.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "prometheus/text_serializer.h"

namespace spmmd::server {

// What the bandwidth gauges are derived from.
struct DeviceTotals {
  std::atomic<int64_t> bytes{0};
  std::atomic<int64_t> nanoseconds{0};
};

struct Metrics::Device {
  DeviceTotals totals;
  std::function<DeviceSample()> sample;  // null: not there (yet, or any more)
  prometheus::Gauge* weights = nullptr;
  prometheus::Gauge* workspace = nullptr;
  prometheus::Gauge* staging = nullptr;
  prometheus::Gauge* shadow = nullptr;
  prometheus::Gauge* free = nullptr;
  prometheus::Gauge* total = nullptr;
  prometheus::Gauge* healthy = nullptr;
  prometheus::Gauge* queue_depth = nullptr;
  prometheus::Gauge* queue_bytes = nullptr;
  prometheus::Gauge* bandwidth = nullptr;
  prometheus::Gauge* bandwidth_ratio = nullptr;
  // Start of the bandwidth window.
  absl::Time window_start = absl::InfinitePast();
  int64_t window_bytes = 0;
  int64_t window_nanoseconds = 0;
};

namespace {

constexpr absl::string_view kOther = "_other";

prometheus::Histogram::BucketBoundaries LatencyBuckets() {
  return {10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3,
          25e-3, 50e-3, 0.1,   0.25,   0.5,    1,      2.5,  5,      10};
}

prometheus::Histogram::BucketBoundaries PackBuckets() {
  return {1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100};
}

prometheus::Histogram::BucketBoundaries TokenBuckets() {
  return {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536};
}

template <typename Builder>
auto& Make(Builder builder, const char* name, const char* help, prometheus::Registry& registry) {
  return builder.Name(name).Help(help).Register(registry);
}

std::string StateLabel(pb::LayerState state) {
  // LAYER_STATE_READY -> "ready"
  return absl::AsciiStrToLower(absl::StripPrefix(pb::LayerState_Name(state), "LAYER_STATE_"));
}

std::string CodeLabel(absl::StatusCode code) { return absl::StatusCodeToString(code); }

}  // namespace

RpcMetrics::RpcMetrics(Metrics* metrics, std::string rpc)
    : metrics_(metrics),
      rpc_(std::move(rpc)),
      running_(&metrics->running_.Add({{"rpc", rpc_}})),
      duration_(&metrics->request_duration_.Add({{"rpc", rpc_}}, LatencyBuckets())) {}

void RpcMetrics::Started() { running_->Increment(); }

void RpcMetrics::Finished(absl::StatusCode code, absl::Duration elapsed) {
  size_t index = static_cast<size_t>(code);
  if (index >= by_code_.size()) {
    code = absl::StatusCode::kUnknown;
    index = static_cast<size_t>(code);
  }
  prometheus::Counter* counter = by_code_[index].load(std::memory_order_acquire);
  if (counter == nullptr) {
    counter = &metrics_->requests_.Add({{"rpc", rpc_}, {"code", CodeLabel(code)}});
    by_code_[index].store(counter, std::memory_order_release);
  }
  counter->Increment();
  duration_->Observe(absl::ToDoubleSeconds(elapsed));
  running_->Decrement();
}

void KernelMetrics::Launched(absl::Duration duration, int64_t bytes, int64_t flops) {
  duration_->Observe(absl::ToDoubleSeconds(duration));
  bytes_->Increment(static_cast<double>(bytes));
  flops_->Increment(static_cast<double>(flops));
  totals_->bytes.fetch_add(bytes, std::memory_order_relaxed);
  totals_->nanoseconds.fetch_add(absl::ToInt64Nanoseconds(duration), std::memory_order_relaxed);
}

Metrics::Metrics(const Options& options)
    : registry_(std::make_shared<prometheus::Registry>()),
      build_info_(
          Make(prometheus::BuildGauge(), "spmmd_build_info", "Always 1; the labels say what runs.", *registry_)),
      requests_(
          Make(prometheus::BuildCounter(), "spmmd_requests_total", "RPCs answered, by canonical code.", *registry_)),
      running_(
          Make(prometheus::BuildGauge(), "spmmd_requests_running", "RPCs received and not yet answered.", *registry_)),
      request_duration_(Make(prometheus::BuildHistogram(), "spmmd_request_duration_seconds",
                             "From the arrival of an RPC to its answer.", *registry_)),
      queue_duration_(Make(prometheus::BuildHistogram(), "spmmd_request_queue_duration_seconds",
                           "Time that executed requests waited for their device.", *registry_)
                          .Add({}, LatencyBuckets())),
      batch_tokens_(Make(prometheus::BuildHistogram(), "spmmd_batch_tokens", "Tokens (N) of a device run.", *registry_)
                        .Add({}, TokenBuckets())),
      rejected_(Make(prometheus::BuildCounter(), "spmmd_rejected_total", "Requests refused or dropped before they ran.",
                     *registry_)),
      kernel_duration_(Make(prometheus::BuildHistogram(), "spmmd_kernel_duration_seconds", "Time of one kernel launch.",
                            *registry_)),
      kernel_bytes_(Make(prometheus::BuildCounter(), "spmmd_kernel_bytes_total",
                         "Bytes that kernels had to move through device memory.", *registry_)),
      kernel_flops_(Make(prometheus::BuildCounter(), "spmmd_kernel_flops_total",
                         "Floating-point operations on stored nonzeros.", *registry_)),
      bandwidth_(Make(prometheus::BuildGauge(), "spmmd_hbm_bandwidth_bytes_per_second",
                      "Device memory bandwidth reached while kernels ran, since the last scrape; 0 when none ran.",
                      *registry_)),
      bandwidth_ratio_(Make(prometheus::BuildGauge(), "spmmd_hbm_bandwidth_ratio",
                            "spmmd_hbm_bandwidth_bytes_per_second over the read bandwidth measured at start.",
                            *registry_)),
      device_memory_(Make(prometheus::BuildGauge(), "spmmd_device_memory_bytes",
                          "The server's accounting of device memory; total is the budget.", *registry_)),
      device_healthy_(
          Make(prometheus::BuildGauge(), "spmmd_device_healthy", "1, or 0 after a fatal device error.", *registry_)),
      queue_depth_(Make(prometheus::BuildGauge(), "spmmd_queue_depth", "Requests waiting for a device.", *registry_)),
      queue_bytes_(Make(prometheus::BuildGauge(), "spmmd_queue_bytes", "Bytes of the requests waiting for a device.",
                        *registry_)),
      layers_(Make(prometheus::BuildGauge(), "spmmd_layers", "Layers by state.", *registry_)),
      layer_bytes_(Make(prometheus::BuildGauge(), "spmmd_layer_bytes",
                        "Packed bytes of a layer, over its versions; layers beyond the label cap are summed in _other.",
                        *registry_)),
      layer_dense_bytes_(Make(prometheus::BuildGauge(), "spmmd_layer_dense_bytes",
                              "Bytes that the layers of a format would take as dense matrices of their own type.",
                              *registry_)),
      layer_evictions_(Make(prometheus::BuildCounter(), "spmmd_layer_evictions_total",
                            "Layers moved out of device memory, by where their bytes are kept.", *registry_)),
      eviction_duration_(Make(prometheus::BuildHistogram(), "spmmd_layer_eviction_duration_seconds",
                              "Time to move one layer out of device memory.", *registry_)),
      layer_loads_(
          Make(prometheus::BuildCounter(), "spmmd_layer_loads_total", "Layers made resident, by source.", *registry_)),
      reload_duration_(Make(prometheus::BuildHistogram(), "spmmd_layer_reload_duration_seconds",
                            "Time to bring one evicted layer back to its devices, waiting for memory included.",
                            *registry_)),
      pack_duration_(Make(prometheus::BuildHistogram(), "spmmd_pack_duration_seconds",
                          "Pruning and packing of one layer.", *registry_)),
      cache_events_(Make(prometheus::BuildCounter(), "spmmd_cache_events_total",
                         "What happened to files of the packed cache.", *registry_)),
      gauges_{
          &Make(prometheus::BuildGauge(), "spmmd_upload_bytes",
                "Host memory held by registrations in progress, and by what was received of broken ones.", *registry_)
               .Add({}),
          &Make(prometheus::BuildGauge(), "spmmd_host_layer_bytes", "Host memory held by evicted layers.", *registry_)
               .Add({}),
          &Make(prometheus::BuildGauge(), "spmmd_cache_bytes", "Bytes of the files in the packed cache.", *registry_)
               .Add({}),
          &Make(prometheus::BuildGauge(), "spmmd_requests_waiting_for_layers",
                "Requests that wait for an evicted layer to come back.", *registry_)
               .Add({})},
      shm_regions_(Make(prometheus::BuildGauge(), "spmmd_shm_regions", "Shared-memory regions that callers registered.",
                        *registry_)),
      shm_bytes_(Make(prometheus::BuildGauge(), "spmmd_shm_bytes", "Bytes of the shared-memory regions.", *registry_)),
      rings_(Make(prometheus::BuildGauge(), "spmmd_rings", "Rings that are open in callers' shared memory.", *registry_)
                 .Add({})),
      options_(options) {
  for (const pb::LayerState state : {pb::LAYER_STATE_UPLOADING, pb::LAYER_STATE_PACKING, pb::LAYER_STATE_READY,
                                     pb::LAYER_STATE_EVICTED, pb::LAYER_STATE_FAILED}) {
    layers_.Add({{"state", StateLabel(state)}});
  }
  for (const char* to : {"host", "cache"}) layer_evictions_.Add({{"to", to}});
}

Metrics::~Metrics() = default;

std::vector<prometheus::MetricFamily> Metrics::Collect() const {
  Refresh();
  return registry_->Collect();
}

std::string Metrics::Serialize() const { return prometheus::TextSerializer().Serialize(Collect()); }

void Metrics::SetBuildInfo(absl::string_view version, absl::string_view revision, absl::string_view backend) {
  build_info_
      .Add({{"version", std::string(version)}, {"revision", std::string(revision)}, {"backend", std::string(backend)}})
      .Set(1);
}

void Metrics::SetShard(int index, int count) {
  Make(prometheus::BuildGauge(), "spmmd_shard_count",
       "Number of shards that the layers are spread over; the label says which this server is.", *registry_)
      .Add({{"shard", absl::StrCat(index)}})
      .Set(count);
}

RpcMetrics& Metrics::Rpc(absl::string_view rpc) {
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<RpcMetrics>& entry = rpcs_[rpc];
  if (entry == nullptr) entry.reset(new RpcMetrics(this, std::string(rpc)));
  return *entry;
}

void Metrics::RequestQueued(absl::Duration waited) { queue_duration_.Observe(absl::ToDoubleSeconds(waited)); }

void Metrics::BatchLaunched(int64_t tokens) { batch_tokens_.Observe(static_cast<double>(tokens)); }

void Metrics::Rejected(absl::string_view reason) { rejected_.Add({{"reason", std::string(reason)}}).Increment(); }

Metrics::Device& Metrics::DeviceOf(absl::string_view device) {
  std::unique_ptr<Device>& entry = devices_[device];
  if (entry == nullptr) entry = std::make_unique<Device>();
  return *entry;
}

void Metrics::AddDevice(absl::string_view device, std::function<DeviceSample()> sample) {
  absl::MutexLock lock(&mutex_);
  Device& d = DeviceOf(device);
  const std::string id(device);
  d.sample = std::move(sample);
  const auto memory = [&](const char* kind) { return &device_memory_.Add({{"device", id}, {"kind", kind}}); };
  d.weights = memory("weights");
  d.workspace = memory("workspace");
  d.staging = memory("staging");
  d.shadow = memory("shadow");
  d.free = memory("free");
  d.total = memory("total");
  d.healthy = &device_healthy_.Add({{"device", id}});
  d.queue_depth = &queue_depth_.Add({{"device", id}});
  d.queue_bytes = &queue_bytes_.Add({{"device", id}});
  d.bandwidth = &bandwidth_.Add({{"device", id}});
  d.bandwidth_ratio = &bandwidth_ratio_.Add({{"device", id}});
}

void Metrics::RemoveDevice(absl::string_view device) {
  absl::MutexLock lock(&mutex_);
  Device& d = DeviceOf(device);
  if (d.sample == nullptr) return;
  d.sample = nullptr;
  for (prometheus::Gauge* gauge : {d.weights, d.workspace, d.staging, d.shadow, d.free, d.total}) {
    device_memory_.Remove(gauge);
  }
  device_healthy_.Remove(d.healthy);
  queue_depth_.Remove(d.queue_depth);
  queue_bytes_.Remove(d.queue_bytes);
  bandwidth_.Remove(d.bandwidth);
  bandwidth_ratio_.Remove(d.bandwidth_ratio);
}

KernelMetrics& Metrics::Kernel(absl::string_view device, absl::string_view kernel, absl::string_view format) {
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<KernelMetrics>& entry = kernels_[absl::StrCat(device, "/", kernel, "/", format)];
  if (entry == nullptr) {
    const std::string device_label(device);
    const std::string kernel_label(kernel);
    entry.reset(new KernelMetrics());
    entry->duration_ = &kernel_duration_.Add(
        {{"device", device_label}, {"kernel", kernel_label}, {"format", std::string(format)}}, LatencyBuckets());
    entry->bytes_ = &kernel_bytes_.Add({{"device", device_label}, {"kernel", kernel_label}});
    entry->flops_ = &kernel_flops_.Add({{"device", device_label}, {"kernel", kernel_label}});
    entry->totals_ = &DeviceOf(device).totals;
  }
  return *entry;
}

void Metrics::LayerStateChanged(pb::LayerState from, pb::LayerState to) {
  if (from == to) return;
  if (from != pb::LAYER_STATE_UNSPECIFIED) layers_.Add({{"state", StateLabel(from)}}).Decrement();
  if (to != pb::LAYER_STATE_UNSPECIFIED) layers_.Add({{"state", StateLabel(to)}}).Increment();
}

void Metrics::AddLayerBytes(absl::string_view layer, absl::string_view format, int64_t delta) {
  absl::MutexLock lock(&mutex_);
  const std::string format_label(format);
  // A layer name has no line break.
  LayerSeries& series = layer_series_[absl::StrCat(layer, "\n", format)];
  if (series.gauge == nullptr) {
    series.labelled = labelled_layers_ < options_.layer_label_cap;
    labelled_layers_ += series.labelled ? 1 : 0;
    series.gauge =
        &layer_bytes_.Add({{"layer", std::string(series.labelled ? layer : kOther)}, {"format", format_label}});
  }
  series.bytes += delta;
  series.gauge->Increment(static_cast<double>(delta));
  if (series.bytes != 0) return;
  if (series.labelled) {
    layer_bytes_.Remove(series.gauge);
    --labelled_layers_;
  }
  layer_series_.erase(absl::StrCat(layer, "\n", format));
}

void Metrics::AddLayerDenseBytes(absl::string_view format, int64_t delta) {
  layer_dense_bytes_.Add({{"format", std::string(format)}}).Increment(static_cast<double>(delta));
}

void Metrics::LayerEvicted(absl::string_view to, absl::Duration took) {
  layer_evictions_.Add({{"to", std::string(to)}}).Increment();
  eviction_duration_.Add({{"to", std::string(to)}}, PackBuckets()).Observe(absl::ToDoubleSeconds(took));
}

void Metrics::LayerLoaded(absl::string_view source) { layer_loads_.Add({{"source", std::string(source)}}).Increment(); }

void Metrics::LayerReloaded(absl::string_view source, absl::Duration took) {
  LayerLoaded(source);
  reload_duration_.Add({{"source", std::string(source)}}, PackBuckets()).Observe(absl::ToDoubleSeconds(took));
}

void Metrics::CacheEvent(absl::string_view event) { cache_events_.Add({{"event", std::string(event)}}).Increment(); }

void Metrics::LayerPacked(absl::string_view format, absl::Duration duration) {
  pack_duration_.Add({{"format", std::string(format)}}, PackBuckets()).Observe(absl::ToDoubleSeconds(duration));
}

void Metrics::SetSource(Gauge gauge, std::function<uint64_t()> source) {
  absl::MutexLock lock(&mutex_);
  sources_[static_cast<size_t>(gauge)] = std::move(source);
}

void Metrics::SetSharedMemorySource(std::function<SharedMemorySample()> source) {
  absl::MutexLock lock(&mutex_);
  shared_memory_source_ = std::move(source);
}

void Metrics::Refresh() const {
  absl::MutexLock lock(&mutex_);
  const absl::Time now = absl::Now();
  const SharedMemorySample shared = shared_memory_source_ == nullptr ? SharedMemorySample() : shared_memory_source_();
  shm_regions_.Add({{"kind", "posix"}}).Set(static_cast<double>(shared.posix_regions));
  shm_regions_.Add({{"kind", "cuda"}}).Set(static_cast<double>(shared.cuda_regions));
  shm_bytes_.Add({{"kind", "posix"}}).Set(static_cast<double>(shared.posix_bytes));
  shm_bytes_.Add({{"kind", "cuda"}}).Set(static_cast<double>(shared.cuda_bytes));
  rings_.Set(static_cast<double>(shared.rings));
  for (size_t i = 0; i < sources_.size(); ++i) {
    gauges_[i]->Set(sources_[i] == nullptr ? 0 : static_cast<double>(sources_[i]()));
  }
  for (const auto& [id, device] : devices_) {
    Device& d = *device;
    if (d.sample == nullptr) continue;
    const DeviceSample sample = d.sample();
    const uint64_t used = sample.weights_bytes + sample.workspace_bytes + sample.staging_bytes + sample.shadow_bytes;
    d.weights->Set(static_cast<double>(sample.weights_bytes));
    d.workspace->Set(static_cast<double>(sample.workspace_bytes));
    d.staging->Set(static_cast<double>(sample.staging_bytes));
    d.shadow->Set(static_cast<double>(sample.shadow_bytes));
    d.free->Set(static_cast<double>(sample.limit_bytes - std::min(used, sample.limit_bytes)));
    d.total->Set(static_cast<double>(sample.limit_bytes));
    d.healthy->Set(sample.healthy ? 1 : 0);
    d.queue_depth->Set(static_cast<double>(sample.queue_depth));
    d.queue_bytes->Set(static_cast<double>(sample.queue_bytes));
    if (now - d.window_start < options_.bandwidth_window) continue;
    const int64_t bytes = d.totals.bytes.load(std::memory_order_relaxed);
    const int64_t nanoseconds = d.totals.nanoseconds.load(std::memory_order_relaxed);
    const double seconds = 1e-9 * static_cast<double>(nanoseconds - d.window_nanoseconds);
    const double bandwidth = seconds > 0 ? static_cast<double>(bytes - d.window_bytes) / seconds : 0;
    d.bandwidth->Set(bandwidth);
    d.bandwidth_ratio->Set(sample.measured_bandwidth > 0 ? bandwidth / sample.measured_bandwidth : 0);
    d.window_start = now;
    d.window_bytes = bytes;
    d.window_nanoseconds = nanoseconds;
  }
}

}  // namespace spmmd::server
