// Shared-memory regions: registration, tensors in them, whose they are and what becomes of them.
#include <dirent.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "tests/server/rpc/shared_object.h"
#include "tests/server/testing/server_harness.h"

namespace spmmd::server::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kM = 24;
constexpr int64_t kK = 40;
constexpr int64_t kN = 3;
constexpr uint64_t kXBytes = kN * kK * sizeof(float);
constexpr uint64_t kYBytes = kN * kM * sizeof(float);
constexpr uint64_t kYOffset = 4096;

void ExpectClose(const std::vector<float>& values, const std::vector<double>& expected) {
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], expected[i], 1e-3) << i;
}

class RegionTest : public ::testing::Test {
 protected:
  explicit RegionTest(const std::function<void(Options*)>& change = {})
      : server_([&](Options* options) {
          options->shared_memory = true;
          options->listen.push_back("127.0.0.1:0");
          if (change) change(options);
        }),
        layer_(TestLayer::Random(kM, kK, 1)),
        x_(RandomVector(kN * kK, 2)) {
    const grpc::Status status = server_.Register("w", layer_);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }

  static grpc::Status RegisterAt(pb::SparseMatmul::Stub& stub, const std::string& name, const std::string& key,
                                 uint64_t offset, uint64_t size) {
    pb::RegisterRegionRequest request;
    request.set_name(name);
    request.set_posix_shm(key);
    request.set_offset(offset);
    request.set_size(size);
    pb::RegisterRegionResponse response;
    grpc::ClientContext context;
    return stub.RegisterRegion(&context, request, &response);
  }
  grpc::Status RegisterRegion(const std::string& name, const std::string& key, uint64_t offset, uint64_t size) {
    return RegisterAt(server_.matmul(), name, key, offset, size);
  }
  static grpc::Status UnregisterAt(pb::SparseMatmul::Stub& stub, const std::string& name, int* removed = nullptr) {
    pb::UnregisterRegionRequest request;
    request.set_name(name);
    pb::UnregisterRegionResponse response;
    grpc::ClientContext context;
    const grpc::Status status = stub.UnregisterRegion(&context, request, &response);
    if (removed != nullptr) *removed = response.removed_regions();
    return status;
  }

  static void SetSlice(pb::RegionSlice* slice, const std::string& region, uint64_t offset, uint64_t size) {
    slice->set_region(region);
    slice->set_offset(offset);
    slice->set_size(size);
  }
  // x at the region's start, y at kYOffset.
  pb::ExecuteRequest SharedRequest(const std::string& region) {
    pb::ExecuteRequest request = MatmulRequest("w", x_, kN, kK);
    SetSlice(request.mutable_inputs(0)->mutable_dense()->mutable_region(), region, 0, kXBytes);
    SetSlice(request.mutable_program()->mutable_outputs(0)->mutable_region(), region, kYOffset, kYBytes);
    return request;
  }
  double Regions() { return server_.Metric("spmmd_shm_regions{"); }

  TestServer server_;
  TestLayer layer_;
  std::vector<float> x_;
};

TEST_F(RegionTest, InputsAndOutputsAreReadAndWrittenInPlace) {
  for (const uint64_t registered_at : {0, 4096, 64}) {
    SharedObject object(64 << 10);
    ASSERT_TRUE(RegisterRegion("r", object.key(), registered_at, 32 << 10).ok());
    object.Write(registered_at, x_);
    pb::ExecuteResponse response;
    const grpc::Status status = server_.Execute(SharedRequest("r"), &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ExpectClose(object.Read(registered_at + kYOffset, kN * kM), layer_.Reference(x_, kN));
    ASSERT_EQ(response.outputs_size(), 1);
    const pb::Tensor& y = response.outputs(0).tensor();
    EXPECT_TRUE(y.has_region());
    EXPECT_EQ(y.region().offset(), kYOffset);
    EXPECT_EQ(y.shape(1), kM);
    EXPECT_EQ(y.dtype(), pb::DATA_TYPE_F32);
    ASSERT_TRUE(UnregisterAt(server_.matmul(), "r").ok());
  }
  EXPECT_EQ(Regions(), 0);
  EXPECT_EQ(server_.Metric("spmmd_shm_bytes{"), 0);
}

TEST_F(RegionTest, SlicesOutsideARegionAreRefused) {
  // The rows of research: (offset, size) against a region of `size` bytes, registered at 0 and at 4096.
  for (const uint64_t registered_at : {0, 4096}) {
    SharedObject object(16384);
    const uint64_t size = kXBytes;  // as large as x, so that (0, size) fits exactly
    ASSERT_TRUE(RegisterRegion("r", object.key(), registered_at, size).ok());
    object.Write(registered_at, x_);
    const auto run = [&](uint64_t offset, uint64_t bytes) {
      pb::ExecuteRequest request = MatmulRequest("w", x_, kN, kK);
      SetSlice(request.mutable_inputs(0)->mutable_dense()->mutable_region(), "r", offset, bytes);
      pb::ExecuteResponse response;
      return Explain(server_.Execute(request, &response));
    };
    EXPECT_EQ(run(0, size).code, grpc::StatusCode::OK) << run(0, size).message;
    for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
             {size, 1}, {0, size + 1}, {8, UINT64_MAX - 7}, {size - 1, 2}, {UINT64_MAX, 2}}) {
      const Failure failure = run(offset, bytes);
      EXPECT_EQ(failure.code, grpc::StatusCode::INVALID_ARGUMENT) << offset << " " << bytes;
      EXPECT_THAT(failure.field, HasSubstr("inputs[0].dense.region."));
    }
    for (const uint64_t offset : {uint64_t{4}, size, UINT64_MAX - 3}) {
      const Failure failure = run(offset, size);
      EXPECT_EQ(failure.code, grpc::StatusCode::INVALID_ARGUMENT);
      EXPECT_EQ(failure.field, "inputs[0].dense.region.offset");
      EXPECT_THAT(failure.message, HasSubstr(std::to_string(size)));
    }
    ASSERT_TRUE(UnregisterAt(server_.matmul(), "r").ok());
  }
}

TEST_F(RegionTest, OverlapAndMisalignmentNameTheirField) {
  SharedObject object(64 << 10);
  ASSERT_TRUE(RegisterRegion("r", object.key(), 0, 32 << 10).ok());
  // The same bytes under another name.
  ASSERT_TRUE(RegisterRegion("alias", object.key(), 64, 16 << 10).ok());
  pb::ExecuteResponse response;
  pb::ExecuteRequest request = SharedRequest("r");
  request.mutable_program()->mutable_outputs(0)->mutable_region()->set_offset(kXBytes - 4);
  Failure failure = Explain(server_.Execute(request, &response));
  EXPECT_EQ(failure.field, "program.outputs[0].region");
  EXPECT_THAT(failure.message, HasSubstr("overlap inputs[0].dense.region"));
  SetSlice(request.mutable_program()->mutable_outputs(0)->mutable_region(), "alias", kXBytes - 68, kYBytes);
  EXPECT_EQ(Explain(server_.Execute(request, &response)).field, "program.outputs[0].region");
  request.mutable_program()->mutable_outputs(0)->mutable_region()->set_offset(kXBytes - 64);
  EXPECT_TRUE(server_.Execute(request, &response).ok());

  request = SharedRequest("r");
  *request.mutable_program()->add_outputs() = request.program().outputs(0);
  EXPECT_EQ(Explain(server_.Execute(request, &response)).field, "program.outputs[1].region");

  request = SharedRequest("r");
  request.mutable_inputs(0)->mutable_dense()->mutable_region()->set_offset(2);
  failure = Explain(server_.Execute(request, &response));
  EXPECT_EQ(failure.field, "inputs[0].dense.region.offset");
  EXPECT_THAT(failure.message, HasSubstr("aligned"));

  request = SharedRequest("r");
  request.mutable_program()->mutable_outputs(0)->mutable_region()->set_size(kYBytes - 4);
  EXPECT_EQ(Explain(server_.Execute(request, &response)).field, "program.outputs[0].region.size");
  request = SharedRequest("nobody");
  failure = Explain(server_.Execute(request, &response));
  EXPECT_EQ(failure.code, grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(failure.reason, "REGION_NOT_FOUND");
}

TEST_F(RegionTest, OutputsOfARegisteredProgramGoWhereTheRequestSays) {
  SharedObject object(64 << 10);
  ASSERT_TRUE(RegisterRegion("r", object.key(), 0, 32 << 10).ok());
  object.Write(0, x_);
  pb::RegisterProgramRequest program;
  *program.mutable_program() = SharedRequest("r").program();  // y at kYOffset
  pb::RegisterProgramResponse registered;
  grpc::ClientContext context;
  ASSERT_TRUE(server_.matmul().RegisterProgram(&context, program, &registered).ok());
  pb::ExecuteRequest request = SharedRequest("r");
  request.set_program_id(registered.program_id());
  pb::ExecuteResponse response;
  ASSERT_TRUE(server_.Execute(request, &response).ok());
  ExpectClose(object.Read(kYOffset, kN * kM), layer_.Reference(x_, kN));

  pb::OutputSpec* output = request.add_outputs();
  output->set_step("y");
  SetSlice(output->mutable_region(), "r", 2 * kYOffset, kYBytes);
  ASSERT_TRUE(server_.Execute(request, &response).ok());
  ExpectClose(object.Read(2 * kYOffset, kN * kM), layer_.Reference(x_, kN));
  output->clear_region();  // into the response
  ASSERT_TRUE(server_.Execute(request, &response).ok());
  ExpectClose(AsFloats(response.outputs(0).tensor().data()), layer_.Reference(x_, kN));
  output->set_step("x");
  EXPECT_EQ(Explain(server_.Execute(request, &response)).field, "outputs[0].step");
  output->set_step("y");
  output->set_dtype(pb::DATA_TYPE_F16);
  EXPECT_EQ(Explain(server_.Execute(request, &response)).field, "outputs[0].dtype");
  output->set_dtype(pb::DATA_TYPE_F32);
  request.add_outputs()->set_step("y");
  EXPECT_EQ(Explain(server_.Execute(request, &response)).field, "outputs[1].dtype");
}

TEST_F(RegionTest, WhatCannotBeRegisteredIsNamed) {
  SharedObject object(8192);
  struct Case {
    const char* name;
    std::string key;
    uint64_t offset;
    uint64_t size;
    grpc::StatusCode code;
    const char* field;
  };
  const auto bad = grpc::StatusCode::INVALID_ARGUMENT;
  for (const Case& c : std::vector<Case>{
           {"", object.key(), 0, 1, bad, "name"},
           {"a b", object.key(), 0, 1, bad, "name"},
           {"r", "noslash", 0, 1, bad, "posix_shm"},
           {"r", "/a/b", 0, 1, bad, "posix_shm"},
           {"r", "/..", 0, 1, bad, "posix_shm"},
           {"r", "/", 0, 1, bad, "posix_shm"},
           {"r", "/" + std::string(300, 'x'), 0, 1, bad, "posix_shm"},
           {"r", std::string("/a\0b", 4), 0, 1, bad, "posix_shm"},
           {"r", "/spmmd-nobody-has-this", 0, 1, grpc::StatusCode::NOT_FOUND, ""},
           {"r", object.key(), 0, 0, bad, "size"},
           {"r", object.key(), 0, 8193, bad, "size"},
           {"r", object.key(), 8192, 1, bad, "size"},
           {"r", object.key(), 8193, 1, bad, "offset"},
           {"r", object.key(), 4096, UINT64_MAX - 4000, bad, "size"},
       }) {
    const Failure failure = Explain(RegisterRegion(c.name, c.key, c.offset, c.size));
    EXPECT_EQ(failure.code, c.code) << c.key << " " << c.offset << " " << c.size << ": " << failure.message;
    EXPECT_EQ(failure.field, c.field) << c.key << " " << c.offset << " " << c.size;
  }
  EXPECT_EQ(Regions(), 0);
  grpc::ClientContext context;
  pb::RegisterRegionResponse response;
  pb::RegisterRegionRequest request;
  request.set_name("r");
  request.set_size(1);
  EXPECT_EQ(Explain(server_.matmul().RegisterRegion(&context, request, &response)).field, "handle");
  request.set_cuda_ipc(std::string(64, 'h'));
  request.set_device_uuid("GPU-there-is-none");
  grpc::ClientContext cuda;
  const Failure failure = Explain(server_.matmul().RegisterRegion(&cuda, request, &response));
  EXPECT_EQ(failure.code, grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(failure.message, HasSubstr("GPU-there-is-none"));

  ASSERT_TRUE(RegisterRegion("r", object.key(), 0, 8192).ok());
  EXPECT_EQ(RegisterRegion("r", object.key(), 0, 8192).error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(UnregisterAt(server_.matmul(), "other").error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(RegionTest, NobodySeesAnotherConnectionsRegions) {
  SharedObject mine(64 << 10);
  SharedObject theirs(64 << 10);
  ASSERT_TRUE(RegisterRegion("r", mine.key(), 0, 32 << 10).ok());
  const auto channel = server_.NewChannel();
  const auto other = pb::SparseMatmul::NewStub(channel);
  ASSERT_TRUE(RegisterAt(*other, "r", theirs.key(), 0, 32 << 10).ok()) << "names are the connection's own";
  ASSERT_TRUE(RegisterAt(*other, "s", theirs.key(), 0, 32 << 10).ok());
  pb::ExecuteResponse response;
  EXPECT_EQ(server_.Execute(SharedRequest("s"), &response).error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(UnregisterAt(server_.matmul(), "s").error_code(), grpc::StatusCode::NOT_FOUND);
  int removed = 0;
  ASSERT_TRUE(UnregisterAt(*other, "", &removed).ok());
  EXPECT_EQ(removed, 2);
  mine.Write(0, x_);
  EXPECT_TRUE(server_.Execute(SharedRequest("r"), &response).ok()) << "the other's end is not ours";
  ExpectClose(mine.Read(kYOffset, kN * kM), layer_.Reference(x_, kN));
}

TEST_F(RegionTest, AConnectionsRegionsGoWithIt) {
  SharedObject object(8192);
  {
    // Without a stream: the server finds out from its sockets.
    grpc::ChannelArguments own;
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto stub = pb::SparseMatmul::NewStub(
        grpc::CreateCustomChannel(server_.app().addresses().back(), grpc::InsecureChannelCredentials(), own));
    ASSERT_TRUE(RegisterAt(*stub, "r", object.key(), 0, 8192).ok());
    absl::SleepFor(absl::Milliseconds(1500));
    EXPECT_EQ(Regions(), 1) << "the connection is still there";
  }
  EXPECT_TRUE(TestServer::Eventually([&] { return Regions() == 0; }));
}

TEST_F(RegionTest, TheEndOfTheLastStreamIsTheEndOfTheConnection) {
  SharedObject object(8192);
  const auto channel = server_.NewChannel();
  const auto stub = pb::SparseMatmul::NewStub(channel);
  grpc::ClientContext first_context;
  const auto first = stub->ExecuteStream(&first_context);
  first->WaitForInitialMetadata();  // the server has it
  grpc::ClientContext second_context;
  const auto second = stub->ExecuteStream(&second_context);
  second->WaitForInitialMetadata();
  ASSERT_TRUE(RegisterAt(*stub, "r", object.key(), 0, 8192).ok());
  first_context.TryCancel();
  first->Finish();
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_EQ(Regions(), 1) << "another stream is open";
  second_context.TryCancel();
  second->Finish();
  EXPECT_TRUE(TestServer::Eventually([&] { return Regions() == 0; }));
}

TEST_F(RegionTest, AKilledClientLeavesNothing) {
  const std::string address = server_.address();
  int fds[2];
  ASSERT_EQ(pipe(fds), 0);
  // A process of its own: this test program, run again.
  setenv("SPMMD_REGION_TEST_CLIENT", (address + "," + std::to_string(fds[1])).c_str(), 1);
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "region_test", "--gtest_filter=RegionClient.*", nullptr);
    _exit(127);
  }
  unsetenv("SPMMD_REGION_TEST_CLIENT");
  char ready = 0;
  ASSERT_EQ(read(fds[0], &ready, 1), 1);
  EXPECT_EQ(Regions(), 2);
  EXPECT_EQ(server_.Metric("spmmd_rings"), 1);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(TestServer::Eventually([&] { return Regions() == 0 && server_.Metric("spmmd_rings") == 0; }));
  EXPECT_EQ(server_.Metric("spmmd_shm_bytes{"), 0);
  close(fds[0]);
  close(fds[1]);
  pb::ExecuteResponse response;
  EXPECT_TRUE(server_.Execute(MatmulRequest("w", x_, kN, kK), &response).ok());
}

// What the killed process runs.
TEST(RegionClient, HoldsARegionAndARing) {
  const char* const setting = getenv("SPMMD_REGION_TEST_CLIENT");
  if (setting == nullptr) GTEST_SKIP() << "run by AKilledClientLeavesNothing";
  const std::string text = setting;
  const size_t comma = text.rfind(',');
  auto client = client::Client::Connect(text.substr(0, comma));
  ASSERT_TRUE(client.ok());
  auto region = (*client)->CreateRegion(8192);
  ASSERT_TRUE(region.ok()) << region.status();
  auto program =
      (*client)->RegisterProgram(client::ProgramBuilder().Input("x").Matmul("y", "w", "x").Output("y").Build());
  ASSERT_TRUE(program.ok());
  client::RingOptions options;
  options.program_ids = {*program};
  auto ring = (*client)->OpenRing(options);
  ASSERT_TRUE(ring.ok()) << ring.status();
  // Entries in flight for ever.
  const client::Ring::Tensor x{0, kK, pb::DATA_TYPE_F32};
  const client::Ring::Tensor y{4096, kM, pb::DATA_TYPE_F32};
  ASSERT_EQ(write(std::stoi(text.substr(comma + 1)), "r", 1), 1);
  while (true) {
    ASSERT_TRUE((*ring)->Execute({.rows = kN, .inputs = {&x, 1}, .outputs = {&y, 1}}).ok());
  }
}

TEST_F(RegionTest, ATruncatedObjectCostsItsRequestsOnly) {
  SharedObject object(1 << 20);
  ASSERT_TRUE(RegisterRegion("r", object.key(), 0, 1 << 20).ok());
  object.Write(0, x_);
  pb::ExecuteResponse response;
  ASSERT_TRUE(server_.Execute(SharedRequest("r"), &response).ok());
  object.Truncate(4096);
  const Failure failure = Explain(server_.Execute(SharedRequest("r"), &response));
  EXPECT_EQ(failure.code, grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(failure.reason, "REGION_BROKEN");
  EXPECT_THAT(failure.message, HasSubstr("inputs[0].dense.region"));
  ASSERT_TRUE(UnregisterAt(server_.matmul(), "r").ok());
  EXPECT_TRUE(server_.Execute(MatmulRequest("w", x_, kN, kK), &response).ok());
}

TEST_F(RegionTest, TruncationWhileRequestsRunDoesNotEndTheServer) {
  constexpr int64_t kRows = 4096;
  const uint64_t x_bytes = kRows * kK * sizeof(float);
  const uint64_t y_bytes = kRows * kM * sizeof(float);
  int broken = 0;
  for (int round = 0; round < 40; ++round) {
    SharedObject object(2 << 20);
    ASSERT_TRUE(RegisterRegion("r", object.key(), 0, 2 << 20).ok());
    pb::ExecuteRequest request = MatmulRequest("w", x_, kN, kK);
    request.mutable_inputs(0)->mutable_dense()->set_shape(0, kRows);
    SetSlice(request.mutable_inputs(0)->mutable_dense()->mutable_region(), "r", 0, x_bytes);
    SetSlice(request.mutable_program()->mutable_outputs(0)->mutable_region(), "r", 1 << 20, y_bytes);
    std::thread truncates([&] {
      absl::SleepFor(absl::Microseconds(100 * round));
      object.Truncate(4096);
    });
    pb::ExecuteResponse response;
    const Failure failure = Explain(server_.Execute(request, &response));
    truncates.join();
    EXPECT_TRUE(failure.code == grpc::StatusCode::OK || failure.reason == "REGION_BROKEN") << failure.message;
    broken += failure.code == grpc::StatusCode::OK ? 0 : 1;
    ASSERT_TRUE(UnregisterAt(server_.matmul(), "r").ok());
  }
  EXPECT_GT(broken, 0);
}

int OpenFiles() {
  int count = 0;
  DIR* const directory = opendir("/proc/self/fd");
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

int Mappings() {
  std::ifstream maps("/proc/self/maps");
  return static_cast<int>(std::count(std::istreambuf_iterator<char>(maps), {}, '\n'));
}

TEST_F(RegionTest, RegistrationsLeaveNoFilesAndNoMappings) {
  SharedObject object(1 << 20);
  const auto cycle = [&] {
    ASSERT_TRUE(RegisterRegion("r", object.key(), 4096, 65536).ok());
    ASSERT_TRUE(UnregisterAt(server_.matmul(), "r").ok());
  };
  for (int i = 0; i < 10; ++i) cycle();
  const int files = OpenFiles();
  const int mappings = Mappings();
  for (int i = 0; i < 2000; ++i) cycle();
  EXPECT_LE(OpenFiles(), files + 4);
  EXPECT_LE(Mappings(), mappings + 20);
  EXPECT_EQ(Regions(), 0);
}

TEST_F(RegionTest, TheClientMovesLargeTensorsThroughRegions) {
  constexpr int64_t kLarge = 4096;  // rows: x has 640 KiB, y 384 KiB
  const std::vector<float> x = RandomVector(kLarge * kK, 5);
  const std::vector<double> expected = layer_.Reference(x, kLarge);
  auto client = *client::Client::Connect(server_.address());
  for (int call = 0; call < 3; ++call) {
    const auto result = client->Matmul("w", client::DenseRows::F32(x, kLarge, kK));
    ASSERT_TRUE(result.ok()) << result.status();
    const absl::Span<const float> y = result->y.As<float>();
    ExpectClose({y.begin(), y.end()}, expected);
    EXPECT_EQ(Regions(), 1);
  }
  // A server that no longer knows the region: the client goes on.
  const TestLayer other = TestLayer::Random(30, kK, 8);
  ASSERT_TRUE(server_.Register("w", other).ok());
  const auto result = client->Matmul("w", client::DenseRows::F32(x, kLarge, kK));
  ASSERT_TRUE(result.ok()) << result.status();
  const absl::Span<const float> y = result->y.As<float>();
  ExpectClose({y.begin(), y.end()}, other.Reference(x, kLarge));
  client.reset();
  EXPECT_TRUE(TestServer::Eventually([&] { return Regions() == 0; }));

  client::ClientOptions options;
  options.shared_memory = false;
  client = *client::Client::Connect(server_.address(), options);
  ASSERT_TRUE(client->Matmul("w", client::DenseRows::F32(x, kLarge, kK)).ok());
  EXPECT_EQ(Regions(), 0);
}

class RegionLimitsTest : public RegionTest {
 protected:
  RegionLimitsTest()
      : RegionTest([](Options* options) {
          options->max_regions = 2;
          options->max_region_bytes = 16384;
          options->shared_memory_prefix = "/spmmd-test-";
        }) {}
};

TEST_F(RegionLimitsTest, NumberBytesAndNamesAreBounded) {
  SharedObject object(1 << 20);
  EXPECT_EQ(Explain(RegisterRegion("a", "/dev-null", 0, 1)).field, "posix_shm");
  EXPECT_THAT(Explain(RegisterRegion("a", "/dev-null", 0, 1)).message, HasSubstr("/spmmd-test-"));
  Failure failure = Explain(RegisterRegion("a", object.key(), 0, 16385));
  EXPECT_EQ(failure.code, grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(failure.reason, "TOO_LARGE");
  ASSERT_TRUE(RegisterRegion("a", object.key(), 0, 8192).ok());
  ASSERT_TRUE(RegisterRegion("b", object.key(), 0, 4096).ok());
  failure = Explain(RegisterRegion("c", object.key(), 0, 1));
  EXPECT_EQ(failure.code, grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(failure.reason, "TOO_MANY_REGIONS");
  ASSERT_TRUE(UnregisterAt(server_.matmul(), "a").ok());
  ASSERT_TRUE(RegisterRegion("c", object.key(), 0, 8192).ok());
}

TEST(RegionOffTest, SharedMemoryIsOffUnlessAllowed) {
  TestServer server;
  grpc::ClientContext context;
  pb::RegisterRegionRequest request;
  request.set_name("r");
  request.set_posix_shm("/x");
  request.set_size(1);
  pb::RegisterRegionResponse response;
  const Failure failure = Explain(server.matmul().RegisterRegion(&context, request, &response));
  EXPECT_EQ(failure.code, grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(failure.reason, "SHARED_MEMORY_OFF");
  EXPECT_THAT(failure.message, HasSubstr("--shared-memory"));
  grpc::ClientContext ring_context;
  pb::OpenRingResponse ring;
  EXPECT_EQ(Explain(server.matmul().OpenRing(&ring_context, {}, &ring)).reason, "SHARED_MEMORY_OFF");
  grpc::ClientContext info_context;
  pb::ServerInfoResponse info;
  ASSERT_TRUE(server.matmul().ServerInfo(&info_context, {}, &info).ok());
  EXPECT_EQ(info.extensions_size(), 0);
  auto client = client::Client::Connect(server.address());
  EXPECT_EQ((*client)->CreateRegion(4096).status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace spmmd::server::testing
