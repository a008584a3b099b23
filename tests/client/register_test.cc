// Registration against a server that behaves, refuses, vanishes or breaks the protocol.
#include <atomic>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "client/cpp/client.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"

namespace spmmd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::LayerSpec Named(const std::string& name) {
  v1::LayerSpec spec;
  spec.set_name(name);
  return spec;
}

void Accept(RegisterStream* stream, bool content_needed, uint64_t bytes = 0) {
  v1::RegisterLayerResponse response;
  response.mutable_accepted()->set_content_needed(content_needed);
  response.mutable_accepted()->set_content_bytes(bytes);
  stream->Write(response);
}

void Finish(RegisterStream* stream, const v1::LayerSpec& spec) {
  v1::RegisterLayerResponse response;
  response.mutable_layer()->set_name(spec.name());
  response.mutable_layer()->set_version(1);
  stream->Write(response);
}

// Keeps what it was sent, by content hash, as a server does.
class RecordingServer {
 public:
  explicit RecordingServer(FakeServer& fake) {
    fake.register_layer = [this](grpc::ServerContext*, RegisterStream* stream) { return Register(stream); };
  }

  std::map<v1::ContentPart, std::string> parts;
  std::vector<v1::ContentPart> part_order;
  size_t largest_chunk = 0;
  int chunks = 0;
  v1::LayerSpec spec;

 private:
  grpc::Status Register(RegisterStream* stream) {
    v1::RegisterLayerRequest request;
    if (!stream->Read(&request) || !request.has_spec()) return {grpc::StatusCode::INVALID_ARGUMENT, "no spec"};
    spec = request.spec();
    parts.clear();
    const bool known = known_.count(spec.content_xxh3()) != 0;
    Accept(stream, !known);
    while (stream->Read(&request)) {
      if (!request.has_chunk() || known) return {grpc::StatusCode::INVALID_ARGUMENT, "not a chunk that I asked for"};
      std::string& part = parts[request.chunk().part()];
      if (part.empty()) part_order.push_back(request.chunk().part());
      if (request.chunk().offset() != part.size()) return {grpc::StatusCode::INVALID_ARGUMENT, "gap"};
      part += request.chunk().data();
      largest_chunk = std::max(largest_chunk, request.chunk().data().size());
      ++chunks;
      v1::RegisterLayerResponse progress;
      progress.mutable_progress()->set_state(v1::LAYER_STATE_UPLOADING);
      progress.mutable_progress()->set_received_bytes(part.size());
      stream->Write(progress);
    }
    known_[spec.content_xxh3()] = true;
    Finish(stream, spec);
    return grpc::Status::OK;
  }

  std::map<std::string, bool> known_;
};

class RegisterTest : public ::testing::Test {
 protected:
  RegisterTest() {
    ClientOptions options;
    options.chunk_bytes = 1000;
    client_ = Client::FromChannel(fake_.InProcessChannel(), options);
    values_.resize(7 * 300);
    std::iota(values_.begin(), values_.end(), 0.0f);
  }

  LayerContent Content() const { return LayerContent::Dense(DenseRows::F32(values_, 7, 300)); }

  FakeServer fake_;
  std::unique_ptr<Client> client_;
  std::vector<float> values_;
};

TEST_F(RegisterTest, ChunksArriveWholeAndInOrder) {
  RecordingServer server(fake_);
  std::vector<uint64_t> offsets(8);
  for (size_t i = 0; i < offsets.size(); ++i) offsets[i] = 300 * i;
  std::vector<uint32_t> columns(values_.size());
  for (size_t i = 0; i < columns.size(); ++i) columns[i] = static_cast<uint32_t>(i % 300);
  const std::vector<float> bias(7, 0.5f);
  const auto values = AsBytes(absl::MakeConstSpan(values_));
  auto content = LayerContent::Csr(7, 300, v1::DATA_TYPE_F32, offsets, columns, values);
  content.SetBias(bias);

  const auto result = client_->Register(Named("layer"), content);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->layer.name(), "layer");
  EXPECT_TRUE(result->uploaded);
  EXPECT_EQ(result->uploaded_bytes, content.bytes());
  EXPECT_EQ(server.spec.content_xxh3(), content.Xxh3());
  EXPECT_EQ(server.spec.nnz(), 2100);
  EXPECT_THAT(server.part_order, ElementsAre(v1::CONTENT_PART_ROW_OFFSETS, v1::CONTENT_PART_COLUMN_INDICES,
                                             v1::CONTENT_PART_VALUES, v1::CONTENT_PART_BIAS));
  for (const auto& part : content.parts()) {
    EXPECT_EQ(server.parts[part.part],
              std::string(reinterpret_cast<const char*>(part.bytes.data()), part.bytes.size()));
  }
  EXPECT_EQ(server.largest_chunk, 1000u);
  EXPECT_EQ(server.chunks, 1 + 9 + 9 + 1);
}

TEST_F(RegisterTest, KnownContentIsNotSentAgain) {
  RecordingServer server(fake_);
  ASSERT_TRUE(client_->Register(Named("first"), Content()).ok());
  const int chunks = server.chunks;
  const auto again = client_->Register(Named("second"), Content());
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE(again->uploaded);
  EXPECT_EQ(again->uploaded_bytes, 0u);
  EXPECT_EQ(again->layer.name(), "second");
  EXPECT_EQ(server.chunks, chunks);
  values_[5] += 1;
  EXPECT_TRUE(client_->Register(Named("third"), Content())->uploaded);
}

TEST_F(RegisterTest, TakesOverWhenTheOneWhoBroughtTheContentIsLost) {
  RecordingServer server(fake_);
  const auto record = fake_.register_layer;
  std::atomic<int> to_lose = 2;
  std::atomic<int> calls = 0;
  fake_.register_layer = [&](grpc::ServerContext* context, RegisterStream* stream) {
    ++calls;
    if (to_lose-- <= 0) return record(context, stream);
    v1::RegisterLayerRequest request;
    stream->Read(&request);
    Accept(stream, /*content_needed=*/false);
    google::rpc::ErrorInfo info;
    info.set_reason("CONTENT_SOURCE_LOST");
    return ErrorWithDetail(grpc::StatusCode::ABORTED, "try again", info);
  };
  const auto result = client_->Register(Named("w"), Content());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->uploaded);
  EXPECT_EQ(calls, 3);
  to_lose = 100;
  calls = 0;
  EXPECT_EQ(client_->Register(Named("w"), Content()).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(calls, 4);
}

TEST_F(RegisterTest, GoesOnWhereABrokenConnectionWas) {
  std::atomic<int> calls = 0;
  std::string values;  // as a server keeps them from one call to the next
  std::vector<uint64_t> first_offsets;
  fake_.register_layer = [&](grpc::ServerContext*, RegisterStream* stream) -> grpc::Status {
    const int call = ++calls;
    v1::RegisterLayerRequest request;
    stream->Read(&request);
    const v1::LayerSpec spec = request.spec();
    v1::RegisterLayerResponse response;
    response.mutable_accepted()->set_content_needed(true);
    if (!values.empty()) {
      v1::PartReceived& received = *response.mutable_accepted()->add_received();
      received.set_part(v1::CONTENT_PART_VALUES);
      received.set_bytes(values.size());
    }
    stream->Write(response);
    for (int chunk = 0; stream->Read(&request); ++chunk) {
      if (chunk == 0) first_offsets.push_back(request.chunk().offset());
      if (request.chunk().offset() != values.size()) return {grpc::StatusCode::INVALID_ARGUMENT, "gap"};
      values += request.chunk().data();
      if (call < 3 && chunk == 1) return {grpc::StatusCode::UNAVAILABLE, "connection reset"};
    }
    Finish(stream, spec);
    return grpc::Status::OK;
  };
  const auto result = client_->Register(Named("w"), Content());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(calls, 3);
  EXPECT_THAT(first_offsets, ElementsAre(0, 2000, 4000));
  EXPECT_EQ(values, std::string(reinterpret_cast<const char*>(values_.data()), values_.size() * sizeof(float)));
  EXPECT_EQ(result->uploaded_bytes, values.size() - 4000);

  // One that never answers is given up.
  calls = 0;
  fake_.register_layer = [&](grpc::ServerContext*, RegisterStream* stream) -> grpc::Status {
    ++calls;
    v1::RegisterLayerRequest request;
    stream->Read(&request);
    Accept(stream, true);
    return {grpc::StatusCode::UNAVAILABLE, "connection reset"};
  };
  EXPECT_EQ(client_->Register(Named("w"), Content()).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(calls, 4);
}

TEST_F(RegisterTest, ProgressReachesTheTotal) {
  fake_.register_layer = [](grpc::ServerContext*, RegisterStream* stream) {
    v1::RegisterLayerRequest request;
    stream->Read(&request);
    Accept(stream, true, 8400);
    while (stream->Read(&request)) {
    }
    v1::RegisterLayerResponse packing;
    packing.mutable_progress()->set_state(v1::LAYER_STATE_PACKING);
    packing.mutable_progress()->set_received_bytes(8400);
    stream->Write(packing);
    Finish(stream, Named("layer"));
    return grpc::Status::OK;
  };
  std::vector<RegisterProgress> seen;
  RegisterOptions options;
  options.progress = [&seen](const RegisterProgress& progress) {
    seen.push_back(progress);
    return true;
  };
  ASSERT_TRUE(client_->Register(Named("layer"), Content(), options).ok());
  ASSERT_FALSE(seen.empty());
  for (size_t i = 1; i < seen.size(); ++i) EXPECT_LE(seen[i - 1].sent_bytes, seen[i].sent_bytes);
  EXPECT_EQ(seen.front().total_bytes, 8400u);
}

TEST_F(RegisterTest, CallbackCancels) {
  absl::Notification cancelled;
  fake_.register_layer = [&cancelled](grpc::ServerContext* context, RegisterStream* stream) {
    v1::RegisterLayerRequest request;
    stream->Read(&request);
    Accept(stream, true, 8400);
    while (stream->Read(&request)) {
    }
    if (context->IsCancelled()) cancelled.Notify();
    return grpc::Status::CANCELLED;
  };
  RegisterOptions options;
  options.progress = [](const RegisterProgress&) { return false; };
  EXPECT_EQ(client_->Register(Named("layer"), Content(), options).status().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(cancelled.WaitForNotificationWithTimeout(absl::Seconds(10)));
}

TEST_F(RegisterTest, RefusalBeforeAndDuringTheUploadIsReported) {
  for (const int chunks_read : {-1, 0, 3}) {
    fake_.register_layer = [chunks_read](grpc::ServerContext*, RegisterStream* stream) {
      v1::RegisterLayerRequest request;
      stream->Read(&request);
      if (chunks_read >= 0) Accept(stream, true);
      for (int i = 0; i < chunks_read; ++i) stream->Read(&request);
      google::rpc::ErrorInfo info;
      info.set_reason("DEVICE_MEMORY");
      return ErrorWithDetail(grpc::StatusCode::RESOURCE_EXHAUSTED, "needs 9 GB, 3 GB free", info);
    };
    const absl::Status status = client_->Register(Named("layer"), Content()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << chunks_read;
    EXPECT_EQ(status.message(), "needs 9 GB, 3 GB free");
    EXPECT_EQ(ErrorReason(status), "DEVICE_MEMORY");
  }
}

TEST_F(RegisterTest, AServerThatVanishesIsUnavailable) {
  absl::Notification uploading;
  fake_.register_layer = [&uploading](grpc::ServerContext* context, RegisterStream* stream) {
    v1::RegisterLayerRequest request;
    stream->Read(&request);
    Accept(stream, true);
    stream->Read(&request);
    uploading.Notify();
    while (!context->IsCancelled()) absl::SleepFor(absl::Milliseconds(2));
    return grpc::Status::CANCELLED;
  };
  auto client = Client::Connect(fake_.address());
  ASSERT_TRUE(client.ok());
  std::thread killer([&] {
    uploading.WaitForNotification();
    fake_.Kill();
  });
  const absl::Status status = (*client)->Register(Named("layer"), Content()).status();
  killer.join();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(status.code(), ::testing::AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kCancelled)) << status;
  EXPECT_EQ((*client)->Register(Named("layer"), Content()).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(RegisterTest, BrokenProtocolIsInternal) {
  fake_.register_layer = [](grpc::ServerContext*, RegisterStream* stream) {
    v1::RegisterLayerRequest request;
    stream->Read(&request);
    Accept(stream, true);
    while (stream->Read(&request)) {
    }
    return grpc::Status::OK;
  };
  EXPECT_EQ(client_->Register(Named("layer"), Content()).status().code(), absl::StatusCode::kInternal);
  v1::LayerSpec from_file = Named("layer");
  from_file.mutable_file()->set_path("w.npy");
  const absl::Status asked = client_->RegisterFile(from_file).status();
  EXPECT_EQ(asked.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(asked.message()), HasSubstr("asks for content"));
}

TEST_F(RegisterTest, FilesOfTheServerNeedNoContent) {
  fake_.register_layer = [](grpc::ServerContext*, RegisterStream* stream) {
    v1::RegisterLayerRequest request;
    stream->Read(&request);
    const v1::LayerSpec spec = request.spec();
    if (spec.file().path() != "dir/w.npy") return grpc::Status(grpc::StatusCode::NOT_FOUND, "no file");
    Accept(stream, false);
    if (stream->Read(&request)) return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "chunk");
    Finish(stream, spec);
    return grpc::Status::OK;
  };
  v1::LayerSpec spec = Named("from-file");
  spec.mutable_file()->set_path("dir/w.npy");
  const auto result = client_->RegisterFile(spec);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->uploaded);
  spec.mutable_file()->set_path("other.npy");
  EXPECT_EQ(client_->RegisterFile(spec).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(RegisterTest, ContradictionsNeverReachTheServer) {
  v1::LayerSpec spec = Named("layer");
  EXPECT_THAT(std::string(client_->RegisterFile(spec).status().message()), HasSubstr("spec.file"));
  spec.mutable_file()->set_path("w.npy");
  EXPECT_THAT(std::string(client_->Register(spec, Content()).status().message()), HasSubstr("spec.file"));
  EXPECT_EQ(client_->Register(Named("layer"), LayerContent::Dense(DenseRows::F32(values_, 7, 299))).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(RegisterTest, DeadlineEndsAStuckUpload) {
  fake_.register_layer = [](grpc::ServerContext* context, RegisterStream* stream) {
    v1::RegisterLayerRequest request;
    stream->Read(&request);
    Accept(stream, true);
    while (!context->IsCancelled()) absl::SleepFor(absl::Milliseconds(2));
    return grpc::Status::CANCELLED;
  };
  RegisterOptions options;
  options.call.timeout = absl::Milliseconds(100);
  EXPECT_EQ(client_->Register(Named("layer"), Content(), options).status().code(), absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace spmmd::client
