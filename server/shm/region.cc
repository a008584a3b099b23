#include "server/shm/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

constexpr size_t kMaxNameLength = 64;
constexpr size_t kMaxKeyLength = 255;  // of a file name
// No file system has this device number.
constexpr uint64_t kDeviceMemory = std::numeric_limits<uint64_t>::max();

absl::Status CheckName(const std::string& name) {
  if (name.empty()) return FieldError("name", "must not be empty");
  if (name.size() > kMaxNameLength) {
    return FieldError("name", absl::StrCat(name.size(), " characters, the limit is ", kMaxNameLength));
  }
  for (size_t i = 0; i < name.size(); ++i) {
    const char c = name[i];
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '_' && c != '-') {
      return FieldError("name", absl::StrCat("character ", i, " is not one of [A-Za-z0-9._-]"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckKey(const std::string& key, const std::string& prefix) {
  if (key.size() < 2 || key[0] != '/') return FieldError("posix_shm", "must be a name of the form \"/name\"");
  if (key.size() > kMaxKeyLength) {
    return FieldError("posix_shm", absl::StrCat(key.size(), " characters, the limit is ", kMaxKeyLength));
  }
  if (key.find('/', 1) != std::string::npos || key.find('\0') != std::string::npos || key == "/." || key == "/..") {
    return FieldError("posix_shm", "must be a name of the form \"/name\" without another slash or a zero byte");
  }
  if (!absl::StartsWith(key, prefix)) {
    return FieldError("posix_shm", absl::StrCat("this server takes names that begin with \"", prefix, "\" only"));
  }
  return absl::OkStatus();
}

// offset + size <= available, without wrap-around.
absl::Status CheckInside(uint64_t offset, uint64_t size, uint64_t available) {
  if (size == 0) return FieldError("size", "must be at least 1");
  if (offset > available) {
    return FieldError("offset",
                      absl::StrCat(offset, " is beyond the end of the memory, which has ", available, " bytes"));
  }
  if (size > available - offset) {
    return FieldError("size", absl::StrCat(size, " bytes at offset ", offset, " do not fit the memory, which has ",
                                           available, " bytes"));
  }
  return absl::OkStatus();
}

absl::Status OpenError(const std::string& key, int error) {
  const std::string message = absl::StrCat("posix_shm: \"", key, "\": ", std::strerror(error));
  switch (error) {
    case ENOENT:
      return MakeError(absl::StatusCode::kNotFound, reason::kSharedMemoryNotFound, message);
    case EACCES:
    case EPERM:
      return MakeError(absl::StatusCode::kPermissionDenied, reason::kSharedMemoryDenied, message);
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return Exhausted(reason::kHostMemory, message, absl::ZeroDuration());
    default:
      return FieldError("posix_shm", absl::StrCat("\"", key, "\": ", std::strerror(error)));
  }
}

}  // namespace

absl::Status RegionNotFound(absl::string_view name) {
  return MakeError(absl::StatusCode::kNotFound, reason::kRegionNotFound,
                   absl::StrCat("region \"", name, "\" is not registered by this connection"));
}

Region::~Region() {
  if (mapped_ != nullptr) {
    // Before the pages go: their addresses may be somebody else's at once.
    guard_.Remove();
    munmap(mapped_, mapped_bytes_);
  }
  if (fd_ >= 0) close(fd_);
  mapping_.reset();
  pool_->Give(kind_, size_);
}

absl::Status Region::Check() const {
  if (kind_ == RegionKind::kCuda) return absl::OkStatus();
  struct stat info {};
  const bool there = !broken() && fstat(fd_, &info) == 0 && static_cast<uint64_t>(info.st_size) >= offset_ + size_;
  if (there) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kRegionBroken,
                   absl::StrCat("region \"", name_, "\": its memory is gone (", key_,
                                broken() ? " was truncated, or /dev/shm is full)" : " was truncated)"));
}

absl::StatusOr<std::byte*> Region::Slice(absl::string_view path, uint64_t offset, uint64_t size) const {
  if (offset > size_ || size > size_ - offset) {
    return FieldError(
        absl::StrCat(path, ".offset"),
        absl::StrCat(size, " bytes at offset ", offset, " do not fit region \"", name_, "\" of ", size_, " bytes"));
  }
  return data_ + offset;
}

bool Region::Overlap(const Region& a, const std::byte* a_data, uint64_t a_size, const Region& b,
                     const std::byte* b_data, uint64_t b_size) {
  if (a.object_ != b.object_ || a_size == 0 || b_size == 0) return false;
  const uint64_t a_begin = a.offset_ + static_cast<uint64_t>(a_data - a.data_);
  const uint64_t b_begin = b.offset_ + static_cast<uint64_t>(b_data - b.data_);
  return a_begin < b_begin + b_size && b_begin < a_begin + a_size;
}

RegionPool::Usage RegionPool::usage() const {
  absl::MutexLock lock(&mutex_);
  return usage_;
}

absl::Status RegionPool::CheckAllowed() const {
  if (options_.enabled) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, reason::kSharedMemoryOff,
                   "this server does not take shared memory; it would with --shared-memory");
}

absl::Status RegionPool::Take(RegionKind kind, uint64_t size) {
  absl::MutexLock lock(&mutex_);
  const int64_t count = usage_.posix_regions + usage_.cuda_regions;
  const uint64_t bytes = usage_.posix_bytes + usage_.cuda_bytes;
  if (count >= options_.max_regions) {
    return Exhausted(reason::kTooManyRegions,
                     absl::StrCat(count, " regions are registered, the limit is ", options_.max_regions),
                     absl::ZeroDuration(), {{"limit", absl::StrCat(options_.max_regions)}});
  }
  if (size > options_.max_bytes || bytes > options_.max_bytes - size) {
    return Exhausted(reason::kTooLarge,
                     absl::StrCat("size: ", size, " bytes beside the ", bytes,
                                  " that are registered pass the limit of ", options_.max_bytes),
                     absl::ZeroDuration(),
                     {{"needed", absl::StrCat(size)}, {"limit", absl::StrCat(options_.max_bytes)}});
  }
  (kind == RegionKind::kPosix ? usage_.posix_regions : usage_.cuda_regions) += 1;
  (kind == RegionKind::kPosix ? usage_.posix_bytes : usage_.cuda_bytes) += size;
  return absl::OkStatus();
}

void RegionPool::Give(RegionKind kind, uint64_t size) {
  absl::MutexLock lock(&mutex_);
  (kind == RegionKind::kPosix ? usage_.posix_regions : usage_.cuda_regions) -= 1;
  (kind == RegionKind::kPosix ? usage_.posix_bytes : usage_.cuda_bytes) -= size;
}

absl::StatusOr<std::shared_ptr<const Region>> RegionPool::OpenPosix(const std::string& name, const std::string& key,
                                                                    uint64_t offset, uint64_t size) {
  SPMMD_RETURN_IF_ERROR(CheckAllowed());
  SPMMD_RETURN_IF_ERROR(CheckKey(key, options_.prefix));
  int fd = shm_open(key.c_str(), O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) return OpenError(key, errno);
  const auto close_fd = absl::MakeCleanup([&fd] {
    if (fd >= 0) close(fd);
  });
  struct stat info {};
  if (fstat(fd, &info) != 0) return OpenError(key, errno);
  if (!S_ISREG(info.st_mode)) return FieldError("posix_shm", "is no shared-memory object");
  SPMMD_RETURN_IF_ERROR(CheckInside(offset, size, static_cast<uint64_t>(info.st_size)));

  SPMMD_RETURN_IF_ERROR(Take(RegionKind::kPosix, size));
  std::shared_ptr<Region> region(new Region(this, RegionKind::kPosix, name, key, offset, size));
  region->fd_ = std::exchange(fd, -1);
  region->object_ = {info.st_dev, info.st_ino};
  const uint64_t skip = offset % static_cast<uint64_t>(getpagesize());
  const size_t page = static_cast<size_t>(getpagesize());
  region->mapped_bytes_ = (skip + size + page - 1) / page * page;
  void* const mapped = mmap(nullptr, region->mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, region->fd_,
                            static_cast<off_t>(offset - skip));
  if (mapped == MAP_FAILED) return OpenError(key, errno);
  region->mapped_ = static_cast<std::byte*>(mapped);
  region->data_ = region->mapped_ + skip;
  if (!region->guard_.Add(region->mapped_, region->mapped_bytes_)) {
    return Exhausted(reason::kTooManyRegions,
                     absl::StrCat(SigbusGuard::kMaxMappings, " regions are mapped, which is the most that can be"),
                     absl::ZeroDuration());
  }
  return std::shared_ptr<const Region>(std::move(region));
}

absl::StatusOr<std::shared_ptr<const Region>> RegionPool::OpenCuda(const std::string& name, const std::string& handle,
                                                                   const std::string& device_uuid, uint64_t offset,
                                                                   uint64_t size) {
  SPMMD_RETURN_IF_ERROR(CheckAllowed());
  constexpr size_t kHandleBytes = 64;
  if (handle.size() != kHandleBytes) {
    return FieldError("cuda_ipc", absl::StrCat("a handle has ", kHandleBytes, " bytes, got ", handle.size()));
  }
  if (options_.open_device_memory == nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kNoSuchDevice,
                     absl::StrCat("device_uuid: this server has no GPU, the region is on \"", device_uuid, "\""));
  }
  SPMMD_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMapping> mapping, options_.open_device_memory(handle, device_uuid));
  SPMMD_RETURN_IF_ERROR(CheckInside(offset, size, mapping->size()));
  SPMMD_RETURN_IF_ERROR(Take(RegionKind::kCuda, size));
  std::shared_ptr<Region> region(new Region(this, RegionKind::kCuda, name, "", offset, size));
  region->data_ = mapping->data() + offset;
  region->object_ = {kDeviceMemory, reinterpret_cast<uint64_t>(mapping->data())};
  region->mapping_ = std::move(mapping);
  return std::shared_ptr<const Region>(std::move(region));
}

absl::Status RegionSet::CheckFree(const std::string& name) const {
  absl::MutexLock lock(&mutex_);
  if (!regions_.contains(name)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kAlreadyExists, reason::kRegionExists,
                   absl::StrCat("name: region \"", name, "\" is registered already"));
}

absl::Status RegionSet::Insert(const std::string& name, absl::StatusOr<std::shared_ptr<const Region>> region) {
  SPMMD_RETURN_IF_ERROR(region.status());
  absl::MutexLock lock(&mutex_);
  if (regions_.emplace(name, *std::move(region)).second) return absl::OkStatus();
  return MakeError(absl::StatusCode::kAlreadyExists, reason::kRegionExists,
                   absl::StrCat("name: region \"", name, "\" is registered already"));
}

absl::Status RegionSet::RegisterPosix(const std::string& name, const std::string& key, uint64_t offset, uint64_t size) {
  SPMMD_RETURN_IF_ERROR(CheckName(name));
  SPMMD_RETURN_IF_ERROR(CheckFree(name));
  return Insert(name, pool_.OpenPosix(name, key, offset, size));
}

absl::Status RegionSet::RegisterCuda(const std::string& name, const std::string& handle, const std::string& device_uuid,
                                     uint64_t offset, uint64_t size) {
  SPMMD_RETURN_IF_ERROR(CheckName(name));
  SPMMD_RETURN_IF_ERROR(CheckFree(name));
  return Insert(name, pool_.OpenCuda(name, handle, device_uuid, offset, size));
}

void RegionSet::Add(std::shared_ptr<const Region> region) {
  absl::MutexLock lock(&mutex_);
  const std::string name = region->name();
  regions_[name] = std::move(region);
}

absl::Status RegionSet::Unregister(const std::string& name) {
  std::shared_ptr<const Region> region;  // unmapped outside the lock
  absl::MutexLock lock(&mutex_);
  const auto it = regions_.find(name);
  if (it == regions_.end()) return RegionNotFound(name);
  region = std::move(it->second);
  regions_.erase(it);
  return absl::OkStatus();
}

int RegionSet::UnregisterAll() {
  absl::flat_hash_map<std::string, std::shared_ptr<const Region>> regions;
  absl::MutexLock lock(&mutex_);
  regions.swap(regions_);
  return static_cast<int>(regions.size());
}

absl::StatusOr<std::shared_ptr<const Region>> RegionSet::Find(const std::string& name) const {
  absl::MutexLock lock(&mutex_);
  const auto it = regions_.find(name);
  if (it == regions_.end()) return RegionNotFound(name);
  return it->second;
}

std::vector<std::shared_ptr<const Region>> RegionSet::List() const {
  std::vector<std::shared_ptr<const Region>> list;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [name, region] : regions_) list.push_back(region);
  }
  std::sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a->name() < b->name(); });
  return list;
}

bool RegionSet::empty() const {
  absl::MutexLock lock(&mutex_);
  return regions_.empty();
}

}  // namespace spmmd::server
