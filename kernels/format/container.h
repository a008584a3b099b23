// The packed-layer file: one layer, its bias and its metadata in one file that can be mapped and copied to a device
// straight from the page cache. All numbers are little-endian.
//
//   offset  size  field
//        0     8  magic 89 53 50 4d 4d 50 4b 0a ("\x89SPMMPK\n": not text, and a newline translation breaks it)
//        8     4  container version, 1
//       12     4  header bytes H: header, section table, metadata and zeros, a multiple of 4096
//       16     8  file bytes
//       24     8  XXH3-64 of bytes [0, H) with this field taken as zero
//       32     4  number of sections S, 1 to 64
//       36     4  number of metadata entries
//       40     8  metadata bytes
//       48     1  format (enum Format)          49  1  dtype (enum DType)     50  2  zero
//       52     4  layout version of the format
//       56     8  M        64  8  K        72  8  nnz
//       80    64  params[8], int64
//      144    16  zero
//      160  40*S  section table
//       ...       metadata: entries in strictly ascending key order, each
//                 uint32 key bytes, uint32 value bytes, key, value
//       ...       zeros up to H
//        H        sections
//
// A section table entry:
//        0     4  section id (0 for the bias)     4  1  class (enum SectionClass)
//        5     1  role: 0 a section of the layer, 1 the bias (M float32 values; at most one)        6  2  zero
//        8     8  offset in the file             16  8  bytes
//       24     8  of these, bytes of padding     32  8  XXH3-64 of the section and the zeros that follow it
//
// Sections follow one another in table order. Each starts on a 4096-byte boundary and is followed by at least 64 zero
// bytes (Buffer's contract) up to the next boundary; the file ends on one. So the layout is a function of the section
// sizes, a reader accepts no other, and every byte of a file is under exactly one checksum.
//
// A reader trusts nothing: sizes, offsets and counts are checked without overflow, then the checksums, then the
// format's own Validate. What comes out can be executed whatever bytes went in.
#ifndef SPMMD_KERNELS_FORMAT_CONTAINER_H_
#define SPMMD_KERNELS_FORMAT_CONTAINER_H_

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/format/packed_layer.h"

namespace spmmd {

inline constexpr size_t kMaxContainerSections = 64;
inline constexpr size_t kMaxContainerMetadataBytes = size_t{1} << 20;

// What one file holds.
struct LayerFile {
  PackedLayer layer;
  std::vector<float> bias;                      // [M], or empty
  std::map<std::string, std::string> metadata;  // free-form: source file, tensor name, content hash
};

// Writes atomically. INVALID_ARGUMENT naming the field when the bias has neither 0 nor M elements, or sections or
// metadata exceed the limits above; else the errors of WriteFileAtomically. The layer is written as it is, not
// validated.
absl::Status WriteLayerFile(const std::string& path, const LayerFile& file);

// Maps and checks a file. The layer's sections borrow the mapping and keep it alive. INVALID_ARGUMENT when it is not a
// packed-layer file of a known version, DATA_LOSS when it is cut off, damaged or inconsistent, NOT_FOUND.
absl::StatusOr<LayerFile> ReadLayerFile(const std::string& path);

// As ReadLayerFile, on bytes in memory, which must be 64-byte aligned (INVALID_ARGUMENT otherwise) and live as long as
// `owner`.
absl::StatusOr<LayerFile> ParseLayerFile(absl::Span<const std::byte> bytes, const std::shared_ptr<const void>& owner);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_FORMAT_CONTAINER_H_
