#include "client/cli/packed_text.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace spmmd::cli {
namespace {

double Ratio(size_t bytes, size_t of) { return of == 0 ? 0 : static_cast<double>(bytes) / static_cast<double>(of); }

std::string ClassName(SectionClass section_class) {
  return section_class == SectionClass::kValues ? "values" : "metadata";
}

// The common head: shape, nonzeros.
class Lines {
 public:
  explicit Lines(const std::string& title) : text_(title + "\n") {}
  void Add(absl::string_view key, const std::string& value) {
    absl::StrAppend(&text_, absl::StrFormat("  %-12s %s\n", key, value));
  }
  void AddMatrix(int64_t m, int64_t k, DType dtype, bool has_bias, int64_t nnz, double sparsity) {
    Add("shape", absl::StrFormat("[%d, %d] %s%s", m, k, std::string(Name(dtype)), has_bias ? ", bias" : ""));
    Add("nonzeros", absl::StrFormat("%d (%s zeros)", nnz, FormatPercent(sparsity)));
  }
  std::string Take() { return std::move(text_); }

 private:
  std::string text_;
};

double SparsityOf(const DenseMatrix& w, int64_t nnz) {
  return 1.0 - static_cast<double>(nnz) / (static_cast<double>(w.rows()) * static_cast<double>(w.cols()));
}

}  // namespace

Json PackedToJson(const std::string& path, uint64_t file_bytes, const LayerFile& file) {
  const PackedLayer& layer = file.layer;
  const ByteCounts bytes = layer.bytes();
  Json sections = Json::array();
  for (const Section& section : layer.sections) {
    sections.push_back({{"name", std::string(SectionName(layer.format, section.id))},
                        {"class", ClassName(section.section_class)},
                        {"bytes", section.data.size()},
                        {"padding_bytes", section.padding}});
  }
  const LayerStats stats = ComputeLayerStats(layer);
  Json shares = Json::object();
  for (const auto& [name, share] : stats.shares) shares[std::string(name)] = share;
  Json numbers = Json::object();
  for (const auto& [name, number] : stats.numbers) numbers[std::string(name)] = number;
  Json metadata = Json::object();
  for (const auto& [key, value] : file.metadata) metadata[key] = value;
  return {{"file", path},
          {"file_bytes", file_bytes},
          {"format", std::string(Name(layer.format))},
          {"layout_version", layer.layout_version},
          {"dtype", std::string(Name(layer.dtype))},
          {"m", layer.m},
          {"k", layer.k},
          {"nnz", layer.nnz},
          {"sparsity", layer.sparsity()},
          {"has_bias", !file.bias.empty()},
          {"bytes", bytes.total()},
          {"values_bytes", bytes.values},
          {"metadata_bytes", bytes.metadata},
          {"padding_bytes", bytes.padding},
          {"dense_bytes", layer.dense_bytes()},
          {"bytes_ratio", Ratio(bytes.total(), layer.dense_bytes())},
          {"sections", std::move(sections)},
          {"shares", std::move(shares)},
          {"numbers", std::move(numbers)},
          {"metadata", std::move(metadata)}};
}

std::string PackedText(const std::string& path, uint64_t file_bytes, const LayerFile& file) {
  const PackedLayer& layer = file.layer;
  const ByteCounts bytes = layer.bytes();
  const size_t dense = layer.dense_bytes();
  const auto of_dense = [dense](size_t part) { return FormatPercent(Ratio(part, dense)); };
  Lines lines(path);
  lines.AddMatrix(layer.m, layer.k, layer.dtype, !file.bias.empty(), layer.nnz, layer.sparsity());
  lines.Add("format", absl::StrFormat("%s, layout version %d", std::string(Name(layer.format)), layer.layout_version));
  lines.Add("bytes", absl::StrFormat("%s, %s of dense (%s)", FormatBytes(bytes.total()), of_dense(bytes.total()),
                                     FormatBytes(dense)));
  lines.Add("", absl::StrFormat("values %s, metadata %s, padding %s of dense", of_dense(bytes.values),
                                of_dense(bytes.metadata), of_dense(bytes.padding)));
  lines.Add("file", absl::StrCat(FormatBytes(file_bytes), ", checksums right, every section valid"));
  for (const auto& [key, value] : file.metadata) lines.Add(key, value);
  std::string text = lines.Take();

  Table sections({"SECTION", "CLASS", ">BYTES", ">OF DENSE", ">PADDING"});
  for (const Section& section : layer.sections) {
    sections.AddRow({std::string(SectionName(layer.format, section.id)), ClassName(section.section_class),
                     FormatBytes(section.data.size()), of_dense(section.data.size()), FormatBytes(section.padding)});
  }
  absl::StrAppend(&text, "\n", sections.ToString());

  const LayerStats stats = ComputeLayerStats(layer);
  if (!stats.shares.empty()) {
    Table shares({"OF THE NONZEROS", ">SHARE"});
    for (const auto& [name, share] : stats.shares) {
      shares.AddRow({std::string(name), absl::StrFormat("%.2f %%", share * 100)});
    }
    absl::StrAppend(&text, "\n", shares.ToString());
  }
  if (!stats.numbers.empty()) {
    Table numbers({"PARAMETER", ">VALUE"});
    for (const auto& [name, number] : stats.numbers) numbers.AddRow({std::string(name), absl::StrCat(number)});
    absl::StrAppend(&text, "\n", numbers.ToString());
  }
  return text;
}

std::string PackedLine(const std::string& from, const std::string& to, const PackedLayer& layer, double seconds) {
  const double rate = seconds > 0 ? static_cast<double>(layer.m * layer.k) / seconds : 0;
  return absl::StrFormat("packed %s: [%d, %d] %s, %s zeros, %s %s (%s of dense) in %s (%.2g weights/s) -> %s", from,
                         layer.m, layer.k, std::string(Name(layer.dtype)), FormatPercent(layer.sparsity()),
                         std::string(Name(layer.format)), FormatBytes(layer.bytes().total()),
                         FormatPercent(Ratio(layer.bytes().total(), layer.dense_bytes())), FormatSeconds(seconds), rate,
                         to);
}

Json WeightsToJson(const std::string& source, const DenseMatrix& w) {
  const int64_t nnz = ScanDense(w.view()).nnz;
  return {{"file", source},
          {"file_bytes", nullptr},
          {"format", nullptr},
          {"layout_version", nullptr},
          {"dtype", std::string(Name(w.dtype()))},
          {"m", w.rows()},
          {"k", w.cols()},
          {"nnz", nnz},
          {"sparsity", SparsityOf(w, nnz)},
          {"has_bias", false},
          {"bytes", w.bytes()},
          {"values_bytes", w.bytes()},
          {"metadata_bytes", 0},
          {"padding_bytes", 0},
          {"dense_bytes", w.bytes()},
          {"bytes_ratio", 1.0},
          {"sections", Json::array()},
          {"shares", Json::object()},
          {"numbers", Json::object()},
          {"metadata", Json::object()}};
}

std::string WeightsText(const std::string& source, const DenseMatrix& w) {
  const DenseStats stats = ScanDense(w.view());
  Lines lines(source);
  lines.AddMatrix(w.rows(), w.cols(), w.dtype(), /*has_bias=*/false, stats.nnz, SparsityOf(w, stats.nnz));
  lines.Add("format", "not packed: `spmmctl pack` does that");
  lines.Add("bytes", FormatBytes(w.bytes()));
  if (stats.nonfinite > 0) {
    lines.Add("not finite", absl::StrFormat("%d elements, the first at [%d, %d]", stats.nonfinite,
                                            stats.first_nonfinite_row, stats.first_nonfinite_col));
  }
  return lines.Take();
}

Json DensityToJson(const DensityMap& map) {
  Json cells = Json::array();
  for (int64_t i = 0; i < map.rows; ++i) {
    Json row = Json::array();
    for (int64_t j = 0; j < map.cols; ++j) row.push_back(map.at(i, j));
    cells.push_back(std::move(row));
  }
  return {{"rows", map.rows},
          {"cols", map.cols},
          {"lowest", map.lowest},
          {"highest", map.highest},
          {"empty_rows", map.empty_rows},
          {"empty_cols", map.empty_cols},
          {"cells", std::move(cells)}};
}

std::string DensityText(const DensityMap& map, int64_t m, int64_t k, bool color) {
  // The ends are kept for cells that are quite empty and quite full.
  constexpr absl::string_view kRamp = " .:-=+*#%@";
  constexpr std::array<int, 10> kColors = {16, 53, 54, 61, 67, 72, 78, 149, 184, 230};
  const auto level = [&](double density) -> size_t {
    if (density <= 0) return 0;
    if (density >= 1) return kRamp.size() - 1;
    return 1 + std::min(static_cast<size_t>(density * static_cast<double>(kRamp.size() - 2)), kRamp.size() - 3);
  };
  std::string text = absl::StrFormat("density of [%d, %d] over %d x %d cells: %s to %s", m, k, map.rows, map.cols,
                                     FormatPercent(map.lowest), FormatPercent(map.highest));
  if (map.empty_rows > 0) absl::StrAppend(&text, "; ", map.empty_rows, " rows without a nonzero");
  if (map.empty_cols > 0) absl::StrAppend(&text, "; ", map.empty_cols, " columns without a nonzero");
  absl::StrAppend(&text, "\n");
  const std::string edge = absl::StrCat("+", std::string(static_cast<size_t>(map.cols), '-'), "+\n");
  absl::StrAppend(&text, edge);
  for (int64_t i = 0; i < map.rows; ++i) {
    absl::StrAppend(&text, "|");
    size_t painted = kRamp.size();  // none
    for (int64_t j = 0; j < map.cols; ++j) {
      const size_t cell = level(map.at(i, j));
      if (!color) {
        text.push_back(kRamp[cell]);
        continue;
      }
      if (cell != painted) absl::StrAppend(&text, "\033[48;5;", kColors[cell], "m");
      painted = cell;
      text.push_back(' ');
    }
    absl::StrAppend(&text, color ? "\033[0m" : "", "|\n");
  }
  absl::StrAppend(&text, edge, "0 % ");
  for (size_t cell = 0; cell < kRamp.size(); ++cell) {
    if (color) {
      absl::StrAppend(&text, "\033[48;5;", kColors[cell], "m \033[0m");
    } else {
      text.push_back(kRamp[cell]);
    }
  }
  absl::StrAppend(&text, " 100 %\n");
  return text;
}

}  // namespace spmmd::cli
