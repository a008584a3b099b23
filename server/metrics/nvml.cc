#include "server/metrics/nvml.h"

#include <dlfcn.h>

#include <array>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace spmmd::server {
namespace {

// NVML's ABI, as far as it is used. It has been stable since CUDA 8; nvml.h is no part of the toolkit's packages.
using Return = int;
constexpr Return kSuccess = 0;
using Handle = void*;
constexpr unsigned kTemperatureGpu = 0;
constexpr unsigned kClockSm = 1;
constexpr unsigned kClockMemory = 2;
constexpr unsigned kEccCorrected = 0;
constexpr unsigned kEccUncorrected = 1;
constexpr unsigned kEccVolatile = 0;  // since the driver was loaded

// NOLINTBEGIN(google-runtime-int): the types of nvml.h.
struct Utilization {
  unsigned gpu;  // percent of the time in which a kernel ran
  unsigned memory;
};
struct Memory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

struct ThrottleReason {
  unsigned long long bit;
  const char* label;
};
// NOLINTEND(google-runtime-int)
constexpr std::array<ThrottleReason, 5> kThrottleReasons = {{{0x04, "power_cap"},
                                                             {0x08, "hardware_slowdown"},
                                                             {0x20, "software_thermal"},
                                                             {0x40, "hardware_thermal"},
                                                             {0x80, "power_brake"}}};

}  // namespace

struct NvmlMetrics::Api {
  ~Api() {
    if (started) shutdown();
    if (library != nullptr) dlclose(library);
  }

  // A function that this version of the library lacks stays null, and its metrics absent.
  template <typename Function>
  void Find(const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
  }

  void* library = nullptr;
  bool started = false;
  Return (*init)() = nullptr;
  Return (*shutdown)() = nullptr;
  Return (*by_uuid)(const char*, Handle*) = nullptr;
  Return (*temperature)(Handle, unsigned, unsigned*) = nullptr;
  Return (*power)(Handle, unsigned*) = nullptr;
  Return (*power_limit)(Handle, unsigned*) = nullptr;
  Return (*clock)(Handle, unsigned, unsigned*) = nullptr;
  Return (*utilization)(Handle, Utilization*) = nullptr;
  Return (*memory)(Handle, Memory*) = nullptr;
  // NOLINTBEGIN(google-runtime-int)
  Return (*ecc_errors)(Handle, unsigned, unsigned, unsigned long long*) = nullptr;
  Return (*throttle_reasons)(Handle, unsigned long long*) = nullptr;
  // NOLINTEND(google-runtime-int)
};

NvmlMetrics::NvmlMetrics(std::unique_ptr<Api> api) : api_(std::move(api)) {}
NvmlMetrics::~NvmlMetrics() = default;

absl::StatusOr<std::shared_ptr<NvmlMetrics>> NvmlMetrics::Open(const std::vector<Gpu>& gpus,
                                                               const std::string& library) {
  auto api = std::make_unique<Api>();
  api->library = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (api->library == nullptr) return absl::UnavailableError(dlerror());
  api->Find("nvmlInit_v2", api->init);
  api->Find("nvmlShutdown", api->shutdown);
  api->Find("nvmlDeviceGetHandleByUUID", api->by_uuid);
  api->Find("nvmlDeviceGetTemperature", api->temperature);
  api->Find("nvmlDeviceGetPowerUsage", api->power);
  api->Find("nvmlDeviceGetEnforcedPowerLimit", api->power_limit);
  api->Find("nvmlDeviceGetClockInfo", api->clock);
  api->Find("nvmlDeviceGetUtilizationRates", api->utilization);
  api->Find("nvmlDeviceGetMemoryInfo", api->memory);
  api->Find("nvmlDeviceGetTotalEccErrors", api->ecc_errors);
  api->Find("nvmlDeviceGetCurrentClocksThrottleReasons", api->throttle_reasons);
  if (api->init == nullptr || api->shutdown == nullptr || api->by_uuid == nullptr) {
    return absl::UnavailableError(absl::StrCat(library, " is not NVML"));
  }
  if (const Return code = api->init(); code != kSuccess) {
    return absl::UnavailableError(absl::StrCat("nvmlInit returned ", code));
  }
  api->started = true;
  std::shared_ptr<NvmlMetrics> metrics(new NvmlMetrics(std::move(api)));
  for (const Gpu& gpu : gpus) {
    Known known;
    known.device = gpu.device;
    if (metrics->api_->by_uuid(gpu.uuid.c_str(), &known.handle) == kSuccess) metrics->gpus_.push_back(known);
  }
  if (metrics->gpus_.empty()) return absl::UnavailableError("NVML knows none of the GPUs");
  return metrics;
}

std::vector<prometheus::MetricFamily> NvmlMetrics::Collect() const {
  using prometheus::MetricType;
  prometheus::MetricFamily temperature = {
      "spmmd_gpu_temperature_celsius", "Temperature of the GPU, from NVML.", MetricType::Gauge, {}};
  prometheus::MetricFamily power = {
      "spmmd_gpu_power_watts", "Power that the GPU draws, from NVML.", MetricType::Gauge, {}};
  prometheus::MetricFamily power_limit = {
      "spmmd_gpu_power_limit_watts", "Power that the GPU may draw, from NVML.", MetricType::Gauge, {}};
  prometheus::MetricFamily clock = {"spmmd_gpu_clock_hertz", "Clock rates, from NVML.", MetricType::Gauge, {}};
  prometheus::MetricFamily utilization = {"spmmd_gpu_utilization_ratio",
                                          "Share of the time in which any kernel of any process ran, from NVML.",
                                          MetricType::Gauge,
                                          {}};
  prometheus::MetricFamily memory = {"spmmd_gpu_memory_bytes",
                                     "Memory of the GPU as the driver sees it, other processes included, from NVML.",
                                     MetricType::Gauge,
                                     {}};
  prometheus::MetricFamily ecc = {
      "spmmd_gpu_ecc_errors_total", "ECC errors since the driver was loaded, from NVML.", MetricType::Counter, {}};
  prometheus::MetricFamily throttled = {"spmmd_gpu_throttled",
                                        "1 while the clocks are held down for this reason, else 0, from NVML.",
                                        MetricType::Gauge,
                                        {}};

  for (const Known& gpu : gpus_) {
    const auto add = [&gpu](prometheus::MetricFamily& family, double value, const char* label = nullptr,
                            absl::string_view label_value = {}) {
      prometheus::ClientMetric metric;
      metric.label.push_back({"device", gpu.device});
      if (label != nullptr) metric.label.push_back({label, std::string(label_value)});
      (family.type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
      family.metric.push_back(std::move(metric));
    };
    const auto has = [](auto* function, auto... arguments) {
      return function != nullptr && function(arguments...) == kSuccess;
    };
    unsigned value = 0;
    unsigned long long wide = 0;  // NOLINT(google-runtime-int)
    if (has(api_->temperature, gpu.handle, kTemperatureGpu, &value)) add(temperature, value);
    if (has(api_->power, gpu.handle, &value)) add(power, 1e-3 * value);
    if (has(api_->power_limit, gpu.handle, &value)) add(power_limit, 1e-3 * value);
    if (has(api_->clock, gpu.handle, kClockSm, &value)) add(clock, 1e6 * value, "clock", "sm");
    if (has(api_->clock, gpu.handle, kClockMemory, &value)) add(clock, 1e6 * value, "clock", "memory");
    if (Utilization rates = {}; has(api_->utilization, gpu.handle, &rates)) add(utilization, 1e-2 * rates.gpu);
    if (Memory bytes = {}; has(api_->memory, gpu.handle, &bytes)) {
      add(memory, static_cast<double>(bytes.used), "kind", "used");
      add(memory, static_cast<double>(bytes.free), "kind", "free");
      add(memory, static_cast<double>(bytes.total), "kind", "total");
    }
    if (has(api_->ecc_errors, gpu.handle, kEccCorrected, kEccVolatile, &wide)) {
      add(ecc, static_cast<double>(wide), "type", "corrected");
    }
    if (has(api_->ecc_errors, gpu.handle, kEccUncorrected, kEccVolatile, &wide)) {
      add(ecc, static_cast<double>(wide), "type", "uncorrected");
    }
    if (has(api_->throttle_reasons, gpu.handle, &wide)) {
      for (const auto& [bit, label] : kThrottleReasons) add(throttled, (wide & bit) != 0 ? 1 : 0, "reason", label);
    }
  }

  std::vector<prometheus::MetricFamily> families;
  for (auto* family : {&temperature, &power, &power_limit, &clock, &utilization, &memory, &ecc, &throttled}) {
    if (!family->metric.empty()) families.push_back(std::move(*family));
  }
  return families;
}

}  // namespace spmmd::server
