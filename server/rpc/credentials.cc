#include "server/rpc/credentials.h"

#include <openssl/asn1.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "kernels/base/status_macros.h"

namespace spmmd::server {
namespace {

absl::Status TlsError(absl::string_view flag, const std::string& file) {
  std::array<char, 256> text{};
  const unsigned long code = ERR_get_error();
  ERR_error_string_n(code, text.data(), text.size());
  ERR_clear_error();
  return absl::InvalidArgumentError(absl::StrCat(flag, ": ", file, ": ", text.data()));
}

absl::Status CheckReadable(absl::string_view flag, const std::string& file) {
  std::FILE* handle = std::fopen(file.c_str(), "re");
  if (handle == nullptr) return absl::NotFoundError(absl::StrCat(flag, ": ", file, ": ", std::strerror(errno)));
  std::fclose(handle);
  return absl::OkStatus();
}

absl::Status CheckFiles(const TlsOptions& options) {
  SPMMD_RETURN_IF_ERROR(CheckReadable("--tls-cert", options.cert_file));
  SPMMD_RETURN_IF_ERROR(CheckReadable("--tls-key", options.key_file));
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_server_method()), &SSL_CTX_free);
  if (context == nullptr) return absl::InternalError("TLS is not available");
  if (SSL_CTX_use_certificate_chain_file(context.get(), options.cert_file.c_str()) != 1) {
    return TlsError("--tls-cert", options.cert_file);
  }
  if (SSL_CTX_use_PrivateKey_file(context.get(), options.key_file.c_str(), SSL_FILETYPE_PEM) != 1) {
    return TlsError("--tls-key", options.key_file);
  }
  if (SSL_CTX_check_private_key(context.get()) != 1) return TlsError("--tls-key", options.key_file);
  if (!options.client_ca_file.empty()) {
    SPMMD_RETURN_IF_ERROR(CheckReadable("--tls-client-ca", options.client_ca_file));
    if (SSL_CTX_load_verify_locations(context.get(), options.client_ca_file.c_str(), nullptr) != 1) {
      return TlsError("--tls-client-ca", options.client_ca_file);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeTlsCredentials(const TlsOptions& options) {
  SPMMD_RETURN_IF_ERROR(CheckFiles(options));
  const auto interval = static_cast<unsigned>(std::max<int64_t>(1, absl::ToInt64Seconds(options.reload_interval)));
  const auto provider = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      options.key_file, options.cert_file, options.client_ca_file, interval);
  grpc::experimental::TlsServerCredentialsOptions tls(provider);
  tls.watch_identity_key_cert_pairs();
  if (options.client_ca_file.empty()) {
    tls.set_cert_request_type(GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  } else {
    tls.watch_root_certs();
    tls.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(tls);
}

absl::StatusOr<absl::Time> CertificateExpiry(const std::string& cert_file) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(cert_file.c_str(), "re"), &std::fclose);
  if (file == nullptr) return absl::NotFoundError(absl::StrCat(cert_file, ": ", std::strerror(errno)));
  const std::unique_ptr<X509, decltype(&X509_free)> cert(PEM_read_X509(file.get(), nullptr, nullptr, nullptr),
                                                         &X509_free);
  if (cert == nullptr) return TlsError("--tls-cert", cert_file);
  std::tm time{};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(cert.get()), &time) != 1) return TlsError("--tls-cert", cert_file);
  return absl::FromTimeT(timegm(&time));
}

}  // namespace spmmd::server
