// Memory that a caller on the same host shares with the server: POSIX shared-memory objects, and device memory of
// another process (CUDA IPC). Tensors then name a piece of a region instead of carrying bytes, and are read and written
// in place.
//
//   RegionPool pool(options);                        // limits of the whole server
//   auto set = std::make_shared<RegionSet>(&pool);   // the names of one owner
//   set->RegisterPosix("x", "/key", 0, size);
//   auto region = set->Find("x");                    // a lease: the memory stays while somebody holds it
//   auto bytes = (*region)->Slice("inputs[0].dense.region", offset, size);
//
// The memory is the caller's: he may change it at any time, so nothing in it is believed twice, and he may take it away
// (SigbusGuard).
#ifndef SPMMD_SERVER_SHM_REGION_H_
#define SPMMD_SERVER_SHM_REGION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/shm/sigbus_guard.h"

namespace spmmd::server {

class Device;

enum class RegionKind { kPosix, kCuda };

// Device memory of another process, opened here; closed on destruction.
class DeviceMapping {
 public:
  virtual ~DeviceMapping() = default;
  // Start of the allocation that the handle stands for, and its size.
  virtual std::byte* data() const = 0;
  virtual uint64_t size() const = 0;
  virtual const Device* device() const = 0;
};
// Opens a 64-byte CUDA IPC handle on the device with a UUID. Errors name the field `cuda_ipc` or `device_uuid`.
using OpenDeviceMemory =
    std::function<absl::StatusOr<std::unique_ptr<DeviceMapping>>(const std::string& handle, const std::string& uuid)>;

class RegionPool;

// One region. Immutable; whoever holds a shared_ptr to it may use its memory.
class Region {
 public:
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  RegionKind kind() const { return kind_; }
  const std::string& name() const { return name_; }
  // Of kCuda: memory of this device, not of the host. Null for kPosix.
  const Device* device() const { return mapping_ == nullptr ? nullptr : mapping_->device(); }
  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }
  // Name of the object ("/name") and where the region starts in it.
  const std::string& key() const { return key_; }
  uint64_t offset() const { return offset_; }

  // FAILED_PRECONDITION (REGION_BROKEN) when the memory is not all there any more: the object was truncated, or
  // /dev/shm is full. Before a use it saves work; after one it says whether to believe the result.
  absl::Status Check() const;
  // Whether an access has found the memory gone. Wait-free; what was read since may be zeros.
  bool broken() const { return guard_.broken(); }

  // Where [offset, offset + size) is. INVALID_ARGUMENT naming `path`.offset when it does not lie inside the region.
  absl::StatusOr<std::byte*> Slice(absl::string_view path, uint64_t offset, uint64_t size) const;

  // Whether two pieces of memory share a byte, whatever regions and names they were reached by.
  static bool Overlap(const Region& a, const std::byte* a_data, uint64_t a_size, const Region& b,
                      const std::byte* b_data, uint64_t b_size);

 private:
  friend class RegionPool;
  Region(RegionPool* pool, RegionKind kind, std::string name, std::string key, uint64_t offset, uint64_t size)
      : pool_(pool), kind_(kind), name_(std::move(name)), key_(std::move(key)), offset_(offset), size_(size) {}

  RegionPool* const pool_;
  const RegionKind kind_;
  const std::string name_;
  const std::string key_;
  const uint64_t offset_;
  const uint64_t size_;
  std::byte* data_ = nullptr;
  // kPosix.
  int fd_ = -1;
  std::byte* mapped_ = nullptr;  // whole pages
  size_t mapped_bytes_ = 0;
  // Which object it is: device and inode. kCuda has a device number that no file system has.
  std::pair<uint64_t, uint64_t> object_;
  SigbusGuard guard_;
  // kCuda.
  std::unique_ptr<DeviceMapping> mapping_;
};

// Makes regions within the server's limits, and counts them. Thread-safe; outlives its regions.
class RegionPool {
 public:
  struct Options {
    bool enabled = false;
    int64_t max_regions = 1024;
    uint64_t max_bytes = uint64_t{64} << 30;
    // Names of POSIX objects must begin with this.
    std::string prefix = "/";
    // Null: no CUDA IPC.
    OpenDeviceMemory open_device_memory;
  };
  struct Usage {
    int64_t posix_regions = 0;
    uint64_t posix_bytes = 0;
    int64_t cuda_regions = 0;
    uint64_t cuda_bytes = 0;
  };

  explicit RegionPool(Options options) : options_(std::move(options)) {}
  RegionPool(const RegionPool&) = delete;
  RegionPool& operator=(const RegionPool&) = delete;

  const Options& options() const { return options_; }
  Usage usage() const;

  // [offset, offset + size) of an object that exists: nothing is ever created. FAILED_PRECONDITION when the server does
  // not allow shared memory; INVALID_ARGUMENT naming posix_shm, size or offset; NOT_FOUND and PERMISSION_DENIED for the
  // object; RESOURCE_EXHAUSTED beyond the limits.
  absl::StatusOr<std::shared_ptr<const Region>> OpenPosix(const std::string& name, const std::string& key,
                                                          uint64_t offset, uint64_t size);
  // [offset, offset + size) of another process's device memory. FAILED_PRECONDITION when there is no such device here;
  // INVALID_ARGUMENT naming cuda_ipc, size or offset; RESOURCE_EXHAUSTED.
  absl::StatusOr<std::shared_ptr<const Region>> OpenCuda(const std::string& name, const std::string& handle,
                                                         const std::string& device_uuid, uint64_t offset,
                                                         uint64_t size);

 private:
  friend class Region;
  absl::Status CheckAllowed() const;
  // Takes a place and bytes; given back by the region's destructor.
  absl::Status Take(RegionKind kind, uint64_t size);
  void Give(RegionKind kind, uint64_t size);

  const Options options_;
  mutable absl::Mutex mutex_;
  Usage usage_ ABSL_GUARDED_BY(mutex_);
};

// The regions of one owner, by name. Thread-safe.
class RegionSet {
 public:
  // `pool` must outlive the set and every lease.
  explicit RegionSet(RegionPool* pool) : pool_(*pool) {}

  // OpenPosix and OpenCuda under a name of 1 to 64 characters of [A-Za-z0-9._-]; `name` is the field named in errors.
  // ALREADY_EXISTS when the owner has a region of that name.
  absl::Status RegisterPosix(const std::string& name, const std::string& key, uint64_t offset, uint64_t size);
  absl::Status RegisterCuda(const std::string& name, const std::string& handle, const std::string& device_uuid,
                            uint64_t offset, uint64_t size);
  // One that is open already, under its own name.
  void Add(std::shared_ptr<const Region> region);
  // NOT_FOUND. The name is free at once; the memory is let go when the last lease is.
  absl::Status Unregister(const std::string& name);
  // How many there were.
  int UnregisterAll();

  // A lease. NOT_FOUND (REGION_NOT_FOUND).
  absl::StatusOr<std::shared_ptr<const Region>> Find(const std::string& name) const;
  // All of them, by name.
  std::vector<std::shared_ptr<const Region>> List() const;
  bool empty() const;

 private:
  absl::Status CheckFree(const std::string& name) const;
  absl::Status Insert(const std::string& name, absl::StatusOr<std::shared_ptr<const Region>> region);

  RegionPool& pool_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<std::string, std::shared_ptr<const Region>> regions_ ABSL_GUARDED_BY(mutex_);
};

absl::Status RegionNotFound(absl::string_view name);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_SHM_REGION_H_
