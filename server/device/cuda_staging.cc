#include "server/device/cuda_staging.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/status_macros.h"

namespace spmmd::server {
namespace {

// Below this one more copy in memory costs less than one more copy of the device's.
constexpr uint64_t kMinDirectBytes = uint64_t{32} << 10;

template <typename Piece>
bool IsDirect(const Piece& piece) {
  return piece.pinned && piece.bytes >= kMinDirectBytes;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaStaging>> CudaStaging::Create(CudaContext* context) {
  std::unique_ptr<CudaStaging> staging(new CudaStaging(context));
  for (auto* slots : {&staging->up_, &staging->down_}) {
    for (Slot& slot : *slots) {
      SPMMD_ASSIGN_OR_RETURN(slot.memory, PinnedMemory::Allocate(context, kSlotBytes));
      SPMMD_RETURN_IF_ERROR(context->Check(context->cuda().event_create(context->device(), /*timing=*/0, &slot.event)));
    }
  }
  return staging;
}

CudaStaging::~CudaStaging() {
  for (auto* slots : {&up_, &down_}) {
    for (Slot& slot : *slots) {
      if (slot.event != nullptr) context_->cuda().event_destroy(context_->device(), slot.event);
    }
  }
}

absl::Status CudaStaging::Await(Slot& slot) {
  if (!slot.pending) return absl::OkStatus();
  slot.pending = false;
  return context_->Check(context_->cuda().event_synchronize(context_->device(), slot.event));
}

absl::Status CudaStaging::Upload(std::byte* block, absl::Span<const UploadPiece> pieces, spmmd_cuda_stream stream) {
  const CudaLibrary& cuda = context_->cuda();
  size_t current = 0;
  uint64_t begin = 0;  // the slot stands for [begin, begin + used) of the block
  uint64_t used = 0;
  const auto flush = [&]() -> absl::Status {
    if (used == 0) return absl::OkStatus();
    Slot& slot = up_[current];
    SPMMD_RETURN_IF_ERROR(
        context_->Check(cuda.memcpy_async(context_->device(), block + begin, slot.memory.data(), used, stream)));
    SPMMD_RETURN_IF_ERROR(context_->Check(cuda.event_record(context_->device(), slot.event, stream)));
    slot.pending = true;
    current = (current + 1) % up_.size();
    used = 0;
    return absl::OkStatus();
  };
  for (const UploadPiece& piece : pieces) {
    if (IsDirect(piece)) {
      SPMMD_RETURN_IF_ERROR(flush());  // it may cover this piece's place
      SPMMD_RETURN_IF_ERROR(context_->Check(
          cuda.memcpy_async(context_->device(), block + piece.offset, piece.from, piece.bytes, stream)));
      continue;
    }
    for (uint64_t done = 0; done < piece.bytes;) {
      const uint64_t at = piece.offset + done;
      if (used > 0 && at >= begin + kSlotBytes) SPMMD_RETURN_IF_ERROR(flush());
      if (used == 0) {
        SPMMD_RETURN_IF_ERROR(Await(up_[current]));
        begin = at;
      }
      const uint64_t count = std::min(piece.bytes - done, begin + kSlotBytes - at);
      std::memcpy(up_[current].memory.data() + (at - begin), piece.from + done, count);
      used = at - begin + count;
      done += count;
    }
  }
  return flush();
}

absl::Status CudaStaging::Fill(absl::Span<const UploadPiece> pieces) {
  SPMMD_RETURN_IF_ERROR(Await(up_[0]));
  for (const UploadPiece& piece : pieces) {
    std::memcpy(up_[0].memory.data() + piece.offset, piece.from, piece.bytes);
  }
  return absl::OkStatus();
}

void CudaStaging::Empty(absl::Span<const DownloadPiece> pieces) const {
  for (const DownloadPiece& piece : pieces) {
    std::memcpy(piece.to, down_[0].memory.data() + piece.offset, piece.bytes);
  }
}

absl::Status CudaStaging::Download(const std::byte* block, absl::Span<const DownloadPiece> pieces,
                                   spmmd_cuda_stream stream) {
  bool direct = false;
  for (size_t begin = 0; begin < pieces.size();) {
    size_t end = begin;
    while (end < pieces.size() && !IsDirect(pieces[end])) ++end;
    if (end > begin) {
      SPMMD_RETURN_IF_ERROR(DownloadStaged(block, pieces.subspan(begin, end - begin), stream));
      direct = false;  // it has waited for what was enqueued before
      begin = end;
      continue;
    }
    const DownloadPiece& piece = pieces[begin++];
    SPMMD_RETURN_IF_ERROR(context_->Check(
        context_->cuda().memcpy_async(context_->device(), piece.to, block + piece.offset, piece.bytes, stream)));
    direct = true;
  }
  return direct ? context_->Check(context_->cuda().stream_synchronize(context_->device(), stream)) : absl::OkStatus();
}

absl::Status CudaStaging::DownloadStaged(const std::byte* block, absl::Span<const DownloadPiece> pieces,
                                         spmmd_cuda_stream stream) {
  const CudaLibrary& cuda = context_->cuda();
  const uint64_t end = pieces.back().offset + pieces.back().bytes;
  // Chunk c is bytes [first + c * kSlotBytes, ...) of the block, in slot c % 2.
  const uint64_t first = pieces.front().offset;
  const uint64_t chunks = (end - first + kSlotBytes - 1) / kSlotBytes;
  const auto request = [&](uint64_t chunk) -> absl::Status {
    Slot& slot = down_[chunk % down_.size()];
    const uint64_t from = first + chunk * kSlotBytes;
    SPMMD_RETURN_IF_ERROR(context_->Check(cuda.memcpy_async(context_->device(), slot.memory.data(), block + from,
                                                            std::min(kSlotBytes, end - from), stream)));
    SPMMD_RETURN_IF_ERROR(context_->Check(cuda.event_record(context_->device(), slot.event, stream)));
    slot.pending = true;
    return absl::OkStatus();
  };
  size_t piece = 0;
  for (uint64_t chunk = 0; chunk < std::min<uint64_t>(chunks, down_.size()); ++chunk) {
    SPMMD_RETURN_IF_ERROR(request(chunk));
  }
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    Slot& slot = down_[chunk % down_.size()];
    SPMMD_RETURN_IF_ERROR(Await(slot));
    const uint64_t from = first + chunk * kSlotBytes;
    const uint64_t to = std::min(end, from + kSlotBytes);
    while (piece < pieces.size() && pieces[piece].offset < to) {
      const DownloadPiece& p = pieces[piece];
      const uint64_t begin = std::max(p.offset, from);
      const uint64_t stop = std::min(p.offset + p.bytes, to);
      if (begin < stop) std::memcpy(p.to + (begin - p.offset), slot.memory.data() + (begin - from), stop - begin);
      if (p.offset + p.bytes > to) break;  // goes on in the next chunk
      ++piece;
    }
    if (chunk + down_.size() < chunks) SPMMD_RETURN_IF_ERROR(request(chunk + down_.size()));
  }
  return absl::OkStatus();
}

}  // namespace spmmd::server
