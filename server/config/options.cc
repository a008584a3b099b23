#include "server/config/options.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/text_format.h"
#include "google/protobuf/util/json_util.h"
#include "kernels/base/status_macros.h"
#include "server/config/fields.h"

namespace spmmd::server {
namespace {

using google::protobuf::FieldDescriptor;
using spmm::config::v1::Manifest;
using spmm::config::v1::ServerConfig;

// Prefixes an error with the place it comes from.
absl::Status In(absl::string_view where, const absl::Status& status) {
  return {status.code(), absl::StrCat(where, ": ", status.message())};
}

// Keeps the first error with its line, as compilers write it.
class FirstError : public google::protobuf::io::ErrorCollector {
 public:
  explicit FirstError(std::string_view file_name) : file_name_(file_name) {}
  void AddError(int line, google::protobuf::io::ColumnNumber column, const std::string& message) override {
    if (!text_.empty()) return;
    text_ = line < 0 ? absl::StrCat(file_name_, ": ", message)
                     : absl::StrCat(file_name_, ":", line + 1, ":", column + 1, ": ", message);
  }
  const std::string& text() const { return text_; }

 private:
  const std::string file_name_;
  std::string text_;
};

absl::Status ParseTextInto(std::string_view file_name, const std::string& text, google::protobuf::Message* message) {
  FirstError errors(file_name);
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  google::protobuf::io::ArrayInputStream input(text.data(), static_cast<int>(text.size()));
  if (!parser.Merge(&input, message)) {
    return absl::InvalidArgumentError(errors.text().empty() ? absl::StrCat(std::string(file_name), ": not a text proto")
                                                            : errors.text());
  }
  return absl::OkStatus();
}

absl::Status ReadManifest(const std::string& path, std::vector<spmm::v1::LayerSpec>* layers) {
  SPMMD_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path));
  Manifest manifest;
  if (absl::EndsWith(path, ".json")) {
    const auto status = google::protobuf::util::JsonStringToMessage(text, &manifest);
    if (!status.ok()) return absl::InvalidArgumentError(absl::StrCat(path, ": ", std::string(status.message())));
  } else {
    SPMMD_RETURN_IF_ERROR(ParseTextInto(path, text, &manifest));
  }
  for (int i = 0; i < manifest.layers_size(); ++i) {
    if (!manifest.layers(i).has_file()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": layers[", i, "].file must be set"));
    }
    layers->push_back(manifest.layers(i));
  }
  return absl::OkStatus();
}

absl::Status CheckLayers(const Options& options) {
  if (!options.layers.empty() && options.model_repository.empty()) {
    return absl::InvalidArgumentError("--preload and layers need --model-repository");
  }
  return absl::OkStatus();
}

absl::Status CheckSecurity(const Options& options) {
  if (options.tls_cert.empty() != options.tls_key.empty()) {
    return absl::InvalidArgumentError("--tls-cert and --tls-key must be given together");
  }
  if (!options.tls_client_ca.empty() && options.tls_cert.empty()) {
    return absl::InvalidArgumentError("--tls-client-ca needs --tls-cert and --tls-key");
  }
  if (options.tls_reload_interval < absl::Seconds(1)) {
    return absl::InvalidArgumentError("--tls-reload-interval: must be at least 1s");
  }
  return absl::OkStatus();
}

absl::Status CheckDirectory(absl::string_view flag, const std::string& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) {
    return absl::NotFoundError(absl::StrCat(flag, ": ", path, ": ", std::strerror(errno)));
  }
  if (!S_ISDIR(info.st_mode)) return absl::InvalidArgumentError(absl::StrCat(flag, ": ", path, " is not a directory"));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ReadSmallFile(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": is a directory"));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  std::ostringstream text;
  text << file.rdbuf();
  if (!file.good() && !file.eof()) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  constexpr size_t kLimit = size_t{64} << 20;
  if (text.view().size() > kLimit) return absl::InvalidArgumentError(absl::StrCat(path, ": larger than 64 MiB"));
  return std::move(text).str();
}

absl::Status MergeTextProto(std::string_view file_name, const std::string& text, ServerConfig* config) {
  return ParseTextInto(file_name, text, config);
}

absl::StatusOr<Options> MakeOptions(const ServerConfig& given) {
  ServerConfig config = given;
  SPMMD_RETURN_IF_ERROR(FillDefaults(&config));
  SPMMD_RETURN_IF_ERROR(CheckFields(config));

  Options options;
  for (const std::string& text : config.listen()) {
    auto endpoint = ParseEndpoint(text, /*allow_unix=*/true);
    if (!endpoint.ok()) return In("--listen", endpoint.status());
    options.listen.push_back(*std::move(endpoint));
  }
  const auto optional_endpoint = [](absl::string_view flag, const std::string& text, bool allow_unix,
                                    std::string* to) -> absl::Status {
    if (text.empty() || text == "off") return absl::OkStatus();
    auto endpoint = ParseEndpoint(text, allow_unix);
    if (!endpoint.ok()) return In(flag, endpoint.status());
    *to = *std::move(endpoint);
    return absl::OkStatus();
  };
  SPMMD_RETURN_IF_ERROR(
      optional_endpoint("--metrics-listen", config.metrics_listen(), /*allow_unix=*/false, &options.metrics_listen));
  SPMMD_RETURN_IF_ERROR(
      optional_endpoint("--health-listen", config.health_listen(), /*allow_unix=*/true, &options.health_listen));
  options.reflection = config.reflection();
  options.channelz = config.channelz();

  options.backend = config.backend() == "cpu"    ? BackendChoice::kCpu
                    : config.backend() == "cuda" ? BackendChoice::kCuda
                                                 : BackendChoice::kAuto;
  for (const std::string& id : config.device()) {
    int index = 0;
    if (!absl::StartsWith(id, "cuda:") || !absl::SimpleAtoi(id.substr(5), &index) || index < 0) {
      return absl::InvalidArgumentError(absl::StrCat("--device: '", id, "' is not of the form cuda:N"));
    }
    if (std::find(options.cuda_devices.begin(), options.cuda_devices.end(), index) != options.cuda_devices.end()) {
      return absl::InvalidArgumentError(absl::StrCat("--device: '", id, "' is given twice"));
    }
    options.cuda_devices.push_back(index);
  }
  if (!options.cuda_devices.empty() && options.backend == BackendChoice::kCpu) {
    return absl::InvalidArgumentError("--device: not with --backend=cpu");
  }
  options.cuda_library = config.cuda_library();
  options.exit_on_device_failure = config.exit_on_device_failure();
  options.dense_shadows = config.dense_shadows();
  options.tune_kernels = config.tune_kernels();
  options.cpu_threads = config.cpu_threads();
  options.device_memory_fraction = config.device_memory_fraction();
  options.max_queue_depth = config.max_queue_depth();
  options.max_batch_tokens = config.max_batch_tokens();
  options.max_tokens = config.max_tokens();
  options.max_uploads = config.max_uploads();
  options.max_stream_in_flight = config.max_stream_in_flight();
  options.max_programs = config.max_programs();
  options.max_concurrent_streams = config.max_concurrent_streams();

  // CheckFields has seen that these parse.
  options.max_queue_delay = *ParseDurationText(config.max_queue_delay());
  if (options.max_queue_delay > absl::Seconds(1)) {
    return absl::InvalidArgumentError("--max-queue-delay: must be at most 1s");
  }
  options.max_queue_bytes = *ParseBytes(config.max_queue_bytes());
  if (options.max_queue_bytes == 0) return absl::InvalidArgumentError("--max-queue-bytes: must be at least 1");
  options.max_message_bytes = *ParseBytes(config.max_message_bytes());
  if (options.max_message_bytes < (64u << 10) || options.max_message_bytes > (uint64_t{2047} << 20)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--max-message-bytes: '", config.max_message_bytes(), "' is outside 64KiB to 2047MiB"));
  }
  options.max_chunk_bytes = *ParseBytes(config.max_chunk_bytes());
  // The rest of a chunk's message takes a few dozen bytes.
  if (options.max_chunk_bytes == 0 || options.max_chunk_bytes + 1024 > options.max_message_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("--max-chunk-bytes: '", config.max_chunk_bytes(),
                                                   "' must be at least 1 and 1KiB below --max-message-bytes"));
  }
  options.upload_resume_timeout = *ParseDurationText(config.upload_resume_timeout());
  options.upload_idle_timeout = *ParseDurationText(config.upload_idle_timeout());
  options.keepalive_time = *ParseDurationText(config.keepalive_time());
  options.keepalive_timeout = *ParseDurationText(config.keepalive_timeout());
  options.keepalive_min_client_interval = *ParseDurationText(config.keepalive_min_client_interval());
  options.max_connection_idle = *ParseDurationText(config.max_connection_idle());
  options.max_connection_age = *ParseDurationText(config.max_connection_age());
  options.max_connection_age_grace = *ParseDurationText(config.max_connection_age_grace());
  options.drain_delay = *ParseDurationText(config.drain_delay());
  options.drain_timeout = *ParseDurationText(config.drain_timeout());

  options.tls_cert = config.tls_cert();
  options.tls_key = config.tls_key();
  options.tls_client_ca = config.tls_client_ca();
  options.tls_reload_interval = *ParseDurationText(config.tls_reload_interval());
  options.auth_token_file = config.auth_token_file();
  SPMMD_RETURN_IF_ERROR(CheckSecurity(options));

  options.shared_memory = config.shared_memory();
  options.shared_memory_prefix = config.shared_memory_prefix();
  if (options.shared_memory_prefix.empty() || options.shared_memory_prefix.front() != '/' ||
      options.shared_memory_prefix.find('/', 1) != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("--shared-memory-prefix: '", config.shared_memory_prefix(),
                                                   "' must begin with a slash and have no other"));
  }
  options.max_regions = config.max_regions();
  options.max_region_bytes = *ParseBytes(config.max_region_bytes());
  options.max_rings = config.max_rings();
  options.ring_spin = *ParseDurationText(config.ring_spin());
  if (options.ring_spin > absl::Seconds(1)) return absl::InvalidArgumentError("--ring-spin: must be at most 1s");
  // With few cores, those that compute need them all.
  constexpr unsigned kCoresForSpin = 8;
  if (!config.device_spin().empty()) {
    options.device_spin = *ParseDurationText(config.device_spin());
  } else if (std::thread::hardware_concurrency() >= kCoresForSpin) {
    options.device_spin = absl::Milliseconds(1);
  }
  if (options.device_spin > absl::Seconds(1)) return absl::InvalidArgumentError("--device-spin: must be at most 1s");

  options.log_level = config.log_level();
  options.log_format = config.log_format();

  options.shard_index = config.shard_index();
  options.shard_count = config.shard_count();
  if (const int from = config.shard_transition_from(); from > 0) {
    // Rendezvous hashing only moves layers to or from the shards that come or go: the others hold the most by the
    // smaller number.
    const int low = std::min(options.shard_count, from);
    options.shard_count = options.shard_index < low ? low : std::max(options.shard_count, from);
  }
  if (options.shard_index >= options.shard_count) {
    return absl::InvalidArgumentError(absl::StrCat("--shard-index: ", options.shard_index,
                                                   " is not below --shard-count, which is ", options.shard_count));
  }
  options.model_repository = config.model_repository();
  options.cache_dir = config.cache_dir();
  options.cache_limit_bytes = *ParseBytes(config.cache_limit_bytes());
  options.evict_layers = config.evict_layers();
  if (!config.host_layer_bytes().empty()) options.host_layer_bytes = *ParseBytes(config.host_layer_bytes());
  if (!options.model_repository.empty()) {
    SPMMD_RETURN_IF_ERROR(CheckDirectory("--model-repository", options.model_repository));
  }
  for (int i = 0; i < config.layers_size(); ++i) {
    if (!config.layers(i).has_file()) {
      return absl::InvalidArgumentError(absl::StrCat("config: layers[", i, "].file must be set"));
    }
    options.layers.push_back(config.layers(i));
  }
  std::string manifest = config.manifest();
  if (manifest.empty() && !options.model_repository.empty()) {
    const std::string usual = absl::StrCat(options.model_repository, "/layers.textproto");
    struct stat info {};
    if (stat(usual.c_str(), &info) == 0) manifest = usual;
  }
  if (!manifest.empty()) {
    if (auto status = ReadManifest(manifest, &options.layers); !status.ok()) return In("--manifest", status);
  }
  for (const std::string& text : config.preload()) {
    auto spec = ParsePreload(text);
    if (!spec.ok()) return In("--preload", spec.status());
    options.layers.push_back(*std::move(spec));
  }
  SPMMD_RETURN_IF_ERROR(CheckLayers(options));
  return options;
}

}  // namespace spmmd::server
