// Execute, ExecuteStream and the registered programs on the wire.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/generic/generic_stub.h"
#include "tests/server/testing/server_harness.h"

namespace spmmd::server::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kM = 24;
constexpr int64_t kK = 40;

void ExpectClose(const pb::Tensor& tensor, const std::vector<double>& expected) {
  const std::vector<float> values = AsFloats(tensor.data());
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], expected[i], 1e-3) << i;
}

class ExecuteTest : public ::testing::Test {
 protected:
  ExecuteTest() : layer_(TestLayer::Random(kM, kK, 1)) {
    const grpc::Status status = server_.Register("w", layer_);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }

  // No call, request or byte is left anywhere.
  void ExpectIdle() {
    EXPECT_TRUE(TestServer::Eventually([&] {
      return server_.Metric("spmmd_requests_running{") == 0 && server_.Metric("spmmd_queue_depth{") == 0 &&
             server_.Metric("spmmd_queue_bytes{") == 0;
    }));
  }

  TestServer server_;
  TestLayer layer_;
};

TEST_F(ExecuteTest, ComputesForEveryNumberOfTokens) {
  for (const int64_t n : {0, 1, 2, 7, 33}) {
    const std::vector<float> x = RandomVector(n * kK, 10 + n);
    pb::ExecuteResponse response;
    const grpc::Status status = server_.Execute(MatmulRequest("w", x, n, kK), &response);
    ASSERT_TRUE(status.ok()) << n << ": " << status.error_message();
    ASSERT_EQ(response.outputs_size(), 1);
    EXPECT_EQ(response.outputs(0).name(), "y");
    EXPECT_EQ(response.outputs(0).tensor().shape(0), n);
    EXPECT_EQ(response.outputs(0).tensor().shape(1), kM);
    ExpectClose(response.outputs(0).tensor(), layer_.Reference(x, n));
  }
}

TEST_F(ExecuteTest, RegisteredProgramsRunById) {
  const std::vector<float> x = RandomVector(kK, 3);
  pb::RegisterProgramRequest program;
  *program.mutable_program() = MatmulRequest("w", x, 1, kK).program();
  pb::RegisterProgramResponse registered;
  grpc::ClientContext context;
  ASSERT_TRUE(server_.matmul().RegisterProgram(&context, program, &registered).ok());
  pb::ExecuteRequest request = MatmulRequest("w", x, 1, kK);
  request.set_program_id(registered.program_id());
  pb::ExecuteResponse response;
  const grpc::Status status = server_.Execute(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ExpectClose(response.outputs(0).tensor(), layer_.Reference(x, 1));

  pb::UnregisterProgramRequest unregister;
  unregister.set_program_id(registered.program_id());
  pb::UnregisterProgramResponse unregistered;
  grpc::ClientContext first;
  EXPECT_TRUE(server_.matmul().UnregisterProgram(&first, unregister, &unregistered).ok());
  grpc::ClientContext second;
  EXPECT_EQ(server_.matmul().UnregisterProgram(&second, unregister, &unregistered).error_code(),
            grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(server_.Execute(request, &response).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ExecuteTest, BadRequestsNameTheField) {
  struct Bad {
    const char* name;
    std::function<void(pb::ExecuteRequest*)> change;
    grpc::StatusCode code;
    const char* field;
  };
  constexpr auto kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
  const auto dense = [](pb::ExecuteRequest* r) { return r->mutable_inputs(0)->mutable_dense(); };
  const auto step = [](pb::ExecuteRequest* r) { return r->mutable_program()->mutable_steps(0); };
  const std::vector<Bad> cases = {
      {"unknown layer", [&](auto* r) { step(r)->mutable_matmul()->mutable_layer()->set_name("nope"); },
       grpc::StatusCode::NOT_FOUND, nullptr},
      {"unknown version", [&](auto* r) { step(r)->mutable_matmul()->mutable_layer()->set_version(9); },
       grpc::StatusCode::NOT_FOUND, nullptr},
      {"K mismatch",
       [&](auto* r) {
         dense(r)->set_shape(1, kK + 1);
         dense(r)->mutable_data()->append(8, '\0');
       },
       kInvalid, "inputs[0].dense.shape[1]"},
      {"unknown type", [&](auto* r) { dense(r)->set_dtype(static_cast<pb::DataType>(50)); }, kInvalid,
       "inputs[0].dense.dtype"},
      {"no type", [&](auto* r) { dense(r)->clear_dtype(); }, kInvalid, "inputs[0].dense.dtype"},
      {"negative rows", [&](auto* r) { dense(r)->set_shape(0, -1); }, kInvalid, nullptr},
      {"one dimension", [&](auto* r) { dense(r)->mutable_shape()->RemoveLast(); }, kInvalid, "inputs[0].dense.shape"},
      {"size that overflows", [&](auto* r) { dense(r)->set_shape(0, std::numeric_limits<int64_t>::max()); }, kInvalid,
       nullptr},
      {"a byte too few", [&](auto* r) { dense(r)->mutable_data()->pop_back(); }, kInvalid, "inputs[0].dense.data"},
      {"a byte too many", [&](auto* r) { dense(r)->mutable_data()->push_back('x'); }, kInvalid, "inputs[0].dense.data"},
      {"no bytes", [&](auto* r) { dense(r)->clear_data(); }, kInvalid, nullptr},
      {"no input", [&](auto* r) { r->clear_inputs(); }, kInvalid, nullptr},
      {"input twice", [&](auto* r) { *r->add_inputs() = r->inputs(0); }, kInvalid, nullptr},
      {"unknown input", [&](auto* r) { r->mutable_inputs(0)->set_name("z"); }, kInvalid, "inputs[0].name"},
      {"no program", [&](auto* r) { r->clear_program(); }, kInvalid, nullptr},
      {"step name twice", [&](auto* r) { *r->mutable_program()->add_steps() = r->program().steps(0); }, kInvalid,
       "program.steps[1].name"},
      {"step named like an input", [&](auto* r) { step(r)->set_name("x"); }, kInvalid, "program.steps[0].name"},
      {"step that reads itself", [&](auto* r) { step(r)->mutable_matmul()->set_input("y"); }, kInvalid,
       "program.steps[0].matmul.input"},
      {"step that reads a later one",
       [&](auto* r) {
         step(r)->mutable_matmul()->set_input("later");
         pb::Step later = r->program().steps(0);
         later.set_name("later");
         later.mutable_matmul()->set_input("x");
         *r->mutable_program()->add_steps() = later;
       },
       kInvalid, "program.steps[0].matmul.input"},
      {"step without operation", [&](auto* r) { step(r)->clear_matmul(); }, kInvalid, nullptr},
      {"unknown activation",
       [&](auto* r) { step(r)->mutable_matmul()->set_activation(static_cast<pb::Activation>(77)); }, kInvalid,
       "program.steps[0].matmul.activation"},
      {"threshold not a number", [&](auto* r) { step(r)->mutable_matmul()->set_activation_threshold(std::nanf("")); },
       kInvalid, "program.steps[0].matmul.activation_threshold"},
      {"unknown output", [&](auto* r) { r->mutable_program()->mutable_outputs(0)->set_step("q"); }, kInvalid,
       "program.outputs[0].step"},
      {"unknown output type",
       [&](auto* r) { r->mutable_program()->mutable_outputs(0)->set_dtype(static_cast<pb::DataType>(9)); }, kInvalid,
       "program.outputs[0].dtype"},
      {"no outputs", [&](auto* r) { r->mutable_program()->clear_outputs(); }, kInvalid, "program.outputs"},
      {"unknown program id", [&](auto* r) { r->set_program_id("feed"); }, grpc::StatusCode::NOT_FOUND, nullptr},
  };
  const std::vector<float> x = RandomVector(2 * kK, 4);
  for (const Bad& bad : cases) {
    pb::ExecuteRequest request = MatmulRequest("w", x, 2, kK);
    bad.change(&request);
    pb::ExecuteResponse response;
    const Failure failure = Explain(server_.Execute(request, &response));
    EXPECT_EQ(failure.code, bad.code) << bad.name << ": " << failure.message;
    if (bad.field != nullptr) {
      EXPECT_EQ(failure.field, bad.field) << bad.name << ": " << failure.message;
    }
    if (bad.code == kInvalid) {
      EXPECT_FALSE(failure.field.empty()) << bad.name << ": " << failure.message;
    }
    EXPECT_FALSE(failure.reason.empty()) << bad.name;
  }
  // The same connection serves on.
  pb::ExecuteResponse response;
  EXPECT_TRUE(server_.Execute(MatmulRequest("w", x, 2, kK), &response).ok());
  ExpectIdle();
}

TEST_F(ExecuteTest, SparseInputIsChecked) {
  const auto sparse = [&](const std::vector<uint32_t>& indices, const std::vector<float>& values) {
    pb::ExecuteRequest request = MatmulRequest("w", {}, 0, kK);
    pb::SparseTensor* tensor = request.mutable_inputs(0)->mutable_sparse();
    tensor->set_dtype(pb::DATA_TYPE_F32);
    tensor->add_shape(1);
    tensor->add_shape(kK);
    tensor->set_indices(reinterpret_cast<const char*>(indices.data()), indices.size() * 4);
    tensor->set_values(AsBytes(values));
    return request;
  };
  pb::ExecuteResponse response;
  const grpc::Status status = server_.Execute(sparse({1, 5, 39}, {1, -2, 3}), &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  std::vector<float> x(kK, 0);
  x[1] = 1;
  x[5] = -2;
  x[39] = 3;
  ExpectClose(response.outputs(0).tensor(), layer_.Reference(x, 1));
  // Each with the position that is wrong.
  for (const auto& [bad, at] : std::vector<std::pair<std::vector<uint32_t>, std::string>>{
           {{1, 1, 2}, "1"}, {{5, 1, 39}, "1"}, {{1, 5, 40}, "2"}, {{1, 5, 0xffffffffu}, "2"}}) {
    const Failure failure = Explain(server_.Execute(sparse(bad, {1, 2, 3}), &response));
    EXPECT_EQ(failure.code, grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(failure.field, "inputs[0].sparse.indices[" + at + "]") << failure.message;
  }
  EXPECT_EQ(Explain(server_.Execute(sparse({1, 2}, {1, 2, 3}), &response)).code, grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ExecuteTest, BytesThatAreNoMessageAreInvalid) {
  grpc::GenericStub stub(server_.NewChannel());
  const std::string garbage = "\xff\xff\xff\xff this is no protobuf";
  for (const char* method :
       {"/spmm.v1.SparseMatmul/Execute", "/spmm.v1.SparseMatmul/RegisterProgram", "/spmm.v1.SparseMatmul/ServerInfo",
        "/spmm.v1.LayerCatalog/ListLayers", "/spmm.v1.LayerCatalog/UnregisterLayer",
        "/spmm.v1.LayerCatalog/RegisterLayer", "/spmm.v1.SparseMatmul/ExecuteStream"}) {
    grpc::CompletionQueue queue;
    grpc::ClientContext context;
    auto call = stub.PrepareCall(&context, method, &queue);
    void* tag = nullptr;
    bool ok = false;
    const auto next = [&] { return queue.Next(&tag, &ok); };
    call->StartCall(nullptr);
    next();
    const grpc::Slice slice(garbage);
    call->Write(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions().set_last_message(), nullptr);
    next();
    grpc::ByteBuffer reply;
    call->Read(&reply, nullptr);
    next();
    grpc::Status status;
    call->Finish(&status, nullptr);
    next();
    queue.Shutdown();
    while (queue.Next(&tag, &ok)) {
    }
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method << ": " << status.error_message();
    EXPECT_EQ(Explain(status).reason, "MALFORMED_MESSAGE") << method;
  }
  ExpectIdle();
}

TEST_F(ExecuteTest, MessagesAboveTheLimitNameBothSizes) {
  TestServer server([](Options* options) {
    options->max_message_bytes = 256 << 10;
    options->max_chunk_bytes = 128 << 10;
  });
  ASSERT_TRUE(server.Register("w", layer_).ok());
  pb::ExecuteRequest request = MatmulRequest("w", RandomVector(2000 * kK, 5), 2000, kK);
  pb::ExecuteResponse response;
  const grpc::Status status = server.Execute(request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr(std::to_string(256 << 10)));
  EXPECT_THAT(status.error_message(), HasSubstr(std::to_string(request.ByteSizeLong())));
  EXPECT_TRUE(server.Execute(MatmulRequest("w", RandomVector(kK, 6), 1, kK), &response).ok());
}

TEST_F(ExecuteTest, ServerInfoTellsTheLimitsInForce) {
  grpc::ClientContext context;
  pb::ServerInfoResponse info;
  ASSERT_TRUE(server_.matmul().ServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.backend(), "cpu");
  EXPECT_FALSE(info.version().empty());
  EXPECT_EQ(info.limits().max_message_bytes(), 64u << 20);
  EXPECT_EQ(info.limits().max_chunk_bytes(), 4u << 20);
  EXPECT_EQ(info.limits().max_tokens(), 65536);
  EXPECT_EQ(info.limits().max_queue_depth(), 1024);
  EXPECT_GT(info.formats_size(), 0);
  EXPECT_EQ(info.shard_index(), 0);
  EXPECT_EQ(info.shard_count(), 1);
}

TEST_F(ExecuteTest, RequestIdIsEchoed) {
  grpc::ClientContext context;
  context.AddMetadata("x-request-id", "abc-123");
  pb::ServerInfoResponse info;
  ASSERT_TRUE(server_.matmul().ServerInfo(&context, {}, &info).ok());
  const auto it = context.GetServerInitialMetadata().find("x-request-id");
  ASSERT_NE(it, context.GetServerInitialMetadata().end());
  EXPECT_EQ(it->second, "abc-123");
}

TEST_F(ExecuteTest, ExpiredDeadlinesAndCancelsEndCleanly) {
  const std::vector<float> x = RandomVector(64 * kK, 7);
  for (int i = 0; i < 200; ++i) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Microseconds(20 * i)));
    pb::ExecuteResponse response;
    const grpc::Status status = server_.matmul().Execute(&context, MatmulRequest("w", x, 64, kK), &response);
    EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) << status.error_message();
  }
  for (int i = 0; i < 200; ++i) {
    grpc::ClientContext context;
    std::thread cancel([&] {
      absl::SleepFor(absl::Microseconds(5 * i));
      context.TryCancel();
    });
    pb::ExecuteResponse response;
    const grpc::Status status = server_.matmul().Execute(&context, MatmulRequest("w", x, 64, kK), &response);
    cancel.join();
    EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::CANCELLED) << status.error_message();
  }
  ExpectIdle();
  // Messages that never came whole are nobody's bad requests.
  EXPECT_EQ(server_.Metric("spmmd_requests_total{code=\"INVALID_ARGUMENT\",rpc=\"spmm.v1.SparseMatmul/Execute\"}"), 0);
}

TEST_F(ExecuteTest, SixteenClientsAtOnce) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 16; ++c) {
    threads.emplace_back([&, c] {
      const auto stub = pb::SparseMatmul::NewStub(server_.NewChannel());
      for (int i = 0; i < 25; ++i) {
        const int64_t n = 1 + (c + i) % 5;
        const std::vector<float> x = RandomVector(n * kK, 1000 * c + i);
        grpc::ClientContext context;
        pb::ExecuteResponse response;
        if (!stub->Execute(&context, MatmulRequest("w", x, n, kK), &response).ok()) {
          ++wrong;
          continue;
        }
        const std::vector<float> y = AsFloats(response.outputs(0).tensor().data());
        const std::vector<double> expected = layer_.Reference(x, n);
        for (size_t j = 0; j < expected.size(); ++j) {
          if (j >= y.size() || std::abs(y[j] - expected[j]) > 1e-3) {
            ++wrong;
            break;
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_EQ(server_.Metric("spmmd_requests_total{code=\"OK\",rpc=\"spmm.v1.SparseMatmul/Execute\"}"), 16 * 25);
  ExpectIdle();
}

class ExecuteStreamTest : public ExecuteTest {
 protected:
  using Stream = grpc::ClientReaderWriter<pb::ExecuteStreamRequest, pb::ExecuteStreamResponse>;

  static pb::ExecuteStreamRequest Request(uint64_t id, pb::ExecuteRequest request) {
    pb::ExecuteStreamRequest out;
    out.set_request_id(id);
    *out.mutable_request() = std::move(request);
    return out;
  }
};

TEST_F(ExecuteStreamTest, ManyInFlightAllAnsweredOnce) {
  grpc::ClientContext context;
  auto stream = server_.matmul().ExecuteStream(&context);
  constexpr int kRequests = 300;
  std::vector<std::vector<float>> x;
  for (int i = 0; i < kRequests; ++i) x.push_back(RandomVector((1 + i % 3) * kK, i));
  std::thread writer([&] {
    for (int i = 0; i < kRequests; ++i) stream->Write(Request(i, MatmulRequest("w", x[i], 1 + i % 3, kK)));
    stream->WritesDone();
  });
  std::set<uint64_t> seen;
  pb::ExecuteStreamResponse response;
  while (stream->Read(&response)) {
    ASSERT_TRUE(response.has_response()) << response.error().message();
    EXPECT_TRUE(seen.insert(response.request_id()).second);
    const int i = static_cast<int>(response.request_id());
    ExpectClose(response.response().outputs(0).tensor(), layer_.Reference(x[i], 1 + i % 3));
  }
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(seen.size(), static_cast<size_t>(kRequests));
  EXPECT_EQ(server_.Metric("spmmd_requests_total{code=\"OK\",rpc=\"spmm.v1.SparseMatmul/ExecuteStream\"}"), kRequests);
  ExpectIdle();
}

TEST_F(ExecuteStreamTest, AnswersOvertakeEachOther) {
  const TestLayer big = TestLayer::Random(512, 512, 9);
  ASSERT_TRUE(server_.Register("big", big).ok());
  grpc::ClientContext context;
  auto stream = server_.matmul().ExecuteStream(&context);
  // A long computation, then requests that fail without one: theirs come first.
  ASSERT_TRUE(stream->Write(Request(1, MatmulRequest("big", RandomVector(8192 * 512, 1), 8192, 512))));
  ASSERT_TRUE(stream->Write(Request(2, MatmulRequest("nope", RandomVector(kK, 1), 1, kK))));
  ASSERT_TRUE(stream->Write(Request(3, MatmulRequest("nope", RandomVector(kK, 1), 1, kK))));
  stream->WritesDone();
  std::vector<uint64_t> order;
  pb::ExecuteStreamResponse response;
  while (stream->Read(&response)) {
    order.push_back(response.request_id());
    if (response.request_id() == 1) {
      EXPECT_TRUE(response.has_response()) << response.error().message();
      continue;
    }
    EXPECT_EQ(response.error().code(), static_cast<int>(grpc::StatusCode::NOT_FOUND));
    google::rpc::Status details;
    EXPECT_TRUE(details.ParseFromString(response.error().status_details()));
    EXPECT_EQ(details.message(), response.error().message());
  }
  EXPECT_TRUE(stream->Finish().ok());
  ASSERT_EQ(order.size(), 3u);
  EXPECT_EQ(order.back(), 1u);
  ExpectIdle();
}

TEST_F(ExecuteStreamTest, AnIdInFlightCannotBeUsedAgain) {
  const TestLayer big = TestLayer::Random(512, 512, 9);
  ASSERT_TRUE(server_.Register("big", big).ok());
  grpc::ClientContext context;
  auto stream = server_.matmul().ExecuteStream(&context);
  ASSERT_TRUE(stream->Write(Request(5, MatmulRequest("big", RandomVector(8192 * 512, 1), 8192, 512))));
  ASSERT_TRUE(stream->Write(Request(5, MatmulRequest("w", RandomVector(kK, 1), 1, kK))));
  pb::ExecuteStreamResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.error().code(), static_cast<int>(grpc::StatusCode::INVALID_ARGUMENT));
  EXPECT_THAT(response.error().message(), HasSubstr("request_id"));
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_TRUE(response.has_response());
  // Answered, so free again.
  ASSERT_TRUE(stream->Write(Request(5, MatmulRequest("w", RandomVector(kK, 1), 1, kK))));
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_TRUE(response.has_response());
  stream->WritesDone();
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ExecuteStreamTest, ACallerThatDoesNotReadIsHeldBack) {
  TestServer server([](Options* options) { options->max_stream_in_flight = 4; });
  const TestLayer wide = TestLayer::Random(2048, 8, 3);
  ASSERT_TRUE(server.Register("wide", wide).ok());
  grpc::ClientContext context;
  auto stream = server.matmul().ExecuteStream(&context);
  constexpr int kRequests = 64;
  std::atomic<int> written{0};
  std::thread writer([&] {
    // 2 MiB each way back, little each way there.
    for (int i = 0; i < kRequests; ++i) {
      if (!stream->Write(Request(i, MatmulRequest("wide", RandomVector(256 * 8, i), 256, 8)))) break;
      ++written;
    }
    stream->WritesDone();
  });
  // As long as nothing is read, no more than the answers in flight, and those in the transport, are computed.
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_LT(server.Metric("spmmd_requests_total{code=\"OK\",rpc=\"spmm.v1.SparseMatmul/ExecuteStream\"}"),
            kRequests / 2);
  int answers = 0;
  pb::ExecuteStreamResponse response;
  while (stream->Read(&response)) answers += response.has_response() ? 1 : 0;
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(answers, kRequests);
}

TEST_F(ExecuteStreamTest, CancelledStreamsLeaveNothing) {
  for (int i = 0; i < 60; ++i) {
    grpc::ClientContext context;
    auto stream = server_.matmul().ExecuteStream(&context);
    for (int j = 0; j < i % 20; ++j) {
      if (!stream->Write(Request(j, MatmulRequest("w", RandomVector(64 * kK, j), 64, kK)))) break;
    }
    absl::SleepFor(absl::Microseconds(37 * (i % 10)));
    context.TryCancel();
    pb::ExecuteStreamResponse response;
    while (stream->Read(&response)) {
    }
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  ExpectIdle();
  pb::ExecuteResponse response;
  EXPECT_TRUE(server_.Execute(MatmulRequest("w", RandomVector(kK, 1), 1, kK), &response).ok());
}

TEST_F(ExecuteStreamTest, AClientThatDropsItsConnectionLeavesNothing) {
  for (int i = 0; i < 5; ++i) {
    auto channel = server_.NewChannel();
    auto stub = pb::SparseMatmul::NewStub(channel);
    auto context = std::make_unique<grpc::ClientContext>();
    auto stream = stub->ExecuteStream(context.get());
    for (int j = 0; j < 10; ++j) stream->Write(Request(j, MatmulRequest("w", RandomVector(64 * kK, j), 64, kK)));
    context->TryCancel();
    stream.reset();
    context.reset();
  }
  ExpectIdle();
}

}  // namespace
}  // namespace spmmd::server::testing
