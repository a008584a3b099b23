// The weights of a layer as an upload carries them.
#ifndef SPMMD_CLIENT_CPP_LAYER_CONTENT_H_
#define SPMMD_CLIENT_CPP_LAYER_CONTENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/cpp/tensor.h"
#include "spmm/v1/layer_catalog.pb.h"

namespace spmmd::client {

// Views of the parts of one upload; the memory stays the caller's until Register returns. The server decides how the
// layer is stored: the encoding here is only how it travels.
class LayerContent {
 public:
  struct Part {
    v1::ContentPart part;
    absl::Span<const std::byte> bytes;
  };

  // W [m, k] = [out_features, in_features], every element.
  static LayerContent Dense(const DenseRows& w);
  // row_offsets: m + 1. column_indices: nnz, strictly ascending within a row. values: nnz elements of dtype.
  static LayerContent Csr(int64_t m, int64_t k, v1::DataType dtype, absl::Span<const uint64_t> row_offsets,
                          absl::Span<const uint32_t> column_indices, absl::Span<const std::byte> values);
  // nnz entries in any order, no duplicates.
  static LayerContent Coo(int64_t m, int64_t k, v1::DataType dtype, absl::Span<const uint32_t> row_indices,
                          absl::Span<const uint32_t> column_indices, absl::Span<const std::byte> values);
  // bitmap: ceil(m * k / 8) bytes, bit i % 8 of byte i / 8 (least significant first) says whether element i in
  // row-major order is stored. values: the stored elements in that order.
  static LayerContent Bitmap(int64_t m, int64_t k, v1::DataType dtype, absl::Span<const std::byte> bitmap,
                             absl::Span<const std::byte> values);

  // m fp32 elements, added to every output row. Empty means no bias.
  LayerContent& SetBias(absl::Span<const float> bias);

  // INVALID_ARGUMENT naming the part whose size disagrees with shape, type or number of nonzeros. The server checks
  // what the parts say besides.
  absl::Status Check() const;

  // Writes shape, type, encoding, nnz and has_bias into `spec`.
  void Describe(v1::LayerSpec& spec) const;

  // In the order of the contract.
  const std::vector<Part>& parts() const { return parts_; }
  uint64_t bytes() const;

  // XXH3-128 over the parts in order, as 32 lower-case hex digits.
  std::string Xxh3() const;

 private:
  LayerContent(int64_t m, int64_t k, v1::DataType dtype, v1::SourceEncoding encoding)
      : m_(m), k_(k), dtype_(dtype), encoding_(encoding) {}

  int64_t m_;
  int64_t k_;
  v1::DataType dtype_;
  v1::SourceEncoding encoding_;
  std::vector<Part> parts_;
  bool has_bias_ = false;
};

}  // namespace spmmd::client

#endif  // SPMMD_CLIENT_CPP_LAYER_CONTENT_H_
