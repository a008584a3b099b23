// What the driver knows of the GPUs: temperature, power, clocks, memory, ECC errors, throttling.
//
// NVML is loaded at run time, and a value that it does not give is absent from the scrape, never zero: a MIG slice, a
// virtual GPU or a container without libnvidia-ml.so.1 lack some or all of them.
#ifndef SPMMD_SERVER_METRICS_NVML_H_
#define SPMMD_SERVER_METRICS_NVML_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace spmmd::server {

class NvmlMetrics final : public prometheus::Collectable {
 public:
  struct Gpu {
    std::string device;  // our name, the label: "cuda:0"
    std::string uuid;    // as nvidia-smi writes it: "GPU-...", "MIG-..."
  };

  // UNAVAILABLE saying why when the library cannot be loaded or does not start, or knows none of the GPUs. `library` is
  // a file for dlopen.
  static absl::StatusOr<std::shared_ptr<NvmlMetrics>> Open(const std::vector<Gpu>& gpus,
                                                           const std::string& library = "libnvidia-ml.so.1");
  ~NvmlMetrics() override;
  NvmlMetrics(const NvmlMetrics&) = delete;
  NvmlMetrics& operator=(const NvmlMetrics&) = delete;

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  struct Api;
  struct Known {
    std::string device;
    void* handle = nullptr;
  };

  explicit NvmlMetrics(std::unique_ptr<Api> api);

  const std::unique_ptr<Api> api_;
  std::vector<Known> gpus_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_METRICS_NVML_H_
