#include "kernels/format/npy.h"

#include <cstdlib>
#include <filesystem>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/format/matrices.h"

namespace spmmd {
namespace {

using ::testing::HasSubstr;

const std::string kData = "tests/data/compressed_tensors/";

absl::Span<const std::byte> AsBytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// A version 1 file around this header text.
std::string MakeNpy(const std::string& header, const std::string& data) {
  std::string file("\x93NUMPY\x01\x00", 8);
  file.push_back(static_cast<char>(header.size() & 0xff));
  file.push_back(static_cast<char>(header.size() >> 8));
  return file + header + data;
}

std::string ParseError(const std::string& file) {
  const auto parsed = ParseNpy(AsBytes(file));
  EXPECT_TRUE(absl::IsInvalidArgument(parsed.status())) << parsed.status();
  return std::string(parsed.status().message());
}

// Files that numpy.save wrote: element i of the row-major 3x5 matrix is i - 7.5.
TEST(NpyTest, ReadsWhatNumpyWrites) {
  const std::pair<const char*, DType> files[] = {{"f32.npy", DType::kF32},          {"f32_fortran.npy", DType::kF32},
                                                 {"f16.npy", DType::kF16},          {"f16_version2.npy", DType::kF16},
                                                 {"f16_version3.npy", DType::kF16}, {"bf16.npy", DType::kBf16}};
  for (const auto& [name, dtype] : files) {
    const auto matrix = ReadNpy(kData + name);
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    EXPECT_EQ(matrix->dtype(), dtype) << name;
    ASSERT_EQ(matrix->rows(), 3);
    ASSERT_EQ(matrix->cols(), 5);
    for (int i = 0; i < 15; ++i) EXPECT_EQ(ElementAsDouble(matrix->view(), i / 5, i % 5), i - 7.5) << name;
  }
}

TEST(NpyTest, RefusesOtherDtypesByName) {
  const auto big = ReadNpy(kData + "big_endian.npy");
  EXPECT_THAT(std::string(big.status().message()), HasSubstr("big-endian"));
  const auto wide = ReadNpy(kData + "f64.npy");
  EXPECT_THAT(std::string(wide.status().message()), HasSubstr("'<f8' is not supported"));
  EXPECT_THAT(std::string(wide.status().message()), HasSubstr(kData + "f64.npy"));
  EXPECT_TRUE(absl::IsNotFound(ReadNpy(kData + "nothing.npy").status()));
}

TEST(NpyTest, WritesWhatItReads) {
  std::string pattern = (std::filesystem::temp_directory_path() / "spmmd_npy_XXXXXX").string();
  ASSERT_NE(mkdtemp(pattern.data()), nullptr);
  const std::string path = pattern + "/a.npy";
  for (const DType dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
    DenseMatrix matrix = testing::MakeMatrix(dtype, 7, 33, 0.5);
    DenseView strided = matrix.view();
    strided.cols = 20;
    ASSERT_TRUE(WriteNpy(path, strided).ok());
    const auto read = ReadNpy(path);
    ASSERT_TRUE(read.ok()) << read.status();
    for (int64_t r = 0; r < 7; ++r) {
      for (int64_t c = 0; c < 20; ++c) {
        ASSERT_EQ(testing::BitsAt(read->view(), r, c), testing::BitsAt(matrix.view(), r, c));
      }
    }
  }
  std::filesystem::remove_all(pattern);
}

TEST(NpyTest, VectorsAreOneRow) {
  const std::string file = MakeNpy("{'descr': '<f2', 'fortran_order': False, 'shape': (3,), }\n", std::string(6, 'a'));
  const auto matrix = NpyToMatrix(*ParseNpy(AsBytes(file)));
  ASSERT_TRUE(matrix.ok());
  EXPECT_EQ(matrix->rows(), 1);
  EXPECT_EQ(matrix->cols(), 3);
}

TEST(NpyTest, RefusesMalformedFiles) {
  const std::string data(6, 'a');
  EXPECT_THAT(ParseError(""), HasSubstr("magic"));
  EXPECT_THAT(ParseError("\x93NUMPY"), HasSubstr("cut off"));
  EXPECT_THAT(ParseError(std::string("\x93NUMPY\x04\x00\x00\x00", 10)), HasSubstr("version 4"));
  EXPECT_THAT(ParseError(std::string("\x93NUMPY\x01\x00\xff\xff", 10)), HasSubstr("length exceeds"));
  EXPECT_THAT(ParseError(MakeNpy("[]", data)), HasSubstr("no dictionary"));
  EXPECT_THAT(ParseError(MakeNpy("{'descr': '<f2'}", data)), HasSubstr("missing"));
  EXPECT_THAT(ParseError(MakeNpy("{'descr': '<f2', 'fortran_order': 1, 'shape': (3,)}", data)),
              HasSubstr("fortran_order"));
  EXPECT_THAT(ParseError(MakeNpy("{'descr': '<f2', 'descr': '<f2', 'shape': (3,)}", data)), HasSubstr("twice"));
  EXPECT_THAT(ParseError(MakeNpy("{'descr': [('a', '<f2')], 'fortran_order': False, 'shape': (3,)}", data)),
              HasSubstr("structured"));
  EXPECT_THAT(ParseError(MakeNpy("{'descr': '<f2', 'fortran_order': False, 'shape': (-3,)}", data)),
              HasSubstr("shape"));
  EXPECT_THAT(ParseError(MakeNpy("{'descr': '<f2', 'fortran_order': False, 'shape': (99999999999999999999,)}", data)),
              HasSubstr("shape"));
  // 2^62 * 8 elements wrap to a small number of bytes.
  EXPECT_THAT(
      ParseError(MakeNpy(
          "{'descr': '<f2', 'fortran_order': False, 'shape': (4611686018427387904, 4611686018427387904)}", data)),
      HasSubstr("overflows"));
  EXPECT_THAT(ParseError(MakeNpy("{'descr': '<f2', 'fortran_order': False, 'shape': (4,)}", data)),
              HasSubstr("do not match"));
  EXPECT_THAT(ParseError(MakeNpy("{'descr': '<f2', 'fortran_order': False, 'shape': (3,)} x", data)),
              HasSubstr("behind the dictionary"));
  const std::string cube = MakeNpy("{'descr': '<f2', 'fortran_order': False, 'shape': (1,3,1)}", data);
  EXPECT_TRUE(absl::IsInvalidArgument(NpyToMatrix(*ParseNpy(AsBytes(cube))).status()));
  const std::string empty = MakeNpy("{'descr': '<f2', 'fortran_order': False, 'shape': (0,3)}", "");
  EXPECT_TRUE(absl::IsInvalidArgument(NpyToMatrix(*ParseNpy(AsBytes(empty))).status()));
}

}  // namespace
}  // namespace spmmd
