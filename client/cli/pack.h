// The commands of spmmctl that work on files and need no server: packing weights, and looking at them.
#ifndef SPMMD_CLIENT_CLI_PACK_H_
#define SPMMD_CLIENT_CLI_PACK_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/parse.h"
#include "kernels/base/dtype.h"
#include "kernels/format/packed_layer.h"

namespace spmmd::cli {

struct PackArgs {
  std::string file;
  std::string bias;
  std::string output;  // a file, or with `all` a directory
  bool all = false;    // every weight of a checkpoint ...
  std::string match;   // ... whose name this shell pattern matches; empty: any
  // nullopt: BITMAP, or DENSE where that takes no more bytes.
  std::optional<Format> format;
  v1::LayerSpec pruning;  // what ParsePruning understood
  std::string pruning_text = "none";
  std::optional<DType> store_dtype;
  bool allow_nonfinite = false;
  std::string source;  // for the metadata; empty: the file and tensor
};
// Reads, prunes, packs and writes packed-layer files (kernels/format/container.h).
absl::Status Pack(const PackArgs& args, bool json);

enum class MapStyle { kAuto, kColor, kAscii, kOff };

struct InspectArgs {
  std::string file;  // packed, or weights as ParseFile takes them
  MapStyle map = MapStyle::kAuto;
  // Cells of the density map; 0 fits it to the terminal and to the matrix's shape.
  int64_t map_rows = 0;
  int64_t map_cols = 0;
};
absl::Status Inspect(const InspectArgs& args, bool json);

// "auto" (nullopt), or a format of kernels/format by name; any case.
absl::StatusOr<std::optional<Format>> ParsePackFormat(const std::string& text);
absl::StatusOr<MapStyle> ParseMapStyle(const std::string& text);
// "ROWSxCOLS", 1 to 1024 each.
absl::Status ParseMapSize(const std::string& text, InspectArgs* args);

}  // namespace spmmd::cli

#endif  // SPMMD_CLIENT_CLI_PACK_H_
