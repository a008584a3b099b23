#include "server/rpc/credentials.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <openssl/asn1.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include <array>
#include <cstdint>
#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/security/server_credentials.h"
#include "kernels/base/status_macros.h"
#include "server/config/fields.h"
#include "server/log/log.h"

namespace spmmd::server {
namespace {

template <typename T, void (*Free)(T*)>
struct Deleter {
  void operator()(T* object) const { Free(object); }
};
struct BioDeleter {
  void operator()(BIO* bio) const { BIO_free(bio); }
};
using Cert = std::unique_ptr<X509, Deleter<X509, X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Deleter<EVP_PKEY, EVP_PKEY_free>>;
using Bio = std::unique_ptr<BIO, BioDeleter>;

struct Pem {
  std::string cert;
  std::string key;
  std::string client_ca;
};

absl::Status TlsError(absl::string_view flag, const std::string& file, absl::string_view what) {
  std::array<char, 256> text{};
  ERR_error_string_n(ERR_peek_last_error(), text.data(), text.size());
  ERR_clear_error();
  return absl::InvalidArgumentError(absl::StrCat(flag, ": ", file, ": ", what, " (", text.data(), ")"));
}

Cert FirstCert(const std::string& pem) {
  const Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  return Cert(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
}

absl::StatusOr<std::string> ReadFor(absl::string_view flag, const std::string& file) {
  auto text = ReadSmallFile(file);
  if (!text.ok()) return absl::Status(text.status().code(), absl::StrCat(flag, ": ", text.status().message()));
  return text;
}

// All files, when they belong together.
absl::StatusOr<Pem> ReadPem(const TlsOptions& options) {
  Pem pem;
  SPMMD_ASSIGN_OR_RETURN(pem.cert, ReadFor("--tls-cert", options.cert_file));
  SPMMD_ASSIGN_OR_RETURN(pem.key, ReadFor("--tls-key", options.key_file));
  const Cert cert = FirstCert(pem.cert);
  if (cert == nullptr) return TlsError("--tls-cert", options.cert_file, "holds no PEM certificate");
  const Bio key_bio(BIO_new_mem_buf(pem.key.data(), static_cast<int>(pem.key.size())));
  const Key key(PEM_read_bio_PrivateKey(key_bio.get(), nullptr, nullptr, nullptr));
  if (key == nullptr) return TlsError("--tls-key", options.key_file, "holds no PEM private key");
  if (X509_check_private_key(cert.get(), key.get()) != 1) {
    return TlsError("--tls-key", options.key_file, "is not the key of the certificate");
  }
  if (!options.client_ca_file.empty()) {
    SPMMD_ASSIGN_OR_RETURN(pem.client_ca, ReadFor("--tls-client-ca", options.client_ca_file));
    if (FirstCert(pem.client_ca) == nullptr) {
      return TlsError("--tls-client-ca", options.client_ca_file, "holds no PEM certificate");
    }
  }
  return pem;
}

// The files of one server, asked for by gRPC at each handshake.
class TlsFiles {
 public:
  TlsFiles(TlsOptions options, Pem pem)
      : options_(std::move(options)), pem_(std::move(pem)), stamps_(Stamps()), next_look_(Next()) {}

  static grpc_ssl_certificate_config_reload_status Fetch(void* self, grpc_ssl_server_certificate_config** config) {
    return static_cast<TlsFiles*>(self)->FetchConfig(config);
  }

 private:
  using Stamp = std::tuple<int64_t, int64_t, uint64_t, int64_t>;

  grpc_ssl_certificate_config_reload_status FetchConfig(grpc_ssl_server_certificate_config** config) {
    absl::MutexLock lock(&mutex_);
    if (!Refresh() && !first_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    first_ = false;
    const grpc_ssl_pem_key_cert_pair pair = {pem_.key.c_str(), pem_.cert.c_str()};
    // gRPC wants some roots here even when no client certificate is asked for, and then does not use them.
    const std::string& roots = pem_.client_ca.empty() ? pem_.cert : pem_.client_ca;
    *config = grpc_ssl_server_certificate_config_create(roots.c_str(), &pair, 1);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  // True when the files are new and good.
  bool Refresh() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (absl::Now() < next_look_) return false;
    next_look_ = Next();
    std::vector<Stamp> stamps = Stamps();
    if (stamps == stamps_) return false;
    auto pem = ReadPem(options_);
    if (!pem.ok()) {
      LogError("TLS files not reloaded", {{"error", std::string(pem.status().message())}});
      return false;
    }
    // Only now: a pair that is being replaced, one file after the other, is looked at again.
    stamps_ = std::move(stamps);
    pem_ = *std::move(pem);
    LogInfo("TLS files reloaded", {{"certificate", options_.cert_file}});
    return true;
  }

  std::vector<Stamp> Stamps() const {
    std::vector<Stamp> stamps;
    for (const std::string& file : {options_.cert_file, options_.key_file, options_.client_ca_file}) {
      struct stat info {};
      if (file.empty() || stat(file.c_str(), &info) != 0) info = {};
      stamps.emplace_back(info.st_mtim.tv_sec, info.st_mtim.tv_nsec, info.st_ino, info.st_size);
    }
    return stamps;
  }

  absl::Time Next() const { return absl::Now() + options_.reload_interval; }

  const TlsOptions options_;
  absl::Mutex mutex_;
  Pem pem_ ABSL_GUARDED_BY(mutex_);
  std::vector<Stamp> stamps_ ABSL_GUARDED_BY(mutex_);
  absl::Time next_look_ ABSL_GUARDED_BY(mutex_);
  bool first_ ABSL_GUARDED_BY(mutex_) = true;
};

// gRPC's C++ layer offers the certificate fetcher of its C layer only through a provider that gives up the last good
// certificate for a broken file.
class FetchingCredentials final : public grpc::ServerCredentials {
 public:
  // The base class has initialised gRPC by the time that `credentials_` is made.
  FetchingCredentials(grpc_ssl_client_certificate_request_type request, TlsFiles* files)
      : credentials_(grpc_ssl_server_credentials_create_with_options(
            grpc_ssl_server_credentials_create_options_using_config_fetcher(request, &TlsFiles::Fetch, files))) {}
  ~FetchingCredentials() override { grpc_server_credentials_release(credentials_); }
  FetchingCredentials(const FetchingCredentials&) = delete;
  FetchingCredentials& operator=(const FetchingCredentials&) = delete;

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>& /*processor*/) override {}

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  grpc_server_credentials* const credentials_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeTlsCredentials(const TlsOptions& options) {
  SPMMD_ASSIGN_OR_RETURN(Pem pem, ReadPem(options));
  // Kept as long as the process lives: a handshake may outlast its server.
  static absl::Mutex mutex;
  static auto* const all = new std::vector<std::unique_ptr<TlsFiles>>;
  TlsFiles* files = nullptr;
  {
    absl::MutexLock lock(&mutex);
    files = all->emplace_back(std::make_unique<TlsFiles>(options, std::move(pem))).get();
  }
  const auto request = options.client_ca_file.empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                                                      : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
  return std::make_shared<FetchingCredentials>(request, files);
}

absl::StatusOr<absl::Time> CertificateExpiry(const std::string& cert_file) {
  SPMMD_ASSIGN_OR_RETURN(const std::string pem, ReadFor("--tls-cert", cert_file));
  const Cert cert = FirstCert(pem);
  if (cert == nullptr) return TlsError("--tls-cert", cert_file, "holds no PEM certificate");
  std::tm time{};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(cert.get()), &time) != 1) {
    return TlsError("--tls-cert", cert_file, "has no readable end of validity");
  }
  return absl::FromTimeT(timegm(&time));
}

}  // namespace spmmd::server
