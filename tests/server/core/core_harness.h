// The serving core without sockets: one CPU device that can be held up, a catalog and an engine.
#ifndef SPMMD_TESTS_SERVER_CORE_CORE_HARNESS_H_
#define SPMMD_TESTS_SERVER_CORE_CORE_HARNESS_H_

#include <gtest/gtest.h>
#include <xxhash.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "kernels/base/dtype.h"
#include "kernels/format/dense.h"
#include "kernels/format/reference.h"
#include "server/catalog/catalog.h"
#include "server/catalog/types.h"
#include "server/device/cpu_device.h"
#include "server/engine/engine.h"
#include "server/errors.h"
#include "server/metrics/metrics.h"

namespace spmmd::server::testing {

// Runs jobs like the CPU device; Hold() makes the next ones wait until Release().
class HeldDevice final : public CpuDevice {
 public:
  HeldDevice(const DeviceOptions& options, Metrics* metrics, int index = 0)
      : CpuDevice(options, metrics, nullptr, index) {}
  ~HeldDevice() override {
    Release();
    Shutdown();
  }

  void Hold() {
    absl::MutexLock lock(&mutex_);
    held_ = true;
  }
  void Release() {
    absl::MutexLock lock(&mutex_);
    held_ = false;
    changed_.SignalAll();
  }
  // Waits until that many jobs have begun to run; the last of them may be held.
  void AwaitRuns(int count) {
    absl::MutexLock lock(&mutex_);
    while (runs_ < count) changed_.Wait(&mutex_);
  }
  int runs() {
    absl::MutexLock lock(&mutex_);
    return runs_;
  }
  // As if its memory were its own, like a GPU's.
  void PretendOwnMemory() { own_memory_ = true; }
  bool in_host_memory() const override { return !own_memory_; }

 protected:
  absl::Status Run(absl::Span<Job* const> jobs) override {
    {
      absl::MutexLock lock(&mutex_);
      ++runs_;
      changed_.SignalAll();
      while (held_) changed_.Wait(&mutex_);
    }
    return CpuDevice::Run(jobs);
  }

 private:
  absl::Mutex mutex_;
  absl::CondVar changed_;
  bool held_ = false;
  int runs_ = 0;
  bool own_memory_ = false;
};

inline std::string Bytes(const void* data, size_t size) { return {static_cast<const char*>(data), size}; }
template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return Bytes(values.data(), values.size() * sizeof(T));
}
inline std::string Bytes(const DenseView& view) {
  return Bytes(view.data, static_cast<size_t>(view.rows * view.cols) * SizeOf(view.dtype));
}

// Standard normal elements of which about `sparsity` are zero.
inline DenseMatrix RandomMatrix(DType dtype, int64_t rows, int64_t cols, double sparsity, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform(0, 1);
  DenseMatrix matrix = *DenseMatrix::Create(dtype, rows, cols);
  std::byte* out = matrix.mutable_view().data;
  for (int64_t i = 0; i < rows * cols; ++i) {
    const float value = uniform(random) < sparsity ? 0.0f : normal(random);
    const uint16_t half = dtype == DType::kF16 ? FloatToF16(value) : FloatToBf16(value);
    if (dtype == DType::kF32) {
      std::memcpy(out + i * 4, &value, 4);
    } else {
      std::memcpy(out + i * 2, &half, 2);
    }
  }
  return matrix;
}

inline pb::LayerSpec DenseSpec(const std::string& name, const DenseView& w) {
  pb::LayerSpec spec;
  spec.set_name(name);
  spec.set_m(w.rows);
  spec.set_k(w.cols);
  spec.set_dtype(ToProto(w.dtype));
  spec.set_encoding(pb::SOURCE_ENCODING_DENSE);
  return spec;
}

inline absl::Status AppendPart(Upload& upload, pb::ContentPart part, const std::string& bytes,
                               size_t chunk_bytes = 1 << 20) {
  for (size_t offset = 0; offset < bytes.size(); offset += chunk_bytes) {
    pb::ContentChunk chunk;
    chunk.set_part(part);
    chunk.set_offset(offset);
    chunk.set_data(bytes.substr(offset, chunk_bytes));
    if (absl::Status status = upload.Append(chunk); !status.ok()) return status;
  }
  return absl::OkStatus();
}

inline void SetTensor(const DenseView& x, pb::Tensor* tensor) {
  tensor->set_dtype(ToProto(x.dtype));
  tensor->add_shape(x.rows);
  tensor->add_shape(x.cols);
  tensor->set_data(Bytes(x));
}

inline DenseView ViewOf(const pb::Tensor& tensor) {
  const DType dtype = FromProto(tensor.dtype()).value();
  return {reinterpret_cast<const std::byte*>(tensor.data().data()), dtype, tensor.shape(0), tensor.shape(1),
          tensor.shape(1)};
}

inline pb::Matmul* AddMatmul(pb::Program* program, const std::string& name, const std::string& layer,
                             const std::string& input) {
  pb::Step* step = program->add_steps();
  step->set_name(name);
  step->mutable_matmul()->mutable_layer()->set_name(layer);
  step->mutable_matmul()->set_input(input);
  return step->mutable_matmul();
}

// y = x * W^T.
inline pb::ExecuteRequest MatmulRequest(const std::string& layer, const DenseView& x) {
  pb::ExecuteRequest request;
  request.mutable_program()->add_inputs("x");
  AddMatmul(request.mutable_program(), "y", layer, "x");
  request.mutable_program()->add_outputs()->set_step("y");
  request.add_inputs()->set_name("x");
  SetTensor(x, request.mutable_inputs(0)->mutable_dense());
  return request;
}

// Value of one series in a scrape, by its text before the space; nullopt when it is not there.
inline std::optional<double> Series(const Metrics& metrics, const std::string& series) {
  const std::string text = metrics.Serialize();
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    double value = 0;
    if (absl::StartsWith(line, series + " ") && absl::SimpleAtod(line.substr(series.size() + 1), &value)) return value;
  }
  return std::nullopt;
}

inline absl::StatusOr<pb::Layer> RegisterIn(LayerCatalog& catalog, const pb::LayerSpec& spec, const DenseView& w,
                                            const std::vector<float>& bias = {}) {
  absl::StatusOr<std::shared_ptr<Upload>> upload = catalog.Begin(spec);
  if (!upload.ok()) return upload.status();
  if ((*upload)->accepted().content_needed()) {
    if (absl::Status s = AppendPart(**upload, pb::CONTENT_PART_VALUES, Bytes(w)); !s.ok()) return s;
    if (absl::Status s = AppendPart(**upload, pb::CONTENT_PART_BIAS, Bytes(bias)); !s.ok()) return s;
  }
  return (*upload)->Finish();
}

inline absl::Status UnregisterFrom(LayerCatalog& catalog, const std::string& name, int64_t version = 0,
                                   pb::UnregisterLayerResponse* response = nullptr) {
  pb::UnregisterLayerRequest request;
  request.mutable_layer()->set_name(name);
  request.mutable_layer()->set_version(version);
  pb::UnregisterLayerResponse ignored;
  return catalog.Unregister(request, response != nullptr ? response : &ignored);
}

inline absl::Status ExecuteOn(Engine& engine, const pb::ExecuteRequest& request, pb::ExecuteResponse* response,
                              absl::Time deadline = absl::InfiniteFuture()) {
  absl::Status result;
  absl::Notification finished;
  engine.Execute(request, response, deadline, [&](absl::Status status) {
    result = std::move(status);
    finished.Notify();
  });
  finished.WaitForNotification();
  return result;
}

struct CoreOptions {
  uint64_t device_memory = uint64_t{1} << 30;
  uint64_t upload_memory = uint64_t{1} << 30;
  Executor::Options queue;
  std::string model_repository;
  uint64_t max_chunk_bytes = 4 << 20;
  absl::Duration upload_resume_timeout = absl::ZeroDuration();
  int64_t max_layers = 1000;
  std::string cache_dir;
  uint64_t cache_limit = 0;
  Residency::Options residency;
  Engine::Options engine;
};

class Core {
 public:
  explicit Core(const CoreOptions& options = {})
      : device(DeviceOptionsOf(options), &metrics),
        catalog({.model_repository = options.model_repository,
                 .upload_limit_bytes = options.upload_memory,
                 .max_chunk_bytes = options.max_chunk_bytes,
                 .upload_resume_timeout = options.upload_resume_timeout,
                 .max_layers = options.max_layers,
                 .cache_dir = options.cache_dir,
                 .cache_limit_bytes = options.cache_limit,
                 .residency = options.residency},
                {&device}, &metrics),
        engine(options.engine, &catalog, &metrics) {}

  absl::StatusOr<pb::Layer> Register(const pb::LayerSpec& spec, const DenseView& w,
                                     const std::vector<float>& bias = {}) {
    return RegisterIn(catalog, spec, w, bias);
  }
  absl::StatusOr<pb::Layer> Register(const std::string& name, const DenseView& w) {
    return Register(DenseSpec(name, w), w);
  }
  absl::Status Unregister(const std::string& name, int64_t version = 0,
                          pb::UnregisterLayerResponse* response = nullptr) {
    return UnregisterFrom(catalog, name, version, response);
  }
  absl::Status Execute(const pb::ExecuteRequest& request, pb::ExecuteResponse* response,
                       absl::Time deadline = absl::InfiniteFuture()) {
    return ExecuteOn(engine, request, response, deadline);
  }

  Metrics metrics{{.layer_label_cap = 1000, .bandwidth_window = absl::ZeroDuration()}};
  HeldDevice device;
  LayerCatalog catalog;
  Engine engine;

 private:
  static DeviceOptions DeviceOptionsOf(const CoreOptions& options) {
    DeviceOptions out;
    out.memory_limit_bytes = options.device_memory;
    out.queue = options.queue;
    out.queue.max_batch_tokens = options.engine.max_batch_tokens;
    out.measure_bandwidth = false;
    return out;
  }
};

// What Layer.content_xxh3 says of bytes.
inline std::string Hash(const std::string& bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return absl::StrFormat("%016x%016x", hash.high64, hash.low64);
}

// The matrix that a layer holds.
inline DenseMatrix Stored(Core& core, const std::string& name) {
  const auto layer = *core.catalog.Find(name, 0);
  return *core.device.ReadBack(*layer->content().residence.Use()->layers.front());
}

}  // namespace spmmd::server::testing

#endif  // SPMMD_TESTS_SERVER_CORE_CORE_HARNESS_H_
