#include "server/rpc/endpoint.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace spmmd::server {
namespace {

constexpr absl::string_view kUnix = "unix:";

sockaddr_un UnixAddress(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  return address;
}

}  // namespace

bool IsUnix(const std::string& endpoint) { return absl::StartsWith(endpoint, kUnix); }

std::string SocketPath(const std::string& endpoint) { return endpoint.substr(kUnix.size()); }

std::string WithPort(const std::string& endpoint, int port) {
  if (IsUnix(endpoint)) return endpoint;
  return absl::StrCat(endpoint.substr(0, endpoint.rfind(':')), ":", port);
}

absl::Status CheckSocketFree(const std::string& endpoint) {
  const std::string path = SocketPath(endpoint);
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) return absl::OkStatus();
  if (!S_ISSOCK(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(endpoint, ": a file that is no socket is in the way"));
  }
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return absl::OkStatus();
  const auto close_fd = absl::MakeCleanup([fd] { close(fd); });
  const sockaddr_un address = UnixAddress(path);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    return absl::UnavailableError(absl::StrCat(endpoint, ": another process serves this socket"));
  }
  return absl::OkStatus();
}

std::string ExplainBindFailure(const std::string& endpoint) {
  // The bind once more, by hand: gRPC does not say what went wrong.
  const auto reason = [&](const char* text) { return absl::StrCat(endpoint, ": ", text); };
  if (IsUnix(endpoint)) {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return reason(std::strerror(errno));
    const auto close_fd = absl::MakeCleanup([fd] { close(fd); });
    const sockaddr_un address = UnixAddress(SocketPath(endpoint));
    if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      return reason(std::strerror(errno));
    }
    unlink(address.sun_path);
    return reason("cannot listen");
  }
  const size_t colon = endpoint.rfind(':');
  std::string host = endpoint.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), endpoint.substr(colon + 1).c_str(), &hints, &found); error != 0) {
    return reason(gai_strerror(error));
  }
  const auto free_found = absl::MakeCleanup([found] { freeaddrinfo(found); });
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return reason(std::strerror(errno));
  const auto close_fd = absl::MakeCleanup([fd] { close(fd); });
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd, found->ai_addr, found->ai_addrlen) != 0) return reason(std::strerror(errno));
  return reason("cannot listen");
}

void RemoveSocketFiles(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    struct stat info {};
    if (lstat(path.c_str(), &info) == 0 && S_ISSOCK(info.st_mode)) unlink(path.c_str());
  }
}

}  // namespace spmmd::server
