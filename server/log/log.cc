#include "server/log/log.h"

#include <atomic>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace spmmd::server {
namespace {

std::atomic<LogLevel> min_level{LogLevel::kInfo};
std::atomic<LogFormat> log_format{LogFormat::kText};

// Lines are finished before they get here: spdlog's part is the locked, flushed sink.
spdlog::logger& Sink() {
  static auto* const logger = [] {
    auto* made = new spdlog::logger("spmmd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%v");
    made->set_level(spdlog::level::trace);
    made->flush_on(spdlog::level::trace);
    return made;
  }();
  return *logger;
}

std::string_view LevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "unknown";
}

std::string_view LevelNameUpper(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "DEBUG";
    case LogLevel::kInfo:
      return "INFO";
    case LogLevel::kWarning:
      return "WARNING";
    case LogLevel::kError:
      return "ERROR";
  }
  return "UNKNOWN";
}

std::string TimeText(absl::Time time) { return absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", time, absl::UTCTimeZone()); }

// Plain when no reader could take it for anything else, C-escaped in quotes otherwise.
void AppendText(std::string_view value, std::string* line) {
  const bool plain = !value.empty() && value.find_first_not_of(
                                           "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                           "._-/:@[]+,%") == std::string_view::npos;
  if (plain) {
    line->append(value);
  } else {
    // A single quote needs no escape inside double ones, and error texts are full of them.
    absl::StrAppend(line, "\"",
                    absl::StrReplaceAll(absl::Utf8SafeCEscape({value.data(), value.size()}), {{"\\'", "'"}}), "\"");
  }
}

}  // namespace

std::string FormatLogLine(LogFormat format, absl::Time time, LogLevel level, std::string_view message,
                          std::initializer_list<LogField> fields) {
  if (format == LogFormat::kJson) {
    nlohmann::ordered_json object;
    object["time"] = TimeText(time);
    object["level"] = LevelName(level);
    object["message"] = message;
    for (const LogField& field : fields) {
      std::visit([&](const auto& value) { object[std::string(field.key)] = value; }, field.value);
    }
    // Bytes that are not UTF-8 become U+FFFD: a log line must stay JSON whatever a client sends.
    return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }
  std::string line = absl::StrCat(TimeText(time), " ", std::string(LevelNameUpper(level)), " ");
  // Messages are ours, but one that was composed must not break the line either.
  line.append(message.find_first_of("\n\r") == std::string_view::npos
                  ? std::string(message)
                  : absl::Utf8SafeCEscape({message.data(), message.size()}));
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", std::string(field.key), "=");
    if (const auto* text = std::get_if<std::string_view>(&field.value)) {
      AppendText(*text, &line);
    } else if (const auto* flag = std::get_if<bool>(&field.value)) {
      line.append(*flag ? "true" : "false");
    } else if (const auto* integer = std::get_if<int64_t>(&field.value)) {
      absl::StrAppend(&line, *integer);
    } else {
      absl::StrAppend(&line, std::get<double>(field.value));
    }
  }
  return line;
}

void InitLog(LogLevel level, LogFormat format) {
  min_level.store(level, std::memory_order_relaxed);
  log_format.store(format, std::memory_order_relaxed);
}

bool LogEnabled(LogLevel level) { return level >= min_level.load(std::memory_order_relaxed); }

void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields) {
  if (!LogEnabled(level)) return;
  const std::string line =
      FormatLogLine(log_format.load(std::memory_order_relaxed), absl::Now(), level, message, fields);
  Sink().log(spdlog::level::info, spdlog::string_view_t(line.data(), line.size()));
}

void FlushLog() { Sink().flush(); }

}  // namespace spmmd::server
