#include "kernels/format/container.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/format/file_io.h"
#include "tests/kernels/format/matrices.h"

namespace spmmd {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class ContainerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "spmmd_container_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { fs::remove_all(directory_); }

  std::string Path(const std::string& name = "layer.spmm") const { return (directory_ / name).string(); }

  static LayerFile MakeFile(Format format = Format::kDense) {
    const DenseMatrix w = testing::MakeMatrix(DType::kF16, 37, 53, 0.5);
    LayerFile file;
    file.layer = *Pack(format, w.view());
    for (int i = 0; i < 37; ++i) file.bias.push_back(static_cast<float>(i) * 0.5f);
    file.metadata = {{"source", "model.safetensors"}, {"tensor", "layers.0.q_proj.weight"}, {"empty", ""}};
    return file;
  }

  static std::string Slurp(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  // Parses bytes held in an aligned buffer of exactly their size.
  static absl::StatusOr<LayerFile> ParseBytes(const std::string& bytes) {
    const std::shared_ptr<std::byte> aligned(
        static_cast<std::byte*>(std::aligned_alloc(64, (bytes.size() + 127) / 64 * 64)), std::free);
    std::memcpy(aligned.get(), bytes.data(), bytes.size());
    return ParseLayerFile({aligned.get(), bytes.size()}, aligned);
  }

  fs::path directory_;
};

TEST_F(ContainerTest, RoundTripsLayerBiasAndMetadata) {
  const DenseMatrix w = testing::MakeMatrix(DType::kF16, 37, 53, 0.5);
  const LayerFile file = MakeFile();
  ASSERT_TRUE(WriteLayerFile(Path(), file).ok());
  auto read = ReadLayerFile(Path());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->bias, file.bias);
  EXPECT_EQ(read->metadata, file.metadata);
  EXPECT_EQ(read->layer.params, file.layer.params);
  EXPECT_EQ(read->layer.nnz, file.layer.nnz);
  EXPECT_EQ(read->layer.bytes().padding, file.layer.bytes().padding);
  EXPECT_TRUE(testing::SameNonzeros(w.view(), Unpack(read->layer)->view()));
}

TEST_F(ContainerTest, SectionsOutliveTheFileObjectAndAreAligned) {
  ASSERT_TRUE(WriteLayerFile(Path(), MakeFile(Format::kBitmap)).ok());
  PackedLayer layer;
  {
    auto read = ReadLayerFile(Path());
    ASSERT_TRUE(read.ok()) << read.status();
    layer = std::move(read->layer);
  }
  fs::remove(Path());
  for (const Section& section : layer.sections) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(section.data.data()) % 4096, 0u);
    // Buffer promises that many readable bytes behind the end; the file has them as zeros.
    for (size_t i = 0; i < Buffer::kAlignment; ++i) {
      EXPECT_EQ(section.data.data()[section.data.size() + i], std::byte{0});
    }
  }
  EXPECT_TRUE(Unpack(layer).ok());
}

TEST_F(ContainerTest, EveryFlippedBitIsRefused) {
  LayerFile file = MakeFile();
  ASSERT_TRUE(WriteLayerFile(Path(), file).ok());
  const std::string good = Slurp(Path());
  ASSERT_TRUE(ParseBytes(good).ok());
  std::mt19937_64 random(7);
  // All of the header proper and the section table, then a sample of everything else, paddings included.
  for (size_t i = 0; i < good.size() * 8;) {
    std::string bad = good;
    bad[i / 8] = static_cast<char>(bad[i / 8] ^ (1 << (i % 8)));
    const auto parsed = ParseBytes(bad);
    ASSERT_FALSE(parsed.ok()) << "bit " << i;
    ASSERT_TRUE(absl::IsDataLoss(parsed.status()) || absl::IsInvalidArgument(parsed.status())) << parsed.status();
    i += i < 320 * 8 ? 1 : 1 + random() % 600;
  }
}

TEST_F(ContainerTest, EveryTruncationIsRefused) {
  ASSERT_TRUE(WriteLayerFile(Path(), MakeFile()).ok());
  const std::string good = Slurp(Path());
  for (size_t size = 0; size < good.size(); size += size < 200 ? 1 : 97) {
    const auto parsed = ParseBytes(good.substr(0, size));
    ASSERT_FALSE(parsed.ok()) << size;
  }
  EXPECT_FALSE(ParseBytes(good + std::string(4096, '\0')).ok());
}

TEST_F(ContainerTest, ErrorsSayWhatIsWrong) {
  EXPECT_TRUE(absl::IsNotFound(ReadLayerFile(Path("nothing")).status()));
  std::ofstream(Path("text")) << "hello";
  const auto text = ReadLayerFile(Path("text"));
  EXPECT_TRUE(absl::IsInvalidArgument(text.status()));
  EXPECT_THAT(std::string(text.status().message()), HasSubstr("magic"));
  EXPECT_THAT(std::string(text.status().message()), HasSubstr(Path("text")));
  EXPECT_TRUE(absl::IsInvalidArgument(ReadLayerFile(directory_.string()).status()));

  std::ofstream(Path("empty"));
  EXPECT_TRUE(absl::IsInvalidArgument(ReadLayerFile(Path("empty")).status()));

  ASSERT_TRUE(WriteLayerFile(Path(), MakeFile()).ok());
  std::string newer = Slurp(Path());
  newer[8] = 2;
  EXPECT_THAT(std::string(ParseBytes(newer).status().message()), HasSubstr("version 2"));
}

TEST_F(ContainerTest, RefusesWhatItCannotWrite) {
  LayerFile file = MakeFile();
  file.bias.resize(3);
  EXPECT_THAT(std::string(WriteLayerFile(Path(), file).message()), HasSubstr("bias"));
  file = MakeFile();
  file.metadata["big"] = std::string(kMaxContainerMetadataBytes, 'x');
  EXPECT_THAT(std::string(WriteLayerFile(Path(), file).message()), HasSubstr("metadata"));
  EXPECT_FALSE(WriteLayerFile(Path("no/such/directory"), MakeFile()).ok());
  EXPECT_TRUE(fs::is_empty(directory_));
}

TEST(FileIoTest, NeverReplacesWhatIsNoRegularFile) {
  const std::string pipe = ::testing::TempDir() + "file_io_pipe." + std::to_string(getpid());
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(WriteFileAtomically(pipe, {}).code(), absl::StatusCode::kFailedPrecondition);
  // The error names the file asked for, not the temporary one.
  EXPECT_EQ(WriteFileAtomically("/no-such-directory/w.spmmpk", {}).message(),
            "create /no-such-directory/w.spmmpk: No such file or directory");
  struct stat info;
  ASSERT_EQ(stat(pipe.c_str(), &info), 0);
  EXPECT_TRUE(S_ISFIFO(info.st_mode));
  unlink(pipe.c_str());
}

TEST_F(ContainerTest, FailedWriteLeavesTheOldFileAndNoTemporary) {
  ASSERT_TRUE(WriteLayerFile(Path(), MakeFile()).ok());
  const std::string before = Slurp(Path());
  // A directory in the way makes the rename fail after everything was written.
  fs::create_directory(Path("taken"));
  EXPECT_FALSE(WriteLayerFile(Path("taken"), MakeFile()).ok());
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator{}), 2);
  EXPECT_EQ(Slurp(Path()), before);
}

TEST_F(ContainerTest, ReplacesWhileAnOldMappingIsInUse) {
  ASSERT_TRUE(WriteLayerFile(Path(), MakeFile(Format::kDense)).ok());
  auto old_file = ReadLayerFile(Path());
  ASSERT_TRUE(old_file.ok());
  ASSERT_TRUE(WriteLayerFile(Path(), MakeFile(Format::kBitmap)).ok());
  auto new_file = ReadLayerFile(Path());
  ASSERT_TRUE(new_file.ok()) << new_file.status();
  EXPECT_TRUE(testing::SameNonzeros(Unpack(old_file->layer)->view(), Unpack(new_file->layer)->view()));
}

}  // namespace
}  // namespace spmmd
