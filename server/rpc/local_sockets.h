// Which connections this process has accepted, as the kernel sees them.
#ifndef SPMMD_SERVER_RPC_LOCAL_SOCKETS_H_
#define SPMMD_SERVER_RPC_LOCAL_SOCKETS_H_

#include <cstdint>
#include <set>
#include <string>
#include <string_view>

namespace spmmd::server {

// Whether `peer`, as ServerContext::peer() gives it, is on this host: a Unix socket or a loopback address.
bool IsLocalPeer(std::string_view peer);

class LocalSockets {
 public:
  // Inodes of sockets of which one is a certain connection's.
  using Candidates = std::set<uint64_t>;

  // The sockets that a call from `peer` can have come on: one for TCP, all accepted Unix sockets for "unix:", whose
  // peers have no names.
  static Candidates Of(std::string_view peer);
  // Takes out of `candidates` what is no accepted socket of this process any more; true when none is left, and the
  // connection therefore gone.
  static bool Gone(Candidates* candidates);
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_LOCAL_SOCKETS_H_
