// How spmmctl reports what went wrong.
#ifndef SPMMD_CLIENT_CLI_ERRORS_H_
#define SPMMD_CLIENT_CLI_ERRORS_H_

#include <string>

#include "absl/status/status.h"

namespace spmmd::cli {

// What the user can do about it, or empty.
std::string HintFor(const absl::Status& status, const std::string& server);

// One line for the error (wrong fields named in it) and one for the hint; or one line of JSON:
// {"error": {"code", "reason", "message", "fields": [{"field", "description"}], "retry_seconds", "hint"}}.
std::string ErrorText(const absl::Status& status, const std::string& server, bool json);

// The same for a command that needs no server; there is nothing to hint at.
std::string LocalErrorText(const absl::Status& status, bool json);

}  // namespace spmmd::cli

#endif  // SPMMD_CLIENT_CLI_ERRORS_H_
