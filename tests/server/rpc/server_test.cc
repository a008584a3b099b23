// The server around the services: health, reflection, tokens, TLS, foreign bytes, drain.
#include "server/rpc/server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "tests/server/testing/server_harness.h"

namespace spmmd::server::testing {
namespace {

using ::grpc::health::v1::Health;
using ::grpc::health::v1::HealthCheckRequest;
using ::grpc::health::v1::HealthCheckResponse;
using ::testing::AnyOf;
using ::testing::HasSubstr;

grpc::Status CheckHealth(const std::shared_ptr<grpc::Channel>& channel, const std::string& service,
                         HealthCheckResponse* response) {
  grpc::ClientContext context;
  HealthCheckRequest request;
  request.set_service(service);
  return Health::NewStub(channel)->Check(&context, request, response);
}

// One reflection request, by hand: v1alpha has no generated code here. Field 7 of the request is list_services.
std::string ListServices(const std::shared_ptr<grpc::Channel>& channel, grpc::Status* status) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  auto call = stub.PrepareCall(&context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  void* tag = nullptr;
  bool ok = false;
  call->StartCall(nullptr);
  queue.Next(&tag, &ok);
  const grpc::Slice slice(std::string("\x3a\x01*", 3));
  call->Write(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions().set_last_message(), nullptr);
  queue.Next(&tag, &ok);
  grpc::ByteBuffer reply;
  call->Read(&reply, nullptr);
  queue.Next(&tag, &ok);
  std::string text;
  if (ok) {
    grpc::Slice all;
    if (reply.TrySingleSlice(&all).ok() || reply.DumpToSingleSlice(&all).ok()) {
      text.assign(reinterpret_cast<const char*>(all.begin()), all.size());
    }
  }
  call->Finish(status, nullptr);
  queue.Next(&tag, &ok);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  return text;
}

TEST(ServerTest, HealthFollowsTheServer) {
  auto options = MakeOptions({});
  TempDir directory;
  options->listen = {"unix:" + directory.File("s")};
  options->metrics_listen.clear();
  options->health_listen = "127.0.0.1:0";
  auto app = App::Start(*options);
  ASSERT_TRUE(app.ok()) << app.status();
  const auto main = grpc::CreateChannel((*app)->addresses()[0], grpc::InsecureChannelCredentials());
  const auto health = grpc::CreateChannel((*app)->health_address(), grpc::InsecureChannelCredentials());
  HealthCheckResponse response;
  const auto expect = [&](HealthCheckResponse::ServingStatus status) {
    for (const auto& channel : {main, health}) {
      for (const char* service : {"", "spmm.v1.SparseMatmul", "spmm.v1.LayerCatalog"}) {
        ASSERT_TRUE(CheckHealth(channel, service, &response).ok());
        EXPECT_EQ(response.status(), status) << service;
      }
    }
  };
  expect(HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(CheckHealth(main, "no.such.Service", &response).error_code(), grpc::StatusCode::NOT_FOUND);
  // Until the layers are there, calls that need them are refused, whatever they ask for.
  {
    grpc::ClientContext context;
    pb::ExecuteResponse out;
    const Failure failure =
        Explain(pb::SparseMatmul::NewStub(main)->Execute(&context, MatmulRequest("w", {1}, 1, 1), &out));
    EXPECT_EQ(failure.code, grpc::StatusCode::UNAVAILABLE);
    EXPECT_EQ(failure.reason, "STARTING");
  }
  EXPECT_EQ(ProbeHealth((*app)->health_address(), absl::Seconds(5)).code(), absl::StatusCode::kUnavailable);
  ASSERT_TRUE((*app)->LoadAndServe().ok());
  expect(HealthCheckResponse::SERVING);
  EXPECT_TRUE(ProbeHealth((*app)->health_address(), absl::Seconds(5)).ok());
  // The health endpoint serves nothing else.
  grpc::ClientContext context;
  pb::ServerInfoResponse info;
  EXPECT_EQ(pb::SparseMatmul::NewStub(health)->ServerInfo(&context, {}, &info).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  grpc::Status reflection;
  ListServices(health, &reflection);
  EXPECT_EQ(reflection.error_code(), grpc::StatusCode::UNIMPLEMENTED);

  // A watcher sees the change at once and does not hold up the drain.
  auto watch_context = std::make_unique<grpc::ClientContext>();
  auto watch = Health::NewStub(main)->Watch(watch_context.get(), HealthCheckRequest());
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVING);
  const absl::Time before = absl::Now();
  EXPECT_TRUE((*app)->Drain());
  EXPECT_LT(absl::Now() - before, options->drain_timeout);
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  while (watch->Read(&response)) {
  }
  watch->Finish();
}

TEST(ServerTest, ReflectionListsTheServicesUnlessOff) {
  TestServer on;
  grpc::Status status;
  const std::string services = ListServices(on.NewChannel(), &status);
  for (const char* name : {"spmm.v1.SparseMatmul", "spmm.v1.LayerCatalog", "grpc.health.v1.Health"}) {
    EXPECT_THAT(services, HasSubstr(name));
  }
  TestServer off([](Options* options) { options->reflection = false; });
  ListServices(off.NewChannel(), &status);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST(ServerTest, TokensGuardEveryCallButHealth) {
  TempDir directory;
  const std::string file = directory.Write("tokens", "data data-token-0123456789\nadmin admin-token-0123456789\n");
  TestServer server([&](Options* options) { options->auth_token_file = file; });
  const auto list = [&](const char* token) {
    grpc::ClientContext context;
    if (token != nullptr) context.AddMetadata("authorization", std::string("Bearer ") + token);
    pb::ListLayersResponse response;
    return server.catalog().ListLayers(&context, {}, &response).error_code();
  };
  const auto info = [&](const char* token) {
    grpc::ClientContext context;
    if (token != nullptr) context.AddMetadata("authorization", std::string("Bearer ") + token);
    pb::ServerInfoResponse response;
    return server.matmul().ServerInfo(&context, {}, &response).error_code();
  };
  EXPECT_EQ(list(nullptr), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(list("wrong-token-0123456789"), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(list("data-token-0123456789"), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(list("admin-token-0123456789"), grpc::StatusCode::OK);
  EXPECT_EQ(info(nullptr), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(info("data-token-0123456789"), grpc::StatusCode::OK);
  EXPECT_EQ(info("admin-token-0123456789"), grpc::StatusCode::OK);
  // Streams too, and before a message of theirs is looked at.
  EXPECT_EQ(server.Register(DenseSpec("w", 1, 1), {}).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  grpc::ClientContext context;
  auto stream = server.matmul().ExecuteStream(&context);
  pb::ExecuteStreamResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAUTHENTICATED);
  HealthCheckResponse health;
  EXPECT_TRUE(CheckHealth(server.NewChannel(), "", &health).ok());
}

TEST(ServerTest, ForeignBytesDoNoHarm) {
  TestServer server([](Options* options) { options->listen = {"127.0.0.1:0"}; });
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(server.address().substr(server.address().rfind(':') + 1), &port));
  const std::vector<std::string> inputs = {
      "", "GET / HTTP/1.1\r\n\r\n", std::string(100000, '\xff'), std::string(4096, '\0'),
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + std::string(1000, '\x7f'),
      // A SETTINGS frame that promises more than it holds.
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + std::string("\xff\xff\xff\x04\x00\x00\x00\x00\x00", 9)};
  for (const std::string& input : inputs) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    (void)!send(fd, input.data(), input.size(), MSG_NOSIGNAL);
    close(fd);
  }
  const TestLayer layer = TestLayer::Random(3, 3, 1);
  EXPECT_TRUE(server.Register("w", layer).ok());
}

TEST(ServerTest, AnEndpointInUseIsAnError) {
  TestServer first([](Options* options) { options->listen = {"127.0.0.1:0"}; });
  auto options = MakeOptions({});
  options->metrics_listen.clear();
  options->listen = {first.address()};
  EXPECT_THAT(std::string(App::Start(*options).status().message()), HasSubstr("in use"));
  TestServer unix_first;
  options->listen = {unix_first.address()};
  EXPECT_THAT(std::string(App::Start(*options).status().message()), HasSubstr("another process serves this socket"));
  options->listen = {"127.0.0.1:0"};
  options->metrics_listen = first.address();
  EXPECT_THAT(std::string(App::Start(*options).status().message()), HasSubstr("--metrics-listen"));
  // And the first ones still answer.
  grpc::ClientContext context;
  pb::ServerInfoResponse info;
  EXPECT_TRUE(unix_first.matmul().ServerInfo(&context, {}, &info).ok());
}

// y = W^64 x over a square layer: a request that runs for long on any machine, though its bytes are few.
pb::ExecuteRequest LongRequest(const std::string& layer, int64_t tokens, int64_t size, int seed) {
  pb::ExecuteRequest request = MatmulRequest(layer, RandomVector(tokens * size, seed), tokens, size);
  pb::Program& program = *request.mutable_program();
  for (int step = 1; step < 64; ++step) {
    pb::Step next = program.steps(0);
    next.set_name("y" + std::to_string(step));
    next.mutable_matmul()->set_input(program.steps(step - 1).name());
    *program.add_steps() = next;
  }
  program.mutable_outputs(0)->set_step("y63");
  return request;
}

TEST(ServerTest, DrainFinishesWhatRunsAndEndsIdleStreams) {
  TestServer server;
  const TestLayer layer = TestLayer::Random(1024, 1024, 1);
  ASSERT_TRUE(server.Register("w", layer).ok());
  grpc::ClientContext idle_context;
  auto idle = server.matmul().ExecuteStream(&idle_context);
  grpc::ClientContext busy_context;
  auto busy = server.matmul().ExecuteStream(&busy_context);
  pb::ExecuteStreamRequest request;
  request.set_request_id(7);
  *request.mutable_request() = LongRequest("w", 256, 1024, 2);
  const pb::ExecuteRequest unary_request = LongRequest("w", 256, 1024, 3);
  ASSERT_TRUE(busy->Write(request));
  grpc::Status unary;
  pb::ExecuteResponse unary_response;
  std::thread caller([&] { unary = server.Execute(unary_request, &unary_response); });
  ASSERT_TRUE(TestServer::Eventually([&] {
    return server.Metric("spmmd_requests_running{rpc=\"spmm.v1.SparseMatmul/Execute\"}") +
               server.Metric("spmmd_requests_running{rpc=\"spmm.v1.SparseMatmul/ExecuteStream\"}") ==
           2;
  }));
  std::thread drain([&] { EXPECT_TRUE(server.app().Drain()); });
  pb::ExecuteStreamResponse response;
  ASSERT_TRUE(busy->Read(&response));
  EXPECT_TRUE(response.has_response());
  EXPECT_EQ(response.request_id(), 7u);
  EXPECT_FALSE(busy->Read(&response));
  EXPECT_EQ(busy->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_FALSE(idle->Read(&response));
  EXPECT_EQ(idle->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  caller.join();
  EXPECT_TRUE(unary.ok()) << unary.error_message();
  drain.join();
}

// --- TLS -------------------------------------------------------------------------------------------------------------

void Shell(const std::string& command) { ASSERT_EQ(std::system((command + " >/dev/null 2>&1").c_str()), 0) << command; }

std::string Read(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// A CA, a server certificate for localhost and a client certificate, made by openssl.
class TlsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    MakeCa("ca");
    MakeCert("ca", "server", "localhost");
    MakeCert("ca", "client", "client");
  }

  void MakeCa(const std::string& name) {
    Shell("openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=" + name + " -keyout " + At(name + ".key") +
          " -out " + At(name + ".pem"));
  }

  void MakeCert(const std::string& ca, const std::string& name, const std::string& host) {
    directory_.Write(name + ".ext", "subjectAltName=DNS:" + host + "\n");
    Shell("openssl req -newkey rsa:2048 -nodes -subj /CN=" + host + " -keyout " + At(name + ".key") + " -out " +
          At(name + ".csr"));
    Shell("openssl x509 -req -days 2 -in " + At(name + ".csr") + " -CA " + At(ca + ".pem") + " -CAkey " +
          At(ca + ".key") + " -CAcreateserial -extfile " + At(name + ".ext") + " -out " + At(name + ".pem"));
  }

  std::string At(const std::string& name) const { return directory_.File(name); }

  absl::StatusOr<std::unique_ptr<App>> StartApp(bool mutual) {
    auto options = MakeOptions({});
    options->listen = {"localhost:0"};
    options->metrics_listen = "127.0.0.1:0";
    options->tls_cert = At("server.pem");
    options->tls_key = At("server.key");
    if (mutual) options->tls_client_ca = At("ca.pem");
    options->tls_reload_interval = absl::Seconds(1);
    auto app = App::Start(*options);
    if (app.ok() && !(*app)->LoadAndServe().ok()) return absl::InternalError("not serving");
    return app;
  }

  static grpc::Status Call(const App& app, const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel = grpc::CreateCustomChannel(app.addresses()[0], credentials, arguments);
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
    pb::ServerInfoResponse info;
    return pb::SparseMatmul::NewStub(channel)->ServerInfo(&context, {}, &info);
  }

  std::shared_ptr<grpc::ChannelCredentials> Trusting(const std::string& ca, const std::string& client = "") {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = Read(At(ca + ".pem"));
    if (!client.empty()) {
      options.pem_cert_chain = Read(At(client + ".pem"));
      options.pem_private_key = Read(At(client + ".key"));
    }
    return grpc::SslCredentials(options);
  }

  TempDir directory_;
};

TEST_F(TlsTest, ServesTlsAndRefusesPlainText) {
  auto app = StartApp(/*mutual=*/false);
  ASSERT_TRUE(app.ok()) << app.status();
  EXPECT_TRUE(Call(**app, Trusting("ca")).ok());
  MakeCa("other");
  EXPECT_EQ(Call(**app, Trusting("other")).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Call(**app, grpc::InsecureChannelCredentials()).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(TlsTest, MutualTlsNeedsAClientCertificate) {
  auto app = StartApp(/*mutual=*/true);
  ASSERT_TRUE(app.ok()) << app.status();
  EXPECT_TRUE(Call(**app, Trusting("ca", "client")).ok());
  EXPECT_FALSE(Call(**app, Trusting("ca")).ok());
  MakeCa("other");
  MakeCert("other", "stranger", "client");
  EXPECT_FALSE(Call(**app, Trusting("ca", "stranger")).ok());
}

TEST_F(TlsTest, ANewCertificateIsServedWithoutARestart) {
  auto app = StartApp(/*mutual=*/false);
  ASSERT_TRUE(app.ok()) << app.status();
  ASSERT_TRUE(Call(**app, Trusting("ca")).ok());
  MakeCa("next");
  MakeCert("next", "server", "localhost");
  EXPECT_TRUE(TestServer::Eventually([&] { return Call(**app, Trusting("next")).ok(); }));
  EXPECT_FALSE(Call(**app, Trusting("ca")).ok());
  // A broken file leaves the last good certificate in place.
  directory_.Write("server.pem", "not a certificate");
  absl::SleepFor(absl::Seconds(2));
  EXPECT_TRUE(Call(**app, Trusting("next")).ok());
}

TEST_F(TlsTest, BadFilesAreRefusedAtStart) {
  EXPECT_TRUE(StartApp(false).ok());
  MakeCert("ca", "other", "localhost");
  Shell("cp " + At("other.key") + " " + At("server.key"));
  EXPECT_THAT(std::string(StartApp(false).status().message()), HasSubstr("--tls-key"));
  directory_.Write("server.pem", "nonsense");
  EXPECT_THAT(std::string(StartApp(false).status().message()), HasSubstr("--tls-cert: " + At("server.pem")));
  Shell("rm " + At("server.pem"));
  EXPECT_THAT(std::string(StartApp(false).status().message()), HasSubstr("No such file"));
}

}  // namespace
}  // namespace spmmd::server::testing
