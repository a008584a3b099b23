// Byte layout of the COLUMN_PIECE format and its checks, shared by the packer, libspmmd_cuda.so and device code. No
// Abseil.
#ifndef SPMMD_KERNELS_FORMAT_COLUMN_PIECE_LAYOUT_H_
#define SPMMD_KERNELS_FORMAT_COLUMN_PIECE_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace spmmd::column_piece {

inline constexpr uint32_t kLayoutVersion = 1;
inline constexpr int kStreams = 8;       // lanes that share a column
inline constexpr int kStreamRows = 64;   // rows of one stream
inline constexpr int kBlockRows = 512;   // rows of a piece
inline constexpr int kBitmapBytes = 64;  // of a piece: 8 bytes a stream
inline constexpr int kChunkValues = 4;   // values a stream that one chunk of a piece holds
inline constexpr int kChunkBytes = kStreams * kChunkValues * 2;
inline constexpr int kMaxChunks = kStreamRows / kChunkValues;
inline constexpr int kUnitBytes = 32;  // of descriptor offsets

// Section ids.
inline constexpr uint32_t kPieceSection = 1;       // pieces, by row block, then column; empty columns take no bytes
inline constexpr uint32_t kDescriptorSection = 2;  // uint32 [block][K]: offset << 5 | chunks
inline constexpr uint32_t kBlockSection = 3;       // uint64 [blocks + 1]: first unit of the block's pieces

// Indices into PackedLayer::params.
inline constexpr int kParamMaxChunks = 0;  // most chunks of any piece

// Row inside the block of element d (0..63) of stream g (0..7): the order in which the tensor core's A fragment takes
// a column's elements, eight of a stream an instruction.
constexpr int Row(int stream, int d) {
  const int pair = d % 8 / 2;
  return d / 8 * 64 + (stream + 8 * (pair & 1)) * 4 + 2 * (pair >> 1) + (d & 1);
}
// Bit of element d in the stream's word d / 32: four neighbouring elements lie in four bytes.
constexpr int Bit(int d) { return d % 4 * 8 + d % 32 / 4; }

constexpr uint32_t Descriptor(uint64_t offset_units, int chunks) {
  return static_cast<uint32_t>(offset_units << 5) | static_cast<uint32_t>(chunks);
}
constexpr uint32_t DescriptorOffset(uint32_t descriptor) { return descriptor >> 5; }
constexpr int DescriptorChunks(uint32_t descriptor) { return static_cast<int>(descriptor & 31); }
inline constexpr uint64_t kMaxBlockUnits = uint64_t{1} << 27;

constexpr uint64_t PieceUnits(int chunks) {
  return chunks == 0 ? 0 : static_cast<uint64_t>(kBitmapBytes + chunks * kChunkBytes) / kUnitBytes;
}

// Byte offset inside a piece of value i of a stream. Chunks pair up so that a lane loads eight values of its stream at
// once; an odd last chunk stands alone.
constexpr int ValueOffset(int stream, int i, int chunks) {
  const int pairs = chunks / 2;
  if (i / 8 < pairs) return kBitmapBytes + i / 8 * 128 + stream * 16 + i % 8 * 2;
  return kBitmapBytes + pairs * 128 + stream * 8 + (i - 8 * pairs) * 2;
}

struct View {
  int64_t m = 0;
  int64_t k = 0;
  int64_t nnz = 0;
  int64_t blocks = 0;
  int max_chunks = 0;
  const std::byte* pieces = nullptr;
  const uint32_t* descriptors = nullptr;
  const uint64_t* block_units = nullptr;
};

// Section sizes and the block table. Null, or what is wrong.
inline const char* Open(int64_t m, int64_t k, int64_t nnz, const int64_t params[8], const void* pieces,
                        size_t piece_bytes, const void* descriptors, size_t descriptor_bytes, const void* block_units,
                        size_t block_bytes, View* view) {
  view->m = m;
  view->k = k;
  view->nnz = nnz;
  view->blocks = (m + kBlockRows - 1) / kBlockRows;
  if (params[kParamMaxChunks] < 0 || params[kParamMaxChunks] > kMaxChunks) return "chunks out of range";
  view->max_chunks = static_cast<int>(params[kParamMaxChunks]);
  if (descriptor_bytes != static_cast<size_t>(view->blocks * k) * 4) return "section descriptors has the wrong size";
  if (block_bytes != static_cast<size_t>(view->blocks + 1) * 8) return "section blocks has the wrong size";
  view->pieces = static_cast<const std::byte*>(pieces);
  view->descriptors = static_cast<const uint32_t*>(descriptors);
  view->block_units = static_cast<const uint64_t*>(block_units);
  const uint64_t units = piece_bytes / kUnitBytes;
  if (piece_bytes % kUnitBytes != 0 || view->block_units[0] != 0 || view->block_units[view->blocks] != units) {
    return "section pieces has the wrong size";
  }
  for (int64_t b = 0; b < view->blocks; ++b) {
    const uint64_t begin = view->block_units[b];
    const uint64_t end = view->block_units[b + 1];
    if (end < begin || end > units || end - begin > kMaxBlockUnits) return "section blocks: offsets out of order";
  }
  return nullptr;
}

// Decodes row block `block`: sink(row, column, bits) for every nonzero; counts them in *count. False when a descriptor
// does not continue the one before, or a stream has more bits than its chunks hold or bits in rows past M.
template <typename Sink>
bool DecodeBlock(const View& view, int64_t block, int64_t* count, Sink sink) {
  uint64_t unit = 0;
  const uint64_t end = view.block_units[block + 1] - view.block_units[block];
  for (int64_t column = 0; column < view.k; ++column) {
    const uint32_t descriptor = view.descriptors[block * view.k + column];
    const int chunks = DescriptorChunks(descriptor);
    if (chunks > view.max_chunks || DescriptorOffset(descriptor) != unit || unit + PieceUnits(chunks) > end) {
      return false;
    }
    const std::byte* piece = view.pieces + (view.block_units[block] + unit) * kUnitBytes;
    unit += PieceUnits(chunks);
    if (chunks == 0) continue;
    for (int stream = 0; stream < kStreams; ++stream) {
      uint32_t bits[2];
      std::memcpy(bits, piece + stream * 8, 8);
      int i = 0;
      for (int d = 0; d < kStreamRows; ++d) {
        if ((bits[d / 32] >> Bit(d) & 1) == 0) continue;
        const int64_t row = block * kBlockRows + Row(stream, d);
        if (i == chunks * kChunkValues || row >= view.m) return false;
        uint16_t value;
        std::memcpy(&value, piece + ValueOffset(stream, i++, chunks), 2);
        ++*count;
        sink(row, column, value);
      }
    }
  }
  return unit == end;
}

}  // namespace spmmd::column_piece

#endif  // SPMMD_KERNELS_FORMAT_COLUMN_PIECE_LAYOUT_H_
