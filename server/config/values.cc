#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/config/options.h"

namespace spmmd::server {
namespace {

// Debian's Abseil has its own string_view.
absl::string_view Absl(std::string_view text) { return {text.data(), text.size()}; }

bool ConsumeSuffix(std::string_view* text, std::string_view suffix) {
  if (!text->ends_with(suffix)) return false;
  text->remove_suffix(suffix.size());
  return true;
}

}  // namespace

absl::StatusOr<uint64_t> ParseBytes(std::string_view text) {
  std::string_view number = text;
  uint64_t unit = 1;
  if (ConsumeSuffix(&number, "KiB")) {
    unit = uint64_t{1} << 10;
  } else if (ConsumeSuffix(&number, "MiB")) {
    unit = uint64_t{1} << 20;
  } else if (ConsumeSuffix(&number, "GiB")) {
    unit = uint64_t{1} << 30;
  }
  uint64_t value = 0;
  const bool digits = !number.empty() && number.find_first_not_of("0123456789") == std::string_view::npos;
  if (!digits || !absl::SimpleAtoi(Absl(number), &value)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", Absl(text), "' is not a byte count such as 65536, 64KiB or 1GiB"));
  }
  if (value > std::numeric_limits<uint64_t>::max() / unit) {
    return absl::InvalidArgumentError(absl::StrCat("'", Absl(text), "' is more bytes than 64 bits can count"));
  }
  return value * unit;
}

absl::StatusOr<absl::Duration> ParseDurationText(std::string_view text) {
  absl::Duration duration;
  if (!absl::ParseDuration(Absl(text), &duration)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", Absl(text), "' is not a duration such as 0, 250us, 10ms, 30s or 2m"));
  }
  if (duration < absl::ZeroDuration() || duration > absl::Hours(24 * 365)) {
    return absl::InvalidArgumentError(absl::StrCat("'", Absl(text), "' is outside 0 to one year"));
  }
  return duration;
}

absl::StatusOr<std::string> ParseEndpoint(std::string_view text, bool allow_unix) {
  const auto bad = [&](std::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", Absl(text), "' is not an endpoint: ", Absl(why),
        allow_unix ? "; use HOST:PORT, [IPV6]:PORT or unix:/absolute/path" : "; use HOST:PORT or [IPV6]:PORT"));
  };
  if (text.starts_with("unix:")) {
    if (!allow_unix) return bad("no Unix socket can be used here");
    std::string_view path = text.substr(5);
    if (path.starts_with("//")) path.remove_prefix(2);
    if (!path.starts_with('/') || path.size() < 2) return bad("the socket's path must be absolute");
    // sizeof(sockaddr_un::sun_path) is 108, its terminating zero included.
    if (path.size() > 107) return bad("a socket's path can have at most 107 characters");
    return absl::StrCat("unix:", Absl(path));
  }
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return bad("the port is missing");
  const std::string_view host = text.substr(0, colon);
  const std::string_view port = text.substr(colon + 1);
  if (host.empty()) return bad("the host is missing (0.0.0.0 or [::] is any)");
  if (host.find(':') != std::string_view::npos && !(host.front() == '[' && host.back() == ']')) {
    return bad("an IPv6 address needs brackets");
  }
  int number = 0;
  const bool digits = !port.empty() && port.find_first_not_of("0123456789") == std::string_view::npos;
  if (!digits || !absl::SimpleAtoi(Absl(port), &number) || number > 65535) return bad("the port must be 0 to 65535");
  return std::string(text);
}

absl::StatusOr<spmm::v1::LayerSpec> ParsePreload(std::string_view text) {
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos || equals == 0 || equals + 1 == text.size()) {
    return absl::InvalidArgumentError(absl::StrCat("'", Absl(text), "' is not NAME=FILE[:TENSOR]"));
  }
  spmm::v1::LayerSpec spec;
  spec.set_name(std::string(text.substr(0, equals)));
  const std::string_view source = text.substr(equals + 1);
  // A tensor's name may hold colons, a file's name in a model repository has none: the first one separates.
  const size_t colon = source.find(':');
  spec.mutable_file()->set_path(std::string(source.substr(0, colon)));
  if (colon != std::string_view::npos) spec.mutable_file()->set_tensor(std::string(source.substr(colon + 1)));
  return spec;
}

}  // namespace spmmd::server
