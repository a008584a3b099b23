// Copies between a request's memory and a device. Pageable memory goes through page-locked slots: two a direction, so
// that filling or emptying one overlaps with the transfer of the other, and so that the pinned memory is bounded
// whatever a request brings. Large pieces that are page-locked themselves are copied where they lie.
#ifndef SPMMD_SERVER_DEVICE_CUDA_STAGING_H_
#define SPMMD_SERVER_DEVICE_CUDA_STAGING_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/device/cuda_context.h"

namespace spmmd::server {

class CudaStaging {
 public:
  static constexpr uint64_t kSlotBytes = uint64_t{4} << 20;

  // Bytes of a request that belong at an offset of a block of device memory.
  struct UploadPiece {
    const std::byte* from = nullptr;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    bool pinned = false;
  };
  struct DownloadPiece {
    std::byte* to = nullptr;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    bool pinned = false;
  };

  static absl::StatusOr<std::unique_ptr<CudaStaging>> Create(CudaContext* context);
  ~CudaStaging();
  CudaStaging(const CudaStaging&) = delete;
  CudaStaging& operator=(const CudaStaging&) = delete;

  // Enqueues the copies; pieces in ascending order of offset, without overlap. When it returns the memory of those that
  // are not pinned has been read. What lies between two pieces may be overwritten.
  absl::Status Upload(std::byte* block, absl::Span<const UploadPiece> pieces, spmmd_cuda_stream stream);
  // For small requests, whose copies are part of a graph: fills the first upload slot, whose bytes then stand for the
  // block's, and empties the first download slot. The caller enqueues the copies between slot and block, and waits.
  absl::Status Fill(absl::Span<const UploadPiece> pieces);
  void Empty(absl::Span<const DownloadPiece> pieces) const;
  const std::byte* upload_slot() const { return up_[0].memory.data(); }
  std::byte* download_slot() const { return down_[0].memory.data(); }
  // Returns once the pieces have their bytes: all that was enqueued on the stream before has ended then, unless there
  // are no pieces.
  absl::Status Download(const std::byte* block, absl::Span<const DownloadPiece> pieces, spmmd_cuda_stream stream);

 private:
  struct Slot {
    PinnedMemory memory;
    spmmd_cuda_event event = nullptr;
    bool pending = false;
  };

  explicit CudaStaging(CudaContext* context) : context_(context) {}
  absl::Status Await(Slot& slot);
  // Download of pieces through the slots.
  absl::Status DownloadStaged(const std::byte* block, absl::Span<const DownloadPiece> pieces, spmmd_cuda_stream stream);

  CudaContext* const context_;
  std::array<Slot, 2> up_;
  std::array<Slot, 2> down_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_CUDA_STAGING_H_
