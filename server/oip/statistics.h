// What ModelStatistics tells: counts and times of each model's requests, from the engine's own measurements.
#ifndef SPMMD_SERVER_OIP_STATISTICS_H_
#define SPMMD_SERVER_OIP_STATISTICS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "inference/grpc_service.pb.h"
#include "server/oip/model.h"
#include "spmm/v1/sparse_matmul.pb.h"

namespace spmmd::server {

// One model's. Thread-safe.
class ModelNumbers {
 public:
  // A request that succeeded: `timing` of the engine, rows, and how long the conversion to it and the answer took.
  void Succeeded(const spmm::v1::ExecuteTiming& timing, int64_t rows, absl::Duration input, absl::Duration output);
  void Failed(absl::Duration total);
  // Fills in everything but name, version and memory.
  void Describe(inference::ModelStatistics* out) const;

 private:
  struct Sum {
    uint64_t count = 0;
    absl::Duration time;
    void Add(absl::Duration duration, uint64_t times = 1) {
      count += times;
      time += duration;
    }
    void Write(inference::StatisticDuration* out) const;
  };
  struct Stages {
    Sum input;
    Sum infer;
    Sum output;
  };
  // Different numbers of rows in a launch that are told apart. Those beyond are in the totals only.
  static constexpr size_t kMaxBatchSizes = 64;

  mutable absl::Mutex mutex_;
  absl::Time last_ ABSL_GUARDED_BY(mutex_) = absl::UnixEpoch();
  uint64_t rows_ ABSL_GUARDED_BY(mutex_) = 0;
  // A request that shared its launch with n - 1 others took an n-th of it.
  double launches_ ABSL_GUARDED_BY(mutex_) = 0;
  Sum success_ ABSL_GUARDED_BY(mutex_);
  Sum fail_ ABSL_GUARDED_BY(mutex_);
  Sum queue_ ABSL_GUARDED_BY(mutex_);
  Stages stages_ ABSL_GUARDED_BY(mutex_);
  struct Batch {
    double launches = 0;
    Stages stages;
  };
  std::map<int64_t, Batch> batches_ ABSL_GUARDED_BY(mutex_);
};

// All models'. An entry goes with its model; a model registered anew under an old name starts from zero. Thread-safe.
class StatisticsTable {
 public:
  // Made at the first request.
  std::shared_ptr<ModelNumbers> Of(const Model& model);
  // Null before the first request.
  std::shared_ptr<const ModelNumbers> Find(const Model& model) const;

 private:
  struct Entry {
    std::weak_ptr<const void> identity;
    std::shared_ptr<ModelNumbers> numbers;
  };
  // Entries of models that are gone may be as many as those of models that are not, and this many.
  static constexpr size_t kSlack = 64;

  mutable absl::Mutex mutex_;
  absl::flat_hash_map<std::pair<std::string, int64_t>, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  size_t sweep_at_ ABSL_GUARDED_BY(mutex_) = kSlack;
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_OIP_STATISTICS_H_
