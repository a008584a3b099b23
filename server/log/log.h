// Structured log lines on stderr: a fixed message plus fields, as text or as one JSON object a line. A value from
// outside (a name, a peer, an error text) can neither break a line nor forge a field: both formats escape it.
//
// There is one log a process. Nothing on the path of a successful request writes to it.
#ifndef SPMMD_SERVER_LOG_LOG_H_
#define SPMMD_SERVER_LOG_LOG_H_

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "absl/time/time.h"

namespace spmmd::server {

enum class LogLevel : int { kDebug, kInfo, kWarning, kError };
enum class LogFormat { kText, kJson };

// A key of lower-case letters, digits and underscores, and a value that keeps its JSON type. Borrows text.
struct LogField {
  LogField(std::string_view k, std::string_view v) : key(k), value(v) {}
  LogField(std::string_view k, const std::string& v) : key(k), value(std::string_view(v)) {}
  LogField(std::string_view k, const char* v) : key(k), value(std::string_view(v)) {}
  LogField(std::string_view k, bool v) : key(k), value(v) {}
  template <std::integral T>
  requires(!std::same_as<T, bool>) LogField(std::string_view k, T v) : key(k), value(static_cast<int64_t>(v)) {}
  LogField(std::string_view k, double v) : key(k), value(v) {}

  std::string_view key;
  std::variant<std::string_view, bool, int64_t, double> value;
};

// Replaces the default (info, text). Not to be called while other threads log.
void InitLog(LogLevel level, LogFormat format);
bool LogEnabled(LogLevel level);
void Log(LogLevel level, std::string_view message, std::initializer_list<LogField> fields = {});
// Writes out what is buffered; called before the process ends without running destructors.
void FlushLog();

inline void LogInfo(std::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kInfo, message, fields);
}
inline void LogWarning(std::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kWarning, message, fields);
}
inline void LogError(std::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kError, message, fields);
}

// The line without its newline; what Log writes.
//   text: 2026-01-31T12:00:00.000001Z WARNING request failed rpc=Execute message="no layer \"a b\""
//   json: {"time":"2026-01-31T12:00:00.000001Z","level":"warning","message":"request failed","rpc":"Execute",...}
std::string FormatLogLine(LogFormat format, absl::Time time, LogLevel level, std::string_view message,
                          std::initializer_list<LogField> fields);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_LOG_LOG_H_
