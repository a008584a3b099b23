#include "kernels/format/safetensors.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/format/compressed_tensors.h"
#include "tests/kernels/format/matrices.h"

namespace spmmd {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

// Written by the safetensors and compressed-tensors libraries: tests/data/make_compressed_tensors.py.
const std::string kData = "tests/data/compressed_tensors/";

std::string MakeFile(const std::string& header, size_t data_bytes) {
  uint64_t size = header.size();
  std::string file(reinterpret_cast<const char*>(&size), sizeof(size));
  return file + header + std::string(data_bytes, 'x');
}

absl::StatusOr<SafetensorsFile> Parse(const std::string& file) {
  return SafetensorsFile::Parse({reinterpret_cast<const std::byte*>(file.data()), file.size()}, nullptr);
}

std::string ParseError(const std::string& header, size_t data_bytes) {
  const auto file = Parse(MakeFile(header, data_bytes));
  EXPECT_TRUE(absl::IsInvalidArgument(file.status())) << file.status();
  return std::string(file.status().message());
}

TEST(SafetensorsTest, ReadsWhatTheLibraryWrites) {
  auto file = SafetensorsFile::Open(kData + "dense.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->metadata().at("format"), "pt");
  EXPECT_EQ(file->tensors().size(), 6u);
  const SafetensorsTensor& up = file->tensors().at("model.layers.0.mlp.up_proj.weight");
  EXPECT_EQ(up.dtype, "F16");
  EXPECT_THAT(up.shape, ElementsAre(17, 37));
  auto checkpoint = SafetensorsCheckpoint::Open(kData + "dense.safetensors");
  ASSERT_TRUE(checkpoint.ok());
  const auto bias = checkpoint->ReadMatrix("model.layers.0.self_attn.q_proj.bias");
  ASSERT_TRUE(bias.ok()) << bias.status();
  EXPECT_EQ(bias->rows(), 1);
  EXPECT_EQ(bias->cols(), 24);
}

TEST(SafetensorsTest, AcceptsAMinimalFileAndAnEmptyOne) {
  EXPECT_TRUE(Parse(MakeFile("{}", 0)).ok());
  EXPECT_TRUE(Parse(MakeFile(R"({"__metadata__":{"a":"b"}}   )", 0)).ok());
  const auto file = Parse(MakeFile(R"({"b":{"dtype":"F32","shape":[1,2],"data_offsets":[4,12]},
                         "a":{"data_offsets":[0,4],"shape":[2],"dtype":"F16"},
                         "none":{"dtype":"F16","shape":[0,7],"data_offsets":[12,12]},
                         "new":{"dtype":"F4","shape":[4],"data_offsets":[12,14]}})",
                                   14));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors().at("a").data.size(), 4u);
}

TEST(SafetensorsTest, RefusesMalformedHeaders) {
  EXPECT_FALSE(Parse("").ok());
  EXPECT_FALSE(Parse("abc").ok());
  EXPECT_THAT(std::string(Parse(std::string(16, '\xff')).status().message()), HasSubstr("length"));
  EXPECT_THAT(ParseError("", 0), HasSubstr("JSON"));
  EXPECT_THAT(ParseError("{", 0), HasSubstr("JSON"));
  EXPECT_THAT(ParseError("{} {}", 0), HasSubstr("JSON"));
  EXPECT_THAT(ParseError("[]", 0), HasSubstr("array"));
  EXPECT_THAT(ParseError("7", 0), HasSubstr("number"));
  EXPECT_THAT(ParseError(R"({"a":7})", 0), HasSubstr("number"));
  EXPECT_THAT(ParseError(R"({"a":{"b":{}}})", 0), HasSubstr("object"));
  EXPECT_THAT(ParseError(std::string(100000, '[') + std::string(100000, ']'), 0), HasSubstr("array"));
  const auto tensor = [](const std::string& fields) { return R"({"a":{)" + fields + "}}"; };
  EXPECT_THAT(ParseError(tensor(R"("dtype":"F16","shape":[2])"), 4), HasSubstr("missing"));
  EXPECT_THAT(ParseError(tensor(R"("dtype":"F16","shape":[2],"data_offsets":[0])"), 4), HasSubstr("missing"));
  EXPECT_THAT(ParseError(tensor(R"("dtype":"F16","shape":[-2],"data_offsets":[0,4])"), 4), HasSubstr("negative"));
  EXPECT_THAT(ParseError(tensor(R"("dtype":"F16","shape":[2.0],"data_offsets":[0,4])"), 4), HasSubstr("fraction"));
  EXPECT_THAT(ParseError(tensor(R"("dtype":"F16","shape":[[2]],"data_offsets":[0,4])"), 4), HasSubstr("array"));
  EXPECT_THAT(ParseError(tensor(R"("dtype":"F16","shape":[2],"shape":[2],"data_offsets":[0,4])"), 4),
              HasSubstr("shape"));
  EXPECT_THAT(ParseError(R"({"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},
                             "a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}})",
                         4),
              HasSubstr("twice"));
}

TEST(SafetensorsTest, RefusesBadOffsets) {
  const auto one = [](const std::string& shape, const std::string& offsets) {
    return R"({"a":{"dtype":"F16","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  EXPECT_THAT(ParseError(one("[2]", "[0,4]"), 3), HasSubstr("leave the file"));
  EXPECT_THAT(ParseError(one("[2]", "[4,0]"), 4), HasSubstr("leave the file"));
  EXPECT_THAT(ParseError(one("[2]", "[18446744073709551612,18446744073709551615]"), 4), HasSubstr("leave the file"));
  EXPECT_THAT(ParseError(one("[2]", "[0,4]"), 5), HasSubstr("accounts for 4"));
  EXPECT_THAT(ParseError(one("[2]", "[1,5]"), 5), HasSubstr("gap"));
  EXPECT_THAT(ParseError(one("[3]", "[0,4]"), 4), HasSubstr("span"));
  EXPECT_THAT(ParseError(one("[4294967296,4294967296]", "[0,0]"), 0), HasSubstr("overflows"));
  EXPECT_THAT(ParseError(one("[9223372036854775808]", "[0,0]"), 0), HasSubstr("overflows"));
  EXPECT_THAT(ParseError(R"({"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},
                             "b":{"dtype":"F16","shape":[2],"data_offsets":[2,6]}})",
                         6),
              HasSubstr("overlap"));
}

TEST(SafetensorsTest, RefusesDtypesAndRanksItCannotGive) {
  const auto file = Parse(MakeFile(R"({"i":{"dtype":"I32","shape":[1,1],"data_offsets":[0,4]},
                                       "c":{"dtype":"F16","shape":[1,1,1],"data_offsets":[4,6]},
                                       "e":{"dtype":"F16","shape":[0,3],"data_offsets":[6,6]}})",
                                   6));
  ASSERT_TRUE(file.ok()) << file.status();
  for (const auto& [name, text] : {std::pair{"i", "I32"}, {"c", "3 dimensions"}, {"e", "M"}}) {
    const auto matrix = SafetensorsToMatrix(name, file->tensors().at(name));
    EXPECT_TRUE(absl::IsInvalidArgument(matrix.status()));
    EXPECT_THAT(std::string(matrix.status().message()), HasSubstr(text));
  }
}

TEST(SafetensorsIndexTest, RefusesPathsThatLeaveTheDirectory) {
  for (const char* name : {"", "/etc/passwd", "../a.safetensors", "a/../../b", "./a", "a//b", "a\\\\b", "..", "a/"}) {
    const auto index = ParseSafetensorsIndex(std::string(R"({"weight_map":{"t":")") + name + R"("}})");
    EXPECT_TRUE(absl::IsInvalidArgument(index.status())) << name;
  }
  for (const char* json : {"", "[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{"t":1}})", "{\"weight_map\":"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseSafetensorsIndex(json).status())) << json;
  }
  EXPECT_EQ(ParseSafetensorsIndex(R"({"metadata":{},"weight_map":{"t":"a/b.safetensors"}})")->at("t"),
            "a/b.safetensors");
}

TEST(SafetensorsIndexTest, ShardsBehaveAsOneFile) {
  auto sharded = SafetensorsCheckpoint::Open(kData + "sharded/model.safetensors.index.json");
  auto single = SafetensorsCheckpoint::Open(kData + "sparse_bitmask.safetensors");
  ASSERT_TRUE(sharded.ok()) << sharded.status();
  ASSERT_TRUE(single.ok()) << single.status();
  EXPECT_EQ(sharded->TensorNames(), single->TensorNames());
  for (const std::string& name : single->TensorNames()) {
    const auto a = single->Find(name);
    const auto b = sharded->Find(name);
    ASSERT_TRUE(a.ok() && b.ok());
    EXPECT_EQ(a->dtype, b->dtype);
    EXPECT_EQ(a->shape, b->shape);
    ASSERT_EQ(a->data.size(), b->data.size());
    EXPECT_EQ(std::memcmp(a->data.data(), b->data.data(), a->data.size()), 0);
  }
  const auto missing = single->Find("q_proj.weight");
  EXPECT_TRUE(absl::IsNotFound(missing.status()));
}

TEST(SafetensorsIndexTest, AWrongNameBringsThoseLikeIt) {
  auto checkpoint = SafetensorsCheckpoint::Open("tests/data/minilm-block0/block.safetensors");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto message = [&](const char* name) { return std::string(checkpoint->Find(name).status().message()); };
  EXPECT_EQ(message("q.wieght"), "no tensor 'q.wieght'; near it: q.weight");
  EXPECT_EQ(message("layer.0.down.bias"),
            "no tensor 'layer.0.down.bias'; near it: down.bias, k.bias, o.bias, q.bias, up.bias");
  EXPECT_EQ(message("weight"),
            "no tensor 'weight'; near it: down.weight, k.weight, o.weight, q.weight, up.weight");  // five at most
  EXPECT_EQ(message("zzz"), "no tensor 'zzz'");
}

TEST(SafetensorsIndexTest, SymbolicLinksMayNotLeaveTheRoot) {
  std::string pattern = (fs::temp_directory_path() / "spmmd_st_XXXXXX").string();
  ASSERT_NE(mkdtemp(pattern.data()), nullptr);
  const fs::path base = pattern;
  fs::create_directories(base / "root");
  fs::copy(kData + "dense.safetensors", base / "outside.safetensors");
  fs::copy(kData + "dense.safetensors", base / "root" / "inside.safetensors");
  fs::create_symlink("../outside.safetensors", base / "root" / "link.safetensors");
  fs::create_symlink("inside.safetensors", base / "root" / "good_link.safetensors");
  std::ofstream(base / "root" / "i.json")
      << R"({"weight_map":{"model.layers.0.mlp.up_proj.weight":"link.safetensors"}})";
  const std::string root = (base / "root").string();
  EXPECT_TRUE(SafetensorsCheckpoint::Open(root + "/inside.safetensors", root).ok());
  EXPECT_TRUE(SafetensorsCheckpoint::Open(root + "/good_link.safetensors", root).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(SafetensorsCheckpoint::Open(root + "/link.safetensors", root).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(SafetensorsCheckpoint::Open(root + "/../outside.safetensors", root).status()));
  auto index = SafetensorsCheckpoint::Open(root + "/i.json", root);
  ASSERT_TRUE(index.ok());
  EXPECT_TRUE(absl::IsInvalidArgument(index->ReadMatrix("model.layers.0.mlp.up_proj.weight").status()));
  fs::remove_all(base);
}

// Each bitmask file must give the bits of the dense-saved one.
TEST(CompressedTensorsTest, BitmaskFormsEqualTheDenseSavedWeights) {
  auto dense = SafetensorsCheckpoint::Open(kData + "dense.safetensors");
  ASSERT_TRUE(dense.ok());
  int compared = 0;
  for (const char* file :
       {"sparse_bitmask.safetensors", "sparse_24_bitmask.safetensors", "sharded/model.safetensors.index.json"}) {
    auto compressed = SafetensorsCheckpoint::Open(kData + file);
    ASSERT_TRUE(compressed.ok()) << compressed.status();
    const std::vector<std::string> names = CheckpointWeightNames(*compressed);
    EXPECT_THAT(names, Not(Contains(HasSubstr("bitmask"))));
    for (const std::string& name : names) {
      const auto want = ReadCheckpointWeight(&*dense, name);
      const auto got = ReadCheckpointWeight(&*compressed, name);
      ASSERT_TRUE(want.ok()) << want.status();
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_TRUE(testing::SameNonzeros(want->view(), got->view())) << name;
      ++compared;
    }
  }
  EXPECT_EQ(compared, 4 + 2 + 4);
}

// One bitmask layer "p" of shape [2, 3] with four nonzeros, one field spoilt at a time.
TEST(CompressedTensorsTest, RefusesPartsThatDisagree) {
  std::string pattern = (fs::temp_directory_path() / "spmmd_ct_XXXXXX").string();
  ASSERT_NE(mkdtemp(pattern.data()), nullptr);
  const std::string path = pattern + "/a.safetensors";
  struct Fields {
    int64_t shape[2] = {2, 3};
    uint8_t bitmask[2] = {0b101, 0b110};
    int64_t offsets[2] = {0, 2};
    std::string values_dtype = "F16";
  };
  const auto read = [&](const Fields& f) {
    std::string file = MakeFile(R"({"p.shape":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},
        "p.row_offsets":{"dtype":"I64","shape":[2],"data_offsets":[16,32]},
        "p.compressed":{"dtype":")" +
                                    f.values_dtype + R"(","shape":[4],"data_offsets":[32,40]},
        "p.bitmask":{"dtype":"U8","shape":[2,1],"data_offsets":[40,42]}})",
                                42);
    char* data = file.data() + file.size() - 42;
    std::memcpy(data, f.shape, 16);
    std::memcpy(data + 16, f.offsets, 16);
    std::memcpy(data + 40, f.bitmask, 2);
    std::ofstream(path, std::ios::binary) << file;
    auto checkpoint = SafetensorsCheckpoint::Open(path);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    return ReadCheckpointWeight(&*checkpoint, "p.weight").status();
  };
  EXPECT_TRUE(read({}).ok()) << read({});
  Fields bad;
  bad.bitmask[0] = 0b111;
  EXPECT_THAT(std::string(read(bad).message()), HasSubstr("row_offsets"));
  bad = {};
  bad.bitmask[1] = 0b1110;
  EXPECT_THAT(std::string(read(bad).message()), HasSubstr("last column"));
  bad = {};
  bad.bitmask[1] = 0b111;
  EXPECT_THAT(std::string(read(bad).message()), HasSubstr("bits are set"));
  bad = {};
  bad.offsets[1] = 1;
  EXPECT_THAT(std::string(read(bad).message()), HasSubstr("row 1 starts at 1"));
  bad = {};
  bad.shape[0] = 3;
  EXPECT_THAT(std::string(read(bad).message()), HasSubstr("bitmask"));
  bad = {};
  bad.shape[0] = -1;
  EXPECT_THAT(std::string(read(bad).message()), HasSubstr("p.shape"));
  bad = {};
  bad.shape[0] = bad.shape[1] = int64_t{1} << 62;
  EXPECT_THAT(std::string(read(bad).message()), HasSubstr("p.shape"));
  bad = {};
  bad.values_dtype = "I16";
  EXPECT_THAT(std::string(read(bad).message()), HasSubstr("I16"));
  fs::remove_all(pattern);
}

}  // namespace
}  // namespace spmmd
