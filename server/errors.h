// Errors with google.rpc details. Inside the server an error is an absl::Status whose payloads are serialised
// google.rpc messages under their type URLs; only the rpc layer turns it into a grpc::Status, by ToRpcStatus().
//
// Every status made here carries google.rpc.ErrorInfo (domain "spmmd", a stable upper-snake reason). INVALID_ARGUMENT
// adds BadRequest naming the field by its path in the request ("program.steps[2].matmul.layer"). A refusal that the
// caller should retry adds RetryInfo.
#ifndef SPMMD_SERVER_ERRORS_H_
#define SPMMD_SERVER_ERRORS_H_

#include <cstdint>
#include <map>
#include <new>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace google::rpc {
class Status;
}  // namespace google::rpc

namespace spmmd::server {

// ErrorInfo.domain of everything that spmmd itself reports.
inline constexpr absl::string_view kErrorDomain = "spmmd";

// Stable reasons: clients switch on them, so a name is never changed or reused.
namespace reason {
inline constexpr absl::string_view kInvalidField = "INVALID_FIELD";
inline constexpr absl::string_view kLayerNotFound = "LAYER_NOT_FOUND";
inline constexpr absl::string_view kProgramNotFound = "PROGRAM_NOT_FOUND";
inline constexpr absl::string_view kRegionNotFound = "REGION_NOT_FOUND";
inline constexpr absl::string_view kRegionExists = "REGION_EXISTS";
inline constexpr absl::string_view kRegionBroken = "REGION_BROKEN";  // its memory is gone: register another
inline constexpr absl::string_view kTooManyRegions = "TOO_MANY_REGIONS";
inline constexpr absl::string_view kSharedMemoryOff = "SHARED_MEMORY_OFF";
inline constexpr absl::string_view kSharedMemoryNotFound = "SHARED_MEMORY_NOT_FOUND";
inline constexpr absl::string_view kSharedMemoryDenied = "SHARED_MEMORY_DENIED";
inline constexpr absl::string_view kNotLocal = "NOT_LOCAL";           // the caller is on another host
inline constexpr absl::string_view kNoSuchDevice = "NO_SUCH_DEVICE";  // metadata: device_uuid, served
inline constexpr absl::string_view kRingNotFound = "RING_NOT_FOUND";
inline constexpr absl::string_view kTooManyRings = "TOO_MANY_RINGS";
inline constexpr absl::string_view kFileNotFound = "FILE_NOT_FOUND";
inline constexpr absl::string_view kWrongShard = "WRONG_SHARD";  // metadata: layer, shard, shard_count
inline constexpr absl::string_view kLayerNotReady = "LAYER_NOT_READY";
inline constexpr absl::string_view kDeviceMemory = "DEVICE_MEMORY";  // metadata: needed, free, limit (bytes), device
inline constexpr absl::string_view kHostMemory = "HOST_MEMORY";      // metadata: needed, free, limit (bytes)
inline constexpr absl::string_view kQueueFull = "QUEUE_FULL";        // with RetryInfo
inline constexpr absl::string_view kQueueBytes = "QUEUE_BYTES";      // with RetryInfo
inline constexpr absl::string_view kTooLarge = "TOO_LARGE";          // metadata: needed, limit
inline constexpr absl::string_view kTruncatedUpload = "TRUNCATED_UPLOAD";
inline constexpr absl::string_view kUploadIdle = "UPLOAD_IDLE";  // metadata: timeout_seconds
inline constexpr absl::string_view kContentHashMismatch = "CONTENT_HASH_MISMATCH";
inline constexpr absl::string_view kContentSourceLost = "CONTENT_SOURCE_LOST";
inline constexpr absl::string_view kCorruptFile = "CORRUPT_FILE";
inline constexpr absl::string_view kNoModelRepository = "NO_MODEL_REPOSITORY";
inline constexpr absl::string_view kTooManyLayers = "TOO_MANY_LAYERS";
inline constexpr absl::string_view kTooManyPrograms = "TOO_MANY_PROGRAMS";
inline constexpr absl::string_view kUnsupported = "UNSUPPORTED";
inline constexpr absl::string_view kDeviceLost = "DEVICE_LOST";
inline constexpr absl::string_view kDraining = "DRAINING";
inline constexpr absl::string_view kDeadline = "DEADLINE";
inline constexpr absl::string_view kCancelled = "CANCELLED";
}  // namespace reason

using ErrorMetadata = std::map<std::string, std::string>;

// INVALID_ARGUMENT: "<path>: <problem>", with BadRequest and ErrorInfo.
absl::Status FieldError(absl::string_view path, absl::string_view problem,
                        absl::string_view reason = reason::kInvalidField, const ErrorMetadata& metadata = {});

// FieldError with the message of an error that a lower layer found in that field; other codes than INVALID_ARGUMENT and
// OUT_OF_RANGE keep their code. OK stays OK.
absl::Status AtField(absl::string_view path, const absl::Status& status);

// Any code, with ErrorInfo. `metadata` values are plain text.
absl::Status MakeError(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                       const ErrorMetadata& metadata = {});

// RESOURCE_EXHAUSTED with ErrorInfo and, when `retry_after` is positive, RetryInfo.
absl::Status Exhausted(absl::string_view reason, absl::string_view message, absl::Duration retry_after,
                       const ErrorMetadata& metadata = {});

// RESOURCE_EXHAUSTED of a memory budget: the text and the metadata name needed, free and limit in bytes.
absl::Status OutOfMemory(absl::string_view reason, absl::string_view where, uint64_t needed, uint64_t free,
                         uint64_t limit);

// What `body` returns (a Status or a StatusOr); RESOURCE_EXHAUSTED when the host has no memory for it. Stands where a
// caller's sizes decide how much is allocated, so that his failure stays his.
template <typename Body>
auto GuardHostMemory(const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return MakeError(absl::StatusCode::kResourceExhausted, reason::kHostMemory, "host memory: an allocation failed");
  }
}

// The same error as google.rpc.Status. A status without ErrorInfo gets one whose reason is the canonical code's name.
google::rpc::Status ToRpcStatus(const absl::Status& status);
// Inverse (for tests and C++ callers).
absl::Status FromRpcStatus(const google::rpc::Status& status);

// ErrorInfo.reason, or the canonical code's name when there is none; empty when OK.
std::string ReasonOf(const absl::Status& status);
// Path of the first BadRequest violation; empty when there is none.
std::string FieldOf(const absl::Status& status);
// RetryInfo; nullopt when there is none.
std::optional<absl::Duration> RetryDelayOf(const absl::Status& status);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_ERRORS_H_
