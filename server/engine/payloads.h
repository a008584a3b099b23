// The bytes of large tensors, beside the messages that describe them: on the way in they are copied once, from where
// the network put them to where the device reads them; on the way out not at all.
#ifndef SPMMD_SERVER_ENGINE_PAYLOADS_H_
#define SPMMD_SERVER_ENGINE_PAYLOADS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "server/device/host_buffers.h"

namespace spmmd::server {

struct Payloads {
  // Tensors from this size on are worth it.
  static constexpr uint64_t kMinBytes = uint64_t{4} << 10;

  struct Input {
    std::vector<absl::Span<const std::byte>> pieces;
    uint64_t bytes = 0;  // of all of them

    bool present() const { return !pieces.empty(); }
  };
  // By the index in ExecuteRequest.inputs: what stands for `dense.data`, which is set and empty in the message. Those
  // that are not present, or not there at all, are in the message.
  std::vector<Input> inputs;
  // By the index in ExecuteResponse.outputs, filled in by the engine: stands for `tensor.data`, which is set and empty
  // in the message. One without a block is in the message.
  std::vector<HostBuffer> outputs;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_ENGINE_PAYLOADS_H_
