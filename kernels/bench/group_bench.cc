// Layers that share x (q, k and v; gate and up) in one launch, beside one launch each and beside cublasLt on the
// concatenated matrix, in one process, turn by turn:
//
//   spmm_group_bench [--csv=FILE]      needs libspmmd_cuda.so and a GPU
//
// Columns: group, M of its layers, K, N, kernel, us grouped, us separately (each layer with AUTO's kernel), us of
// cublasLt. Graph replays over enough copies that L2 holds none, plain launches, median of the turns.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "kernels/base/status_macros.h"
#include "kernels/dispatch/cuda_library.h"
#include "kernels/format/bitmap_gpu.h"

namespace spmmd::bench {
namespace {

constexpr uint64_t kRotateBytes = uint64_t{200} << 20;
constexpr int kTurns = 9;

struct Group {
  const char* name;
  std::vector<int64_t> m;
  int64_t k;
};

class GroupBench {
 public:
  explicit GroupBench(std::shared_ptr<const CudaLibrary> cuda) : cuda_(std::move(cuda)) {}

  absl::Status Run(const Group& group, std::FILE* out) {
    int64_t all = 0;
    std::vector<spmmd_cuda_layer*> first;
    for (const int64_t m : group.m) {
      all += m;
      SPMMD_RETURN_IF_ERROR(Pack(m, group.k, &first.emplace_back()));
    }
    spmmd_cuda_layer* bitmap = nullptr;
    spmmd_cuda_layer* dense = nullptr;
    SPMMD_RETURN_IF_ERROR(Pack(all, group.k, &bitmap));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->layer_unpack(bitmap, stream_, &dense)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->stream_synchronize(device_, stream_)));
    cuda_->layer_free(bitmap);
    const auto copies = static_cast<size_t>(kRotateBytes / static_cast<uint64_t>(all * group.k) + 2);
    std::vector<std::vector<spmmd_cuda_layer*>> sets = {first};
    std::vector<spmmd_cuda_layer*> denses = {dense};
    while (sets.size() < copies) {
      auto& set = sets.emplace_back();
      for (spmmd_cuda_layer* layer : first) SPMMD_RETURN_IF_ERROR(Ok(cuda_->layer_clone(layer, &set.emplace_back())));
      SPMMD_RETURN_IF_ERROR(Ok(cuda_->layer_clone(dense, &denses.emplace_back())));
    }
    for (const int64_t n : {8, 16, 32}) SPMMD_RETURN_IF_ERROR(RunWidth(group, all, n, sets, denses, out));
    for (const auto& set : sets) {
      for (spmmd_cuda_layer* layer : set) cuda_->layer_free(layer);
    }
    for (spmmd_cuda_layer* layer : denses) cuda_->layer_free(layer);
    return absl::OkStatus();
  }

  absl::Status Open() {
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->device_open(0, &device_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->stream_create(device_, &stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_create(device_, 1, &begin_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_create(device_, 1, &end_)));
    constexpr uint64_t kTensor = uint64_t{64} << 20;
    for (void** pointer : {&x_, &y_, &workspace_}) SPMMD_RETURN_IF_ERROR(Ok(cuda_->malloc(device_, kTensor, pointer)));
    workspace_bytes_ = kTensor;
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->workspace_init(device_, workspace_, kTensor, stream_)));
    std::mt19937 rng(5);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> x(size_t{32} * 16384);
    for (uint16_t& v : x) v = FloatToF16(normal(rng));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->memcpy_async(device_, x_, x.data(), x.size() * 2, stream_)));
    return Ok(cuda_->stream_synchronize(device_, stream_));
  }

 private:
  absl::Status Ok(spmmd_cuda_status code) const { return cuda_->ToStatus(code); }

  // Random fp16 weights, half of them zero, packed on the device.
  absl::Status Pack(int64_t m, int64_t k, spmmd_cuda_layer** layer) {
    std::mt19937 rng(static_cast<uint32_t>(m));
    std::normal_distribution<float> normal;
    std::vector<uint16_t> pattern(1 << 20);
    for (uint16_t& v : pattern) v = rng() % 2 == 0 ? 0 : FloatToF16(normal(rng));
    const auto bytes = static_cast<uint64_t>(m * k) * 2;
    void* data = nullptr;
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->malloc(device_, bytes, &data)));
    for (uint64_t at = 0; at < bytes; at += pattern.size() * 2) {
      SPMMD_RETURN_IF_ERROR(Ok(cuda_->memcpy_async(device_, static_cast<std::byte*>(data) + at, pattern.data(),
                                                   std::min<uint64_t>(pattern.size() * 2, bytes - at), stream_)));
    }
    spmmd_cuda_dense_weights weights = {};
    weights.data = data;
    weights.m = m;
    weights.k = k;
    weights.row_stride = k;
    weights.dtype = static_cast<int32_t>(DType::kF16);
    weights.chunk_cols = bitmap_gpu::DefaultChunkCols(m, k);
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->pack_bitmap_gpu(device_, &weights, stream_, nullptr, layer)));
    return Ok(cuda_->free(device_, data));
  }

  spmmd_cuda_matmul Call(int64_t m, int64_t k, int64_t n, int64_t first_row) const {
    spmmd_cuda_matmul call = {};
    call.x = x_;
    call.n = n;
    call.x_stride = k;
    call.x_dtype = call.y_dtype = static_cast<int32_t>(DType::kF16);
    call.y = static_cast<std::byte*>(y_) + first_row * n * 2;
    call.y_stride = m;
    call.workspace = workspace_;
    call.workspace_bytes = workspace_bytes_;
    return call;
  }

  // One launch of every copy as a graph.
  template <typename Launch>
  absl::StatusOr<spmmd_cuda_graph> Record(size_t copies, const Launch& launch) {
    spmmd_cuda_graph graph = nullptr;
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->graph_begin(device_, stream_)));
    absl::Status status;
    for (size_t i = 0; i < copies && status.ok(); ++i) status = launch(i);
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->graph_end(device_, stream_, &graph)));
    SPMMD_RETURN_IF_ERROR(status);
    return graph;
  }

  absl::StatusOr<double> Replay(spmmd_cuda_graph graph, size_t copies) {
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_record(device_, begin_, stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->graph_launch(device_, graph, stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_record(device_, end_, stream_)));
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_synchronize(device_, end_)));
    double us = 0;
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->event_elapsed_us(device_, begin_, end_, &us)));
    return us / static_cast<double>(copies);
  }

  absl::Status RunWidth(const Group& group, int64_t all, int64_t n,
                        const std::vector<std::vector<spmmd_cuda_layer*>>& sets,
                        const std::vector<spmmd_cuda_layer*>& denses, std::FILE* out) {
    std::vector<spmmd_cuda_matmul> calls;
    int64_t row = 0;
    for (const int64_t m : group.m) {
      calls.push_back(Call(m, group.k, n, row));
      row += m;
    }
    const auto count = static_cast<int32_t>(calls.size());
    const spmmd_cuda_matmul concatenated = Call(all, group.k, n, 0);
    SPMMD_RETURN_IF_ERROR(Ok(cuda_->dense_tune(denses.front(), &concatenated, stream_)));

    std::vector<spmmd_cuda_graph> graphs;
    std::vector<std::string> names = {"separate", "cublaslt"};
    SPMMD_ASSIGN_OR_RETURN(graphs.emplace_back(), Record(sets.size(), [&](size_t i) {
                             absl::Status status;
                             for (size_t l = 0; l < calls.size() && status.ok(); ++l) {
                               status = Ok(cuda_->launch(sets[i][l], SPMMD_CUDA_KERNEL_AUTO, &calls[l], stream_));
                             }
                             return status;
                           }));
    SPMMD_ASSIGN_OR_RETURN(graphs.emplace_back(), Record(sets.size(), [&](size_t i) {
                             return Ok(cuda_->launch(denses[i], SPMMD_CUDA_KERNEL_AUTO, &concatenated, stream_));
                           }));
    for (int32_t kernel = 0; kernel < cuda_->kernel_count(); ++kernel) {
      uint64_t bytes = 0;
      const std::vector<const spmmd_cuda_layer*> layers(sets.front().begin(), sets.front().end());
      if (cuda_->group_workspace_bytes(layers.data(), kernel, calls.data(), count, &bytes) != SPMMD_CUDA_OK) continue;
      names.emplace_back(cuda_->kernel_name(kernel));
      SPMMD_ASSIGN_OR_RETURN(graphs.emplace_back(), Record(sets.size(), [&](size_t i) {
                               const std::vector<const spmmd_cuda_layer*> set(sets[i].begin(), sets[i].end());
                               return Ok(cuda_->launch_group(set.data(), kernel, calls.data(), count, stream_));
                             }));
    }
    std::vector<std::vector<double>> us(graphs.size());
    for (int turn = 0; turn <= kTurns; ++turn) {
      for (size_t g = 0; g < graphs.size(); ++g) {
        SPMMD_ASSIGN_OR_RETURN(const double once, Replay(graphs[g], sets.size()));
        if (turn > 0) us[g].push_back(once);  // the first warms up
      }
    }
    for (size_t g = 0; g < graphs.size(); ++g) {
      std::nth_element(us[g].begin(), us[g].begin() + kTurns / 2, us[g].end());
      SPMMD_RETURN_IF_ERROR(Ok(cuda_->graph_destroy(device_, graphs[g])));
    }
    std::string shape;
    for (const int64_t m : group.m) shape += (shape.empty() ? "" : "+") + std::to_string(m);
    for (size_t g = 2; g < graphs.size(); ++g) {
      std::fprintf(out, "%s,%s,%lld,%lld,%s,%.2f,%.2f,%.2f\n", group.name, shape.c_str(),
                   static_cast<long long>(group.k), static_cast<long long>(n), names[g].c_str(), us[g][kTurns / 2],
                   us[0][kTurns / 2], us[1][kTurns / 2]);
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<const CudaLibrary> cuda_;
  spmmd_cuda_device* device_ = nullptr;
  spmmd_cuda_stream stream_ = nullptr;
  spmmd_cuda_event begin_ = nullptr;
  spmmd_cuda_event end_ = nullptr;
  void* x_ = nullptr;
  void* y_ = nullptr;
  void* workspace_ = nullptr;
  uint64_t workspace_bytes_ = 0;
};

absl::Status Main(std::FILE* out) {
  const char* path = std::getenv("SPMMD_CUDA_LIBRARY");
  SPMMD_ASSIGN_OR_RETURN(auto cuda, CudaLibrary::Load(path == nullptr ? "" : path));
  GroupBench bench(std::move(cuda));
  SPMMD_RETURN_IF_ERROR(bench.Open());
  std::fprintf(out, "group,M,K,N,kernel,us_grouped,us_separate,us_cublaslt\n");
  const Group groups[] = {{"qkv", {4096, 4096, 4096}, 4096},
                          {"qkv", {4096, 1024, 1024}, 4096},
                          {"gate_up", {11008, 11008}, 4096},
                          {"gate_up", {14336, 14336}, 4096}};
  for (const Group& group : groups) SPMMD_RETURN_IF_ERROR(bench.Run(group, out));
  return absl::OkStatus();
}

}  // namespace
}  // namespace spmmd::bench

int main(int argc, char** argv) {
  CLI::App app("Layers that share their activations: one launch, one each, cublasLt.");
  std::string csv;
  app.add_option("--csv", csv, "file for the CSV; stdout without");
  CLI11_PARSE(app, argc, argv);
  std::FILE* const out = csv.empty() ? stdout : std::fopen(csv.c_str(), "w");
  if (out == nullptr) {
    std::perror(csv.c_str());
    return 1;
  }
  const absl::Status status = spmmd::bench::Main(out);
  if (out != stdout && std::fclose(out) != 0) return 1;
  if (!status.ok()) std::fprintf(stderr, "spmm_group_bench: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
