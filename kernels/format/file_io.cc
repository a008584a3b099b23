#include "kernels/format/file_io.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace spmmd {
namespace {

// Closes on every path out of a function.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }
  // For writers: a failed close can be the first news of a failed write.
  int Close() {
    const int result = close(fd_);
    fd_ = -1;
    return result;
  }

 private:
  int fd_;
};

absl::Status WriteAll(int fd, absl::Span<const std::byte> bytes, const std::string& path) {
  // Linux moves at most 0x7ffff000 bytes a call; larger pieces take several anyway.
  constexpr size_t kMaxWrite = size_t{1} << 30;
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), std::min(bytes.size(), kMaxWrite));
    if (written < 0) {
      if (errno == EINTR) continue;
      return absl::ErrnoToStatus(errno, absl::StrCat("write to ", path));
    }
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status SyncDirectory(const std::string& directory) {
  FileDescriptor fd(open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() < 0) return absl::ErrnoToStatus(errno, absl::StrCat("open directory ", directory));
  // EINVAL: a file system that cannot sync directories; nothing more can be done there.
  if (fsync(fd.get()) != 0 && errno != EINVAL) {
    return absl::ErrnoToStatus(errno, absl::StrCat("sync directory ", directory));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> RealPath(const std::string& path) {
  char* resolved = realpath(path.c_str(), nullptr);
  if (resolved == nullptr) return absl::ErrnoToStatus(errno, absl::StrCat("path ", path));
  std::string result(resolved);
  free(resolved);
  return result;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const MappedFile>> MappedFile::Open(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not hang before fstat can refuse it.
  FileDescriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) return absl::ErrnoToStatus(errno, absl::StrCat("open ", path));
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("stat ", path));
  if (!S_ISREG(info.st_mode)) return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  std::shared_ptr<MappedFile> file(new MappedFile);
  if (info.st_size > 0) {
    const auto size = static_cast<size_t>(info.st_size);
    void* address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
    if (address == MAP_FAILED) return absl::ErrnoToStatus(errno, absl::StrCat("map ", path));
    file->bytes_ = {static_cast<const std::byte*>(address), size};
  }
  return file;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

absl::Status WriteFileAtomically(const std::string& path, absl::Span<const absl::Span<const std::byte>> pieces) {
  // rename() would replace a device node or a pipe by a file.
  struct stat existing;
  if (stat(path.c_str(), &existing) == 0 && !S_ISREG(existing.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(path, " exists and is not a regular file"));
  }
  static std::atomic<uint64_t> counter{0};
  const std::string temporary = absl::StrCat(path, ".tmp.", getpid(), ".", counter.fetch_add(1));
  FileDescriptor fd(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (fd.get() < 0) return absl::ErrnoToStatus(errno, absl::StrCat("create ", path));
  absl::Status status = [&] {
    for (const absl::Span<const std::byte> piece : pieces) {
      SPMMD_RETURN_IF_ERROR(WriteAll(fd.get(), piece, path));
    }
    if (fsync(fd.get()) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("sync ", path));
    if (fd.Close() != 0) return absl::ErrnoToStatus(errno, absl::StrCat("close ", path));
    if (rename(temporary.c_str(), path.c_str()) != 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("rename ", temporary, " to ", path));
    }
    return absl::OkStatus();
  }();
  if (!status.ok()) {
    unlink(temporary.c_str());
    return status;
  }
  const std::string directory = std::filesystem::path(path).parent_path().string();
  return SyncDirectory(directory.empty() ? "." : directory);
}

absl::Status CheckInsideDirectory(const std::string& path, const std::string& root) {
  SPMMD_ASSIGN_OR_RETURN(const std::string real_path, RealPath(path));
  SPMMD_ASSIGN_OR_RETURN(const std::string real_root, RealPath(root));
  if (real_root == "/" || absl::StartsWith(real_path, absl::StrCat(real_root, "/"))) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("path ", path, " leaves the directory ", root));
}

}  // namespace spmmd
