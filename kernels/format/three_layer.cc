#include "kernels/format/three_layer.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_pool.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/format/three_layer.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#ifndef SPMMD_THREE_LAYER_ONCE
#define SPMMD_THREE_LAYER_ONCE
namespace spmmd::three_layer {

// A block is what four lanes hold at one step: rows g and g + 8 of a strip by 32 columns, 16 groups, 64 bytes of slots.
constexpr int64_t kTileBlocks = 128;

// The columns that W_t keeps of a group, by which of its elements are nonzero.
constexpr Pair KeptPair(unsigned mask) {
  if (std::popcount(mask) < 2) return mask > 3 ? Pair{2, 3} : Pair{0, 1};
  const int p = std::countr_zero(mask);
  return {p, std::countr_zero(mask & (mask - 1))};
}
// All about two neighbouring groups, by the nonzero mask of their eight elements.
struct alignas(32) GroupPair {
  // Byte shuffle of the eight elements: for each group the kept pair, then the complement.
  std::array<uint8_t, 16> shuffle;
  // Bits 0-1 and 8-9: surplus in the slots of W_r, first and second group. Bits 32-33 and 40-41: empty slots of W_t.
  uint64_t bits;
  uint8_t metadata;  // two nibbles
};

constexpr std::array<GroupPair, 256> MakeGroupPairs() {
  std::array<GroupPair, 256> table{};
  for (unsigned mask = 0; mask < 256; ++mask) {
    GroupPair& entry = table[mask];
    for (unsigned half = 0; half < 2; ++half) {
      const unsigned nibble = mask >> (4 * half) & 15u;
      const Pair kept = KeptPair(nibble);
      const Pair other = Complement(kept);
      const int columns[4] = {kept.p, kept.q, other.p, other.q};
      for (unsigned i = 0; i < 4; ++i) {
        const auto byte = static_cast<uint8_t>(8 * half + 2 * static_cast<unsigned>(columns[i]));
        entry.shuffle[8 * half + 2 * i] = byte;
        entry.shuffle[8 * half + 2 * i + 1] = static_cast<uint8_t>(byte + 1);
      }
      const auto has = [nibble](int column) { return static_cast<uint64_t>(nibble >> column & 1u); };
      entry.bits |= (has(other.p) | has(other.q) << 1) << (8 * half);
      entry.bits |= ((has(kept.p) ^ 1u) | (has(kept.q) ^ 1u) << 1) << (32 + 8 * half);
      entry.metadata = static_cast<uint8_t>(entry.metadata | static_cast<unsigned>(kept.p | kept.q << 2) << (4 * half));
    }
  }
  return table;
}
constexpr std::array<GroupPair, 256> kGroupPairs = MakeGroupPairs();

// One worker's memory for the tile at hand.
struct TileScratch {
  alignas(64) uint16_t padded[kTileRows * kTileCols];  // an edge tile with its zeros
  alignas(64) uint16_t surplus_values[kTileSlots];     // slots of W_r
  // A bit a slot, in slot order.
  alignas(64) uint32_t surplus[kTileBlocks];
  alignas(64) uint32_t empty[kTileBlocks];
  // Code numbers, ascending.
  uint16_t surplus_numbers[kTileSlots];
  uint16_t empty_numbers[kTileSlots];
  uint16_t costs[kTileSlots];  // codes that a move takes when it is not a thread's first
};

}  // namespace spmmd::three_layer
#endif  // SPMMD_THREE_LAYER_ONCE

HWY_BEFORE_NAMESPACE();
namespace spmmd::three_layer {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Bit c is set if element c of the 32 is a nonzero.
HWY_INLINE uint32_t NonzeroBits32(const uint16_t* elements) {
#if HWY_TARGET == HWY_SCALAR
  uint32_t bits = 0;
  for (int c = 0; c < 32; ++c) bits |= (IsNonzeroBits(elements[c]) ? 1u : 0u) << c;
  return bits;
#else
  const hn::CappedTag<uint16_t, 32> d;
  constexpr size_t kLanes = hn::MaxLanes(d);
  uint32_t bits = 0;
  for (size_t c = 0; c < 32; c += kLanes) {
    const auto value = hn::LoadU(d, elements + c);
    uint8_t mask[8] = {};
    // The sum drops the sign: -0.0 is a zero.
    hn::StoreMaskBits(d, hn::Ne(hn::Add(value, value), hn::Zero(d)), mask);
    uint32_t part;
    std::memcpy(&part, mask, sizeof(part));
    bits |= part << c;
  }
  return bits;
#endif
}

// Sorts the 64 elements of a block into kept slots and surplus slots, fragment order.
HWY_INLINE void ShuffleBlock(const uint16_t* row_a, uint32_t mask_a, const uint16_t* row_b, uint32_t mask_b,
                             uint16_t* kept, uint16_t* surplus) {
#if HWY_TARGET == HWY_SCALAR
  for (int lane = 0; lane < 4; ++lane) {
    for (int reg = 0; reg < 4; ++reg) {
      const int quad = lane + reg / 2 * 4;
      const uint16_t* elements = (reg % 2 == 0 ? row_a : row_b) + 4 * quad;
      const Pair pair = KeptPair((reg % 2 == 0 ? mask_a : mask_b) >> (4 * quad) & 15u);
      const Pair other = Complement(pair);
      const int slot = 2 * (4 * lane + reg);
      kept[slot] = elements[pair.p];
      kept[slot + 1] = elements[pair.q];
      surplus[slot] = elements[other.p];
      surplus[slot + 1] = elements[other.q];
    }
  }
#else
  const hn::FixedTag<uint16_t, 8> d16;
  const hn::FixedTag<uint8_t, 16> d8;
  const hn::FixedTag<uint32_t, 4> d32;
  const hn::FixedTag<uint64_t, 2> d64;
  // Two groups as words: kept of the first, surplus of the first, kept of the second, surplus of the second.
  const auto sort = [&](const uint16_t* row, uint32_t mask, int pair) HWY_ATTR {
    const auto elements = hn::BitCast(d8, hn::LoadU(d16, row + 8 * pair));
    const auto shuffle = hn::Load(d8, kGroupPairs[mask >> (8 * pair) & 255u].shuffle.data());
    return hn::BitCast(d32, hn::TableLookupBytes(elements, shuffle));
  };
  for (int pair = 0; pair < 2; ++pair) {  // lanes 2 pair and 2 pair + 1
    const auto a = sort(row_a, mask_a, pair);
    const auto b = sort(row_b, mask_b, pair);
    const auto a4 = sort(row_a, mask_a, pair + 2);
    const auto b4 = sort(row_b, mask_b, pair + 2);
    const auto even = hn::BitCast(d64, hn::InterleaveLower(d32, a, b));  // kept a, b, surplus a, b of the even lane
    const auto odd = hn::BitCast(d64, hn::InterleaveUpper(d32, a, b));
    const auto even4 = hn::BitCast(d64, hn::InterleaveLower(d32, a4, b4));
    const auto odd4 = hn::BitCast(d64, hn::InterleaveUpper(d32, a4, b4));
    const int slot = 16 * pair;
    hn::StoreU(hn::BitCast(d16, hn::InterleaveLower(d64, even, even4)), d16, kept + slot);
    hn::StoreU(hn::BitCast(d16, hn::InterleaveLower(d64, odd, odd4)), d16, kept + slot + 8);
    hn::StoreU(hn::BitCast(d16, hn::InterleaveUpper(d64, even, even4)), d16, surplus + slot);
    hn::StoreU(hn::BitCast(d16, hn::InterleaveUpper(d64, odd, odd4)), d16, surplus + slot + 8);
  }
#endif
}

// The tile's Sparse-TC layer before any parking, and its surplus and empty slots in `scratch`. Returns its nonzeros.
int64_t BuildSlots(const uint16_t* tile, int64_t stride, uint16_t* values, uint32_t* metadata, TileScratch* scratch) {
  int64_t nnz = 0;
  for (int64_t block = 0; block < kTileBlocks; ++block) {
    const int64_t strip = block / 32;
    const int64_t step = block / 8 % 4;
    const int64_t g = block % 8;
    const uint16_t* row_a = tile + (strip * 16 + g) * stride + step * 32;
    const uint16_t* row_b = row_a + 8 * stride;
    const uint32_t mask_a = NonzeroBits32(row_a);
    const uint32_t mask_b = NonzeroBits32(row_b);
    nnz += std::popcount(mask_a) + std::popcount(mask_b);
    ShuffleBlock(row_a, mask_a, row_b, mask_b, values + block * 32, scratch->surplus_values + block * 32);
    uint64_t bits = 0;
    uint32_t words[2] = {0, 0};
    for (int pair = 0; pair < 4; ++pair) {
      const GroupPair& a = kGroupPairs[mask_a >> (8 * pair) & 255u];
      const GroupPair& b = kGroupPairs[mask_b >> (8 * pair) & 255u];
      const int shift = pair % 2 * 16 + pair / 2 * 4;
      bits |= a.bits << shift | b.bits << (shift + 2);
      words[pair / 2] |= uint32_t{a.metadata} << (pair % 2 * 8) | uint32_t{b.metadata} << (pair % 2 * 8 + 16);
    }
    scratch->surplus[block] = static_cast<uint32_t>(bits);
    scratch->empty[block] = static_cast<uint32_t>(bits >> 32);
    uint32_t* place = metadata + (strip * 32 + g * 4 + step % 2 * 2) * 2 + step / 2;
    place[0] = words[0];
    place[2] = words[1];
  }
  return nnz;
}

}  // namespace HWY_NAMESPACE
}  // namespace spmmd::three_layer
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spmmd::three_layer {
namespace {

HWY_EXPORT(BuildSlots);

// Tiles of one row of tiles that a task packs.
constexpr int64_t kTilesPerTask = 16;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct ResidualEntry {
  uint16_t position;
  uint16_t value;
};

// What a task leaves until the sizes of all are known.
struct Piece {
  std::vector<uint8_t> codes;
  std::vector<ResidualEntry> residual;
  int64_t nnz = 0;
  int64_t idle_slots = 0;       // neither kept nor parked
  int64_t idle_code_bytes = 0;  // dummies, fillers, absent first moves
};

// Transposes a matrix of 64 x 64 bits: bit c of word r becomes bit r of word c.
void TransposeBits(std::array<uint64_t, 64>* matrix) {
  uint64_t mask = 0x00000000ffffffffu;
  for (size_t width = 32; width > 0; width /= 2, mask ^= mask << width) {
    for (size_t begin = 0; begin < 64; begin += 2 * width) {
      for (size_t i = begin; i < begin + width; ++i) {
        const uint64_t swapped = ((*matrix)[i] >> width ^ (*matrix)[i + width]) & mask;
        (*matrix)[i] ^= swapped << width;
        (*matrix)[i + width] ^= swapped;
      }
    }
  }
}

// The code numbers of the slots whose bits are set, ascending; returns how many there are.
int64_t ListNumbers(const uint32_t* bits, uint16_t* numbers) {
  std::array<uint64_t, 64> columns;
  for (size_t row = 0; row < 64; ++row) columns[row] = bits[2 * row] | uint64_t{bits[2 * row + 1]} << 32;
  TransposeBits(&columns);
  int64_t count = 0;
  for (size_t column = 0; column < 64; ++column) {
    for (uint64_t word = columns[column]; word != 0; word &= word - 1) {
      numbers[count++] = static_cast<uint16_t>(column * 64 + static_cast<size_t>(std::countr_zero(word)));
    }
  }
  return count;
}

// Moves every surplus element that finds no empty slot into the residual, spread evenly over the surplus, and closes
// the list up. Returns the number kept.
int64_t DropExcess(int64_t surplus, int64_t keep, const uint32_t* metadata, TileScratch* scratch,
                   std::vector<ResidualEntry>* residual) {
  const size_t begin = residual->size();
  int64_t kept = 0;
  for (int64_t i = 0; i < surplus; ++i) {
    const uint16_t number = scratch->surplus_numbers[i];
    if ((i + 1) * keep / surplus > kept) {
      scratch->surplus_numbers[kept++] = number;
      continue;
    }
    const int64_t slot = CodeNumber(number);
    const Position position = PositionOf(slot / 2);
    const Pair pair = Complement(PairOf(NibbleAt(metadata, position)));
    const int64_t column = position.quad * 4 + (slot % 2 == 0 ? pair.p : pair.q);
    residual->push_back({static_cast<uint16_t>(position.row << 7 | column), scratch->surplus_values[slot]});
  }
  std::sort(residual->begin() + static_cast<ptrdiff_t>(begin), residual->end(),
            [](const ResidualEntry& a, const ResidualEntry& b) { return a.position < b.position; });
  return kept;
}

// Codes that a distance takes beyond the move's own.
int Dummies(int distance) { return (distance - 1) / kMaxDistance; }

// Whether 32 threads can hold all moves when each has `length` codes behind its first move.
bool Fits(int64_t moves, int length, const uint16_t* costs) {
  int64_t next = 0;
  for (int thread = 0; thread < kThreads && next < moves; ++thread) {
    int left = length;
    for (++next; next < moves && costs[next] <= left; ++next) left -= costs[next];
  }
  return next >= moves;
}

// The shortest length that fits, in whole units of two codes. Fills `costs`.
int CodeLength(int64_t moves, const uint16_t* from, const uint16_t* to, uint16_t* costs) {
  // First moves cost no codes. No choice of 31 of them saves more than the 31 highest costs: a lower bound to start
  // from.
  constexpr int kBins = 16;
  std::array<int, kBins> moves_of_cost{};
  int64_t total = 0;
  int64_t rest_of_last_bin = 0;
  for (int64_t i = 1; i < moves; ++i) {
    const int cost = 1 + Dummies(from[i] - from[i - 1]) + Dummies(to[i] - to[i - 1]);
    costs[i] = static_cast<uint16_t>(cost);
    total += cost;
    const int bin = std::min(cost, kBins - 1);
    ++moves_of_cost[static_cast<size_t>(bin)];
    rest_of_last_bin += cost - bin;
  }
  int64_t saved = rest_of_last_bin;
  int free_moves = kThreads - 1;
  for (int bin = kBins - 1; bin > 0 && free_moves > 0; --bin) {
    const int taken = std::min(free_moves, moves_of_cost[static_cast<size_t>(bin)]);
    saved += int64_t{taken} * bin;
    free_moves -= taken;
  }
  int length = static_cast<int>((std::max<int64_t>(0, total - saved) + 2 * kThreads - 1) / (2 * kThreads)) * 2;
  while (!Fits(moves, length, costs)) length += 2;
  return length;
}

// Writes the codes of the first `moves` pairs of surplus_numbers and empty_numbers.
void EncodeMoves(int64_t moves, TileScratch* scratch, Piece* piece) {
  const uint16_t* from = scratch->empty_numbers;
  const uint16_t* to = scratch->surplus_numbers;
  const uint16_t* costs = scratch->costs;
  const int length = CodeLength(moves, from, to, scratch->costs);
  const size_t begin = piece->codes.size();
  piece->codes.resize(begin + kFirstBytes + static_cast<size_t>(length) * kThreads);
  uint8_t* first = piece->codes.data() + begin;
  uint8_t* units = first + kFirstBytes;
  int64_t next = 0;
  int64_t threads_used = 0;
  for (int thread = 0; thread < kThreads; ++thread) {
    uint32_t word = kNoMove;
    if (next < moves) {
      ++threads_used;
      word = from[next] | uint32_t{to[next]} << 16;
      uint8_t* unit = units + 2 * thread;
      int used = 0;
      const auto put = [&](int from_step, int to_step) {
        unit[used / 2 * 2 * kThreads + used % 2] = static_cast<uint8_t>(from_step | to_step << 4);
        ++used;
      };
      for (++next; next < moves && used + costs[next] <= length; ++next) {
        int from_step = from[next] - from[next - 1];
        int to_step = to[next] - to[next - 1];
        for (; from_step > kMaxDistance; from_step -= kMaxDistance) put(kMaxDistance, 0);
        for (; to_step > kMaxDistance; to_step -= kMaxDistance) put(0, kMaxDistance);
        put(from_step, to_step);
      }
    } else {
      piece->idle_code_bytes += sizeof(uint32_t);
    }
    std::memcpy(first + static_cast<size_t>(thread) * sizeof(word), &word, sizeof(word));
  }
  piece->idle_code_bytes += int64_t{length} * kThreads - (moves - threads_used);
}

void PackTile(const DenseView& w, int64_t row0, int64_t col0, uint16_t* values, uint32_t* metadata,
              TileScratch* scratch, Piece* piece) {
  const int64_t rows = std::min(kTileRows, w.rows - row0);
  const int64_t cols = std::min(kTileCols, w.cols - col0);
  const auto* source = reinterpret_cast<const uint16_t*>(w.row(row0)) + col0;
  int64_t stride = w.row_stride;
  if (rows < kTileRows || cols < kTileCols) {
    std::memset(scratch->padded, 0, sizeof(scratch->padded));
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(scratch->padded + r * kTileCols, source + r * stride, static_cast<size_t>(cols) * sizeof(uint16_t));
    }
    source = scratch->padded;
    stride = kTileCols;
  }
  piece->nnz += HWY_DYNAMIC_DISPATCH(BuildSlots)(source, stride, values, metadata, scratch);
  const int64_t empty = ListNumbers(scratch->empty, scratch->empty_numbers);
  // A slot kept for an absent nonzero may hold -0.0.
  for (int64_t i = 0; i < empty; ++i) values[CodeNumber(scratch->empty_numbers[i])] = 0;
  int64_t surplus = ListNumbers(scratch->surplus, scratch->surplus_numbers);
  if (surplus > empty) surplus = DropExcess(surplus, empty, metadata, scratch, &piece->residual);
  piece->idle_slots += empty - surplus;
  if (surplus == 0) return;
  for (int64_t i = 0; i < surplus; ++i) {
    values[CodeNumber(scratch->empty_numbers[i])] = scratch->surplus_values[CodeNumber(scratch->surplus_numbers[i])];
  }
  EncodeMoves(surplus, scratch, piece);
}

struct View {
  explicit View(const PackedLayer& layer)
      : m(layer.m), k(layer.k), row_tiles(CeilDiv(layer.m, kTileRows)), col_tiles(CeilDiv(layer.k, kTileCols)) {
    for (uint32_t id = SectionId::kValues; id <= SectionId::kResidualValues; ++id) {
      if (layer.FindSection(id) == nullptr) return;
    }
    values = layer.FindSection(SectionId::kValues)->data.As<uint16_t>();
    metadata = layer.FindSection(SectionId::kMetadata)->data.As<uint32_t>();
    code_offsets = layer.FindSection(SectionId::kCodeOffsets)->data.As<uint32_t>();
    codes = layer.FindSection(SectionId::kCodes)->data.As<uint8_t>();
    residual_offsets = layer.FindSection(SectionId::kResidualOffsets)->data.As<uint64_t>();
    residual_positions = layer.FindSection(SectionId::kResidualPositions)->data.As<uint16_t>();
    residual_values = layer.FindSection(SectionId::kResidualValues)->data.As<uint16_t>();
    complete = true;
  }
  int64_t tiles() const { return row_tiles * col_tiles; }

  int64_t m;
  int64_t k;
  int64_t row_tiles;
  int64_t col_tiles;
  bool complete = false;
  absl::Span<const uint16_t> values;
  absl::Span<const uint32_t> metadata;
  absl::Span<const uint32_t> code_offsets;
  absl::Span<const uint8_t> codes;
  absl::Span<const uint64_t> residual_offsets;
  absl::Span<const uint16_t> residual_positions;
  absl::Span<const uint16_t> residual_values;
};

// Offsets must have been checked.
Tile TileOf(const View& view, int64_t tile) {
  const auto index = static_cast<size_t>(tile);
  const size_t code_begin = view.code_offsets[index] * kCodeGranule;
  const size_t residual_begin = view.residual_offsets[index];
  return {view.values.data() + tile * kTileSlots,
          view.metadata.data() + tile * kTileMetadataWords,
          view.codes.data() + code_begin,
          view.code_offsets[index + 1] * kCodeGranule - code_begin,
          view.residual_positions.data() + residual_begin,
          view.residual_values.data() + residual_begin,
          view.residual_offsets[index + 1] - residual_begin};
}

// Of the tile that has most.
int64_t MaxCodeBytes(absl::Span<const uint32_t> code_offsets) {
  uint32_t most = 0;
  for (size_t tile = 0; tile + 1 < code_offsets.size(); ++tile) {
    most = std::max(most, code_offsets[tile + 1] - code_offsets[tile]);
  }
  return int64_t{most} * static_cast<int64_t>(kCodeGranule);
}

}  // namespace

absl::StatusOr<PackedLayer> Pack(const DenseView& w, const PackOptions& options) {
  if (SizeOf(w.dtype) != sizeof(uint16_t)) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype: THREE_LAYER stores fp16 and bf16 weights, not ", std::string(Name(w.dtype))));
  }
  if (!options.allow_nonfinite) SPMMD_RETURN_IF_ERROR(CheckFinite(w));

  const int64_t row_tiles = CeilDiv(w.rows, kTileRows);
  const int64_t col_tiles = CeilDiv(w.cols, kTileCols);
  const auto tiles = static_cast<size_t>(row_tiles * col_tiles);
  const int64_t tasks_per_row = CeilDiv(col_tiles, kTilesPerTask);
  SPMMD_ASSIGN_OR_RETURN(Buffer values, Buffer::Allocate(tiles * kTileSlots * sizeof(uint16_t)));
  SPMMD_ASSIGN_OR_RETURN(Buffer metadata, Buffer::Allocate(tiles * kTileMetadataWords * sizeof(uint32_t)));
  SPMMD_ASSIGN_OR_RETURN(Buffer code_offsets, Buffer::Allocate((tiles + 1) * sizeof(uint32_t)));
  SPMMD_ASSIGN_OR_RETURN(Buffer residual_offsets, Buffer::Allocate((tiles + 1) * sizeof(uint64_t)));
  uint16_t* value_data = values.MutableAs<uint16_t>().data();
  uint32_t* metadata_data = metadata.MutableAs<uint32_t>().data();
  uint32_t* code_starts = code_offsets.MutableAs<uint32_t>().data();
  uint64_t* residual_starts = residual_offsets.MutableAs<uint64_t>().data();

  ThreadPool& pool = DefaultThreadPool();
  std::vector<std::unique_ptr<TileScratch>> scratches(static_cast<size_t>(pool.size()));
  std::vector<Piece> pieces(static_cast<size_t>(row_tiles * tasks_per_row));
  pool.ParallelFor(row_tiles * tasks_per_row, [&](int64_t task, int worker) {
    std::unique_ptr<TileScratch>& scratch = scratches[static_cast<size_t>(worker)];
    if (scratch == nullptr) scratch = std::make_unique<TileScratch>();
    Piece& piece = pieces[static_cast<size_t>(task)];
    const int64_t tile_row = task / tasks_per_row;
    const int64_t first = task % tasks_per_row * kTilesPerTask;
    for (int64_t tile_col = first; tile_col < std::min(col_tiles, first + kTilesPerTask); ++tile_col) {
      const int64_t tile = tile_row * col_tiles + tile_col;
      const size_t code_bytes = piece.codes.size();
      const size_t residual_entries = piece.residual.size();
      PackTile(w, tile_row * kTileRows, tile_col * kTileCols, value_data + tile * kTileSlots,
               metadata_data + tile * kTileMetadataWords, scratch.get(), &piece);
      code_starts[tile + 1] = static_cast<uint32_t>((piece.codes.size() - code_bytes) / kCodeGranule);
      residual_starts[tile + 1] = piece.residual.size() - residual_entries;
    }
  });
  for (size_t tile = 0; tile < tiles; ++tile) {
    code_starts[tile + 1] += code_starts[tile];
    residual_starts[tile + 1] += residual_starts[tile];
  }

  const int64_t max_code_bytes = MaxCodeBytes(code_offsets.As<uint32_t>());

  SPMMD_ASSIGN_OR_RETURN(Buffer codes, Buffer::Allocate(code_starts[tiles] * kCodeGranule));
  const size_t residual = residual_starts[tiles];
  SPMMD_ASSIGN_OR_RETURN(Buffer residual_positions, Buffer::Allocate(residual * sizeof(uint16_t)));
  SPMMD_ASSIGN_OR_RETURN(Buffer residual_values, Buffer::Allocate(residual * sizeof(uint16_t)));
  uint16_t* position_data = residual_positions.MutableAs<uint16_t>().data();
  uint16_t* residual_data = residual_values.MutableAs<uint16_t>().data();
  pool.ParallelFor(row_tiles * tasks_per_row, [&](int64_t task, int /*worker*/) {
    Piece& piece = pieces[static_cast<size_t>(task)];
    const int64_t tile = task / tasks_per_row * col_tiles + task % tasks_per_row * kTilesPerTask;
    if (!piece.codes.empty()) {
      std::memcpy(codes.mutable_data() + code_starts[tile] * kCodeGranule, piece.codes.data(), piece.codes.size());
    }
    uint64_t place = residual_starts[tile];
    for (const ResidualEntry& entry : piece.residual) {
      position_data[place] = entry.position;
      residual_data[place++] = entry.value;
    }
    piece.codes = {};
    piece.residual = {};
  });

  PackedLayer layer;
  layer.format = Format::kThreeLayer;
  layer.layout_version = kLayoutVersion;
  layer.dtype = w.dtype;
  layer.m = w.rows;
  layer.k = w.cols;
  layer.params = {kTileRows, kTileCols, kThreads, max_code_bytes};
  int64_t idle_slots = 0;
  int64_t idle_code_bytes = 0;
  for (const Piece& piece : pieces) {
    layer.nnz += piece.nnz;
    idle_slots += piece.idle_slots;
    idle_code_bytes += piece.idle_code_bytes;
  }
  const auto add = [&layer](SectionId id, SectionClass section_class, int64_t padding, Buffer data) {
    layer.sections.push_back({id, section_class, static_cast<size_t>(padding), std::move(data)});
  };
  add(SectionId::kValues, SectionClass::kValues, idle_slots * 2, std::move(values));
  add(SectionId::kMetadata, SectionClass::kMetadata, 0, std::move(metadata));
  add(SectionId::kCodeOffsets, SectionClass::kMetadata, 0, std::move(code_offsets));
  add(SectionId::kCodes, SectionClass::kMetadata, idle_code_bytes, std::move(codes));
  add(SectionId::kResidualOffsets, SectionClass::kMetadata, 0, std::move(residual_offsets));
  add(SectionId::kResidualPositions, SectionClass::kMetadata, 0, std::move(residual_positions));
  add(SectionId::kResidualValues, SectionClass::kValues, 0, std::move(residual_values));
  return layer;
}

absl::Status Unpack(const PackedLayer& layer, const MutableDenseView& out) {
  const View view(layer);
  DefaultThreadPool().ParallelFor(view.tiles(), [&](int64_t tile, int /*worker*/) {
    uint16_t dense[kTileRows * kTileCols];
    DecodeTile(TileOf(view, tile), dense);
    const int64_t row0 = tile / view.col_tiles * kTileRows;
    const int64_t col0 = tile % view.col_tiles * kTileCols;
    const int64_t cols = std::min(kTileCols, layer.k - col0);
    for (int64_t r = 0; r < std::min(kTileRows, layer.m - row0); ++r) {
      auto* target = reinterpret_cast<uint16_t*>(out.row(row0 + r)) + col0;
      for (int64_t c = 0; c < cols; ++c) {
        const uint16_t bits = dense[r * kTileCols + c];
        target[c] = IsNonzeroBits(bits) ? bits : uint16_t{0};
      }
    }
  });
  return absl::OkStatus();
}

absl::Status Validate(const PackedLayer& layer) {
  if (layer.layout_version != kLayoutVersion) {
    return absl::DataLossError(
        absl::StrCat("THREE_LAYER layout version ", layer.layout_version, ", expected ", kLayoutVersion));
  }
  if (SizeOf(layer.dtype) != sizeof(uint16_t)) return absl::DataLossError("THREE_LAYER dtype: neither fp16 nor bf16");
  if (layer.params[kParamTileRows] != kTileRows || layer.params[kParamTileCols] != kTileCols ||
      layer.params[kParamThreads] != kThreads) {
    return absl::DataLossError("THREE_LAYER params: unknown tile size or number of threads");
  }
  const View view(layer);
  if (!view.complete) return absl::DataLossError("THREE_LAYER sections: one is missing");
  const auto tiles = static_cast<size_t>(view.tiles());
  const auto check_size = [&layer](SectionId id, const char* name, size_t size) {
    if (layer.FindSection(id)->data.size() == size) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("THREE_LAYER section ", name, ": ", layer.FindSection(id)->data.size(),
                                            " bytes, expected ", size));
  };
  SPMMD_RETURN_IF_ERROR(check_size(SectionId::kValues, "values", tiles * kTileSlots * sizeof(uint16_t)));
  SPMMD_RETURN_IF_ERROR(check_size(SectionId::kMetadata, "metadata", tiles * kTileMetadataWords * sizeof(uint32_t)));
  SPMMD_RETURN_IF_ERROR(check_size(SectionId::kCodeOffsets, "code_offsets", (tiles + 1) * sizeof(uint32_t)));
  SPMMD_RETURN_IF_ERROR(check_size(SectionId::kResidualOffsets, "residual_offsets", (tiles + 1) * sizeof(uint64_t)));
  if (view.code_offsets.front() != 0 || !std::is_sorted(view.code_offsets.begin(), view.code_offsets.end())) {
    return absl::DataLossError("THREE_LAYER section code_offsets: must ascend from 0");
  }
  if (layer.params[kParamMaxCodeBytes] != MaxCodeBytes(view.code_offsets)) {
    return absl::DataLossError("THREE_LAYER params: the largest tile's code bytes are not those of code_offsets");
  }
  SPMMD_RETURN_IF_ERROR(check_size(SectionId::kCodes, "codes", view.code_offsets.back() * kCodeGranule));
  if (view.residual_offsets.front() != 0 ||
      !std::is_sorted(view.residual_offsets.begin(), view.residual_offsets.end()) ||
      view.residual_offsets.back() > static_cast<uint64_t>(layer.nnz)) {
    return absl::DataLossError("THREE_LAYER section residual_offsets: must ascend from 0 to at most nnz");
  }
  const size_t residual_bytes = view.residual_offsets.back() * sizeof(uint16_t);
  SPMMD_RETURN_IF_ERROR(check_size(SectionId::kResidualPositions, "residual_positions", residual_bytes));
  SPMMD_RETURN_IF_ERROR(check_size(SectionId::kResidualValues, "residual_values", residual_bytes));

  std::atomic<int64_t> bad_tile{-1};
  std::atomic<int64_t> nnz{0};
  DefaultThreadPool().ParallelFor(view.tiles(), [&](int64_t tile, int /*worker*/) {
    const int64_t rows = std::min(kTileRows, layer.m - tile / view.col_tiles * kTileRows);
    const int64_t cols = std::min(kTileCols, layer.k - tile % view.col_tiles * kTileCols);
    int64_t count = 0;
    const bool ok = CheckTile(TileOf(view, tile), rows, cols, &count);
    if (!ok) bad_tile.store(tile, std::memory_order_relaxed);
    nnz.fetch_add(count, std::memory_order_relaxed);
  });
  if (bad_tile.load() >= 0) {
    return absl::DataLossError(
        absl::StrCat("THREE_LAYER tile ", bad_tile.load(), ": metadata, codes or residual positions are out of range"));
  }
  if (nnz.load() != layer.nnz) {
    return absl::DataLossError(
        absl::StrCat("THREE_LAYER section values: ", nnz.load(), " nonzeros, expected ", layer.nnz));
  }
  return absl::OkStatus();
}

Stats ComputeStats(const PackedLayer& layer) {
  const View view(layer);
  Stats stats;
  stats.nnz = layer.nnz;
  stats.tiles = view.tiles();
  CodeCounts counts;
  for (int64_t tile = 0; tile < view.tiles(); ++tile) {
    const Tile packed = TileOf(view, tile);
    stats.tiles_without_filling += packed.code_bytes == 0 ? 1 : 0;
    WalkCodes(packed.codes, packed.code_bytes, &counts, [](int64_t /*from*/, int64_t /*to*/) {});
  }
  stats.slot_filled = counts.moves;
  stats.dummy_codes = counts.dummies;
  stats.filler_codes = counts.fillers;
  stats.residual = static_cast<int64_t>(view.residual_offsets.back());
  stats.sparse_tc = stats.nnz - stats.slot_filled - stats.residual;
  const auto bytes = [&layer](SectionId id) { return layer.FindSection(id)->data.size(); };
  stats.values_bytes = bytes(SectionId::kValues);
  stats.metadata_bytes = bytes(SectionId::kMetadata);
  stats.code_bytes = bytes(SectionId::kCodeOffsets) + bytes(SectionId::kCodes);
  stats.residual_bytes =
      bytes(SectionId::kResidualOffsets) + bytes(SectionId::kResidualPositions) + bytes(SectionId::kResidualValues);
  return stats;
}

}  // namespace spmmd::three_layer
#endif  // HWY_ONCE
