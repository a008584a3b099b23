// Endpoints as gRPC writes them: "HOST:PORT", "[V6]:PORT", "unix:/path".
#ifndef SPMMD_SERVER_RPC_ENDPOINT_H_
#define SPMMD_SERVER_RPC_ENDPOINT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace spmmd::server {

bool IsUnix(const std::string& endpoint);
// "/path" of "unix:/path".
std::string SocketPath(const std::string& endpoint);
// The endpoint with its port replaced; a Unix endpoint as it is.
std::string WithPort(const std::string& endpoint, int port);

// UNAVAILABLE when some process serves the socket (gRPC would silently take its name away), INVALID_ARGUMENT when the
// path is a file of another kind. A socket file that a dead server left is fine.
absl::Status CheckSocketFree(const std::string& endpoint);
// Why nothing can listen there: "ADDR: Address already in use".
std::string ExplainBindFailure(const std::string& endpoint);
// Removes those that are sockets still.
void RemoveSocketFiles(const std::vector<std::string>& paths);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_ENDPOINT_H_
