#include "kernels/base/buffer.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"

namespace spmmd {
namespace {

// From this size on, memory comes zeroed from the kernel on huge pages: the pages are first touched by the threads that
// fill them, and a kernel streaming a large layer does not spend its time in page walks. AddressSanitizer sees heap
// blocks only, so sanitized builds stay on the heap.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kMapFrom = std::numeric_limits<size_t>::max();
#else
constexpr size_t kMapFrom = size_t{4} << 20;
#endif
constexpr size_t kHugePage = size_t{2} << 20;

absl::Status OutOfMemory(size_t bytes) {
  return absl::ResourceExhaustedError(absl::StrCat("host memory: cannot allocate ", bytes, " bytes"));
}

// Anonymous mapping of `bytes`, start aligned to a huge page; null when refused.
std::byte* MapAligned(size_t bytes) {
  const size_t reserved = bytes + kHugePage;
  void* raw = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(raw);
  const size_t head = (kHugePage - reinterpret_cast<uintptr_t>(raw) % kHugePage) % kHugePage;
  std::byte* const aligned = begin + head;
  if (head != 0) munmap(begin, head);
  if (head != kHugePage) munmap(aligned + bytes, kHugePage - head);
  madvise(aligned, bytes, MADV_HUGEPAGE);  // advice only: failure is harmless
  return aligned;
}

}  // namespace

absl::StatusOr<Buffer> Buffer::Allocate(size_t bytes) {
  constexpr size_t kPage = 4096;
  if (bytes > std::numeric_limits<size_t>::max() / 2) return OutOfMemory(bytes);
  Buffer buffer;
  buffer.size_ = bytes;
  if (bytes >= kMapFrom) {
    const size_t mapped = (bytes + kAlignment + kPage - 1) / kPage * kPage;
    std::byte* data = MapAligned(mapped);
    if (data == nullptr) return OutOfMemory(bytes);
    buffer.mutable_data_ = data;
    buffer.owner_ =
        std::shared_ptr<const void>(data, [mapped](const void* p) { munmap(const_cast<void*>(p), mapped); });
  } else {
    const size_t padded = (bytes + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
    void* data = std::aligned_alloc(kAlignment, padded);
    if (data == nullptr) return OutOfMemory(bytes);
    std::memset(data, 0, padded);
    buffer.mutable_data_ = static_cast<std::byte*>(data);
    buffer.owner_ = std::shared_ptr<const void>(data, [](const void* p) { std::free(const_cast<void*>(p)); });
  }
  buffer.data_ = buffer.mutable_data_;
  return buffer;
}

Buffer Buffer::Borrow(absl::Span<const std::byte> data, std::shared_ptr<const void> owner) {
  Buffer buffer;
  buffer.data_ = data.data();
  buffer.size_ = data.size();
  buffer.owner_ = std::move(owner);
  return buffer;
}

}  // namespace spmmd
