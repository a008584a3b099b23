// The program as an operator meets it: its command line, its lines, its signals, its end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "grpcpp/grpcpp.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/server_process.h"
#include "tests/server/testing/server_harness.h"

namespace spmmd::e2e {
namespace {

namespace pb = ::spmm::v1;
using server::testing::AsFloats;
using server::testing::Chunk;
using server::testing::DenseSpec;
using server::testing::MatmulRequest;
using server::testing::RandomVector;
using server::testing::TempDir;
using server::testing::TestLayer;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

constexpr int64_t kM = 48;
constexpr int64_t kK = 64;

// Ports of its own, wherever they are free.
std::vector<std::string> Arguments(std::vector<std::string> more = {}) {
  std::vector<std::string> arguments = {"--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0", "--backend=cpu"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

std::shared_ptr<grpc::Channel> Connect(const ServerProcess& process) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(process.Field("grpc"), grpc::InsecureChannelCredentials(), arguments);
}

bool Register(const std::shared_ptr<grpc::Channel>& channel, const std::string& name, const TestLayer& layer) {
  grpc::ClientContext context;
  const auto stub = pb::LayerCatalog::NewStub(channel);
  auto stream = stub->RegisterLayer(&context);
  pb::RegisterLayerRequest request;
  *request.mutable_spec() = DenseSpec(name, layer.m, layer.k);
  stream->Write(request);
  *request.mutable_chunk() = Chunk(pb::CONTENT_PART_VALUES, 0, layer.Bytes());
  stream->Write(request);
  stream->WritesDone();
  pb::RegisterLayerResponse response;
  while (stream->Read(&response)) {
  }
  return stream->Finish().ok();
}

TEST(DaemonTest, ReadyLineAndExitOnSigterm) {
  TempDir directory;
  ServerProcess server({"--listen=127.0.0.1:0", "--listen=unix:" + directory.File("s"), "--metrics-listen=127.0.0.1:0",
                        "--backend=cpu"});
  ASSERT_TRUE(server.WaitReady()) << server.err();
  EXPECT_THAT(
      server.out(),
      MatchesRegex("spmmd ready grpc=127\\.0\\.0\\.1:[1-9][0-9]*,unix:[^ ]*/s metrics=127\\.0\\.0\\.1:[1-9][0-9]* "
                   "backend=cpu devices=1\n"));
  struct stat info {};
  EXPECT_EQ(stat(directory.File("s").c_str(), &info), 0);
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitExit(), 0) << server.err();
  EXPECT_NE(stat(directory.File("s").c_str(), &info), 0) << "the socket file is left behind";
}

TEST(DaemonTest, SigintDrainsToo) {
  ServerProcess server(Arguments({"--metrics-listen=off"}));
  ASSERT_TRUE(server.WaitReady()) << server.err();
  EXPECT_EQ(server.Field("metrics"), "off");
  server.Signal(SIGINT);
  EXPECT_EQ(server.WaitExit(), 0) << server.err();
}

TEST(DaemonTest, WrongCommandLinesExitWithTwo) {
  for (const std::string flag :
       {"--no-such-flag", "--backend=tpu", "--listen=nowhere", "--max-queue-delay=x", "--config=/does/not/exist"}) {
    ServerProcess server(Arguments({flag}));
    EXPECT_EQ(server.WaitExit(), 2) << flag;
    EXPECT_THAT(server.err(), HasSubstr(flag.substr(0, flag.find('=')))) << flag;
    EXPECT_EQ(server.out(), "") << flag;
  }
  ServerProcess help({"--help"});
  EXPECT_EQ(help.WaitExit(), 0);
  EXPECT_THAT(help.out(), HasSubstr("--drain-timeout"));
  ServerProcess version({"--version"});
  EXPECT_EQ(version.WaitExit(), 0);
  EXPECT_THAT(version.out(), MatchesRegex("spmmd [0-9]+\\.[0-9]+\\.[0-9]+\n"));
}

TEST(DaemonTest, WhatCannotStartExitsWithOneAndSaysWhy) {
  ServerProcess first(Arguments());
  ASSERT_TRUE(first.WaitReady()) << first.err();
  ServerProcess busy({"--listen=" + first.Field("grpc"), "--metrics-listen=off", "--backend=cpu"});
  EXPECT_EQ(busy.WaitExit(), 1);
  EXPECT_THAT(busy.err(), HasSubstr("--listen: " + first.Field("grpc") + ": Address already in use"));
  ServerProcess metrics({"--listen=127.0.0.1:0", "--metrics-listen=" + first.Field("metrics"), "--backend=cpu"});
  EXPECT_EQ(metrics.WaitExit(), 1);
  EXPECT_THAT(metrics.err(), HasSubstr("--metrics-listen: " + first.Field("metrics") + ": Address already in use"));
  TempDir repository;
  ServerProcess preload(Arguments({"--model-repository=" + repository.path(), "--preload=a=missing.npy"}));
  EXPECT_EQ(preload.WaitExit(), 1);
  EXPECT_THAT(preload.err(), HasSubstr("layer 'a'"));
  EXPECT_EQ(preload.out(), "");
}

TEST(DaemonTest, CudaWithoutAGpuIsAClearError) {
  ServerProcess server({"--listen=127.0.0.1:0", "--metrics-listen=off", "--backend=cuda"});
  if (server.WaitReady()) GTEST_SKIP() << "this host has a GPU";
  EXPECT_EQ(server.WaitExit(), 1);
  EXPECT_THAT(server.err(), HasSubstr("--backend=cuda"));
}

TEST(DaemonTest, ALostGpuEndsTheProcessWhenAsked) {
  TempDir directory;
  setenv("SPMMD_FAKE_CUDA_BREAK_FILE", directory.File("broken").c_str(), 1);
  ServerProcess server({"--listen=127.0.0.1:0", "--metrics-listen=off", "--backend=cuda", "--device=cuda:0",
                        "--cuda-library=" SPMMD_FAKE_CUDA_LIBRARY, "--exit-on-device-failure"});
  unsetenv("SPMMD_FAKE_CUDA_BREAK_FILE");
  ASSERT_TRUE(server.WaitReady()) << server.err();
  EXPECT_THAT(server.out(), HasSubstr("backend=cuda devices=1"));
  directory.Write("broken", "");
  EXPECT_EQ(server.WaitExit(), 1);
  EXPECT_THAT(server.err(), HasSubstr("device lost"));
}

TEST(DaemonTest, HealthCheckCommand) {
  ServerProcess server(Arguments({"--health-listen=127.0.0.1:0"}));
  ASSERT_TRUE(server.WaitReady()) << server.err();
  ServerProcess probe({"--health-check", server.Field("grpc")});
  EXPECT_EQ(probe.WaitExit(), 0);
  EXPECT_EQ(probe.out(), "SERVING\n");
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitExit(), 0);
  ServerProcess after({"--health-check", server.Field("grpc"), "--health-check-timeout=2s"});
  EXPECT_EQ(after.WaitExit(), 1);
  EXPECT_THAT(after.err(), HasSubstr(server.Field("grpc")));
}

TEST(DaemonTest, DrainUnderLoadFailsNoAcceptedCall) {
  ServerProcess server(Arguments());
  ASSERT_TRUE(server.WaitReady()) << server.err();
  const TestLayer layer = TestLayer::Random(kM, kK, 1);
  ASSERT_TRUE(Register(Connect(server), "w", layer));
  std::atomic<int> served{0};
  std::atomic<int> wrong{0};
  std::vector<std::thread> clients;
  for (int c = 0; c < 8; ++c) {
    clients.emplace_back([&, c] {
      const auto stub = pb::SparseMatmul::NewStub(Connect(server));
      const std::vector<float> x = RandomVector(4 * kK, c);
      const pb::ExecuteRequest request = MatmulRequest("w", x, 4, kK);
      const std::vector<double> expected = layer.Reference(x, 4);
      while (true) {
        grpc::ClientContext context;
        pb::ExecuteResponse response;
        const grpc::Status status = stub->Execute(&context, request, &response);
        if (!status.ok()) {
          // Refused, for it came too late; nothing else may happen to a call.
          if (status.error_code() != grpc::StatusCode::UNAVAILABLE) {
            ADD_FAILURE() << status.error_code() << ": " << status.error_message();
          }
          return;
        }
        ++served;
        const std::vector<float> y = AsFloats(response.outputs(0).tensor().data());
        for (size_t i = 0; i < expected.size(); ++i) {
          if (i >= y.size() || std::abs(y[i] - expected[i]) > 1e-3) {
            ++wrong;
            break;
          }
        }
      }
    });
  }
  while (served.load() < 200) std::this_thread::yield();
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitExit(), 0) << server.err();
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_THAT(server.err(), HasSubstr("drained"));
}

TEST(DaemonTest, DrainWaitsForAnUploadAndASecondSignalDoesNot) {
  for (const bool second : {false, true}) {
    ServerProcess server(Arguments({"--drain-timeout=10m"}));
    ASSERT_TRUE(server.WaitReady()) << server.err();
    const TestLayer layer = TestLayer::Random(kM, kK, 2);
    grpc::ClientContext context;
    const auto stub = pb::LayerCatalog::NewStub(Connect(server));
    auto stream = stub->RegisterLayer(&context);
    pb::RegisterLayerRequest request;
    *request.mutable_spec() = DenseSpec("w", kM, kK);
    ASSERT_TRUE(stream->Write(request));
    pb::RegisterLayerResponse response;
    ASSERT_TRUE(stream->Read(&response));
    server.Signal(SIGTERM);
    ASSERT_TRUE(server.WaitErr("draining")) << server.err();
    if (second) {
      server.Signal(SIGTERM);
      EXPECT_EQ(server.WaitExit(), 1);
      EXPECT_THAT(server.err(), HasSubstr("second signal"));
      context.TryCancel();
      while (stream->Read(&response)) {
      }
      stream->Finish();
      continue;
    }
    *request.mutable_chunk() = Chunk(pb::CONTENT_PART_VALUES, 0, layer.Bytes());
    EXPECT_TRUE(stream->Write(request));
    stream->WritesDone();
    while (stream->Read(&response)) {
    }
    EXPECT_TRUE(response.has_layer());
    const grpc::Status status = stream->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(server.WaitExit(), 0) << server.err();
  }
}

TEST(DaemonTest, DrainTimeoutCutsWhatDoesNotEnd) {
  ServerProcess server(Arguments({"--drain-timeout=200ms"}));
  ASSERT_TRUE(server.WaitReady()) << server.err();
  grpc::ClientContext context;
  const auto stub = pb::LayerCatalog::NewStub(Connect(server));
  auto stream = stub->RegisterLayer(&context);
  pb::RegisterLayerRequest request;
  *request.mutable_spec() = DenseSpec("w", kM, kK);
  ASSERT_TRUE(stream->Write(request));
  pb::RegisterLayerResponse response;
  ASSERT_TRUE(stream->Read(&response));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitExit(), 0) << server.err();
  EXPECT_THAT(server.err(), HasSubstr("drain timeout"));
  while (stream->Read(&response)) {
  }
  EXPECT_FALSE(stream->Finish().ok());
}

TEST(DaemonTest, SigtermWhileLoadingExitsCleanly) {
  TempDir repository;
  const TestLayer layer = TestLayer::Random(256, 256, 3);
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (256, 256), }";
  header.resize(128 - 10 - 1, ' ');
  header += '\n';
  repository.Write(
      "w.npy", std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size()) + '\0' + header + layer.Bytes());
  std::string manifest;
  for (int i = 0; i < 200; ++i) {
    // Different pruning, so that each is packed on its own.
    manifest += "layers { name: 'l" + std::to_string(i) +
                "' file { path: 'w.npy' } magnitude { sparsity: " + std::to_string(0.5 + i * 0.002) + " } }\n";
  }
  repository.Write("layers.textproto", manifest);
  ServerProcess server(Arguments({"--model-repository=" + repository.path()}));
  ASSERT_TRUE(server.WaitErr("layer loaded")) << server.err();
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitExit(), 0) << server.err();
}

TEST(DaemonTest, PreloadedLayersAreServedOnceReady) {
  TempDir repository;
  const TestLayer layer = TestLayer::Random(kM, kK, 4);
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (48, 64), }";
  header.resize(128 - 10 - 1, ' ');
  header += '\n';
  repository.Write(
      "w.npy", std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size()) + '\0' + header + layer.Bytes());
  const std::string config = repository.Write(
      "spmmd.textproto", "listen: '127.0.0.1:0'\nmetrics_listen: 'off'\nbackend: 'cpu'\nmodel_repository: '" +
                             repository.path() + "'\npreload: 'w=w.npy'\n");
  ServerProcess server({"--config=" + config});
  ASSERT_TRUE(server.WaitReady()) << server.err();
  const std::vector<float> x = RandomVector(kK, 5);
  grpc::ClientContext context;
  pb::ExecuteResponse response;
  const grpc::Status status =
      pb::SparseMatmul::NewStub(Connect(server))->Execute(&context, MatmulRequest("w", x, 1, kK), &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const std::vector<double> expected = layer.Reference(x, 1);
  const std::vector<float> y = AsFloats(response.outputs(0).tensor().data());
  ASSERT_EQ(y.size(), expected.size());
  for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], expected[i], 1e-3);
}

TEST(DaemonTest, MetricsOfTheContractAfterARealRun) {
  ServerProcess server(Arguments());
  ASSERT_TRUE(server.WaitReady()) << server.err();
  const auto channel = Connect(server);
  ASSERT_TRUE(Register(channel, "w", TestLayer::Random(kM, kK, 6)));
  const auto stub = pb::SparseMatmul::NewStub(channel);
  for (int i = 0; i < 10; ++i) {
    grpc::ClientContext context;
    pb::ExecuteResponse response;
    ASSERT_TRUE(stub->Execute(&context, MatmulRequest("w", RandomVector(kK, i), 1, kK), &response).ok());
  }
  grpc::ClientContext context;
  pb::ExecuteResponse response;
  EXPECT_FALSE(stub->Execute(&context, MatmulRequest("nope", RandomVector(kK, 1), 1, kK), &response).ok());
  const std::string text = Scrape(server.Field("metrics"));
  ASSERT_FALSE(text.empty());
  for (const char* metric : {"spmmd_build_info{",
                             "spmmd_requests_total{code=\"OK\",rpc=\"spmm.v1.SparseMatmul/Execute\"} 10",
                             "spmmd_requests_total{code=\"NOT_FOUND\",rpc=\"spmm.v1.SparseMatmul/Execute\"} 1",
                             "spmmd_requests_total{code=\"OK\",rpc=\"spmm.v1.LayerCatalog/RegisterLayer\"} 1",
                             "spmmd_request_duration_seconds_count{rpc=\"spmm.v1.SparseMatmul/Execute\"} 11",
                             "spmmd_request_queue_duration_seconds_count",
                             "spmmd_batch_tokens_count",
                             "spmmd_kernel_duration_seconds_count{device=\"cpu:0\"",
                             "spmmd_kernel_bytes_total{device=\"cpu:0\"",
                             "spmmd_kernel_flops_total{",
                             "spmmd_hbm_bandwidth_bytes_per_second{device=\"cpu:0\"}",
                             "spmmd_hbm_bandwidth_ratio{device=\"cpu:0\"}",
                             "spmmd_device_memory_bytes{device=\"cpu:0\",kind=\"weights\"}",
                             "kind=\"workspace\"",
                             "kind=\"staging\"",
                             "kind=\"free\"",
                             "kind=\"total\"",
                             "spmmd_layers{state=",
                             "spmmd_layer_bytes{format=\"",
                             "layer=\"w\"",
                             "spmmd_layer_evictions_total",
                             "spmmd_layer_loads_total{source=",
                             "spmmd_pack_duration_seconds_count{format=",
                             "spmmd_queue_depth{device=\"cpu:0\"} 0"}) {
    EXPECT_THAT(text, HasSubstr(metric));
  }
  EXPECT_THAT(text, Not(HasSubstr("spmmd_rejected_total{reason=\"QUEUE_FULL\"} 1")));
}

TEST(DaemonTest, FailedRequestsAreLoggedAsJsonWithTheirId) {
  ServerProcess server(Arguments({"--log-format=json"}));
  ASSERT_TRUE(server.WaitReady()) << server.err();
  grpc::ClientContext context;
  context.AddMetadata("x-request-id", "req-\"42\"");
  pb::ExecuteResponse response;
  EXPECT_FALSE(pb::SparseMatmul::NewStub(Connect(server))
                   ->Execute(&context, MatmulRequest("no\"layer\n", RandomVector(kK, 1), 1, kK), &response)
                   .ok());
  ASSERT_TRUE(server.WaitErr("request failed")) << server.err();
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitExit(), 0);
  std::istringstream lines(server.err());
  int failures = 0;
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    ASSERT_FALSE(object.is_discarded()) << line;
    if (object["message"] != "request failed") continue;
    ++failures;
    EXPECT_EQ(object["level"], "warning");
    EXPECT_EQ(object["rpc"], "spmm.v1.SparseMatmul/Execute");
    EXPECT_EQ(object["request_id"], "req-\"42\"");
    EXPECT_THAT(object["code"].get<std::string>(), AnyOf("NOT_FOUND", "INVALID_ARGUMENT"));
    EXPECT_THAT(object["peer"].get<std::string>(), HasSubstr("127.0.0.1"));
  }
  EXPECT_EQ(failures, 1);
}

}  // namespace
}  // namespace spmmd::e2e
