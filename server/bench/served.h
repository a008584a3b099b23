// An engine called as the services call it, without a network: layers of random weights, and products with them.
#ifndef SPMMD_SERVER_BENCH_SERVED_H_
#define SPMMD_SERVER_BENCH_SERVED_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/catalog/catalog.h"
#include "server/engine/engine.h"
#include "server/pb.h"

namespace spmmd::server {

// Registers `spec` (name, m, k and whatever else matters) with fp16 values, half of them zero at random.
absl::Status RegisterRandom(LayerCatalog& catalog, pb::LayerSpec spec, uint32_t seed);

// A request that multiplies the layer by fp16 zeros, [tokens, cols].
pb::ExecuteRequest MatmulRequest(const std::string& layer, int64_t tokens, int64_t cols);

// Executes it and waits: the time from call to answer.
absl::StatusOr<absl::Duration> Run(Engine& engine, const pb::ExecuteRequest& request);

// The time that a share `q` of the calls stayed under, in microseconds. `times` is not empty.
double QuantileMicroseconds(std::vector<absl::Duration> times, double q);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_BENCH_SERVED_H_
