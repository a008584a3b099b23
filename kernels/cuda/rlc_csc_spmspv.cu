// Celty's SpMspV (section 3 of the paper) on compressed sparse columns with 4-bit run lengths.
//
// A warp owns 256 rows and walks `inner` columns of K (64 in the paper); all lanes share one activation, so a zero
// skips the column without divergence. An active column is one 16-byte load of eight weights and one 4-byte load of
// eight run lengths a lane; a prefix sum across the warp turns run lengths into rows (Algorithm 1); products are added
// to a buffer in shared memory at those rows, and the buffer goes to y by atomic additions when the block's columns are
// done.
//
// As published, the eight warps of a block add to one buffer atomically. Variants: bit 0 of the variant number gives
// each warp a buffer of its own, which needs no atomics because the rows of a column are distinct; the rest chooses
// `inner` from 64, 16, 32, 128, 256 (the sweep of figure 10). Done as well as the design allows: the active columns of
// a warp are found with one ballot a 32, the next column's loads are issued before the current one is decoded, and four
// 16-bit prefix-sum pairs do the work of eight scans.
//
// Not deterministic: atomic additions in the order of arrival. Limiter: the shuffles of the prefix sums and the
// scattered read-modify-writes of shared memory, not device memory. It is here to be measured beside
// column_piece_spmspv.
#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/rlc_csc_spmspv.h"

namespace spmmd::cuda {
namespace {

// kernels/format/rlc_csc.h
constexpr int kTileRows = 256;
constexpr int kTileColumns = 64;
constexpr int kUnitEntries = 8;
constexpr int kRunBits = 4;
constexpr uint32_t kTileUnitsSection = 1, kColumnOffsetsSection = 2, kRunsSection = 3, kValuesSection = 4;
constexpr uint32_t kLayoutVersion = 1;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kInner[] = {64, 16, 32, 128, 256};
constexpr int kVariants = 2 * 5;

struct CeltyArgs {
  const uint64_t* tile_units;
  const uint16_t* column_offsets;
  const uint32_t* runs;  // one word a unit
  const uint4* values;   // one a unit
  const void* x;
  float* y;
  float threshold;
  int32_t x_dtype;
  int32_t m;
  int32_t k;
  int32_t column_tiles;
  int32_t inner;
};

template <bool kIsBf16>
__device__ __forceinline__ float2 WidenPair(uint32_t pair) {
  if constexpr (kIsBf16) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

__device__ __forceinline__ float LoadX(const void* x, int32_t dtype, int at) {
  if (dtype == kF32) return static_cast<const float*>(x)[at];
  if (dtype == kF16) return __half2float(static_cast<const __half*>(x)[at]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(x)[at]);
}

template <bool kIsBf16, bool kPrivate>
__global__ void __launch_bounds__(kThreads) RlcCscSpmspv(const __grid_constant__ CeltyArgs args) {
  __shared__ float buffers[kPrivate ? kWarps : 1][kTileRows];
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int warp = static_cast<int>(threadIdx.x >> 5);
  for (int i = static_cast<int>(threadIdx.x); i < (kPrivate ? kWarps : 1) * kTileRows; i += kThreads) {
    (&buffers[0][0])[i] = 0.f;
  }
  __syncthreads();
  float* const buffer = buffers[kPrivate ? warp : 0];
  const int row_tile = static_cast<int>(blockIdx.y);
  const int first = (static_cast<int>(blockIdx.x) * kWarps + warp) * args.inner;
  const int last = min(first + args.inner, args.k);

  for (int base = first; base < last; base += 32) {
    // Lane l looks after column base + l: its activation and the places it owns.
    const int column = base + lane;
    float x = 0.f;
    uint32_t begin = 0;
    uint32_t end = 0;
    uint64_t unit = 0;
    if (column < last) {
      x = LoadX(args.x, args.x_dtype, column);
      const int64_t tile = static_cast<int64_t>(row_tile) * args.column_tiles + column / kTileColumns;
      const uint16_t* offsets = args.column_offsets + tile * (kTileColumns + 1) + column % kTileColumns;
      begin = __ldg(offsets);
      end = __ldg(offsets + 1);
      unit = __ldg(args.tile_units + tile);
    }
    uint32_t active = __ballot_sync(~0u, column < last && !(fabsf(x) <= args.threshold) && end > begin);

    // The next active column's first 32 units, fetched one column ahead.
    struct Column {
      float x;
      uint32_t begin, end;  // places
      uint64_t unit;        // of the column's first
      uint4 values;
      uint32_t runs;
    };
    const auto load_units = [&](Column& c) {
      const uint32_t u = c.begin / kUnitEntries + static_cast<uint32_t>(lane);
      c.values = make_uint4(0, 0, 0, 0);
      c.runs = 0;
      if (u * kUnitEntries < c.end) {
        c.values = __ldg(args.values + c.unit + u);
        c.runs = __ldg(args.runs + c.unit + u);
      }
    };
    const auto next = [&]() {
      Column c = {};
      if (active != 0) {
        const int source = __ffs(static_cast<int>(active)) - 1;
        active &= active - 1;
        c.x = __shfl_sync(~0u, x, source);
        c.begin = __shfl_sync(~0u, begin, source);
        c.end = __shfl_sync(~0u, end, source);
        c.unit = __shfl_sync(~0u, unit, source);
        load_units(c);
      }
      return c;
    };
    Column current = next();
    while (current.end > current.begin) {
      Column following = next();
      const uint32_t unit0 = current.begin / kUnitEntries;
      const uint32_t place = (unit0 + static_cast<uint32_t>(lane)) * kUnitEntries;
      // A full column that does not start on a unit takes 33 units; the last belongs behind lane 31 in every step.
      const bool has_33rd = (unit0 + 32) * kUnitEntries < current.end;
      uint4 last_values = make_uint4(0, 0, 0, 0);
      uint32_t last_runs = 0;
      if (has_33rd) {
        last_values = __ldg(args.values + current.unit + unit0 + 32);
        last_runs = __ldg(args.runs + current.unit + unit0 + 32);
      }
      // Rows that the eight entries advance by (run + 1, 0 outside the column), two in a word.
      uint32_t step[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const auto advance = [&](int s) {
          const bool in = place + s >= current.begin && place + s < current.end;
          return in ? (current.runs >> (kRunBits * s) & 15u) + 1u : 0u;
        };
        step[p] = advance(2 * p) | advance(2 * p + 1) << 16;
      }
      uint32_t inclusive[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) inclusive[p] = step[p];
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          const uint32_t other = __shfl_up_sync(~0u, inclusive[p], o);
          if (lane >= o) inclusive[p] += other;
        }
      }
      // The mask keeps damaged run lengths inside the buffer; sound ones stay under 256.
      const auto add = [&](uint32_t behind, float value) {
        float* to = buffer + ((behind - 1) & (kTileRows - 1));
        if constexpr (kPrivate) {
          *to += value;
        } else {
          atomicAdd(to, value);
        }
      };
      const uint32_t pairs[4] = {current.values.x, current.values.y, current.values.z, current.values.w};
      const uint32_t last_pairs[4] = {last_values.x, last_values.y, last_values.z, last_values.w};
      uint32_t row = 0;  // one past the last row of the entries seen so far
#pragma unroll
      for (int s = 0; s < kUnitEntries; ++s) {
        const int shift = 16 * (s & 1);
        const float2 pair = WidenPair<kIsBf16>(pairs[s / 2]);
        if ((step[s / 2] >> shift & 0xffffu) != 0) {
          add(row + (inclusive[s / 2] >> shift & 0xffffu), ((s & 1) != 0 ? pair.y : pair.x) * current.x);
        }
        row += __shfl_sync(~0u, inclusive[s / 2], 31) >> shift & 0xffffu;
        if (has_33rd && (unit0 + 32) * kUnitEntries + static_cast<uint32_t>(s) < current.end) {
          row += (last_runs >> (kRunBits * s) & 15u) + 1u;
          const float2 last_pair = WidenPair<kIsBf16>(last_pairs[s / 2]);
          if (lane == 0) add(row, ((s & 1) != 0 ? last_pair.y : last_pair.x) * current.x);
        }
        if constexpr (kPrivate) __syncwarp();
      }
      current = following;
    }
  }
  __syncthreads();
  const int row = row_tile * kTileRows + static_cast<int>(threadIdx.x);
  if (row >= args.m) return;
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < (kPrivate ? kWarps : 1); ++w) sum += buffers[w][threadIdx.x];
  if (sum != 0.f) atomicAdd(args.y + row, sum);
}

__global__ void Finish(const float* sums, Epilogue epilogue, int64_t m) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < m) StoreOutput(epilogue, 0, row, sums[row]);
}

int VariantOf(const Call& call) {
  return std::max(0, static_cast<int>(call.flags >> SPMMD_CUDA_FLAG_VARIANT_SHIFT & 15u) - 1);
}
bool Accumulates(const Call& call) { return (call.flags & SPMMD_CUDA_FLAG_ACCUMULATE) != 0; }
// Sums go straight into y, or through the workspace when y is not plain fp32.
bool IsPlain(const Call& call) { return call.y_dtype == kF32 && call.bias == nullptr && call.activation == 0; }

Status CanImplement(const spmmd_cuda_layer& layer, const Call& call) {
  if (layer.params[0] != kRunBits) {
    return Unimplemented("run_bits: rlc_csc_spmspv reads 4-bit run lengths, not " + std::to_string(layer.params[0]));
  }
  if (VariantOf(call) >= kVariants) return InvalidArgument("flags: no such variant of rlc_csc_spmspv");
  if (Accumulates(call) && !IsPlain(call)) {
    return InvalidArgument("flags: accumulation needs an fp32 y, no bias and no activation");
  }
  if ((call.flags & SPMMD_CUDA_FLAG_DETERMINISTIC) != 0) {
    return Unimplemented("flags: rlc_csc_spmspv has no deterministic variant");
  }
  if (CeilDiv(layer.m, kTileRows) > 65535) return Unimplemented("M: more than 65535 * 256 rows");
  return {};
}

uint64_t ScratchBytes(const spmmd_cuda_layer& layer, const Call& call) {
  return IsPlain(call) ? 0 : static_cast<uint64_t>(layer.m) * 4;
}

Status Launch(const spmmd_cuda_layer& layer, const Call& call, cudaStream_t stream) {
  const int variant = VariantOf(call);
  CeltyArgs args = {};
  args.tile_units = reinterpret_cast<const uint64_t*>(layer.SectionData(kTileUnitsSection));
  args.column_offsets = reinterpret_cast<const uint16_t*>(layer.SectionData(kColumnOffsetsSection));
  args.runs = reinterpret_cast<const uint32_t*>(layer.SectionData(kRunsSection));
  args.values = reinterpret_cast<const uint4*>(layer.SectionData(kValuesSection));
  args.threshold = call.x_threshold;
  args.x_dtype = call.x_dtype;
  args.m = static_cast<int32_t>(layer.m);
  args.k = static_cast<int32_t>(layer.k);
  args.column_tiles = static_cast<int32_t>(CeilDiv(layer.k, kTileColumns));
  args.inner = kInner[variant / 2];
  const dim3 grid(static_cast<unsigned>(CeilDiv(layer.k, int64_t{kWarps} * args.inner)),
                  static_cast<unsigned>(CeilDiv(layer.m, kTileRows)));
  for (int64_t token = 0; token < call.n; ++token) {
    args.x =
        static_cast<const uint8_t*>(call.x) + static_cast<uint64_t>(token * call.x_stride) * ElementSize(call.x_dtype);
    Epilogue epilogue = MakeEpilogue(call);
    epilogue.y =
        static_cast<uint8_t*>(call.y) + static_cast<uint64_t>(token * call.y_stride) * ElementSize(call.y_dtype);
    args.y = IsPlain(call) ? static_cast<float*>(epilogue.y)
                           : reinterpret_cast<float*>(static_cast<uint8_t*>(call.workspace) + kCounterBytes);
    if (!Accumulates(call)) {
      SPMMD_CUDA_CHECK(cudaMemsetAsync(args.y, 0, static_cast<size_t>(layer.m) * 4, stream));
    }
    const bool bf16 = layer.dtype == kBf16;
    const bool own = (variant & 1) != 0;
    const auto kernel = bf16 ? (own ? RlcCscSpmspv<true, true> : RlcCscSpmspv<true, false>)
                             : (own ? RlcCscSpmspv<false, true> : RlcCscSpmspv<false, false>);
    kernel<<<grid, kThreads, 0, stream>>>(args);
    SPMMD_CUDA_CHECK(cudaGetLastError());
    if (!IsPlain(call)) {
      Finish<<<static_cast<unsigned>(CeilDiv(layer.m, 256)), 256, 0, stream>>>(args.y, epilogue, layer.m);
      SPMMD_CUDA_CHECK(cudaGetLastError());
    }
  }
  return {};
}

}  // namespace

Status ValidateRlcCsc(const LayerDesc& desc) {
  if (desc.layout_version != kLayoutVersion) return DataLoss("RLC_CSC: unknown layout version");
  if (desc.dtype == kF32) return DataLoss("RLC_CSC: dtype is neither fp16 nor bf16");
  const int64_t run_bits = desc.params[0];
  if (run_bits < 2 || run_bits > 8 || desc.params[1] != kTileRows || desc.params[2] != kTileColumns) {
    return DataLoss("RLC_CSC: parameters out of range");
  }
  const spmmd_cuda_section* tile_units = FindSection(desc, kTileUnitsSection);
  const spmmd_cuda_section* offsets = FindSection(desc, kColumnOffsetsSection);
  const spmmd_cuda_section* runs = FindSection(desc, kRunsSection);
  const spmmd_cuda_section* values = FindSection(desc, kValuesSection);
  if (tile_units == nullptr || offsets == nullptr || runs == nullptr || values == nullptr) {
    return DataLoss("RLC_CSC: a section is missing");
  }
  const int64_t tiles = CeilDiv(desc.m, kTileRows) * CeilDiv(desc.k, kTileColumns);
  if (tile_units->size != static_cast<uint64_t>(tiles + 1) * 8 ||
      offsets->size != static_cast<uint64_t>(tiles) * (kTileColumns + 1) * 2) {
    return DataLoss("RLC_CSC: section tile_units or column_offsets has the wrong size");
  }
  // Read by copies: a section of a damaged file need not be aligned.
  const auto unit_at = [&](int64_t tile) {
    uint64_t unit;
    std::memcpy(&unit, static_cast<const uint8_t*>(tile_units->data) + tile * 8, 8);
    return unit;
  };
  const uint64_t units = unit_at(tiles);
  if (units > uint64_t{1} << 40 || runs->size != units * static_cast<uint64_t>(run_bits) ||
      values->size != units * 16) {
    return DataLoss("RLC_CSC: section runs or values has the wrong size");
  }
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const uint64_t first = unit_at(tile);
    const uint64_t next = unit_at(tile + 1);
    uint16_t offset[kTileColumns + 1];
    std::memcpy(offset, static_cast<const uint8_t*>(offsets->data) + tile * static_cast<int64_t>(sizeof(offset)),
                sizeof(offset));
    bool ok = first <= next && next <= units && offset[kTileColumns] <= (next - first) * kUnitEntries;
    for (int c = 0; c < kTileColumns; ++c)
      ok = ok && offset[c] <= offset[c + 1] && offset[c + 1] - offset[c] <= kTileRows;
    if (!ok) return DataLoss("RLC_CSC: section tile_units or column_offsets is out of order");
  }
  return {};
}

const Kernel kRlcCscSpmspv = {"rlc_csc_spmspv", kFormatRlcCsc, false, CanImplement, ScratchBytes, Launch, true};

}  // namespace spmmd::cuda
