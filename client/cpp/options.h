// How to reach a server, and what a single call may take.
#ifndef SPMMD_CLIENT_CPP_OPTIONS_H_
#define SPMMD_CLIENT_CPP_OPTIONS_H_

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "grpcpp/support/channel_arguments.h"

namespace spmmd::client {

// TLS to the server. Files are PEM and are read once, by Client::Connect.
struct TlsOptions {
  // Certificates to trust; empty trusts the system's.
  std::string ca_file{};
  // Certificate and key of the caller, for servers that verify clients: both or neither.
  std::string cert_file{};
  std::string key_file{};
  // Name to expect in the server's certificate, when it is not the host of the address.
  std::string server_name{};
};

struct ClientOptions {
  // Unset connects in plain text.
  std::optional<TlsOptions> tls;

  // Bearer token of every call, or a file that holds it (surrounding white space is dropped). At most one of both. The
  // file is read again when it was last read a minute ago, so that a rotated token is picked up.
  std::string token;
  std::string token_file;
  // A token is refused on a plain-text connection that leaves the host, unless set (for a mesh that encrypts by
  // itself).
  bool allow_token_without_tls = false;

  // Deadline of calls that set none: all but Register, RegisterFile, Benchmark, Warm and streams, which have none by
  // default since their length depends on the layer. absl::InfiniteDuration() for none.
  absl::Duration timeout = absl::Seconds(60);

  // Bytes of a chunk in an upload, 1 to 4 MiB. 1 MiB was the fastest over loopback.
  size_t chunk_bytes = size_t{1} << 20;

  // Large tensors travel through shared memory when the server is on this host and allows it (docs/shared-memory.md).
  bool shared_memory = true;

  // Whatever else gRPC offers (compression, load balancing, reconnection). These win over what the client itself sets:
  // unlimited message sizes, an own connection for every Client, a keepalive ping every minute while calls are in
  // flight, no HTTP proxy for an address on this host.
  grpc::ChannelArguments channel_arguments;
};

struct CallOptions {
  // Deadline counted from the call's start. Unset takes the default that ClientOptions::timeout describes.
  std::optional<absl::Duration> timeout{};
  // Wait (within the deadline) for a server that cannot be reached yet, instead of failing with UNAVAILABLE.
  bool wait_for_ready = false;
  // Further headers of the call, in lower case. A call on a layer names it in the header "spmmd-layer" by itself, for
  // gateways that route by it; a stream, or a registered program, is told here: {"spmmd-layer", NAME}.
  std::vector<std::pair<std::string, std::string>> headers{};
};

}  // namespace spmmd::client

#endif  // SPMMD_CLIENT_CPP_OPTIONS_H_
