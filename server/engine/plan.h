// A checked program in the form that devices execute, and one run of it. Names, protos and the catalog are already gone
// here: values are numbered, inputs first, then one for each step.
#ifndef SPMMD_SERVER_ENGINE_PLAN_H_
#define SPMMD_SERVER_ENGINE_PLAN_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/base/activation.h"
#include "kernels/format/dense.h"
#include "server/device/host_buffers.h"

namespace spmmd::server {

class Device;
class Region;
struct ResidentCopies;
class ResidentLayer;
class ServedLayer;

struct PlanStep {
  enum class Op : uint8_t { kMatmul, kAdd, kMul };
  Op op = Op::kMatmul;
  int left = 0;    // value read
  int right = -1;  // second operand of kAdd and kMul
  int layer = -1;  // index into Plan::layers, kMatmul only
  Activation activation = Activation::kNone;
  bool use_bias = false;                      // kMatmul of a layer that has one
  std::optional<float> activation_threshold;  // kMatmul: |x| <= this counts as zero
  int last_use = -1;                          // last step that reads this step's value; -1: none

  bool operator==(const PlanStep&) const = default;
};

struct PlanOutput {
  int step = 0;
  DType dtype = DType::kF32;

  bool operator==(const PlanOutput&) const = default;
};

// Immutable once planned; shared by all its runs. Holds no lease: a plan kept for later (a registered program) must not
// keep an unregistered layer in memory.
struct Plan {
  std::vector<std::string> input_names;
  std::vector<bool> input_dense_only;  // read by an element-wise step
  std::vector<std::string> step_names;
  std::vector<PlanStep> steps;
  // Values that must have equal numbers of columns form a width class; the class of every value, and each class's
  // columns: -1 when only a request's inputs decide (nothing but element-wise steps reads them).
  std::vector<int> width_class;
  std::vector<int64_t> class_cols;
  std::vector<PlanOutput> outputs;
  std::vector<std::weak_ptr<const ServedLayer>> layers;  // distinct
  // Devices that hold every layer whole: a run takes one of them. Of a sharded plan, the devices that hold a part of
  // the rows of every layer, in the order of the rows: a run takes all of them, and each computes its columns (ShareOf)
  // of every step. Programs without a matmul run on any device.
  std::vector<Device*> devices;
  bool sharded = false;
  std::vector<bool> input_sliced;  // sharded: read by element-wise steps, so that a shard takes its columns only
};

// Columns of a step's value, or rows of a layer, that shard `index` of `count` has: whole groups of 64 when there are
// enough for everybody.
inline std::pair<int64_t, int64_t> ShareOf(int64_t extent, int64_t index, int64_t count) {
  const int64_t unit = extent >= 64 * count ? 64 : 1;
  const int64_t units = (extent + unit - 1) / unit;
  return {std::min(extent, units * index / count * unit), std::min(extent, units * (index + 1) / count * unit)};
}

// Rows of activations given by their nonzeros; validated, see SparseTensor.
struct SparseRows {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<uint64_t> offsets;        // rows + 1
  absl::Span<const uint32_t> indices;   // into the request, or into `owned_indices`
  std::vector<uint32_t> owned_indices;  // when they come from no request
  std::vector<float> values;            // widened
};

// The value of one program input.
struct InputValue {
  DenseView dense;         // when !sparse
  bool on_device = false;  // `dense` is memory of Job::memory_device
  bool pinned = false;     // `dense` is page-locked
  std::optional<SparseRows> sparse;
};

// A piece of shared memory that a job reads or writes.
struct RegionUse {
  std::shared_ptr<const Region> region;
  const std::byte* data = nullptr;
  uint64_t bytes = 0;
  bool output = false;
  std::string path;  // of the field that named it
};

// One run of a plan: what a device's queue holds. All memory that it points to (request, response) outlives `done`.
struct Job {
  std::shared_ptr<const Plan> plan;
  Device* device = nullptr;                                // where it runs
  std::vector<std::shared_ptr<Job>> shards;                // runs on several devices that make up this one
  std::vector<std::shared_ptr<const ServedLayer>> leases;  // by Plan::layers index: registered until the run has ended
  std::vector<std::shared_ptr<const ResidentCopies>> copies;  // of them, in memory until then
  std::vector<const ResidentLayer*> layers;                   // by Plan::layers index, on `device`
  int64_t rows = 0;                                           // N
  std::vector<int64_t> step_cols;                             // columns of each step's value
  std::vector<InputValue> inputs;                             // by Plan::input_names index
  std::vector<MutableDenseView> outputs;                      // by Plan::outputs index
  uint32_t outputs_on_device = 0;                             // bit o: outputs[o] is memory of `memory_device`
  uint32_t outputs_pinned = 0;                                // bit o: outputs[o] is page-locked
  std::vector<HostBuffer> buffers;                            // that inputs point into
  std::vector<RegionUse> regions;                             // shared memory among inputs and outputs
  const Device* memory_device = nullptr;                      // the run must be here: regions are this device's memory
  uint64_t bytes = 0;                                         // of inputs and outputs, for admission
  absl::Time deadline = absl::InfiniteFuture();
  // Jobs of one flow share a place in the round of a device's queue. Any address: only its identity counts.
  const void* flow = nullptr;
  bool background = false;     // runs when nothing else waits
  bool joinable = false;       // may share a launch with others along N
  bool deterministic = false;  // a layer is: the kernel depends on nothing but layer and shape
  bool timed = false;          // by what it took itself, not by what an equal run took before
  bool hand_off = false;       // never on the submitting thread
  bool stay = false;           // on it rather than on a thread of the device that is awake
  // Called exactly once, on the submitting thread, on the device's executor thread or on the thread that cancels.
  absl::AnyInvocable<void(absl::Status)> done;

  // Filled in by the device.
  absl::Duration queue_time;
  absl::Duration kernel_time;
  int32_t batch_jobs = 0;    // that ran as one with this one, and itself
  int64_t batch_rows = 0;    // of all of them
  absl::string_view kernel;  // of the last launch; static storage
  int64_t kernel_bytes = 0;
  // Set by Device::Cancel; looked at before each launch.
  std::atomic<bool> cancelled{false};
  absl::Time submitted;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_ENGINE_PLAN_H_
