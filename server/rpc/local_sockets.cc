#include "server/rpc/local_sockets.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstddef>
#include <cstdlib>
#include <functional>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace spmmd::server {
namespace {

// gRPC writes "ipv4:127.0.0.1:43210" and "ipv6:%5B::1%5D:43210".
std::string Plain(std::string_view peer) {
  return absl::StrReplaceAll(std::string(peer), {{"%5B", "["}, {"%5D", "]"}});
}

// The peer of a socket in gRPC's words; empty for anything but an accepted TCP or Unix connection.
std::string PeerOf(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "";
  char text[INET6_ADDRSTRLEN] = {};
  switch (address.ss_family) {
    case AF_INET: {
      const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
      inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
      return absl::StrCat("ipv4:", text, ":", ntohs(v4.sin_port));
    }
    case AF_INET6: {
      const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
      if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
        inet_ntop(AF_INET, &v6.sin6_addr.s6_addr[12], text, sizeof(text));
        return absl::StrCat("ipv4:", text, ":", ntohs(v6.sin6_port));
      }
      inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
      return absl::StrCat("ipv6:[", text, "]:", ntohs(v6.sin6_port));
    }
    case AF_UNIX: {
      // The accepted end has the listener's name, the connecting end has none.
      sockaddr_un own{};
      length = sizeof(own);
      if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) != 0) return "";
      return length > offsetof(sockaddr_un, sun_path) && own.sun_path[0] != '\0' ? "unix:" : "";
    }
    default:
      return "";
  }
}

void ForEachConnection(const std::function<void(const std::string& peer, uint64_t inode)>& look) {
  DIR* const directory = opendir("/proc/self/fd");
  if (directory == nullptr) return;
  const auto close_directory = absl::MakeCleanup([directory] { closedir(directory); });
  while (const dirent* const entry = readdir(directory)) {
    int fd = 0;
    if (!absl::SimpleAtoi(entry->d_name, &fd)) continue;
    struct stat info {};
    if (fstat(fd, &info) != 0 || !S_ISSOCK(info.st_mode)) continue;
    if (const std::string peer = PeerOf(fd); !peer.empty()) look(peer, info.st_ino);
  }
}

}  // namespace

bool IsLocalPeer(std::string_view peer) {
  const std::string plain = Plain(peer);
  for (const char* const prefix : {"unix:", "unix-abstract:", "ipv4:127.", "ipv6:[::1]:", "ipv6:[::ffff:127."}) {
    if (absl::StartsWith(plain, prefix)) return true;
  }
  return false;
}

LocalSockets::Candidates LocalSockets::Of(std::string_view peer) {
  std::string plain = Plain(peer);
  if (absl::StartsWith(plain, "unix")) plain = "unix:";
  Candidates found;
  ForEachConnection([&](const std::string& other, uint64_t inode) {
    if (other == plain) found.insert(inode);
  });
  return found;
}

bool LocalSockets::Gone(Candidates* candidates) {
  Candidates alive;
  ForEachConnection([&](const std::string& /*peer*/, uint64_t inode) {
    if (candidates->contains(inode)) alive.insert(inode);
  });
  *candidates = std::move(alive);
  return candidates->empty();
}

}  // namespace spmmd::server
