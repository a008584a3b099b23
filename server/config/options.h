// The server's settings: read from the command line and a text-proto file (proto/spmm/config/v1/config.proto is the one
// list of them), checked, and turned into typed values.
#ifndef SPMMD_SERVER_CONFIG_OPTIONS_H_
#define SPMMD_SERVER_CONFIG_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "spmm/config/v1/config.pb.h"
#include "spmm/v1/layer_catalog.pb.h"

namespace spmmd::server {

enum class BackendChoice { kAuto, kCpu, kCuda };

struct Options {  // NOLINT(clang-analyzer-optin.performance.Padding): in the order of the documentation
  // gRPC endpoints as gRPC writes them ("127.0.0.1:8500", "[::1]:8500", "unix:/path"); at least one.
  std::vector<std::string> listen;
  std::string metrics_listen;  // empty: no Prometheus endpoint
  std::string health_listen;   // empty: none
  bool reflection = true;
  bool channelz = false;

  BackendChoice backend = BackendChoice::kAuto;
  std::vector<int> cuda_devices;  // empty: all
  std::string cuda_library;       // empty: searched for
  bool exit_on_device_failure = false;
  bool dense_shadows = true;
  bool tune_kernels = true;
  int cpu_threads = 0;
  double device_memory_fraction = 0.9;
  absl::Duration max_queue_delay;
  int64_t max_queue_depth = 0;
  uint64_t max_queue_bytes = 0;
  int64_t max_batch_tokens = 0;
  int64_t max_tokens = 0;

  std::string model_repository;    // empty: none
  std::string cache_dir;           // empty: none
  uint64_t cache_limit_bytes = 0;  // 0: no limit
  bool evict_layers = true;
  std::optional<uint64_t> host_layer_bytes;  // none: by the memory there is
  // Which of how many shards this server is. While the number changes, the one of the two that this server goes by.
  int shard_index = 0;
  int shard_count = 1;
  // Layers to register at start: `layers` of the config file, the manifest, then --preload, in this order.
  std::vector<spmm::v1::LayerSpec> layers;

  uint64_t max_message_bytes = 0;
  uint64_t max_chunk_bytes = 0;
  int max_uploads = 0;
  absl::Duration upload_resume_timeout;
  absl::Duration upload_idle_timeout;  // zero: none
  int max_stream_in_flight = 0;
  int max_programs = 0;
  int max_concurrent_streams = 0;

  absl::Duration keepalive_time;  // zero: no pings
  absl::Duration keepalive_timeout;
  absl::Duration keepalive_min_client_interval;
  absl::Duration max_connection_idle;  // zero: none
  absl::Duration max_connection_age;   // zero: none
  absl::Duration max_connection_age_grace;

  std::string tls_cert;  // empty: plain text
  std::string tls_key;
  std::string tls_client_ca;
  absl::Duration tls_reload_interval;
  std::string auth_token_file;  // empty: no token

  bool shared_memory = false;
  std::string shared_memory_prefix;
  int max_regions = 0;
  uint64_t max_region_bytes = 0;
  int max_rings = 0;
  absl::Duration ring_spin;
  absl::Duration device_spin;

  std::string log_level;
  std::string log_format;

  absl::Duration drain_delay;
  absl::Duration drain_timeout;
};

// What else a command line may ask for.
struct PrintAndExit {
  std::string text;  // for stdout
};
struct HealthCheck {
  std::string address;
  absl::Duration timeout;
};
using Command = std::variant<Options, PrintAndExit, HealthCheck>;

// Reads argv (with --config=FILE's content below it) and checks it. INVALID_ARGUMENT with one message for people that
// names the flag or the file's line, the value and what is allowed; NOT_FOUND for a file that cannot be read. `version`
// is what --version prints.
absl::StatusOr<Command> ParseCommandLine(int argc, const char* const* argv, std::string_view version);

// Defaults, then checks, then types; exported for the tests and for embedding. Reads the manifest.
absl::StatusOr<Options> MakeOptions(const spmm::config::v1::ServerConfig& config);

// Merges a text-proto file's text into `config`. INVALID_ARGUMENT with "FILE:LINE:COLUMN: ..." for unknown or ill-typed
// fields.
absl::Status MergeTextProto(std::string_view file_name, const std::string& text,
                            spmm::config::v1::ServerConfig* config);

// "64MiB", "4096" -> bytes. Refuses signs, fractions, other units and overflow.
absl::StatusOr<uint64_t> ParseBytes(std::string_view text);
// "10ms", "0" -> duration, finite and not negative.
absl::StatusOr<absl::Duration> ParseDurationText(std::string_view text);
// "HOST:PORT", "[V6]:PORT" or "unix:/absolute/path" (also "unix:///absolute/path", returned in the short form).
absl::StatusOr<std::string> ParseEndpoint(std::string_view text, bool allow_unix);
// "NAME=FILE[:TENSOR]" -> a spec with a file source; the rest is taken from the file.
absl::StatusOr<spmm::v1::LayerSpec> ParsePreload(std::string_view text);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_CONFIG_OPTIONS_H_
