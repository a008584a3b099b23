// Server credentials: plain text, TLS, mutual TLS; certificates are followed when their files change.
#ifndef SPMMD_SERVER_RPC_CREDENTIALS_H_
#define SPMMD_SERVER_RPC_CREDENTIALS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/security/server_credentials.h"

namespace spmmd::server {

struct TlsOptions {
  std::string cert_file;
  std::string key_file;
  std::string client_ca_file;  // empty: clients need no certificate
  absl::Duration reload_interval = absl::Seconds(10);
};

// INVALID_ARGUMENT or NOT_FOUND naming the flag and the file when the files are not a certificate and its key: gRPC
// itself would start, and fail every handshake.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeTlsCredentials(const TlsOptions& options);

// When the first certificate of a PEM file expires.
absl::StatusOr<absl::Time> CertificateExpiry(const std::string& cert_file);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_CREDENTIALS_H_
