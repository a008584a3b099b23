// spmmctl: the command line of spmmd.
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/commands.h"
#include "client/cli/errors.h"
#include "client/cli/pack.h"
#include "client/cli/parse.h"
#include "client/cli/shards.h"
#include "client/cpp/client.h"

namespace spmmd::cli {
namespace {

constexpr int kOk = 0;
constexpr int kFailure = 1;
constexpr int kUsage = 2;

// gRPC joins a thread that may sleep for 10 s when a process that has sent large messages leaves by the usual way.
[[noreturn]] void Exit(int code) {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    std::fputs("spmmctl: cannot write to standard output\n", stderr);
    code = kFailure;
  }
  std::fflush(stderr);
  std::_Exit(code);
}

// An option whose text `parse` must accept; its error becomes the usage error.
template <typename Parse>
CLI::Validator Parsed(Parse parse) {
  return CLI::Validator(
      [parse](const std::string& text) {
        const absl::Status status = parse(text);
        return status.ok() ? std::string() : std::string(status.message());
      },
      "");
}

// CLI11's own checks of numbers let nan and inf through.
CLI::Validator Seconds(bool zero_allowed) {
  return Parsed([zero_allowed](const std::string& text) {
    double seconds = 0;
    constexpr double kMax = 1e9;
    if (absl::SimpleAtod(text, &seconds) && (zero_allowed ? seconds >= 0 : seconds > 0) && seconds <= kMax) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrFormat("'%s' is not a number of seconds %s 0 and at most 1e9", text, zero_allowed ? "from" : "above"));
  });
}

// |x| <= this counts as zero.
CLI::Validator Threshold() {
  return Parsed([](const std::string& text) {
    float threshold = 0;
    if (absl::SimpleAtof(text, &threshold) && threshold >= 0 && std::isfinite(threshold)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrFormat("'%s' is not a finite number from 0", text));
  });
}

struct Arguments {
  std::string server = "127.0.0.1:8500";
  std::vector<std::string> shards;  // instead of `server`
  bool json = false;
  double timeout_seconds = 0;
  bool tls = false;
  client::TlsOptions tls_options;
  client::ClientOptions options;

  std::string layer;
  RegisterArgs registration;
  std::string prefix;
  RunArgs run;
  std::vector<int64_t> tokens;
  v1::BenchmarkRequest bench;
  double wait_seconds = 0;
  PackArgs pack;
  InspectArgs inspect;
  ShardArgs shard;
  ApplyArgs apply;
};

void AddConnectionOptions(CLI::App& app, Arguments& arguments) {
  app.add_option("--server", arguments.server, "Address of spmmd: HOST:PORT or unix:/path")
      ->envname("SPMMD_SERVER")
      ->capture_default_str()
      ->group("Connection");
  app.add_option("--shards", arguments.shards,
                 "Servers that share the layers, instead of --server: one address a shard, in the order of their "
                 "--shard-index, with ';' between; ipv4:A,B or a name that resolves to several for replicas")
      ->envname("SPMMD_SHARDS")
      ->delimiter(';')
      ->type_name("ADDR;ADDR;...")
      ->group("Connection");
  app.add_option("--timeout", arguments.timeout_seconds,
                 "Seconds that one call may take (60; register, warm, bench: no limit)")
      ->type_name("SECONDS")
      ->check(Seconds(/*zero_allowed=*/false))
      ->group("Connection");
  app.add_flag("--tls", arguments.tls, "Use TLS, trusting the system's certificates")->group("Connection");
  app.add_option("--tls-ca", arguments.tls_options.ca_file, "Use TLS, trusting the certificates in this PEM file")
      ->type_name("FILE")
      ->group("Connection");
  app.add_option("--tls-cert", arguments.tls_options.cert_file, "Client certificate (PEM), with --tls-key")
      ->type_name("FILE")
      ->group("Connection");
  app.add_option("--tls-key", arguments.tls_options.key_file, "Key of the client certificate (PEM)")
      ->type_name("FILE")
      ->group("Connection");
  app.add_option("--tls-server-name", arguments.tls_options.server_name, "Name to expect in the server's certificate")
      ->type_name("NAME")
      ->group("Connection");
  app.add_option("--token-file", arguments.options.token_file, "File with the bearer token")
      ->envname("SPMMD_TOKEN_FILE")
      ->type_name("FILE")
      ->group("Connection");
  app.add_flag("--allow-token-without-tls", arguments.options.allow_token_without_tls,
               "Send the token in plain text to another host")
      ->group("Connection");
  app.add_flag("--json", arguments.json, "Print JSON (errors too, on standard error)")->group("Output");
}

CLI::Option* AddLayer(CLI::App& command, Arguments& arguments, const std::string& help) {
  return command.add_option("NAME", arguments.layer, help)
      ->required()
      ->type_name("")
      ->check(Parsed([](const std::string& text) { return ParseLayerRef(text).status(); }));
}

void AddRegister(CLI::App& app, Arguments& arguments) {
  CLI::App& command =
      *app.add_subcommand("register", "Register a weight matrix [out_features, in_features] as a layer");
  RegisterArgs& args = arguments.registration;
  command
      .add_option_function<std::string>(
          "NAME", [&args](const std::string& name) { args.spec.set_name(name); },
          "Name: 1 to 256 characters of [A-Za-z0-9._/-]; a name in use gets a new version")
      ->type_name("")
      ->required();
  command.add_option("--file", args.file, "W.npy, W.safetensors[:TENSOR], W.safetensors.index.json:TENSOR or W.spmmpk")
      ->required()
      ->type_name("FILE")
      ->check(Parsed([](const std::string& text) { return ParseFile(text).status(); }));
  command.add_flag("--remote", args.remote, "The file is in the server's model repository; nothing is uploaded");
  command.add_option("--bias", args.bias, "File, or tensor in the same .safetensors file, with the bias")
      ->type_name("FILE|TENSOR");
  const auto spec_option = [&command](const std::string& name, const std::string& type, const std::string& help,
                                      const std::function<absl::Status(const std::string&)>& parse) {
    command
        .add_option_function<std::string>(
            name, [parse](const std::string& text) { parse(text).IgnoreError(); }, help)
        ->type_name(type)
        ->check(Parsed(parse));
  };
  spec_option("--prune", "SPEC", "Zero the smallest weights: magnitude:0.5, nm:2:4 (2 of every 4 stay) or none",
              [&args](const std::string& text) { return ParsePruning(text, args.spec); });
  spec_option("--format", "FORMAT", "auto, dense, bitmap, three_layer, rlc_csc or row_stream (auto)",
              [&args](const std::string& text) {
                const auto format = ParseFormat(text);
                if (format.ok()) args.spec.set_format(*format);
                return format.status();
              });
  spec_option("--store-dtype", "DTYPE", "fp16, bf16 or fp32 (as in the file)", [&args](const std::string& text) {
    const auto dtype = ParseDataType(text);
    if (dtype.ok()) args.spec.set_store_dtype(*dtype);
    return dtype.status();
  });
  spec_option("--placement", "PLACEMENT", "single, replicated or sharded (single)", [&args](const std::string& text) {
    const auto placement = ParsePlacement(text);
    if (placement.ok()) args.spec.set_placement(*placement);
    return placement.status();
  });
  command
      .add_option_function<float>(
          "--activation-threshold", [&args](float threshold) { args.spec.set_activation_threshold(threshold); },
          "Inputs with |x| <= this count as zeros by default (SpMspV)")
      ->type_name("T")
      ->check(Threshold());
  command.add_flag_callback(
      "--pin", [&args] { args.spec.set_pin(true); }, "Never evict it from its devices");
  command.add_flag_callback(
      "--allow-nonfinite", [&args] { args.spec.set_allow_nonfinite(true); },
      "Store NaN and infinite weights instead of refusing them");
}

void AddRun(CLI::App& app, Arguments& arguments) {
  CLI::App& command = *app.add_subcommand("run", "Multiply: Y = activation(X * W^T + bias)");
  AddLayer(command, arguments, "NAME or NAME@VERSION");
  RunArgs& args = arguments.run;
  command
      .add_option("--input", args.input,
                  "X [tokens, in_features] as .npy (fp16, bf16, fp32), or FILE.safetensors:TENSOR")
      ->required()
      ->type_name("FILE")
      ->check(Parsed([](const std::string& text) { return ParseFile(text).status(); }));
  command.add_option("--output", args.output, "Where Y [tokens, out_features] is written, as .npy")
      ->required()
      ->type_name("FILE");
  command
      .add_option_function<float>(
          "--sparse-threshold", [&args](float threshold) { args.matmul.activation_threshold = threshold; },
          "Treat |x| <= this as zero and skip its columns (SpMspV)")
      ->type_name("T")
      ->check(Threshold());
  const auto parse_activation = [&args](const std::string& text) {
    const auto activation = ParseActivation(text);
    if (activation.ok()) args.matmul.activation = *activation;
    return activation.status();
  };
  command
      .add_option_function<std::string>(
          "--activation", [parse_activation](const std::string& text) { parse_activation(text).IgnoreError(); },
          "none, relu, gelu, gelu_tanh or silu (none)")
      ->type_name("NAME")
      ->check(Parsed(parse_activation));
  const auto parse_dtype = [&args](const std::string& text) {
    const auto dtype = ParseDataType(text);
    if (dtype.ok()) args.matmul.output_dtype = *dtype;
    return dtype.status();
  };
  command
      .add_option_function<std::string>(
          "--output-dtype", [parse_dtype](const std::string& text) { parse_dtype(text).IgnoreError(); },
          "fp16, bf16 or fp32 (fp32)")
      ->type_name("DTYPE")
      ->check(Parsed(parse_dtype));
  command.add_flag("--ignore-bias", args.matmul.ignore_bias, "Leave out the layer's bias");
}

void AddBench(CLI::App& app, Arguments& arguments) {
  CLI::App& command = *app.add_subcommand("bench", "Time a layer over batch widths beside the dense baseline");
  AddLayer(command, arguments, "NAME or NAME@VERSION");
  command.add_option("--tokens", arguments.tokens, "Batch widths, 1 to 65536 each, at most 32 (1,2,4,8,16,32,64)")
      ->delimiter(',')
      ->type_name("N,N,...")
      ->expected(1, 32)
      ->check(CLI::Range(int64_t{1}, int64_t{65536}).description(""));
  command
      .add_option_function<int32_t>(
          "--repetitions", [&arguments](int32_t n) { arguments.bench.set_repetitions(n); },
          "Timed launches for each width, 1 to 10000 (50)")
      ->type_name("N")
      ->check(CLI::Range(1, 10000).description(""));
  command.add_flag_callback(
      "--skip-dense", [&arguments] { arguments.bench.set_skip_dense(true); }, "Leave out the dense baseline");
}

void AddPack(CLI::App& app, Arguments& arguments) {
  CLI::App& command = *app.add_subcommand("pack", "Pack weights of a file into a packed-layer file, without a server");
  PackArgs& args = arguments.pack;
  command.add_option("FILE", args.file, "W.npy, W.safetensors[:TENSOR], W.safetensors.index.json:TENSOR or W.spmmpk")
      ->required()
      ->type_name("")
      ->check(Parsed([](const std::string& text) { return ParseFile(text).status(); }));
  command
      .add_option("--output,-o", args.output,
                  "Packed-layer file to write (usually .spmmpk); with --all a directory, one file a weight")
      ->required()
      ->type_name("FILE|DIR");
  command.add_flag("--all", args.all, "Pack every matrix of a checkpoint");
  command
      .add_option("--match", args.match, "With --all: only tensors whose name this pattern matches ('*_proj.weight')")
      ->type_name("PATTERN");
  command.add_option("--bias", args.bias, "File, or tensor in the same .safetensors file, with the bias")
      ->type_name("FILE|TENSOR");
  const auto option = [&command](const std::string& name, const std::string& type, const std::string& help,
                                 const std::function<absl::Status(const std::string&)>& parse) {
    command
        .add_option_function<std::string>(
            name, [parse](const std::string& text) { parse(text).IgnoreError(); }, help)
        ->type_name(type)
        ->check(Parsed(parse));
  };
  option(
      "--format", "FORMAT",
      "bitmap, bitmap_gpu, row_stream, column_piece, three_layer, rlc_csc, dense, csr, coo, or auto: bitmap, or dense "
      "where that is no larger (auto)",
      [&args](const std::string& text) {
        const auto format = ParsePackFormat(text);
        if (format.ok()) args.format = *format;
        return format.status();
      });
  option("--prune", "SPEC", "Zero the smallest weights first: magnitude:0.5, nm:2:4 (2 of every 4 stay) or none",
         [&args](const std::string& text) {
           absl::Status status = ParsePruning(text, args.pruning);
           if (status.ok()) args.pruning_text = text;
           return status;
         });
  option("--store-dtype", "DTYPE", "fp16, bf16 or fp32 (as in the file)", [&args](const std::string& text) {
    const auto dtype = ParseDataType(text);
    if (dtype.ok()) args.store_dtype = ToDType(*dtype);
    return dtype.status();
  });
  command.add_option("--source", args.source, "What the file shall say that it was packed from (FILE)")
      ->type_name("TEXT");
  command.add_flag("--allow-nonfinite", args.allow_nonfinite,
                   "Store NaN and infinite weights instead of refusing them");
}

void AddInspect(CLI::App& app, Arguments& arguments) {
  CLI::App& command = *app.add_subcommand(
      "inspect", "Show what is in a packed-layer file, or in weights: sizes, sections, shares, a map of the density");
  InspectArgs& args = arguments.inspect;
  command
      .add_option("FILE", args.file,
                  "A packed-layer file; or W.npy, W.safetensors[:TENSOR], W.safetensors.index.json:TENSOR")
      ->required()
      ->type_name("");
  const auto parse_style = [&args](const std::string& text) {
    const auto style = ParseMapStyle(text);
    if (style.ok()) args.map = *style;
    return style.status();
  };
  command
      .add_option_function<std::string>(
          "--map", [parse_style](const std::string& text) { parse_style(text).IgnoreError(); },
          "Density map: color, ascii, off, or auto: color on a terminal (auto)")
      ->type_name("STYLE")
      ->check(Parsed(parse_style));
  const auto parse_size = [&args](const std::string& text) { return ParseMapSize(text, &args); };
  command
      .add_option_function<std::string>(
          "--map-size", [parse_size](const std::string& text) { parse_size(text).IgnoreError(); },
          "Cells of the map (at most 32x64, in the matrix's shape)")
      ->type_name("ROWSxCOLS")
      ->check(Parsed(parse_size));
}

void AddShard(CLI::App& app, Arguments& arguments) {
  CLI::App& command = *app.add_subcommand("shard", "Show which shard holds a layer, without a server");
  ShardArgs& args = arguments.shard;
  command.add_option("NAME", args.layers, "Names of layers")->required()->type_name("")->expected(1, -1);
  command.add_option("--count", args.count, "Number of shards")
      ->required()
      ->type_name("N")
      ->check(CLI::Range(1, 1000).description(""));
  command.add_option("--from", args.from, "Number of shards before: also show what a change moves")
      ->type_name("N")
      ->check(CLI::Range(1, 1000).description(""));
}

void AddApply(CLI::App& app, Arguments& arguments) {
  CLI::App& command = *app.add_subcommand(
      "apply", "Make the servers hold a manifest's layers: register what is missing on any replica, leave the rest");
  ApplyArgs& args = arguments.apply;
  command
      .add_option("MANIFEST", args.manifest,
                  "Layers as spmmd --manifest takes them (text, or JSON in FILE.json); paths are relative to it")
      ->required()
      ->type_name("");
  command.add_flag("--remote", args.remote,
                   "The files are in the servers' model repositories: nothing is read here, and a layer that is there "
                   "is taken to be the right one");
  command.add_flag("--remove", args.remove,
                   "Then unregister the manifest's layers from shards that are not theirs (any more)");
  command.add_flag("--dry-run", args.dry_run, "Only show what would be done");
}

void AddCommands(CLI::App& app, Arguments& arguments) {
  AddRegister(app, arguments);
  app.add_subcommand("list", "List the layers")
      ->add_option("--prefix", arguments.prefix, "Only names that start with this")
      ->type_name("TEXT");
  AddLayer(*app.add_subcommand("describe", "Show everything known of a layer"), arguments, "NAME or NAME@VERSION");
  AddRun(app, arguments);
  AddBench(app, arguments);
  AddLayer(*app.add_subcommand("unregister", "Remove a layer"), arguments, "NAME (all versions of it) or NAME@VERSION");
  AddLayer(*app.add_subcommand("pin", "Keep a layer on its devices, whatever else needs memory"), arguments,
           "NAME or NAME@VERSION");
  AddLayer(*app.add_subcommand("unpin", "Let a layer be evicted again"), arguments, "NAME or NAME@VERSION");
  AddLayer(*app.add_subcommand("warm", "Bring a layer to its devices and run it once"), arguments,
           "NAME or NAME@VERSION");
  AddApply(app, arguments);
  AddShard(app, arguments);
  AddPack(app, arguments);
  AddInspect(app, arguments);
  app.add_subcommand("status", "Show the server, its devices and its health; exit code 1 unless it is serving")
      ->add_option("--wait", arguments.wait_seconds, "Wait up to this many seconds for it to be serving")
      ->type_name("SECONDS")
      ->check(Seconds(/*zero_allowed=*/true));
  for (CLI::App* command : app.get_subcommands({})) {
    command->fallthrough();  // --server and --json may follow it
    command->footer("`spmmctl --help` has the options of the connection (--server, --tls-ca, ...) and --json.");
  }
}

absl::Status RunCommand(const std::string& command, const Session& session, Arguments& arguments) {
  v1::LayerRef layer;
  if (!arguments.layer.empty()) {
    absl::StatusOr<v1::LayerRef> parsed = ParseLayerRef(arguments.layer);
    if (!parsed.ok()) return parsed.status();
    layer = *std::move(parsed);
  }
  if (command == "register") return Register(session, arguments.registration);
  if (command == "apply") return Apply(session, arguments.server, arguments.apply);
  if (command == "list") return List(session, arguments.prefix);
  if (command == "describe") return Describe(session, layer);
  if (command == "unregister") return Unregister(session, layer);
  if (command == "pin") return Pin(session, layer, true);
  if (command == "unpin") return Pin(session, layer, false);
  if (command == "warm") return Warm(session, layer);
  if (command == "status") return Status(session, arguments.server, absl::Seconds(arguments.wait_seconds));
  if (command == "run") {
    arguments.run.layer = layer;
    return Run(session, arguments.run);
  }
  *arguments.bench.mutable_layer() = layer;
  arguments.bench.mutable_tokens()->Add(arguments.tokens.begin(), arguments.tokens.end());
  return Bench(session, arguments.bench);
}

int Main(int argc, char** argv) {
  // gRPC's own log lines only repeat, less clearly, what the error says.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  CLI::App app{"Registers pruned weight matrices with spmmd and multiplies with them; packs and inspects weight files.",
               "spmmctl"};
  app.set_version_flag("--version", std::string("spmmctl " SPMMD_VERSION));
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 done, 1 the server or a file failed, 2 wrong arguments.\n`spmmctl COMMAND --help` has the options "
      "of a command.");
  Arguments arguments;
  AddConnectionOptions(app, arguments);
  AddCommands(app, arguments);
  app.failure_message([](const CLI::App* at, const CLI::Error& error) {
    return absl::StrCat("spmmctl: ", CLI::FailureMessage::simple(at, error));
  });
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0 && app.get_subcommands().empty()) {
      // CLI11 would say that a command is required, whatever was written in its place.
      const std::vector<std::string> unknown = app.remaining();
      if (!unknown.empty()) {
        absl::FPrintF(stderr, "spmmctl: unknown command or option '%s'\n\n", unknown.front());
      }
      if (argc == 1 || !unknown.empty()) {
        std::fputs(app.help().c_str(), stderr);
        return kUsage;
      }
    }
    return app.exit(error) == 0 ? kOk : kUsage;
  }

  const std::string command = app.get_subcommands().front()->get_name();
  if (command == "pack" || command == "inspect" || command == "shard") {
    const absl::Status status = command == "pack"      ? Pack(arguments.pack, arguments.json)
                                : command == "inspect" ? Inspect(arguments.inspect, arguments.json)
                                                       : Shard(arguments.shard, arguments.json);
    if (status.ok()) Exit(kOk);
    std::fflush(stdout);
    std::fputs(LocalErrorText(status, arguments.json).c_str(), stderr);
    Exit(kFailure);
  }
  if (arguments.tls || !arguments.tls_options.ca_file.empty() || !arguments.tls_options.cert_file.empty()) {
    arguments.options.tls = arguments.tls_options;
  }
  absl::StatusOr<std::unique_ptr<client::Client>> client;
  absl::StatusOr<std::unique_ptr<client::ShardedClient>> shards;
  absl::Status connected;  // lazily: what fails here are the arguments
  if (arguments.shards.empty()) {
    client = client::Client::Connect(arguments.server, arguments.options);
    connected = client.status();
  } else {
    arguments.server = absl::StrJoin(arguments.shards, ";");
    shards = client::ShardedClient::Connect(arguments.shards, arguments.options);
    connected = shards.status();
  }
  absl::Status status = connected;
  if (connected.ok()) {
    Session session{client.ok() ? client->get() : nullptr,
                    shards.ok() ? shards->get() : nullptr,
                    {},
                    arguments.json,
                    !arguments.json && isatty(STDERR_FILENO) == 1};
    if (arguments.timeout_seconds > 0) session.call.timeout = absl::Seconds(arguments.timeout_seconds);
    status = RunCommand(command, session, arguments);
  }
  if (status.ok()) Exit(kOk);
  std::fflush(stdout);
  std::fputs(ErrorText(status, arguments.server, arguments.json).c_str(), stderr);
  Exit(connected.ok() ? kFailure : kUsage);
}

}  // namespace
}  // namespace spmmd::cli

int main(int argc, char** argv) { spmmd::cli::Exit(spmmd::cli::Main(argc, argv)); }
