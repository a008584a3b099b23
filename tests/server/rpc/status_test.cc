#include "server/rpc/status.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/status/status.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

TEST(ToGrpcStatusTest, CarriesCodeTextAndDetails) {
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  const grpc::Status status = ToGrpcStatus(FieldError("program.steps[2].matmul.layer", "is empty"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), 3);
  EXPECT_EQ(details.message(), status.error_message());
  bool has_field = false;
  bool has_info = false;
  for (const auto& any : details.details()) {
    google::rpc::BadRequest bad;
    if (any.UnpackTo(&bad)) has_field = bad.field_violations(0).field() == "program.steps[2].matmul.layer";
    google::rpc::ErrorInfo info;
    if (any.UnpackTo(&info)) has_info = info.domain() == "spmmd" && info.reason() == "INVALID_FIELD";
  }
  EXPECT_TRUE(has_field);
  EXPECT_TRUE(has_info);
}

TEST(ToGrpcStatusTest, LongErrorsStayWithinWhatClientsAccept) {
  const grpc::Status status = ToGrpcStatus(FieldError(std::string(100000, 'f'), std::string(100000, 'x')));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  // Both travel as headers, the details in base64; clients take 8 KiB of headers by default.
  EXPECT_LE(status.error_message().size() + status.error_details().size() * 4 / 3, 8000u);
  EXPECT_FALSE(status.error_message().empty());
}

TEST(CodeNameTest, EveryCode) {
  EXPECT_EQ(CodeName(absl::StatusCode::kOk), "OK");
  EXPECT_EQ(CodeName(absl::StatusCode::kResourceExhausted), "RESOURCE_EXHAUSTED");
  EXPECT_EQ(CodeName(absl::StatusCode::kUnauthenticated), "UNAUTHENTICATED");
  EXPECT_EQ(CodeName(static_cast<absl::StatusCode>(99)), "UNKNOWN");
}

}  // namespace
}  // namespace spmmd::server
