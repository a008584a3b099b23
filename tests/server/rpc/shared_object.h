// A POSIX shared-memory object of a test.
#ifndef SPMMD_TESTS_SERVER_RPC_SHARED_OBJECT_H_
#define SPMMD_TESTS_SERVER_RPC_SHARED_OBJECT_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace spmmd::server::testing {

class SharedObject {
 public:
  explicit SharedObject(uint64_t bytes)
      : key_("/spmmd-test-" + std::to_string(getpid()) + "-" + std::to_string(next_.fetch_add(1))), bytes_(bytes) {
    fd_ = shm_open(key_.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    EXPECT_GE(fd_, 0);
    EXPECT_EQ(ftruncate(fd_, static_cast<off_t>(bytes)), 0);
    data_ = static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0));
    EXPECT_NE(data_, MAP_FAILED);
  }
  ~SharedObject() {
    munmap(data_, bytes_);
    close(fd_);
    shm_unlink(key_.c_str());
  }
  SharedObject(const SharedObject&) = delete;
  SharedObject& operator=(const SharedObject&) = delete;

  const std::string& key() const { return key_; }
  uint64_t size() const { return bytes_; }
  std::byte* data() { return data_; }
  float* floats(uint64_t offset) { return reinterpret_cast<float*>(data_ + offset); }
  void Write(uint64_t offset, const std::vector<float>& values) {
    std::copy(values.begin(), values.end(), floats(offset));
  }
  std::vector<float> Read(uint64_t offset, int64_t count) { return {floats(offset), floats(offset) + count}; }
  void Truncate(uint64_t bytes) { EXPECT_EQ(ftruncate(fd_, static_cast<off_t>(bytes)), 0); }

 private:
  static inline std::atomic<int> next_{0};
  const std::string key_;
  const uint64_t bytes_;
  int fd_ = -1;
  std::byte* data_ = nullptr;
};

}  // namespace spmmd::server::testing

#endif  // SPMMD_TESTS_SERVER_RPC_SHARED_OBJECT_H_
