// A channel with its credentials, and the context of each call on it. Internal to the client library.
#ifndef SPMMD_CLIENT_CPP_CONNECTION_H_
#define SPMMD_CLIENT_CPP_CONNECTION_H_

#include <memory>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/options.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"

namespace spmmd::client {

class Connection {
 public:
  // Connects lazily: errors here are about the address, the options and the files they name.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(std::string_view address, const ClientOptions& options);
  static std::shared_ptr<Connection> Wrap(std::shared_ptr<grpc::Channel> channel, const ClientOptions& options);

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  const ClientOptions& options() const { return options_; }
  // The address never leaves this host; false when it is not known.
  bool local() const { return local_; }

  // Sets deadline, wait-for-ready, token, and the header that gateways route by: the layer that the call is about, if
  // any. Fails when the token file cannot be read.
  absl::Status Prepare(grpc::ClientContext& context, const CallOptions& call, absl::Duration default_timeout,
                       std::string_view layer = {});

 private:
  Connection(std::shared_ptr<grpc::Channel> channel, const ClientOptions& options)
      : channel_(std::move(channel)), options_(options), token_(options.token) {}

  absl::StatusOr<std::string> Token();

  const std::shared_ptr<grpc::Channel> channel_;
  const ClientOptions options_;
  bool local_ = false;
  absl::Mutex mutex_;
  std::string token_ ABSL_GUARDED_BY(mutex_);
  absl::Time token_read_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace spmmd::client

#endif  // SPMMD_CLIENT_CPP_CONNECTION_H_
