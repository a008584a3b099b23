// Rings: execution through shared memory, and callers that do with their memory what they please.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <ctime>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "proto/ring/ring_layout.h"
#include "tests/server/rpc/shared_object.h"
#include "tests/server/testing/server_harness.h"

namespace spmmd::server::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kM = 24;
constexpr int64_t kK = 40;

pb::Program MatmulProgram() { return client::ProgramBuilder().Input("x").Matmul("y", "w", "x").Output("y").Build(); }

class RingTest : public ::testing::Test {
 protected:
  RingTest()
      : server_([](Options* options) {
          options->shared_memory = true;
          options->max_rings = 3;
        }),
        layer_(TestLayer::Random(kM, kK, 1)) {
    const grpc::Status status = server_.Register("w", layer_);
    EXPECT_TRUE(status.ok()) << status.error_message();
    client_ = *client::Client::Connect(server_.address());
    program_ = *client_->RegisterProgram(MatmulProgram());
  }

  std::unique_ptr<client::Ring> Open(uint32_t entries = 16) {
    client::RingOptions options;
    options.program_ids = {program_};
    options.entries = entries;
    auto ring = client_->OpenRing(options);
    EXPECT_TRUE(ring.ok()) << ring.status();
    return ring.ok() ? *std::move(ring) : nullptr;
  }
  void ExpectIdle() {
    EXPECT_TRUE(TestServer::Eventually([&] {
      return server_.Metric("spmmd_requests_running{") == 0 && server_.Metric("spmmd_queue_depth{") == 0 &&
             server_.Metric("spmmd_rings") == 0 && server_.Metric("spmmd_shm_regions{") == 0;
    }));
  }
  // The server still computes.
  void ExpectAlive() {
    pb::ExecuteResponse response;
    EXPECT_TRUE(server_.Execute(MatmulRequest("w", RandomVector(kK, 9), 1, kK), &response).ok());
  }

  TestServer server_;
  TestLayer layer_;
  std::unique_ptr<client::Client> client_;
  std::string program_;
};

TEST_F(RingTest, ComputesWhatExecuteComputes) {
  {
    const auto ring = Open();
    for (const int64_t n : {0, 1, 2, 7, 33}) {
      const std::vector<float> x = RandomVector(n * kK, 10 + n);
      std::copy(x.begin(), x.end(), ring->As<float>(0, n * kK).begin());
      const client::Ring::Tensor input{0, kK, pb::DATA_TYPE_F32};
      const client::Ring::Tensor output{65536, kM, pb::DATA_TYPE_F32};
      const auto result = ring->Execute({.rows = n, .inputs = {&input, 1}, .outputs = {&output, 1}, .user_data = 77});
      ASSERT_TRUE(result.ok()) << result.status();
      ASSERT_TRUE(result->status.ok()) << result->status;
      EXPECT_EQ(result->user_data, 77);
      EXPECT_TRUE(n == 0 || result->kernel > absl::ZeroDuration());
      EXPECT_GE(result->total, result->kernel);
      const absl::Span<float> y = ring->As<float>(65536, n * kM);
      const std::vector<double> expected = layer_.Reference(x, n);
      for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(y[i], expected[i], 1e-3) << n << " " << i;
    }
  }
  EXPECT_EQ(server_.Metric("spmmd_requests_total{code=\"OK\",rpc=\"spmm.v1.SparseMatmul/Ring\"") +
                server_.Metric("spmmd_requests_total{rpc=\"spmm.v1.SparseMatmul/Ring\",code=\"OK\""),
            5);
  ExpectIdle();
}

TEST_F(RingTest, ManyInFlightEachGetTheirOwnResult) {
  constexpr int kInFlight = 16;
  const auto ring = Open(kInFlight);
  std::vector<std::vector<float>> inputs;
  for (int i = 0; i < kInFlight; ++i) {
    inputs.push_back(RandomVector(kK, i));
    std::copy(inputs[i].begin(), inputs[i].end(), ring->As<float>(i * 256, kK).begin());
  }
  std::set<uint64_t> pending;
  int answered = 0;
  for (int round = 0; round < 50; ++round) {
    for (uint64_t i = 0; i < kInFlight; ++i) {
      if (!pending.insert(i).second) continue;
      const client::Ring::Tensor x{i * 256, kK, pb::DATA_TYPE_F32};
      const client::Ring::Tensor y{65536 + i * 256, kM, pb::DATA_TYPE_F32};
      ASSERT_TRUE(ring->Submit({.rows = 1, .inputs = {&x, 1}, .outputs = {&y, 1}, .user_data = i}).ok());
    }
    const client::Ring::Tensor x{0, kK, pb::DATA_TYPE_F32};
    EXPECT_TRUE(absl::IsResourceExhausted(ring->Submit({.rows = 1, .inputs = {&x, 1}, .outputs = {&x, 1}})));
    for (int take = 0; take <= round % kInFlight; ++take) {
      const auto result = ring->Wait();
      ASSERT_TRUE(result.ok() && result->status.ok()) << result.status();
      ASSERT_EQ(pending.erase(result->user_data), 1u);
      const absl::Span<float> got = ring->As<float>(65536 + result->user_data * 256, kM);
      const std::vector<double> expected = layer_.Reference(inputs[result->user_data], 1);
      for (int64_t m = 0; m < kM; ++m) ASSERT_NEAR(got[m], expected[m], 1e-3);
      ++answered;
    }
  }
  EXPECT_GT(answered, 300);
}

TEST_F(RingTest, WrongEntriesGetTheErrorsOfExecute) {
  const auto ring = Open();
  const client::Ring::Tensor x{0, kK, pb::DATA_TYPE_F32};
  const client::Ring::Tensor y{65536, kM, pb::DATA_TYPE_F32};
  const auto run = [&](client::Ring::Entry entry) {
    auto result = ring->Execute(entry);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? result->status : result.status();
  };
  const auto expect = [&](const client::Ring::Entry& entry, const char* text) {
    const absl::Status status = run(entry);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    EXPECT_EQ(client::ErrorReason(status), "INVALID_FIELD");
  };
  const client::Ring::Tensor narrow{0, kK - 1, pb::DATA_TYPE_F32};
  const client::Ring::Tensor beyond{(1 << 20) - 4, kK, pb::DATA_TYPE_F32};
  const client::Ring::Tensor odd{2, kK, pb::DATA_TYPE_F32};
  const client::Ring::Tensor untyped{0, kK, pb::DATA_TYPE_UNSPECIFIED};
  const client::Ring::Tensor before{UINT64_MAX - 8191, kK, pb::DATA_TYPE_F32};  // wraps into the ring itself
  const client::Ring::Tensor half{65536, kM, pb::DATA_TYPE_F16};
  const client::Ring::Tensor wide{65536, kM + 1, pb::DATA_TYPE_F32};
  const client::Ring::Tensor over_x{0, kM, pb::DATA_TYPE_F32};
  const client::Ring::Tensor two[] = {x, x};
  expect({.program = 1, .rows = 1, .inputs = {&x, 1}, .outputs = {&y, 1}}, "program: 1");
  expect({.rows = 1, .inputs = {&narrow, 1}, .outputs = {&y, 1}}, "inputs[0].dense.shape[1]");
  expect({.rows = 1, .inputs = {&beyond, 1}, .outputs = {&y, 1}}, "inputs[0].dense.region.offset");
  expect({.rows = 1, .inputs = {&odd, 1}, .outputs = {&y, 1}}, "aligned");
  expect({.rows = 1, .inputs = {&untyped, 1}, .outputs = {&y, 1}}, "inputs[0].dtype");
  expect({.rows = 1, .inputs = {&before, 1}, .outputs = {&y, 1}}, "overlap the ring");
  expect({.rows = 1, .inputs = {&x, 1}, .outputs = {&before, 1}}, "overlap the ring");
  expect({.rows = 1, .inputs = {&x, 1}, .outputs = {&half, 1}}, "outputs[0].dtype");
  expect({.rows = 1, .inputs = {&x, 1}, .outputs = {&wide, 1}}, "outputs[0].region.size");
  expect({.rows = 1, .inputs = {&x, 1}, .outputs = {&over_x, 1}}, "overlap inputs[0]");
  expect({.rows = 1, .inputs = two, .outputs = {&y, 1}}, "inputs: 2 given");
  expect({.rows = 1, .inputs = {&x, 1}, .outputs = {}}, "outputs: 0 given");
  expect({.rows = 1 << 20, .inputs = {&x, 1}, .outputs = {&y, 1}}, "tokens");
  expect({.rows = 1, .inputs = {&x, 1}, .outputs = {&y, 1}, .priority = static_cast<pb::Priority>(9)}, "priority");
  EXPECT_EQ(run({.rows = 1, .inputs = {&x, 1}, .outputs = {&y, 1}, .timeout = absl::ZeroDuration()}).code(),
            absl::StatusCode::kDeadlineExceeded);
  // The ring goes on, and says when a program's layer is gone.
  EXPECT_TRUE(run({.rows = 1, .inputs = {&x, 1}, .outputs = {&y, 1}}).ok());
  ASSERT_TRUE(client_->Unregister(client::MakeLayerRef("w")).ok());
  EXPECT_EQ(client::ErrorReason(run({.rows = 1, .inputs = {&x, 1}, .outputs = {&y, 1}})), "LAYER_NOT_FOUND");
}

TEST_F(RingTest, WhatCannotBeOpenedIsNamed) {
  SharedObject object(1 << 20);
  pb::RegisterRegionRequest region;
  region.set_name("r");
  region.set_posix_shm(object.key());
  region.set_size(512 << 10);
  region.set_offset(4096);
  grpc::ClientContext region_context;
  pb::RegisterRegionResponse registered;
  ASSERT_TRUE(server_.matmul().RegisterRegion(&region_context, region, &registered).ok());
  const auto open = [&](const std::string& name, uint64_t offset, uint32_t entries, std::vector<std::string> programs) {
    pb::OpenRingRequest request;
    request.set_region(name);
    request.set_offset(offset);
    request.set_entries(entries);
    for (const std::string& id : programs) request.add_program_ids(id);
    grpc::ClientContext context;
    pb::OpenRingResponse response;
    return Explain(server_.matmul().OpenRing(&context, request, &response));
  };
  EXPECT_EQ(open("nobody", 0, 16, {program_}).reason, "REGION_NOT_FOUND");
  EXPECT_EQ(open("r", 64, 16, {program_}).field, "offset");
  EXPECT_EQ(open("r", 512 << 10, 16, {program_}).field, "offset");
  EXPECT_EQ(open("r", UINT64_MAX - 4095, 16, {program_}).field, "offset");
  EXPECT_EQ(open("r", 0, 3, {program_}).field, "entries");
  EXPECT_EQ(open("r", 0, 1, {program_}).field, "entries");
  EXPECT_EQ(open("r", 0, 8192, {program_}).field, "entries");
  EXPECT_EQ(open("r", 0, 4096, {program_}).field, "offset") << "too large for the region";
  EXPECT_EQ(open("r", 0, 16, {}).field, "program_ids");
  EXPECT_EQ(open("r", 0, 16, {program_, "nope"}).reason, "PROGRAM_NOT_FOUND");
  EXPECT_EQ(server_.Metric("spmmd_rings"), 0);
  grpc::ClientContext context;
  pb::CloseRingRequest close;
  close.set_ring_id("nope");
  pb::CloseRingResponse closed;
  EXPECT_EQ(Explain(server_.matmul().CloseRing(&context, close, &closed)).reason, "RING_NOT_FOUND");
  const auto a = Open();
  const auto b = Open();
  const auto c = Open();
  EXPECT_EQ(open("r", 0, 16, {program_}).reason, "TOO_MANY_RINGS");
}

// A ring driven by hand, whose memory the test spoils.
class RawRing {
 public:
  RawRing(TestServer& server, const std::string& program, uint32_t entries)
      : object_(1 << 20), entries_(entries), stub_(pb::SparseMatmul::NewStub(server.NewChannel())) {
    pb::RegisterRegionRequest region;
    region.set_name("r");
    region.set_posix_shm(object_.key());
    region.set_size(1 << 20);
    grpc::ClientContext region_context;
    pb::RegisterRegionResponse registered;
    EXPECT_TRUE(stub_->RegisterRegion(&region_context, region, &registered).ok());
    pb::OpenRingRequest request;
    request.set_region("r");
    request.set_entries(entries);
    request.add_program_ids(program);
    grpc::ClientContext context;
    pb::OpenRingResponse response;
    const grpc::Status status = stub_->OpenRing(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    id_ = response.ring_id();
  }
  ring::Header& header() { return *reinterpret_cast<ring::Header*>(object_.data()); }
  ring::Submission& submission(uint32_t index) {
    return reinterpret_cast<ring::Submission*>(object_.data() + ring::kSubmissionsOffset)[index % entries_];
  }
  SharedObject& object() { return object_; }
  bool AwaitState(uint32_t state) {
    return TestServer::Eventually([&] { return ring::Load(header().state) == state; });
  }
  grpc::Status Close() {
    pb::CloseRingRequest request;
    request.set_ring_id(id_);
    grpc::ClientContext context;
    pb::CloseRingResponse response;
    return stub_->CloseRing(&context, request, &response);
  }
  grpc::Status Unregister() {
    grpc::ClientContext context;
    pb::UnregisterRegionResponse response;
    return stub_->UnregisterRegion(&context, {}, &response);
  }

 private:
  SharedObject object_;
  const uint32_t entries_;
  std::unique_ptr<pb::SparseMatmul::Stub> stub_;
  std::string id_;
};

TEST_F(RingTest, CountersThatCannotBeEndTheRing) {
  {
    RawRing raw(server_, program_, 16);
    ring::Store(raw.header().submitted, 17);
    ring::WakeIfWaiting(raw.header().server_waiting);
    EXPECT_TRUE(raw.AwaitState(ring::kFailed));
    EXPECT_TRUE(raw.Close().ok());
    EXPECT_TRUE(raw.Unregister().ok());
  }
  {
    RawRing raw(server_, program_, 16);
    ring::Store(raw.header().consumed, 5);
    ring::Store(raw.header().submitted, 1);
    ring::WakeIfWaiting(raw.header().server_waiting);
    EXPECT_TRUE(raw.AwaitState(ring::kFailed));
    EXPECT_TRUE(raw.Close().ok());
    EXPECT_TRUE(raw.Unregister().ok());
  }
  ExpectIdle();
  ExpectAlive();
}

TEST_F(RingTest, MemoryThatIsGoneEndsTheRing) {
  RawRing raw(server_, program_, 16);
  raw.object().Truncate(0);
  EXPECT_TRUE(TestServer::Eventually([&] { return server_.Metric("spmmd_rings") == 0; }));
  ExpectAlive();
  EXPECT_TRUE(raw.Close().ok());
  EXPECT_TRUE(raw.Unregister().ok());
  ExpectIdle();
}

TEST_F(RingTest, GarbageEntriesAreAnswered) {
  RawRing raw(server_, program_, 16);
  std::mt19937 random(7);
  uint32_t submitted = 0;
  int ok = 0;
  for (int round = 0; round < 900; ++round) {
    ring::Submission& entry = raw.submission(submitted);
    // A good entry, spoiled in a few bytes or all over.
    entry = {};
    entry.user_data = submitted;
    entry.rows = 1;
    entry.inputs = 1;
    entry.outputs = 1;
    entry.tensors[0] = {65536, kK, pb::DATA_TYPE_F32};
    entry.tensors[1] = {131072, kM, pb::DATA_TYPE_F32};
    auto* const bytes = reinterpret_cast<unsigned char*>(&entry);
    const size_t spoiled = round % 3 == 0 ? 0 : round % 3 == 1 ? 1 + random() % 3 : sizeof(entry);
    for (size_t i = 0; i < spoiled; ++i) {
      // Not the user data, by which the answer is told.
      bytes[8 + (spoiled == sizeof(entry) ? i % (sizeof(entry) - 8) : random() % 88)] =
          static_cast<unsigned char>(random());
    }
    ++submitted;
    ring::Store(raw.header().submitted, submitted);
    ring::WakeIfWaiting(raw.header().server_waiting);
    while (ring::Load(raw.header().completed) != submitted) {
      ASSERT_EQ(ring::Load(raw.header().state), ring::kOpen);
      sched_yield();
    }
    const auto& completion =
        reinterpret_cast<ring::Completion*>(raw.object().data() + ring::CompletionsOffset(16))[(submitted - 1) % 16];
    EXPECT_EQ(completion.user_data, submitted - 1);
    ok += completion.code == 0 ? 1 : 0;
    EXPECT_TRUE(round % 3 != 0 || completion.code == 0) << completion.code;
    ring::Store(raw.header().consumed, submitted);
  }
  EXPECT_GE(ok, 300);
  EXPECT_TRUE(raw.Close().ok());
  EXPECT_TRUE(raw.Unregister().ok());
  ExpectIdle();
}

TEST_F(RingTest, EntriesThatChangeWhileTheyAreReadDoNoHarm) {
  RawRing raw(server_, program_, 2);
  std::atomic<bool> stop{false};
  std::thread meddler([&] {
    std::mt19937 random(3);
    while (!stop.load()) {
      ring::Submission& entry = raw.submission(random() % 2);
      entry.tensors[random() % 2].offset = random() % 2 == 0 ? 65536 : uint64_t{random()} << (random() % 32);
      entry.rows = random() % 3;
      entry.tensors[0].cols = random() % 2 == 0 ? kK : random();
    }
  });
  uint32_t submitted = 0;
  for (int round = 0; round < 1500; ++round) {
    ring::Submission& entry = raw.submission(submitted);
    entry = {};
    entry.rows = 1;
    entry.inputs = 1;
    entry.outputs = 1;
    entry.tensors[0] = {65536, kK, pb::DATA_TYPE_F32};
    entry.tensors[1] = {131072, kM, pb::DATA_TYPE_F32};
    ring::Store(raw.header().submitted, ++submitted);
    ring::WakeIfWaiting(raw.header().server_waiting);
    while (ring::Load(raw.header().completed) != submitted) {
      ASSERT_EQ(ring::Load(raw.header().state), ring::kOpen);
      sched_yield();
    }
    ring::Store(raw.header().consumed, submitted);
  }
  stop.store(true);
  meddler.join();
  EXPECT_TRUE(raw.Close().ok());
  ExpectAlive();
}

TEST_F(RingTest, AnIdleRingCostsNoCore) {
  const auto ring = Open();
  absl::SleepFor(absl::Milliseconds(50));
  const std::clock_t before = std::clock();
  absl::SleepFor(absl::Milliseconds(500));
  const double busy = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  EXPECT_LT(busy, 0.25) << "seconds of CPU in half a second of nothing";
}

TEST_F(RingTest, AfterADrainEntriesAreRefusedAndTheRingCloses) {
  const auto ring = Open();
  const client::Ring::Tensor x{0, kK, pb::DATA_TYPE_F32};
  const client::Ring::Tensor y{65536, kM, pb::DATA_TYPE_F32};
  ASSERT_TRUE(ring->Execute({.rows = 1, .inputs = {&x, 1}, .outputs = {&y, 1}}).ok());
  server_.app().Drain();
  const auto result = ring->Execute({.rows = 1, .inputs = {&x, 1}, .outputs = {&y, 1}});
  const absl::Status status = result.ok() ? result->status : result.status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
}

TEST_F(RingTest, SeveralRingsRunSideBySide) {
  std::vector<std::thread> callers;
  std::atomic<int> done{0};
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&, c] {
      const auto ring = Open();
      ASSERT_NE(ring, nullptr);
      const std::vector<float> x = RandomVector(kK, 50 + c);
      std::copy(x.begin(), x.end(), ring->As<float>(0, kK).begin());
      const std::vector<double> expected = layer_.Reference(x, 1);
      const client::Ring::Tensor input{0, kK, pb::DATA_TYPE_F32};
      const client::Ring::Tensor output{65536, kM, pb::DATA_TYPE_F32};
      for (int i = 0; i < 300; ++i) {
        const auto result = ring->Execute({.rows = 1, .inputs = {&input, 1}, .outputs = {&output, 1}});
        ASSERT_TRUE(result.ok() && result->status.ok());
        for (int64_t m = 0; m < kM; ++m) ASSERT_NEAR(ring->As<float>(65536, kM)[m], expected[m], 1e-3);
        done.fetch_add(1);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(done.load(), 900);
  ExpectIdle();
}

}  // namespace
}  // namespace spmmd::server::testing
