// The parts of a server, put together: devices, catalog, engine, gRPC, metrics endpoint. What main() runs, and what
// tests run in their own process.
#ifndef SPMMD_SERVER_APP_H_
#define SPMMD_SERVER_APP_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/catalog/catalog.h"
#include "server/config/options.h"
#include "server/device/device.h"
#include "server/engine/engine.h"
#include "server/metrics/http_endpoint.h"
#include "server/metrics/metrics.h"
#include "server/oip/service.h"
#include "server/rpc/auth.h"
#include "server/rpc/blocking_runner.h"
#include "server/rpc/connections.h"
#include "server/rpc/context.h"
#include "server/rpc/server.h"
#include "server/shm/region.h"

namespace spmmd::server {

class App {
 public:
  // Devices are there, endpoints listen, health says NOT_SERVING. FAILED_PRECONDITION when the backend asked for cannot
  // be used; UNAVAILABLE for an endpoint that cannot be listened on; errors of the files that options name.
  // `on_device_failure` runs when a device is lost for good, on any thread, after health says NOT_SERVING.
  static absl::StatusOr<std::unique_ptr<App>> Start(const Options& options,
                                                    std::function<void()> on_device_failure = nullptr);
  ~App();
  App(const App&) = delete;
  App& operator=(const App&) = delete;

  // Registers Options::layers, one after the other, then health says SERVING. The first error, naming the layer.
  absl::Status LoadAndServe();

  // Health says NOT_SERVING, then, after drain_delay, calls in flight end. True when all ended by themselves.
  bool Drain();

  // A device was lost.
  bool device_failed() const { return device_failed_.load(); }

  // "spmmd ready grpc=ADDR metrics=ADDR backend=B devices=D"; several addresses are joined by commas, "off" is none.
  std::string ReadyLine() const;

  const std::vector<std::string>& addresses() const { return rpc_server_->addresses(); }
  const std::string& health_address() const { return rpc_server_->health_address(); }
  const std::string& metrics_address() const { return metrics_address_; }
  Metrics& metrics() { return *metrics_; }
  LayerCatalog& catalog() { return *catalog_; }
  Engine& engine() { return *engine_; }

 private:
  App(Options options, std::function<void()> on_device_failure);
  absl::Status Init();
  absl::Status StartDevices();
  absl::Status StartGpus();
  DeviceOptions MakeDeviceOptions() const;
  void WatchDevices();
  void StartSharedMemory();
  absl::StatusOr<std::unique_ptr<DeviceMapping>> OpenDeviceMemory(const std::string& handle, const std::string& uuid);
  absl::Status StartMetricsEndpoint();

  const Options options_;
  const std::function<void()> on_device_failure_;
  std::atomic<bool> device_failed_{false};
  std::shared_ptr<Metrics> metrics_;
  std::string backend_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::unique_ptr<LayerCatalog> catalog_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<AuthTokens> auth_;
  std::unique_ptr<BlockingRunner> blocking_;
  std::unique_ptr<RegionPool> regions_;
  std::unique_ptr<Connections> connections_;
  RpcContext rpc_;
  std::unique_ptr<OipService> oip_;
  std::unique_ptr<RpcServer> rpc_server_;
  std::unique_ptr<HttpEndpoint> metrics_endpoint_;
  std::string metrics_address_ = "off";
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_APP_H_
