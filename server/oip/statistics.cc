#include "server/oip/statistics.h"

#include <algorithm>
#include <cmath>

#include "absl/time/clock.h"

namespace spmmd::server {
namespace {

absl::Duration ToDuration(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

}  // namespace

void ModelNumbers::Sum::Write(inference::StatisticDuration* out) const {
  out->set_count(count);
  out->set_ns(static_cast<uint64_t>(std::max<int64_t>(0, absl::ToInt64Nanoseconds(time))));
}

void ModelNumbers::Succeeded(const spmm::v1::ExecuteTiming& timing, int64_t rows, absl::Duration input,
                             absl::Duration output) {
  const absl::Duration queue = ToDuration(timing.queue());
  const absl::Duration infer = ToDuration(timing.kernel());
  const absl::Duration total = ToDuration(timing.total());
  // What the engine does around the kernels: checks, copies to and from the device.
  input += std::max(absl::ZeroDuration(), total - queue - infer);
  const double share = 1.0 / std::max(1, timing.batch_requests());
  const absl::Time now = absl::Now();
  absl::MutexLock lock(&mutex_);
  last_ = now;
  rows_ += static_cast<uint64_t>(rows);
  launches_ += share;
  success_.Add(queue + input + infer + output);
  queue_.Add(queue);
  const auto add = [&](Stages* stages) {
    stages->input.Add(input);
    stages->infer.Add(infer);
    stages->output.Add(output);
  };
  add(&stages_);
  auto batch = batches_.find(timing.batch_tokens());
  if (batch == batches_.end()) {
    if (batches_.size() == kMaxBatchSizes) return;
    batch = batches_.try_emplace(timing.batch_tokens()).first;
  }
  batch->second.launches += share;
  add(&batch->second.stages);
}

void ModelNumbers::Failed(absl::Duration total) {
  absl::MutexLock lock(&mutex_);
  fail_.Add(total);
}

void ModelNumbers::Describe(inference::ModelStatistics* out) const {
  absl::MutexLock lock(&mutex_);
  out->set_last_inference(static_cast<uint64_t>(absl::ToUnixMillis(last_)));
  out->set_inference_count(rows_);
  out->set_execution_count(static_cast<uint64_t>(std::llround(launches_)));
  inference::InferStatistics& stats = *out->mutable_inference_stats();
  success_.Write(stats.mutable_success());
  fail_.Write(stats.mutable_fail());
  queue_.Write(stats.mutable_queue());
  stages_.input.Write(stats.mutable_compute_input());
  stages_.infer.Write(stats.mutable_compute_infer());
  stages_.output.Write(stats.mutable_compute_output());
  stats.mutable_cache_hit();
  stats.mutable_cache_miss();
  for (const auto& [tokens, batch] : batches_) {
    inference::InferBatchStatistics& line = *out->add_batch_stats();
    line.set_batch_size(static_cast<uint64_t>(tokens));
    const auto write = [&](const Sum& sum, inference::StatisticDuration* to) {
      // Requests that shared a launch each measured all of it: a launch's time is their average.
      const auto launches = static_cast<uint64_t>(std::llround(batch.launches));
      Sum of_launches{launches, sum.count == 0 ? absl::ZeroDuration()
                                               : sum.time * (batch.launches / static_cast<double>(sum.count))};
      of_launches.Write(to);
    };
    write(batch.stages.input, line.mutable_compute_input());
    write(batch.stages.infer, line.mutable_compute_infer());
    write(batch.stages.output, line.mutable_compute_output());
  }
}

std::shared_ptr<ModelNumbers> StatisticsTable::Of(const Model& model) {
  absl::MutexLock lock(&mutex_);
  Entry& entry = entries_[{model.name, model.version}];
  if (entry.numbers == nullptr || entry.identity.lock() != model.identity) {
    entry = {model.identity, std::make_shared<ModelNumbers>()};
  }
  std::shared_ptr<ModelNumbers> numbers = entry.numbers;
  if (entries_.size() > sweep_at_) {
    absl::erase_if(entries_, [](const auto& item) { return item.second.identity.expired(); });
    sweep_at_ = 2 * entries_.size() + kSlack;
  }
  return numbers;
}

std::shared_ptr<const ModelNumbers> StatisticsTable::Find(const Model& model) const {
  absl::MutexLock lock(&mutex_);
  const auto entry = entries_.find(std::make_pair(model.name, model.version));
  if (entry == entries_.end() || entry->second.identity.lock() != model.identity) return nullptr;
  return entry->second.numbers;
}

}  // namespace spmmd::server
