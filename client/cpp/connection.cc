#include "client/cpp/connection.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"

namespace spmmd::client {
namespace {

constexpr absl::Duration kTokenMaxAge = absl::Minutes(1);
constexpr size_t kMaxChunkBytes = size_t{4} << 20;
constexpr char kLayerHeader[] = "spmmd-layer";

absl::StatusOr<std::string> ReadFile(absl::string_view what, const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (file.is_open()) content << file.rdbuf();
  if (!file.is_open() || file.bad() || content.str().empty()) {
    const char* reason = errno != 0 ? std::strerror(errno) : "the file is empty";
    return absl::InvalidArgumentError(absl::StrCat(what, ": cannot read '", path, "': ", reason));
  }
  return content.str();
}

absl::StatusOr<std::string> ReadToken(const std::string& path) {
  absl::StatusOr<std::string> content = ReadFile("token_file", path);
  if (!content.ok()) return content;
  const absl::string_view token = absl::StripAsciiWhitespace(*content);
  if (token.empty()) return absl::InvalidArgumentError(absl::StrCat("token_file: '", path, "' holds only white space"));
  return std::string(token);
}

// An address that never leaves this host. The port and the brackets of IPv6 may be there or not.
bool IsLocal(absl::string_view address) {
  if (absl::StartsWith(address, "unix:") || absl::StartsWith(address, "unix-abstract:")) return true;
  absl::ConsumePrefix(&address, "dns:");
  absl::ConsumePrefix(&address, "ipv4:");
  absl::ConsumePrefix(&address, "ipv6:");
  while (absl::ConsumePrefix(&address, "/")) {
  }
  return absl::StartsWith(address, "127.") || absl::StartsWith(address, "localhost:") ||
         absl::StartsWith(address, "[::1]:");
}

absl::Status CheckAddress(absl::string_view address) {
  if (address.empty()) return absl::InvalidArgumentError("address: empty; expected HOST:PORT or unix:/path");
  // Without a port gRPC would silently take 443.
  if (!absl::StrContains(address, ':')) {
    return absl::InvalidArgumentError(
        absl::StrCat("address: '", address, "' has no port; expected HOST:PORT or unix:/path"));
  }
  for (const absl::string_view scheme : {"http://", "https://", "grpc://", "tcp://"}) {
    if (absl::StartsWith(address, scheme)) {
      return absl::InvalidArgumentError(
          absl::StrCat("address: '", address, "' is a URL; expected HOST:PORT or unix:/path"));
    }
  }
  return absl::OkStatus();
}

// Sets an argument that the caller has not set.
void SetDefault(grpc::ChannelArguments& arguments, const char* key, int value) {
  const grpc_channel_args set = arguments.c_channel_args();
  for (size_t i = 0; i < set.num_args; ++i) {
    if (std::strcmp(set.args[i].key, key) == 0) return;
  }
  arguments.SetInt(key, value);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(const TlsOptions& tls) {
  if (tls.cert_file.empty() != tls.key_file.empty()) {
    return absl::InvalidArgumentError("tls: cert_file and key_file go together");
  }
  grpc::SslCredentialsOptions ssl;
  const std::pair<const std::string*, std::string*> files[] = {{&tls.ca_file, &ssl.pem_root_certs},
                                                               {&tls.cert_file, &ssl.pem_cert_chain},
                                                               {&tls.key_file, &ssl.pem_private_key}};
  for (const auto& [path, pem] : files) {
    if (path->empty()) continue;
    absl::StatusOr<std::string> content = ReadFile("tls", *path);
    if (!content.ok()) return content.status();
    *pem = *std::move(content);
  }
  return grpc::SslCredentials(ssl);
}

}  // namespace

absl::StatusOr<std::shared_ptr<Connection>> Connection::Open(std::string_view address, const ClientOptions& options) {
  const std::string target(address);
  if (absl::Status status = CheckAddress(target); !status.ok()) return status;
  if (options.chunk_bytes < 1 || options.chunk_bytes > kMaxChunkBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk_bytes: ", options.chunk_bytes, " is not within 1 to ", kMaxChunkBytes));
  }
  if (!options.token.empty() && !options.token_file.empty()) {
    return absl::InvalidArgumentError("token: give token or token_file, not both");
  }
  const bool has_token = !options.token.empty() || !options.token_file.empty();
  if (has_token && !options.tls.has_value() && !options.allow_token_without_tls && !IsLocal(target)) {
    return absl::InvalidArgumentError(absl::StrCat("token: refusing to send it in plain text to '", target,
                                                   "'; use TLS, or allow_token_without_tls"));
  }

  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  grpc::ChannelArguments arguments = options.channel_arguments;
  arguments.SetUserAgentPrefix("spmmd-cpp");
  SetDefault(arguments, GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, -1);
  SetDefault(arguments, GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, -1);
  // One connection tops out near 2 GB/s: callers that want more make more Clients, which must not share one.
  SetDefault(arguments, GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Calls without a deadline must not wait for a host that is gone. The server allows a ping every 10 s.
  SetDefault(arguments, GRPC_ARG_KEEPALIVE_TIME_MS, 60'000);
  SetDefault(arguments, GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  SetDefault(arguments, GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  if (IsLocal(target)) SetDefault(arguments, GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  if (options.tls.has_value()) {
    auto secure = MakeCredentials(*options.tls);
    if (!secure.ok()) return secure.status();
    credentials = *std::move(secure);
    if (!options.tls->server_name.empty()) arguments.SetSslTargetNameOverride(options.tls->server_name);
  }
  std::shared_ptr<Connection> connection(
      new Connection(grpc::CreateCustomChannel(target, credentials, arguments), options));
  if (absl::StatusOr<std::string> token = connection->Token(); !token.ok()) return token.status();
  connection->local_ = IsLocal(target);
  return connection;
}

std::shared_ptr<Connection> Connection::Wrap(std::shared_ptr<grpc::Channel> channel, const ClientOptions& options) {
  return std::shared_ptr<Connection>(new Connection(std::move(channel), options));
}

absl::StatusOr<std::string> Connection::Token() {
  absl::MutexLock lock(&mutex_);
  if (options_.token_file.empty()) return token_;
  if (const absl::Time now = absl::Now(); now - token_read_ > kTokenMaxAge) {
    absl::StatusOr<std::string> token = ReadToken(options_.token_file);
    // While the file is being replaced the last token is the best guess.
    if (!token.ok() && token_.empty()) return token;
    if (token.ok()) token_ = *std::move(token);
    token_read_ = now;
  }
  return token_;
}

absl::Status Connection::Prepare(grpc::ClientContext& context, const CallOptions& call, absl::Duration default_timeout,
                                 std::string_view layer) {
  const absl::Duration timeout = call.timeout.value_or(default_timeout);
  if (timeout != absl::InfiniteDuration()) {
    context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMicroseconds(timeout));
  }
  context.set_wait_for_ready(call.wait_for_ready);
  for (const auto& [name, value] : call.headers) {
    context.AddMetadata(name, value);
    if (name == kLayerHeader) layer = {};  // the caller's word counts
  }
  if (!layer.empty()) context.AddMetadata(kLayerHeader, std::string(layer));
  const absl::StatusOr<std::string> token = Token();
  if (!token.ok()) return token.status();
  if (!token->empty()) context.AddMetadata("authorization", absl::StrCat("Bearer ", *token));
  return absl::OkStatus();
}

}  // namespace spmmd::client
