// spmmd_residency_bench: what evicting layers from a GPU and bringing them back costs, and what it does to requests on
// layers that stay.
//
// Registers more layers than the device's budget holds, uses them in turn, so that each use reloads one layer and
// evicts another, and prints the rates of both; meanwhile a thread runs one pinned layer over and over, and its times
// stand beside those of an idle server.
#include <atomic>
#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/dispatch/cuda_library.h"
#include "server/bench/served.h"
#include "server/catalog/catalog.h"
#include "server/device/cuda_device.h"
#include "server/device/host_memory.h"
#include "server/engine/engine.h"
#include "server/metrics/metrics.h"

namespace spmmd::server {
namespace {

struct Settings {
  std::string cuda_library;
  int64_t rows = 16384;
  int64_t cols = 8192;
  int layers = 12;
  int resident = 4;
  int rounds = 3;
};

absl::Status Register(LayerCatalog& catalog, const Settings& settings, const std::string& name, uint32_t seed,
                      bool pin) {
  pb::LayerSpec spec;
  spec.set_name(name);
  spec.set_m(settings.rows);
  spec.set_k(settings.cols);
  spec.set_format(pb::FORMAT_BITMAP);
  spec.set_pin(pin);
  return RegisterRandom(catalog, std::move(spec), seed);
}

absl::StatusOr<absl::Duration> RunLayer(Engine& engine, const Settings& settings, const std::string& name) {
  return Run(engine, MatmulRequest(name, 1, settings.cols));
}

double Series(const Metrics& metrics, const std::string& series) {
  const std::string text = metrics.Serialize();
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    double value = 0;
    if (absl::StartsWith(line, series + " ") && absl::SimpleAtod(line.substr(series.size() + 1), &value)) return value;
  }
  return 0;
}

std::string Quantiles(const std::vector<absl::Duration>& times) {
  if (times.empty()) return "none";
  return absl::StrFormat("p50 %.0f us, p99 %.0f us, max %.0f us of %d", QuantileMicroseconds(times, 0.5),
                         QuantileMicroseconds(times, 0.99), QuantileMicroseconds(times, 1), times.size());
}

absl::Status Bench(const Settings& settings) {
  SPMMD_ASSIGN_OR_RETURN(const auto library, CudaLibrary::Load(settings.cuda_library));
  Metrics metrics;
  DeviceOptions options;
  options.measure_bandwidth = false;
  uint64_t estimate = 0;
  uint64_t bytes = 0;
  {
    SPMMD_ASSIGN_OR_RETURN(const auto device, CudaDevice::Open(library, 0, options, &metrics));
    LayerCatalog catalog({}, {device.get()}, &metrics);
    estimate = device->EstimateBytes(Format::kBitmapGpu, DType::kF16, settings.rows, settings.cols,
                                     settings.rows * settings.cols);
    SPMMD_RETURN_IF_ERROR(Register(catalog, settings, "w", 1, false));
    bytes = device->budget().used(MemoryKind::kWeights);
  }
  options.memory_limit_bytes = bytes * static_cast<uint64_t>(settings.resident) + estimate + (uint64_t{64} << 20);
  SPMMD_ASSIGN_OR_RETURN(const auto device, CudaDevice::Open(library, 0, options, &metrics));
  LayerCatalog::Options catalog_options;
  catalog_options.residency.host_limit_bytes = uint64_t{64} << 30;
  LayerCatalog catalog(catalog_options, {device.get()}, &metrics);
  Engine engine({}, &catalog, &metrics);
  SPMMD_RETURN_IF_ERROR(Register(catalog, settings, "pinned", 1, true));
  for (int layer = 0; layer < settings.layers; ++layer) {
    SPMMD_RETURN_IF_ERROR(
        Register(catalog, settings, absl::StrCat("w", layer), static_cast<uint32_t>(layer + 2), false));
  }
  std::vector<absl::Duration> idle;
  for (int i = 0; i < 500; ++i) {
    SPMMD_ASSIGN_OR_RETURN(idle.emplace_back(), RunLayer(engine, settings, "pinned"));
  }
  const char* const evict_sum = "spmmd_layer_eviction_duration_seconds_sum{to=\"host\"}";
  const char* const evict_count = "spmmd_layer_eviction_duration_seconds_count{to=\"host\"}";
  const char* const load_sum = "spmmd_layer_reload_duration_seconds_sum{source=\"host\"}";
  const char* const load_count = "spmmd_layer_reload_duration_seconds_count{source=\"host\"}";
  const double evicted = Series(metrics, evict_sum);
  const double evictions = Series(metrics, evict_count);
  const double loaded = Series(metrics, load_sum);
  const double loads = Series(metrics, load_count);
  std::atomic<bool> stop{false};
  std::vector<absl::Duration> busy;
  std::thread other([&] {
    while (!stop.load()) {
      absl::StatusOr<absl::Duration> took = RunLayer(engine, settings, "pinned");
      if (took.ok()) busy.push_back(*took);
    }
  });
  absl::Status status;
  std::vector<absl::Duration> waits;
  for (int round = 0; round < settings.rounds && status.ok(); ++round) {
    for (int layer = 0; layer < settings.layers && status.ok(); ++layer) {
      absl::StatusOr<absl::Duration> took = RunLayer(engine, settings, absl::StrCat("w", layer));
      status = took.status();
      if (took.ok()) waits.push_back(*took);
    }
  }
  stop = true;
  other.join();
  SPMMD_RETURN_IF_ERROR(status);
  const double evict_seconds = (Series(metrics, evict_sum) - evicted) / (Series(metrics, evict_count) - evictions);
  // A reload waits for the eviction that makes room for it.
  const double load_seconds = (Series(metrics, load_sum) - loaded) / (Series(metrics, load_count) - loads);
  const double mb = static_cast<double>(bytes) / 1e6;
  std::cout << absl::StrFormat("%d x %d, %.0f MB packed, %d layers, %d fit\n", settings.rows, settings.cols, mb,
                               settings.layers, settings.resident);
  std::cout << absl::StrFormat("evict to host memory   %.1f ms, %.1f GB/s\n", evict_seconds * 1e3,
                               mb / 1e3 / evict_seconds);
  std::cout << absl::StrFormat("reload with eviction   %.1f ms; without it %.1f ms, %.1f GB/s\n", load_seconds * 1e3,
                               (load_seconds - evict_seconds) * 1e3, mb / 1e3 / (load_seconds - evict_seconds));
  std::cout << "request on an evicted layer: " << Quantiles(waits) << "\n";
  std::cout << "pinned layer, nothing else:  " << Quantiles(idle) << "\n";
  std::cout << "pinned layer, meanwhile:     " << Quantiles(busy) << "\n";
  return absl::OkStatus();
}

}  // namespace
}  // namespace spmmd::server

// An exception ends a benchmark as well as anything.
int main(int argc, char** argv) {  // NOLINT(bugprone-exception-escape)
  spmmd::server::KeepFreedBlocks();
  spmmd::server::Settings settings;
  CLI::App app("Times the eviction and the return of layers on a GPU");
  app.add_option("--cuda-library", settings.cuda_library, "The library with the CUDA kernels");
  app.add_option("--rows", settings.rows, "Rows of each layer");
  app.add_option("--cols", settings.cols, "Columns of each layer");
  app.add_option("--layers", settings.layers, "Layers beside the pinned one");
  app.add_option("--resident", settings.resident, "Layers that fit beside the pinned one");
  app.add_option("--rounds", settings.rounds, "Times that every layer is used");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = spmmd::server::Bench(settings);
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
