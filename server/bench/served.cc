#include "server/bench/served.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <utility>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "kernels/base/status_macros.h"

namespace spmmd::server {

absl::Status RegisterRandom(LayerCatalog& catalog, pb::LayerSpec spec, uint32_t seed) {
  spec.set_dtype(pb::DATA_TYPE_F16);
  spec.set_encoding(pb::SOURCE_ENCODING_DENSE);
  SPMMD_ASSIGN_OR_RETURN(const std::shared_ptr<Upload> upload, catalog.Begin(spec));
  std::mt19937 random(seed);
  const auto bytes = static_cast<uint64_t>(spec.m() * spec.k()) * sizeof(uint16_t);
  pb::ContentChunk chunk;
  chunk.set_part(pb::CONTENT_PART_VALUES);
  for (uint64_t offset = 0; offset < bytes;) {
    const uint64_t size = std::min<uint64_t>(bytes - offset, catalog.options().max_chunk_bytes);
    std::string& data = *chunk.mutable_data();
    data.resize(size);
    for (uint64_t i = 0; i < size; i += sizeof(uint16_t)) {
      const uint32_t bits = random();
      // Exponents near 1.
      const uint16_t value = (bits & 1) != 0 ? 0 : static_cast<uint16_t>(0x3800 | ((bits >> 1) & 0x87ff));
      std::memcpy(data.data() + i, &value, sizeof(value));
    }
    chunk.set_offset(offset);
    SPMMD_RETURN_IF_ERROR(upload->Append(chunk));
    offset += size;
  }
  return upload->Finish().status();
}

pb::ExecuteRequest MatmulRequest(const std::string& layer, int64_t tokens, int64_t cols) {
  pb::ExecuteRequest request;
  request.mutable_program()->add_inputs(std::string("x"));
  pb::Step& step = *request.mutable_program()->add_steps();
  step.set_name("y");
  step.mutable_matmul()->mutable_layer()->set_name(layer);
  step.mutable_matmul()->set_input("x");
  request.mutable_program()->add_outputs()->set_step("y");
  pb::NamedInput& input = *request.add_inputs();
  input.set_name("x");
  input.mutable_dense()->set_dtype(pb::DATA_TYPE_F16);
  input.mutable_dense()->add_shape(tokens);
  input.mutable_dense()->add_shape(cols);
  input.mutable_dense()->mutable_data()->resize(static_cast<size_t>(tokens * cols) * sizeof(uint16_t));
  return request;
}

absl::StatusOr<absl::Duration> Run(Engine& engine, const pb::ExecuteRequest& request) {
  pb::ExecuteResponse response;
  absl::Status status;
  absl::Notification done;
  const absl::Time start = absl::Now();
  engine.Execute(request, &response, absl::InfiniteFuture(), [&](absl::Status result) {
    status = std::move(result);
    done.Notify();
  });
  done.WaitForNotification();
  SPMMD_RETURN_IF_ERROR(status);
  return absl::Now() - start;
}

double QuantileMicroseconds(std::vector<absl::Duration> times, double q) {
  std::sort(times.begin(), times.end());
  return absl::ToDoubleMicroseconds(times[static_cast<size_t>(q * static_cast<double>(times.size() - 1))]);
}

}  // namespace spmmd::server
