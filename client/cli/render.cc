#include "client/cli/render.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "google/protobuf/util/time_util.h"

namespace spmmd::cli {
namespace {

std::string Shape(int64_t rows, int64_t cols) { return absl::StrCat("[", rows, ", ", cols, "]"); }

double Ratio(double numerator, double denominator) { return denominator > 0 ? numerator / denominator : 0; }

// Three significant digits while they are worth it.
std::string Scaled(double value, absl::string_view unit) {
  const int decimals = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return absl::StrFormat("%.*f %s", decimals, value, unit);
}

std::string Devices(const v1::Layer& layer) {
  std::vector<std::string> devices;
  for (const auto& residency : layer.residency()) devices.push_back(residency.device());
  return devices.empty() ? "-" : absl::StrJoin(devices, ",");
}

std::string CreateTime(const v1::Layer& layer) {
  return layer.has_create_time() ? google::protobuf::util::TimeUtil::ToString(layer.create_time()) : "";
}

}  // namespace

Json ToJson(const v1::LayerSpeed& speed) {
  return {{"tokens", speed.tokens()},
          {"format", ToString(speed.format())},
          {"kernel", speed.kernel()},
          {"seconds_p50", speed.seconds_p50()},
          {"seconds_p10", speed.seconds_p10()},
          {"seconds_p90", speed.seconds_p90()},
          {"bytes", speed.bytes()},
          {"bytes_per_second", speed.bytes_per_second()},
          {"dense_seconds_p50", speed.dense_seconds_p50()},
          {"speedup_vs_dense", Ratio(speed.dense_seconds_p50(), speed.seconds_p50())}};
}

Json ToJson(const v1::Layer& layer) {
  Json sections = Json::array();
  for (const auto& section : layer.sections()) {
    sections.push_back(
        {{"name", section.name()}, {"bytes", section.bytes()}, {"padding_bytes", section.padding_bytes()}});
  }
  Json residency = Json::array();
  for (const auto& held : layer.residency()) {
    residency.push_back({{"device", held.device()},
                         {"row_begin", held.row_begin()},
                         {"row_end", held.row_end()},
                         {"bytes", held.bytes()}});
  }
  Json speeds = Json::array();
  for (const auto& speed : layer.speeds()) speeds.push_back(ToJson(speed));
  return {
      {"name", layer.name()},
      {"version", layer.version()},
      {"m", layer.m()},
      {"k", layer.k()},
      {"dtype", ToString(layer.dtype())},
      {"nnz", layer.nnz()},
      {"sparsity", layer.sparsity()},
      {"state", ToString(layer.state())},
      {"error", layer.error()},
      {"format", ToString(layer.format())},
      {"format_reason", layer.format_reason()},
      {"bytes", layer.bytes()},
      {"dense_bytes", layer.dense_bytes()},
      {"bytes_ratio", Ratio(static_cast<double>(layer.bytes()), static_cast<double>(layer.dense_bytes()))},
      {"has_bias", layer.has_bias()},
      {"activation_threshold", layer.has_activation_threshold() ? Json(layer.activation_threshold()) : Json(nullptr)},
      {"placement", ToString(layer.placement())},
      {"pinned", layer.pinned()},
      {"content_xxh3", layer.content_xxh3()},
      {"create_time", CreateTime(layer)},
      {"pack_seconds", layer.pack_seconds()},
      {"residency", residency},
      {"sections", sections},
      {"speeds", speeds}};
}

Json ToJson(const v1::ServerInfoResponse& info) {
  Json formats = Json::array();
  for (const int format : info.formats()) formats.push_back(ToString(static_cast<v1::Format>(format)));
  Json extensions = Json::array();
  for (const auto& extension : info.extensions()) extensions.push_back(extension);
  const auto& limits = info.limits();
  return {{"version", info.version()},
          {"revision", info.revision()},
          {"backend", info.backend()},
          {"extensions", extensions},
          {"formats", formats},
          {"limits",
           {{"max_message_bytes", limits.max_message_bytes()},
            {"max_chunk_bytes", limits.max_chunk_bytes()},
            {"max_tokens", limits.max_tokens()},
            {"max_queue_depth", limits.max_queue_depth()},
            {"max_queue_bytes", limits.max_queue_bytes()},
            {"max_batch_tokens", limits.max_batch_tokens()}}},
          {"shard_index", info.shard_index()},
          {"shard_count", info.shard_count()}};
}

Json ToJson(const v1::Device& device) {
  return {{"id", device.id()},
          {"name", device.name()},
          {"backend", device.backend()},
          {"uuid", device.uuid()},
          {"architecture", device.architecture()},
          {"memory_total_bytes", device.memory_total_bytes()},
          {"memory_budget_bytes", device.memory_budget_bytes()},
          {"memory_weights_bytes", device.memory_weights_bytes()},
          {"memory_workspace_bytes", device.memory_workspace_bytes()},
          {"memory_staging_bytes", device.memory_staging_bytes()},
          {"measured_bandwidth_bytes_per_second", device.measured_bandwidth_bytes_per_second()},
          {"healthy", device.healthy()},
          {"queue_depth", device.queue_depth()}};
}

std::string FormatBytes(uint64_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return unit == 0 ? absl::StrCat(bytes, " B") : Scaled(value, kUnits[unit]);
}

std::string FormatSeconds(double seconds) {
  if (seconds < 1e-3) return Scaled(seconds * 1e6, "us");
  if (seconds < 1) return Scaled(seconds * 1e3, "ms");
  return Scaled(seconds, "s");
}

std::string FormatBandwidth(double bytes_per_second) { return Scaled(bytes_per_second / 1e9, "GB/s"); }

std::string FormatPercent(double share) { return absl::StrFormat("%.1f %%", share * 100); }

Table::Table(std::vector<std::string> header) {
  for (std::string& name : header) {
    right_.push_back(!name.empty() && name[0] == '>');
    if (right_.back()) name.erase(0, 1);
  }
  rows_.push_back(std::move(header));
}

void Table::AddRow(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

std::string Table::ToString() const {
  std::vector<size_t> widths(right_.size(), 0);
  for (const auto& row : rows_) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string padding(widths[c] - row[c].size(), ' ');
      absl::StrAppend(&line, c == 0 ? "" : "  ", right_[c] ? padding : "", row[c], right_[c] ? "" : padding);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

std::string LayerTable(const std::vector<v1::Layer>& layers) {
  Table table(
      {"NAME", ">VERSION", ">SHAPE", "DTYPE", ">ZEROS", "FORMAT", ">BYTES", ">OF DENSE", "STATE", "DEVICES", "PINNED"});
  for (const auto& layer : layers) {
    table.AddRow({layer.name(), absl::StrCat(layer.version()), Shape(layer.m(), layer.k()), ToString(layer.dtype()),
                  FormatPercent(layer.sparsity()), ToString(layer.format()), FormatBytes(layer.bytes()),
                  FormatPercent(Ratio(static_cast<double>(layer.bytes()), static_cast<double>(layer.dense_bytes()))),
                  ToString(layer.state()), Devices(layer), layer.pinned() ? "yes" : "no"});
  }
  return table.ToString();
}

std::string SpeedTable(const std::vector<v1::LayerSpeed>& speeds) {
  Table table({">TOKENS", "FORMAT", "KERNEL", ">P50", ">P10", ">P90", ">BANDWIDTH", ">DENSE P50", ">VS DENSE"});
  for (const auto& speed : speeds) {
    const bool has_dense = speed.dense_seconds_p50() > 0;
    table.AddRow({absl::StrCat(speed.tokens()), ToString(speed.format()), speed.kernel(),
                  FormatSeconds(speed.seconds_p50()), FormatSeconds(speed.seconds_p10()),
                  FormatSeconds(speed.seconds_p90()), FormatBandwidth(speed.bytes_per_second()),
                  has_dense ? FormatSeconds(speed.dense_seconds_p50()) : "-",
                  has_dense ? absl::StrFormat("%.2fx", Ratio(speed.dense_seconds_p50(), speed.seconds_p50())) : "-"});
  }
  return table.ToString();
}

std::string LayerText(const v1::Layer& layer) {
  std::string text = absl::StrCat(layer.name(), " version ", layer.version(), "\n");
  const auto line = [&text](absl::string_view key, const std::string& value) {
    absl::StrAppend(&text, absl::StrFormat("  %-12s %s\n", key, value));
  };
  line("shape", absl::StrCat(Shape(layer.m(), layer.k()), " ", ToString(layer.dtype()),
                             layer.has_bias() ? ", bias" : ", no bias"));
  line("nonzeros", absl::StrCat(layer.nnz(), " (", FormatPercent(layer.sparsity()), " zeros)"));
  // The reason may or may not start with the format itself.
  const std::string format = ToString(layer.format());
  const bool repeats = absl::StartsWith(layer.format_reason(), format);
  const absl::string_view separator = repeats || layer.format_reason().empty() ? "" : ": ";
  line("format", absl::StrCat(repeats ? "" : format, separator, layer.format_reason()));
  line("bytes",
       absl::StrCat(FormatBytes(layer.bytes()), " (",
                    FormatPercent(Ratio(static_cast<double>(layer.bytes()), static_cast<double>(layer.dense_bytes()))),
                    " of dense)"));
  line("state", absl::StrCat(ToString(layer.state()), layer.pinned() ? ", pinned" : "",
                             layer.error().empty() ? "" : ": ", layer.error()));
  line("placement", ToString(layer.placement()));
  if (layer.has_activation_threshold()) line("threshold", absl::StrCat(layer.activation_threshold()));
  line("packed in", FormatSeconds(layer.pack_seconds()));
  line("created", CreateTime(layer));
  line("content", absl::StrCat("xxh3 ", layer.content_xxh3()));
  if (layer.sections_size() > 0) {
    Table sections({"SECTION", ">BYTES", ">PADDING"});
    for (const auto& section : layer.sections()) {
      sections.AddRow({section.name(), FormatBytes(section.bytes()), FormatBytes(section.padding_bytes())});
    }
    absl::StrAppend(&text, "\n", sections.ToString());
  }
  if (layer.residency_size() > 0) {
    Table residency({"DEVICE", "ROWS", ">BYTES"});
    for (const auto& held : layer.residency()) {
      residency.AddRow({held.device(), absl::StrCat(held.row_begin(), "-", held.row_end()), FormatBytes(held.bytes())});
    }
    absl::StrAppend(&text, "\n", residency.ToString());
  }
  if (layer.speeds_size() > 0) {
    absl::StrAppend(&text, "\n", SpeedTable({layer.speeds().begin(), layer.speeds().end()}));
  }
  return text;
}

std::string DeviceTable(const std::vector<v1::Device>& devices) {
  Table table({"DEVICE", "NAME", "ARCHITECTURE", ">WEIGHTS", ">WORKSPACE", ">BUDGET", ">MEMORY", ">BANDWIDTH",
               ">QUEUED", "HEALTHY"});
  for (const auto& device : devices) {
    table.AddRow({device.id(), device.name(), device.architecture(), FormatBytes(device.memory_weights_bytes()),
                  FormatBytes(device.memory_workspace_bytes()), FormatBytes(device.memory_budget_bytes()),
                  FormatBytes(device.memory_total_bytes()),
                  FormatBandwidth(device.measured_bandwidth_bytes_per_second()), absl::StrCat(device.queue_depth()),
                  device.healthy() ? "yes" : "NO"});
  }
  return table.ToString();
}

}  // namespace spmmd::cli
