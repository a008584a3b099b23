// From an ExecuteRequest to an ExecuteResponse: plan, check inputs, run on a device.
#ifndef SPMMD_SERVER_ENGINE_ENGINE_H_
#define SPMMD_SERVER_ENGINE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/catalog/catalog.h"
#include "server/engine/layer_loader.h"
#include "server/engine/payloads.h"
#include "server/engine/plan.h"
#include "server/metrics/metrics.h"
#include "server/pb.h"
#include "server/shm/region.h"
#include "spmm/v1/layer_catalog.pb.h"
#include "spmm/v1/sparse_matmul.pb.h"

namespace spmmd::server {

class Engine {
 public:
  struct Options {
    int64_t max_tokens = 65536;                     // N of one request
    uint64_t max_output_bytes = uint64_t{1} << 30;  // of all outputs of one request
    int64_t max_programs = 10000;                   // registered at a time
    int64_t max_batch_tokens = 512;                 // as the devices' executors have it
  };

  // A program with its plan, from an earlier request.
  class RegisteredProgram;
  using KnownProgram = std::shared_ptr<RegisteredProgram>;

  // Who asks, and what is not in the message.
  struct Caller {
    const RegionSet* regions = nullptr;  // of the connection; looked at before Execute returns
    bool hand_off = false;               // never run on the calling thread
    bool stay = false;                   // the calling thread does nothing else and is awake as it is
    // What the messages leave out. The inputs are read before Execute returns; the outputs are there when `done` is
    // called with OK. Null: the messages are whole.
    Payloads* payloads = nullptr;
    KnownProgram known;  // in place of the request's target
    // The program's serialised bytes, to Recall() it by once it has been planned. Empty: not.
    absl::string_view program_bytes;
  };
  // A program that an earlier request gave in these very bytes, lately; null when there was none.
  KnownProgram Recall(absl::string_view program_bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Handle of one Execute, for Cancel only. Null when it has ended already.
  using Call = std::shared_ptr<Job>;

  // Everything must outlive the engine.
  Engine(Options options, LayerCatalog* catalog, Metrics* metrics);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Runs one request. `done` is called exactly once: on this thread before Execute returns (error, or run inline), or
  // later on a device's thread; it must not block. `request` and `response` must stay alive and untouched until then;
  // the response is complete when done is called with OK and unspecified otherwise.
  Call Execute(const pb::ExecuteRequest& request, pb::ExecuteResponse* response, absl::Time deadline,
               absl::AnyInvocable<void(absl::Status)> done) {
    return Execute(request, response, deadline, Caller(), std::move(done));
  }
  Call Execute(const pb::ExecuteRequest& request, pb::ExecuteResponse* response, absl::Time deadline,
               const Caller& caller, absl::AnyInvocable<void(absl::Status)> done);
  // Has a device's thread that is awake run `task` instead of this one, as Executor::Offer does. A task is one small
  // Execute and what belongs to it.
  bool Offer(absl::AnyInvocable<void()>& task);
  // Ends the call soon with CANCELLED, or DEADLINE_EXCEEDED when its deadline has passed: at once when it waits, before
  // its next launch when it runs. Harmless on one that has ended, and on null.
  void Cancel(const Call& call);

  absl::Status RegisterProgram(const pb::RegisterProgramRequest& request, pb::RegisterProgramResponse* response);
  absl::Status UnregisterProgram(const pb::UnregisterProgramRequest& request);
  struct ProgramView {
    std::shared_ptr<const Plan> plan;
    std::shared_ptr<const void> identity;  // lives as long as the registration, or a run of it
  };
  // What a registered program takes and returns. NOT_FOUND; the errors of RegisterProgram when a layer is gone.
  absl::StatusOr<ProgramView> DescribeProgram(const std::string& program_id);
  std::vector<std::string> ProgramIds();
  // A registered program as it was given. NOT_FOUND.
  absl::StatusOr<pb::Program> GetProgram(const std::string& program_id);

  // These block: call them off the network threads. Their launches queue like everybody's; past the deadline they end
  // with DEADLINE_EXCEEDED.
  absl::Status Benchmark(const pb::BenchmarkRequest& request, pb::BenchmarkResponse* response,
                         absl::Time deadline = absl::InfiniteFuture());
  absl::Status Warm(const pb::WarmLayerRequest& request, pb::WarmLayerResponse* response,
                    absl::Time deadline = absl::InfiniteFuture());

  void DescribeDevices(pb::DeviceInfoResponse* response) const;
  // Formats and the engine's share of the limits (max_tokens, max_queue_depth, max_queue_bytes, max_batch_tokens); the
  // caller fills in the rest.
  void DescribeServer(pb::ServerInfoResponse* response) const;
  // Waits until no request waits or runs on any device, and no task that was offered.
  void Drain();

  const Options& options() const { return options_; }

 private:
  // Bounds of what is recalled.
  static constexpr size_t kMaxRecalled = 1024;
  static constexpr size_t kMaxRecalledBytes = size_t{16} << 10;  // of one program

  // Plans (or looks up) the program, takes leases on its layers and binds inputs and outputs.
  absl::Status Prepare(const pb::ExecuteRequest& request, const Caller& caller, pb::ExecuteResponse* response,
                       Job* job);
  // Submits a job whose copies are taken.
  static void Dispatch(const std::shared_ptr<Job>& job);
  // The least busy healthy device that has all layers, or the one whose memory the request names.
  static absl::Status ChooseDevice(Job* job);
  // One job for each device of a sharded plan, each with its columns of the outputs.
  static absl::Status SplitJob(Job* job);
  // Sets what the queue goes by: flow, priority, whether the job may share a launch.
  absl::Status Schedule(const pb::ExecuteRequest& request, Job* job) const;
  // `registered` is set for a program_id, and for one that is or will be recalled.
  absl::Status BindPlan(const pb::ExecuteRequest& request, const Caller& caller, Job* job,
                        std::shared_ptr<RegisteredProgram>* registered);
  // In the response or beside it, or where `slices` say.
  absl::Status PlaceOutputs(const std::vector<const pb::RegionSlice*>& slices, const Caller& caller, bool in_request,
                            pb::ExecuteResponse* response, Job* job);
  absl::StatusOr<std::shared_ptr<const Plan>> PlanOf(RegisteredProgram& registered);
  absl::StatusOr<std::shared_ptr<RegisteredProgram>> FindProgram(const std::string& program_id);

  const Options options_;
  LayerCatalog* const catalog_;
  Metrics* const metrics_;

  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, std::shared_ptr<RegisteredProgram>> programs_ ABSL_GUARDED_BY(mutex_);
  // By their bytes; emptied when it is full.
  absl::flat_hash_map<std::string, std::shared_ptr<RegisteredProgram>> recalled_ ABSL_GUARDED_BY(mutex_);
  // The last member: its thread calls the others.
  LayerLoader loader_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_ENGINE_ENGINE_H_
