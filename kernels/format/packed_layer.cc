#include "kernels/format/packed_layer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_pool.h"
#include "kernels/format/bitmap.h"
#include "kernels/format/bitmap_gpu.h"
#include "kernels/format/bitmap_gpu_layout.h"
#include "kernels/format/column_piece.h"
#include "kernels/format/column_piece_layout.h"
#include "kernels/format/coo.h"
#include "kernels/format/csr.h"
#include "kernels/format/rlc_csc.h"
#include "kernels/format/row_stream.h"
#include "kernels/format/three_layer.h"

namespace spmmd {
namespace {

constexpr std::pair<Format, std::string_view> kFormatNames[] = {
    {Format::kDense, "DENSE"},   {Format::kThreeLayer, "THREE_LAYER"}, {Format::kRlcCsc, "RLC_CSC"},
    {Format::kBitmap, "BITMAP"}, {Format::kRowStream, "ROW_STREAM"},   {Format::kCsr, "CSR"},
    {Format::kCoo, "COO"},       {Format::kBitmapGpu, "BITMAP_GPU"},   {Format::kColumnPiece, "COLUMN_PIECE"},
};

// DENSE: one section (id 1), row-major [M, K], contiguous. -0.0 is stored as +0.0, as every format's Unpack gives it.
constexpr uint32_t kDenseValues = 1;
constexpr uint32_t kDenseLayoutVersion = 1;

struct SectionNameEntry {
  Format format;
  uint32_t id;
  std::string_view name;
};
constexpr SectionNameEntry kSectionNames[] = {
    {Format::kDense, kDenseValues, "values"},
    {Format::kBitmap, bitmap::kValues, "values"},
    {Format::kBitmap, bitmap::kMasks, "masks"},
    {Format::kBitmap, bitmap::kTileStarts, "tile_starts"},
    {Format::kBitmap, bitmap::kColumnStarts, "column_starts"},
    {Format::kBitmapGpu, bitmap_gpu::kChunkSection, "chunks"},
    {Format::kBitmapGpu, bitmap_gpu::kOffsetSection, "offsets"},
    {Format::kRowStream, row_stream::kStreamSection, "stream"},
    {Format::kRowStream, row_stream::kStartSection, "starts"},
    {Format::kRowStream, row_stream::kTileSection, "tiles"},
    {Format::kRowStream, row_stream::kBaseSection, "bases"},
    {Format::kRowStream, row_stream::kEscapeSection, "escapes"},
    {Format::kRowStream, row_stream::kRowOrderSection, "row_order"},
    {Format::kColumnPiece, column_piece::kPieceSection, "pieces"},
    {Format::kColumnPiece, column_piece::kDescriptorSection, "descriptors"},
    {Format::kColumnPiece, column_piece::kBlockSection, "blocks"},
    {Format::kThreeLayer, three_layer::kValues, "values"},
    {Format::kThreeLayer, three_layer::kMetadata, "metadata"},
    {Format::kThreeLayer, three_layer::kCodeOffsets, "code_offsets"},
    {Format::kThreeLayer, three_layer::kCodes, "codes"},
    {Format::kThreeLayer, three_layer::kResidualOffsets, "residual_offsets"},
    {Format::kThreeLayer, three_layer::kResidualPositions, "residual_positions"},
    {Format::kThreeLayer, three_layer::kResidualValues, "residual_values"},
    {Format::kRlcCsc, rlc_csc::kTileUnits, "tile_units"},
    {Format::kRlcCsc, rlc_csc::kColumnOffsets, "column_offsets"},
    {Format::kRlcCsc, rlc_csc::kRuns, "runs"},
    {Format::kRlcCsc, rlc_csc::kValues, "values"},
    {Format::kCsr, csr::kRowOffsets, "row_offsets"},
    {Format::kCsr, csr::kColumns, "columns"},
    {Format::kCsr, csr::kValues, "values"},
    {Format::kCoo, coo::kRows, "rows"},
    {Format::kCoo, coo::kColumns, "columns"},
    {Format::kCoo, coo::kValues, "values"},
};

template <typename Bits>
int64_t CopyDenseRow(const std::byte* from, std::byte* to, int64_t cols) {
  int64_t nnz = 0;
  for (int64_t c = 0; c < cols; ++c) {
    Bits bits;
    std::memcpy(&bits, from + static_cast<size_t>(c) * sizeof(Bits), sizeof(Bits));
    const bool nonzero = IsNonzeroBits(bits);
    nnz += nonzero ? 1 : 0;
    bits = nonzero ? bits : Bits{0};
    std::memcpy(to + static_cast<size_t>(c) * sizeof(Bits), &bits, sizeof(Bits));
  }
  return nnz;
}

absl::StatusOr<PackedLayer> PackDense(const DenseView& w, const PackOptions& options) {
  if (!options.allow_nonfinite) SPMMD_RETURN_IF_ERROR(CheckFinite(w));
  const size_t row_bytes = static_cast<size_t>(w.cols) * SizeOf(w.dtype);
  PackedLayer layer;
  layer.format = Format::kDense;
  layer.layout_version = kDenseLayoutVersion;
  layer.dtype = w.dtype;
  layer.m = w.rows;
  layer.k = w.cols;
  SPMMD_ASSIGN_OR_RETURN(Buffer values, Buffer::Allocate(static_cast<size_t>(w.rows) * row_bytes));
  std::vector<int64_t> row_nnz(static_cast<size_t>(w.rows));
  DefaultThreadPool().ParallelFor(w.rows, [&](int64_t r, int /*worker*/) {
    std::byte* to = values.mutable_data() + static_cast<size_t>(r) * row_bytes;
    row_nnz[static_cast<size_t>(r)] = w.dtype == DType::kF32 ? CopyDenseRow<uint32_t>(w.row(r), to, w.cols)
                                                             : CopyDenseRow<uint16_t>(w.row(r), to, w.cols);
  });
  for (const int64_t nnz : row_nnz) layer.nnz += nnz;
  layer.sections.push_back({kDenseValues, SectionClass::kValues, 0, std::move(values)});
  return layer;
}

absl::Status UnpackDense(const PackedLayer& layer, const MutableDenseView& out) {
  const Buffer& data = layer.FindSection(kDenseValues)->data;
  std::memcpy(out.data, data.data(), data.size());
  return absl::OkStatus();
}

absl::Status ValidateDense(const PackedLayer& layer) {
  if (layer.layout_version != kDenseLayoutVersion) {
    return absl::DataLossError(
        absl::StrCat("DENSE layout version ", layer.layout_version, ", expected ", kDenseLayoutVersion));
  }
  const Section* values = layer.FindSection(kDenseValues);
  if (values == nullptr) return absl::DataLossError("DENSE section values: missing");
  if (values->data.size() != layer.dense_bytes()) {
    return absl::DataLossError(
        absl::StrCat("DENSE section values: ", values->data.size(), " bytes, expected ", layer.dense_bytes()));
  }
  return absl::OkStatus();
}

absl::Status Unknown(Format format) {
  return absl::InvalidArgumentError(absl::StrCat("format: unknown value ", static_cast<int>(format)));
}

}  // namespace

bool IsValid(Format format) {
  return std::any_of(std::begin(kFormatNames), std::end(kFormatNames),
                     [format](const auto& entry) { return entry.first == format; });
}

std::string_view Name(Format format) {
  for (const auto& [value, name] : kFormatNames) {
    if (value == format) return name;
  }
  return "invalid";
}

std::optional<Format> ParseFormat(std::string_view name) {
  for (const auto& [value, known] : kFormatNames) {
    if (absl::EqualsIgnoreCase(absl::string_view(known.data(), known.size()),
                               absl::string_view(name.data(), name.size()))) {
      return value;
    }
  }
  return std::nullopt;
}

std::string_view SectionName(Format format, uint32_t id) {
  for (const SectionNameEntry& entry : kSectionNames) {
    if (entry.format == format && entry.id == id) return entry.name;
  }
  return "";
}

const Section* PackedLayer::FindSection(uint32_t id) const {
  for (const Section& section : sections) {
    if (section.id == id) return &section;
  }
  return nullptr;
}

ByteCounts PackedLayer::bytes() const {
  ByteCounts counts;
  for (const Section& section : sections) {
    const size_t padding = std::min(section.padding, section.data.size());
    counts.padding += padding;
    (section.section_class == SectionClass::kValues ? counts.values : counts.metadata) += section.data.size() - padding;
  }
  return counts;
}

absl::StatusOr<PackedLayer> Pack(Format format, const DenseView& w, const PackOptions& options) {
  SPMMD_RETURN_IF_ERROR(CheckShape(w.rows, w.cols));
  if (!IsValid(w.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("dtype: unknown value ", static_cast<int>(w.dtype)));
  }
  if (w.row_stride < w.cols) {
    return absl::InvalidArgumentError(absl::StrCat("row_stride: ", w.row_stride, " is less than K = ", w.cols));
  }
  switch (format) {
    case Format::kDense:
      return PackDense(w, options);
    case Format::kBitmap:
      return bitmap::Pack(w, options);
    case Format::kBitmapGpu:
      return bitmap_gpu::Pack(w, options);
    case Format::kRlcCsc:
      return rlc_csc::Pack(w, options);
    case Format::kThreeLayer:
      return three_layer::Pack(w, options);
    case Format::kCoo:
      return coo::Pack(w, options);
    case Format::kCsr:
      return csr::Pack(w, options);
    case Format::kRowStream:
      return row_stream::Pack(w, options);
    case Format::kColumnPiece:
      return column_piece::Pack(w, options);
    default:
      break;
  }
  if (!IsValid(format)) return Unknown(format);
  return absl::UnimplementedError(absl::StrCat("format: ", std::string(Name(format)), " cannot be packed"));
}

absl::StatusOr<DenseMatrix> Unpack(const PackedLayer& layer) {
  SPMMD_RETURN_IF_ERROR(Validate(layer));
  SPMMD_ASSIGN_OR_RETURN(DenseMatrix out, DenseMatrix::Create(layer.dtype, layer.m, layer.k));
  absl::Status status;
  switch (layer.format) {
    case Format::kDense:
      status = UnpackDense(layer, out.mutable_view());
      break;
    case Format::kBitmap:
      status = bitmap::Unpack(layer, out.mutable_view());
      break;
    case Format::kBitmapGpu:
      status = bitmap_gpu::Unpack(layer, out.mutable_view());
      break;
    case Format::kRlcCsc:
      status = rlc_csc::Unpack(layer, out.mutable_view());
      break;
    case Format::kThreeLayer:
      status = three_layer::Unpack(layer, out.mutable_view());
      break;
    case Format::kCoo:
      status = coo::Unpack(layer, out.mutable_view());
      break;
    case Format::kCsr:
      status = csr::Unpack(layer, out.mutable_view());
      break;
    case Format::kRowStream:
      status = row_stream::Unpack(layer, out.mutable_view());
      break;
    case Format::kColumnPiece:
      status = column_piece::Unpack(layer, out.mutable_view());
      break;
    default:
      status = Unknown(layer.format);
      break;
  }
  SPMMD_RETURN_IF_ERROR(status);
  return out;
}

absl::Status Validate(const PackedLayer& layer) {
  // What every format may assume before it looks at its own sections.
  if (absl::Status shape = CheckShape(layer.m, layer.k); !shape.ok()) return absl::DataLossError(shape.message());
  if (!IsValid(layer.dtype)) {
    return absl::DataLossError(absl::StrCat("dtype: unknown value ", static_cast<int>(layer.dtype)));
  }
  if (layer.nnz < 0 || layer.nnz > layer.m * layer.k) {
    return absl::DataLossError(absl::StrCat("nnz: ", layer.nnz, " is outside [0, M * K]"));
  }
  for (const Section& section : layer.sections) {
    if (layer.FindSection(section.id) != &section) {
      return absl::DataLossError(absl::StrCat("section ", section.id, ": appears twice"));
    }
    if (section.padding > section.data.size()) {
      return absl::DataLossError(absl::StrCat("section ", section.id, ": padding exceeds its size"));
    }
  }
  switch (layer.format) {
    case Format::kDense:
      return ValidateDense(layer);
    case Format::kBitmap:
      return bitmap::Validate(layer);
    case Format::kBitmapGpu:
      return bitmap_gpu::Validate(layer);
    case Format::kRlcCsc:
      return rlc_csc::Validate(layer);
    case Format::kThreeLayer:
      return three_layer::Validate(layer);
    case Format::kCoo:
      return coo::Validate(layer);
    case Format::kCsr:
      return csr::Validate(layer);
    case Format::kRowStream:
      return row_stream::Validate(layer);
    case Format::kColumnPiece:
      return column_piece::Validate(layer);
    default:
      break;
  }
  return absl::DataLossError(absl::StrCat("format: value ", static_cast<int>(layer.format), " is unknown"));
}

}  // namespace spmmd
