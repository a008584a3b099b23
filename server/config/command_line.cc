#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "server/config/fields.h"
#include "server/config/options.h"

namespace spmmd::server {
namespace {

using google::protobuf::FieldDescriptor;
using spmm::config::v1::ServerConfig;

std::string HelpText(const FlagField& flag) {
  std::string text = flag.options->help();
  if (flag.options->choices_size() > 0) {
    absl::StrAppend(&text, " One of: ", absl::StrJoin(flag.options->choices(), ", "), ".");
  }
  if (flag.options->has_min() && flag.options->has_max()) {
    absl::StrAppendFormat(&text, " %.15g to %.15g.", flag.options->min(), flag.options->max());
  }
  return text;
}

CLI::Option* AddFlag(const FlagField& flag, CLI::App* app) {
  const bool is_bool = flag.field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL;
  const std::string help = HelpText(flag);
  CLI::Option* option = nullptr;
  if (is_bool) {
    option = app->add_flag(flag.flag, help);
  } else {
    // Values are read back as text after parsing: the types are SetField's.
    option = app->add_option(flag.flag, help);
    option->expected(1);
    option->multi_option_policy(flag.field->is_repeated() ? CLI::MultiOptionPolicy::TakeAll
                                                          : CLI::MultiOptionPolicy::TakeLast);
    option->type_size(1);
    if (flag.field->is_repeated()) option->expected(-1)->allow_extra_args(false);
    const std::string placeholder = flag.options->placeholder();
    option->option_text(absl::StrCat(
        placeholder.empty() ? "VALUE" : placeholder,
        flag.options->default_value().empty() ? "" : absl::StrCat(" [", flag.options->default_value(), "]")));
  }
  if (is_bool) {
    option->option_text(absl::StrCat("[=true|false] [", flag.options->default_value(), "]"));
  }
  option->group(flag.options->group());
  return option;
}

}  // namespace

absl::StatusOr<Command> ParseCommandLine(int argc, const char* const* argv, std::string_view version) {
  CLI::App app(
      "spmmd holds pruned LLM weight matrices in sparse formats on GPUs or the CPU and multiplies them over gRPC.\n"
      "When it serves it prints: spmmd ready grpc=ADDR metrics=ADDR backend=B devices=D",
      "spmmd");
  app.set_help_flag("-h,--help", "Print this and exit.");
  app.set_version_flag("--version", std::string(version), "Print the version and exit.");
  app.get_formatter()->column_width(44);
  app.footer(
      "Byte counts take KiB, MiB, GiB; durations take us, ms, s, m, h. A flag wins over the --config file.\n"
      "Exit codes: 0 after a drain, 1 when the server cannot start or stop cleanly, 2 for a wrong command line.");

  std::string config_file;
  app.add_option("--config", config_file,
                 "Text proto of spmm.config.v1.ServerConfig: the same settings with underscores.")
      ->option_text("FILE")
      ->group("Operation");
  std::string health_check;
  CLI::Option* const health_option =
      app.add_option("--health-check", health_check,
                     "Ask a running server's grpc.health.v1 at ADDR and exit: 0 when it is SERVING, 1 otherwise.");
  health_option->option_text("ADDR")->group("Operation");
  std::string health_timeout = "5s";
  app.add_option("--health-check-timeout", health_timeout, "How long --health-check waits for an answer.")
      ->option_text("DURATION [5s]")
      ->group("Operation");
  std::vector<std::pair<const FlagField*, CLI::Option*>> options;
  for (const FlagField& flag : FlagFields()) options.emplace_back(&flag, AddFlag(flag, &app));

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return PrintAndExit{app.help()};
  } catch (const CLI::CallForVersion&) {
    return PrintAndExit{absl::StrCat("spmmd ", std::string(version), "\n")};
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(absl::StrCat(error.what(), "; see spmmd --help"));
  }

  if (health_option->count() > 0) {
    if (health_check.empty()) return absl::InvalidArgumentError("--health-check: the address is empty");
    auto timeout = ParseDurationText(health_timeout);
    if (!timeout.ok() || *timeout == absl::ZeroDuration()) {
      return absl::InvalidArgumentError(absl::StrCat("--health-check-timeout: '", health_timeout, "' is no time"));
    }
    return HealthCheck{health_check, *timeout};
  }

  ServerConfig config;
  if (!config_file.empty()) {
    auto text = ReadSmallFile(config_file);
    if (!text.ok()) return absl::Status(text.status().code(), absl::StrCat("--config: ", text.status().message()));
    SPMMD_RETURN_IF_ERROR(MergeTextProto(config_file, *text, &config));
  }
  for (const auto& [flag, option] : options) {
    if (option->count() == 0) continue;
    ServerConfig::GetReflection()->ClearField(&config, flag->field);
    for (const std::string& value : option->results()) SPMMD_RETURN_IF_ERROR(SetField(*flag, value, &config));
  }
  auto made = MakeOptions(config);
  if (!made.ok()) return made.status();
  return *std::move(made);
}

}  // namespace spmmd::server
