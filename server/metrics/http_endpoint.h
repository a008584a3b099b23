// The Prometheus endpoint: GET and HEAD /metrics, 404 and 405 for everything else.
//
// Not prometheus::Exposer: Debian's civetweb behind it crashes on every request that it answers with an error of its
// own (HEAD /metrics, GET /), and two idle connections take both of its threads.
#ifndef SPMMD_SERVER_METRICS_HTTP_ENDPOINT_H_
#define SPMMD_SERVER_METRICS_HTTP_ENDPOINT_H_

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "prometheus/collectable.h"

namespace httplib {
class Server;
}  // namespace httplib

namespace spmmd::server {

class HttpEndpoint {
 public:
  // Binds and serves. `address` is HOST:PORT or [IPV6]:PORT; port 0 picks a free one. UNAVAILABLE when it cannot be
  // bound. Each scrape concatenates what the collectables report, in order.
  static absl::StatusOr<std::unique_ptr<HttpEndpoint>> Start(
      const std::string& address, std::vector<std::shared_ptr<prometheus::Collectable>> collectables);
  ~HttpEndpoint();
  HttpEndpoint(const HttpEndpoint&) = delete;
  HttpEndpoint& operator=(const HttpEndpoint&) = delete;

  int port() const { return port_; }

 private:
  HttpEndpoint();

  std::unique_ptr<httplib::Server> server_;
  int port_ = 0;
  std::thread thread_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_METRICS_HTTP_ENDPOINT_H_
