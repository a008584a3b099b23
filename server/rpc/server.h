// The gRPC server: endpoints, services, health, and its end.
#ifndef SPMMD_SERVER_RPC_SERVER_H_
#define SPMMD_SERVER_RPC_SERVER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "server/config/options.h"
#include "server/rpc/catalog_service.h"
#include "server/rpc/context.h"
#include "server/rpc/matmul_service.h"

namespace spmmd::server {

class RpcServer {
 public:
  // A service beside those of this folder, by its full name. Outlives the server.
  struct Service {
    std::string name;
    grpc::Service* service;
  };

  // Listens; health says NOT_SERVING until SetServing. `rpc` must outlive the server. UNAVAILABLE naming the endpoint
  // and the system's reason when it cannot listen; the errors of MakeTlsCredentials.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const Options& options, RpcContext* rpc,
                                                          std::vector<Service> services = {});
  // Ends what Drain has not: cancels everything.
  ~RpcServer();
  RpcServer(const RpcServer&) = delete;
  RpcServer& operator=(const RpcServer&) = delete;

  // The endpoints, with the port chosen where 0 was asked for, in the order of Options::listen.
  const std::vector<std::string>& addresses() const { return addresses_; }
  const std::string& health_address() const { return health_address_; }

  // From here on calls are served and health says SERVING.
  void SetServing();
  // Health says NOT_SERVING; calls are still served.
  void SetNotServing();
  // Refuses new calls (UNAVAILABLE, DRAINING), ends idle streams, waits for the calls in flight up to `timeout`, then
  // closes every connection. True when every call ended by itself.
  bool Drain(absl::Duration timeout);

 private:
  RpcServer(RpcContext* rpc, std::vector<Service> services);
  absl::Status Listen(const Options& options);
  absl::Status ListenHealth(const std::string& address);
  void SetHealth(bool serving);

  RpcContext* const rpc_;
  SparseMatmulService matmul_;
  LayerCatalogService catalog_;
  const std::vector<Service> services_;
  std::unique_ptr<grpc::Server> server_;
  grpc::CallbackGenericService health_only_;  // answers UNIMPLEMENTED; gRPC needs some service beside health
  std::unique_ptr<grpc::Server> health_server_;
  std::vector<std::string> addresses_;
  std::string health_address_;
  std::vector<std::string> socket_files_;
};

// Routes gRPC's own log lines into ours. Once a process.
void RouteGrpcLog();

// For `spmmd --health-check`: asks grpc.health.v1 at `address` for the whole server. OK when it answers SERVING.
absl::Status ProbeHealth(const std::string& address, absl::Duration timeout);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_SERVER_H_
