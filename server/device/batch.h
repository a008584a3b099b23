// Which jobs may share a launch. Requests are joined along N: the rows of one follow those of another in X and in Y.
#ifndef SPMMD_SERVER_DEVICE_BATCH_H_
#define SPMMD_SERVER_DEVICE_BATCH_H_

#include "server/engine/plan.h"

namespace spmmd::server {

// Whether both may run as one: the same steps over the same layers, dense inputs of equal types and widths, and neither
// asks to be alone (Job::joinable).
bool CanJoin(const Job& a, const Job& b);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_BATCH_H_
