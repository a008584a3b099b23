#include "kernels/format/csr.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_pool.h"

namespace spmmd::csr {
namespace {

constexpr int64_t kBlockElements = 1 << 18;

template <typename Body>
void ParallelRows(int64_t rows, int64_t cols, Body body) {
  const int64_t block = std::max<int64_t>(1, kBlockElements / cols);
  DefaultThreadPool().ParallelFor((rows + block - 1) / block, [&](int64_t task, int /*worker*/) {
    for (int64_t row = task * block; row < std::min(rows, (task + 1) * block); ++row) body(row);
  });
}

template <typename T>
void CountRows(const DenseView& w, uint64_t* counts) {
  ParallelRows(w.rows, w.cols, [&](int64_t row) {
    const T* values = reinterpret_cast<const T*>(w.row(row));
    uint64_t count = 0;
    for (int64_t col = 0; col < w.cols; ++col) count += IsNonzeroBits(values[col]) ? 1 : 0;
    counts[row] = count;
  });
}

template <typename T>
void FillRows(const DenseView& w, const uint64_t* offsets, uint32_t* columns, T* values) {
  ParallelRows(w.rows, w.cols, [&](int64_t row) {
    const T* source = reinterpret_cast<const T*>(w.row(row));
    // Written for every element and advanced past only for nonzeros: no branch to mispredict at 50 %. The last write
    // of a row may fall on the first place of the next one's, so it stops where the row's share is full.
    uint64_t place = offsets[row];
    const uint64_t end = offsets[row + 1];
    for (int64_t col = 0; place < end; ++col) {
      columns[place] = static_cast<uint32_t>(col);
      values[place] = source[col];
      place += IsNonzeroBits(source[col]) ? 1 : 0;
    }
  });
}

template <typename T>
absl::Status CheckValues(const PackedLayer& layer) {
  const absl::Span<const uint64_t> offsets = layer.FindSection(kRowOffsets)->data.As<uint64_t>();
  const absl::Span<const uint32_t> columns = layer.FindSection(kColumns)->data.As<uint32_t>();
  const absl::Span<const T> values = layer.FindSection(kValues)->data.As<T>();
  std::atomic<bool> bad{false};
  ParallelRows(layer.m, layer.k, [&](int64_t row) {
    int64_t previous = -1;
    bool row_bad = false;
    for (uint64_t i = offsets[static_cast<size_t>(row)]; i < offsets[static_cast<size_t>(row) + 1]; ++i) {
      row_bad |= int64_t{columns[i]} <= previous || columns[i] >= layer.k || !IsNonzeroBits(values[i]);
      previous = columns[i];
    }
    if (row_bad) bad.store(true, std::memory_order_relaxed);
  });
  if (bad.load()) return absl::DataLossError("CSR section columns: out of range, unsorted, or a stored zero");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PackedLayer> Pack(const DenseView& w, const PackOptions& options) {
  if (!options.allow_nonfinite) SPMMD_RETURN_IF_ERROR(CheckFinite(w));
  SPMMD_ASSIGN_OR_RETURN(Buffer offsets_buffer, Buffer::Allocate((static_cast<size_t>(w.rows) + 1) * sizeof(uint64_t)));
  uint64_t* offsets = offsets_buffer.MutableAs<uint64_t>().data();
  const bool wide = w.dtype == DType::kF32;
  wide ? CountRows<uint32_t>(w, offsets + 1) : CountRows<uint16_t>(w, offsets + 1);
  for (int64_t row = 0; row < w.rows; ++row) offsets[row + 1] += offsets[row];
  const size_t nnz = offsets[w.rows];
  SPMMD_ASSIGN_OR_RETURN(Buffer columns, Buffer::Allocate(nnz * sizeof(uint32_t)));
  SPMMD_ASSIGN_OR_RETURN(Buffer values, Buffer::Allocate(nnz * SizeOf(w.dtype)));
  uint32_t* column_data = columns.MutableAs<uint32_t>().data();
  if (wide) {
    FillRows(w, offsets, column_data, values.MutableAs<uint32_t>().data());
  } else {
    FillRows(w, offsets, column_data, values.MutableAs<uint16_t>().data());
  }
  PackedLayer layer;
  layer.format = Format::kCsr;
  layer.layout_version = kLayoutVersion;
  layer.dtype = w.dtype;
  layer.m = w.rows;
  layer.k = w.cols;
  layer.nnz = static_cast<int64_t>(nnz);
  layer.sections.push_back({kRowOffsets, SectionClass::kMetadata, 0, std::move(offsets_buffer)});
  layer.sections.push_back({kColumns, SectionClass::kMetadata, 0, std::move(columns)});
  layer.sections.push_back({kValues, SectionClass::kValues, 0, std::move(values)});
  return layer;
}

absl::Status Unpack(const PackedLayer& layer, const MutableDenseView& out) {
  const absl::Span<const uint64_t> offsets = layer.FindSection(kRowOffsets)->data.As<uint64_t>();
  const absl::Span<const uint32_t> columns = layer.FindSection(kColumns)->data.As<uint32_t>();
  const std::byte* values = layer.FindSection(kValues)->data.data();
  const size_t size = SizeOf(layer.dtype);
  ParallelRows(layer.m, layer.k, [&](int64_t row) {
    std::byte* target = out.row(row);
    for (uint64_t i = offsets[static_cast<size_t>(row)]; i < offsets[static_cast<size_t>(row) + 1]; ++i) {
      std::memcpy(target + columns[i] * size, values + i * size, size);
    }
  });
  return absl::OkStatus();
}

absl::Status Validate(const PackedLayer& layer) {
  if (layer.layout_version != kLayoutVersion) {
    return absl::DataLossError(
        absl::StrCat("CSR layout version ", layer.layout_version, ", expected ", kLayoutVersion));
  }
  const auto nnz = static_cast<size_t>(layer.nnz);
  const std::pair<uint32_t, size_t> sizes[] = {{kRowOffsets, (static_cast<size_t>(layer.m) + 1) * sizeof(uint64_t)},
                                               {kColumns, nnz * sizeof(uint32_t)},
                                               {kValues, nnz * SizeOf(layer.dtype)}};
  for (const auto& [id, size] : sizes) {
    const Section* section = layer.FindSection(id);
    if (section == nullptr || section->data.size() != size) {
      return absl::DataLossError(absl::StrCat("CSR section ", id, ": missing, or not of ", size, " bytes"));
    }
  }
  const absl::Span<const uint64_t> offsets = layer.FindSection(kRowOffsets)->data.As<uint64_t>();
  if (offsets.front() != 0 || offsets.back() != nnz || !std::is_sorted(offsets.begin(), offsets.end())) {
    return absl::DataLossError("CSR section row_offsets: must ascend from 0 to nnz");
  }
  return layer.dtype == DType::kF32 ? CheckValues<uint32_t>(layer) : CheckValues<uint16_t>(layer);
}

}  // namespace spmmd::csr
