#include "server/log/log.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/time/time.h"
#include "nlohmann/json.hpp"

namespace spmmd::server {
namespace {

const absl::Time kTime = absl::FromUnixMicros(1767225600000001);  // 2026-01-01T00:00:00.000001Z

TEST(LogTest, Text) {
  EXPECT_EQ(
      FormatLogLine(LogFormat::kText, kTime, LogLevel::kWarning, "request failed",
                    {{"rpc", "spmm.v1.SparseMatmul/Execute"}, {"count", 3}, {"ok", false}, {"ratio", 0.5}}),
      "2026-01-01T00:00:00.000001Z WARNING request failed rpc=spmm.v1.SparseMatmul/Execute count=3 ok=false ratio=0.5");
}

TEST(LogTest, ValuesCannotForgeLinesOrFields) {
  const std::string line = FormatLogLine(LogFormat::kText, kTime, LogLevel::kError, "m\nm",
                                         {{"error", "a\nb=\"c\" 'd' \x1b[31m"}, {"empty", ""}});
  EXPECT_EQ(line.find('\n'), std::string::npos);
  EXPECT_EQ(line.find('\x1b'), std::string::npos);
  EXPECT_EQ(line, "2026-01-01T00:00:00.000001Z ERROR m\\nm error=\"a\\nb=\\\"c\\\" 'd' \\033[31m\" empty=\"\"");
}

TEST(LogTest, JsonIsJsonWhateverTheBytes) {
  std::string every_byte;
  for (int c = 0; c < 256; ++c) every_byte.push_back(static_cast<char>(c));
  const std::string line = FormatLogLine(LogFormat::kJson, kTime, LogLevel::kInfo, "text \"quoted\"",
                                         {{"bytes", every_byte}, {"n", int64_t{1} << 60}, {"flag", true}, {"x", 1.5}});
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const nlohmann::json object = nlohmann::json::parse(line);
  EXPECT_EQ(object["time"], "2026-01-01T00:00:00.000001Z");
  EXPECT_EQ(object["level"], "info");
  EXPECT_EQ(object["message"], "text \"quoted\"");
  EXPECT_EQ(object["n"], int64_t{1} << 60);
  EXPECT_EQ(object["flag"], true);
  EXPECT_EQ(object["bytes"].get<std::string>().substr(0, 128), every_byte.substr(0, 128));
}

TEST(LogTest, LevelDecides) {
  InitLog(LogLevel::kError, LogFormat::kText);
  EXPECT_FALSE(LogEnabled(LogLevel::kWarning));
  EXPECT_TRUE(LogEnabled(LogLevel::kError));
  testing::internal::CaptureStderr();
  LogWarning("not written");
  LogError("written", {{"k", "v"}});
  const std::string out = testing::internal::GetCapturedStderr();
  EXPECT_EQ(out.find("not written"), std::string::npos);
  EXPECT_NE(out.find("ERROR written k=v\n"), std::string::npos) << out;
  InitLog(LogLevel::kInfo, LogFormat::kText);
}

}  // namespace
}  // namespace spmmd::server
