// A server whose every answer a test writes itself: what a real one would never do on demand (cut a stream, answer out
// of order, break the protocol) is what the client must survive.
#ifndef SPMMD_TESTS_CLIENT_FAKE_SERVER_H_
#define SPMMD_TESTS_CLIENT_FAKE_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "google/rpc/status.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/server.h"
#include "grpcpp/server_context.h"
#include "spmm/v1/layer_catalog.grpc.pb.h"
#include "spmm/v1/sparse_matmul.grpc.pb.h"

namespace spmmd::client {

using RegisterStream = grpc::ServerReaderWriter<::spmm::v1::RegisterLayerResponse, ::spmm::v1::RegisterLayerRequest>;
using ExecutionStream = grpc::ServerReaderWriter<::spmm::v1::ExecuteStreamResponse, ::spmm::v1::ExecuteStreamRequest>;

// Answers UNIMPLEMENTED until a test sets the function. Functions run on several threads at once.
class FakeServer final {
 public:
  FakeServer();
  ~FakeServer();

  // Set before the first call.
  std::function<grpc::Status(grpc::ServerContext*, RegisterStream*)> register_layer;
  std::function<grpc::Status(const ::spmm::v1::ListLayersRequest&, ::spmm::v1::ListLayersResponse*)> list_layers;
  std::function<grpc::Status(grpc::ServerContext*, const ::spmm::v1::GetLayerRequest&, ::spmm::v1::GetLayerResponse*)>
      get_layer;
  std::function<grpc::Status(const ::spmm::v1::ExecuteRequest&, ::spmm::v1::ExecuteResponse*)> execute;
  std::function<grpc::Status(grpc::ServerContext*, ExecutionStream*)> execute_stream;
  std::function<grpc::Status(const std::string& service, ::grpc::health::v1::HealthCheckResponse*)> check_health;

  // In this process, without a socket.
  std::shared_ptr<grpc::Channel> InProcessChannel();
  // "unix:/..." of a socket that the same server listens on.
  const std::string& address() const { return address_; }
  // Ends the server at once, and every call with it.
  void Kill();

 private:
  class Catalog;
  class Matmul;
  class Health;

  std::unique_ptr<Catalog> catalog_;
  std::unique_ptr<Matmul> matmul_;
  std::unique_ptr<Health> health_;
  std::string directory_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

// A gRPC status with one google.rpc detail, as the wire contract has it.
template <typename Detail>
grpc::Status ErrorWithDetail(grpc::StatusCode code, const std::string& message, const Detail& detail) {
  google::rpc::Status status;
  status.set_code(code);
  status.set_message(message);
  status.add_details()->PackFrom(detail);
  return grpc::Status(code, message, status.SerializeAsString());
}

}  // namespace spmmd::client

#endif  // SPMMD_TESTS_CLIENT_FAKE_SERVER_H_
