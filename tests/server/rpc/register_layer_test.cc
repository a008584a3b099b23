// RegisterLayer on the wire: what goes well, and every way in which a caller can do it wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/generic/generic_stub.h"
#include "tests/server/testing/server_harness.h"

namespace spmmd::server::testing {
namespace {

using ::testing::HasSubstr;

class RegisterLayerTest : public ::testing::Test {
 protected:
  // Nothing of an ended call is left, in memory or in view.
  void ExpectNothingLeft() {
    EXPECT_TRUE(TestServer::Eventually([&] { return server_.Metric("spmmd_requests_running{") == 0; }));
    EXPECT_TRUE(TestServer::Eventually([&] { return server_.Metric("spmmd_upload_bytes") == 0; }));
    pb::DeviceInfoResponse devices;
    grpc::ClientContext context;
    ASSERT_TRUE(server_.matmul().DeviceInfo(&context, {}, &devices).ok());
    EXPECT_EQ(devices.devices(0).memory_weights_bytes(), 0u);
    pb::ListLayersResponse layers;
    grpc::ClientContext list_context;
    ASSERT_TRUE(server_.catalog().ListLayers(&list_context, {}, &layers).ok());
    EXPECT_EQ(layers.layers_size(), 0);
  }

  TestServer server_;
};

TEST_F(RegisterLayerTest, SendsAcceptedThenTheLayer) {
  const TestLayer layer = TestLayer::Random(40, 70, 1);
  grpc::ClientContext context;
  auto stream = server_.catalog().RegisterLayer(&context);
  pb::RegisterLayerRequest request;
  *request.mutable_spec() = DenseSpec("a/b.c-d_1", 40, 70);
  ASSERT_TRUE(stream->Write(request));
  pb::RegisterLayerResponse response;
  // The answer to the spec comes before any content is sent.
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_TRUE(response.has_accepted());
  EXPECT_TRUE(response.accepted().content_needed());
  EXPECT_EQ(response.accepted().content_bytes(), layer.Bytes().size());
  EXPECT_GT(response.accepted().estimated_device_bytes(), 0u);
  *request.mutable_chunk() = Chunk(pb::CONTENT_PART_VALUES, 0, layer.Bytes());
  ASSERT_TRUE(stream->Write(request));
  stream->WritesDone();
  while (stream->Read(&response) && response.has_progress()) {
  }
  ASSERT_TRUE(response.has_layer());
  EXPECT_EQ(response.layer().name(), "a/b.c-d_1");
  EXPECT_EQ(response.layer().version(), 1);
  EXPECT_EQ(response.layer().state(), pb::LAYER_STATE_READY);
  EXPECT_EQ(response.layer().content_xxh3().size(), 32u);
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
  pb::DeviceInfoResponse devices;
  grpc::ClientContext device_context;
  ASSERT_TRUE(server_.matmul().DeviceInfo(&device_context, {}, &devices).ok());
  EXPECT_GT(devices.devices(0).memory_weights_bytes(), 0u);

  pb::UnregisterLayerRequest unregister;
  unregister.mutable_layer()->set_name("a/b.c-d_1");
  pb::UnregisterLayerResponse unregistered;
  grpc::ClientContext unregister_context;
  ASSERT_TRUE(server_.catalog().UnregisterLayer(&unregister_context, unregister, &unregistered).ok());
  EXPECT_EQ(unregistered.removed_versions(), 1);
  ExpectNothingLeft();
}

TEST_F(RegisterLayerTest, KnownContentIsNotAskedForAgain) {
  const TestLayer layer = TestLayer::Random(16, 32, 2);
  pb::Layer first;
  ASSERT_TRUE(
      server_.Register(DenseSpec("first", 16, 32), {Chunk(pb::CONTENT_PART_VALUES, 0, layer.Bytes())}, &first).ok());
  pb::LayerSpec spec = DenseSpec("second", 16, 32);
  spec.set_content_xxh3(first.content_xxh3());
  grpc::ClientContext context;
  auto stream = server_.catalog().RegisterLayer(&context);
  pb::RegisterLayerRequest request;
  *request.mutable_spec() = spec;
  ASSERT_TRUE(stream->Write(request));
  pb::RegisterLayerResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_FALSE(response.accepted().content_needed());
  while (stream->Read(&response) && response.has_progress()) {
  }
  EXPECT_EQ(response.layer().name(), "second");
  EXPECT_TRUE(stream->Finish().ok());
}

struct BadSpec {
  const char* name;
  std::function<void(pb::LayerSpec*)> change;
  grpc::StatusCode code;
  const char* field;
};

TEST_F(RegisterLayerTest, BadSpecsAreRefusedBeforeAnyContent) {
  const std::vector<BadSpec> cases = {
      {"no name", [](auto* s) { s->clear_name(); }, grpc::StatusCode::INVALID_ARGUMENT, "spec.name"},
      {"bad name", [](auto* s) { s->set_name("a b"); }, grpc::StatusCode::INVALID_ARGUMENT, "spec.name"},
      {"long name", [](auto* s) { s->set_name(std::string(257, 'a')); }, grpc::StatusCode::INVALID_ARGUMENT,
       "spec.name"},
      {"zero rows", [](auto* s) { s->set_m(0); }, grpc::StatusCode::INVALID_ARGUMENT, "spec.m"},
      {"negative rows", [](auto* s) { s->set_m(-1); }, grpc::StatusCode::INVALID_ARGUMENT, "spec.m"},
      {"zero columns", [](auto* s) { s->set_k(0); }, grpc::StatusCode::INVALID_ARGUMENT, "spec.k"},
      {"negative columns", [](auto* s) { s->set_k(std::numeric_limits<int64_t>::min()); },
       grpc::StatusCode::INVALID_ARGUMENT, "spec.k"},
      {"no type", [](auto* s) { s->clear_dtype(); }, grpc::StatusCode::INVALID_ARGUMENT, "spec.dtype"},
      {"unknown type", [](auto* s) { s->set_dtype(static_cast<pb::DataType>(99)); }, grpc::StatusCode::INVALID_ARGUMENT,
       "spec.dtype"},
      {"no encoding", [](auto* s) { s->clear_encoding(); }, grpc::StatusCode::INVALID_ARGUMENT, "spec.encoding"},
      {"unknown encoding", [](auto* s) { s->set_encoding(static_cast<pb::SourceEncoding>(77)); },
       grpc::StatusCode::INVALID_ARGUMENT, "spec.encoding"},
      {"unknown format", [](auto* s) { s->set_format(static_cast<pb::Format>(1000)); },
       grpc::StatusCode::INVALID_ARGUMENT, "spec.format"},
      {"negative nnz",
       [](auto* s) {
         s->set_encoding(pb::SOURCE_ENCODING_CSR);
         s->set_nnz(-1);
       },
       grpc::StatusCode::INVALID_ARGUMENT, "spec.nnz"},
      {"nnz beyond m * k",
       [](auto* s) {
         s->set_encoding(pb::SOURCE_ENCODING_COO);
         s->set_nnz(8 * 8 + 1);
       },
       grpc::StatusCode::INVALID_ARGUMENT, "spec.nnz"},
      {"sparsity of one", [](auto* s) { s->mutable_magnitude()->set_sparsity(1.0); },
       grpc::StatusCode::INVALID_ARGUMENT, "spec.magnitude.sparsity"},
      {"sparsity not a number", [](auto* s) { s->mutable_magnitude()->set_sparsity(std::nan("")); },
       grpc::StatusCode::INVALID_ARGUMENT, "spec.magnitude.sparsity"},
      {"one of none", [](auto* s) { s->mutable_nm()->set_n(1); }, grpc::StatusCode::INVALID_ARGUMENT, "spec.nm.m"},
      {"negative threshold", [](auto* s) { s->set_activation_threshold(-1); }, grpc::StatusCode::INVALID_ARGUMENT,
       "spec.activation_threshold"},
      {"bad hash", [](auto* s) { s->set_content_xxh3("xyz"); }, grpc::StatusCode::INVALID_ARGUMENT,
       "spec.content_xxh3"},
      {"file without a repository", [](auto* s) { s->mutable_file()->set_path("a.npy"); },
       grpc::StatusCode::FAILED_PRECONDITION, ""},
  };
  for (const BadSpec& bad : cases) {
    pb::LayerSpec spec = DenseSpec("bad", 8, 8);
    bad.change(&spec);
    const Failure failure = Explain(server_.Register(spec, {}));
    EXPECT_EQ(failure.code, bad.code) << bad.name << ": " << failure.message;
    EXPECT_EQ(failure.field, bad.field) << bad.name << ": " << failure.message;
    EXPECT_FALSE(failure.reason.empty()) << bad.name;
  }
  ExpectNothingLeft();
}

TEST_F(RegisterLayerTest, AbsurdSizesAreRefusedWithoutAllocating) {
  for (const auto& [m, k] : std::vector<std::pair<int64_t, int64_t>>{{int64_t{1} << 31, int64_t{1} << 31},
                                                                     {int64_t{1} << 62, 4},
                                                                     {std::numeric_limits<int64_t>::max(), 2},
                                                                     {int64_t{1} << 24, int64_t{1} << 24}}) {
    const Failure failure = Explain(server_.Register(DenseSpec("big", m, k), {}));
    EXPECT_EQ(failure.code, grpc::StatusCode::INVALID_ARGUMENT) << m << "x" << k << ": " << failure.message;
    EXPECT_THAT(failure.field, ::testing::StartsWith("spec.")) << failure.message;
  }
  // Within the limits of the format, beyond those of this host: refused before a chunk is taken.
  const Failure failure = Explain(server_.Register(DenseSpec("huge", int64_t{1} << 18, int64_t{1} << 18), {}));
  EXPECT_EQ(failure.code, grpc::StatusCode::RESOURCE_EXHAUSTED) << failure.message;
  for (const char* word : {"needed", "free", "limit"}) EXPECT_THAT(failure.message, HasSubstr(word));
  ExpectNothingLeft();
}

TEST_F(RegisterLayerTest, BadContentIsRefusedNamingThePlace) {
  const TestLayer layer = TestLayer::Random(8, 16, 3);
  const std::string bytes = layer.Bytes();
  const auto part = pb::CONTENT_PART_VALUES;
  const pb::LayerSpec spec = DenseSpec("bad", 8, 16);
  const auto expect = [&](const char* what, const std::vector<pb::ContentChunk>& chunks, const char* field,
                          const pb::LayerSpec& with) {
    const Failure failure = Explain(server_.Register(with, chunks));
    EXPECT_EQ(failure.code, grpc::StatusCode::INVALID_ARGUMENT) << what << ": " << failure.message;
    if (field != nullptr) {
      EXPECT_EQ(failure.field, field) << what << ": " << failure.message;
    }
  };
  expect("past the end", {Chunk(part, 0, bytes + "1234")}, "chunk.data", spec);
  expect("past the end in pieces", {Chunk(part, 0, bytes.substr(0, 100)), Chunk(part, 100, bytes.substr(96))},
         "chunk.data", spec);
  expect("after the end", {Chunk(part, 0, bytes), Chunk(part, bytes.size(), "1234")}, "chunk.data", spec);
  expect("hole", {Chunk(part, 4, bytes.substr(4))}, "chunk.offset", spec);
  expect("again", {Chunk(part, 0, bytes.substr(0, 64)), Chunk(part, 0, bytes.substr(0, 64))}, "chunk.offset", spec);
  expect("offset near 2^64", {Chunk(part, std::numeric_limits<uint64_t>::max() - 3, "12345678")}, "chunk.offset", spec);
  expect("no part", {Chunk(pb::CONTENT_PART_UNSPECIFIED, 0, "1234")}, "chunk.part", spec);
  expect("unknown part", {Chunk(static_cast<pb::ContentPart>(42), 0, "1234")}, "chunk.part", spec);
  expect("part of another encoding", {Chunk(pb::CONTENT_PART_BITMAP, 0, "1234")}, "chunk.part", spec);
  expect("truncated", {Chunk(part, 0, bytes.substr(0, bytes.size() - 1))}, nullptr, spec);
  expect("nothing at all", {}, nullptr, spec);

  std::vector<float> nan = layer.w;
  nan[5 * 16 + 3] = std::numeric_limits<float>::quiet_NaN();
  const Failure not_finite = Explain(server_.Register(spec, {Chunk(part, 0, AsBytes(nan))}));
  EXPECT_EQ(not_finite.code, grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(not_finite.message, HasSubstr("5"));
  EXPECT_THAT(not_finite.message, HasSubstr("3"));

  pb::LayerSpec hashed = spec;
  hashed.set_content_xxh3(std::string(32, '0'));
  EXPECT_EQ(server_.Register(hashed, {Chunk(part, 0, bytes)}).error_code(), grpc::StatusCode::DATA_LOSS);
  ExpectNothingLeft();
}

TEST_F(RegisterLayerTest, WrongMessagesEndTheCall) {
  const auto first = [&](const std::function<void(pb::RegisterLayerRequest*)>& fill, bool send = true) {
    grpc::ClientContext context;
    auto stream = server_.catalog().RegisterLayer(&context);
    pb::RegisterLayerRequest request;
    fill(&request);
    if (send) stream->Write(request);
    stream->WritesDone();
    pb::RegisterLayerResponse response;
    while (stream->Read(&response)) {
    }
    return Explain(stream->Finish());
  };
  Failure failure = first([](auto* r) { *r->mutable_chunk() = Chunk(pb::CONTENT_PART_VALUES, 0, "1234"); });
  EXPECT_EQ(failure.code, grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(failure.field, "payload");
  failure = first([](auto*) {});
  EXPECT_EQ(failure.code, grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(failure.field, "payload");
  failure = first([](auto*) {}, /*send=*/false);
  EXPECT_EQ(failure.code, grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(failure.field, "payload");

  grpc::ClientContext context;
  auto stream = server_.catalog().RegisterLayer(&context);
  pb::RegisterLayerRequest request;
  *request.mutable_spec() = DenseSpec("twice", 8, 8);
  ASSERT_TRUE(stream->Write(request));
  stream->Write(request);
  pb::RegisterLayerResponse response;
  while (stream->Read(&response)) {
  }
  failure = Explain(stream->Finish());
  EXPECT_EQ(failure.code, grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(failure.field, "payload");
  ExpectNothingLeft();
}

TEST_F(RegisterLayerTest, AClientThatGoesAwayLeavesNothing) {
  const TestLayer layer = TestLayer::Random(256, 256, 4);
  const std::string bytes = layer.Bytes();
  for (int i = 0; i < 8; ++i) {
    grpc::ClientContext context;
    auto stream = server_.catalog().RegisterLayer(&context);
    pb::RegisterLayerRequest request;
    *request.mutable_spec() = DenseSpec("gone", 256, 256);
    ASSERT_TRUE(stream->Write(request));
    pb::RegisterLayerResponse response;
    if (i % 2 == 0) {
      ASSERT_TRUE(stream->Read(&response));
      *request.mutable_chunk() = Chunk(pb::CONTENT_PART_VALUES, 0, bytes.substr(0, bytes.size() / 2));
      ASSERT_TRUE(stream->Write(request));
    }
    context.TryCancel();
    while (stream->Read(&response)) {
    }
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  ExpectNothingLeft();
  EXPECT_TRUE(server_.Register("gone", layer).ok());
}

TEST_F(RegisterLayerTest, AnUploadGoesOnAfterItsConnectionBroke) {
  const TestLayer layer = TestLayer::Random(256, 256, 4);
  const std::string bytes = layer.Bytes();
  pb::Layer registered;
  ASSERT_TRUE(
      server_.Register(DenseSpec("first", 256, 256), {Chunk(pb::CONTENT_PART_VALUES, 0, bytes)}, &registered).ok());
  pb::UnregisterLayerRequest unregister;
  unregister.mutable_layer()->set_name("first");
  pb::UnregisterLayerResponse removed;
  grpc::ClientContext unregister_context;
  ASSERT_TRUE(server_.catalog().UnregisterLayer(&unregister_context, unregister, &removed).ok());
  pb::RegisterLayerRequest request;
  *request.mutable_spec() = DenseSpec("again", 256, 256);
  request.mutable_spec()->set_content_xxh3(registered.content_xxh3());
  const pb::RegisterLayerRequest spec = request;
  pb::RegisterLayerResponse response;
  const size_t half = bytes.size() / 2;
  {
    grpc::ClientContext context;
    auto stream = server_.catalog().RegisterLayer(&context);
    ASSERT_TRUE(stream->Write(spec));
    ASSERT_TRUE(stream->Read(&response));
    ASSERT_TRUE(response.accepted().content_needed());
    EXPECT_EQ(response.accepted().received_size(), 0);
    *request.mutable_chunk() = Chunk(pb::CONTENT_PART_VALUES, 0, bytes.substr(0, half));
    ASSERT_TRUE(stream->Write(request));
    // Until the server has it.
    while (!response.has_progress() || response.progress().received_bytes() < half) {
      absl::SleepFor(absl::Milliseconds(110));
      *request.mutable_chunk() = Chunk(pb::CONTENT_PART_VALUES, half, "");
      ASSERT_TRUE(stream->Write(request));
      ASSERT_TRUE(stream->Read(&response));
    }
    context.TryCancel();
    while (stream->Read(&response)) {
    }
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  // The device's memory is free at once, what was received is kept.
  EXPECT_TRUE(TestServer::Eventually([&] { return server_.app().catalog().devices()[0]->budget().used() == 0; }));
  EXPECT_GE(server_.Metric("spmmd_upload_bytes"), static_cast<double>(half));
  grpc::ClientContext context;
  auto stream = server_.catalog().RegisterLayer(&context);
  ASSERT_TRUE(stream->Write(spec));
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_EQ(response.accepted().received_size(), 1);
  EXPECT_EQ(response.accepted().received(0).bytes(), half);
  *request.mutable_chunk() = Chunk(pb::CONTENT_PART_VALUES, half, bytes.substr(half));
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(stream->WritesDone());
  while (stream->Read(&response)) {
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(response.layer().content_xxh3(), registered.content_xxh3());
  EXPECT_EQ(server_.Metric("spmmd_upload_bytes"), 0);
}

TEST_F(RegisterLayerTest, TheServerServesWhileALayerIsRegistered) {
  grpc::ClientContext context;
  auto stream = server_.catalog().RegisterLayer(&context);
  pb::RegisterLayerRequest request;
  *request.mutable_spec() = DenseSpec("slow", 256, 256);
  ASSERT_TRUE(stream->Write(request));
  pb::RegisterLayerResponse response;
  ASSERT_TRUE(stream->Read(&response));
  const auto health = grpc::health::v1::Health::NewStub(server_.NewChannel());
  grpc::health::v1::HealthCheckResponse answer;
  grpc::ClientContext health_context;
  ASSERT_TRUE(health->Check(&health_context, {}, &answer).ok());
  EXPECT_EQ(answer.status(), grpc::health::v1::HealthCheckResponse::SERVING);
  const TestLayer layer = TestLayer::Random(16, 16, 4);
  EXPECT_TRUE(server_.Register("quick", layer).ok());
  context.TryCancel();
  while (stream->Read(&response)) {
  }
  EXPECT_FALSE(stream->Finish().ok());
}

TEST_F(RegisterLayerTest, ACancelAfterTheLastByteLeavesNothing) {
  // All content is there, but the caller never half-closed: it did not ask for the layer to be made.
  const TestLayer layer = TestLayer::Random(64, 64, 5);
  for (int i = 0; i < 10; ++i) {
    grpc::ClientContext context;
    auto stream = server_.catalog().RegisterLayer(&context);
    pb::RegisterLayerRequest request;
    *request.mutable_spec() = DenseSpec("w" + std::to_string(i), 64, 64);
    ASSERT_TRUE(stream->Write(request));
    pb::RegisterLayerResponse response;
    ASSERT_TRUE(stream->Read(&response));
    *request.mutable_chunk() = Chunk(pb::CONTENT_PART_VALUES, 0, layer.Bytes());
    ASSERT_TRUE(stream->Write(request));
    context.TryCancel();
    while (stream->Read(&response)) {
    }
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  ExpectNothingLeft();
}

TEST_F(RegisterLayerTest, UploadsAtOnceAreBounded) {
  TestServer server([](Options* options) { options->max_uploads = 2; });
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReaderWriter<pb::RegisterLayerRequest, pb::RegisterLayerResponse>>> open;
  pb::RegisterLayerRequest request;
  pb::RegisterLayerResponse response;
  for (int i = 0; i < 2; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    open.push_back(server.catalog().RegisterLayer(contexts.back().get()));
    *request.mutable_spec() = DenseSpec("l" + std::to_string(i), 8, 8);
    ASSERT_TRUE(open.back()->Write(request));
    ASSERT_TRUE(open.back()->Read(&response));
  }
  const TestLayer layer = TestLayer::Random(8, 8, 5);
  const Failure failure = Explain(server.Register("third", layer));
  EXPECT_EQ(failure.code, grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(failure.reason, "TOO_MANY_UPLOADS");
  for (auto& context : contexts) context->TryCancel();
  for (auto& stream : open) {
    while (stream->Read(&response)) {
    }
    stream->Finish();
  }
  EXPECT_TRUE(TestServer::Eventually([&] { return server.Register("third", layer).ok(); }));
}

// Short for a test, and long beside what a busy machine takes between two messages.
constexpr absl::Duration kShortIdle = absl::Seconds(1);

TEST(StalledUploadTest, LosesItsCallItsPlaceAndItsMemory) {
  TestServer server([](Options* options) {
    options->max_uploads = 2;
    options->upload_idle_timeout = kShortIdle;
  });
  const TestLayer layer = TestLayer::Random(256, 256, 4);
  // One that never sends its spec, one that stops in the middle of its content.
  grpc::ClientContext silent_context;
  auto silent = server.catalog().RegisterLayer(&silent_context);
  grpc::ClientContext context;
  auto stream = server.catalog().RegisterLayer(&context);
  pb::RegisterLayerRequest request;
  *request.mutable_spec() = DenseSpec("stalled", 256, 256);
  ASSERT_TRUE(stream->Write(request));
  pb::RegisterLayerResponse response;
  ASSERT_TRUE(stream->Read(&response));
  *request.mutable_chunk() = Chunk(pb::CONTENT_PART_VALUES, 0, layer.Bytes().substr(0, 1000));
  ASSERT_TRUE(stream->Write(request));
  while (stream->Read(&response)) {
  }
  const Failure failure = Explain(stream->Finish());
  EXPECT_EQ(failure.code, grpc::StatusCode::DEADLINE_EXCEEDED) << failure.message;
  EXPECT_EQ(failure.reason, "UPLOAD_IDLE");
  EXPECT_THAT(failure.message, HasSubstr("chunk: no message for 1s"));
  EXPECT_THAT(failure.message, HasSubstr("1000 of 262144 bytes"));
  while (silent->Read(&response)) {
  }
  const Failure silence = Explain(silent->Finish());
  EXPECT_EQ(silence.code, grpc::StatusCode::DEADLINE_EXCEEDED) << silence.message;
  EXPECT_THAT(silence.message, HasSubstr("payload: no message for 1s"));
  EXPECT_TRUE(TestServer::Eventually([&] { return server.Metric("spmmd_requests_running{") == 0; }));
  EXPECT_TRUE(TestServer::Eventually([&] { return server.Metric("spmmd_upload_bytes") == 0; }));
  EXPECT_TRUE(server.Register("stalled", layer).ok());
}

TEST(StalledUploadTest, ReleasesThoseWhoWaitForTheSameContent) {
  TestServer server([](Options* options) { options->upload_idle_timeout = kShortIdle; });
  const TestLayer layer = TestLayer::Random(64, 64, 4);
  pb::LayerSpec spec = DenseSpec("leader", 64, 64);
  spec.set_content_xxh3(std::string(32, 'a'));
  grpc::ClientContext context;
  auto leader = server.catalog().RegisterLayer(&context);
  pb::RegisterLayerRequest request;
  *request.mutable_spec() = spec;
  ASSERT_TRUE(leader->Write(request));
  pb::RegisterLayerResponse response;
  ASSERT_TRUE(leader->Read(&response));
  ASSERT_TRUE(response.accepted().content_needed());
  spec.set_name("joiner");
  const Failure joined = Explain(server.Register(spec, {}));
  EXPECT_EQ(joined.code, grpc::StatusCode::ABORTED) << joined.message;
  EXPECT_EQ(joined.reason, "CONTENT_SOURCE_LOST");
  while (leader->Read(&response)) {
  }
  EXPECT_EQ(leader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
}

TEST(StalledUploadTest, ASlowButSteadyUploadGoesThrough) {
  TestServer server([](Options* options) { options->upload_idle_timeout = kShortIdle; });
  const TestLayer layer = TestLayer::Random(16, 16, 4);
  const std::string bytes = layer.Bytes();
  grpc::ClientContext context;
  auto stream = server.catalog().RegisterLayer(&context);
  pb::RegisterLayerRequest request;
  *request.mutable_spec() = DenseSpec("slow", 16, 16);
  ASSERT_TRUE(stream->Write(request));
  // Twice the timeout in all.
  for (size_t i = 0; i < 16; ++i) {
    absl::SleepFor(kShortIdle / 8);
    *request.mutable_chunk() = Chunk(pb::CONTENT_PART_VALUES, 64 * i, bytes.substr(64 * i, 64));
    ASSERT_TRUE(stream->Write(request));
  }
  stream->WritesDone();
  pb::RegisterLayerResponse response;
  while (stream->Read(&response) && !response.has_layer()) {
  }
  EXPECT_TRUE(response.has_layer());
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(RegisterLayerTest, IdenticalRegistrationsAtOnceAllSucceed) {
  const TestLayer layer = TestLayer::Random(128, 128, 6);
  std::vector<std::thread> threads;
  std::vector<grpc::Status> statuses(8);
  for (size_t i = 0; i < statuses.size(); ++i) {
    threads.emplace_back([&, i] { statuses[i] = server_.Register("same", layer); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const grpc::Status& status : statuses) EXPECT_TRUE(status.ok()) << status.error_message();
  pb::ListLayersResponse layers;
  grpc::ClientContext context;
  ASSERT_TRUE(server_.catalog().ListLayers(&context, {}, &layers).ok());
  EXPECT_EQ(layers.layers_size(), 1);
}

TEST(FileSourceTest, LayersComeFromTheRepositoryAndNothingOutsideIt) {
  TempDir repository;
  const TestLayer layer = TestLayer::Random(4, 6, 7);
  // NumPy's format, version 1.0: magic, header length, a Python dict padded to 64 bytes.
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 6), }";
  header.resize(128 - 10 - 1, ' ');
  header += '\n';
  repository.Write(
      "w.npy", std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size()) + '\0' + header + layer.Bytes());
  repository.Write("bad.npy", "\x93NUMPX nonsense");
  TempDir outside;
  outside.Write("secret.npy", "secret");
  ASSERT_EQ(symlink(outside.File("secret.npy").c_str(), repository.File("link.npy").c_str()), 0);

  TestServer server([&](Options* options) { options->model_repository = repository.path(); });
  pb::LayerSpec spec;
  spec.set_name("file");
  spec.mutable_file()->set_path("w.npy");
  pb::Layer made;
  const grpc::Status status = server.Register(spec, {}, &made);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(made.m(), 4);
  EXPECT_EQ(made.k(), 6);

  for (const std::string path : {"../secret.npy", "/etc/passwd", "link.npy", "a/../../w.npy", "", "bad.npy"}) {
    spec.mutable_file()->set_path(path);
    const Failure failure = Explain(server.Register(spec, {}));
    EXPECT_THAT(failure.code, ::testing::AnyOf(grpc::StatusCode::INVALID_ARGUMENT, grpc::StatusCode::NOT_FOUND,
                                               grpc::StatusCode::DATA_LOSS))
        << path << ": " << failure.message;
    EXPECT_THAT(failure.message, ::testing::Not(HasSubstr(outside.path()))) << path;
  }
  spec.mutable_file()->set_path("missing.npy");
  EXPECT_EQ(server.Register(spec, {}).error_code(), grpc::StatusCode::NOT_FOUND);
}

}  // namespace
}  // namespace spmmd::server::testing
