// The bytes of one upload: where they go, in which order they may come, and their hash.
#ifndef SPMMD_SERVER_CATALOG_CONTENT_H_
#define SPMMD_SERVER_CATALOG_CONTENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/buffer.h"
#include "kernels/format/dense.h"
#include "server/catalog/spec.h"
#include "server/pb.h"
#include "spmm/v1/layer_catalog.pb.h"

struct XXH3_state_s;

namespace spmmd::server {

class Content {
 public:
  // `spec` is checked and normalised. Allocates nothing until bytes come.
  explicit Content(const pb::LayerSpec& spec);
  ~Content();
  Content(const Content&) = delete;
  Content& operator=(const Content&) = delete;

  uint64_t bytes() const { return bytes_; }
  uint64_t received() const { return received_; }

  // As Upload::Append. RESOURCE_EXHAUSTED when the host has no memory for the part. Of a content that was `resumed`,
  // bytes that are here already may come again, and are passed over.
  absl::Status Append(const pb::ContentChunk& chunk, uint64_t max_chunk_bytes, bool resumed = false);
  // Of every part of which there are bytes, in hash order.
  std::vector<PartSize> ReceivedParts() const;
  // In place of Append: everything at once, from a file. `bias` is empty or has M values.
  absl::Status SetDense(DenseMatrix weights, const std::vector<float>& bias);

  // INVALID_ARGUMENT (TRUNCATED_UPLOAD) naming the first part that misses bytes.
  absl::Status CheckComplete() const;
  // XXH3-128 over the parts in order, 32 hex digits. Only when complete.
  std::string Hash() const;

  // The weights as a dense matrix of the uploaded type; the parts are freed. INVALID_ARGUMENT for bad offsets or
  // indices.
  absl::StatusOr<DenseMatrix> TakeWeights();
  // Empty or M values. INVALID_ARGUMENT with the position of a value that is not finite, unless allowed.
  absl::StatusOr<std::vector<float>> TakeBias();

 private:
  struct Part {
    pb::ContentPart id = pb::CONTENT_PART_UNSPECIFIED;
    uint64_t bytes = 0;
    uint64_t received = 0;
    Buffer buffer;  // unless `dense_` is the destination
    std::byte* data = nullptr;
  };

  absl::Status Allocate(Part* part);
  // Hashes what has become contiguous.
  void AdvanceHash();
  absl::Span<const std::byte> BytesOf(pb::ContentPart id) const;

  const pb::LayerSpec spec_;
  std::vector<Part> parts_;
  DenseMatrix dense_;  // VALUES of a DENSE upload
  uint64_t bytes_ = 0;
  uint64_t received_ = 0;
  XXH3_state_s* hash_;
  size_t hash_part_ = 0;
  uint64_t hash_offset_ = 0;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_CATALOG_CONTENT_H_
