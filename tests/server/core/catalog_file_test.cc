#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_format.h"
#include "kernels/format/container.h"
#include "kernels/format/npy.h"
#include "server/catalog/catalog.h"
#include "tests/server/core/core_harness.h"

namespace spmmd::server {
namespace {

using testing::Bytes;
using testing::Core;
using testing::CoreOptions;
using testing::Hash;
using ::testing::HasSubstr;
using testing::RandomMatrix;
using testing::Series;
using testing::Stored;

class FileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::path(::testing::TempDir()) /
            absl::StrCat("spmmd_repo_", ::testing::UnitTest::GetInstance()->current_test_info()->name(), getpid());
    std::filesystem::create_directories(root_ / "models");
    CoreOptions options;
    options.model_repository = (root_ / "models").string();
    core_ = std::make_unique<Core>(options);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  // A .safetensors file with a weight "w" and a bias "b".
  void WriteSafetensors(const std::string& path, const DenseView& w, const std::vector<float>& bias) {
    const size_t w_bytes = static_cast<size_t>(w.rows * w.cols) * SizeOf(w.dtype);
    const std::string header = absl::StrFormat(
        R"({"w":{"dtype":"F16","shape":[%d,%d],"data_offsets":[0,%d]},"b":{"dtype":"F32","shape":[%d],"data_offsets":[%d,%d]}})",
        w.rows, w.cols, w_bytes, bias.size(), w_bytes, w_bytes + bias.size() * 4);
    const uint64_t size = header.size();
    std::ofstream(path, std::ios::binary) << Bytes(&size, 8) << header << Bytes(w) << Bytes(bias);
  }
  absl::StatusOr<pb::Layer> Load(const pb::LayerSpec& spec) {
    auto upload = core_->catalog.Begin(spec);
    if (!upload.ok()) return upload.status();
    EXPECT_FALSE((*upload)->accepted().content_needed());
    return (*upload)->Finish();
  }

  std::filesystem::path root_;
  std::unique_ptr<Core> core_;
};

TEST_F(FileTest, TensorOfASafetensorsFile) {
  const DenseMatrix w = RandomMatrix(DType::kF16, 20, 30, 0.5, 1);
  const std::vector<float> bias(20, 2.0f);
  WriteSafetensors((root_ / "models/m.safetensors").string(), w.view(), bias);
  pb::LayerSpec spec;
  spec.set_name("w");
  spec.mutable_file()->set_path("m.safetensors");
  spec.mutable_file()->set_tensor("w");
  spec.mutable_file()->set_bias_tensor("b");
  const auto layer = Load(spec);
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->m(), 20);
  EXPECT_EQ(layer->k(), 30);
  EXPECT_TRUE(layer->has_bias());
  EXPECT_EQ(layer->content_xxh3(), Hash(Bytes(w.view()) + Bytes(bias)));
  EXPECT_EQ(Bytes(Stored(*core_, "w").view()), Bytes(w.view()));
  EXPECT_EQ(Series(core_->metrics, R"(spmmd_layer_loads_total{source="file"})"), 1);

  spec.set_name("other");
  spec.set_m(21);
  EXPECT_EQ(FieldOf(Load(spec).status()), "spec.m");
  spec.clear_m();
  spec.set_dtype(pb::DATA_TYPE_BF16);
  EXPECT_EQ(FieldOf(Load(spec).status()), "spec.dtype");
  spec.clear_dtype();
  spec.mutable_file()->set_bias_tensor("w");
  EXPECT_EQ(FieldOf(Load(spec).status()), "spec.file.bias_tensor");
  spec.mutable_file()->clear_bias_tensor();
  spec.mutable_file()->set_tensor("b");
  EXPECT_EQ(FieldOf(Load(spec).status()), "spec.file.tensor");
  spec.mutable_file()->set_tensor("nothing");
  EXPECT_EQ(Load(spec).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(Load(spec).status()), "FILE_NOT_FOUND");
}

TEST_F(FileTest, NpyFile) {
  const DenseMatrix w = RandomMatrix(DType::kF32, 9, 7, 0.5, 1);
  ASSERT_TRUE(WriteNpy((root_ / "models/w.npy").string(), w.view()).ok());
  pb::LayerSpec spec;
  spec.set_name("w");
  spec.mutable_file()->set_path("w.npy");
  ASSERT_TRUE(Load(spec).ok());
  EXPECT_EQ(Bytes(Stored(*core_, "w").view()), Bytes(w.view()));
  spec.mutable_file()->set_tensor("t");
  EXPECT_EQ(FieldOf(Load(spec).status()), "spec.file.tensor");
}

TEST_F(FileTest, NoPathLeavesTheRepository) {
  const DenseMatrix w = RandomMatrix(DType::kF32, 9, 7, 0.5, 1);
  ASSERT_TRUE(WriteNpy((root_ / "secret.npy").string(), w.view()).ok());
  std::filesystem::create_symlink(root_ / "secret.npy", root_ / "models/link.npy");
  std::filesystem::create_directory_symlink(root_, root_ / "models/dir");
  pb::LayerSpec spec;
  spec.set_name("w");
  for (const std::string& path :
       {std::string("../secret.npy"), (root_ / "secret.npy").string(), std::string("link.npy"),
        std::string("dir/secret.npy"), std::string("a/../../secret.npy")}) {
    spec.mutable_file()->set_path(path);
    const absl::Status status = Load(spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << path << status;
    EXPECT_EQ(FieldOf(status), "spec.file.path") << path;
  }
  spec.mutable_file()->set_path("missing.npy");
  const absl::Status missing = Load(spec).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(std::string(missing.message()).find(root_.string()), std::string::npos);
  spec.mutable_file()->set_path("models");
  EXPECT_FALSE(Load(spec).ok());
}

TEST_F(FileTest, ErrorsShowNoDirectoryOfTheHost) {
  const std::string models = (root_ / "models").string();
  std::filesystem::create_directories(models + "/sub/folder.npy");
  std::ofstream(models + "/sub/bad.npy") << "not numpy at all";
  std::ofstream(models + "/sub/bad.safetensors") << "xxxxxxxxxxxxxxxxxxxx";
  std::ofstream(models + "/sub/bad.safetensors.index.json") << "{";
  std::ofstream(models + "/sub/lost.safetensors.index.json") << R"({"weight_map": {"w": "lost.safetensors"}})";
  std::ofstream(models + "/sub/liar.safetensors.index.json") << R"({"weight_map": {"w": "one.safetensors"}})";
  WriteSafetensors(models + "/sub/one.safetensors", RandomMatrix(DType::kF16, 2, 2, 0.5, 1).view(), {1, 2});
  std::filesystem::rename(models + "/sub/one.safetensors", (root_ / "outside.safetensors").string());
  std::filesystem::create_symlink(root_ / "outside.safetensors", models + "/sub/one.safetensors");
  pb::LayerSpec spec;
  spec.set_name("w");
  for (const auto& [path, tensor] : {std::pair<std::string, std::string>{"sub/missing.npy", ""},
                                     {"sub/folder.npy", ""},
                                     {"sub/bad.npy", ""},
                                     {"sub/bad.npy/below.npy", ""},
                                     {"sub/bad.safetensors", "w"},
                                     {"sub/bad.safetensors.index.json", "w"},
                                     {"sub/lost.safetensors.index.json", "w"},
                                     {"sub/lost.safetensors.index.json", "v"},
                                     {"sub/liar.safetensors.index.json", "w"},
                                     {"sub/one.safetensors", "w"}}) {
    spec.mutable_file()->set_path(path);
    spec.mutable_file()->set_tensor(tensor);
    const absl::Status status = Load(spec).status();
    EXPECT_FALSE(status.ok()) << path;
    EXPECT_THAT(std::string(status.message()), ::testing::Not(HasSubstr(root_.string()))) << path;
    EXPECT_THAT(std::string(status.message()), HasSubstr("spec.file.")) << path;
  }
}

TEST_F(FileTest, PackedLayerFile) {
  const DenseMatrix w = RandomMatrix(DType::kF16, 70, 90, 0.5, 1);
  LayerFile file;
  file.layer = *Pack(Format::kThreeLayer, w.view());  // which the CPU cannot execute: it is packed anew
  file.bias.assign(70, 2.0f);
  const std::string path = (root_ / "models/w.spmmpk").string();
  ASSERT_TRUE(WriteLayerFile(path, file).ok());
  pb::LayerSpec spec;
  spec.set_name("w");
  spec.mutable_file()->set_path("w.spmmpk");
  const auto layer = Load(spec);
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_TRUE(layer->has_bias());
  EXPECT_EQ(layer->format(), pb::FORMAT_BITMAP);
  EXPECT_EQ(Bytes(Stored(*core_, "w").view()), Bytes(w.view()));
  spec.mutable_file()->set_tensor("t");
  EXPECT_EQ(FieldOf(Load(spec).status()), "spec.file.tensor");
  spec.mutable_file()->clear_tensor();
  spec.set_k(91);
  EXPECT_EQ(FieldOf(Load(spec).status()), "spec.k");
  spec.clear_k();

  file.bias.clear();
  ASSERT_TRUE(WriteLayerFile(path, file).ok());
  spec.set_has_bias(true);
  EXPECT_EQ(FieldOf(Load(spec).status()), "spec.has_bias");
  spec.clear_has_bias();
  std::fstream(path, std::ios::in | std::ios::out | std::ios::binary).seekp(5000).put('\x55');
  const absl::Status damaged = Load(spec).status();
  EXPECT_EQ(damaged.code(), absl::StatusCode::kDataLoss) << damaged;
  EXPECT_THAT(std::string(damaged.message()), HasSubstr("spec.file.path: w.spmmpk: section"));
}

TEST_F(FileTest, CompressedTensorsCheckpoint) {
  const std::string data = "tests/data/compressed_tensors/";
  for (const char* name : {"dense", "sparse_bitmask"}) {
    std::filesystem::copy(data + name + ".safetensors", root_ / "models" / (std::string(name) + ".safetensors"));
  }
  pb::LayerSpec spec;
  spec.mutable_file()->set_tensor("model.layers.0.mlp.up_proj.weight");
  for (const std::string name : {"dense", "sparse_bitmask"}) {
    spec.set_name(name);
    spec.mutable_file()->set_path(name + ".safetensors");
    ASSERT_TRUE(Load(spec).ok()) << Load(spec).status();
  }
  EXPECT_EQ(Bytes(Stored(*core_, "sparse_bitmask").view()), Bytes(Stored(*core_, "dense").view()));
}

TEST_F(FileTest, WrongMagicAndNoRepository) {
  std::ofstream(root_ / "models/bad.npy") << "not numpy at all";
  std::ofstream(root_ / "models/bad.safetensors") << "xxxxxxxxxxxxxxxxxxxx";
  pb::LayerSpec spec;
  spec.set_name("w");
  spec.mutable_file()->set_path("bad.npy");
  EXPECT_EQ(FieldOf(Load(spec).status()), "spec.file.path");
  spec.mutable_file()->set_path("bad.safetensors");
  spec.mutable_file()->set_tensor("w");
  EXPECT_EQ(FieldOf(Load(spec).status()), "spec.file.path");
  spec.mutable_file()->set_path("w.txt");
  std::ofstream(root_ / "models/w.txt") << "x";
  EXPECT_EQ(FieldOf(Load(spec).status()), "spec.file.path");

  Core plain;
  const absl::Status status = plain.catalog.Begin(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(status), "NO_MODEL_REPOSITORY");
}

}  // namespace
}  // namespace spmmd::server
