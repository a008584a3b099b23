#include "server/rpc/auth.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/time/clock.h"

namespace spmmd::server {
namespace {

using ::testing::HasSubstr;

class AuthTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = ::testing::TempDir() + "/tokens_" + std::to_string(getpid()) + "_" +
            ::testing::UnitTest::GetInstance()->current_test_info()->name();
  }
  void TearDown() override { std::filesystem::remove(path_); }
  void Write(const std::string& text) { std::ofstream(path_) << text; }
  std::string OpenError(const std::string& text) {
    Write(text);
    auto tokens = AuthTokens::Open(path_, absl::Seconds(1));
    EXPECT_EQ(tokens.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(tokens.status().message());
  }

  std::string path_;
};

TEST_F(AuthTest, GroupsAndWrongTokens) {
  Write("# comment\n\ndata data-token-0123456789\nadmin  admin-token-0123456789  \nadmin admin-token-rotated-in\n");
  auto tokens = AuthTokens::Open(path_, absl::Seconds(1));
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  const auto check = [&](const char* header, AuthGroup group) { return (*tokens)->Check(header, group).code(); };
  EXPECT_EQ(check("Bearer data-token-0123456789", AuthGroup::kData), absl::StatusCode::kOk);
  EXPECT_EQ(check("bearer data-token-0123456789", AuthGroup::kData), absl::StatusCode::kOk);
  EXPECT_EQ(check("Bearer data-token-0123456789", AuthGroup::kAdmin), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(check("Bearer admin-token-0123456789", AuthGroup::kAdmin), absl::StatusCode::kOk);
  EXPECT_EQ(check("Bearer admin-token-0123456789", AuthGroup::kData), absl::StatusCode::kOk);
  EXPECT_EQ(check("Bearer admin-token-rotated-in", AuthGroup::kAdmin), absl::StatusCode::kOk);
  for (const char* wrong : {"", "Bearer", "Bearer ", "Bearer data-token-012345678", "Bearer data-token-0123456789x",
                            "Basic data-token-0123456789", "data-token-0123456789", "Bearer  data-token-0123456789"}) {
    EXPECT_EQ(check(wrong, AuthGroup::kData), absl::StatusCode::kUnauthenticated) << wrong;
  }
}

TEST_F(AuthTest, BadFilesNameTheLine) {
  EXPECT_THAT(OpenError("data data-token-0123456789\nroot root-token-0123456789\n"), HasSubstr(":2: expected"));
  EXPECT_THAT(OpenError("data\n"), HasSubstr(":1: expected"));
  EXPECT_THAT(OpenError("data short\n"), HasSubstr(":1: a token must have at least 16"));
  EXPECT_THAT(OpenError("data two words-in-a-token\n"), HasSubstr(":1: a token is printable"));
  EXPECT_THAT(OpenError("# nothing\n"), HasSubstr("holds no token"));
  EXPECT_EQ(AuthTokens::Open("/does/not/exist", absl::Seconds(1)).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(AuthTest, FollowsTheFileAndSurvivesABrokenOne) {
  Write("data first-token-0123456789\n");
  auto tokens = AuthTokens::Open(path_, absl::Milliseconds(1));
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  ASSERT_TRUE((*tokens)->Check("Bearer first-token-0123456789", AuthGroup::kData).ok());
  // A rename, as orchestrators replace mounted secrets.
  std::ofstream(path_ + ".new") << "data second-token-0123456789\n";
  std::filesystem::rename(path_ + ".new", path_);
  absl::SleepFor(absl::Milliseconds(5));
  EXPECT_TRUE((*tokens)->Check("Bearer second-token-0123456789", AuthGroup::kData).ok());
  EXPECT_FALSE((*tokens)->Check("Bearer first-token-0123456789", AuthGroup::kData).ok());
  Write("nonsense\n");
  absl::SleepFor(absl::Milliseconds(5));
  EXPECT_TRUE((*tokens)->Check("Bearer second-token-0123456789", AuthGroup::kData).ok());
}

}  // namespace
}  // namespace spmmd::server
