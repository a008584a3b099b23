#include "server/device/batch.h"

namespace spmmd::server {

bool CanJoin(const Job& a, const Job& b) {
  if (!a.joinable || !b.joinable) return false;
  if (a.layers != b.layers || a.step_cols != b.step_cols || a.inputs.size() != b.inputs.size()) return false;
  if (a.plan != b.plan && (a.plan->steps != b.plan->steps || a.plan->outputs != b.plan->outputs)) {
    return false;
  }
  for (size_t i = 0; i < a.inputs.size(); ++i) {
    if (a.inputs[i].sparse.has_value() || b.inputs[i].sparse.has_value()) return false;
    if (a.inputs[i].dense.dtype != b.inputs[i].dense.dtype || a.inputs[i].dense.cols != b.inputs[i].dense.cols) {
      return false;
    }
  }
  return true;
}

}  // namespace spmmd::server
