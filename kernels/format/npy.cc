#include "kernels/format/npy.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/file_io.h"
#include "kernels/format/import.h"

namespace spmmd {
namespace {

constexpr absl::string_view kMagic("\x93NUMPY", 6);
constexpr size_t kMaxHeaderBytes = size_t{1} << 20;  // NumPy's own are below 64 KiB

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("npy header: ", what));
}

// Reads the Python literal that a header is: a dict of strings, booleans and tuples of integers.
class HeaderReader {
 public:
  explicit HeaderReader(absl::string_view text) : text_(text) {}

  // Skips white space, then takes `token` if it comes next.
  bool Take(absl::string_view token) {
    text_ = absl::StripLeadingAsciiWhitespace(text_);
    return absl::ConsumePrefix(&text_, token);
  }
  std::optional<absl::string_view> TakeString() {
    text_ = absl::StripLeadingAsciiWhitespace(text_);
    if (text_.empty() || (text_[0] != '\'' && text_[0] != '"')) return std::nullopt;
    const size_t end = text_.find(text_[0], 1);
    if (end == absl::string_view::npos) return std::nullopt;
    const absl::string_view value = text_.substr(1, end - 1);
    text_.remove_prefix(end + 1);
    return value;
  }
  std::optional<int64_t> TakeInteger() {
    text_ = absl::StripLeadingAsciiWhitespace(text_);
    const size_t digits = std::min(text_.find_first_not_of("0123456789"), text_.size());
    int64_t value = 0;
    if (!absl::SimpleAtoi(text_.substr(0, digits), &value)) return std::nullopt;  // refuses overflow and ""
    text_.remove_prefix(digits);
    absl::ConsumePrefix(&text_, "L");  // Python 2 wrote long integers so
    return value;
  }
  bool AtEnd() { return absl::StripLeadingAsciiWhitespace(text_).empty(); }

 private:
  absl::string_view text_;
};

std::optional<std::vector<int64_t>> TakeShape(HeaderReader* reader) {
  constexpr size_t kMaxRank = 64;  // NumPy's limit
  std::vector<int64_t> shape;
  if (!reader->Take("(")) return std::nullopt;
  while (!reader->Take(")")) {
    const std::optional<int64_t> dimension = reader->TakeInteger();
    if (!dimension.has_value() || shape.size() == kMaxRank) return std::nullopt;
    shape.push_back(*dimension);
    if (!reader->Take(",")) {
      if (!reader->Take(")")) return std::nullopt;
      break;
    }
  }
  return shape;
}

absl::StatusOr<DType> ParseDescr(absl::string_view descr) {
  if (descr == "<f2") return DType::kF16;
  if (descr == "<f4") return DType::kF32;
  // ml_dtypes' bfloat16 has no code of its own in the format: NumPy sees two opaque bytes.
  if (descr == "<V2" || descr == "|V2" || descr == "bfloat16") return DType::kBf16;
  if (absl::StartsWith(descr, ">")) {
    return absl::InvalidArgumentError(
        absl::StrCat("npy dtype '", descr, "' is big-endian: save it little-endian (array.astype('<f4'))"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("npy dtype '", descr, "' is not supported: '<f2', '<f4' and '<V2' (bfloat16) are"));
}

absl::StatusOr<NpyArray> ParseHeader(absl::string_view text) {
  HeaderReader reader(text);
  std::optional<absl::string_view> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<int64_t>> shape;
  if (!reader.Take("{")) return Malformed("no dictionary");
  while (!reader.Take("}")) {
    const std::optional<absl::string_view> key = reader.TakeString();
    if (!key.has_value() || !reader.Take(":")) return Malformed("no key where one is due");
    if (*key == "descr" && !descr.has_value()) {
      descr = reader.TakeString();
      if (!descr.has_value()) return Malformed("'descr' is no string (structured dtypes are not supported)");
    } else if (*key == "fortran_order" && !fortran_order.has_value()) {
      if (reader.Take("True")) {
        fortran_order = true;
      } else if (reader.Take("False")) {
        fortran_order = false;
      } else {
        return Malformed("'fortran_order' is neither True nor False");
      }
    } else if (*key == "shape" && !shape.has_value()) {
      shape = TakeShape(&reader);
      if (!shape.has_value()) return Malformed("'shape' is no tuple of integers in range");
    } else {
      return Malformed(absl::StrCat("key '", *key, "' is unknown or comes twice"));
    }
    if (!reader.Take(",")) {
      if (!reader.Take("}")) return Malformed("no ',' or '}' behind a value");
      break;
    }
  }
  if (!reader.AtEnd()) return Malformed("text behind the dictionary");
  if (!descr.has_value() || !fortran_order.has_value() || !shape.has_value()) {
    return Malformed("'descr', 'fortran_order' or 'shape' is missing");
  }
  NpyArray array;
  SPMMD_ASSIGN_OR_RETURN(array.dtype, ParseDescr(*descr));
  array.fortran_order = *fortran_order;
  array.shape = *std::move(shape);
  return array;
}

// Column-major [rows, cols] into row-major.
template <typename T>
void Transpose(absl::Span<const std::byte> data, const MutableDenseView& out) {
  constexpr int64_t kBlock = 32;
  for (int64_t r0 = 0; r0 < out.rows; r0 += kBlock) {
    for (int64_t c0 = 0; c0 < out.cols; c0 += kBlock) {
      for (int64_t r = r0; r < std::min(out.rows, r0 + kBlock); ++r) {
        std::byte* row = out.row(r);
        for (int64_t c = c0; c < std::min(out.cols, c0 + kBlock); ++c) {
          std::memcpy(row + static_cast<size_t>(c) * sizeof(T),
                      data.data() + static_cast<size_t>(c * out.rows + r) * sizeof(T), sizeof(T));
        }
      }
    }
  }
}

}  // namespace

absl::StatusOr<NpyArray> ParseNpy(absl::Span<const std::byte> bytes) {
  const absl::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!absl::StartsWith(text, kMagic)) return absl::InvalidArgumentError("not a .npy file: wrong magic");
  if (text.size() < 10) return Malformed("file is cut off");
  const auto major = static_cast<uint8_t>(text[6]);
  if (major < 1 || major > 3 || text[7] != 0) {
    return Malformed(absl::StrCat("version ", major, ".", static_cast<uint8_t>(text[7]), " is not supported"));
  }
  // Version 1 has a 16-bit length; 2 and 3 have 32 bits and differ in the text's encoding, which ASCII keys don't see.
  const size_t length_bytes = major == 1 ? 2 : 4;
  if (text.size() < 8 + length_bytes) return Malformed("file is cut off");
  uint32_t header_bytes = 0;
  std::memcpy(&header_bytes, text.data() + 8, length_bytes);
  const size_t data_begin = 8 + length_bytes + header_bytes;
  if (header_bytes > kMaxHeaderBytes || data_begin > text.size()) return Malformed("length exceeds the file");
  SPMMD_ASSIGN_OR_RETURN(NpyArray array, ParseHeader(text.substr(8 + length_bytes, header_bytes)));
  array.data = bytes.subspan(data_begin);
  uint64_t elements = 1;
  for (const int64_t dimension : array.shape) {
    if (__builtin_mul_overflow(elements, static_cast<uint64_t>(dimension), &elements)) {
      return Malformed("'shape' overflows");
    }
  }
  uint64_t expected = 0;
  if (__builtin_mul_overflow(elements, SizeOf(array.dtype), &expected) || expected != array.data.size()) {
    return absl::InvalidArgumentError(absl::StrCat("npy data: ", array.data.size(), " bytes do not match ", elements,
                                                   " elements of ", std::string(Name(array.dtype)),
                                                   " (file cut off, or bytes behind its end)"));
  }
  return array;
}

absl::StatusOr<DenseMatrix> NpyToMatrix(const NpyArray& array) {
  if (array.shape.empty() || array.shape.size() > 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("npy shape: ", array.shape.size(), " dimensions where a matrix or a vector is needed"));
  }
  const bool is_vector = array.shape.size() == 1;
  const int64_t rows = is_vector ? 1 : array.shape[0];
  const int64_t cols = array.shape.back();
  if (!array.fortran_order || rows == 1 || cols == 1) return ImportDense(array.dtype, rows, cols, array.data);
  SPMMD_RETURN_IF_ERROR(CheckShape(rows, cols));
  SPMMD_ASSIGN_OR_RETURN(DenseMatrix matrix, DenseMatrix::Create(array.dtype, rows, cols));
  if (SizeOf(array.dtype) == 4) {
    Transpose<uint32_t>(array.data, matrix.mutable_view());
  } else {
    Transpose<uint16_t>(array.data, matrix.mutable_view());
  }
  return matrix;
}

absl::StatusOr<DenseMatrix> ReadNpy(const std::string& path) {
  SPMMD_ASSIGN_OR_RETURN(const std::shared_ptr<const MappedFile> file, MappedFile::Open(path));
  absl::StatusOr<DenseMatrix> matrix = [&]() -> absl::StatusOr<DenseMatrix> {
    SPMMD_ASSIGN_OR_RETURN(const NpyArray array, ParseNpy(file->bytes()));
    return NpyToMatrix(array);
  }();
  if (!matrix.ok()) return absl::Status(matrix.status().code(), absl::StrCat(path, ": ", matrix.status().message()));
  return matrix;
}

absl::Status WriteNpy(const std::string& path, const DenseView& matrix) {
  absl::string_view descr = "<f4";
  if (matrix.dtype == DType::kF16) descr = "<f2";
  if (matrix.dtype == DType::kBf16) descr = "<V2";
  std::string text = absl::StrCat("{'descr': '", descr, "', 'fortran_order': False, 'shape': (", matrix.rows, ", ",
                                  matrix.cols, "), }");
  // NumPy aligns the data to 64 bytes and ends the header with a newline.
  constexpr size_t kPrefix = 10;
  const size_t padded = (kPrefix + text.size() + 1 + 63) / 64 * 64 - kPrefix;
  text.resize(padded - 1, ' ');
  text.push_back('\n');
  std::string header(kMagic);
  header.push_back('\x01');
  header.push_back('\x00');
  header.push_back(static_cast<char>(padded & 0xff));
  header.push_back(static_cast<char>(padded >> 8));
  header += text;
  std::vector<absl::Span<const std::byte>> pieces;
  pieces.emplace_back(reinterpret_cast<const std::byte*>(header.data()), header.size());
  const size_t row_bytes = static_cast<size_t>(matrix.cols) * SizeOf(matrix.dtype);
  if (matrix.row_stride == matrix.cols) {
    pieces.emplace_back(matrix.data, static_cast<size_t>(matrix.rows) * row_bytes);
  } else {
    for (int64_t row = 0; row < matrix.rows; ++row) pieces.emplace_back(matrix.row(row), row_bytes);
  }
  return WriteFileAtomically(path, pieces);
}

}  // namespace spmmd
