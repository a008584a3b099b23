#include "server/rpc/auth.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/base/status_macros.h"
#include "server/errors.h"
#include "server/log/log.h"

namespace spmmd::server {
namespace {

constexpr size_t kMinTokenLength = 16;

// Looks at every byte whatever it finds; only the length shows in the time it takes.
bool EqualInConstantTime(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  volatile unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference = difference | static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

int64_t ModificationTime(const struct stat& info) {
  return int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const AuthTokens::Version>> AuthTokens::Read(const std::string& path) {
  auto version = std::make_shared<Version>();
  struct stat info {};
  std::ifstream file(path);
  if (!file || stat(path.c_str(), &info) != 0) {
    return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  version->mtime_ns = ModificationTime(info);
  version->inode = info.st_ino;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    const absl::string_view text = absl::StripAsciiWhitespace(line);
    if (text.empty() || text[0] == '#') continue;
    const size_t space = text.find_first_of(" \t");
    const absl::string_view group = text.substr(0, space);
    if (space == absl::string_view::npos || (group != "data" && group != "admin")) {
      return absl::InvalidArgumentError(absl::StrCat(path, ":", number, ": expected 'data TOKEN' or 'admin TOKEN'"));
    }
    const absl::string_view token = absl::StripLeadingAsciiWhitespace(text.substr(space));
    if (token.size() < kMinTokenLength) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ":", number, ": a token must have at least ", kMinTokenLength, " characters"));
    }
    for (const char c : token) {
      if (!absl::ascii_isgraph(static_cast<unsigned char>(c))) {
        return absl::InvalidArgumentError(
            absl::StrCat(path, ":", number, ": a token is printable ASCII without blanks"));
      }
    }
    version->tokens.push_back({group == "admin" ? AuthGroup::kAdmin : AuthGroup::kData, std::string(token)});
  }
  if (version->tokens.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": holds no token"));
  return version;
}

absl::StatusOr<std::unique_ptr<AuthTokens>> AuthTokens::Open(std::string path, absl::Duration reload_interval) {
  SPMMD_ASSIGN_OR_RETURN(auto version, Read(path));
  return std::unique_ptr<AuthTokens>(new AuthTokens(std::move(path), reload_interval, std::move(version)));
}

AuthTokens::AuthTokens(std::string path, absl::Duration reload_interval, std::shared_ptr<const Version> version)
    : path_(std::move(path)),
      reload_interval_(reload_interval),
      version_(std::move(version)),
      next_look_(absl::Now() + reload_interval) {}

std::shared_ptr<const AuthTokens::Version> AuthTokens::Current() {
  std::shared_ptr<const Version> old;
  {
    absl::MutexLock lock(&mutex_);
    const absl::Time now = absl::Now();
    if (now < next_look_) return version_;
    next_look_ = now + reload_interval_;
    old = version_;
  }
  struct stat info {};
  if (stat(path_.c_str(), &info) == 0 && ModificationTime(info) == old->mtime_ns && info.st_ino == old->inode) {
    return old;
  }
  auto read = Read(path_);
  if (!read.ok()) {
    LogError("token file not reloaded", {{"error", std::string(read.status().message())}});
    return old;
  }
  LogInfo("token file reloaded", {{"path", path_}, {"tokens", (*read)->tokens.size()}});
  absl::MutexLock lock(&mutex_);
  version_ = *read;
  return version_;
}

absl::Status AuthTokens::Check(std::string_view header, AuthGroup group) {
  constexpr std::string_view kScheme = "bearer ";
  std::string_view token;
  if (header.size() > kScheme.size() &&
      absl::EqualsIgnoreCase({header.data(), kScheme.size()}, {kScheme.data(), kScheme.size()})) {
    token = header.substr(kScheme.size());
  }
  bool known = false;
  bool allowed = false;
  for (const Token& candidate : Current()->tokens) {
    const bool equal = EqualInConstantTime(candidate.text, token);
    known |= equal;
    allowed |= equal && (candidate.group == AuthGroup::kAdmin || group == AuthGroup::kData);
  }
  if (allowed) return absl::OkStatus();
  if (known) {
    return MakeError(absl::StatusCode::kPermissionDenied, "ADMIN_TOKEN_NEEDED", "this call needs an admin token");
  }
  return MakeError(
      absl::StatusCode::kUnauthenticated, token.empty() ? "TOKEN_MISSING" : "TOKEN_UNKNOWN",
      token.empty() ? "metadata 'authorization: Bearer TOKEN' is required" : "the bearer token is not known");
}

}  // namespace spmmd::server
