// One RegisterLayer call. Internal to the client library.
#ifndef SPMMD_CLIENT_CPP_UPLOAD_H_
#define SPMMD_CLIENT_CPP_UPLOAD_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/layer_content.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/byte_buffer.h"

namespace spmmd::client {

// The bytes of RegisterLayerRequest{chunk: {part, offset, data}}, made with a single copy of the data: the generated
// message would copy them in, and out again to the wire.
grpc::ByteBuffer EncodeChunk(v1::ContentPart part, uint64_t offset, absl::Span<const std::byte> data);

// Runs the whole conversation on a prepared context; returns when the server has ended it. `content` may be null when
// the spec names a file. Sends what the server does not have. `under_way` tells of a failure whether the server had
// asked for content.
absl::StatusOr<RegisterResult> RunUpload(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext& context,
                                         const v1::LayerSpec& spec, const LayerContent* content, size_t chunk_bytes,
                                         const ProgressCallback& progress, bool* under_way);

}  // namespace spmmd::client

#endif  // SPMMD_CLIENT_CPP_UPLOAD_H_
