// Jobs that wait for evicted layers to come back to their devices, and the thread that brings them.
//
// Jobs are served in the order in which they came, but one whose layers are all there goes on at once, whoever brought
// them. Only the first job holds layers while others are loaded for it, so that no two wait for each other's memory.
#ifndef SPMMD_SERVER_ENGINE_LAYER_LOADER_H_
#define SPMMD_SERVER_ENGINE_LAYER_LOADER_H_

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/catalog/residency.h"
#include "server/engine/plan.h"
#include "server/metrics/metrics.h"

namespace spmmd::server {

// Fills in the copies of the job's leases; false, and none, when one of them is evicted.
bool TakeCopies(Job* job);

class LayerLoader {
 public:
  struct Options {
    int64_t max_waiting = 1024;
    uint64_t max_bytes = uint64_t{256} * 1024 * 1024;  // of all jobs waiting
  };
  // Goes on with a job whose copies are taken.
  using Run = std::function<void(std::shared_ptr<Job>)>;

  // `run` is called on the loader's thread and must not block for long.
  LayerLoader(const Options& options, Residency* residency, Run run, Metrics* metrics);
  ~LayerLoader();
  LayerLoader(const LayerLoader&) = delete;
  LayerLoader& operator=(const LayerLoader&) = delete;

  // Takes a job with leases. Either it is run later, or its `done` is called, here or later: RESOURCE_EXHAUSTED (too
  // many wait; or the layers do not fit), DATA_LOSS (a layer's bytes are lost), DEADLINE_EXCEEDED, CANCELLED,
  // UNAVAILABLE after the end.
  void Submit(std::shared_ptr<Job> job) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends a job that waits; false when it does not, or not any more.
  bool Cancel(const std::shared_ptr<Job>& job, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until no job waits.
  void Drain() ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t waiting() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using JobList = std::list<std::shared_ptr<Job>>;

  void Loop();
  // Loads what the job needs. Holds it all, or none.
  absl::StatusOr<std::vector<std::shared_ptr<const ResidentCopies>>> LoadFor(const std::shared_ptr<Job>& job);
  // OK while the job waits and is worth it.
  absl::Status StillWanted(const std::shared_ptr<Job>& job) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes the job out; false when it is not there any more.
  bool Take(const std::shared_ptr<Job>& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Goes on with those whose layers are all there.
  void RunReady() ABSL_LOCKS_EXCLUDED(mutex_);
  void End(const std::shared_ptr<Job>& job, absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  // A job that was taken out is in other hands.
  void Passed() ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;
  Residency* const residency_;
  const Run run_;
  Metrics* const metrics_;

  mutable absl::Mutex mutex_;
  absl::CondVar work_;
  absl::CondVar idle_;
  JobList jobs_ ABSL_GUARDED_BY(mutex_);
  uint64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t unfinished_ ABSL_GUARDED_BY(mutex_) = 0;  // in the list, or taken out and not yet in other hands
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_ENGINE_LAYER_LOADER_H_
