#include "tests/server/testing/server_harness.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace spmmd::server::testing {
namespace {

class FastExit : public ::testing::EmptyTestEventListener {
  void OnTestProgramEnd(const ::testing::UnitTest& unit_test) override {
    std::cout.flush();
    std::fflush(nullptr);
    std::_Exit(unit_test.Passed() ? 0 : 1);
  }
};

}  // namespace

void ExitFastAfterTests() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  ::testing::UnitTest::GetInstance()->listeners().Append(new FastExit);
#endif
}

TempDir::TempDir() {
  std::string pattern = ::testing::TempDir() + "/spmmd_test_XXXXXX";
  path_ = mkdtemp(pattern.data());
}

TempDir::~TempDir() { std::filesystem::remove_all(path_); }

std::string TempDir::Write(const std::string& name, const std::string& content) const {
  std::ofstream(File(name), std::ios::binary) << content;
  return File(name);
}

TestLayer TestLayer::Random(int64_t m, int64_t k, uint32_t seed) {
  TestLayer layer{m, k, RandomVector(m * k, seed)};
  std::mt19937 random(seed + 1);
  for (float& value : layer.w) {
    if (random() % 2 == 0) value = 0;
  }
  return layer;
}

std::string TestLayer::Bytes() const { return AsBytes(w); }

std::vector<double> TestLayer::Reference(const std::vector<float>& x, int64_t n) const {
  std::vector<double> y(static_cast<size_t>(n * m), 0.0);
  for (int64_t t = 0; t < n; ++t) {
    for (int64_t row = 0; row < m; ++row) {
      double sum = 0;
      for (int64_t col = 0; col < k; ++col) sum += double{w[row * k + col]} * x[t * k + col];
      y[t * m + row] = sum;
    }
  }
  return y;
}

std::vector<float> RandomVector(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(size));
  for (float& value : values) value = normal(random);
  return values;
}

std::string AsBytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

std::vector<float> AsFloats(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

pb::LayerSpec DenseSpec(const std::string& name, int64_t m, int64_t k) {
  pb::LayerSpec spec;
  spec.set_name(name);
  spec.set_m(m);
  spec.set_k(k);
  spec.set_dtype(pb::DATA_TYPE_F32);
  spec.set_encoding(pb::SOURCE_ENCODING_DENSE);
  return spec;
}

pb::ContentChunk Chunk(pb::ContentPart part, uint64_t offset, std::string data) {
  pb::ContentChunk chunk;
  chunk.set_part(part);
  chunk.set_offset(offset);
  chunk.set_data(std::move(data));
  return chunk;
}

pb::ExecuteRequest MatmulRequest(const std::string& layer, const std::vector<float>& x, int64_t n, int64_t k) {
  pb::ExecuteRequest request;
  request.mutable_program()->add_inputs("x");
  pb::Step* step = request.mutable_program()->add_steps();
  step->set_name("y");
  step->mutable_matmul()->mutable_layer()->set_name(layer);
  step->mutable_matmul()->set_input("x");
  request.mutable_program()->add_outputs()->set_step("y");
  pb::NamedInput* input = request.add_inputs();
  input->set_name("x");
  input->mutable_dense()->set_dtype(pb::DATA_TYPE_F32);
  input->mutable_dense()->add_shape(n);
  input->mutable_dense()->add_shape(k);
  input->mutable_dense()->set_data(AsBytes(x));
  return request;
}

Failure Explain(const grpc::Status& status) {
  Failure failure;
  failure.code = status.error_code();
  failure.message = status.error_message();
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return failure;
  for (const auto& any : details.details()) {
    google::rpc::ErrorInfo info;
    if (any.UnpackTo(&info)) failure.reason = info.reason();
    google::rpc::BadRequest bad;
    if (any.UnpackTo(&bad) && bad.field_violations_size() > 0) failure.field = bad.field_violations(0).field();
  }
  return failure;
}

TestServer::TestServer(const std::function<void(Options*)>& change) {
  auto options = MakeOptions({});
  if (!options.ok()) std::abort();
  options->listen = {"unix:" + directory_.File("s")};
  options->metrics_listen.clear();
  if (change) change(&*options);
  auto app = App::Start(*options);
  if (!app.ok()) {
    std::cerr << app.status() << std::endl;
    std::abort();
  }
  app_ = *std::move(app);
  if (const absl::Status status = app_->LoadAndServe(); !status.ok()) {
    std::cerr << status << std::endl;
    std::abort();
  }
  const auto channel = NewChannel();
  matmul_ = pb::SparseMatmul::NewStub(channel);
  catalog_ = pb::LayerCatalog::NewStub(channel);
}

TestServer::~TestServer() = default;

std::shared_ptr<grpc::Channel> TestServer::NewChannel(const grpc::ChannelArguments* arguments) const {
  grpc::ChannelArguments own;
  if (arguments != nullptr) own = *arguments;
  own.SetMaxReceiveMessageSize(-1);
  own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address(), grpc::InsecureChannelCredentials(), own);
}

grpc::Status TestServer::Register(const pb::LayerSpec& spec, const std::vector<pb::ContentChunk>& chunks,
                                  pb::Layer* layer) {
  grpc::ClientContext context;
  auto stream = catalog_->RegisterLayer(&context);
  pb::RegisterLayerRequest request;
  *request.mutable_spec() = spec;
  bool open = stream->Write(request);
  for (const pb::ContentChunk& chunk : chunks) {
    if (!open) break;
    *request.mutable_chunk() = chunk;
    open = stream->Write(request);
  }
  if (open) stream->WritesDone();
  pb::RegisterLayerResponse response;
  while (stream->Read(&response)) {
    if (response.has_layer() && layer != nullptr) *layer = response.layer();
  }
  return stream->Finish();
}

grpc::Status TestServer::Register(const std::string& name, const TestLayer& layer) {
  std::vector<pb::ContentChunk> chunks;
  const std::string bytes = layer.Bytes();
  constexpr size_t kChunk = size_t{1} << 20;
  for (size_t offset = 0; offset < bytes.size(); offset += kChunk) {
    chunks.push_back(Chunk(pb::CONTENT_PART_VALUES, offset, bytes.substr(offset, kChunk)));
  }
  return Register(DenseSpec(name, layer.m, layer.k), chunks);
}

grpc::Status TestServer::Execute(const pb::ExecuteRequest& request, pb::ExecuteResponse* response) {
  grpc::ClientContext context;
  return matmul_->Execute(&context, request, response);
}

double TestServer::Metric(const std::string& prefix) const {
  std::istringstream lines(app_->metrics().Serialize());
  double sum = 0;
  for (std::string line; std::getline(lines, line);) {
    if (!absl::StartsWith(line, prefix)) continue;
    double value = 0;
    if (absl::SimpleAtod(line.substr(line.rfind(' ') + 1), &value)) sum += value;
  }
  return sum;
}

bool TestServer::Eventually(const std::function<bool()>& condition) {
  const absl::Time deadline = absl::Now() + absl::Minutes(2);
  while (absl::Now() < deadline) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return condition();
}

}  // namespace spmmd::server::testing
