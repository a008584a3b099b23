#include "client/cpp/layer_content.h"

#include <xxhash.h>

#include <memory>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace spmmd::client {
namespace {

// The contract's bounds on a layer's shape (proto/spmm/v1/layer_catalog.proto, LayerSpec.m and .k). With them no
// product below overflows.
constexpr int64_t kMaxDimension = int64_t{1} << 24;
constexpr int64_t kMaxElements = int64_t{1} << 36;

}  // namespace

LayerContent LayerContent::Dense(const DenseRows& w) {
  LayerContent content(w.rows, w.cols, w.dtype, v1::SOURCE_ENCODING_DENSE);
  content.parts_ = {{v1::CONTENT_PART_VALUES, w.bytes}};
  return content;
}

LayerContent LayerContent::Csr(int64_t m, int64_t k, v1::DataType dtype, absl::Span<const uint64_t> row_offsets,
                               absl::Span<const uint32_t> column_indices, absl::Span<const std::byte> values) {
  LayerContent content(m, k, dtype, v1::SOURCE_ENCODING_CSR);
  content.parts_ = {{v1::CONTENT_PART_ROW_OFFSETS, AsBytes(row_offsets)},
                    {v1::CONTENT_PART_COLUMN_INDICES, AsBytes(column_indices)},
                    {v1::CONTENT_PART_VALUES, values}};
  return content;
}

LayerContent LayerContent::Coo(int64_t m, int64_t k, v1::DataType dtype, absl::Span<const uint32_t> row_indices,
                               absl::Span<const uint32_t> column_indices, absl::Span<const std::byte> values) {
  LayerContent content(m, k, dtype, v1::SOURCE_ENCODING_COO);
  content.parts_ = {{v1::CONTENT_PART_ROW_INDICES, AsBytes(row_indices)},
                    {v1::CONTENT_PART_COLUMN_INDICES, AsBytes(column_indices)},
                    {v1::CONTENT_PART_VALUES, values}};
  return content;
}

LayerContent LayerContent::Bitmap(int64_t m, int64_t k, v1::DataType dtype, absl::Span<const std::byte> bitmap,
                                  absl::Span<const std::byte> values) {
  LayerContent content(m, k, dtype, v1::SOURCE_ENCODING_BITMAP_UPLOAD);
  content.parts_ = {{v1::CONTENT_PART_BITMAP, bitmap}, {v1::CONTENT_PART_VALUES, values}};
  return content;
}

LayerContent& LayerContent::SetBias(absl::Span<const float> bias) {
  if (has_bias_) parts_.pop_back();
  has_bias_ = !bias.empty();
  if (has_bias_) parts_.push_back({v1::CONTENT_PART_BIAS, AsBytes(bias)});
  return *this;
}

absl::Status LayerContent::Check() const {
  const size_t element = ElementSize(dtype_);
  if (element == 0) {
    return absl::InvalidArgumentError(absl::StrCat("dtype: ", static_cast<int>(dtype_), " is no element type"));
  }
  if (m_ < 1 || k_ < 1 || m_ > kMaxDimension || k_ > kMaxDimension || m_ * k_ > kMaxElements) {
    return absl::InvalidArgumentError(
        absl::StrCat("shape: [", m_, ", ", k_, "] is outside 1 <= M, K <= 2^24, M * K <= 2^36"));
  }
  const auto elements = static_cast<uint64_t>(m_ * k_);
  uint64_t values = 0;
  for (const Part& part : parts_) {
    if (part.part == v1::CONTENT_PART_VALUES) values = part.bytes.size();
  }
  const uint64_t nnz = values / element;
  if (values % element != 0 || nnz > elements) {
    return absl::InvalidArgumentError(absl::StrCat("VALUES: ", values, " bytes are no whole number of at most ",
                                                   elements, " elements of ", v1::DataType_Name(dtype_)));
  }
  for (const Part& part : parts_) {
    uint64_t expected = 0;
    switch (part.part) {
      case v1::CONTENT_PART_ROW_OFFSETS:
        expected = (static_cast<uint64_t>(m_) + 1) * sizeof(uint64_t);
        break;
      case v1::CONTENT_PART_ROW_INDICES:
      case v1::CONTENT_PART_COLUMN_INDICES:
        expected = nnz * sizeof(uint32_t);
        break;
      case v1::CONTENT_PART_BITMAP:
        expected = (elements + 7) / 8;
        break;
      case v1::CONTENT_PART_VALUES:
        expected = encoding_ == v1::SOURCE_ENCODING_DENSE ? elements * element : values;
        break;
      case v1::CONTENT_PART_BIAS:
        expected = static_cast<uint64_t>(m_) * sizeof(float);
        break;
      default:
        break;
    }
    if (part.bytes.size() != expected) {
      std::string name = v1::ContentPart_Name(part.part);
      name.erase(0, std::string("CONTENT_PART_").size());
      return absl::InvalidArgumentError(absl::StrCat(name, ": ", part.bytes.size(), " bytes, needs ", expected,
                                                     " for shape [", m_, ", ", k_, "] with ", nnz,
                                                     " stored elements of ", v1::DataType_Name(dtype_)));
    }
  }
  return absl::OkStatus();
}

void LayerContent::Describe(v1::LayerSpec& spec) const {
  spec.set_m(m_);
  spec.set_k(k_);
  spec.set_dtype(dtype_);
  spec.set_encoding(encoding_);
  spec.set_has_bias(has_bias_);
  spec.clear_nnz();
  if (encoding_ == v1::SOURCE_ENCODING_DENSE || ElementSize(dtype_) == 0) return;
  for (const Part& part : parts_) {
    if (part.part == v1::CONTENT_PART_VALUES) {
      spec.set_nnz(static_cast<int64_t>(part.bytes.size() / ElementSize(dtype_)));
    }
  }
}

uint64_t LayerContent::bytes() const {
  uint64_t total = 0;
  for (const Part& part : parts_) total += part.bytes.size();
  return total;
}

std::string LayerContent::Xxh3() const {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  XXH3_128bits_reset(state.get());
  for (const Part& part : parts_) XXH3_128bits_update(state.get(), part.bytes.data(), part.bytes.size());
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state.get()));
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest)));
}

}  // namespace spmmd::client
