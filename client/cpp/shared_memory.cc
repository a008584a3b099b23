#include "client/cpp/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "client/cpp/connection.h"
#include "client/cpp/status.h"
#include "grpcpp/support/client_callback.h"

namespace spmmd::client {
namespace {

// The end of a region must not hold up its owner for long; the server forgets it with the connection anyway.
constexpr absl::Duration kUnregisterTimeout = absl::Seconds(5);

std::string RandomName() {
  std::random_device random;
  return absl::StrCat(getpid(), "-", absl::Hex((uint64_t{random()} << 32) | random(), absl::kZeroPad16));
}

absl::Status SystemError(const char* what, int error) {
  const std::string message = absl::StrCat(what, ": ", std::strerror(error));
  return error == ENOSPC || error == ENOMEM || error == EMFILE || error == ENFILE
             ? absl::ResourceExhaustedError(message)
             : absl::FailedPreconditionError(message);
}

// A POSIX object that loses its name with this object, and its memory once nobody maps it any more.
class Object {
 public:
  explicit Object(std::string key) : key_(std::move(key)) {}
  ~Object() {
    if (fd_ >= 0) close(fd_);
    if (fd_ >= 0) shm_unlink(key_.c_str());
  }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  absl::StatusOr<std::byte*> Create(uint64_t bytes) {
    fd_ = shm_open(key_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd_ < 0) return SystemError("shm_open", errno);
    // Pages are taken now: a full /dev/shm is an error here instead of a SIGBUS at the first access.
    if (const int error = posix_fallocate(fd_, 0, static_cast<off_t>(bytes)); error != 0) {
      return SystemError("/dev/shm", error);
    }
    void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (data == MAP_FAILED) return SystemError("mmap", errno);
    return static_cast<std::byte*>(data);
  }

 private:
  const std::string key_;
  int fd_ = -1;
};

}  // namespace

// An ExecuteStream without requests: its end is how the server learns that the connection has ended.
class SharedMemory::Lease final : public grpc::ClientBidiReactor<v1::ExecuteStreamRequest, v1::ExecuteStreamResponse> {
 public:
  Lease(v1::SparseMatmul::Stub& stub, std::unique_ptr<grpc::ClientContext> context) : context_(std::move(context)) {
    stub.async()->ExecuteStream(context_.get(), this);
    StartRead(&response_);
    StartCall();
  }
  ~Lease() override {
    context_->TryCancel();
    done_.WaitForNotification();
  }

  // Waits until the server has the stream.
  absl::Status Await() {
    opened_.WaitForNotification();
    if (alive()) return absl::OkStatus();
    done_.WaitForNotification();
    return status_.ok() ? absl::UnavailableError("the connection ended") : status_;
  }
  bool alive() const { return alive_.load(std::memory_order_acquire); }

  void OnReadInitialMetadataDone(bool ok) override {
    if (ok) alive_.store(true, std::memory_order_release);
    if (!opened_.HasBeenNotified()) opened_.Notify();
  }
  void OnReadDone(bool ok) override {
    if (!ok) alive_.store(false, std::memory_order_release);
  }
  void OnDone(const grpc::Status& status) override {
    alive_.store(false, std::memory_order_release);
    status_ = FromGrpcStatus(status);
    if (!opened_.HasBeenNotified()) opened_.Notify();
    done_.Notify();
  }

 private:
  const std::unique_ptr<grpc::ClientContext> context_;
  v1::ExecuteStreamResponse response_;
  absl::Notification opened_;
  absl::Notification done_;
  std::atomic<bool> alive_{false};
  absl::Status status_;
};

struct SharedMemory::State {
  mutable absl::Mutex mutex;
  std::unique_ptr<Lease> lease ABSL_GUARDED_BY(mutex);
};

SharedRegion::~SharedRegion() {
  owner_.Unregister(name_);
  munmap(data_, size_);
}

v1::RegionSlice SharedRegion::Slice(uint64_t offset, uint64_t bytes) const {
  v1::RegionSlice slice;
  slice.set_region(name_);
  slice.set_offset(offset);
  slice.set_size(bytes);
  return slice;
}

v1::NamedInput MakeInput(std::string_view name, const SharedRegion& region, uint64_t offset, v1::DataType dtype,
                         int64_t rows, int64_t cols) {
  size_t element = dtype == v1::DATA_TYPE_F32 ? 4 : 2;
  v1::NamedInput input;
  input.set_name(std::string(name));
  v1::Tensor& tensor = *input.mutable_dense();
  tensor.set_dtype(dtype);
  tensor.add_shape(rows);
  tensor.add_shape(cols);
  *tensor.mutable_region() = region.Slice(offset, static_cast<uint64_t>(rows) * static_cast<uint64_t>(cols) * element);
  return input;
}

SharedMemory::SharedMemory(std::shared_ptr<Connection> connection, v1::SparseMatmul::Stub* stub)
    : connection_(std::move(connection)), stub_(*stub), state_(std::make_unique<State>()) {}

SharedMemory::~SharedMemory() = default;

bool SharedMemory::alive() const {
  absl::MutexLock lock(&state_->mutex);
  return state_->lease != nullptr && state_->lease->alive();
}

absl::Status SharedMemory::CheckServer() {
  {
    absl::MutexLock lock(&state_->mutex);
    if (state_->lease != nullptr && state_->lease->alive()) return absl::OkStatus();
  }
  v1::ServerInfoResponse info;
  grpc::ClientContext context;
  absl::Status status = connection_->Prepare(context, {}, connection_->options().timeout);
  if (status.ok()) status = FromGrpcStatus(stub_.ServerInfo(&context, {}, &info));
  if (!status.ok()) return status;
  for (const std::string& extension : info.extensions()) {
    if (extension == "shared_memory") return absl::OkStatus();
  }
  return absl::FailedPreconditionError("this server does not take shared memory; it would with --shared-memory");
}

absl::Status SharedMemory::EnsureLease() {
  absl::MutexLock lock(&state_->mutex);
  if (state_->lease != nullptr && state_->lease->alive()) return absl::OkStatus();
  auto context = std::make_unique<grpc::ClientContext>();
  if (absl::Status status = connection_->Prepare(*context, {}, absl::InfiniteDuration()); !status.ok()) return status;
  auto lease = std::make_unique<Lease>(stub_, std::move(context));
  if (absl::Status status = lease->Await(); !status.ok()) return status;
  state_->lease = std::move(lease);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SharedRegion>> SharedMemory::Create(uint64_t bytes, const CallOptions& call) {
  if (bytes == 0) return absl::InvalidArgumentError("bytes: must be at least 1");
  if (absl::Status status = CheckServer(); !status.ok()) return status;
  if (absl::Status status = EnsureLease(); !status.ok()) return status;
  const std::string name = RandomName();
  const std::string key = absl::StrCat("/spmmd-", name);
  Object object(key);
  absl::StatusOr<std::byte*> data = object.Create(bytes);
  if (!data.ok()) return data.status();
  v1::RegisterRegionRequest request;
  request.set_name(name);
  request.set_size(bytes);
  request.set_posix_shm(key);
  v1::RegisterRegionResponse response;
  grpc::ClientContext context;
  absl::Status status = connection_->Prepare(context, call, connection_->options().timeout);
  if (status.ok()) status = FromGrpcStatus(stub_.RegisterRegion(&context, request, &response));
  if (!status.ok()) {
    munmap(*data, bytes);
    return status;
  }
  return std::unique_ptr<SharedRegion>(new SharedRegion(this, name, *data, bytes));
}

void SharedMemory::Unregister(const std::string& name) {
  if (!alive()) return;
  v1::UnregisterRegionRequest request;
  request.set_name(name);
  v1::UnregisterRegionResponse response;
  grpc::ClientContext context;
  if (!connection_->Prepare(context, {}, kUnregisterTimeout).ok()) return;
  static_cast<void>(stub_.UnregisterRegion(&context, request, &response));
}

}  // namespace spmmd::client
