#include "server/device/device.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

uint64_t Limit(const DeviceOptions& options, uint64_t physical_memory) {
  if (options.memory_limit_bytes != 0) return options.memory_limit_bytes;
  return static_cast<uint64_t>(static_cast<double>(physical_memory) * options.memory_fraction);
}

}  // namespace

Device::Device(std::string id, std::string backend, DeviceOptions options, uint64_t physical_memory, Metrics* metrics)
    : id_(std::move(id)),
      backend_(std::move(backend)),
      options_(std::move(options)),
      physical_memory_(physical_memory),
      metrics_(metrics),
      budget_(absl::StrCat("device ", id_), reason::kDeviceMemory, Limit(options_, physical_memory)) {}

Device::~Device() = default;

void Device::Start() {
  executor_ = std::make_unique<Executor>(
      options_.queue, [this](absl::Span<Job* const> jobs) { return Run(jobs); }, metrics_);
  metrics_->AddDevice(id_, [this] {
    DeviceSample sample;
    sample.weights_bytes = budget_.used(MemoryKind::kWeights);
    sample.workspace_bytes = budget_.used(MemoryKind::kWorkspace);
    sample.staging_bytes = budget_.used(MemoryKind::kStaging);
    sample.shadow_bytes = budget_.used(MemoryKind::kShadow);
    sample.limit_bytes = budget_.limit();
    sample.queue_depth = executor_->depth();
    sample.queue_bytes = executor_->bytes();
    sample.measured_bandwidth = measured_bandwidth_;
    sample.healthy = healthy();
    return sample;
  });
}

void Device::Shutdown() {
  metrics_->RemoveDevice(id_);
  executor_->Stop();
}

void Device::Describe(pb::Device* out) const {
  out->set_id(id_);
  out->set_name(name_);
  out->set_backend(backend_);
  out->set_uuid(uuid_);
  out->set_architecture(architecture_);
  out->set_memory_total_bytes(physical_memory_);
  out->set_memory_budget_bytes(budget_.limit());
  out->set_memory_weights_bytes(budget_.used(MemoryKind::kWeights));
  out->set_memory_workspace_bytes(budget_.used(MemoryKind::kWorkspace));
  out->set_memory_staging_bytes(budget_.used(MemoryKind::kStaging));
  out->set_measured_bandwidth_bytes_per_second(measured_bandwidth_);
  out->set_healthy(healthy());
  out->set_queue_depth(executor_->depth());
}

}  // namespace spmmd::server
