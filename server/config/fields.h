// The flags as fields of ServerConfig: everything about them is in the field's `flag` option. Internal to
// server/config.
#ifndef SPMMD_SERVER_CONFIG_FIELDS_H_
#define SPMMD_SERVER_CONFIG_FIELDS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/descriptor.h"
#include "spmm/config/v1/config.pb.h"

namespace spmmd::server {

// A field that is a flag.
struct FlagField {
  const google::protobuf::FieldDescriptor* field = nullptr;
  const spmm::config::v1::FlagOptions* options = nullptr;
  std::string flag;  // "--max-queue-delay"
};

// All of them, in the order of the proto.
const std::vector<FlagField>& FlagFields();

// Sets (or, when repeated, appends to) the field from text. INVALID_ARGUMENT "--flag: 'text' ..." when it is not of the
// field's type.
absl::Status SetField(const FlagField& flag, const std::string& text, spmm::config::v1::ServerConfig* config);

// Sets every unset flag field that has a default.
absl::Status FillDefaults(spmm::config::v1::ServerConfig* config);

// Choices, ranges, durations and byte counts of every set flag field.
absl::Status CheckFields(const spmm::config::v1::ServerConfig& config);

// The content of a file of at most 64 MiB. NOT_FOUND with the path and the system's reason.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_CONFIG_FIELDS_H_
