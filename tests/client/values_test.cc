// What the client makes and takes apart without a server: contents, hashes, chunks, programs, tensors, errors, options.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "client/cpp/client.h"
#include "client/cpp/upload.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"

namespace spmmd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<float> Ramp(size_t n) {
  std::vector<float> values(n);
  std::iota(values.begin(), values.end(), 1.0f);
  return values;
}

TEST(LayerContent, HashIsXxh3OfThePartsInOrder) {
  // The hash of no bytes at all, from the xxHash project's own test vectors (XXH128 of the empty input, seed 0).
  const auto empty = LayerContent::Coo(1, 1, v1::DATA_TYPE_F32, {}, {}, {});
  EXPECT_EQ(empty.Xxh3(), "99aa06d3014798d86001c324468d497f");

  // A hash of the parts one after the other is a hash of their concatenation.
  const std::vector<float> all = Ramp(6 + 2);
  const auto joined = LayerContent::Dense(DenseRows::F32(all, 2, 4));
  auto parts = LayerContent::Dense(DenseRows::F32(absl::MakeSpan(all).first(6), 2, 3));
  parts.SetBias(absl::MakeSpan(all).last(2));
  EXPECT_EQ(parts.Xxh3(), joined.Xxh3());
  EXPECT_EQ(parts.bytes(), joined.bytes());
}

TEST(LayerContent, DescribesItself) {
  const std::vector<uint64_t> offsets = {0, 1, 3};
  const std::vector<uint32_t> columns = {2, 0, 1};
  const std::vector<uint16_t> values = {0x3c00, 0x3c00, 0x3c00};
  const std::vector<float> bias = {1, 2};
  auto content = LayerContent::Csr(2, 3, v1::DATA_TYPE_F16, offsets, columns, AsBytes(absl::MakeConstSpan(values)));
  content.SetBias(bias);
  ASSERT_TRUE(content.Check().ok()) << content.Check();
  v1::LayerSpec spec;
  content.Describe(spec);
  EXPECT_EQ(spec.m(), 2);
  EXPECT_EQ(spec.k(), 3);
  EXPECT_EQ(spec.nnz(), 3);
  EXPECT_EQ(spec.dtype(), v1::DATA_TYPE_F16);
  EXPECT_EQ(spec.encoding(), v1::SOURCE_ENCODING_CSR);
  EXPECT_TRUE(spec.has_bias());
  std::vector<v1::ContentPart> order;
  for (const auto& part : content.parts()) order.push_back(part.part);
  EXPECT_THAT(order, ElementsAre(v1::CONTENT_PART_ROW_OFFSETS, v1::CONTENT_PART_COLUMN_INDICES, v1::CONTENT_PART_VALUES,
                                 v1::CONTENT_PART_BIAS));
  content.SetBias({});
  content.Describe(spec);
  EXPECT_FALSE(spec.has_bias());
  EXPECT_EQ(content.parts().size(), 3u);
}

TEST(LayerContent, NamesThePartOfTheWrongSize) {
  const std::vector<float> w = Ramp(12);
  const std::vector<uint32_t> three = {0, 1, 2};
  const auto bytes = AsBytes(absl::MakeConstSpan(w));
  EXPECT_THAT(std::string(LayerContent::Dense(DenseRows::F32(w, 3, 5)).Check().message()), HasSubstr("VALUES: 48"));
  EXPECT_THAT(std::string(LayerContent::Csr(3, 4, v1::DATA_TYPE_F32, {}, three, bytes.first(12)).Check().message()),
              HasSubstr("ROW_OFFSETS: 0 bytes, needs 32"));
  EXPECT_THAT(std::string(LayerContent::Coo(3, 4, v1::DATA_TYPE_F32, three, {}, bytes.first(12)).Check().message()),
              HasSubstr("COLUMN_INDICES: 0 bytes, needs 12"));
  EXPECT_THAT(
      std::string(LayerContent::Bitmap(3, 3, v1::DATA_TYPE_F32, bytes.first(1), bytes.first(8)).Check().message()),
      HasSubstr("BITMAP: 1 bytes, needs 2"));
  EXPECT_THAT(
      std::string(LayerContent::Bitmap(3, 3, v1::DATA_TYPE_F32, bytes.first(2), bytes.first(7)).Check().message()),
      HasSubstr("VALUES: 7 bytes"));
  EXPECT_THAT(std::string(LayerContent::Dense(DenseRows::F32(w, 3, 4)).SetBias(w).Check().message()),
              HasSubstr("BIAS: 48 bytes, needs 12"));
  EXPECT_THAT(std::string(LayerContent::Dense({v1::DATA_TYPE_UNSPECIFIED, 3, 4, bytes}).Check().message()),
              HasSubstr("dtype"));
  for (const auto& [m, k] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 4}, {4, -1}, {int64_t{1} << 40, int64_t{1} << 40}, {int64_t{1} << 24, int64_t{1} << 24}}) {
    EXPECT_THAT(std::string(LayerContent::Dense(DenseRows::F32(w, m, k)).Check().message()), HasSubstr("shape"));
  }
}

TEST(EncodeChunk, IsWhatTheGeneratedMessageWouldBe) {
  const std::string payload(3 << 20, '\x5a');
  for (const uint64_t offset : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 36}) {
    for (const size_t size : {size_t{0}, size_t{1}, size_t{127}, size_t{128}, size_t{16384}, payload.size()}) {
      const auto data = AsBytes(absl::Span<const char>(payload.data(), size));
      grpc::ByteBuffer buffer = EncodeChunk(v1::CONTENT_PART_BIAS, offset, data);
      v1::RegisterLayerRequest decoded;
      ASSERT_TRUE(grpc::SerializationTraits<v1::RegisterLayerRequest>::Deserialize(&buffer, &decoded).ok()) << size;
      ASSERT_TRUE(decoded.has_chunk());
      EXPECT_EQ(decoded.chunk().part(), v1::CONTENT_PART_BIAS);
      EXPECT_EQ(decoded.chunk().offset(), offset);
      EXPECT_EQ(decoded.chunk().data(), payload.substr(0, size));
    }
  }
}

TEST(ProgramBuilder, WritesTheMessages) {
  const v1::Program program =
      ProgramBuilder()
          .Input("x")
          .Matmul("g", "mlp.gate", "x",
                  {.activation = v1::ACTIVATION_SILU, .activation_threshold = 0.0f, .ignore_bias = true, .version = 3})
          .Matmul("u", "mlp.up", "x")
          .Mul("h", "g", "u")
          .Add("r", "h", "u", v1::ACTIVATION_RELU)
          .Output("r", v1::DATA_TYPE_BF16)
          .Build();
  EXPECT_EQ(program.inputs(0), "x");
  ASSERT_EQ(program.steps_size(), 4);
  EXPECT_EQ(program.steps(0).matmul().layer().version(), 3);
  EXPECT_TRUE(program.steps(0).matmul().ignore_bias());
  EXPECT_TRUE(program.steps(0).matmul().has_activation_threshold());
  EXPECT_FALSE(program.steps(1).matmul().has_activation_threshold());
  EXPECT_EQ(program.steps(2).mul().right(), "u");
  EXPECT_EQ(program.steps(3).add().activation(), v1::ACTIVATION_RELU);
  EXPECT_EQ(program.outputs(0).dtype(), v1::DATA_TYPE_BF16);
}

TEST(Tensor, RefusesViewsThatContradictThemselves) {
  const std::vector<float> x = Ramp(6);
  EXPECT_TRUE(Check(DenseRows::F32(x, 2, 3)).ok());
  EXPECT_TRUE(Check(DenseRows::F32({}, 0, 3)).ok());
  EXPECT_FALSE(Check(DenseRows::F32(x, 2, 4)).ok());
  EXPECT_FALSE(Check(DenseRows::F32(x, -2, -3)).ok());
  EXPECT_FALSE(Check(DenseRows::F32({}, 0, 0)).ok());
  EXPECT_FALSE(Check(DenseRows::F32(x, int64_t{1} << 62, int64_t{1} << 62)).ok());
  const std::vector<uint32_t> indices = {1, 4};
  const auto values = AsBytes(absl::MakeConstSpan(x));
  EXPECT_TRUE(Check(SparseRows{v1::DATA_TYPE_F32, 1, 5, {}, indices, values.first(8)}).ok());
  EXPECT_FALSE(Check(SparseRows{v1::DATA_TYPE_F32, 2, 5, {}, indices, values.first(8)}).ok());
  EXPECT_FALSE(Check(SparseRows{v1::DATA_TYPE_F32, 1, 5, {}, indices, values.first(7)}).ok());
  EXPECT_FALSE(Check(SparseRows{v1::DATA_TYPE_UNSPECIFIED, 1, 5, {}, indices, values.first(8)}).ok());
}

TEST(Tensor, OutputsAreTakenByNameAndChecked) {
  v1::ExecuteResponse response;
  v1::NamedOutput& output = *response.add_outputs();
  output.set_name("y");
  output.mutable_tensor()->set_dtype(v1::DATA_TYPE_F32);
  output.mutable_tensor()->add_shape(1);
  output.mutable_tensor()->add_shape(2);
  const float expected[] = {1.5f, -2.0f};
  output.mutable_tensor()->set_data(std::string(reinterpret_cast<const char*>(expected), sizeof(expected)));
  EXPECT_EQ(TakeOutput(response, "z").status().code(), absl::StatusCode::kNotFound);
  const auto y = TakeOutput(response, "y");
  ASSERT_TRUE(y.ok()) << y.status();
  EXPECT_THAT(y->As<float>(), ElementsAre(1.5f, -2.0f));
  EXPECT_THAT(y->As<uint16_t>(), IsEmpty());
  // The bytes were moved out, so a second look finds a tensor without them.
  EXPECT_EQ(TakeOutput(response, "y").status().code(), absl::StatusCode::kInternal);
}

TEST(Status, NamesFieldsOnceAndKeepsDetails) {
  google::rpc::BadRequest bad;
  bad.add_field_violations()->set_field("spec.m");
  bad.mutable_field_violations(0)->set_description("must be positive");
  const auto decoded = [&](const std::string& message) {
    return FromGrpcStatus(ErrorWithDetail(grpc::StatusCode::INVALID_ARGUMENT, message, bad));
  };
  EXPECT_EQ(decoded("bad request").message(), "bad request [spec.m: must be positive]");
  EXPECT_EQ(decoded("spec.m: must be positive").message(), "spec.m: must be positive");
  EXPECT_EQ(decoded("must be positive").message(), "must be positive [field spec.m]");
  const auto violations = FieldViolations(decoded(""));
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].field, "spec.m");

  google::rpc::ErrorInfo info;
  info.set_reason("LAYER_NOT_FOUND");
  EXPECT_EQ(ErrorReason(FromGrpcStatus(ErrorWithDetail(grpc::StatusCode::NOT_FOUND, "no", info))), "LAYER_NOT_FOUND");
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_nanos(250'000'000);
  const absl::Status full = FromGrpcStatus(ErrorWithDetail(grpc::StatusCode::RESOURCE_EXHAUSTED, "full", retry));
  EXPECT_EQ(RetryDelay(full), absl::Milliseconds(250));
  EXPECT_EQ(ErrorReason(full), "");
  EXPECT_EQ(RetryDelay(absl::InternalError("x")), std::nullopt);
}

TEST(Status, SurvivesBrokenDetails) {
  const absl::Status garbage =
      FromGrpcStatus(grpc::Status(grpc::StatusCode::NOT_FOUND, "gone", "\xff\xff\xff not a message"));
  EXPECT_EQ(garbage, absl::NotFoundError("gone"));
  google::rpc::Status details;
  details.add_details()->set_type_url("type.googleapis.com/google.rpc.BadRequest");
  details.mutable_details(0)->set_value("\xff\xff");
  const absl::Status inner =
      FromGrpcStatus(grpc::Status(grpc::StatusCode::NOT_FOUND, "gone", details.SerializeAsString()));
  EXPECT_EQ(inner.message(), "gone");
  EXPECT_THAT(FieldViolations(inner), IsEmpty());
  EXPECT_TRUE(FromGrpcStatus(grpc::Status::OK).ok());
  v1::StreamError unknown_code;
  unknown_code.set_code(1234);
  EXPECT_EQ(FromStreamError(unknown_code).code(), absl::StatusCode::kUnknown);
}

class Options : public ::testing::Test {
 protected:
  static absl::Status Error(std::string_view address, const ClientOptions& options = {}) {
    return Client::Connect(address, options).status();
  }
};

TEST_F(Options, AddressesNeedAPort) {
  EXPECT_TRUE(Error("127.0.0.1:8500").ok());
  EXPECT_TRUE(Error("unix:/nowhere").ok());
  EXPECT_TRUE(Error("[::1]:8500").ok());
  EXPECT_THAT(std::string(Error("").message()), HasSubstr("address"));
  EXPECT_THAT(std::string(Error("localhost").message()), HasSubstr("has no port"));
  EXPECT_THAT(std::string(Error("http://localhost:8500").message()), HasSubstr("is a URL"));
}

TEST_F(Options, TokensDoNotLeaveTheHostInPlainText) {
  ClientOptions options;
  options.token = "secret";
  EXPECT_THAT(std::string(Error("example.com:8500", options).message()), HasSubstr("plain text"));
  EXPECT_THAT(std::string(Error("localhost.example.com:8500", options).message()), HasSubstr("plain text"));
  EXPECT_TRUE(Error("localhost:8500", options).ok());
  EXPECT_TRUE(Error("dns:///localhost:8500", options).ok());
  EXPECT_TRUE(Error("unix:/s", options).ok());
  options.allow_token_without_tls = true;
  EXPECT_TRUE(Error("example.com:8500", options).ok());
  options.allow_token_without_tls = false;
  options.tls.emplace();
  EXPECT_TRUE(Error("example.com:8500", options).ok());
}

TEST_F(Options, FilesMustBeReadable) {
  ClientOptions options;
  options.token_file = "/nonexistent/token";
  EXPECT_THAT(std::string(Error("localhost:1", options).message()), HasSubstr("'/nonexistent/token': No such file"));
  options.token = "also";
  EXPECT_THAT(std::string(Error("localhost:1", options).message()), HasSubstr("not both"));
  ClientOptions tls;
  tls.tls = TlsOptions{.ca_file = "/nonexistent/ca.pem"};
  EXPECT_THAT(std::string(Error("localhost:1", tls).message()), HasSubstr("/nonexistent/ca.pem"));
  tls.tls = TlsOptions{.cert_file = "/nonexistent/cert.pem"};
  EXPECT_THAT(std::string(Error("localhost:1", tls).message()), HasSubstr("go together"));
  ClientOptions chunk;
  chunk.chunk_bytes = 0;
  EXPECT_THAT(std::string(Error("localhost:1", chunk).message()), HasSubstr("chunk_bytes"));
}

}  // namespace
}  // namespace spmmd::client
