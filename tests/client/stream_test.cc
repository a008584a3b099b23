// Pipelined execution: order, errors, ends.
#include <algorithm>
#include <atomic>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "client/cpp/client.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"

namespace spmmd::client {
namespace {

using Answer = absl::StatusOr<v1::ExecuteResponse>;

v1::ExecuteRequest Tagged(const std::string& tag) {
  v1::ExecuteRequest request;
  request.set_program_id(tag);
  return request;
}

// The answer that says which request it belongs to.
v1::ExecuteStreamResponse Echo(const v1::ExecuteStreamRequest& request) {
  v1::ExecuteStreamResponse response;
  response.set_request_id(request.request_id());
  response.mutable_response()->add_outputs()->set_name(request.request().program_id());
  return response;
}

std::string TagOf(const Answer& answer) {
  return answer.ok() && answer->outputs_size() == 1 ? answer->outputs(0).name() : answer.status().ToString();
}

class StreamTest : public ::testing::Test {
 protected:
  StreamTest() : client_(Client::FromChannel(fake_.InProcessChannel())) {}

  std::unique_ptr<Stream> Open() {
    auto stream = client_->OpenStream();
    EXPECT_TRUE(stream.ok());
    return *std::move(stream);
  }

  FakeServer fake_;
  std::unique_ptr<Client> client_;
};

TEST_F(StreamTest, AnswersOutOfOrderFindTheirRequests) {
  constexpr int kRequests = 20;
  fake_.execute_stream = [](grpc::ServerContext*, ExecutionStream* stream) {
    std::vector<v1::ExecuteStreamRequest> requests(kRequests);
    for (auto& request : requests) stream->Read(&request);
    std::reverse(requests.begin(), requests.end());
    for (const auto& request : requests) stream->Write(Echo(request));
    return grpc::Status::OK;
  };
  auto stream = Open();
  std::vector<std::future<Answer>> answers;
  for (int i = 0; i < kRequests; ++i) answers.push_back(stream->Submit(Tagged("r" + std::to_string(i))));
  for (int i = 0; i < kRequests; ++i) EXPECT_EQ(TagOf(answers[i].get()), "r" + std::to_string(i));
  EXPECT_TRUE(stream->Close().ok());
}

TEST_F(StreamTest, OneFailureLeavesTheOthersAlone) {
  fake_.execute_stream = [](grpc::ServerContext*, ExecutionStream* stream) {
    v1::ExecuteStreamRequest request;
    while (stream->Read(&request)) {
      v1::ExecuteStreamResponse response = Echo(request);
      if (request.request().program_id() == "bad") {
        google::rpc::RetryInfo retry;
        retry.mutable_retry_delay()->set_seconds(2);
        google::rpc::Status details;
        details.add_details()->PackFrom(retry);
        response.mutable_error()->set_code(static_cast<int>(absl::StatusCode::kResourceExhausted));
        response.mutable_error()->set_message("queue full");
        response.mutable_error()->set_status_details(details.SerializeAsString());
      }
      if (request.request().program_id() == "empty") response.clear_result();
      stream->Write(response);
    }
    return grpc::Status::OK;
  };
  auto stream = Open();
  auto first = stream->Submit(Tagged("a"));
  auto bad = stream->Submit(Tagged("bad"));
  auto empty = stream->Submit(Tagged("empty"));
  auto last = stream->Submit(Tagged("b"));
  const absl::Status status = bad.get().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "queue full");
  EXPECT_EQ(RetryDelay(status), absl::Seconds(2));
  EXPECT_EQ(empty.get().status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(TagOf(first.get()), "a");
  EXPECT_EQ(TagOf(last.get()), "b");
  EXPECT_TRUE(stream->Close().ok());
}

grpc::Status EchoAll(grpc::ServerContext*, ExecutionStream* stream) {
  v1::ExecuteStreamRequest request;
  while (stream->Read(&request)) stream->Write(Echo(request));
  return grpc::Status::OK;
}

TEST_F(StreamTest, ManyThreadsShareAStream) {
  fake_.execute_stream = EchoAll;
  auto stream = Open();
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const std::string tag = std::to_string(t) + "." + std::to_string(i);
        if (TagOf(stream->Submit(Tagged(tag)).get()) == tag) ++right;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(right, 800);
  EXPECT_TRUE(stream->Close().ok());
}

TEST_F(StreamTest, CallbacksMaySubmit) {
  fake_.execute_stream = EchoAll;
  auto stream = Open();
  absl::Notification done;
  std::string trace;
  std::function<void(int)> submit = [&](int left) {
    stream->Submit(Tagged(std::to_string(left)), [&, left](Answer answer) {
      trace += TagOf(answer);
      left == 0 ? done.Notify() : submit(left - 1);
    });
  };
  submit(9);
  done.WaitForNotification();
  EXPECT_EQ(trace, "9876543210");
}

TEST_F(StreamTest, CloseWaitsForWhatIsInFlight) {
  fake_.execute_stream = [](grpc::ServerContext*, ExecutionStream* stream) {
    std::vector<v1::ExecuteStreamRequest> requests;
    v1::ExecuteStreamRequest request;
    while (stream->Read(&request)) requests.push_back(request);  // answers only once the client has half-closed
    for (const auto& held : requests) stream->Write(Echo(held));
    return grpc::Status::OK;
  };
  auto stream = Open();
  std::atomic<int> answered{0};
  for (int i = 0; i < 50; ++i) stream->Submit(Tagged("x"), [&](Answer answer) { answered += answer.ok() ? 1 : 0; });
  EXPECT_TRUE(stream->Close().ok());
  EXPECT_EQ(answered, 50);
  EXPECT_EQ(stream->Submit(Tagged("late")).get().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(stream->Close().ok());
}

TEST_F(StreamTest, AStreamCutShortFailsEveryRequest) {
  fake_.execute_stream = [](grpc::ServerContext*, ExecutionStream* stream) {
    v1::ExecuteStreamRequest request;
    stream->Read(&request);
    stream->Write(Echo(request));
    stream->Read(&request);
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining");
  };
  auto stream = Open();
  EXPECT_EQ(TagOf(stream->Submit(Tagged("a")).get()), "a");
  auto second = stream->Submit(Tagged("b"));
  auto third = stream->Submit(Tagged("c"));
  EXPECT_EQ(second.get().status(), absl::UnavailableError("draining"));
  EXPECT_EQ(third.get().status(), absl::UnavailableError("draining"));
  EXPECT_EQ(stream->Close(), absl::UnavailableError("draining"));
  EXPECT_EQ(stream->Submit(Tagged("d")).get().status(), absl::UnavailableError("draining"));
}

TEST_F(StreamTest, AnEndWithoutAnswersIsNoSuccess) {
  fake_.execute_stream = [](grpc::ServerContext*, ExecutionStream* stream) {
    v1::ExecuteStreamRequest request;
    stream->Read(&request);
    return grpc::Status::OK;
  };
  auto stream = Open();
  EXPECT_EQ(stream->Submit(Tagged("a")).get().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(stream->Close().code(), absl::StatusCode::kUnavailable);
}

TEST_F(StreamTest, AnswersNobodyAskedForEndTheStream) {
  fake_.execute_stream = [](grpc::ServerContext* context, ExecutionStream* stream) {
    v1::ExecuteStreamRequest request;
    stream->Read(&request);
    request.set_request_id(request.request_id() + 77);
    stream->Write(Echo(request));
    while (!context->IsCancelled()) absl::SleepFor(absl::Milliseconds(2));
    return grpc::Status::OK;
  };
  auto stream = Open();
  EXPECT_EQ(stream->Submit(Tagged("a")).get().status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(stream->Close().code(), absl::StatusCode::kInternal);
}

TEST_F(StreamTest, DestructionCancels) {
  fake_.execute_stream = [](grpc::ServerContext* context, ExecutionStream*) {
    while (!context->IsCancelled()) absl::SleepFor(absl::Milliseconds(2));
    return grpc::Status::CANCELLED;
  };
  auto stream = Open();
  auto answer = stream->Submit(Tagged("never"));
  stream.reset();
  ASSERT_EQ(answer.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  EXPECT_EQ(answer.get().status().code(), absl::StatusCode::kCancelled);
}

TEST_F(StreamTest, AServerThatDiesFailsWhatIsInFlight) {
  absl::Notification reading;
  fake_.execute_stream = [&reading](grpc::ServerContext* context, ExecutionStream* stream) {
    v1::ExecuteStreamRequest request;
    stream->Read(&request);
    reading.Notify();
    while (!context->IsCancelled()) absl::SleepFor(absl::Milliseconds(2));
    return grpc::Status::CANCELLED;
  };
  auto client = Client::Connect(fake_.address());
  ASSERT_TRUE(client.ok());
  auto stream = (*client)->OpenStream();
  ASSERT_TRUE(stream.ok());
  auto answer = (*stream)->Submit(Tagged("a"));
  reading.WaitForNotification();
  fake_.Kill();
  EXPECT_FALSE(answer.get().ok());
  EXPECT_FALSE((*stream)->Close().ok());
}

}  // namespace
}  // namespace spmmd::client
