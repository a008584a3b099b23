// Checks of a LayerSpec, and what follows from one before any content is there.
#ifndef SPMMD_SERVER_CATALOG_SPEC_H_
#define SPMMD_SERVER_CATALOG_SPEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/device/device.h"
#include "server/pb.h"
#include "spmm/v1/layer_catalog.pb.h"

namespace spmmd::server {

inline constexpr int kMaxLayerName = 256;

// INVALID_ARGUMENT ("spec.m", ...) for everything that can be wrong with a spec on its own. Of a spec with a file
// source, shape and types may still be missing: FillFromFile() in file_source.h has supplied them when `complete` is
// set.
absl::Status CheckSpec(const pb::LayerSpec& spec, bool complete);

// INVALID_ARGUMENT or UNIMPLEMENTED when the device cannot hold or execute the format asked for.
absl::Status CheckFormat(const pb::LayerSpec& spec, const Device& device);

// Fills in what follows: store_dtype, placement.
void NormalizeSpec(pb::LayerSpec* spec);

// One piece of an upload.
struct PartSize {
  pb::ContentPart part = pb::CONTENT_PART_UNSPECIFIED;
  uint64_t bytes = 0;
};
// The parts that a checked spec requires, in hash order.
std::vector<PartSize> PartsOf(const pb::LayerSpec& spec);

// Upper bounds from a checked, normalised spec. Of a layer in `shards` parts, what one of them takes when the nonzeros
// are spread evenly.
uint64_t EstimateDeviceBytes(const pb::LayerSpec& spec, const Device& device, int64_t shards = 1);
// Content, the dense matrix made of it and its conversion.
uint64_t EstimateHostBytes(const pb::LayerSpec& spec);

// What content and options have in common that may be shared: layers of equal keys differ in name, version, threshold,
// pin and determinism only.
std::string ContentKey(const pb::LayerSpec& spec, absl::string_view xxh3);

// 32 lower-case hex digits.
bool IsContentHash(absl::string_view text);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_CATALOG_SPEC_H_
