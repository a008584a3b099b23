#include "client/cli/pack.h"

#include <fnmatch.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cli/packed_text.h"
#include "client/cli/render.h"
#include "client/cli/weights.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/bitmap.h"
#include "kernels/format/compressed_tensors.h"
#include "kernels/format/container.h"
#include "kernels/format/import.h"
#include "kernels/format/inspect.h"
#include "kernels/format/prune.h"
#include "kernels/format/safetensors.h"

namespace spmmd::cli {
namespace {

constexpr Format kFormats[] = {Format::kBitmap,      Format::kBitmapGpu,  Format::kRowStream,
                               Format::kColumnPiece, Format::kThreeLayer, Format::kRlcCsc,
                               Format::kDense,       Format::kCsr,        Format::kCoo};
constexpr int64_t kMaxMapCells = 1024;

void Print(const std::string& text) { std::fwrite(text.data(), 1, text.size(), stdout); }

void PrintJson(const Json& json) { Print(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"); }

absl::Status At(absl::string_view where, const absl::Status& status) {
  return {status.code(), absl::StrCat(where, ": ", status.message())};
}

absl::Status Prune(const v1::LayerSpec& pruning, DenseMatrix* w) {
  if (pruning.has_magnitude()) return PruneMagnitude(w->mutable_view(), pruning.magnitude().sparsity());
  if (pruning.has_nm()) return PruneNm(w->mutable_view(), pruning.nm().n(), pruning.nm().m());
  return absl::OkStatus();
}

struct Packed {
  LayerFile file;
  double seconds = 0;  // converting, pruning and packing
};

absl::StatusOr<Packed> PackMatrix(const PackArgs& args, DenseMatrix w) {
  const absl::Time start = absl::Now();
  Packed packed;
  if (args.store_dtype.has_value() && *args.store_dtype != w.dtype()) {
    SPMMD_ASSIGN_OR_RETURN(w, ConvertToDType(w.view(), *args.store_dtype));
  }
  SPMMD_RETURN_IF_ERROR(Prune(args.pruning, &w));
  Format format = Format::kBitmap;
  if (args.format.has_value()) {
    format = *args.format;
  } else if (bitmap::PackedBytes(w.dtype(), w.rows(), w.cols(), ScanDense(w.view()).nnz) >= w.bytes()) {
    format = Format::kDense;
  }
  PackOptions options;
  options.allow_nonfinite = args.allow_nonfinite;
  SPMMD_ASSIGN_OR_RETURN(packed.file.layer, spmmd::Pack(format, w.view(), options));
  packed.seconds = absl::ToDoubleSeconds(absl::Now() - start);
  return packed;
}

absl::StatusOr<uint64_t> FileBytes(const std::string& path) {
  std::error_code error;
  const uint64_t bytes = std::filesystem::file_size(path, error);
  if (error) return absl::NotFoundError(absl::StrCat(path, ": ", error.message()));
  return bytes;
}

// One weight into one file; what was written, for the report.
absl::StatusOr<Json> PackOne(const PackArgs& args, const FileAndTensor& from, const std::string& to, bool json) {
  const std::string source = from.tensor.empty() ? from.path : absl::StrCat(from.path, ":", from.tensor);
  SPMMD_ASSIGN_OR_RETURN(DenseMatrix w, ReadLayerWeights(from));
  std::vector<float> bias;
  if (!args.bias.empty()) {
    SPMMD_ASSIGN_OR_RETURN(bias, ReadBias(args.bias, from, w.rows()));
  } else {
    SPMMD_ASSIGN_OR_RETURN(bias, PackedBias(from));
  }
  absl::StatusOr<Packed> packed = PackMatrix(args, std::move(w));
  if (!packed.ok()) return At(source, packed.status());
  packed->file.bias = std::move(bias);
  packed->file.metadata = {{"source", args.source.empty() ? source : args.source}, {"pruning", args.pruning_text}};
  SPMMD_RETURN_IF_ERROR(WriteLayerFile(to, packed->file));
  SPMMD_ASSIGN_OR_RETURN(const uint64_t file_bytes, FileBytes(to));
  Json report = PackedToJson(to, file_bytes, packed->file);
  report["seconds"] = packed->seconds;
  if (!json) Print(absl::StrCat(PackedLine(source, to, packed->file.layer, packed->seconds), "\n"));
  return report;
}

// A tensor's name as a file's: nothing that a path or a shell would take for something else.
std::string FileNameOf(const std::string& tensor) {
  std::string name = tensor;
  for (char& c : name) {
    if (!absl::ascii_isalnum(c) && c != '.' && c != '_' && c != '-') c = '_';
  }
  if (absl::StartsWith(name, ".") || absl::StartsWith(name, "-")) name[0] = '_';
  return name + kPackedExtension;
}

absl::Status PackAll(const PackArgs& args, const FileAndTensor& from, bool json) {
  if (from.is_npy || from.is_packed || !from.tensor.empty()) {
    return absl::InvalidArgumentError("--all: takes a .safetensors file or an .index.json, without a tensor's name");
  }
  if (!args.bias.empty()) return absl::InvalidArgumentError("--bias: names the bias of one weight, not of --all");
  SPMMD_ASSIGN_OR_RETURN(SafetensorsCheckpoint checkpoint, SafetensorsCheckpoint::Open(from.path));
  std::map<std::string, std::string> tensors;  // by file name
  for (const std::string& name : CheckpointWeightNames(checkpoint)) {
    SPMMD_ASSIGN_OR_RETURN(const WeightDescription weight, DescribeCheckpointWeight(&checkpoint, name));
    const bool readable = weight.dtype == "F16" || weight.dtype == "BF16" || weight.dtype == "F32";
    if (weight.shape.size() != 2 || !readable) continue;
    if (!args.match.empty() && fnmatch(args.match.c_str(), name.c_str(), 0) != 0) continue;
    const auto [entry, inserted] = tensors.emplace(FileNameOf(name), name);
    if (!inserted) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensors '", entry->second, "' and '", name, "' would share the file ", entry->first));
    }
  }
  if (tensors.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(from.path, ": has no matrix", args.match.empty() ? "" : " that --match names"));
  }
  std::error_code error;
  std::filesystem::create_directories(args.output, error);
  if (error) return absl::FailedPreconditionError(absl::StrCat("--output: ", args.output, ": ", error.message()));
  Json layers = Json::array();
  for (const auto& [file, tensor] : tensors) {
    FileAndTensor one = from;
    one.tensor = tensor;
    SPMMD_ASSIGN_OR_RETURN(Json report, PackOne(args, one, absl::StrCat(args.output, "/", file), json));
    layers.push_back(std::move(report));
  }
  if (json) PrintJson({{"layers", layers}});
  return absl::OkStatus();
}

// Columns of the terminal, or of what stands for one.
int64_t TerminalColumns() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

// A cell of a terminal is about twice as high as wide.
void FitMap(int64_t m, int64_t k, bool json, int64_t* rows, int64_t* cols) {
  if (*cols == 0) *cols = json ? 64 : std::clamp<int64_t>(TerminalColumns() - 4, 16, 64);
  if (*rows == 0) {
    const double aspect = static_cast<double>(m) / static_cast<double>(k) / 2;
    *rows = std::clamp<int64_t>(std::llround(static_cast<double>(*cols) * aspect), 4, 32);
  }
}

bool WantsColor(MapStyle style) {
  if (style != MapStyle::kAuto) return style == MapStyle::kColor;
  const char* const term = std::getenv("TERM");
  const char* const no_color = std::getenv("NO_COLOR");
  return isatty(STDOUT_FILENO) == 1 && (no_color == nullptr || *no_color == '\0') && term != nullptr &&
         std::strcmp(term, "dumb") != 0;
}

}  // namespace

absl::Status Pack(const PackArgs& args, bool json) {
  SPMMD_ASSIGN_OR_RETURN(const FileAndTensor from, ParseFile(args.file));
  if (args.all) return PackAll(args, from, json);
  if (!args.match.empty()) return absl::InvalidArgumentError("--match: needs --all");
  SPMMD_ASSIGN_OR_RETURN(const Json report, PackOne(args, from, args.output, json));
  if (json) PrintJson(report);
  return absl::OkStatus();
}

absl::Status Inspect(const InspectArgs& args, bool json) {
  const bool with_map = args.map != MapStyle::kOff;
  absl::StatusOr<FileAndTensor> from = ParseFile(args.file);
  // Whatever is no weight file by its name should be a packed one by its magic.
  if (!from.ok()) from = FileAndTensor{args.file, "", false, true};
  LayerFile packed;
  DenseMatrix w;
  if (from->is_packed) {
    SPMMD_ASSIGN_OR_RETURN(packed, ReadLayerFile(from->path));
    if (with_map) {
      SPMMD_ASSIGN_OR_RETURN(w, Unpack(packed.layer));
    }
  } else {
    SPMMD_ASSIGN_OR_RETURN(w, ReadMatrix(*from));
  }
  SPMMD_ASSIGN_OR_RETURN(const uint64_t file_bytes, FileBytes(from->path));
  Json report = from->is_packed ? PackedToJson(args.file, file_bytes, packed) : WeightsToJson(args.file, w);
  std::string text = from->is_packed ? PackedText(args.file, file_bytes, packed) : WeightsText(args.file, w);
  if (with_map) {
    int64_t rows = args.map_rows;
    int64_t cols = args.map_cols;
    FitMap(w.rows(), w.cols(), json, &rows, &cols);
    const DensityMap map = MapDensity(w.view(), rows, cols);
    report["density"] = DensityToJson(map);
    if (!json) absl::StrAppend(&text, "\n", DensityText(map, w.rows(), w.cols(), WantsColor(args.map)));
  }
  json ? PrintJson(report) : Print(text);
  return absl::OkStatus();
}

absl::StatusOr<std::optional<Format>> ParsePackFormat(const std::string& text) {
  if (absl::EqualsIgnoreCase(text, "auto")) return std::optional<Format>();
  if (const std::optional<Format> format = spmmd::ParseFormat(text)) return format;
  std::vector<std::string> names = {"auto"};
  for (const Format format : kFormats) names.push_back(absl::AsciiStrToLower(std::string(Name(format))));
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not one of ", absl::StrJoin(names, ", ")));
}

absl::StatusOr<MapStyle> ParseMapStyle(const std::string& text) {
  if (text == "auto") return MapStyle::kAuto;
  if (text == "color") return MapStyle::kColor;
  if (text == "ascii") return MapStyle::kAscii;
  if (text == "off") return MapStyle::kOff;
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not one of auto, color, ascii, off"));
}

absl::Status ParseMapSize(const std::string& text, InspectArgs* args) {
  const std::vector<std::string> sides = absl::StrSplit(text, 'x');
  if (sides.size() != 2 || !absl::SimpleAtoi(sides[0], &args->map_rows) ||
      !absl::SimpleAtoi(sides[1], &args->map_cols) || args->map_rows < 1 || args->map_cols < 1 ||
      args->map_rows > kMaxMapCells || args->map_cols > kMaxMapCells) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "' is not ROWSxCOLS with 1 to ", kMaxMapCells, " of each"));
  }
  return absl::OkStatus();
}

}  // namespace spmmd::cli
