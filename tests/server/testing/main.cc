#include <gtest/gtest.h>

#include "server/log/log.h"
#include "tests/server/testing/server_harness.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  // Refusals are what many of these tests are about.
  spmmd::server::InitLog(spmmd::server::LogLevel::kError, spmmd::server::LogFormat::kText);
  spmmd::server::testing::ExitFastAfterTests();
  return RUN_ALL_TESTS();
}
