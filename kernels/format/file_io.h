// Files as the format code needs them: mapped read-only, and written so that a crash leaves the old file or the new
// one.
#ifndef SPMMD_KERNELS_FORMAT_FILE_IO_H_
#define SPMMD_KERNELS_FORMAT_FILE_IO_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace spmmd {

// A regular file mapped read-only. Truncating the file while it is mapped makes later reads fault: files that others
// may rewrite in place must be replaced by rename, as WriteFileAtomically does.
class MappedFile {
 public:
  // NOT_FOUND, PERMISSION_DENIED, INVALID_ARGUMENT (not a regular file), each naming the path.
  static absl::StatusOr<std::shared_ptr<const MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  absl::Span<const std::byte> bytes() const { return bytes_; }

 private:
  MappedFile() = default;
  absl::Span<const std::byte> bytes_;
};

// Writes the pieces one after another into a temporary file beside `path`, syncs it, renames it over `path` and syncs
// the directory. On any error the temporary file is removed and `path` is as it was.
absl::Status WriteFileAtomically(const std::string& path, absl::Span<const absl::Span<const std::byte>> pieces);

// INVALID_ARGUMENT unless `path`, with symbolic links resolved, lies in or below the directory `root` (links resolved
// too). NOT_FOUND when either does not exist.
absl::Status CheckInsideDirectory(const std::string& path, const std::string& root);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_FORMAT_FILE_IO_H_
