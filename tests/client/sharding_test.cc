// Several servers: where calls go, and what a lost or draining replica costs.
#include "client/cpp/sharding.h"

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "grpcpp/ext/health_check_service_server_builder_option.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"
#include "gtest/gtest.h"
#include "proto/shard/shard.h"
#include "tests/client/fake_server.h"

namespace spmmd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::vector<std::string> kLayers = {"block0/up", "block0/down", "block1/up", "head", "a", "x-y_z.w"};

// One row of ones, whatever is asked.
grpc::Status Answer(const v1::ExecuteRequest& request, v1::ExecuteResponse* response) {
  v1::NamedOutput& output = *response->add_outputs();
  output.set_name(request.has_program() ? request.program().outputs(0).step() : "y");
  output.mutable_tensor()->set_dtype(v1::DATA_TYPE_F32);
  output.mutable_tensor()->add_shape(1);
  output.mutable_tensor()->add_shape(1);
  const float one = 1;
  output.mutable_tensor()->set_data(&one, sizeof(one));
  return grpc::Status::OK;
}

constexpr std::array<float, 2> kX = {1, 2};

class ShardsTest : public ::testing::Test {
 protected:
  ShardsTest() {
    std::vector<std::string> addresses;
    for (size_t i = 0; i < fakes_.size(); ++i) {
      fakes_[i].execute = [this, i](const v1::ExecuteRequest& request, v1::ExecuteResponse* response) {
        asked_[i].push_back(request.program().steps(0).matmul().layer().name());
        return Answer(request, response);
      };
      addresses.push_back(fakes_[i].address());
    }
    client_ = ShardedClient::Connect(addresses).value();
  }

  std::array<FakeServer, 3> fakes_;
  std::array<std::vector<std::string>, 3> asked_;
  std::unique_ptr<ShardedClient> client_;
};

TEST_F(ShardsTest, EachLayerGoesToItsShard) {
  std::array<std::vector<std::string>, 3> expected;
  for (const std::string& layer : kLayers) {
    expected[static_cast<size_t>(ShardOf(layer, 3))].push_back(layer);
    const auto result = client_->Matmul(layer, DenseRows::F32(kX, 1, 2));
    ASSERT_TRUE(result.ok()) << result.status();
  }
  EXPECT_EQ(asked_, expected);
}

TEST_F(ShardsTest, AProgramOverSeveralShardsIsRefused) {
  const auto chain = [](const char* first, const char* second) {
    return ProgramBuilder().Input("x").Matmul("h", first, "x").Matmul("y", second, "h").Output("y").Build();
  };
  const std::pair<std::string_view, DenseRows> inputs[] = {{"x", DenseRows::F32(kX, 1, 2)}};
  ASSERT_NE(client_->ShardOf("block0/up"), client_->ShardOf("head"));
  const auto refused = client_->Execute(chain("block0/up", "head"), inputs);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("several shards"));
  EXPECT_TRUE(client_->Execute(chain("block0/up", "block0/down"), inputs).ok());
}

TEST_F(ShardsTest, ListJoinsTheShardsAndShowsALayerOnce) {
  for (size_t i = 0; i < fakes_.size(); ++i) {
    fakes_[i].list_layers = [i](const v1::ListLayersRequest&, v1::ListLayersResponse* response) {
      for (const std::string& name : {std::string("both"), "own" + std::to_string(i)}) {
        v1::Layer& layer = *response->add_layers();
        layer.set_name(name);
        layer.set_version(1);
      }
      return grpc::Status::OK;
    };
  }
  const auto layers = client_->List();
  ASSERT_TRUE(layers.ok()) << layers.status();
  std::vector<std::string> names;
  for (const v1::Layer& layer : *layers) names.push_back(layer.name());
  EXPECT_THAT(names, ElementsAre("both", "own0", "own1", "own2"));
}

std::vector<std::string> LayerHeaders(const grpc::ServerContext& context) {
  std::vector<std::string> values;
  const auto [begin, end] = context.client_metadata().equal_range("spmmd-layer");
  for (auto entry = begin; entry != end; ++entry) values.emplace_back(entry->second.data(), entry->second.size());
  return values;
}

TEST_F(ShardsTest, CallsNameTheirLayerForGateways) {
  std::vector<std::string> seen;
  fakes_[0].get_layer = [&seen](grpc::ServerContext* context, const v1::GetLayerRequest&, v1::GetLayerResponse*) {
    seen = LayerHeaders(*context);
    return grpc::Status::OK;
  };
  fakes_[0].register_layer = [&seen](grpc::ServerContext* context, RegisterStream*) {
    seen = LayerHeaders(*context);
    return grpc::Status(grpc::StatusCode::ABORTED, "enough");
  };
  ASSERT_EQ(client_->ShardOf("a"), 0);
  ASSERT_TRUE(client_->Get(MakeLayerRef("a")).ok());
  EXPECT_THAT(seen, ElementsAre("a"));
  ASSERT_TRUE(client_->Of("a").Get(MakeLayerRef("a"), {.headers = {{"spmmd-layer", "b"}}}).ok());
  EXPECT_THAT(seen, ElementsAre("b")) << "what the caller says counts, and is there once";
  v1::LayerSpec spec;
  spec.set_name("a");
  EXPECT_EQ(client_->Register(spec, LayerContent::Dense(DenseRows::F32(kX, 1, 2))).status().code(),
            absl::StatusCode::kAborted);
  EXPECT_THAT(seen, ElementsAre("a"));
}

TEST(ShardedClientTest, NamesTheAddressThatIsWrong) {
  EXPECT_EQ(ShardedClient::Connect({}).status().message(), "shards: at least one");
  EXPECT_THAT(std::string(ShardedClient::Connect({"a:1", "b"}).status().message()), HasSubstr("shards[1]: address"));
}

// A server on TCP with gRPC's own health service.
class Replica final : public v1::SparseMatmul::Service {
 public:
  Replica() {
    grpc::EnableDefaultHealthCheckService(true);
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = "127.0.0.1:" + std::to_string(port);
  }
  ~Replica() override { Kill(); }

  grpc::Status Execute(grpc::ServerContext* context, const v1::ExecuteRequest* request,
                       v1::ExecuteResponse* response) override {
    ++calls;
    layers = LayerHeaders(*context);
    if (!request->has_program() && programs == 0) {
      google::rpc::ErrorInfo info;
      info.set_reason("PROGRAM_NOT_FOUND");
      return ErrorWithDetail(grpc::StatusCode::NOT_FOUND, "not registered", info);
    }
    return Answer(*request, response);
  }
  grpc::Status RegisterProgram(grpc::ServerContext* context, const v1::RegisterProgramRequest*,
                               v1::RegisterProgramResponse* response) override {
    ++programs;
    layers = LayerHeaders(*context);
    response->set_program_id(program_id);
    return grpc::Status::OK;
  }
  grpc::Status UnregisterProgram(grpc::ServerContext*, const v1::UnregisterProgramRequest*,
                                 v1::UnregisterProgramResponse*) override {
    if (programs == 0) return grpc::Status(grpc::StatusCode::NOT_FOUND, "not registered");
    --programs;
    return grpc::Status::OK;
  }

  void Drain() { server_->GetHealthCheckService()->SetServingStatus(false); }
  void Kill() { server_->Shutdown(std::chrono::system_clock::now()); }
  const std::string& address() const { return address_; }

  std::atomic<int> calls{0};
  std::atomic<int> programs{0};
  std::string program_id = "p";
  std::vector<std::string> layers;  // that the last call was said to be about

 private:
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

class ReplicasTest : public ::testing::Test {
 protected:
  ReplicasTest() : client_(Client::Connect("ipv4:" + first_.address() + "," + second_.address(), Balanced()).value()) {}

  void Call() {
    const auto result = client_->Matmul("w", DenseRows::F32(kX, 1, 2));
    ASSERT_TRUE(result.ok()) << result.status();
  }
  // Until `condition`, at most ten seconds; no call may fail meanwhile.
  template <typename Condition>
  void CallUntil(Condition condition) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!condition()) {
      ASSERT_LT(std::chrono::steady_clock::now(), end);
      ASSERT_NO_FATAL_FAILURE(Call());
    }
  }

  Replica first_;
  Replica second_;
  std::unique_ptr<Client> client_;
};

TEST_F(ReplicasTest, BothAreUsed) {
  CallUntil([&] { return first_.calls > 5 && second_.calls > 5; });
}

TEST_F(ReplicasTest, ADrainingOneIsLeftOut) {
  CallUntil([&] { return first_.calls > 5 && second_.calls > 5; });
  first_.Drain();
  int quiet = 0;  // calls in a row that the other one got
  CallUntil([&, last = first_.calls.load()]() mutable {
    quiet = first_.calls == last ? quiet + 1 : 0;
    last = first_.calls;
    return quiet > 20;
  });
}

TEST_F(ReplicasTest, ALostOneCostsNoError) {
  CallUntil([&] { return first_.calls > 5 && second_.calls > 5; });
  first_.Kill();
  for (int i = 0; i < 50; ++i) ASSERT_NO_FATAL_FAILURE(Call());
}

class ProgramsTest : public ::testing::Test {
 protected:
  // One shard of two replicas.
  std::unique_ptr<ShardedClient> Connect() {
    const std::string shards[] = {"ipv4:" + first_.address() + "," + second_.address()};
    return ShardedClient::Connect(shards).value();
  }
  absl::Status Run(ShardedClient& client, const ShardedProgram& program) {
    const std::pair<std::string_view, DenseRows> inputs[] = {{"x", DenseRows::F32(kX, 1, 2)}};
    return client.Execute(program, inputs).status();
  }

  const v1::Program program_ = ProgramBuilder().Input("x").Matmul("y", "w", "x").Output("y").Build();
  Replica first_;
  Replica second_;
};

TEST_F(ProgramsTest, GoToEveryReplicaAndComeBackToOneThatLostThem) {
  const auto client = Connect();
  const auto program = client->RegisterProgram(program_);
  ASSERT_TRUE(program.ok()) << program.status();
  EXPECT_EQ(program->id, "p");
  EXPECT_EQ(first_.programs, 1);
  EXPECT_EQ(second_.programs, 1);
  EXPECT_THAT(second_.layers, ElementsAre("w"));
  second_.programs = 0;  // it was restarted
  const int before = second_.calls;
  while (second_.calls < before + 2) ASSERT_TRUE(Run(*client, *program).ok());
  EXPECT_EQ(first_.programs, 1) << "no registration more than it was asked for";
  EXPECT_EQ(second_.programs, 1);
  EXPECT_TRUE(client->UnregisterProgram(*program).ok());
  EXPECT_TRUE(client->UnregisterProgram(*program).ok()) << "those that do not know it are passed over";
  EXPECT_EQ(first_.programs + second_.programs, 0);
}

TEST_F(ProgramsTest, TravelWithTheCallWhereReplicasDisagree) {
  second_.program_id = "of another version";
  const auto client = Connect();
  const auto program = client->RegisterProgram(program_);
  ASSERT_TRUE(program.ok()) << program.status();
  EXPECT_EQ(program->id, "");
  first_.programs = second_.programs = 0;
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(Run(*client, *program).ok());
}

TEST(ReplicasOfTest, SplitsListsAndResolvesNames) {
  EXPECT_THAT(ReplicasOf("ipv4:10.0.0.1:1,10.0.0.2:2").value(), ElementsAre("10.0.0.1:1", "10.0.0.2:2"));
  EXPECT_THAT(ReplicasOf("ipv6:[::1]:1,[::2]:2").value(), ElementsAre("[::1]:1", "[::2]:2"));
  EXPECT_THAT(ReplicasOf("unix:/run/s").value(), ElementsAre("unix:/run/s"));
  EXPECT_THAT(ReplicasOf("dns:///127.0.0.1:7").value(), ElementsAre("dns:///127.0.0.1:7"));
  const auto unknown = ReplicasOf("no-such-name.invalid:1");
  EXPECT_EQ(unknown.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(unknown.status().message()), HasSubstr("'no-such-name.invalid:1'"));
}

}  // namespace
}  // namespace spmmd::client
