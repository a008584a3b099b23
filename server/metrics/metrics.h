// Every metric of the server, in one place: names, labels, units and who may write them.
//
// Rules: durations in seconds, sizes in bytes, `_total` only on counters, histogram buckets from 10 us up. Label sets
// are bounded: rpc names and codes are fixed lists, kernels and formats come from code, layer names are capped
// (LayerBytes) and everything else takes the label "_other". Gauges that mirror state (queues, memory, bandwidth) are
// read from the owner at scrape time and therefore cannot drift from it.
#ifndef SPMMD_SERVER_METRICS_METRICS_H_
#define SPMMD_SERVER_METRICS_METRICS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "prometheus/collectable.h"
#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/metric_family.h"
#include "prometheus/registry.h"
#include "server/pb.h"
#include "spmm/v1/layer_catalog.pb.h"

namespace spmmd::server {

// What a device reports when it is scraped.
struct DeviceSample {
  uint64_t weights_bytes = 0;
  uint64_t workspace_bytes = 0;
  uint64_t staging_bytes = 0;
  uint64_t shadow_bytes = 0;  // dense copies of layers
  uint64_t limit_bytes = 0;   // the budget
  int64_t queue_depth = 0;
  uint64_t queue_bytes = 0;
  double measured_bandwidth = 0;  // bytes per second, from start-up
  bool healthy = true;
};

// What callers share with the server.
struct SharedMemorySample {
  int64_t posix_regions = 0;
  uint64_t posix_bytes = 0;
  int64_t cuda_regions = 0;
  uint64_t cuda_bytes = 0;
  int64_t rings = 0;
};

class Metrics;

// One RPC method. Obtained once by Metrics::Rpc() and kept by its handler; all calls are wait-free but for the first
// use of a code.
class RpcMetrics {
 public:
  // A call arrived; every Started() is followed by one Finished().
  void Started();
  // `elapsed` from arrival to the answer handed to gRPC.
  void Finished(absl::StatusCode code, absl::Duration elapsed);

 private:
  friend class Metrics;
  RpcMetrics(Metrics* metrics, std::string rpc);

  Metrics* metrics_;
  std::string rpc_;
  prometheus::Gauge* running_;
  prometheus::Histogram* duration_;
  std::array<std::atomic<prometheus::Counter*>, 17> by_code_{};
};

// One (device, kernel, format), kept by the device that launches it.
class KernelMetrics {
 public:
  // One launch: its duration, the bytes it must move through device memory, its floating-point operations.
  void Launched(absl::Duration duration, int64_t bytes, int64_t flops);

 private:
  friend class Metrics;
  KernelMetrics() = default;

  prometheus::Histogram* duration_ = nullptr;
  prometheus::Counter* bytes_ = nullptr;
  prometheus::Counter* flops_ = nullptr;
  // Totals of the whole device, from which the bandwidth gauges are derived.
  struct DeviceTotals* totals_ = nullptr;
};

class Metrics final : public prometheus::Collectable {
 public:
  struct Options {
    // How many (layer, format) pairs get series of their own in spmmd_layer_bytes; the rest are summed under "_other".
    int layer_label_cap = 1000;
    // The bandwidth gauges average over at least this long, so that two scrapers do not empty each other's window.
    absl::Duration bandwidth_window = absl::Seconds(1);
  };

  Metrics() : Metrics(Options()) {}
  explicit Metrics(const Options& options);
  ~Metrics() override;
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // For HttpEndpoint::Start (by a shared_ptr to this object): refreshes derived gauges, then
  // collects.
  std::vector<prometheus::MetricFamily> Collect() const override;
  // The whole scrape as text exposition format.
  std::string Serialize() const;
  // For metrics that only one module knows (NVML).
  prometheus::Registry& registry() { return *registry_; }

  // spmmd_build_info = 1.
  void SetBuildInfo(absl::string_view version, absl::string_view revision, absl::string_view backend);

  // spmmd_shard_count.
  void SetShard(int index, int count);

  // Requests. `rpc` is the method's full name without the leading slash, for instance "spmm.v1.SparseMatmul/Execute"; a
  // request on a stream counts under "spmm.v1.SparseMatmul/ExecuteStream". Stable address.
  RpcMetrics& Rpc(absl::string_view rpc);
  void RequestQueued(absl::Duration waited);
  void BatchLaunched(int64_t tokens);
  // `reason` is one of errors.h's reason constants.
  void Rejected(absl::string_view reason);

  // Devices. `sample` is called at every scrape, from any thread, until RemoveDevice returns; it must not call Metrics.
  void AddDevice(absl::string_view device, std::function<DeviceSample()> sample);
  void RemoveDevice(absl::string_view device);
  // Stable address. `kernel` and `format` are names from code, so their number is bounded.
  KernelMetrics& Kernel(absl::string_view device, absl::string_view kernel, absl::string_view format);

  // Layers.
  void LayerStateChanged(pb::LayerState from, pb::LayerState to);  // LAYER_STATE_UNSPECIFIED: came to be, or is gone
  // Adds to the bytes of a layer name, over its versions. A series that comes to zero is removed.
  void AddLayerBytes(absl::string_view layer, absl::string_view format, int64_t delta);
  // The same layers as dense matrices of their own type, by format: what spmmd_layer_bytes is to be compared with.
  void AddLayerDenseBytes(absl::string_view format, int64_t delta);
  void LayerEvicted(absl::string_view to, absl::Duration took);  // "host", "cache"
  void LayerLoaded(absl::string_view source);                    // "upload", "file", "cache", "host"
  // LayerLoaded, of a layer that had been evicted.
  void LayerReloaded(absl::string_view source, absl::Duration took);
  void LayerPacked(absl::string_view format, absl::Duration duration);
  void CacheEvent(absl::string_view event);  // "hit", "miss", "store", "evict", "corrupt"

  // Gauges of the catalog and the engine.
  enum class Gauge : uint8_t { kUploadBytes, kHostLayerBytes, kCacheBytes, kWaitingForLayers };
  // Where a gauge is read at every scrape; it must not call Metrics. Null: nowhere any more.
  void SetSource(Gauge gauge, std::function<uint64_t()> source);
  // The same for regions and rings.
  void SetSharedMemorySource(std::function<SharedMemorySample()> source);

 private:
  friend class RpcMetrics;
  struct Device;
  struct LayerSeries {
    prometheus::Gauge* gauge = nullptr;  // its own, or that of "_other"
    bool labelled = false;
    int64_t bytes = 0;
  };

  void Refresh() const ABSL_LOCKS_EXCLUDED(mutex_);
  Device& DeviceOf(absl::string_view device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Family<prometheus::Gauge>& build_info_;
  prometheus::Family<prometheus::Counter>& requests_;
  prometheus::Family<prometheus::Gauge>& running_;
  prometheus::Family<prometheus::Histogram>& request_duration_;
  prometheus::Histogram& queue_duration_;
  prometheus::Histogram& batch_tokens_;
  prometheus::Family<prometheus::Counter>& rejected_;
  prometheus::Family<prometheus::Histogram>& kernel_duration_;
  prometheus::Family<prometheus::Counter>& kernel_bytes_;
  prometheus::Family<prometheus::Counter>& kernel_flops_;
  prometheus::Family<prometheus::Gauge>& bandwidth_;
  prometheus::Family<prometheus::Gauge>& bandwidth_ratio_;
  prometheus::Family<prometheus::Gauge>& device_memory_;
  prometheus::Family<prometheus::Gauge>& device_healthy_;
  prometheus::Family<prometheus::Gauge>& queue_depth_;
  prometheus::Family<prometheus::Gauge>& queue_bytes_;
  prometheus::Family<prometheus::Gauge>& layers_;
  prometheus::Family<prometheus::Gauge>& layer_bytes_;
  prometheus::Family<prometheus::Gauge>& layer_dense_bytes_;
  prometheus::Family<prometheus::Counter>& layer_evictions_;
  prometheus::Family<prometheus::Histogram>& eviction_duration_;
  prometheus::Family<prometheus::Counter>& layer_loads_;
  prometheus::Family<prometheus::Histogram>& reload_duration_;
  prometheus::Family<prometheus::Histogram>& pack_duration_;
  prometheus::Family<prometheus::Counter>& cache_events_;
  std::array<prometheus::Gauge*, 4> gauges_;
  prometheus::Family<prometheus::Gauge>& shm_regions_;
  prometheus::Family<prometheus::Gauge>& shm_bytes_;
  prometheus::Gauge& rings_;
  const Options options_;

  mutable absl::Mutex mutex_;
  absl::flat_hash_map<std::string, std::unique_ptr<RpcMetrics>> rpcs_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, std::unique_ptr<KernelMetrics>> kernels_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, std::unique_ptr<Device>> devices_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, LayerSeries> layer_series_ ABSL_GUARDED_BY(mutex_);
  int labelled_layers_ ABSL_GUARDED_BY(mutex_) = 0;
  std::array<std::function<uint64_t()>, 4> sources_ ABSL_GUARDED_BY(mutex_);
  std::function<SharedMemorySample()> shared_memory_source_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_METRICS_METRICS_H_
