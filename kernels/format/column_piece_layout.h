// Byte layout of the COLUMN_PIECE format and its checks, shared by the packer, libspmmd_cuda.so and device code. No
// Abseil.
#ifndef SPMMD_KERNELS_FORMAT_COLUMN_PIECE_LAYOUT_H_
#define SPMMD_KERNELS_FORMAT_COLUMN_PIECE_LAYOUT_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace spmmd::column_piece {

inline constexpr uint32_t kLayoutVersion = 2;
inline constexpr int kStreams = 8;                             // lanes that share a column
inline constexpr int kStreamRows = 64;                         // rows of one stream
inline constexpr int kBlockRows = 512;                         // rows of a piece
inline constexpr int kBitmapBytes = 64;                        // of a piece: 8 bytes a stream
inline constexpr int kUnitValues = 4;                          // values a stream that one unit of a piece holds
inline constexpr int kUnitBytes = kStreams * kUnitValues * 2;  // also of descriptor offsets
inline constexpr int kMaxUnits = kStreamRows / kUnitValues;
inline constexpr int kMaxBorrowed = 5;  // values of a stream that may lie in another's places
static_assert(kBitmapBytes == kUnitBytes);

// Section ids.
inline constexpr uint32_t kPieceSection = 1;       // pieces, by row block, then column; empty columns take no bytes
inline constexpr uint32_t kDescriptorSection = 2;  // Descriptor [block][K]
inline constexpr uint32_t kBlockSection = 3;       // uint64 [blocks + 1]: first unit of the block's pieces

// Indices into PackedLayer::params.
inline constexpr int kParamMaxUnits = 0;  // most units of any piece

// Row inside the block of element d (0..63) of stream g (0..7): the order in which the tensor core's A fragment takes
// a column's elements, eight of a stream an instruction.
constexpr int Row(int stream, int d) {
  const int pair = d % 8 / 2;
  return d / 8 * 64 + (stream + 8 * (pair & 1)) * 4 + 2 * (pair >> 1) + (d & 1);
}
// Bit of element d in the stream's word d / 32: four neighbouring elements lie in four bytes.
constexpr int Bit(int d) { return d % 4 * 8 + d % 32 / 4; }

// Every stream of a piece has the same number of places, about the mean of the streams' lengths, rounded up to whole
// units. What a longer stream has beyond them (its tail, at most kMaxBorrowed values) lies behind the values of a
// shorter one, its lender. A stream lends to one other at most; one without a tail is its own lender.
struct Descriptor {
  uint32_t piece;    // first unit in the block's pieces << 5 | units of places
  uint32_t lenders;  // 3 bits a stream, stream 0 lowest
};

constexpr uint32_t EncodePiece(uint64_t unit, int units) {
  return static_cast<uint32_t>(unit << 5) | static_cast<uint32_t>(units);
}
constexpr uint32_t PieceUnit(uint32_t piece) { return piece >> 5; }
constexpr int PlaceUnits(uint32_t piece) { return static_cast<int>(piece & 31); }
constexpr int Lender(uint32_t lenders, int stream) { return static_cast<int>(lenders >> (3 * stream) & 7); }
inline constexpr uint32_t kNoTails = 0xfac688;  // every stream its own lender
inline constexpr uint64_t kMaxBlockUnits = uint64_t{1} << 27;

// Units of a whole piece: its bitmap takes one.
constexpr uint64_t PieceUnits(int units) { return units == 0 ? 0 : static_cast<uint64_t>(units) + 1; }

// Byte offset inside a piece of place i of a stream. Units pair up to rows of eight places a stream, which a lane loads
// at once; an odd last unit stands alone.
constexpr int PlaceOffset(int stream, int i, int units) {
  const int rows = units / 2;
  if (i / 8 < rows) return kBitmapBytes + i / 8 * 128 + stream * 16 + i % 8 * 2;
  return kBitmapBytes + rows * 128 + stream * 8 + (i - 8 * rows) * 2;
}

struct View {
  int64_t m = 0;
  int64_t k = 0;
  int64_t nnz = 0;
  int64_t blocks = 0;
  int max_units = 0;
  const std::byte* pieces = nullptr;
  const Descriptor* descriptors = nullptr;
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
  if (params[kParamMaxUnits] < 0 || params[kParamMaxUnits] > kMaxUnits) return "units out of range";
  view->max_units = static_cast<int>(params[kParamMaxUnits]);
  if (descriptor_bytes != static_cast<size_t>(view->blocks * k) * sizeof(Descriptor)) {
    return "section descriptors has the wrong size";
  }
  if (block_bytes != static_cast<size_t>(view->blocks + 1) * 8) return "section blocks has the wrong size";
  view->pieces = static_cast<const std::byte*>(pieces);
  view->descriptors = static_cast<const Descriptor*>(descriptors);
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
// does not continue the one before, a stream has more bits than places and tail hold or bits in rows past M, or a
// tail is not where a shorter stream has room for it alone.
template <typename Sink>
bool DecodeBlock(const View& view, int64_t block, int64_t* count, Sink sink) {
  uint64_t unit = 0;
  const uint64_t end = view.block_units[block + 1] - view.block_units[block];
  for (int64_t column = 0; column < view.k; ++column) {
    const Descriptor descriptor = view.descriptors[block * view.k + column];
    const int units = PlaceUnits(descriptor.piece);
    if (units > view.max_units || PieceUnit(descriptor.piece) != unit || unit + PieceUnits(units) > end ||
        descriptor.lenders >> (3 * kStreams) != 0) {
      return false;
    }
    const std::byte* piece = view.pieces + (view.block_units[block] + unit) * kUnitBytes;
    unit += PieceUnits(units);
    if (units == 0) {
      if (descriptor.lenders != kNoTails) return false;
      continue;
    }
    const int places = units * kUnitValues;
    uint32_t bits[kStreams][2];
    std::memcpy(bits, piece, kBitmapBytes);
    int length[kStreams];
    for (int stream = 0; stream < kStreams; ++stream) {
      length[stream] = std::popcount(bits[stream][0]) + std::popcount(bits[stream][1]);
    }
    uint32_t lending = 0;
    for (int stream = 0; stream < kStreams; ++stream) {
      const int lender = Lender(descriptor.lenders, stream);
      const int borrowed = length[stream] - places;
      if (borrowed <= 0) {
        if (lender != stream) return false;
      } else {
        if (borrowed > kMaxBorrowed || length[lender] + borrowed > places || (lending >> lender & 1) != 0) return false;
        lending |= 1u << lender;
      }
      int i = 0;
      for (int d = 0; d < kStreamRows; ++d) {
        if ((bits[stream][d / 32] >> Bit(d) & 1) == 0) continue;
        const int64_t row = block * kBlockRows + Row(stream, d);
        if (row >= view.m) return false;
        const int offset =
            i < places ? PlaceOffset(stream, i, units) : PlaceOffset(lender, length[lender] + i - places, units);
        ++i;
        uint16_t value;
        std::memcpy(&value, piece + offset, 2);
        ++*count;
        sink(row, column, value);
      }
    }
  }
  return unit == end;
}

}  // namespace spmmd::column_piece

#endif  // SPMMD_KERNELS_FORMAT_COLUMN_PIECE_LAYOUT_H_
