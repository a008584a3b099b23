#include "kernels/format/container.h"

#include <xxhash.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/file_io.h"

namespace spmmd {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian and read in place");

constexpr char kMagic[8] = {'\x89', 'S', 'P', 'M', 'M', 'P', 'K', '\n'};
constexpr uint32_t kContainerVersion = 1;
constexpr size_t kPage = 4096;

struct FileHeader {
  char magic[8];
  uint32_t container_version;
  uint32_t header_bytes;
  uint64_t file_bytes;
  uint64_t header_xxh3;
  uint32_t section_count;
  uint32_t metadata_count;
  uint64_t metadata_bytes;
  uint8_t format;
  uint8_t dtype;
  uint16_t zero;
  uint32_t layout_version;
  int64_t m;
  int64_t k;
  int64_t nnz;
  int64_t params[8];
  uint8_t reserved[16];
};
static_assert(sizeof(FileHeader) == 160 && std::is_trivially_copyable_v<FileHeader>);

enum class SectionRole : uint8_t { kLayer = 0, kBias = 1 };

struct SectionEntry {
  uint32_t id;
  uint8_t section_class;
  uint8_t role;
  uint16_t zero;
  uint64_t offset;
  uint64_t size;
  uint64_t padding;
  uint64_t xxh3;
};
static_assert(sizeof(SectionEntry) == 40 && std::is_trivially_copyable_v<SectionEntry>);

constexpr uint64_t kMaxSectionBytes = uint64_t{1} << 48;  // far above kMaxElements; keeps sums in range

constexpr uint64_t RoundUpToPage(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
// What a section of `size` bytes occupies: itself, the readable zeros that Buffer promises, and zeros to the boundary.
constexpr uint64_t ExtentOf(uint64_t size) { return RoundUpToPage(size + Buffer::kAlignment); }

uint64_t HashHeader(absl::Span<const std::byte> header) {
  // Streaming, to take the checksum field as zero without copying the header.
  XXH3_state_t* state = XXH3_createState();
  XXH3_64bits_reset(state);
  constexpr size_t kField = offsetof(FileHeader, header_xxh3);
  const uint64_t zero = 0;
  XXH3_64bits_update(state, header.data(), kField);
  XXH3_64bits_update(state, &zero, sizeof(zero));
  XXH3_64bits_update(state, header.data() + kField + sizeof(zero), header.size() - kField - sizeof(zero));
  const uint64_t hash = XXH3_64bits_digest(state);
  XXH3_freeState(state);
  return hash;
}

uint64_t HashSection(absl::Span<const std::byte> data, absl::Span<const std::byte> zeros) {
  XXH3_state_t* state = XXH3_createState();
  XXH3_64bits_reset(state);
  if (!data.empty()) XXH3_64bits_update(state, data.data(), data.size());
  XXH3_64bits_update(state, zeros.data(), zeros.size());
  const uint64_t hash = XXH3_64bits_digest(state);
  XXH3_freeState(state);
  return hash;
}

// The zeros behind a section: at most kPage - 1 + kAlignment of them.
absl::Span<const std::byte> Zeros(size_t count) {
  static constexpr std::byte kZeros[kPage + Buffer::kAlignment] = {};
  return {kZeros, count};
}

void Append(std::vector<std::byte>* out, const void* data, size_t size) {
  const auto* bytes = static_cast<const std::byte*>(data);
  out->insert(out->end(), bytes, bytes + size);
}

absl::Status ParseMetadata(absl::Span<const std::byte> bytes, uint32_t count,
                           std::map<std::string, std::string>* metadata) {
  const auto take = [&bytes](size_t size) {
    const absl::string_view piece(reinterpret_cast<const char*>(bytes.data()), size);
    bytes.remove_prefix(size);
    return piece;
  };
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t sizes[2];
    if (bytes.size() < sizeof(sizes)) return absl::DataLossError("metadata: cut off");
    std::memcpy(sizes, bytes.data(), sizeof(sizes));
    bytes.remove_prefix(sizeof(sizes));
    if (uint64_t{sizes[0]} + sizes[1] > bytes.size()) return absl::DataLossError("metadata: cut off");
    const absl::string_view key = take(sizes[0]);
    const absl::string_view value = take(sizes[1]);
    if (!metadata->empty() && key <= metadata->rbegin()->first) {
      return absl::DataLossError("metadata: keys are not in ascending order");
    }
    metadata->emplace_hint(metadata->end(), key, value);
  }
  if (!bytes.empty()) return absl::DataLossError("metadata: more bytes than entries");
  return absl::OkStatus();
}

// Everything in the header that does not need the sections.
absl::StatusOr<FileHeader> CheckHeader(absl::Span<const std::byte> bytes) {
  FileHeader header;
  if (bytes.size() < sizeof(kMagic) || std::memcmp(bytes.data(), kMagic, sizeof(kMagic)) != 0) {
    return absl::InvalidArgumentError("not a packed-layer file: wrong magic");
  }
  if (bytes.size() < sizeof(header)) return absl::DataLossError("header: file is cut off");
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.container_version != kContainerVersion) {
    return absl::InvalidArgumentError(absl::StrCat("container version ", header.container_version,
                                                   " is not supported: this build reads version ", kContainerVersion));
  }
  if (header.file_bytes != bytes.size()) {
    return absl::DataLossError(
        absl::StrCat("file has ", bytes.size(), " bytes where its header says ", header.file_bytes));
  }
  if (header.section_count < 1 || header.section_count > kMaxContainerSections ||
      header.metadata_bytes > kMaxContainerMetadataBytes ||
      header.header_bytes !=
          RoundUpToPage(sizeof(FileHeader) + header.section_count * sizeof(SectionEntry) + header.metadata_bytes) ||
      header.header_bytes > bytes.size()) {
    return absl::DataLossError("header: inconsistent sizes");
  }
  if (HashHeader(bytes.first(header.header_bytes)) != header.header_xxh3) {
    return absl::DataLossError("header: checksum mismatch");
  }
  const auto format = static_cast<Format>(header.format);
  const auto dtype = static_cast<DType>(header.dtype);
  if (!IsValid(format)) return absl::InvalidArgumentError(absl::StrCat("format ", header.format, " is unknown"));
  if (!IsValid(dtype)) return absl::InvalidArgumentError(absl::StrCat("dtype ", header.dtype, " is unknown"));
  SPMMD_RETURN_IF_ERROR(CheckShape(header.m, header.k));
  if (header.nnz < 0 || header.nnz > header.m * header.k) {
    return absl::DataLossError(absl::StrCat("header: nnz ", header.nnz, " is out of range"));
  }
  return header;
}

}  // namespace

absl::Status WriteLayerFile(const std::string& path, const LayerFile& file) {
  const PackedLayer& layer = file.layer;
  if (!file.bias.empty() && file.bias.size() != static_cast<size_t>(layer.m)) {
    return absl::InvalidArgumentError(
        absl::StrCat("bias has ", file.bias.size(), " elements where the layer has ", layer.m, " rows"));
  }
  const size_t section_count = layer.sections.size() + (file.bias.empty() ? 0 : 1);
  if (section_count < 1 || section_count > kMaxContainerSections) {
    return absl::InvalidArgumentError(
        absl::StrCat("sections: ", section_count, " where a file holds 1 to ", kMaxContainerSections));
  }
  std::vector<std::byte> metadata;
  for (const auto& [key, value] : file.metadata) {
    if (key.size() + value.size() > kMaxContainerMetadataBytes) {
      return absl::InvalidArgumentError(absl::StrCat("metadata exceeds ", kMaxContainerMetadataBytes, " bytes"));
    }
    const uint32_t sizes[2] = {static_cast<uint32_t>(key.size()), static_cast<uint32_t>(value.size())};
    Append(&metadata, sizes, sizeof(sizes));
    Append(&metadata, key.data(), key.size());
    Append(&metadata, value.data(), value.size());
    if (metadata.size() > kMaxContainerMetadataBytes) {
      return absl::InvalidArgumentError(absl::StrCat("metadata exceeds ", kMaxContainerMetadataBytes, " bytes"));
    }
  }

  FileHeader header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.container_version = kContainerVersion;
  header.section_count = static_cast<uint32_t>(section_count);
  header.metadata_count = static_cast<uint32_t>(file.metadata.size());
  header.metadata_bytes = metadata.size();
  header.format = static_cast<uint8_t>(layer.format);
  header.dtype = static_cast<uint8_t>(layer.dtype);
  header.layout_version = layer.layout_version;
  header.m = layer.m;
  header.k = layer.k;
  header.nnz = layer.nnz;
  std::memcpy(header.params, layer.params.data(), sizeof(header.params));
  header.header_bytes =
      static_cast<uint32_t>(RoundUpToPage(sizeof(FileHeader) + section_count * sizeof(SectionEntry) + metadata.size()));

  std::vector<SectionEntry> entries;
  std::vector<absl::Span<const std::byte>> pieces(1);  // the header comes first, once it is complete
  uint64_t offset = header.header_bytes;
  const auto add = [&](SectionRole role, uint32_t id, SectionClass section_class, size_t padding,
                       absl::Span<const std::byte> data) {
    const uint64_t extent = ExtentOf(data.size());
    const absl::Span<const std::byte> zeros = Zeros(extent - data.size());
    entries.push_back({id, static_cast<uint8_t>(section_class), static_cast<uint8_t>(role), 0, offset, data.size(),
                       padding, HashSection(data, zeros)});
    pieces.push_back(data);
    pieces.push_back(zeros);
    offset += extent;
  };
  for (const Section& section : layer.sections) {
    add(SectionRole::kLayer, section.id, section.section_class, section.padding,
        {section.data.data(), section.data.size()});
  }
  if (!file.bias.empty()) {
    add(SectionRole::kBias, 0, SectionClass::kValues, 0,
        {reinterpret_cast<const std::byte*>(file.bias.data()), file.bias.size() * sizeof(float)});
  }
  header.file_bytes = offset;

  std::vector<std::byte> head;
  head.reserve(header.header_bytes);
  Append(&head, &header, sizeof(header));
  Append(&head, entries.data(), entries.size() * sizeof(SectionEntry));
  Append(&head, metadata.data(), metadata.size());
  head.resize(header.header_bytes);
  header.header_xxh3 = HashHeader(head);
  std::memcpy(head.data(), &header, sizeof(header));
  pieces[0] = head;
  return WriteFileAtomically(path, pieces);
}

absl::StatusOr<LayerFile> ParseLayerFile(absl::Span<const std::byte> bytes, const std::shared_ptr<const void>& owner) {
  if (reinterpret_cast<uintptr_t>(bytes.data()) % Buffer::kAlignment != 0) {
    return absl::InvalidArgumentError(absl::StrCat("bytes are not ", Buffer::kAlignment, "-byte aligned"));
  }
  SPMMD_ASSIGN_OR_RETURN(const FileHeader header, CheckHeader(bytes));
  std::vector<SectionEntry> entries(header.section_count);
  const size_t table_bytes = entries.size() * sizeof(SectionEntry);
  std::memcpy(entries.data(), bytes.data() + sizeof(FileHeader), table_bytes);

  LayerFile file;
  SPMMD_RETURN_IF_ERROR(ParseMetadata(bytes.subspan(sizeof(FileHeader) + table_bytes, header.metadata_bytes),
                                      header.metadata_count, &file.metadata));
  PackedLayer& layer = file.layer;
  layer.format = static_cast<Format>(header.format);
  layer.layout_version = header.layout_version;
  layer.dtype = static_cast<DType>(header.dtype);
  layer.m = header.m;
  layer.k = header.k;
  layer.nnz = header.nnz;
  std::memcpy(layer.params.data(), header.params, sizeof(header.params));

  std::set<uint32_t> ids;
  uint64_t expected_offset = header.header_bytes;
  for (size_t i = 0; i < entries.size(); ++i) {
    const SectionEntry& entry = entries[i];
    const std::string label = absl::StrCat("section ", i, " (id ", entry.id, "): ");
    if (entry.offset != expected_offset || entry.size > kMaxSectionBytes || entry.padding > entry.size) {
      return absl::DataLossError(absl::StrCat(label, "inconsistent offset or size"));
    }
    const uint64_t extent = ExtentOf(entry.size);
    if (extent > bytes.size() - expected_offset) return absl::DataLossError(absl::StrCat(label, "outside the file"));
    expected_offset += extent;
    if (XXH3_64bits(bytes.data() + entry.offset, extent) != entry.xxh3) {
      return absl::DataLossError(absl::StrCat(label, "checksum mismatch"));
    }
    const absl::Span<const std::byte> data = bytes.subspan(entry.offset, entry.size);
    if (entry.role == static_cast<uint8_t>(SectionRole::kBias)) {
      if (!file.bias.empty() || entry.size != static_cast<uint64_t>(layer.m) * sizeof(float)) {
        return absl::DataLossError(absl::StrCat(label, "bias has the wrong size or comes twice"));
      }
      file.bias.resize(static_cast<size_t>(layer.m));
      std::memcpy(file.bias.data(), data.data(), data.size());
      continue;
    }
    const auto section_class = static_cast<SectionClass>(entry.section_class);
    if (entry.role != static_cast<uint8_t>(SectionRole::kLayer) ||
        (section_class != SectionClass::kValues && section_class != SectionClass::kMetadata)) {
      return absl::DataLossError(absl::StrCat(label, "unknown role or class"));
    }
    if (!ids.insert(entry.id).second) return absl::DataLossError(absl::StrCat(label, "id comes twice"));
    layer.sections.push_back({entry.id, section_class, entry.padding, Buffer::Borrow(data, owner)});
  }
  if (expected_offset != bytes.size()) return absl::DataLossError("file has bytes behind its last section");
  SPMMD_RETURN_IF_ERROR(Validate(layer));
  return file;
}

absl::StatusOr<LayerFile> ReadLayerFile(const std::string& path) {
  SPMMD_ASSIGN_OR_RETURN(const std::shared_ptr<const MappedFile> mapped, MappedFile::Open(path));
  absl::StatusOr<LayerFile> file = ParseLayerFile(mapped->bytes(), mapped);
  if (!file.ok()) return absl::Status(file.status().code(), absl::StrCat(path, ": ", file.status().message()));
  return file;
}

}  // namespace spmmd
