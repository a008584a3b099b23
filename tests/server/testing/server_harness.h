// A whole server in the test's process, on a Unix socket of its own, and short forms of the calls that tests make.
#ifndef SPMMD_TESTS_SERVER_TESTING_SERVER_HARNESS_H_
#define SPMMD_TESTS_SERVER_TESTING_SERVER_HARNESS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "server/app.h"
#include "server/config/options.h"
#include "server/pb.h"
#include "spmm/v1/layer_catalog.grpc.pb.h"
#include "spmm/v1/sparse_matmul.grpc.pb.h"

namespace spmmd::server::testing {

// A directory that goes away with the object.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }
  std::string Write(const std::string& name, const std::string& content) const;

 private:
  std::string path_;
};

// A layer [m, k] of fp32 values with about half of them zero, and what it must compute.
struct TestLayer {
  int64_t m = 0;
  int64_t k = 0;
  std::vector<float> w;

  static TestLayer Random(int64_t m, int64_t k, uint32_t seed);
  std::string Bytes() const;
  // X [n, k] -> Y [n, m], accumulated in double.
  std::vector<double> Reference(const std::vector<float>& x, int64_t n) const;
};
std::vector<float> RandomVector(int64_t size, uint32_t seed);
std::string AsBytes(const std::vector<float>& values);
std::vector<float> AsFloats(const std::string& bytes);

// A spec of dense fp32 content.
pb::LayerSpec DenseSpec(const std::string& name, int64_t m, int64_t k);
pb::ContentChunk Chunk(pb::ContentPart part, uint64_t offset, std::string data);
// y = x * W^T, one step "y" over one input "x".
pb::ExecuteRequest MatmulRequest(const std::string& layer, const std::vector<float>& x, int64_t n, int64_t k);

// The parts of a failure that callers switch on.
struct Failure {
  grpc::StatusCode code = grpc::StatusCode::OK;
  std::string message;
  std::string reason;  // ErrorInfo
  std::string field;   // BadRequest
};
Failure Explain(const grpc::Status& status);

class TestServer {
 public:
  // Defaults, one Unix socket, metrics off; `change` may alter them.
  explicit TestServer(const std::function<void(Options*)>& change = {});
  ~TestServer();

  App& app() { return *app_; }
  const std::string& address() const { return app_->addresses().front(); }
  // A connection of its own.
  std::shared_ptr<grpc::Channel> NewChannel(const grpc::ChannelArguments* arguments = nullptr) const;
  pb::SparseMatmul::Stub& matmul() { return *matmul_; }
  pb::LayerCatalog::Stub& catalog() { return *catalog_; }

  // Uploads in one go: spec, then chunks, without waiting for `accepted`.
  grpc::Status Register(const pb::LayerSpec& spec, const std::vector<pb::ContentChunk>& chunks,
                        pb::Layer* layer = nullptr);
  grpc::Status Register(const std::string& name, const TestLayer& layer);
  grpc::Status Execute(const pb::ExecuteRequest& request, pb::ExecuteResponse* response);

  // Sum over the series of a metric whose line begins with `prefix` ("spmmd_running_requests{"); 0 when there is none.
  double Metric(const std::string& prefix) const;
  // Waits (up to two minutes) until `condition` holds; false when it never does.
  static bool Eventually(const std::function<bool()>& condition);

 private:
  TempDir directory_;
  std::unique_ptr<App> app_;
  std::unique_ptr<pb::SparseMatmul::Stub> matmul_;
  std::unique_ptr<pb::LayerCatalog::Stub> catalog_;
};

// Ends the test program without gRPC's shutdown, which can take ten seconds after large messages. To be called once,
// before the tests run; does nothing under a sanitizer, whose own checks come at exit.
void ExitFastAfterTests();

}  // namespace spmmd::server::testing

#endif  // SPMMD_TESTS_SERVER_TESTING_SERVER_HARNESS_H_
