#include "tests/client/fake_server.h"

#include <cstdlib>
#include <filesystem>

#include "grpcpp/server_builder.h"

namespace spmmd::client {
namespace {

const grpc::Status kUnset(grpc::StatusCode::UNIMPLEMENTED, "the test has not set this function");

template <typename Function, typename... Args>
grpc::Status CallIfSet(const Function& function, Args&&... args) {
  return function == nullptr ? kUnset : function(std::forward<Args>(args)...);
}

}  // namespace

class FakeServer::Catalog final : public ::spmm::v1::LayerCatalog::Service {
 public:
  explicit Catalog(FakeServer& fake) : fake_(fake) {}
  grpc::Status RegisterLayer(grpc::ServerContext* context, RegisterStream* stream) override {
    return CallIfSet(fake_.register_layer, context, stream);
  }
  grpc::Status ListLayers(grpc::ServerContext*, const ::spmm::v1::ListLayersRequest* request,
                          ::spmm::v1::ListLayersResponse* response) override {
    return CallIfSet(fake_.list_layers, *request, response);
  }
  grpc::Status GetLayer(grpc::ServerContext* context, const ::spmm::v1::GetLayerRequest* request,
                        ::spmm::v1::GetLayerResponse* response) override {
    return CallIfSet(fake_.get_layer, context, *request, response);
  }

 private:
  FakeServer& fake_;
};

class FakeServer::Matmul final : public ::spmm::v1::SparseMatmul::Service {
 public:
  explicit Matmul(FakeServer& fake) : fake_(fake) {}
  grpc::Status Execute(grpc::ServerContext*, const ::spmm::v1::ExecuteRequest* request,
                       ::spmm::v1::ExecuteResponse* response) override {
    return CallIfSet(fake_.execute, *request, response);
  }
  grpc::Status ExecuteStream(grpc::ServerContext* context, ExecutionStream* stream) override {
    return CallIfSet(fake_.execute_stream, context, stream);
  }

 private:
  FakeServer& fake_;
};

class FakeServer::Health final : public ::grpc::health::v1::Health::Service {
 public:
  explicit Health(FakeServer& fake) : fake_(fake) {}
  grpc::Status Check(grpc::ServerContext*, const ::grpc::health::v1::HealthCheckRequest* request,
                     ::grpc::health::v1::HealthCheckResponse* response) override {
    return CallIfSet(fake_.check_health, request->service(), response);
  }

 private:
  FakeServer& fake_;
};

FakeServer::FakeServer()
    : catalog_(std::make_unique<Catalog>(*this)),
      matmul_(std::make_unique<Matmul>(*this)),
      health_(std::make_unique<Health>(*this)) {
  std::string pattern = (std::filesystem::temp_directory_path() / "spmmd-test-XXXXXX").string();
  directory_ = mkdtemp(pattern.data());
  address_ = "unix:" + directory_ + "/s";
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(-1);
  builder.AddListeningPort(address_, grpc::InsecureServerCredentials());
  builder.RegisterService(catalog_.get());
  builder.RegisterService(matmul_.get());
  builder.RegisterService(health_.get());
  server_ = builder.BuildAndStart();
}

FakeServer::~FakeServer() {
  Kill();
  std::filesystem::remove_all(directory_);
}

std::shared_ptr<grpc::Channel> FakeServer::InProcessChannel() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  return server_->InProcessChannel(arguments);
}

void FakeServer::Kill() { server_->Shutdown(std::chrono::system_clock::now()); }

}  // namespace spmmd::client
