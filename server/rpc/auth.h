// Bearer tokens by service group.
#ifndef SPMMD_SERVER_RPC_AUTH_H_
#define SPMMD_SERVER_RPC_AUTH_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace spmmd::server {

// What a caller may do. Admin includes data.
enum class AuthGroup { kData, kAdmin };

// The tokens of a file, followed when the file changes. Each line is "data TOKEN" or "admin TOKEN"; empty lines and
// lines that start with '#' are skipped. Several tokens of a group allow rotation. A changed file with an error in it
// is logged and leaves the old tokens in force. Thread-safe.
class AuthTokens {
 public:
  // INVALID_ARGUMENT with "FILE:LINE: ..." for a line of another form, a token shorter than 16 characters or with
  // characters outside printable ASCII, and a file without tokens; NOT_FOUND for a file that cannot be read.
  static absl::StatusOr<std::unique_ptr<AuthTokens>> Open(std::string path, absl::Duration reload_interval);

  // `header` is the value of the `authorization` metadata, empty when there is none. OK; UNAUTHENTICATED for a missing
  // or unknown token; PERMISSION_DENIED for a data token where admin is needed. Takes the same time for all wrong
  // tokens of one length.
  absl::Status Check(std::string_view header, AuthGroup group);

 private:
  struct Token {
    AuthGroup group;
    std::string text;
  };
  struct Version {
    std::vector<Token> tokens;
    int64_t mtime_ns = 0;
    uint64_t inode = 0;
  };

  AuthTokens(std::string path, absl::Duration reload_interval, std::shared_ptr<const Version> version);
  static absl::StatusOr<std::shared_ptr<const Version>> Read(const std::string& path);
  std::shared_ptr<const Version> Current();

  const std::string path_;
  const absl::Duration reload_interval_;
  absl::Mutex mutex_;
  std::shared_ptr<const Version> version_ ABSL_GUARDED_BY(mutex_);
  absl::Time next_look_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_AUTH_H_
