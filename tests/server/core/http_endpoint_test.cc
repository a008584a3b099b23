#include "server/metrics/http_endpoint.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "httplib.h"
#include "server/metrics/metrics.h"

namespace spmmd::server {
namespace {

using ::testing::HasSubstr;

class HttpEndpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    metrics_ = std::make_shared<Metrics>();
    metrics_->SetBuildInfo("1.2.3", "abc", "cpu");
    auto endpoint = HttpEndpoint::Start("127.0.0.1:0", {metrics_});
    ASSERT_TRUE(endpoint.ok()) << endpoint.status();
    endpoint_ = *std::move(endpoint);
  }

  httplib::Client NewClient() const { return httplib::Client("127.0.0.1", endpoint_->port()); }

  std::shared_ptr<Metrics> metrics_;
  std::unique_ptr<HttpEndpoint> endpoint_;
};

TEST_F(HttpEndpointTest, ServesTheScrape) {
  auto client = NewClient();
  const auto response = client.Get("/metrics");
  ASSERT_TRUE(response);
  EXPECT_EQ(response->status, 200);
  EXPECT_THAT(response->get_header_value("Content-Type"), HasSubstr("version=0.0.4"));
  EXPECT_THAT(response->body, HasSubstr("spmmd_build_info{"));
}

// Each of these once ended the process inside the HTTP library of the time.
TEST_F(HttpEndpointTest, AnswersWhatIsNotAScrape) {
  auto client = NewClient();
  EXPECT_EQ(client.Head("/metrics")->status, 200);
  EXPECT_EQ(client.Get("/")->status, 404);
  EXPECT_EQ(client.Get("/favicon.ico")->status, 404);
  EXPECT_EQ(client.Post("/metrics", "x", "text/plain")->status, 405);
  EXPECT_EQ(client.Put("/metrics", "x", "text/plain")->status, 405);
  EXPECT_EQ(client.Delete("/metrics")->status, 405);
  EXPECT_EQ(client.Get("/metrics")->status, 200);
}

TEST_F(HttpEndpointTest, IdleConnectionsDoNotBlockAScrape) {
  std::vector<int> idle;
  for (int i = 0; i < 12; ++i) {  // more than there are threads
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(endpoint_->port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    idle.push_back(fd);
  }
  auto client = NewClient();
  client.set_read_timeout(60);
  const auto response = client.Get("/metrics");
  ASSERT_TRUE(response);
  EXPECT_EQ(response->status, 200);
  for (const int fd : idle) close(fd);
}

TEST_F(HttpEndpointTest, RefusesAPortInUseAndABadAddress) {
  const auto taken = HttpEndpoint::Start("127.0.0.1:" + std::to_string(endpoint_->port()), {metrics_});
  EXPECT_EQ(taken.status().code(), absl::StatusCode::kUnavailable);
  for (const char* address : {"", "9500", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1"}) {
    EXPECT_EQ(HttpEndpoint::Start(address, {metrics_}).status().code(), absl::StatusCode::kInvalidArgument) << address;
  }
}

}  // namespace
}  // namespace spmmd::server
