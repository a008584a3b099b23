// Immutable-after-construction byte buffers, 64-byte aligned, owned on the heap or borrowed from an owner such as a
// memory-mapped file.
#ifndef SPMMD_KERNELS_BASE_BUFFER_H_
#define SPMMD_KERNELS_BASE_BUFFER_H_

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace spmmd {

class Buffer {
 public:
  // Every heap buffer starts on this boundary and has this many readable zero bytes behind its end, so that a kernel
  // may finish with one full-width vector load.
  static constexpr size_t kAlignment = 64;

  Buffer() = default;

  // Zero-filled heap memory. RESOURCE_EXHAUSTED naming the size if the host has not enough.
  static absl::StatusOr<Buffer> Allocate(size_t bytes);

  // Bytes that live as long as `owner`; `data` must be kAlignment-aligned with kAlignment readable bytes behind it.
  static Buffer Borrow(absl::Span<const std::byte> data, std::shared_ptr<const void> owner);

  const std::byte* data() const { return data_; }
  // Null for a borrowed buffer.
  std::byte* mutable_data() { return mutable_data_; }
  size_t size() const { return size_; }

  template <typename T>
  absl::Span<const T> As() const {
    return {reinterpret_cast<const T*>(data_), size_ / sizeof(T)};
  }
  template <typename T>
  absl::Span<T> MutableAs() {
    return {reinterpret_cast<T*>(mutable_data_), mutable_data_ == nullptr ? 0 : size_ / sizeof(T)};
  }

 private:
  const std::byte* data_ = nullptr;
  std::byte* mutable_data_ = nullptr;
  size_t size_ = 0;
  std::shared_ptr<const void> owner_;
};

}  // namespace spmmd

#endif  // SPMMD_KERNELS_BASE_BUFFER_H_
