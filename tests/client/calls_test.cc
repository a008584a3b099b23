// Unary calls: what is asked, what comes back, deadlines, tokens, sizes.
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "client/cpp/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"

namespace spmmd::client {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

class CallsTest : public ::testing::Test {
 protected:
  CallsTest() : client_(Client::FromChannel(fake_.InProcessChannel())) {}

  FakeServer fake_;
  std::unique_ptr<Client> client_;
};

TEST_F(CallsTest, ListJoinsPages) {
  fake_.list_layers = [](const v1::ListLayersRequest& request, v1::ListLayersResponse* response) {
    const int page = request.page_token().empty() ? 0 : std::stoi(request.page_token());
    response->add_layers()->set_name(request.name_prefix() + std::to_string(page));
    if (page < 3) response->set_next_page_token(std::to_string(page + 1));
    return grpc::Status::OK;
  };
  const auto layers = client_->List("blk.");
  ASSERT_TRUE(layers.ok()) << layers.status();
  ASSERT_THAT(*layers, SizeIs(4));
  EXPECT_EQ(layers->back().name(), "blk.3");
}

TEST_F(CallsTest, ListDoesNotLoopForever) {
  fake_.list_layers = [](const v1::ListLayersRequest&, v1::ListLayersResponse* response) {
    response->set_next_page_token("again");
    return grpc::Status::OK;
  };
  EXPECT_EQ(client_->List().status().code(), absl::StatusCode::kInternal);
}

// y = x with every element doubled: enough to see bytes travel both ways.
grpc::Status Doubled(const v1::ExecuteRequest& request, v1::ExecuteResponse* response) {
  const v1::Tensor& x = request.inputs(0).dense();
  std::vector<float> y(x.data().size() / sizeof(float));
  for (size_t i = 0; i < y.size(); ++i) y[i] = 2 * reinterpret_cast<const float*>(x.data().data())[i];
  v1::NamedOutput& output = *response->add_outputs();
  output.set_name(request.program().outputs(0).step());
  output.mutable_tensor()->set_dtype(v1::DATA_TYPE_F32);
  *output.mutable_tensor()->mutable_shape() = x.shape();
  output.mutable_tensor()->set_data(std::string(reinterpret_cast<const char*>(y.data()), y.size() * sizeof(float)));
  return grpc::Status::OK;
}

TEST_F(CallsTest, MatmulSendsOneStepAndReturnsItsOutput) {
  v1::ExecuteRequest seen;
  fake_.execute = [&seen](const v1::ExecuteRequest& request, v1::ExecuteResponse* response) {
    seen = request;
    return Doubled(request, response);
  };
  const std::vector<float> x = {1, 2, 3, 4};
  MatmulOptions options;
  options.activation = v1::ACTIVATION_GELU;
  options.activation_threshold = 0.25f;
  options.output_dtype = v1::DATA_TYPE_F32;
  options.version = 2;
  const auto result = client_->Matmul("up", DenseRows::F32(x, 2, 2), options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->y.rows, 2);
  EXPECT_THAT(result->y.As<float>(), ElementsAre(2, 4, 6, 8));
  ASSERT_EQ(seen.program().steps_size(), 1);
  const v1::Matmul& step = seen.program().steps(0).matmul();
  EXPECT_EQ(step.layer().name(), "up");
  EXPECT_EQ(step.layer().version(), 2);
  EXPECT_EQ(step.activation(), v1::ACTIVATION_GELU);
  EXPECT_EQ(step.activation_threshold(), 0.25f);
  EXPECT_EQ(step.input(), seen.program().inputs(0));
  EXPECT_EQ(seen.inputs(0).name(), seen.program().inputs(0));
}

TEST_F(CallsTest, SparseInputsKeepTheirThreeParts) {
  v1::ExecuteRequest seen;
  fake_.execute = [&seen](const v1::ExecuteRequest& request, v1::ExecuteResponse*) {
    seen = request;
    return grpc::Status::OK;
  };
  const std::vector<uint64_t> offsets = {0, 1, 2};
  const std::vector<uint32_t> indices = {7, 0};
  const std::vector<uint16_t> values = {0x3c00, 0x4000};
  const auto result = client_->Matmul(
      "up", SparseRows{v1::DATA_TYPE_F16, 2, 8, offsets, indices, AsBytes(absl::MakeConstSpan(values))});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kNotFound);  // the fake has sent no output
  const v1::SparseTensor& sparse = seen.inputs(0).sparse();
  EXPECT_EQ(sparse.shape(1), 8);
  EXPECT_EQ(sparse.row_offsets().size(), 24u);
  EXPECT_EQ(sparse.indices().size(), 8u);
  EXPECT_EQ(sparse.values(), std::string("\x00\x3c\x00\x40", 4));
}

TEST_F(CallsTest, LargeMessagesNeedNoOptions) {
  fake_.execute = Doubled;
  const std::vector<float> x(size_t{24} << 20, 1.5f);  // 96 MiB each way; gRPC's own limit is 4 MiB
  const auto program = ProgramBuilder().Input("x").Matmul("y", "up", "x").Output("y").Build();
  auto response = client_->Execute(program, {{"x", DenseRows::F32(x, 1024, 24 << 10)}});
  ASSERT_TRUE(response.ok()) << response.status();
  const auto y = TakeOutput(*response, "y");
  ASSERT_TRUE(y.ok()) << y.status();
  EXPECT_EQ(y->As<float>().size(), x.size());
  EXPECT_EQ(y->As<float>().back(), 3.0f);
}

TEST_F(CallsTest, ExecuteNamesTheInputThatIsWrong) {
  const std::vector<float> x(3);
  const auto program = ProgramBuilder().Input("x").Matmul("y", "up", "x").Output("y").Build();
  const absl::Status status = client_->Execute(program, {{"tokens", DenseRows::F32(x, 1, 4)}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("input 'tokens'"));
}

TEST_F(CallsTest, DeadlinesHold) {
  fake_.get_layer = [](grpc::ServerContext* context, const v1::GetLayerRequest&, v1::GetLayerResponse*) {
    while (!context->IsCancelled()) absl::SleepFor(absl::Milliseconds(2));
    return grpc::Status::CANCELLED;
  };
  EXPECT_EQ(client_->Get(MakeLayerRef("w"), {.timeout = absl::Milliseconds(50)}).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  ClientOptions options;
  options.timeout = absl::Milliseconds(50);
  EXPECT_EQ(Client::FromChannel(fake_.InProcessChannel(), options)->Get(MakeLayerRef("w")).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST_F(CallsTest, TokensTravelAsBearer) {
  std::string authorization;
  fake_.get_layer = [&authorization](grpc::ServerContext* context, const v1::GetLayerRequest&, v1::GetLayerResponse*) {
    const auto& metadata = context->client_metadata();
    const auto found = metadata.find("authorization");
    authorization = found == metadata.end() ? "none" : std::string(found->second.data(), found->second.size());
    return grpc::Status::OK;
  };
  ASSERT_TRUE(client_->Get(MakeLayerRef("w")).ok());
  EXPECT_EQ(authorization, "none");
  ClientOptions options;
  options.token = "s3cret";
  auto client = Client::Connect(fake_.address(), options);
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE((*client)->Get(MakeLayerRef("w")).ok());
  EXPECT_EQ(authorization, "Bearer s3cret");
}

TEST_F(CallsTest, NobodyThereIsUnavailable) {
  auto client = Client::Connect("unix:/nonexistent/socket");
  ASSERT_TRUE(client.ok());
  EXPECT_EQ((*client)->ServerInfo().status().code(), absl::StatusCode::kUnavailable);
  const absl::Status waited = (*client)->WaitUntilHealthy(absl::Milliseconds(100));
  EXPECT_EQ(waited.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(waited.message()), HasSubstr("no server answers"));
}

TEST_F(CallsTest, HealthIsWaitedFor) {
  using ::grpc::health::v1::HealthCheckResponse;
  std::atomic<int> checks{0};
  fake_.check_health = [&checks](const std::string& service, HealthCheckResponse* response) {
    if (service == "unknown") return grpc::Status(grpc::StatusCode::NOT_FOUND, "unknown service");
    response->set_status(++checks < 3 ? HealthCheckResponse::NOT_SERVING : HealthCheckResponse::SERVING);
    return grpc::Status::OK;
  };
  EXPECT_EQ(client_->CheckHealth("unknown").code(), absl::StatusCode::kNotFound);
  const absl::Status starting = client_->CheckHealth();
  EXPECT_EQ(starting.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(starting.message()), HasSubstr("NOT_SERVING"));
  EXPECT_TRUE(client_->WaitUntilHealthy(absl::Seconds(10)).ok());
  EXPECT_EQ(checks, 3);
}

}  // namespace
}  // namespace spmmd::client
