// Host side of the row-stream SpMV: which layers and calls it takes, how it is launched.
#include "kernels/cuda/row_stream_spmv.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "kernels/cuda/parallel.h"
#include "kernels/format/row_stream_decode.h"

namespace spmmd::cuda {
namespace {

using row_stream::Coding;

// Mirrors SharedLayout in row_stream_spmv.cuh.
constexpr int kEscapeRounds = 8;

uint64_t SharedBytes(const row_stream::Shape& shape, int rows, int tokens, bool wide_x, int64_t staged_columns) {
  const int threads = row_stream::kWarpLanes * shape.warps;
  const uint64_t column_bytes = static_cast<uint64_t>(wide_x ? 4 : 2) * static_cast<uint64_t>(tokens == 3 ? 4 : tokens);
  uint64_t bytes = RoundUp(static_cast<uint64_t>(threads * tokens * 4 + rows * 8), 16);
  bytes += static_cast<uint64_t>(staged_columns) * column_bytes;
  if (shape.coding != Coding::kVerbatim) bytes += static_cast<uint64_t>(threads) * kEscapeRounds * 4;
  return bytes;
}

row_stream::Shape ShapeOf(const spmmd_cuda_layer& layer) {
  row_stream::Shape shape;
  // The layer was validated when it was uploaded.
  (void)row_stream::ParseShape(layer.params, layer.dtype == kBf16, layer.m, layer.k, &shape);
  return shape;
}

int64_t StagedColumns(const row_stream::Shape& shape) {
  return (shape.segment_columns + row_stream::PadColumns(shape.max_blocks) + 7) / 8 * 8;
}

// The most tokens of one launch that fit shared memory, 0 when not even one does.
int TokensPerLaunch(const spmmd_cuda_layer& layer, const row_stream::Shape& shape, int rows, bool wide_x, int64_t n) {
  int tokens = static_cast<int>(std::min<int64_t>(n, kMaxSpmvTokens));
  while (tokens > 0 &&
         SharedBytes(shape, rows, tokens, wide_x, StagedColumns(shape)) > layer.device->max_shared_bytes) {
    --tokens;
  }
  return tokens;
}

bool NeedsWideX(const spmmd_cuda_layer& layer, const Call& call) { return call.x_dtype != layer.dtype; }

const void* FindKernel(const RowStreamKernelKey& key) {
  switch (key.coding) {
    case Coding::kVerbatim:
      return key.bf16 ? RowStreamKernelBf16(key) : RowStreamKernelF16(key);
    case Coding::kCode2:
      return RowStreamKernelCode2(key);
    case Coding::kCode3:
      return RowStreamKernelCode3(key);
  }
  return nullptr;
}

// Raises a kernel's limit of dynamic shared memory the first time a launch on a device needs it.
Status AllowSharedBytes(const void* kernel, int device, uint64_t bytes) {
  if (bytes <= 48 * 1024) return {};
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, uint64_t> allowed;
  const std::lock_guard<std::mutex> lock(mutex);
  uint64_t& limit = allowed[{kernel, device}];
  if (limit >= bytes) return {};
  SPMMD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  limit = bytes;
  return {};
}

// Measured on one H200: the deeper prefetch wins wherever its 64 registers let all tiles of a multiprocessor run at
// once.
int Choose(int variant, int64_t tiles, int warps, int multiprocessors) {
  if (variant != kRowStreamAuto) return variant;
  return CeilDiv(tiles, multiprocessors) * warps <= 32 ? 1 : 0;
}

uint8_t* OffsetRow(void* y, int64_t row, int64_t stride, int32_t dtype) {
  return static_cast<uint8_t*>(y) + static_cast<uint64_t>(row * stride) * ElementSize(dtype);
}

Status CanImplement(const spmmd_cuda_layer& layer, const Call& call) {
  const row_stream::Shape shape = ShapeOf(layer);
  if (TokensPerLaunch(layer, shape, shape.rows_per_tile, NeedsWideX(layer, call), 1) == 0) {
    return Unimplemented("row_stream_spmv: " + std::to_string(StagedColumns(shape)) +
                         " columns of activations do not fit the device's " +
                         std::to_string(layer.device->max_shared_bytes) + " bytes of shared memory");
  }
  return {};
}

uint64_t ScratchBytes(const spmmd_cuda_layer&, const Call&) { return 0; }
uint64_t GroupScratchBytes(const spmmd_cuda_layer* const*, const Call*, int) { return 0; }

Status LaunchGroup(const spmmd_cuda_layer* const* layers, const Call* calls, int count, cudaStream_t stream) {
  const int variant = static_cast<int>(calls[0].flags >> SPMMD_CUDA_FLAG_VARIANT_SHIFT & 15u) - 1;
  if (variant >= kRowStreamVariants) return InvalidArgument("flags: no such variant of row_stream_spmv");
  return LaunchRowStreamGroup(layers, calls, count, variant, stream);
}

Status Launch(const spmmd_cuda_layer& layer, const Call& call, cudaStream_t stream) {
  const spmmd_cuda_layer* layers[] = {&layer};
  return LaunchGroup(layers, &call, 1, stream);
}

}  // namespace

Status LaunchRowStreamGroup(const spmmd_cuda_layer* const* layers, const Call* calls, int count, int variant,
                            cudaStream_t stream) {
  if (count < 1 || count > kMaxGroup) {
    return InvalidArgument("count: " + std::to_string(count) + " layers, at most " + std::to_string(kMaxGroup));
  }
  const spmmd_cuda_layer& first = *layers[0];
  const Call& call = calls[0];
  const row_stream::Shape shape = ShapeOf(first);
  RowStreamArgs args = {};
  int rows = 0;
  int64_t staged_columns = 0;
  int64_t tiles = 0;
  for (int i = 0; i < count; ++i) {
    const spmmd_cuda_layer& layer = *layers[i];
    const Call& own = calls[i];
    const row_stream::Shape own_shape = ShapeOf(layer);
    if (layer.format != kFormatRowStream || layer.dtype != first.dtype || layer.k != first.k ||
        own_shape.coding != shape.coding || own_shape.run_bits != shape.run_bits || own_shape.warps != shape.warps ||
        own_shape.segment_columns != shape.segment_columns || layer.device != first.device) {
      return InvalidArgument("layers: a group needs equal K, dtype, value coding, run bits and warps");
    }
    if (own.x != call.x || own.n != call.n || own.x_dtype != call.x_dtype || own.x_stride != call.x_stride) {
      return InvalidArgument("x: a group shares its activations");
    }
    RowStreamLayerArgs& out = args.layer[i];
    out.stream = layer.SectionData(row_stream::kStreamSection);
    out.starts = reinterpret_cast<const uint16_t*>(layer.SectionData(row_stream::kStartSection));
    out.tiles = reinterpret_cast<const row_stream::TileHeader*>(layer.SectionData(row_stream::kTileSection));
    out.bases = layer.SectionData(row_stream::kBaseSection);
    out.escapes = reinterpret_cast<const uint32_t*>(layer.SectionData(row_stream::kEscapeSection));
    out.row_order = reinterpret_cast<const uint32_t*>(layer.SectionData(row_stream::kRowOrderSection));
    out.bias = own.bias;
    out.y_stride = own.y_stride;
    out.y_dtype = own.y_dtype;
    out.activation = own.activation;
    out.m = static_cast<int32_t>(layer.m);
    out.rows_per_tile = own_shape.rows_per_tile;
    out.pieces = own_shape.pieces;
    out.uniform_blocks = static_cast<int32_t>(own_shape.uniform_blocks);
    out.first_tile = static_cast<uint32_t>(tiles);
    out.row_reciprocal = static_cast<uint32_t>(((1 << kReciprocalBits) + out.rows_per_tile - 1) / out.rows_per_tile);
    rows = std::max(rows, own_shape.rows_per_tile);
    staged_columns = std::max(staged_columns, StagedColumns(own_shape));
    tiles += own_shape.row_tiles;
  }
  args.layers = count;
  args.x_stride = call.x_stride;
  args.x_dtype = call.x_dtype;
  args.k = static_cast<int32_t>(first.k);
  args.segment_columns = static_cast<int32_t>(shape.segment_columns);
  args.segments = static_cast<int32_t>(shape.segments);
  args.staged_columns = static_cast<int32_t>(staged_columns);

  const bool wide_x = NeedsWideX(first, call);
  const int per_launch = TokensPerLaunch(first, shape, rows, wide_x, call.n);
  if (call.n > 0 && per_launch == 0) return Unimplemented("row_stream_spmv: activations do not fit shared memory");
  for (int64_t token = 0; token < call.n; token += per_launch) {
    const int tokens = static_cast<int>(std::min<int64_t>(per_launch, call.n - token));
    args.x =
        static_cast<const uint8_t*>(call.x) + static_cast<uint64_t>(token * call.x_stride) * ElementSize(call.x_dtype);
    for (int i = 0; i < count; ++i) {
      args.layer[i].y = OffsetRow(calls[i].y, token, calls[i].y_stride, calls[i].y_dtype);
    }
    const RowStreamKernelKey key = {shape.coding,
                                    first.dtype == kBf16,
                                    shape.run_bits,
                                    tokens,
                                    wide_x,
                                    shape.segments > 1 ? RowStreamMode::kSegmented
                                    : count > 1        ? RowStreamMode::kGrouped
                                                       : RowStreamMode::kSingle,
                                    Choose(variant, tiles, shape.warps, first.device->multiprocessors)};
    const void* kernel = FindKernel(key);
    if (kernel == nullptr) return Unimplemented("row_stream_spmv: no kernel for this layer");
    args.x_early = (call.flags & SPMMD_CUDA_FLAG_CHAIN) == 0 && (reinterpret_cast<uintptr_t>(args.x) & 15) == 0;
    uint64_t shared = SharedBytes(shape, rows, tokens, wide_x, staged_columns);
    if ((call.flags & SPMMD_CUDA_FLAG_CHAIN) != 0) {
      // In a chain, blocks start as places become free. Let no multiprocessor take more than its even share of them, or
      // the first to be free holds up all: 5120x13824, coded, 50 %: 24.1 -> 18.1 us.
      const uint64_t share = static_cast<uint64_t>(CeilDiv(tiles, first.device->multiprocessors));
      const uint64_t all = first.device->max_shared_bytes + 1024;
      if (share <= 4) shared = std::max(shared, all / (share + 1) - 1024 + 128);
    }
    SPMMD_CUDA_TRY(AllowSharedBytes(kernel, first.device->index, shared));
    cudaLaunchAttribute chain = {};
    chain.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    chain.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(tiles));
    config.blockDim = dim3(static_cast<unsigned>(row_stream::kWarpLanes * shape.warps));
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &chain;
    config.numAttrs = (call.flags & SPMMD_CUDA_FLAG_CHAIN) != 0 ? 1 : 0;
    void* parameters[] = {&args};
    SPMMD_CUDA_CHECK(cudaLaunchKernelExC(&config, kernel, parameters));
  }
  return {};
}

Status ValidateRowStream(const LayerDesc& desc) {
  if (desc.layout_version != row_stream::kLayoutVersion) return DataLoss("ROW_STREAM: unknown layout version");
  if (desc.dtype == kF32) return DataLoss("ROW_STREAM: dtype is neither fp16 nor bf16");
  row_stream::Source source;
  source.m = desc.m;
  source.k = desc.k;
  source.nnz = desc.nnz;
  source.bf16 = desc.dtype == kBf16;
  std::copy(std::begin(desc.params), std::end(desc.params), source.params);
  const auto bytes = [&](uint32_t id) {
    const spmmd_cuda_section* section = FindSection(desc, id);
    return section == nullptr ? row_stream::Bytes{} : row_stream::Bytes{section->data, section->size};
  };
  source.stream = bytes(row_stream::kStreamSection);
  source.starts = bytes(row_stream::kStartSection);
  source.tiles = bytes(row_stream::kTileSection);
  source.bases = bytes(row_stream::kBaseSection);
  source.escapes = bytes(row_stream::kEscapeSection);
  source.row_order = bytes(row_stream::kRowOrderSection);
  row_stream::View view;
  const char* error = row_stream::Open(source, &view);
  if (error == nullptr) {
    error = row_stream::CheckDecode(view, [](int64_t tiles, const auto& body) { ParallelFor(tiles, body); });
  }
  return error == nullptr ? Status() : DataLoss(std::string("ROW_STREAM: ") + error);
}

const Kernel kRowStreamSpmv = {"row_stream_spmv", kFormatRowStream, false, CanImplement, ScratchBytes, Launch, false,
                               LaunchGroup,       GroupScratchBytes};

}  // namespace spmmd::cuda
