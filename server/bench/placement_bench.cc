// spmmd_placement_bench: what several GPUs of one host give one layer. SHARDED, each GPU a share of the rows, against
// one GPU: the time of one call. REPLICATED against one GPU: the calls answered while many callers wait.
#include <atomic>
#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
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
  int64_t rows = 65536;
  int64_t cols = 16384;
  int64_t replicated_rows = 28672;
  int64_t replicated_cols = 8192;
  std::vector<int64_t> tokens = {1, 8, 32, 128};
  int callers = 32;
  double seconds = 1;  // of each measurement
};

absl::Status Register(LayerCatalog& catalog, const std::string& name, int64_t rows, int64_t cols,
                      pb::Placement placement) {
  pb::LayerSpec spec;
  spec.set_name(name);
  spec.set_m(rows);
  spec.set_k(cols);
  spec.set_format(pb::FORMAT_BITMAP);
  spec.set_placement(placement);
  return RegisterRandom(catalog, std::move(spec), 1);
}

// Median time of one call, one at a time; the two layers turn by turn.
absl::Status TimeCalls(Engine& engine, const Settings& settings, int64_t tokens, size_t devices) {
  const pb::ExecuteRequest one = MatmulRequest("one", tokens, settings.cols);
  const pb::ExecuteRequest sharded = MatmulRequest("sharded", tokens, settings.cols);
  std::vector<absl::Duration> one_times;
  std::vector<absl::Duration> sharded_times;
  for (int i = 0; i < 10; ++i) {
    SPMMD_RETURN_IF_ERROR(Run(engine, one).status());
    SPMMD_RETURN_IF_ERROR(Run(engine, sharded).status());
  }
  const absl::Time end = absl::Now() + absl::Seconds(2 * settings.seconds);
  while (absl::Now() < end) {
    SPMMD_ASSIGN_OR_RETURN(one_times.emplace_back(), Run(engine, one));
    SPMMD_ASSIGN_OR_RETURN(sharded_times.emplace_back(), Run(engine, sharded));
  }
  const double one_us = QuantileMicroseconds(std::move(one_times), 0.5);
  const double sharded_us = QuantileMicroseconds(std::move(sharded_times), 0.5);
  std::cout << absl::StrFormat("sharded,%d,%d,%d,%d,%.1f,%.1f,%.2f\n", settings.rows, settings.cols, tokens, devices,
                               one_us, sharded_us, one_us / sharded_us);
  return absl::OkStatus();
}

// Calls a second with `callers` of them waiting at any time.
absl::StatusOr<double> Throughput(Engine& engine, const Settings& settings, const pb::ExecuteRequest& request) {
  std::atomic<int64_t> calls{0};
  std::atomic<bool> counting{false};
  std::atomic<bool> stop{false};
  absl::Mutex mutex;
  absl::Status failure;
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(settings.callers));
  for (int i = 0; i < settings.callers; ++i) {
    threads.emplace_back([&] {
      while (!stop.load(std::memory_order_relaxed)) {
        const absl::Status status = Run(engine, request).status();
        if (!status.ok()) {
          const absl::MutexLock lock(&mutex);
          failure.Update(status);
          return;
        }
        if (counting.load(std::memory_order_relaxed)) calls.fetch_add(1, std::memory_order_relaxed);
      }
    });
  }
  absl::SleepFor(absl::Milliseconds(200));
  const absl::Time start = absl::Now();
  counting = true;
  absl::SleepFor(absl::Seconds(settings.seconds));
  counting = false;
  const absl::Duration took = absl::Now() - start;
  stop = true;
  for (std::thread& thread : threads) thread.join();
  SPMMD_RETURN_IF_ERROR(failure);
  return static_cast<double>(calls.load()) / absl::ToDoubleSeconds(took);
}

absl::Status CompareThroughput(Engine& engine, const Settings& settings, int64_t tokens, size_t devices) {
  SPMMD_ASSIGN_OR_RETURN(const double one,
                         Throughput(engine, settings, MatmulRequest("small", tokens, settings.replicated_cols)));
  SPMMD_ASSIGN_OR_RETURN(const double all,
                         Throughput(engine, settings, MatmulRequest("replicated", tokens, settings.replicated_cols)));
  std::cout << absl::StrFormat("replicated,%d,%d,%d,%d,%.0f,%.0f,%.2f\n", settings.replicated_rows,
                               settings.replicated_cols, tokens, devices, one, all, all / one);
  return absl::OkStatus();
}

absl::Status Bench(const Settings& settings) {
  SPMMD_ASSIGN_OR_RETURN(const auto library, CudaLibrary::Load(settings.cuda_library));
  int32_t count = 0;
  SPMMD_RETURN_IF_ERROR(library->ToStatus(library->device_count(&count)));
  Metrics metrics;
  DeviceOptions options;
  options.measure_bandwidth = false;
  std::vector<std::unique_ptr<CudaDevice>> devices;
  std::vector<Device*> pointers;
  for (int32_t ordinal = 0; ordinal < count; ++ordinal) {
    SPMMD_ASSIGN_OR_RETURN(devices.emplace_back(), CudaDevice::Open(library, ordinal, options, &metrics));
    pointers.push_back(devices.back().get());
  }
  LayerCatalog::Options catalog_options;
  catalog_options.upload_limit_bytes = uint64_t{32} << 30;
  LayerCatalog catalog(catalog_options, pointers, &metrics);
  Engine engine({}, &catalog, &metrics);
  SPMMD_RETURN_IF_ERROR(Register(catalog, "one", settings.rows, settings.cols, pb::PLACEMENT_SINGLE));
  SPMMD_RETURN_IF_ERROR(Register(catalog, "sharded", settings.rows, settings.cols, pb::PLACEMENT_SHARDED));
  SPMMD_RETURN_IF_ERROR(
      Register(catalog, "small", settings.replicated_rows, settings.replicated_cols, pb::PLACEMENT_SINGLE));
  SPMMD_RETURN_IF_ERROR(
      Register(catalog, "replicated", settings.replicated_rows, settings.replicated_cols, pb::PLACEMENT_REPLICATED));
  // Times in microseconds, rates in calls a second.
  std::cout << "placement,M,K,N,devices,one_device,all_devices,ratio\n";
  for (const int64_t tokens : settings.tokens) {
    SPMMD_RETURN_IF_ERROR(TimeCalls(engine, settings, tokens, devices.size()));
  }
  for (const int64_t tokens : settings.tokens) {
    SPMMD_RETURN_IF_ERROR(CompareThroughput(engine, settings, tokens, devices.size()));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace spmmd::server

// An exception ends a benchmark as well as anything.
int main(int argc, char** argv) {  // NOLINT(bugprone-exception-escape)
  spmmd::server::KeepFreedBlocks();
  spmmd::server::Settings settings;
  CLI::App app("Times one layer on all GPUs of the host against one of them");
  app.add_option("--cuda-library", settings.cuda_library, "The library with the CUDA kernels");
  app.add_option("--rows", settings.rows, "Rows of the sharded layer");
  app.add_option("--cols", settings.cols, "Columns of the sharded layer");
  app.add_option("--replicated-rows", settings.replicated_rows, "Rows of the replicated layer");
  app.add_option("--replicated-cols", settings.replicated_cols, "Columns of the replicated layer");
  app.add_option("--tokens", settings.tokens, "Batch widths N")->delimiter(',');
  app.add_option("--callers", settings.callers, "Callers of the replicated layer");
  app.add_option("--seconds", settings.seconds, "Seconds of each measurement");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = spmmd::server::Bench(settings);
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
