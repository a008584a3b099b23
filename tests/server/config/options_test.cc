#include "server/config/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/config/fields.h"

namespace spmmd::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

absl::StatusOr<Command> Parse(std::vector<std::string> arguments) {
  std::vector<const char*> argv = {"spmmd"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  return ParseCommandLine(static_cast<int>(argv.size()), argv.data(), "1.2.3");
}

Options ParseOk(std::vector<std::string> arguments) {
  auto command = Parse(std::move(arguments));
  EXPECT_TRUE(command.ok()) << command.status();
  if (!command.ok() || !std::holds_alternative<Options>(*command)) return {};
  return std::get<Options>(*command);
}

std::string ParseError(std::vector<std::string> arguments) {
  auto command = Parse(std::move(arguments));
  EXPECT_FALSE(command.ok());
  return std::string(command.status().message());
}

class OptionsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ =
        std::filesystem::path(::testing::TempDir()) / ("options_test_" + std::to_string(getpid()) + "_" +
                                                       ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(directory_);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::string Write(const std::string& name, const std::string& text) {
    const std::filesystem::path path = directory_ / name;
    std::ofstream(path) << text;
    return path.string();
  }

  std::filesystem::path directory_;
};

TEST_F(OptionsTest, DefaultsAreTheContract) {
  const Options options = ParseOk({});
  EXPECT_THAT(options.listen, ElementsAre("127.0.0.1:8500"));
  EXPECT_EQ(options.metrics_listen, "127.0.0.1:9500");
  EXPECT_EQ(options.health_listen, "");
  EXPECT_EQ(options.backend, BackendChoice::kAuto);
  EXPECT_DOUBLE_EQ(options.device_memory_fraction, 0.9);
  EXPECT_EQ(options.max_queue_delay, absl::ZeroDuration());
  EXPECT_EQ(options.max_message_bytes, 64u << 20);
  EXPECT_EQ(options.max_chunk_bytes, 4u << 20);
  EXPECT_EQ(options.upload_idle_timeout, absl::Seconds(60));
  EXPECT_TRUE(options.reflection);
  EXPECT_FALSE(options.channelz);
  EXPECT_TRUE(options.layers.empty());
}

TEST_F(OptionsTest, Gpus) {
  const Options options = ParseOk(
      {"--backend=cuda", "--device=cuda:2", "--device=cuda:0", "--cuda-library=/x.so", "--exit-on-device-failure"});
  EXPECT_THAT(options.cuda_devices, ElementsAre(2, 0));
  EXPECT_EQ(options.cuda_library, "/x.so");
  EXPECT_TRUE(options.exit_on_device_failure);
  EXPECT_TRUE(options.dense_shadows);
  EXPECT_TRUE(options.tune_kernels);
  const Options plain = ParseOk({"--dense-shadows=false", "--tune-kernels=false"});
  EXPECT_FALSE(plain.dense_shadows);
  EXPECT_FALSE(plain.tune_kernels);
  EXPECT_THAT(ParseError({"--device=gpu0"}), HasSubstr("'gpu0' is not of the form cuda:N"));
  EXPECT_THAT(ParseError({"--device=cuda:-1"}), HasSubstr("cuda:N"));
  EXPECT_THAT(ParseError({"--device=cuda:1", "--device=cuda:1"}), HasSubstr("given twice"));
  EXPECT_THAT(ParseError({"--backend=cpu", "--device=cuda:1"}), HasSubstr("--device: not with --backend=cpu"));
}

TEST_F(OptionsTest, EveryFlagOfTheContractIsInHelp) {
  auto command = Parse({"--help"});
  ASSERT_TRUE(command.ok()) << command.status();
  const std::string& text = std::get<PrintAndExit>(*command).text;
  for (const char* flag :
       {"--listen", "--metrics-listen", "--backend", "--model-repository", "--cache-dir", "--config", "--tls-cert",
        "--tls-key", "--tls-client-ca", "--auth-token-file", "--max-queue-delay", "--max-queue-depth",
        "--max-batch-tokens", "--device-memory-fraction", "--drain-timeout", "--version", "--help", "--health-check"}) {
    EXPECT_THAT(text, HasSubstr(std::string("  ") + (flag == std::string("--help") ? "-h," : "") + flag)) << flag;
  }
  for (const FlagField& field : FlagFields()) EXPECT_FALSE(field.options->help().empty()) << field.flag;
}

TEST_F(OptionsTest, VersionAndHealthCheck) {
  EXPECT_EQ(std::get<PrintAndExit>(*Parse({"--version"})).text, "spmmd 1.2.3\n");
  const auto probe = std::get<HealthCheck>(*Parse({"--health-check", "127.0.0.1:1", "--health-check-timeout=2s"}));
  EXPECT_EQ(probe.address, "127.0.0.1:1");
  EXPECT_EQ(probe.timeout, absl::Seconds(2));
}

TEST_F(OptionsTest, BothFlagSpellingsAndRepetition) {
  const Options options =
      ParseOk({"--listen", "unix:///tmp/a.sock", "--listen=[::1]:0", "--reflection=false", "--channelz",
               "--max-queue-delay=250us", "--max-message-bytes", "128MiB", "--metrics-listen=off"});
  EXPECT_THAT(options.listen, ElementsAre("unix:/tmp/a.sock", "[::1]:0"));
  EXPECT_FALSE(options.reflection);
  EXPECT_TRUE(options.channelz);
  EXPECT_EQ(options.max_queue_delay, absl::Microseconds(250));
  EXPECT_EQ(options.max_message_bytes, 128u << 20);
  EXPECT_EQ(options.metrics_listen, "");
}

TEST_F(OptionsTest, FlagsWinOverTheFile) {
  const std::string file = Write("c.textproto",
                                 "listen: '127.0.0.1:1'\nlisten: '127.0.0.1:2'\nmax_tokens: 77\nlog_level: 'debug'\n"
                                 "reflection: false\n");
  Options options = ParseOk({"--config=" + file});
  EXPECT_THAT(options.listen, ElementsAre("127.0.0.1:1", "127.0.0.1:2"));
  EXPECT_EQ(options.max_tokens, 77);
  EXPECT_EQ(options.log_level, "debug");
  EXPECT_FALSE(options.reflection);
  options = ParseOk({"--config=" + file, "--listen=127.0.0.1:3", "--max-tokens=78"});
  EXPECT_THAT(options.listen, ElementsAre("127.0.0.1:3"));
  EXPECT_EQ(options.max_tokens, 78);
}

TEST_F(OptionsTest, FileErrorsNameFileAndLine) {
  const std::string unknown = Write("u.textproto", "max_tokens: 5\n\nmax_tokenz: 6\n");
  EXPECT_THAT(ParseError({"--config=" + unknown}), StartsWith(unknown + ":3:"));
  EXPECT_THAT(ParseError({"--config=" + unknown}), HasSubstr("max_tokenz"));
  const std::string type = Write("t.textproto", "max_tokens: 'many'\n");
  EXPECT_THAT(ParseError({"--config=" + type}), StartsWith(type + ":1:"));
  EXPECT_THAT(ParseError({"--config=/does/not/exist"}), HasSubstr("/does/not/exist"));
  // Values of the file pass the same checks as flags.
  const std::string value = Write("v.textproto", "backend: 'tpu'\n");
  EXPECT_THAT(ParseError({"--config=" + value}), HasSubstr("--backend: 'tpu' is not one of auto, cpu, cuda"));
}

TEST_F(OptionsTest, BadFlagsSayWhatIsAllowed) {
  EXPECT_THAT(ParseError({"--no-such-flag"}), HasSubstr("--no-such-flag"));
  EXPECT_THAT(ParseError({"stray"}), HasSubstr("stray"));
  EXPECT_THAT(ParseError({"--backend=gpu"}), HasSubstr("auto, cpu, cuda"));
  EXPECT_THAT(ParseError({"--cpu-threads=-1"}), HasSubstr("0 to 4096"));
  EXPECT_THAT(ParseError({"--cpu-threads=two"}), HasSubstr("--cpu-threads: 'two' is not a whole number"));
  EXPECT_THAT(ParseError({"--device-memory-fraction=1.5"}), HasSubstr("0.001 to 1"));
  EXPECT_THAT(ParseError({"--device-memory-fraction=nan"}), HasSubstr("--device-memory-fraction"));
  EXPECT_THAT(ParseError({"--max-queue-delay=5"}), HasSubstr("duration"));
  EXPECT_THAT(ParseError({"--max-queue-delay=5s"}), HasSubstr("at most 1s"));
  EXPECT_THAT(ParseError({"--drain-timeout=-1s"}), HasSubstr("--drain-timeout"));
  EXPECT_THAT(ParseError({"--drain-timeout=inf"}), HasSubstr("--drain-timeout"));
  EXPECT_THAT(ParseError({"--max-message-bytes=4GiB"}), HasSubstr("64KiB to 2047MiB"));
  EXPECT_THAT(ParseError({"--max-message-bytes=4MiB"}), HasSubstr("--max-chunk-bytes"));
  EXPECT_THAT(ParseError({"--max-message-bytes=4 MB"}), HasSubstr("byte count"));
  EXPECT_THAT(ParseError({"--listen=localhost"}), HasSubstr("the port is missing"));
  EXPECT_THAT(ParseError({"--metrics-listen=unix:/tmp/x"}), HasSubstr("--metrics-listen"));
  EXPECT_THAT(ParseError({"--tls-cert=x"}), HasSubstr("--tls-key"));
  EXPECT_THAT(ParseError({"--tls-client-ca=x"}), HasSubstr("--tls-cert"));
  EXPECT_THAT(ParseError({"--model-repository=/does/not/exist"}), HasSubstr("--model-repository: /does/not/exist"));
  EXPECT_THAT(ParseError({"--preload=a=b.npy"}), HasSubstr("--model-repository"));
  EXPECT_THAT(ParseError({"--reflection=perhaps"}), HasSubstr("--reflection"));
}

TEST_F(OptionsTest, LayersComeFromFileManifestAndFlags) {
  Write("layers.textproto", "layers { name: 'b' file { path: 'b.npy' } magnitude { sparsity: 0.5 } }\n");
  const std::string config = Write("c.textproto", "layers { name: 'a' file { path: 'a.npy' } }\n");
  const Options options = ParseOk({"--config=" + config, "--model-repository=" + directory_.string(),
                                   "--preload=c=d.safetensors:model.layers.0:weight"});
  ASSERT_EQ(options.layers.size(), 3u);
  EXPECT_EQ(options.layers[0].name(), "a");
  EXPECT_EQ(options.layers[1].name(), "b");
  EXPECT_DOUBLE_EQ(options.layers[1].magnitude().sparsity(), 0.5);
  EXPECT_EQ(options.layers[2].file().path(), "d.safetensors");
  EXPECT_EQ(options.layers[2].file().tensor(), "model.layers.0:weight");
}

TEST_F(OptionsTest, ManifestMayBeJsonAndIsChecked) {
  const std::string json = Write("m.json", R"({"layers": [{"name": "j", "file": {"path": "j.npy"}}]})");
  EXPECT_EQ(ParseOk({"--model-repository=" + directory_.string(), "--manifest=" + json}).layers.at(0).name(), "j");
  const std::string unknown = Write("bad.json", R"({"layerz": []})");
  EXPECT_THAT(ParseError({"--model-repository=" + directory_.string(), "--manifest=" + unknown}), HasSubstr("layerz"));
  const std::string no_file = Write("nofile.textproto", "layers { name: 'x' }\n");
  EXPECT_THAT(ParseError({"--model-repository=" + directory_.string(), "--manifest=" + no_file}),
              HasSubstr("layers[0].file"));
}

TEST(CommandLineTest, AShardIsOneOfTheirCount) {
  const Options options = ParseOk({"--shard-index=2", "--shard-count=3"});
  EXPECT_EQ(options.shard_index, 2);
  EXPECT_EQ(options.shard_count, 3);
  EXPECT_EQ(ParseOk({}).shard_count, 1);
  EXPECT_EQ(ParseError({"--shard-index=3", "--shard-count=3"}),
            "--shard-index: 3 is not below --shard-count, which is 3");
}

TEST(CommandLineTest, WhileTheNumberOfShardsChangesTheSmallerOneHolds) {
  const auto count = [](int index, int count, int from) {
    return ParseOk({absl::StrCat("--shard-index=", index), absl::StrCat("--shard-count=", count),
                    absl::StrCat("--shard-transition-from=", from)})
        .shard_count;
  };
  for (int index = 0; index < 4; ++index) {
    EXPECT_EQ(count(index, 5, 4), 4);
    EXPECT_EQ(count(index, 4, 5), 4);
    EXPECT_EQ(count(index, 5, 0), 5);
  }
  EXPECT_EQ(count(4, 5, 4), 5);
  EXPECT_EQ(count(4, 4, 5), 5) << "the one that goes stays what it was";
  EXPECT_EQ(ParseError({"--shard-index=5", "--shard-count=4", "--shard-transition-from=5"}),
            "--shard-index: 5 is not below --shard-count, which is 5");
}

TEST(CommandLineTest, AnEmptyHealthCheckIsNoServer) {
  EXPECT_EQ(Parse({"--health-check", ""}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(CommandLineTest, ADirectoryIsNoConfiguration) {
  EXPECT_EQ(Parse({"--config", "/tmp"}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(CommandLineTest, DeviceSpinIsShort) {
  EXPECT_EQ(ParseOk({"--device-spin=50us"}).device_spin, absl::Microseconds(50));
  EXPECT_EQ(ParseOk({"--device-spin=0"}).device_spin, absl::ZeroDuration());
  EXPECT_THAT(ParseError({"--device-spin=2s"}), HasSubstr("--device-spin: must be at most 1s"));
}

TEST(ParseBytesTest, UnitsAndLimits) {
  EXPECT_EQ(*ParseBytes("0"), 0u);
  EXPECT_EQ(*ParseBytes("3KiB"), 3072u);
  EXPECT_EQ(*ParseBytes("2GiB"), uint64_t{2} << 30);
  EXPECT_EQ(*ParseBytes("17179869183GiB"), uint64_t{17179869183} << 30);
  for (const char* bad :
       {"", "KiB", "-1", "+1", "1.5MiB", "1MB", "1 KiB", "17179869184GiB", "18446744073709551616", "0x10"}) {
    EXPECT_FALSE(ParseBytes(bad).ok()) << bad;
  }
}

TEST(ParseEndpointTest, Forms) {
  EXPECT_EQ(*ParseEndpoint("0.0.0.0:0", true), "0.0.0.0:0");
  EXPECT_EQ(*ParseEndpoint("[::]:8500", true), "[::]:8500");
  EXPECT_EQ(*ParseEndpoint("unix:///run/s", true), "unix:/run/s");
  for (const std::string bad :
       {"", ":80", "host", "host:", "host:65536", "host:-1", "host:1x", "::1:80", "unix:rel", "unix:", "unix:/"}) {
    EXPECT_FALSE(ParseEndpoint(bad, true).ok()) << bad;
  }
  EXPECT_FALSE(ParseEndpoint("unix:/" + std::string(107, 'a'), true).ok());
  EXPECT_FALSE(ParseEndpoint("unix:/run/s", false).ok());
}

}  // namespace
}  // namespace spmmd::server
