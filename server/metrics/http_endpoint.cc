#include "server/metrics/http_endpoint.h"

#include <sys/socket.h>

#include <chrono>
#include <iterator>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "httplib.h"
#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"

namespace spmmd::server {
namespace {

// A connection that says nothing holds one of these threads for kTimeoutSeconds at the most.
constexpr size_t kThreads = 8;
constexpr time_t kTimeoutSeconds = 2;
constexpr size_t kMaxRequestBytes = 4096;  // of a body: scrapes have none

absl::Status SplitAddress(const std::string& address, std::string* host, int* port) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || !absl::SimpleAtoi(address.substr(colon + 1), port) || *port < 0 || *port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("'", address, "' is not HOST:PORT"));
  }
  *host = address.substr(0, colon);
  if (host->size() >= 2 && host->front() == '[' && host->back() == ']') *host = host->substr(1, host->size() - 2);
  return absl::OkStatus();
}

}  // namespace

HttpEndpoint::HttpEndpoint() : server_(std::make_unique<httplib::Server>()) {}

absl::StatusOr<std::unique_ptr<HttpEndpoint>> HttpEndpoint::Start(
    const std::string& address, std::vector<std::shared_ptr<prometheus::Collectable>> collectables) {
  std::string host;
  int port = 0;
  if (absl::Status status = SplitAddress(address, &host, &port); !status.ok()) return status;

  std::unique_ptr<HttpEndpoint> endpoint(new HttpEndpoint());
  httplib::Server& server = *endpoint->server_;
  server.new_task_queue = [] { return new httplib::ThreadPool(kThreads); };
  server.set_read_timeout(kTimeoutSeconds);
  server.set_write_timeout(kTimeoutSeconds);
  // A scraper comes back after many seconds: keeping its connection would only hold a thread.
  server.set_keep_alive_max_count(1);
  server.set_keep_alive_timeout(kTimeoutSeconds);  // also the wait for a connection's first byte
  server.set_payload_max_length(kMaxRequestBytes);
  // The library's default would let two servers share one port.
  server.set_socket_options([](int socket) {
    const int yes = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  });
  server.Get("/metrics", [collectables = std::move(collectables)](const httplib::Request&,
                                                                  httplib::Response& response) {
    std::vector<prometheus::MetricFamily> families;
    for (const auto& collectable : collectables) {
      std::vector<prometheus::MetricFamily> collected = collectable->Collect();
      families.insert(families.end(), std::make_move_iterator(collected.begin()),
                      std::make_move_iterator(collected.end()));
    }
    response.set_content(prometheus::TextSerializer().Serialize(families), "text/plain; version=0.0.4; charset=utf-8");
  });
  const auto refuse = [](const httplib::Request&, httplib::Response& response) {
    response.status = 405;
    response.set_header("Allow", "GET, HEAD");
  };
  server.Post("/metrics", refuse);
  server.Put("/metrics", refuse);
  server.Delete("/metrics", refuse);
  server.Patch("/metrics", refuse);

  if (port == 0) {
    endpoint->port_ = server.bind_to_any_port(host);
  } else {
    endpoint->port_ = server.bind_to_port(host, port) ? port : -1;
  }
  if (endpoint->port_ <= 0) return absl::UnavailableError(absl::StrCat("cannot bind ", address));
  endpoint->thread_ = std::thread([&server] { server.listen_after_bind(); });
  while (!server.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // stop() needs it running
  return endpoint;
}

HttpEndpoint::~HttpEndpoint() {
  server_->stop();
  if (thread_.joinable()) thread_.join();
}

}  // namespace spmmd::server
