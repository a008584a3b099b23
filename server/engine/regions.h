// Tensors of a request that lie in shared memory: finds the regions, checks the pieces, and keeps both for the job.
#ifndef SPMMD_SERVER_ENGINE_REGIONS_H_
#define SPMMD_SERVER_ENGINE_REGIONS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/dtype.h"
#include "server/engine/plan.h"
#include "server/pb.h"
#include "server/shm/region.h"
#include "spmm/v1/types.pb.h"

namespace spmmd::server {

// Where `bytes` elements of `dtype` lie that a slice names; the job holds the region from here on. Errors name `path`:
// NOT_FOUND for a region that the caller has not registered, INVALID_ARGUMENT for bounds, a size other than `bytes`,
// misaligned elements, and an output that shares bytes with an input or another output of the job, FAILED_PRECONDITION
// for a region whose memory is gone or lies on another device than the job's other regions.
absl::StatusOr<std::byte*> BindSlice(const RegionSet* regions, const pb::RegionSlice& slice, const std::string& path,
                                     DType dtype, uint64_t bytes, bool output, Job* job);

// After the run: whether the memory was there all the time.
absl::Status CheckRegions(const Job& job);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_ENGINE_REGIONS_H_
