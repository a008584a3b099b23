#include "server/rpc/server.h"

#include <grpc/support/log.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/ext/channelz_service_plugin.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "kernels/base/status_macros.h"
#include "server/log/log.h"
#include "server/rpc/credentials.h"
#include "server/rpc/endpoint.h"

namespace spmmd::server {
namespace {

constexpr const char* kServiceNames[] = {"spmm.v1.SparseMatmul", "spmm.v1.LayerCatalog"};

// gRPC offers reflection and channelz on every server of the process once their libraries are linked or switched on.
// This takes them away from one.
class OfferOnly final : public grpc::ServerBuilderOption {
 public:
  OfferOnly(bool reflection, bool channelz) : reflection_(reflection), channelz_(channelz) {}
  void UpdateArguments(grpc::ChannelArguments* /*arguments*/) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    std::erase_if(*plugins, [this](const auto& plugin) {
      return (plugin->name() == "proto_server_reflection" && !reflection_) ||
             (plugin->name() == "channelz_service" && !channelz_);
    });
  }

 private:
  const bool reflection_;
  const bool channelz_;
};

int Millis(absl::Duration duration) {
  return static_cast<int>(std::min<int64_t>(absl::ToInt64Milliseconds(duration), std::numeric_limits<int>::max()));
}

void AddConnectionArguments(const Options& options, grpc::ServerBuilder* builder) {
  // A second server on the same port must fail to start, not share the port's connections with the first.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_concurrent_streams);
  if (options.keepalive_time > absl::ZeroDuration()) {
    builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Millis(options.keepalive_time));
    builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Millis(options.keepalive_timeout));
    builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  }
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              Millis(options.keepalive_min_client_interval));
  if (options.max_connection_idle > absl::ZeroDuration()) {
    builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, Millis(options.max_connection_idle));
  }
  if (options.max_connection_age > absl::ZeroDuration()) {
    builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, Millis(options.max_connection_age));
    builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, Millis(options.max_connection_age_grace));
  }
  builder->SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  builder->SetMaxSendMessageSize(-1);
}

}  // namespace

RpcServer::RpcServer(RpcContext* rpc, std::vector<Service> services)
    : rpc_(rpc), matmul_(rpc), catalog_(rpc), services_(std::move(services)) {}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const Options& options, RpcContext* rpc,
                                                            std::vector<Service> services) {
  grpc::EnableDefaultHealthCheckService(true);
  std::unique_ptr<RpcServer> server(new RpcServer(rpc, std::move(services)));
  if (!options.health_listen.empty()) SPMMD_RETURN_IF_ERROR(server->ListenHealth(options.health_listen));
  SPMMD_RETURN_IF_ERROR(server->Listen(options));
  server->SetHealth(false);
  return server;
}

absl::Status RpcServer::Listen(const Options& options) {
  std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials();
  if (!options.tls_cert.empty()) {
    SPMMD_ASSIGN_OR_RETURN(credentials, MakeTlsCredentials({options.tls_cert, options.tls_key, options.tls_client_ca,
                                                            options.tls_reload_interval}));
  }
  // Both before the builder, which takes the list of plugins when it is made.
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  if (options.channelz) grpc::channelz::experimental::InitChannelzService();
  grpc::ServerBuilder builder;
  AddConnectionArguments(options, &builder);
  builder.SetOption(std::make_unique<OfferOnly>(options.reflection, options.channelz));
  builder.AddChannelArgument(GRPC_ARG_ENABLE_CHANNELZ, options.channelz ? 1 : 0);
  builder.RegisterService(&matmul_);
  builder.RegisterService(&catalog_);
  for (const Service& service : services_) builder.RegisterService(service.service);

  std::vector<int> ports(options.listen.size(), 0);
  for (size_t i = 0; i < options.listen.size(); ++i) {
    const std::string& endpoint = options.listen[i];
    if (IsUnix(endpoint)) {
      SPMMD_RETURN_IF_ERROR(CheckSocketFree(endpoint));
      socket_files_.push_back(SocketPath(endpoint));
    }
    // A Unix socket does not leave the host and is guarded by its file's permissions: TLS would only cost time.
    builder.AddListeningPort(endpoint, IsUnix(endpoint) ? grpc::InsecureServerCredentials() : credentials, &ports[i]);
  }
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    const size_t failed = std::find(ports.begin(), ports.end(), 0) - ports.begin();
    if (failed == ports.size()) return absl::InternalError("the gRPC server cannot be built");
    return absl::UnavailableError(absl::StrCat("--listen: ", ExplainBindFailure(options.listen[failed])));
  }
  for (size_t i = 0; i < ports.size(); ++i) addresses_.push_back(WithPort(options.listen[i], ports[i]));
  return absl::OkStatus();
}

absl::Status RpcServer::ListenHealth(const std::string& address) {
  grpc::ServerBuilder builder;
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetOption(std::make_unique<OfferOnly>(/*reflection=*/false, /*channelz=*/false));
  builder.RegisterCallbackGenericService(&health_only_);
  int port = 0;
  if (IsUnix(address)) {
    SPMMD_RETURN_IF_ERROR(CheckSocketFree(address));
    socket_files_.push_back(SocketPath(address));
  }
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  health_server_ = builder.BuildAndStart();
  if (health_server_ == nullptr) {
    return absl::UnavailableError(absl::StrCat("--health-listen: ", ExplainBindFailure(address)));
  }
  health_address_ = WithPort(address, port);
  return absl::OkStatus();
}

void RpcServer::SetHealth(bool serving) {
  rpc_->healthy.store(serving);
  for (const auto* server : {server_.get(), health_server_.get()}) {
    if (server == nullptr) continue;
    grpc::HealthCheckServiceInterface* health = server->GetHealthCheckService();
    // Names of their own as well as the whole server: clients watch the service that they call.
    for (const char* name : kServiceNames) health->SetServingStatus(name, serving);
    for (const Service& service : services_) health->SetServingStatus(service.name, serving);
    health->SetServingStatus(serving);
  }
}

void RpcServer::SetServing() {
  rpc_->state.store(ServingState::kServing, std::memory_order_release);
  SetHealth(true);
}

void RpcServer::SetNotServing() { SetHealth(false); }

bool RpcServer::Drain(absl::Duration timeout) {
  SetHealth(false);
  const absl::Time deadline = absl::Now() + timeout;
  // gRPC's own shutdown comes last: from its first moment on, calls that are on their way end as CANCELLED, which no
  // client tries elsewhere, instead of UNAVAILABLE.
  rpc_->state.store(ServingState::kDraining);
  {
    absl::MutexLock lock(&rpc_->streams_mutex);
    for (DrainableCall* stream : rpc_->streams) stream->BeginDrain();
  }
  constexpr absl::Duration kLook = absl::Milliseconds(5);
  // A call may have been read from its connection and not yet have reached a handler. New ones are refused, so this
  // ends.
  constexpr int kQuietLooks = 10;
  int quiet = 0;
  while (quiet < kQuietLooks && absl::Now() < deadline) {
    quiet = rpc_->calls.load() == 0 ? quiet + 1 : 0;
    absl::SleepFor(kLook);
  }
  const bool clean = rpc_->calls.load() == 0;
  // Health watches of clients never end by themselves; a moment for what is being refused.
  server_->Shutdown(absl::ToChronoTime(absl::Now() + absl::Milliseconds(100)));
  if (health_server_ != nullptr) health_server_->Shutdown(std::chrono::system_clock::now());
  RemoveSocketFiles(socket_files_);
  return clean;
}

RpcServer::~RpcServer() {
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
  if (health_server_ != nullptr) health_server_->Shutdown(std::chrono::system_clock::now());
  RemoveSocketFiles(socket_files_);
}

void RouteGrpcLog() {
  gpr_set_log_function([](gpr_log_func_args* args) {
    const LogLevel level = args->severity == GPR_LOG_SEVERITY_ERROR  ? LogLevel::kWarning
                           : args->severity == GPR_LOG_SEVERITY_INFO ? LogLevel::kInfo
                                                                     : LogLevel::kDebug;
    // gRPC calls the ordinary end of a connection an error now and then: none of its lines is an error of the server.
    Log(level, "grpc", {{"text", std::string_view(args->message)}});
  });
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
}

absl::Status ProbeHealth(const std::string& address, absl::Duration timeout) {
  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  const auto stub = grpc::health::v1::Health::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  grpc::health::v1::HealthCheckRequest request;
  grpc::health::v1::HealthCheckResponse response;
  const grpc::Status status = stub->Check(&context, request, &response);
  if (!status.ok()) {
    return {static_cast<absl::StatusCode>(status.error_code()), absl::StrCat(address, ": ", status.error_message())};
  }
  if (response.status() != grpc::health::v1::HealthCheckResponse::SERVING) {
    return absl::UnavailableError(
        absl::StrCat(address, ": ", grpc::health::v1::HealthCheckResponse::ServingStatus_Name(response.status())));
  }
  return absl::OkStatus();
}

}  // namespace spmmd::server
