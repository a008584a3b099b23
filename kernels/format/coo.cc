#include "kernels/format/coo.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_pool.h"
#include "kernels/format/csr.h"

namespace spmmd::coo {

absl::StatusOr<PackedLayer> Pack(const DenseView& w, const PackOptions& options) {
  // CSR with its row offsets written out: columns and values are the same bytes.
  SPMMD_ASSIGN_OR_RETURN(PackedLayer layer, csr::Pack(w, options));
  Section& offsets_section = layer.sections[0];
  const absl::Span<const uint64_t> offsets = offsets_section.data.As<uint64_t>();
  SPMMD_ASSIGN_OR_RETURN(Buffer rows_buffer, Buffer::Allocate(static_cast<size_t>(layer.nnz) * sizeof(uint32_t)));
  uint32_t* rows = rows_buffer.MutableAs<uint32_t>().data();
  DefaultThreadPool().ParallelFor(w.rows, [&](int64_t row, int /*worker*/) {
    const auto index = static_cast<size_t>(row);
    std::fill(rows + offsets[index], rows + offsets[index + 1], static_cast<uint32_t>(row));
  });
  offsets_section = {kRows, SectionClass::kMetadata, 0, std::move(rows_buffer)};
  layer.format = Format::kCoo;
  layer.layout_version = kLayoutVersion;
  return layer;
}

absl::Status Unpack(const PackedLayer& layer, const MutableDenseView& out) {
  const absl::Span<const uint32_t> rows = layer.FindSection(kRows)->data.As<uint32_t>();
  const absl::Span<const uint32_t> columns = layer.FindSection(kColumns)->data.As<uint32_t>();
  const std::byte* values = layer.FindSection(kValues)->data.data();
  const size_t size = SizeOf(layer.dtype);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::memcpy(out.row(rows[i]) + columns[i] * size, values + i * size, size);
  }
  return absl::OkStatus();
}

absl::Status Validate(const PackedLayer& layer) {
  if (layer.layout_version != kLayoutVersion) {
    return absl::DataLossError(
        absl::StrCat("COO layout version ", layer.layout_version, ", expected ", kLayoutVersion));
  }
  const auto nnz = static_cast<size_t>(layer.nnz);
  const size_t value_bytes = SizeOf(layer.dtype);
  const std::pair<uint32_t, size_t> sizes[] = {
      {kRows, nnz * sizeof(uint32_t)}, {kColumns, nnz * sizeof(uint32_t)}, {kValues, nnz * value_bytes}};
  for (const auto& [id, size] : sizes) {
    const Section* section = layer.FindSection(id);
    if (section == nullptr || section->data.size() != size) {
      return absl::DataLossError(absl::StrCat("COO section ", id, ": missing, or not of ", size, " bytes"));
    }
  }
  const absl::Span<const uint32_t> rows = layer.FindSection(kRows)->data.As<uint32_t>();
  const absl::Span<const uint32_t> columns = layer.FindSection(kColumns)->data.As<uint32_t>();
  const std::byte* values = layer.FindSection(kValues)->data.data();
  int64_t previous = -1;
  for (size_t i = 0; i < nnz; ++i) {
    const int64_t position = int64_t{rows[i]} * layer.k + columns[i];
    uint32_t bits = 0;
    std::memcpy(&bits, values + i * value_bytes, value_bytes);
    const bool nonzero = value_bytes == 4 ? IsNonzeroBits(bits) : IsNonzeroBits(static_cast<uint16_t>(bits));
    if (rows[i] >= layer.m || columns[i] >= layer.k || position <= previous || !nonzero) {
      return absl::DataLossError(absl::StrCat("COO entry ", i, ": out of range, unsorted, or a stored zero"));
    }
    previous = position;
  }
  return absl::OkStatus();
}

}  // namespace spmmd::coo
