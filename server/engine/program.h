// The planner: checks a Program against the catalog and numbers its values.
#ifndef SPMMD_SERVER_ENGINE_PROGRAM_H_
#define SPMMD_SERVER_ENGINE_PROGRAM_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/catalog/catalog.h"
#include "server/engine/payloads.h"
#include "server/engine/plan.h"
#include "server/pb.h"
#include "server/shm/region.h"
#include "spmm/v1/sparse_matmul.pb.h"

namespace spmmd::server {

inline constexpr int kMaxInputs = 16;
inline constexpr int kMaxSteps = 64;
inline constexpr int kMaxOutputs = 16;
inline constexpr int kMaxNameLength = 64;

// INVALID_ARGUMENT naming the field ("program.steps[2].matmul.input"): a bad or repeated name, a step that reads
// itself, a later step or an unknown name, columns that do not fit, an unknown enum value, a limit. NOT_FOUND for a
// layer. Where outputs go is no part of a plan: slices of regions are looked at when it runs.
absl::StatusOr<std::shared_ptr<const Plan>> PlanProgram(const pb::Program& program, const LayerCatalog& catalog);

// Checks the inputs of a request against a plan and points the job at their bytes: dtype, shape, byte counts, sparse
// offsets and indices; sets job.rows. Regions are looked up in `regions` (null: none). What `payloads` (null: none)
// hold is gathered into buffers of the job. `request` must outlive the job.
absl::Status BindInputs(const pb::ExecuteRequest& request, const Plan& plan, int64_t max_tokens,
                        const RegionSet* regions, const Payloads* payloads, Job* job);

// Where each output of the plan goes: its slice in shared memory, or null for the response. `program` is the request's
// or the registered one; the request's own `outputs` replace what that says. INVALID_ARGUMENT naming "outputs[i]".
absl::StatusOr<std::vector<const pb::RegionSlice*>> FindOutputSlices(const pb::ExecuteRequest& request,
                                                                     const pb::Program& program, const Plan& plan);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_ENGINE_PROGRAM_H_
