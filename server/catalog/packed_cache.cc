#include "server/catalog/packed_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/format/container.h"
#include "kernels/format/file_io.h"

namespace spmmd::server {
namespace {

constexpr char kKeyField[] = "spmmd.cache_key";
constexpr char kReasonField[] = "spmmd.format_reason";
constexpr absl::string_view kLayerSuffix = ".spmmd";
constexpr absl::string_view kCorruptSuffix = ".spmmd.corrupt";
constexpr absl::string_view kSourceSuffix = ".source";
constexpr uint64_t kPage = 4096;
constexpr size_t kHashDigits = 32;

std::string Hash(absl::string_view text) {
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return absl::StrCat(absl::Hex(hash.high64, absl::kZeroPad16), absl::Hex(hash.low64, absl::kZeroPad16));
}

// Every field has its length before it, so that no two keys have one text.
std::string HashOf(const PackedCache::Key& key) {
  return Hash(absl::StrCat(key.content.size(), ":", key.content, key.backend.size(), ":", key.backend, key.shard, "/",
                           key.shards));
}

// What the file of a layer takes: see container.h.
uint64_t FileBytes(const StoredLayer& part, absl::string_view format_reason) {
  const auto pages = [](uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; };
  // The fixed part of the header, an entry a section, and the metadata: keys, a hash and the reason.
  uint64_t bytes = pages(160 + 40 * (part.packed.sections.size() + 1) + 128 + format_reason.size());
  for (const Section& section : part.packed.sections) bytes += pages(section.data.size() + Buffer::kAlignment);
  if (!part.bias.empty()) bytes += pages(part.bias.size() * sizeof(float) + Buffer::kAlignment);
  return bytes;
}

// Has the file read ahead in large pieces, which page faults in a mapping would not.
void ReadAhead(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  posix_fadvise(file, 0, 0, POSIX_FADV_WILLNEED);
  close(file);
}

std::string NameOf(const PackedCache::Key& key) { return absl::StrCat(HashOf(key), kLayerSuffix); }

}  // namespace

PackedCache::PackedCache(std::string directory, uint64_t limit_bytes, Metrics* metrics)
    : directory_(std::move(directory)), limit_bytes_(limit_bytes), metrics_(metrics) {
  {
    absl::MutexLock lock(&mutex_);
    Scan();
    MakeRoom(0);
  }
  metrics_->SetSource(Metrics::Gauge::kCacheBytes, [this] { return bytes(); });
}

PackedCache::~PackedCache() { metrics_->SetSource(Metrics::Gauge::kCacheBytes, nullptr); }

std::string PackedCache::InDirectory(absl::string_view name) const { return absl::StrCat(directory_, "/", name); }

std::string PackedCache::PathOf(const Key& key) const { return InDirectory(NameOf(key)); }

void PackedCache::Scan() {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory_, error)) {
    const std::string name = entry.path().filename().string();
    const bool ours = absl::EndsWith(name, kLayerSuffix) || absl::EndsWith(name, kCorruptSuffix) ||
                      absl::EndsWith(name, kSourceSuffix);
    if (ours) Index(name);
  }
}

void PackedCache::Index(const std::string& name) {
  struct stat info = {};
  if (stat(InDirectory(name).c_str(), &info) != 0 || !S_ISREG(info.st_mode)) {
    Forget(name);
    return;
  }
  File& file = files_[name];
  bytes_ += static_cast<uint64_t>(info.st_size) - file.bytes;
  file.bytes = static_cast<uint64_t>(info.st_size);
  file.used = static_cast<int64_t>(info.st_mtim.tv_sec) * 1'000'000'000 + info.st_mtim.tv_nsec;
  file.corrupt = absl::EndsWith(name, kCorruptSuffix);
}

void PackedCache::Forget(const std::string& name) {
  const auto file = files_.find(name);
  if (file == files_.end()) return;
  bytes_ -= file->second.bytes;
  // Whoever holds a file that somebody deleted lets go of it later.
  if (file->second.holds > 0) {
    file->second.bytes = 0;
  } else {
    files_.erase(file);
  }
}

bool PackedCache::MakeRoom(uint64_t bytes) {
  if (limit_bytes_ == 0) return true;
  if (bytes_ + bytes <= limit_bytes_) return true;
  std::vector<std::pair<std::pair<bool, int64_t>, std::string>> oldest;
  uint64_t held = 0;
  for (const auto& [name, file] : files_) {
    if (file.holds > 0) {
      held += file.bytes;
    } else {
      oldest.push_back({{!file.corrupt, file.used}, name});
    }
  }
  // Nothing goes for what does not fit anyway.
  if (held + bytes > limit_bytes_) return false;
  std::sort(oldest.begin(), oldest.end());
  for (const auto& [order, name] : oldest) {
    if (bytes_ + bytes <= limit_bytes_) break;
    std::remove(InDirectory(name).c_str());
    Forget(name);
    metrics_->CacheEvent("evict");
  }
  return bytes_ + bytes <= limit_bytes_;
}

std::optional<PackedCache::Entry> PackedCache::Find(const Key& key) {
  const std::string name = NameOf(key);
  const std::string path = InDirectory(name);
  ReadAhead(path);
  absl::StatusOr<LayerFile> file = ReadLayerFile(path);
  if (file.ok() && file->metadata[kKeyField] == HashOf(key)) {
    utimensat(AT_FDCWD, path.c_str(), nullptr, 0);  // now
    absl::MutexLock lock(&mutex_);
    Index(name);
    metrics_->CacheEvent("hit");
    return Entry{{std::move(file->layer), std::move(file->bias)}, file->metadata[kReasonField]};
  }
  absl::MutexLock lock(&mutex_);
  if (absl::IsNotFound(file.status())) {
    metrics_->CacheEvent("miss");
  } else {
    metrics_->CacheEvent("corrupt");
    if (std::rename(path.c_str(), absl::StrCat(path, ".corrupt").c_str()) == 0) Index(absl::StrCat(name, ".corrupt"));
  }
  Forget(name);
  return std::nullopt;
}

bool PackedCache::Contains(const Key& key) const {
  absl::MutexLock lock(&mutex_);
  const auto file = files_.find(NameOf(key));
  return file != files_.end() && file->second.bytes > 0;
}

absl::Status PackedCache::Store(const Key& key, const StoredLayer& part, const std::string& format_reason) {
  const std::string name = NameOf(key);
  const uint64_t bytes = FileBytes(part, format_reason);
  {
    absl::MutexLock lock(&mutex_);
    if (!MakeRoom(bytes)) {
      return absl::ResourceExhaustedError(absl::StrCat("packed cache: needed ", bytes, " bytes, the limit is ",
                                                       limit_bytes_, " and what is held cannot go"));
    }
    // Taken before it is written, so that two writers do not take the same room.
    File& file = files_[name];
    bytes_ += bytes - file.bytes;
    file.bytes = bytes;
    ++file.holds;
  }
  LayerFile file;
  file.layer = part.packed;
  file.bias = part.bias;
  file.metadata[kKeyField] = HashOf(key);
  file.metadata[kReasonField] = format_reason;
  absl::Status written = WriteLayerFile(InDirectory(name), file);
  if (written.ok()) metrics_->CacheEvent("store");
  absl::MutexLock lock(&mutex_);
  --files_[name].holds;
  Index(name);
  return written;
}

bool PackedCache::Hold(const Key& key) {
  absl::MutexLock lock(&mutex_);
  const std::string name = NameOf(key);
  Index(name);
  const auto file = files_.find(name);
  if (file == files_.end() || file->second.bytes == 0) return false;
  ++file->second.holds;
  return true;
}

void PackedCache::Release(const Key& key) {
  absl::MutexLock lock(&mutex_);
  const auto file = files_.find(NameOf(key));
  if (file == files_.end() || file->second.holds == 0) return;
  if (--file->second.holds == 0 && file->second.bytes == 0) files_.erase(file);
}

std::optional<std::string> PackedCache::FindSource(absl::string_view identity) const {
  std::ifstream file(InDirectory(absl::StrCat(Hash(identity), kSourceSuffix)), std::ios::binary);
  std::string xxh3(kHashDigits, '\0');
  std::string rest(identity.size() + 1, '\0');
  file.read(xxh3.data(), static_cast<std::streamsize>(xxh3.size()));
  file.read(rest.data(), static_cast<std::streamsize>(rest.size()));
  // The identity stands in the file too: a hash alone is no proof, and neither is half a file.
  if (static_cast<size_t>(file.gcount()) != identity.size() || rest.substr(0, identity.size()) != identity) {
    return std::nullopt;
  }
  return xxh3;
}

void PackedCache::StoreSource(absl::string_view identity, absl::string_view xxh3) {
  const std::string name = absl::StrCat(Hash(identity), kSourceSuffix);
  const std::string text = absl::StrCat(xxh3, identity);
  {
    absl::MutexLock lock(&mutex_);
    if (!MakeRoom(text.size())) return;
  }
  const std::array<absl::Span<const std::byte>, 1> pieces = {
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(text.data()), text.size())};
  // Without it the next start reads the source.
  WriteFileAtomically(InDirectory(name), pieces).IgnoreError();
  absl::MutexLock lock(&mutex_);
  Index(name);
}

uint64_t PackedCache::bytes() const {
  absl::MutexLock lock(&mutex_);
  return bytes_;
}

}  // namespace spmmd::server
