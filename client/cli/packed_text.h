// What `spmmctl pack` and `spmmctl inspect` print: JSON with stable snake_case keys, or text for people.
#ifndef SPMMD_CLIENT_CLI_PACKED_TEXT_H_
#define SPMMD_CLIENT_CLI_PACKED_TEXT_H_

#include <cstdint>
#include <string>

#include "client/cli/render.h"
#include "kernels/format/container.h"
#include "kernels/format/dense.h"
#include "kernels/format/inspect.h"

namespace spmmd::cli {

// A valid packed layer and the file that holds it.
Json PackedToJson(const std::string& path, uint64_t file_bytes, const LayerFile& file);
std::string PackedText(const std::string& path, uint64_t file_bytes, const LayerFile& file);
// One line on a layer just packed.
std::string PackedLine(const std::string& from, const std::string& to, const PackedLayer& layer, double seconds);

// Weights that are not packed: the same keys, with null and nothing where a format would have something to say.
Json WeightsToJson(const std::string& source, const DenseMatrix& w);
std::string WeightsText(const std::string& source, const DenseMatrix& w);

Json DensityToJson(const DensityMap& map);
// A picture: a character a cell, from ' ' (no nonzero) over ".:-=+*#%" to '@' (no zero), or xterm-256 background
// colours.
std::string DensityText(const DensityMap& map, int64_t m, int64_t k, bool color);

}  // namespace spmmd::cli

#endif  // SPMMD_CLIENT_CLI_PACKED_TEXT_H_
