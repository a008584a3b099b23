// A device: a memory with a budget, resident layers in it, and an executor that runs programs over them, one at a time.
#ifndef SPMMD_SERVER_DEVICE_DEVICE_H_
#define SPMMD_SERVER_DEVICE_DEVICE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/format/packed_layer.h"
#include "server/device/executor.h"
#include "server/device/host_buffers.h"
#include "server/device/memory_budget.h"
#include "server/engine/plan.h"
#include "server/metrics/metrics.h"
#include "server/pb.h"
#include "spmm/v1/sparse_matmul.pb.h"

namespace spmmd::server {

// A packed layer (or its shard) in a device's memory, with its bias. Freed, and its bytes given back, on destruction.
class ResidentLayer {
 public:
  virtual ~ResidentLayer() = default;
  ResidentLayer(const ResidentLayer&) = delete;
  ResidentLayer& operator=(const ResidentLayer&) = delete;

  int64_t m() const { return m_; }
  int64_t k() const { return k_; }
  int64_t nnz() const { return nnz_; }
  Format format() const { return format_; }
  // Held in the device's memory, bias included.
  uint64_t bytes() const { return weights_.bytes(); }
  // Of a dense copy beside it that only makes it faster; 0: none now.
  virtual uint64_t shadow_bytes() const { return 0; }

 protected:
  ResidentLayer(const PackedLayer& packed, MemoryBudget::Reservation weights)
      : m_(packed.m), k_(packed.k), nnz_(packed.nnz), format_(packed.format), weights_(std::move(weights)) {}

 private:
  int64_t m_;
  int64_t k_;
  int64_t nnz_;
  Format format_;
  MemoryBudget::Reservation weights_;
};

// What a device makes a resident layer of, in host memory.
struct StoredLayer {
  PackedLayer packed;
  std::vector<float> bias;  // empty or M values

  uint64_t bytes() const { return packed.bytes().total() + bias.size() * sizeof(float); }
};

// What AUTO looks at.
struct FormatQuery {
  DType dtype = DType::kF16;
  int64_t m = 0;
  int64_t k = 0;
  int64_t nnz = 0;
  bool sparse_activations = false;  // the layer has a default activation threshold
  bool two_of_four = false;         // no more than 2 nonzeros in any aligned group of 4 along K
  bool may_measure = false;         // the answer may take a moment and the device's time
};

// The result of AUTO.
struct FormatChoice {
  Format format = Format::kDense;
  std::string reason;  // one sentence, for Layer.format_reason
};

struct DeviceOptions {
  // What layers, workspaces and staging may take; 0 takes `memory_fraction` of the physical memory.
  uint64_t memory_limit_bytes = 0;
  double memory_fraction = 0.9;
  Executor::Options queue;
  // Measure read bandwidth at start (about 50 ms).
  bool measure_bandwidth = true;
  // Keep dense copies of layers in memory that nothing else needs, where that is faster.
  bool dense_shadows = true;
  absl::Duration shadow_quiet = absl::Seconds(10);  // since one was given up, before another is made
  // Measure kernels on shapes that AUTO has not met, and keep what was measured in files in this directory (empty: in
  // memory only).
  bool tune_kernels = false;
  std::string tuning_dir;
};

class Device {
 public:
  virtual ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const std::string& id() const { return id_; }            // "cpu:0"
  const std::string& backend() const { return backend_; }  // "cpu"
  MemoryBudget& budget() { return budget_; }
  Executor& executor() { return *executor_; }
  // For payloads that the device reads and writes.
  HostBufferPool& host_buffers() { return *host_buffers_; }
  // False once an error has come from which the device does not recover.
  virtual bool healthy() const { return true; }
  // `callback` runs once, on any thread, when the device stops being healthy; at once when it has already. Null: nobody
  // any more, and the one set before is not running when this returns.
  virtual void OnLost(std::function<void()> callback) { static_cast<void>(callback); }
  // Everything DeviceInfo answers.
  void Describe(pb::Device* out) const;

  // Formats, as this backend lays them out.
  virtual bool CanExecute(Format format) const = 0;
  // The backend's own layout of a format that a caller asked for (BITMAP has one for each backend).
  virtual Format Layout(Format format) const { return format; }
  // Whether the backend executes weights of this type, in any format.
  virtual bool CanStore(DType dtype) const {
    static_cast<void>(dtype);
    return true;
  }
  // AUTO.
  virtual FormatChoice ChooseFormat(const FormatQuery& query) const = 0;
  // Measures the kernels for layers like this one again.
  virtual void Tune(DType dtype, const ResidentLayer& layer) {
    static_cast<void>(dtype);
    static_cast<void>(layer);
  }
  // Upper bound of the device bytes that a layer takes, when it has at most `max_nnz` nonzeros; without a bias.
  virtual uint64_t EstimateBytes(Format format, DType dtype, int64_t m, int64_t k, int64_t max_nnz) const = 0;

  // Makes a validated packed layer resident. `bias` is empty or has M values; `weights` has at least the bytes needed
  // and is shrunk to the bytes taken. The packed host bytes are consumed or copied, as the device needs.
  virtual absl::StatusOr<std::unique_ptr<ResidentLayer>> Load(PackedLayer packed, std::vector<float> bias,
                                                              MemoryBudget::Reservation weights) = 0;
  // The device's memory is the host's: what leaves it for the host has gone nowhere.
  virtual bool in_host_memory() const { return false; }
  // What Load() was given, copied back to the host (or shared with the device, if it is the host).
  virtual absl::StatusOr<StoredLayer> Save(const ResidentLayer& layer) const = 0;
  // The dense matrix of a resident layer, copied back to the host.
  virtual absl::StatusOr<DenseMatrix> ReadBack(const ResidentLayer& layer) const = 0;

 protected:
  Device(std::string id, std::string backend, DeviceOptions options, uint64_t physical_memory, Metrics* metrics);

  // Executes jobs on this device in one go; nothing else runs meanwhile. Called by the executor; sets their kernel
  // times. They have equal plans and layers and dense inputs of equal types, or there is only one.
  virtual absl::Status Run(absl::Span<Job* const> jobs) = 0;

  // A derived class calls these at the end of its constructor and at the start of its destructor: the executor and the
  // scrape call virtual functions.
  void Start();
  void Shutdown();

  Metrics* metrics() const { return metrics_; }
  // Before Start().
  void set_host_buffers(std::shared_ptr<HostBufferPool> pool) { host_buffers_ = std::move(pool); }
  void set_measured_bandwidth(double bytes_per_second) { measured_bandwidth_ = bytes_per_second; }
  double measured_bandwidth() const { return measured_bandwidth_; }

  // For Describe().
  std::string name_;
  std::string architecture_;
  std::string uuid_;

 private:
  const std::string id_;
  const std::string backend_;
  const DeviceOptions options_;
  const uint64_t physical_memory_;
  Metrics* const metrics_;
  MemoryBudget budget_;
  double measured_bandwidth_ = 0;
  std::shared_ptr<HostBufferPool> host_buffers_ = HostBufferPool::Create({});
  std::unique_ptr<Executor> executor_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_DEVICE_H_
