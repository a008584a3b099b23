#include "server/engine/layer_loader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/status_macros.h"
#include "server/catalog/layer.h"
#include "server/device/executor.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

constexpr absl::Duration kRetryAfter = absl::Milliseconds(100);

absl::Status Stopped() {
  return MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "the server is shutting down");
}

}  // namespace

bool TakeCopies(Job* job) {
  job->copies.clear();
  bool all = true;
  // All of them, so that all count as used.
  for (const auto& layer : job->leases) {
    job->copies.push_back(layer->content().residence.Use());
    all = all && job->copies.back() != nullptr;
  }
  if (!all) job->copies.clear();
  return all;
}

LayerLoader::LayerLoader(const Options& options, Residency* residency, Run run, Metrics* metrics)
    : options_(options), residency_(residency), run_(std::move(run)), metrics_(metrics) {
  metrics_->SetSource(Metrics::Gauge::kWaitingForLayers, [this] { return static_cast<uint64_t>(waiting()); });
  thread_ = std::thread([this] { Loop(); });
}

LayerLoader::~LayerLoader() {
  metrics_->SetSource(Metrics::Gauge::kWaitingForLayers, nullptr);
  JobList dropped;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    dropped.swap(jobs_);
    bytes_ = 0;
    work_.Signal();
  }
  for (const std::shared_ptr<Job>& job : dropped) End(job, Stopped());
  thread_.join();
}

void LayerLoader::Submit(std::shared_ptr<Job> job) {
  absl::Status refusal;
  {
    absl::MutexLock lock(&mutex_);
    ++unfinished_;
    refusal = stopping_ ? Stopped() : CheckWanted(*job, absl::Now());
    if (refusal.ok() && static_cast<int64_t>(jobs_.size()) >= options_.max_waiting) {
      refusal = Exhausted(reason::kQueueFull,
                          absl::StrCat(jobs_.size(), " requests wait for evicted layers, limit ", options_.max_waiting),
                          kRetryAfter, {{"limit", absl::StrCat(options_.max_waiting)}});
    }
    if (refusal.ok() && bytes_ + job->bytes > options_.max_bytes && !jobs_.empty()) {
      refusal = Exhausted(reason::kQueueBytes,
                          absl::StrCat(bytes_, " bytes wait for evicted layers and the request has ", job->bytes,
                                       ", limit ", options_.max_bytes),
                          kRetryAfter, {{"limit", absl::StrCat(options_.max_bytes)}});
    }
    if (refusal.ok()) {
      bytes_ += job->bytes;
      jobs_.push_back(std::move(job));
      work_.Signal();
      return;
    }
  }
  metrics_->Rejected(ReasonOf(refusal));
  End(job, std::move(refusal));
}

bool LayerLoader::Take(const std::shared_ptr<Job>& job) {
  const auto entry = std::find(jobs_.begin(), jobs_.end(), job);
  if (entry == jobs_.end()) return false;
  bytes_ -= job->bytes;
  jobs_.erase(entry);
  return true;
}

void LayerLoader::Passed() {
  absl::MutexLock lock(&mutex_);
  if (--unfinished_ == 0) idle_.SignalAll();
}

void LayerLoader::End(const std::shared_ptr<Job>& job, absl::Status status) {
  // The job itself may live on in a handle for Cancel(): what it holds goes now.
  job->copies.clear();
  job->leases.clear();
  job->buffers.clear();
  job->done(std::move(status));
  job->done = nullptr;
  Passed();
}

bool LayerLoader::Cancel(const std::shared_ptr<Job>& job, const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (!Take(job)) return false;
  }
  metrics_->Rejected(ReasonOf(status));
  End(job, status);
  return true;
}

void LayerLoader::Drain() {
  absl::MutexLock lock(&mutex_);
  while (unfinished_ > 0) idle_.Wait(&mutex_);
}

int64_t LayerLoader::waiting() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(jobs_.size());
}

absl::Status LayerLoader::StillWanted(const std::shared_ptr<Job>& job) const {
  absl::MutexLock lock(&mutex_);
  if (std::find(jobs_.begin(), jobs_.end(), job) == jobs_.end()) return absl::CancelledError("does not wait any more");
  return CheckWanted(*job, absl::Now());
}

absl::StatusOr<std::vector<std::shared_ptr<const ResidentCopies>>> LayerLoader::LoadFor(
    const std::shared_ptr<Job>& job) {
  // Its own leases: a job that is cancelled loses them.
  std::vector<std::shared_ptr<const ServedLayer>> layers;
  {
    absl::MutexLock lock(&mutex_);
    if (std::find(jobs_.begin(), jobs_.end(), job) != jobs_.end()) layers = job->leases;
  }
  std::vector<std::shared_ptr<const ResidentCopies>> copies;
  for (const auto& layer : layers) {
    SPMMD_ASSIGN_OR_RETURN(std::shared_ptr<const ResidentCopies> loaded,
                           residency_->Load(
                               layer->content(), [&] { return StillWanted(job); }, copies));
    copies.push_back(std::move(loaded));
  }
  return copies;
}

void LayerLoader::RunReady() {
  JobList ready;
  {
    absl::MutexLock lock(&mutex_);
    for (auto job = jobs_.begin(); job != jobs_.end();) {
      const auto next = std::next(job);
      if (TakeCopies(job->get())) {
        bytes_ -= (*job)->bytes;
        ready.splice(ready.end(), jobs_, job);
      }
      job = next;
    }
  }
  for (std::shared_ptr<Job>& job : ready) {
    run_(std::move(job));
    Passed();
  }
}

void LayerLoader::Loop() {
  while (true) {
    std::shared_ptr<Job> job;
    {
      absl::MutexLock lock(&mutex_);
      while (jobs_.empty() && !stopping_) work_.Wait(&mutex_);
      if (stopping_) return;
      job = jobs_.front();
    }
    auto loaded = GuardHostMemory([&] { return LoadFor(job); });
    bool taken = false;
    {
      absl::MutexLock lock(&mutex_);
      taken = Take(job);
    }
    if (taken && loaded.ok()) {
      job->copies = *std::move(loaded);
      run_(std::move(job));
      Passed();
    } else if (taken) {
      metrics_->Rejected(ReasonOf(loaded.status()));
      End(job, loaded.status());
    }
    loaded = absl::CancelledError();  // lets go of what a job that was cancelled meanwhile would have used
    RunReady();
  }
}

}  // namespace spmmd::server
