// The packed form of a weight matrix, common to all formats: a header of plain numbers and a list of byte sections.
// Because every format is sections of bytes, one container writes it to disk, one code path copies it to a device, and
// one function accounts for its memory.
#ifndef SPMMD_KERNELS_FORMAT_PACKED_LAYER_H_
#define SPMMD_KERNELS_FORMAT_PACKED_LAYER_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"
#include "kernels/format/dense.h"

namespace spmmd {

// Stored in packed files: never renumber.
enum class Format : uint8_t {
  kDense = 1,
  kThreeLayer = 2,
  kRlcCsc = 3,
  kBitmap = 4,  // CPU layout: kernels/format/bitmap.h
  kRowStream = 5,
  kCsr = 6,          // interchange only
  kCoo = 7,          // interchange only
  kBitmapGpu = 8,    // the order that the CUDA SpMM kernels consume: kernels/format/bitmap_gpu.h
  kColumnPiece = 9,  // the order that the CUDA SpMspV kernel consumes
};
bool IsValid(Format format);
// "DENSE", "THREE_LAYER", ...: the design's spelling.
std::string_view Name(Format format);
// Inverse of Name, case-insensitive; nullopt when unknown.
std::optional<Format> ParseFormat(std::string_view name);

// What the format's header calls the section ("masks", "residual_offsets"); empty when the format has none of that id.
std::string_view SectionName(Format format, uint32_t id);

// What a section's bytes count as.
enum class SectionClass : uint8_t { kValues = 1, kMetadata = 2 };

struct Section {
  uint32_t id = 0;  // unique within the layer; meaning defined by the format's header
  SectionClass section_class = SectionClass::kMetadata;
  size_t padding = 0;  // bytes of `data` that hold no information (alignment, filler entries)
  Buffer data;
};

// Exact bytes of a packed layer: values + metadata + padding == the sum of section sizes.
struct ByteCounts {
  size_t values = 0;
  size_t metadata = 0;
  size_t padding = 0;
  size_t total() const { return values + metadata + padding; }
};

class PackedLayer {
 public:
  Format format = Format::kDense;
  // Raised by a format when its byte layout changes; a reader refuses any other value.
  uint32_t layout_version = 0;
  DType dtype = DType::kF16;
  int64_t m = 0;
  int64_t k = 0;
  int64_t nnz = 0;
  // Format-specific numbers (tile sizes, code widths): meaning defined by the format's header, zero when unused.
  std::array<int64_t, 8> params{};
  std::vector<Section> sections;

  const Section* FindSection(uint32_t id) const;
  ByteCounts bytes() const;
  // m * k * SizeOf(dtype): what the same matrix takes as DENSE.
  size_t dense_bytes() const { return static_cast<size_t>(m * k) * SizeOf(dtype); }
  // Share of zeros in [0, 1].
  double sparsity() const { return m * k == 0 ? 0.0 : 1.0 - static_cast<double>(nnz) / static_cast<double>(m * k); }
};

struct PackOptions {
  // NaN and infinite weights are refused (INVALID_ARGUMENT with the position) unless set.
  bool allow_nonfinite = false;
};

// Packs a dense matrix [M, K] into `format`, in parallel over tiles on the default pool. fp32 input is accepted by
// every format that can store it (DENSE, BITMAP, CSR, COO); others answer INVALID_ARGUMENT naming the dtypes they take.
absl::StatusOr<PackedLayer> Pack(Format format, const DenseView& w, const PackOptions& options = {});

// The dense matrix back, bit-exact for every nonzero; zeros come back as +0. Validates first.
absl::StatusOr<DenseMatrix> Unpack(const PackedLayer& layer);

// Checks everything that a kernel relies on: section sizes, offsets, counts, code ranges. A layer that passes can be
// executed without reading or writing out of bounds, whatever its bytes say. DATA_LOSS naming the section otherwise.
absl::Status Validate(const PackedLayer& layer);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_FORMAT_PACKED_LAYER_H_
