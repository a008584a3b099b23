// What the health calls of the Open Inference Protocol say while a server starts, and when a device is lost.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "inference/grpc_service.grpc.pb.h"
#include "server/oip/describe.h"
#include "tests/server/core/core_harness.h"
#include "tests/server/testing/server_harness.h"

namespace spmmd::server::testing {
namespace {

TEST(OipHealthTest, AServerThatStillLoadsIsLiveButNotReady) {
  const TempDir directory;
  Options options = *MakeOptions({});
  options.listen = {"unix:" + directory.File("socket")};
  options.metrics_listen.clear();
  auto app = App::Start(options);
  ASSERT_TRUE(app.ok()) << app.status();
  const auto stub = inference::GRPCInferenceService::NewStub(
      grpc::CreateChannel((*app)->addresses().front(), grpc::InsecureChannelCredentials()));
  const auto live = [&] {
    grpc::ClientContext context;
    inference::ServerLiveResponse response;
    return stub->ServerLive(&context, {}, &response).ok() && response.live();
  };
  const auto ready = [&] {
    grpc::ClientContext context;
    inference::ServerReadyResponse response;
    EXPECT_TRUE(stub->ServerReady(&context, {}, &response).ok());
    return response.ready();
  };
  const auto infer = [&] {
    grpc::ClientContext context;
    inference::ModelInferRequest request;
    request.set_model_name("w");
    inference::ModelInferResponse response;
    return stub->ModelInfer(&context, request, &response).error_code();
  };
  EXPECT_TRUE(live());
  EXPECT_FALSE(ready());
  grpc::ClientContext context;
  inference::ModelReadyRequest request;
  request.set_name("w");
  inference::ModelReadyResponse response;
  EXPECT_TRUE(stub->ModelReady(&context, request, &response).ok());
  EXPECT_FALSE(response.ready());
  EXPECT_EQ(infer(), grpc::StatusCode::UNAVAILABLE);

  ASSERT_TRUE((*app)->LoadAndServe().ok());
  EXPECT_TRUE(live());
  EXPECT_TRUE(ready());
  EXPECT_EQ(infer(), grpc::StatusCode::NOT_FOUND);
}

class LosableDevice final : public CpuDevice {
 public:
  LosableDevice(Metrics* metrics, int index) : CpuDevice({}, metrics, nullptr, index) {}
  ~LosableDevice() override { Shutdown(); }
  bool healthy() const override { return !lost; }
  bool lost = false;
};

TEST(OipHealthTest, AModelIsReadyAsLongAsADeviceHasIt) {
  Metrics metrics;
  LosableDevice first(&metrics, 0);
  LosableDevice second(&metrics, 1);
  LayerCatalog catalog({}, {&first, &second}, &metrics);
  Engine engine({}, &catalog, &metrics);
  const DenseMatrix w = RandomMatrix(DType::kF16, 128, 64, 0.5, 1);
  for (const auto& [name, placement] :
       {std::pair{"replicated", pb::PLACEMENT_REPLICATED}, {"sharded", pb::PLACEMENT_SHARDED}}) {
    pb::LayerSpec spec = DenseSpec(name, w.view());
    spec.set_placement(placement);
    ASSERT_TRUE(RegisterIn(catalog, spec, w.view()).ok()) << name;
  }
  RpcContext rpc;
  rpc.catalog = &catalog;
  rpc.engine = &engine;
  rpc.metrics = &metrics;
  rpc.state = ServingState::kServing;
  const auto ready = [&](const std::string& name) {
    inference::ModelReadyRequest request;
    request.set_name(name);
    return IsReady(rpc, request);
  };
  EXPECT_TRUE(IsLive(rpc));
  EXPECT_TRUE(ready("replicated"));
  EXPECT_TRUE(ready("sharded"));
  second.lost = true;
  EXPECT_TRUE(IsLive(rpc));
  EXPECT_TRUE(ready("replicated"));
  EXPECT_FALSE(ready("sharded"));
  inference::RepositoryIndexRequest request;
  inference::RepositoryIndexResponse index;
  ASSERT_TRUE(DescribeRepository(rpc, request, &index).ok());
  ASSERT_EQ(index.models_size(), 2);
  EXPECT_EQ(index.models(0).state(), "READY");
  EXPECT_EQ(index.models(1).state(), "UNAVAILABLE");
  EXPECT_FALSE(index.models(1).reason().empty());
  request.set_ready(true);
  index.Clear();
  ASSERT_TRUE(DescribeRepository(rpc, request, &index).ok());
  ASSERT_EQ(index.models_size(), 1);
  EXPECT_EQ(index.models(0).name(), "replicated");
  first.lost = true;
  EXPECT_FALSE(IsLive(rpc));
  EXPECT_FALSE(ready("replicated"));
}

}  // namespace
}  // namespace spmmd::server::testing
