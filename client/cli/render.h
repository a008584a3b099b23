// What spmmctl prints: JSON with stable snake_case keys, or tables for people.
#ifndef SPMMD_CLIENT_CLI_RENDER_H_
#define SPMMD_CLIENT_CLI_RENDER_H_

#include <string>
#include <vector>

#include "client/cli/parse.h"
#include "nlohmann/json.hpp"

namespace spmmd::cli {

// Keys keep the order in which they were written.
using Json = nlohmann::ordered_json;

Json ToJson(const v1::Layer& layer);
Json ToJson(const v1::LayerSpeed& speed);
Json ToJson(const v1::ServerInfoResponse& info);
Json ToJson(const v1::Device& device);

// "1.50 MiB", "12.3 us", "340 GB/s", "50.0 %": three significant digits or more.
std::string FormatBytes(uint64_t bytes);
std::string FormatSeconds(double seconds);
std::string FormatBandwidth(double bytes_per_second);
std::string FormatPercent(double share);

// Columns as wide as their widest cell, two spaces between; numeric columns (header starting with '>') are
// right-aligned.
class Table {
 public:
  explicit Table(std::vector<std::string> header);
  void AddRow(std::vector<std::string> cells);
  std::string ToString() const;

 private:
  std::vector<std::vector<std::string>> rows_;
  std::vector<bool> right_;
};

std::string LayerTable(const std::vector<v1::Layer>& layers);
// Everything known of one layer, over several lines.
std::string LayerText(const v1::Layer& layer);
std::string SpeedTable(const std::vector<v1::LayerSpeed>& speeds);
std::string DeviceTable(const std::vector<v1::Device>& devices);

}  // namespace spmmd::cli

#endif  // SPMMD_CLIENT_CLI_RENDER_H_
