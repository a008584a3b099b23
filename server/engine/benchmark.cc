// Engine::Benchmark and Engine::Warm: one layer alone, run through the same queue and kernels as every request.
#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/packed_layer.h"
#include "server/catalog/types.h"
#include "server/engine/engine.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

constexpr int64_t kMaxTokens = 65536;
constexpr int kMaxWidths = 32;
constexpr int kMaxRepetitions = 10000;
constexpr int kDefaultRepetitions = 50;
constexpr int kWarmUp = 2;
// Weights read between two timed runs: several times the last-level cache of a CPU and the L2 cache of a GPU.
constexpr int64_t kEvictorRows = 8192;
constexpr int64_t kEvictorCols = 8192;
// One for each class of widths that kernels treat alike.
constexpr int64_t kDefaultWidths[] = {1, 2, 4, 8, 16, 32, 64};

// Y = X * W^T with one resident layer and N rows of noise.
class Probe {
 public:
  Probe(Device* device, const ResidentLayer* layer, int64_t tokens) : device_(device), layer_(layer) {
    auto plan = std::make_shared<Plan>();
    plan->input_names = {"x"};
    plan->input_dense_only = {false};
    plan->step_names = {"y"};
    plan->steps = {PlanStep()};
    plan->steps[0].layer = 0;
    plan->width_class = {0, 1};
    plan->class_cols = {layer->k(), layer->m()};
    plan->outputs = {PlanOutput()};
    plan->devices = {device};
    plan_ = std::move(plan);
    tokens_ = tokens;
    std::mt19937 random(1);
    std::uniform_real_distribution<float> noise(-1, 1);
    x_.resize(static_cast<size_t>(tokens * layer->k()));
    for (float& value : x_) value = noise(random);
    y_.resize(static_cast<size_t>(tokens * layer->m()));
  }

  // Runs once and waits. The lease keeps the layer.
  absl::Status Run(const std::shared_ptr<const ServedLayer>& lease, absl::Time deadline) {
    job_ = std::make_shared<Job>();
    job_->plan = plan_;
    job_->device = device_;
    job_->leases = {lease};
    job_->layers = {layer_};
    job_->rows = tokens_;
    job_->step_cols = {layer_->m()};
    job_->inputs.resize(1);
    job_->inputs[0].dense = {reinterpret_cast<const std::byte*>(x_.data()), DType::kF32, tokens_, layer_->k(),
                             layer_->k()};
    job_->outputs = {{reinterpret_cast<std::byte*>(y_.data()), DType::kF32, tokens_, layer_->m(), layer_->m()}};
    job_->deadline = deadline;
    job_->timed = true;
    absl::Status result;
    absl::Notification finished;
    job_->done = [&](absl::Status status) {
      result = std::move(status);
      finished.Notify();
    };
    device_->executor().Submit(job_);
    finished.WaitForNotification();
    if (result.ok()) seconds_.push_back(absl::ToDoubleSeconds(job_->kernel_time));
    return result;
  }

  void Forget() { seconds_.clear(); }
  double Quantile(double q) {
    std::sort(seconds_.begin(), seconds_.end());
    return seconds_[static_cast<size_t>(std::lround(q * static_cast<double>(seconds_.size() - 1)))];
  }
  const Job& last() const { return *job_; }

 private:
  Device* device_;
  const ResidentLayer* layer_;
  std::shared_ptr<const Plan> plan_;
  int64_t tokens_ = 0;
  std::vector<float> x_;
  std::vector<float> y_;
  std::shared_ptr<Job> job_;
  std::vector<double> seconds_;
};

// The layer's copies, brought back if they were evicted.
absl::StatusOr<std::shared_ptr<const ResidentCopies>> LoadBy(Residency* residency, const ServedLayer& layer,
                                                             absl::Time deadline) {
  return residency->Load(layer.content(), [deadline]() -> absl::Status {
    if (absl::Now() < deadline) return absl::OkStatus();
    return MakeError(absl::StatusCode::kDeadlineExceeded, reason::kDeadline,
                     "deadline passed before the layer was back");
  });
}

// The same matrix as DENSE on the same device.
absl::StatusOr<std::unique_ptr<ResidentLayer>> MakeDense(Device* device, const ResidentLayer& layer, DType dtype) {
  SPMMD_ASSIGN_OR_RETURN(
      MemoryBudget::Reservation memory,
      device->budget().Reserve(MemoryKind::kWeights, device->EstimateBytes(Format::kDense, dtype, layer.m(), layer.k(),
                                                                           layer.m() * layer.k())));
  SPMMD_ASSIGN_OR_RETURN(const DenseMatrix dense, device->ReadBack(layer));
  PackOptions options;
  options.allow_nonfinite = true;
  SPMMD_ASSIGN_OR_RETURN(PackedLayer packed, Pack(Format::kDense, dense.view(), options));
  return device->Load(std::move(packed), {}, std::move(memory));
}

// Reads other weights through the device's caches. A layer that is called again and again stays in them, which it does
// not in a model whose other layers come in between.
class Evictor {
 public:
  // Without effect where the layer is too large to stay in a cache, or where the device has no room for other weights.
  static absl::StatusOr<Evictor> Create(Device* device, const ResidentLayer& layer) {
    constexpr DType kType = DType::kF16;
    Evictor evictor;
    const uint64_t bytes =
        device->EstimateBytes(Format::kDense, kType, kEvictorRows, kEvictorCols, kEvictorRows * kEvictorCols);
    if (layer.bytes() > bytes) return evictor;
    absl::StatusOr<MemoryBudget::Reservation> memory = device->budget().Reserve(MemoryKind::kWeights, bytes);
    if (!memory.ok()) return evictor;
    SPMMD_ASSIGN_OR_RETURN(DenseMatrix zeros, DenseMatrix::Create(kType, kEvictorRows, kEvictorCols));
    SPMMD_ASSIGN_OR_RETURN(PackedLayer packed, Pack(Format::kDense, zeros.view(), {}));
    SPMMD_ASSIGN_OR_RETURN(evictor.weights_, device->Load(std::move(packed), {}, *std::move(memory)));
    evictor.probe_ = std::make_unique<Probe>(device, evictor.weights_.get(), /*tokens=*/1);
    return evictor;
  }

  absl::Status Run(const std::shared_ptr<const ServedLayer>& lease, absl::Time deadline) {
    return probe_ == nullptr ? absl::OkStatus() : probe_->Run(lease, deadline);
  }

 private:
  std::unique_ptr<ResidentLayer> weights_;
  std::unique_ptr<Probe> probe_;
};

}  // namespace

absl::Status Engine::Benchmark(const pb::BenchmarkRequest& request, pb::BenchmarkResponse* response,
                               absl::Time deadline) {
  if (request.tokens_size() > kMaxWidths) {
    return FieldError("tokens", absl::StrCat(request.tokens_size(), " entries, the limit is ", kMaxWidths));
  }
  const int64_t max_tokens = std::min(kMaxTokens, options_.max_tokens);
  for (int i = 0; i < request.tokens_size(); ++i) {
    if (request.tokens(i) < 1 || request.tokens(i) > max_tokens) {
      return FieldError(absl::StrCat("tokens[", i, "]"),
                        absl::StrCat(request.tokens(i), " is not within 1 to ", max_tokens));
    }
  }
  if (request.repetitions() < 0 || request.repetitions() > kMaxRepetitions) {
    return FieldError("repetitions", absl::StrCat(request.repetitions(), " is not within 0 to ", kMaxRepetitions));
  }
  const int repetitions = request.repetitions() == 0 ? kDefaultRepetitions : request.repetitions();
  std::vector<int64_t> widths(request.tokens().begin(), request.tokens().end());
  if (widths.empty()) widths.assign(std::begin(kDefaultWidths), std::end(kDefaultWidths));

  SPMMD_ASSIGN_OR_RETURN(const auto lease, catalog_->Find(request.layer().name(), request.layer().version()));
  // Copies are alike; of a sharded layer it is the first shard that is timed.
  const LayerContent::Copy& copy = lease->content().copies.front();
  SPMMD_ASSIGN_OR_RETURN(const auto copies, LoadBy(&catalog_->residency(), *lease, deadline));
  const ResidentLayer& resident = *copies->layers.front();
  copy.device->Tune(lease->content().dtype, resident);
  std::unique_ptr<ResidentLayer> dense;
  if (!request.skip_dense() && lease->content().format != Format::kDense) {
    SPMMD_ASSIGN_OR_RETURN(dense, MakeDense(copy.device, resident, lease->content().dtype));
  }
  SPMMD_ASSIGN_OR_RETURN(Evictor evictor, Evictor::Create(copy.device, resident));
  for (const int64_t tokens : widths) {
    const uint64_t bytes = static_cast<uint64_t>(tokens * (resident.m() + resident.k())) * sizeof(float);
    if (bytes > options_.max_output_bytes) {
      return FieldError("tokens", absl::StrCat(tokens, " tokens of this layer take ", bytes, " bytes, the limit is ",
                                               options_.max_output_bytes));
    }
    Probe probe(copy.device, &resident, tokens);
    std::unique_ptr<Probe> baseline;
    if (dense != nullptr) baseline = std::make_unique<Probe>(copy.device, dense.get(), tokens);
    // Turn by turn, so that both see the same machine.
    for (int i = -kWarmUp; i < repetitions; ++i) {
      if (i == 0) {
        probe.Forget();
        if (baseline != nullptr) baseline->Forget();
      }
      SPMMD_RETURN_IF_ERROR(evictor.Run(lease, deadline));
      SPMMD_RETURN_IF_ERROR(probe.Run(lease, deadline));
      if (baseline == nullptr) continue;
      SPMMD_RETURN_IF_ERROR(evictor.Run(lease, deadline));
      SPMMD_RETURN_IF_ERROR(baseline->Run(lease, deadline));
    }
    pb::LayerSpeed& speed = *response->add_speeds();
    speed.set_tokens(tokens);
    speed.set_format(ToProto(lease->content().format));
    speed.set_kernel(std::string(probe.last().kernel));
    speed.set_seconds_p50(probe.Quantile(0.5));
    speed.set_seconds_p10(probe.Quantile(0.1));
    speed.set_seconds_p90(probe.Quantile(0.9));
    speed.set_bytes(static_cast<uint64_t>(probe.last().kernel_bytes));
    speed.set_bytes_per_second(static_cast<double>(speed.bytes()) / speed.seconds_p50());
    if (baseline != nullptr) {
      speed.set_dense_seconds_p50(baseline->Quantile(0.5));
    } else if (lease->content().format == Format::kDense) {
      speed.set_dense_seconds_p50(speed.seconds_p50());
    }
  }
  lease->SetSpeeds({response->speeds().begin(), response->speeds().end()});
  return absl::OkStatus();
}

absl::Status Engine::Warm(const pb::WarmLayerRequest& request, pb::WarmLayerResponse* response, absl::Time deadline) {
  SPMMD_ASSIGN_OR_RETURN(const auto lease, catalog_->Find(request.layer().name(), request.layer().version()));
  SPMMD_ASSIGN_OR_RETURN(const auto copies, LoadBy(&catalog_->residency(), *lease, deadline));
  for (size_t i = 0; i < copies->layers.size(); ++i) {
    for (const int64_t tokens : kDefaultWidths) {
      if (tokens > options_.max_tokens) break;
      SPMMD_RETURN_IF_ERROR(
          Probe(lease->content().copies[i].device, copies->layers[i].get(), tokens).Run(lease, deadline));
    }
  }
  lease->Describe(/*full=*/true, response->mutable_layer());
  return absl::OkStatus();
}

}  // namespace spmmd::server
