#include "server/errors.h"

#include <gtest/gtest.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace spmmd::server {
namespace {

TEST(ErrorsTest, FieldErrorCarriesBadRequestAndReason) {
  const absl::Status status = FieldError("program.steps[2].matmul.layer", "no such layer");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "program.steps[2].matmul.layer: no such layer");
  const google::rpc::Status rpc = ToRpcStatus(status);
  EXPECT_EQ(rpc.code(), 3);
  google::rpc::BadRequest bad_request;
  google::rpc::ErrorInfo info;
  int found = 0;
  for (const auto& detail : rpc.details()) {
    if (detail.UnpackTo(&bad_request) || detail.UnpackTo(&info)) ++found;
  }
  ASSERT_EQ(found, 2);
  ASSERT_EQ(bad_request.field_violations_size(), 1);
  EXPECT_EQ(bad_request.field_violations(0).field(), "program.steps[2].matmul.layer");
  EXPECT_EQ(bad_request.field_violations(0).description(), "no such layer");
  EXPECT_EQ(info.domain(), "spmmd");
  EXPECT_EQ(info.reason(), "INVALID_FIELD");
}

TEST(ErrorsTest, EveryErrorHasErrorInfo) {
  const google::rpc::Status rpc = ToRpcStatus(absl::InternalError("oops"));
  ASSERT_EQ(rpc.details_size(), 1);
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(rpc.details(0).UnpackTo(&info));
  EXPECT_EQ(info.reason(), "INTERNAL");
  EXPECT_EQ(info.domain(), "spmmd");
}

TEST(ErrorsTest, ExhaustedCarriesRetryInfoAndMetadata) {
  const absl::Status status = Exhausted(reason::kQueueFull, "queue full", absl::Milliseconds(1250), {{"limit", "16"}});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "QUEUE_FULL");
  EXPECT_EQ(RetryDelayOf(status), absl::Milliseconds(1250));
  EXPECT_EQ(RetryDelayOf(Exhausted(reason::kTooLarge, "x", absl::ZeroDuration())), std::nullopt);
}

TEST(ErrorsTest, OutOfMemoryNamesNeededFreeAndLimit) {
  const absl::Status status = OutOfMemory(reason::kDeviceMemory, "device cpu:0", 300, 200, 1000);
  EXPECT_EQ(status.message(), "device cpu:0: needed 300 bytes, free 200 bytes, limit 1000 bytes");
  google::rpc::ErrorInfo info;
  const google::rpc::Status rpc = ToRpcStatus(status);
  for (const auto& detail : rpc.details()) detail.UnpackTo(&info);
  EXPECT_EQ(info.metadata().at("needed"), "300");
  EXPECT_EQ(info.metadata().at("free"), "200");
  EXPECT_EQ(info.metadata().at("limit"), "1000");
}

TEST(ErrorsTest, AtFieldKeepsOtherCodesAndTheirDetails) {
  EXPECT_TRUE(AtField("x", absl::OkStatus()).ok());
  EXPECT_EQ(FieldOf(AtField("x", absl::InvalidArgumentError("bad"))), "x");
  const absl::Status status = AtField("x", MakeError(absl::StatusCode::kNotFound, reason::kLayerNotFound, "gone"));
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "x: gone");
  EXPECT_EQ(ReasonOf(status), "LAYER_NOT_FOUND");
}

TEST(ErrorsTest, AllocationFailureIsTheCallersError) {
  const absl::Status status = GuardHostMemory([]() -> absl::Status { throw std::bad_alloc(); });
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "HOST_MEMORY");
  EXPECT_TRUE(GuardHostMemory([] { return absl::OkStatus(); }).ok());
}

TEST(ErrorsTest, RpcStatusRoundTrips) {
  const absl::Status status = FieldError("a.b", "c");
  EXPECT_EQ(FromRpcStatus(ToRpcStatus(status)), status);
  EXPECT_TRUE(FromRpcStatus(ToRpcStatus(absl::OkStatus())).ok());
}

}  // namespace
}  // namespace spmmd::server
