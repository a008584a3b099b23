// The parts of spmmctl that need no server: argument parsing, local files, tables, JSON, error texts.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "client/cli/errors.h"
#include "client/cli/parse.h"
#include "client/cli/render.h"
#include "client/cli/weights.h"
#include "client/cpp/status.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"

namespace spmmd::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ParsePruning, AcceptsTheThreeForms) {
  v1::LayerSpec spec;
  ASSERT_TRUE(ParsePruning("magnitude:0.5", spec).ok());
  EXPECT_EQ(spec.magnitude().sparsity(), 0.5);
  ASSERT_TRUE(ParsePruning("nm:2:4", spec).ok());
  EXPECT_EQ(spec.nm().n(), 2);
  EXPECT_EQ(spec.nm().m(), 4);
  EXPECT_FALSE(spec.has_magnitude());
  ASSERT_TRUE(ParsePruning("none", spec).ok());
  EXPECT_EQ(spec.pruning_case(), v1::LayerSpec::PRUNING_NOT_SET);
}

TEST(ParsePruning, SaysWhatIsExpectedOtherwise) {
  for (const char* text :
       {"", "magnitude", "magnitude:", "magnitude:x", "magnitude:1", "magnitude:-0.1", "magnitude:nan",
        "magnitude:0.5:2", "nm", "nm:2", "nm:4:4", "nm:0:4", "nm:2:65", "nm:a:b", "wanda:0.5"}) {
    v1::LayerSpec spec;
    const absl::Status status = ParsePruning(text, spec);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("expected magnitude:SPARSITY")) << text;
    EXPECT_EQ(spec.pruning_case(), v1::LayerSpec::PRUNING_NOT_SET) << text;
  }
}

TEST(ParseEnums, NamesRoundTripAndErrorsListThem) {
  for (const char* name : {"fp16", "bf16", "fp32"}) EXPECT_EQ(ToString(*ParseDataType(name)), name);
  EXPECT_EQ(ToString(*ParseFormat("Bitmap")), "BITMAP");
  EXPECT_EQ(ToString(*ParseFormat("auto")), "AUTO");
  EXPECT_EQ(ToString(*ParsePlacement("sharded")), "sharded");
  EXPECT_EQ(*ParseActivation("gelu_tanh"), v1::ACTIVATION_GELU_TANH);
  EXPECT_THAT(std::string(ParseDataType("int8").status().message()), AllOf(HasSubstr("'int8'"), HasSubstr("bf16")));
  EXPECT_THAT(std::string(ParseFormat("csr").status().message()), HasSubstr("three_layer"));
  EXPECT_EQ(ToString(v1::LAYER_STATE_READY), "ready");
}

TEST(ParseLayerRef, TakesAVersion) {
  EXPECT_EQ(ParseLayerRef("a/b.c")->version(), 0);
  EXPECT_EQ(ParseLayerRef("a@12")->version(), 12);
  EXPECT_EQ(ParseLayerRef("a@12")->name(), "a");
  for (const char* text : {"", "@1", "a@", "a@0", "a@-1", "a@x"}) EXPECT_FALSE(ParseLayerRef(text).ok()) << text;
}

TEST(ParseFile, SplitsTheTensorName) {
  EXPECT_TRUE(ParseFile("dir/w.npy")->is_npy);
  EXPECT_EQ(ParseFile("w.safetensors")->tensor, "");
  EXPECT_EQ(ParseFile("d:x/w.safetensors:a.b:c")->path, "d:x/w.safetensors");
  EXPECT_EQ(ParseFile("d:x/w.safetensors:a.b:c")->tensor, "a.b:c");
  EXPECT_EQ(ParseFile("m.safetensors.index.json:q")->path, "m.safetensors.index.json");
  for (const char* text : {"", "w", "w.txt", "w.npy:x", "w.safetensors:"}) EXPECT_FALSE(ParseFile(text).ok()) << text;
}

TEST(Weights, ReadsNpyAndSafetensorsAndListsTensors) {
  const std::string data = "tests/data/compressed_tensors/";
  const auto f16 = ReadMatrix(*ParseFile(data + "f16.npy"));
  ASSERT_TRUE(f16.ok()) << f16.status();
  EXPECT_EQ(ToRows(*f16).dtype, v1::DATA_TYPE_F16);
  EXPECT_THAT(std::string(ReadMatrix(*ParseFile(data + "f64.npy")).status().message()), HasSubstr("f64.npy"));
  EXPECT_EQ(ReadMatrix(*ParseFile("nowhere.npy")).status().code(), absl::StatusCode::kNotFound);

  const FileAndTensor block = *ParseFile("tests/data/minilm-block0/block.safetensors");
  const absl::Status several = ReadMatrix(block).status();
  EXPECT_EQ(several.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(several.message()), AllOf(HasSubstr("several matrices"), HasSubstr("q.weight")));
  EXPECT_THAT(std::string(ReadMatrix({block.path, "nonsense", false}).status().message()), HasSubstr("nonsense"));
}

TEST(Weights, AVectorIsNoLayer) {
  const std::string block = "tests/data/minilm-block0/block.safetensors";
  const auto message = [](const FileAndTensor& file) { return std::string(ReadLayerWeights(file).status().message()); };
  EXPECT_THAT(message({block, "q.bias", false}), HasSubstr("block.safetensors:q.bias: has 1 dimension, a layer has 2"));
  EXPECT_TRUE(ReadMatrix({block, "q.bias", false}).ok());  // fine as a bias
  EXPECT_TRUE(ReadLayerWeights({block, "q.weight", false}).ok());
  EXPECT_THAT(message({block, "nonsense", false}), HasSubstr("no tensor 'nonsense'"));

  const std::string path = testing::TempDir() + "cli_test_vector.npy";
  const float elements[] = {1, 2, 3};
  const std::string bytes(reinterpret_cast<const char*>(elements), sizeof(elements));
  ASSERT_TRUE(WriteMatrix(path, {v1::DATA_TYPE_F32, 1, 3, bytes}).ok());
  EXPECT_TRUE(ReadLayerWeights(*ParseFile(path)).ok());  // [1, 3] is a matrix
  std::string file;
  {
    std::ifstream in(path, std::ios::binary);
    file.assign(std::istreambuf_iterator<char>(in), {});
  }
  const size_t shape = file.find("(1, 3)");
  ASSERT_NE(shape, std::string::npos);
  file.replace(shape, 6, "(3,)  ");
  std::ofstream(path, std::ios::binary) << file;
  EXPECT_THAT(message(*ParseFile(path)), HasSubstr("cli_test_vector.npy: has 1 dimension"));
  std::filesystem::remove(path);
}

TEST(Weights, BiasMustFitTheRows) {
  const FileAndTensor npy = *ParseFile("tests/data/compressed_tensors/f32.npy");
  const auto matrix = ReadMatrix(npy);
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  const absl::Status wrong = ReadBias(npy.path, npy, matrix->rows()).status();
  EXPECT_THAT(std::string(wrong.message()), HasSubstr("--bias"));
  EXPECT_THAT(std::string(ReadBias("some.tensor", npy, 3).status().message()), HasSubstr("no named tensors"));
}

TEST(Weights, WritesWhatItReads) {
  const std::string path = testing::TempDir() + "cli_test_y.npy";
  const float elements[] = {1, 2, 3, 4, 5, 6};
  ASSERT_TRUE(WriteMatrix(path, {v1::DATA_TYPE_F32, 2, 3,
                                 std::string(reinterpret_cast<const char*>(elements), sizeof(elements))})
                  .ok());
  const auto back = ReadMatrix(*ParseFile(path));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->rows(), 2);
  EXPECT_EQ(ElementAsDouble(back->view(), 1, 2), 6.0);
  std::filesystem::remove(path);
}

TEST(Render, UnitsKeepThreeDigits) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1536), "1.50 KiB");
  EXPECT_EQ(FormatBytes(uint64_t{300} << 30), "300 GiB");
  EXPECT_EQ(FormatSeconds(0), "0.00 us");
  EXPECT_EQ(FormatSeconds(12.34e-6), "12.3 us");
  EXPECT_EQ(FormatSeconds(0.5), "500 ms");
  EXPECT_EQ(FormatSeconds(2), "2.00 s");
  EXPECT_EQ(FormatBandwidth(3.4e11), "340 GB/s");
  EXPECT_EQ(FormatPercent(0.5), "50.0 %");
}

TEST(Render, TablesAlign) {
  Table table({"NAME", ">N"});
  table.AddRow({"a", "1000"});
  table.AddRow({"long name", "2"});
  EXPECT_EQ(table.ToString(),
            "NAME          N\n"
            "a          1000\n"
            "long name     2\n");
}

TEST(Render, LayerJsonHasEveryKey) {
  v1::Layer layer;
  layer.set_name("w");
  layer.set_dtype(v1::DATA_TYPE_F16);
  layer.set_format(v1::FORMAT_BITMAP);
  layer.set_state(v1::LAYER_STATE_READY);
  layer.set_bytes(9);
  layer.set_dense_bytes(16);
  layer.add_sections()->set_name("values");
  layer.add_residency()->set_device("cpu:0");
  layer.add_speeds()->set_tokens(8);
  layer.mutable_create_time()->set_seconds(0);
  const Json json = ToJson(layer);
  std::vector<std::string> keys;
  for (const auto& [key, value] : json.items()) keys.push_back(key);
  // Scripts rely on these: add, never rename.
  EXPECT_THAT(keys, ElementsAre("name", "version", "m", "k", "dtype", "nnz", "sparsity", "state", "error", "format",
                                "format_reason", "bytes", "dense_bytes", "bytes_ratio", "has_bias",
                                "activation_threshold", "placement", "pinned", "content_xxh3", "create_time",
                                "pack_seconds", "residency", "sections", "speeds"));
  EXPECT_EQ(json["dtype"], "fp16");
  EXPECT_EQ(json["format"], "BITMAP");
  EXPECT_EQ(json["state"], "ready");
  EXPECT_EQ(json["bytes_ratio"], 0.5625);
  EXPECT_TRUE(json["activation_threshold"].is_null());
  EXPECT_EQ(json["create_time"], "1970-01-01T00:00:00Z");
  EXPECT_EQ(json["sections"][0]["name"], "values");
  EXPECT_EQ(json["speeds"][0]["tokens"], 8);
  EXPECT_THAT(LayerText(layer), AllOf(HasSubstr("BITMAP"), HasSubstr("cpu:0"), HasSubstr("values")));
  EXPECT_THAT(LayerTable({layer}), HasSubstr("56.2 %"));
}

TEST(Errors, CarryAHint) {
  EXPECT_THAT(ErrorText(absl::UnavailableError("connection refused"), "unix:/s", false),
              HasSubstr("hint: is spmmd running at unix:/s?"));
  EXPECT_THAT(ErrorText(absl::UnavailableError("Ssl handshake failed"), "h:1", false), HasSubstr("--tls-ca"));
  EXPECT_THAT(ErrorText(absl::UnauthenticatedError("no token"), "h:1", false), HasSubstr("--token-file"));
  EXPECT_THAT(ErrorText(absl::UnauthenticatedError("the bearer token is not known"), "h:1", false),
              HasSubstr("hint: it is none of"));
  EXPECT_EQ(ErrorText(absl::DataLossError("x"), "h:1", false), "spmmctl: DATA_LOSS: x\n");

  google::rpc::ErrorInfo info;
  info.set_reason("LAYER_NOT_FOUND");
  const absl::Status unknown =
      client::FromGrpcStatus(client::ErrorWithDetail(grpc::StatusCode::NOT_FOUND, "no layer", info));
  EXPECT_THAT(ErrorText(unknown, "h:1", false), HasSubstr("`spmmctl list`"));

  google::rpc::BadRequest bad;
  bad.add_field_violations()->set_field("content");
  bad.mutable_field_violations(0)->set_description("weights: NaN at row 0, column 0");
  const absl::Status nan =
      client::FromGrpcStatus(client::ErrorWithDetail(grpc::StatusCode::INVALID_ARGUMENT, "content: NaN", bad));
  EXPECT_THAT(ErrorText(nan, "h:1", false), HasSubstr("--allow-nonfinite"));
}

TEST(Errors, AsJsonAreOneLine) {
  google::rpc::BadRequest bad;
  bad.add_field_violations()->set_field("spec.name");
  bad.mutable_field_violations(0)->set_description("too long\n");
  const absl::Status status =
      client::FromGrpcStatus(client::ErrorWithDetail(grpc::StatusCode::INVALID_ARGUMENT, "bad name", bad));
  const std::string text = ErrorText(status, "h:1", true);
  EXPECT_EQ(text.find('\n'), text.size() - 1);
  const Json error = Json::parse(text)["error"];
  ASSERT_EQ(error["fields"].size(), 1u);
  EXPECT_EQ(error["code"], "INVALID_ARGUMENT");
  EXPECT_EQ(error["fields"][0]["field"], "spec.name");
  EXPECT_TRUE(error["retry_seconds"].is_null());
  // Bytes that are no UTF-8 must not end the program.
  EXPECT_EQ(Json::parse(ErrorText(absl::InternalError("\xff"), "h:1", true))["error"]["code"], "INTERNAL");
}

}  // namespace
}  // namespace spmmd::cli
