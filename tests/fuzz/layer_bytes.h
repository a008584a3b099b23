// A packed layer as one flat string of fuzzer input, so that mutations reach every field and section.
//   0  format    1  dtype    2  layout version    3  number of sections (at most 8)
//   4  M, 8  K, 12  nnz, uint32 each
//  16  params[0..3], int32 each
//  32  for each section: uint32 id, uint32 bytes, uint32 padding
//  ..  the sections' bytes, one after another
#ifndef SPMMD_TESTS_FUZZ_LAYER_BYTES_H_
#define SPMMD_TESTS_FUZZ_LAYER_BYTES_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "kernels/format/packed_layer.h"

namespace spmmd::fuzz {

inline constexpr size_t kMaxSections = 8;
inline constexpr int64_t kMaxFuzzDim = 2048;  // larger layers only cost time

inline void PutU32(std::string* out, uint64_t value) {
  const auto narrow = static_cast<uint32_t>(value);
  out->append(reinterpret_cast<const char*>(&narrow), sizeof(narrow));
}

inline std::string LayerToBytes(const PackedLayer& layer) {
  std::string out;
  out.push_back(static_cast<char>(layer.format));
  out.push_back(static_cast<char>(layer.dtype));
  out.push_back(static_cast<char>(layer.layout_version));
  out.push_back(static_cast<char>(layer.sections.size()));
  PutU32(&out, static_cast<uint64_t>(layer.m));
  PutU32(&out, static_cast<uint64_t>(layer.k));
  PutU32(&out, static_cast<uint64_t>(layer.nnz));
  for (size_t i = 0; i < 4; ++i) PutU32(&out, static_cast<uint64_t>(layer.params[i]));
  for (const Section& section : layer.sections) {
    PutU32(&out, section.id);
    PutU32(&out, section.data.size());
    PutU32(&out, section.padding);
  }
  for (const Section& section : layer.sections) {
    out.append(reinterpret_cast<const char*>(section.data.data()), section.data.size());
  }
  return out;
}

inline std::optional<PackedLayer> LayerFromBytes(const uint8_t* data, size_t size) {
  constexpr size_t kHeader = 32;
  constexpr size_t kEntry = 12;
  if (size < kHeader || data[3] > kMaxSections || size < kHeader + kEntry * data[3]) return std::nullopt;
  const auto u32 = [data](size_t offset) {
    uint32_t value;
    std::memcpy(&value, data + offset, sizeof(value));
    return value;
  };
  PackedLayer layer;
  layer.format = static_cast<Format>(data[0]);
  layer.dtype = static_cast<DType>(data[1]);
  layer.layout_version = data[2];
  layer.m = u32(4);
  layer.k = u32(8);
  layer.nnz = u32(12);
  if (layer.m > kMaxFuzzDim || layer.k > kMaxFuzzDim) return std::nullopt;
  for (size_t i = 0; i < 4; ++i) layer.params[i] = static_cast<int32_t>(u32(16 + 4 * i));
  size_t offset = kHeader + kEntry * data[3];
  for (size_t i = 0; i < data[3]; ++i) {
    const size_t entry = kHeader + kEntry * i;
    // A section that claims more than is left gets what is left: its size is then what a mutation makes of it.
    const size_t bytes = std::min<size_t>(u32(entry + 4), size - offset);
    Buffer buffer = *Buffer::Allocate(bytes);
    if (bytes != 0) std::memcpy(buffer.mutable_data(), data + offset, bytes);
    layer.sections.push_back({u32(entry), SectionClass::kMetadata, u32(entry + 8), std::move(buffer)});
    offset += bytes;
  }
  return layer;
}

}  // namespace spmmd::fuzz

#endif  // SPMMD_TESTS_FUZZ_LAYER_BYTES_H_
