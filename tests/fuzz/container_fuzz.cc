// The packed-file reader. Mutated files rarely have the right checksums, so every input is read twice: as it is, and
// with its checksums made right (offsets as in container.h), which lets mutations through to what lies behind them.
#include <xxhash.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "kernels/base/thread_pool.h"
#include "kernels/format/container.h"

namespace {

constexpr size_t kHeaderBytesOffset = 12;
constexpr size_t kFileBytesOffset = 16;
constexpr size_t kHeaderHashOffset = 24;
constexpr size_t kSectionCountOffset = 32;
constexpr size_t kTableOffset = 160;
constexpr size_t kEntryBytes = 40;
constexpr size_t kPage = 4096;

template <typename T>
T Get(const std::byte* data) {
  T value;
  std::memcpy(&value, data, sizeof(value));
  return value;
}

void Seal(std::byte* data, size_t size) {
  if (size < kTableOffset) return;
  const uint64_t file_bytes = size;
  std::memcpy(data + kFileBytesOffset, &file_bytes, sizeof(file_bytes));
  const auto header_bytes = Get<uint32_t>(data + kHeaderBytesOffset);
  if (header_bytes > size || header_bytes < kTableOffset) return;
  const auto sections = Get<uint32_t>(data + kSectionCountOffset);
  for (uint32_t i = 0; i < sections && kTableOffset + (i + 1) * kEntryBytes <= header_bytes; ++i) {
    std::byte* entry = data + kTableOffset + i * kEntryBytes;
    const auto offset = Get<uint64_t>(entry + 8);
    const auto bytes = Get<uint64_t>(entry + 16);
    if (offset > size || bytes > size - offset) continue;
    const uint64_t extent = (bytes + 64 + kPage - 1) / kPage * kPage;
    if (extent > size - offset) continue;
    const uint64_t hash = XXH3_64bits(data + offset, extent);
    std::memcpy(entry + 32, &hash, sizeof(hash));
  }
  std::memset(data + kHeaderHashOffset, 0, sizeof(uint64_t));
  const uint64_t hash = XXH3_64bits(data, header_bytes);
  std::memcpy(data + kHeaderHashOffset, &hash, sizeof(hash));
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  spmmd::SetDefaultThreads(1);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Exactly the file's bytes, so that AddressSanitizer sees a read behind them.
  const std::shared_ptr<std::byte> copy(static_cast<std::byte*>(std::aligned_alloc(64, (size + 63) / 64 * 64)),
                                        std::free);
  if (size != 0) std::memcpy(copy.get(), data, size);
  for (const bool sealed : {false, true}) {
    if (sealed) Seal(copy.get(), size);
    const absl::StatusOr<spmmd::LayerFile> file = spmmd::ParseLayerFile({copy.get(), size}, copy);
    if (!file.ok()) continue;
    if (file->layer.m * file->layer.k > (int64_t{1} << 22)) continue;  // valid, but slow to unpack
    if (!spmmd::Unpack(file->layer).ok()) std::abort();
  }
  return 0;
}
