// How fast weights are packed: CSV on stdout, one line a format and sparsity.
//
//   pack_bench --formats=RLC_CSC,THREE_LAYER,BITMAP --shape=8192x8192 --sparsity=.5,.7 --threads=1
//
// weights_per_second counts every element of the matrix, zeros included, as the papers do. Packing is timed as a caller
// sees it: dense matrix in, packed layer out, allocation and the check for NaN included. Run with --threads=1 and with
// all cores for the scaling. --gpu adds BITMAP_GPU packed on the GPU from a matrix in its memory into a resident layer.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/base/thread_pool.h"
#include "kernels/dispatch/cuda_library.h"
#include "kernels/format/bitmap_gpu.h"
#include "kernels/format/packed_layer.h"
#include "kernels/format/prune.h"
#include "kernels/format/rlc_csc.h"
#include "kernels/format/three_layer.h"

namespace spmmd {
namespace {

// N(0, 1) weights without a generator call for each: rows are rotations of one another, which no packer notices.
DenseMatrix RandomWeights(DType dtype, int64_t rows, int64_t cols) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  constexpr size_t kPool = size_t{1} << 20;
  std::vector<uint16_t> pool(kPool);
  for (uint16_t& bits : pool) {
    const float value = normal(random);
    bits = dtype == DType::kF16 ? FloatToF16(value) : FloatToBf16(value);
  }
  DenseMatrix w = *DenseMatrix::Create(dtype, rows, cols);
  for (int64_t r = 0; r < rows; ++r) {
    auto* row = reinterpret_cast<uint16_t*>(w.mutable_view().row(r));
    const auto start = static_cast<size_t>(random());
    for (int64_t c = 0; c < cols; ++c) row[c] = pool[(start + static_cast<size_t>(c)) % kPool];
  }
  return w;
}

// Multiplies every column by exp(sigma * N(0, 1)), so that pruning by magnitude leaves column-skewed masks, as Wanda's
// activation norms do.
void SkewColumns(double sigma, DenseMatrix* w) {
  std::mt19937_64 random(2);
  std::normal_distribution<double> normal;
  std::vector<float> scales(static_cast<size_t>(w->cols()));
  for (float& scale : scales) scale = static_cast<float>(std::exp(sigma * normal(random)));
  const bool half = w->dtype() == DType::kF16;
  for (int64_t r = 0; r < w->rows(); ++r) {
    auto* row = reinterpret_cast<uint16_t*>(w->mutable_view().row(r));
    for (size_t c = 0; c < scales.size(); ++c) {
      const float value = (half ? F16ToFloat(row[c]) : Bf16ToFloat(row[c])) * scales[c];
      row[c] = half ? FloatToF16(value) : FloatToBf16(value);
    }
  }
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Times {
  double wall = 0;
  double cpu = 0;  // of all threads: what counts a core where others use the machine too
};

double CpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <typename Body>
Times MedianTimes(int repetitions, Body body) {
  std::vector<double> wall;
  std::vector<double> cpu;
  for (int i = 0; i < repetitions; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const double cpu_begin = CpuSeconds();
    body();
    cpu.push_back(CpuSeconds() - cpu_begin);
    wall.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return {Median(wall), Median(cpu)};
}

// On stderr, beside the table.
void ReportShares(const PackedLayer& layer) {
  const three_layer::Stats stats = three_layer::ComputeStats(layer);
  const auto share = [&stats](int64_t part) {
    return 100.0 * static_cast<double>(part) / static_cast<double>(stats.nnz);
  };
  std::fprintf(
      stderr,
      "THREE_LAYER at sparsity %.2f, of the nonzeros: %.2f %% slot-filled, %.2f %% dummy codes, %.2f %% filler "
      "codes, %.2f %% residual; bytes: values %zu, metadata %zu, codes %zu, residual %zu\n",
      layer.sparsity(), share(stats.slot_filled), share(stats.dummy_codes), share(stats.filler_codes),
      share(stats.residual), stats.values_bytes, stats.metadata_bytes, stats.code_bytes, stats.residual_bytes);
}

// BITMAP_GPU from a matrix in GPU memory to a resident layer, allocation included; adds its bytes to *bytes.
absl::StatusOr<Times> TimeGpuPack(const DenseMatrix& w, int repetitions, double* bytes) {
  SPMMD_ASSIGN_OR_RETURN(const std::shared_ptr<const CudaLibrary> cuda, CudaLibrary::Load());
  const auto ok = [&](spmmd_cuda_status code) { return cuda->ToStatus(code); };
  spmmd_cuda_device* device = nullptr;
  spmmd_cuda_stream stream = nullptr;
  void* data = nullptr;
  SPMMD_RETURN_IF_ERROR(ok(cuda->device_open(0, &device)));
  SPMMD_RETURN_IF_ERROR(ok(cuda->stream_create(device, &stream)));
  SPMMD_RETURN_IF_ERROR(ok(cuda->malloc(device, w.bytes(), &data)));
  SPMMD_RETURN_IF_ERROR(ok(cuda->memcpy_async(device, data, w.view().data, w.bytes(), stream)));
  SPMMD_RETURN_IF_ERROR(ok(cuda->stream_synchronize(device, stream)));
  spmmd_cuda_dense_weights weights = {};
  weights.data = data;
  weights.m = w.rows();
  weights.k = w.cols();
  weights.row_stride = w.cols();
  weights.dtype = static_cast<int32_t>(w.dtype());
  weights.chunk_cols = bitmap_gpu::DefaultChunkCols(w.rows(), w.cols());
  spmmd_cuda_packed_info info = {};
  absl::Status status;
  const Times times = MedianTimes(repetitions, [&] {
    spmmd_cuda_layer* layer = nullptr;
    status.Update(ok(cuda->pack_bitmap_gpu(device, &weights, stream, &info, &layer)));
    cuda->layer_free(layer);
  });
  *bytes = static_cast<double>(info.chunk_bytes + info.offset_bytes);
  SPMMD_RETURN_IF_ERROR(status);
  return times;  // the device goes with the process
}

int Main(int argc, char** argv) {
  std::vector<std::string> formats = {"DENSE",   "CSR",         "BITMAP",     "BITMAP_GPU",
                                      "RLC_CSC", "THREE_LAYER", "ROW_STREAM", "COLUMN_PIECE"};
  std::vector<double> sparsities = {0.5};
  std::string shape = "8192x8192";
  std::string dtype_name = "fp16";
  double skew = 0;
  int threads = 0;
  int repetitions = 7;
  bool gpu = false;
  CLI::App app{"Packing speed"};
  app.add_option("--formats", formats)->delimiter(',');
  app.add_option("--sparsity", sparsities)->delimiter(',');
  app.add_option("--shape", shape, "MxK");
  app.add_option("--dtype", dtype_name)->check(CLI::IsMember({"fp16", "bf16"}));
  app.add_option("--skew", skew, "sigma of the log-normal column scale")->check(CLI::Range(0.0, 3.0));
  app.add_option("--threads", threads, "0: all cores");
  app.add_option("--repetitions", repetitions)->check(CLI::Range(1, 1000));
  app.add_flag("--gpu", gpu, "also pack BITMAP_GPU on the GPU");
  CLI11_PARSE(app, argc, argv);

  int64_t m = 0;
  int64_t k = 0;
  if (std::sscanf(shape.c_str(), "%ldx%ld", &m, &k) != 2 || !CheckShape(m, k).ok()) {
    std::fprintf(stderr, "--shape: %s is not MxK within the limits\n", shape.c_str());
    return 1;
  }
  SetDefaultThreads(threads);
  const int cores = DefaultThreadPool().size();
  const DType dtype = dtype_name == "fp16" ? DType::kF16 : DType::kBf16;
  DenseMatrix dense = RandomWeights(dtype, m, k);
  if (skew > 0) SkewColumns(skew, &dense);
  const auto weights = static_cast<double>(m) * static_cast<double>(k);

  std::printf(
      "operation,format,dtype,M,K,sparsity,threads,seconds,weights_per_second,weights_per_cpu_second,"
      "bytes_per_element,share_of_dense\n");
  const auto report = [&](const char* operation, const std::string& format, double sparsity, Times times,
                          double bytes) {
    std::printf("%s,%s,%s,%ld,%ld,%g,%d,%.6f,%.4g,%.4g,%.4f,%.4f\n", operation, format.c_str(), dtype_name.c_str(), m,
                k, sparsity, cores, times.wall, weights / times.wall, weights / times.cpu, bytes / weights,
                bytes / weights / 2);
    std::fflush(stdout);
  };
  for (const double sparsity : sparsities) {
    DenseMatrix w = *DenseMatrix::Create(dtype, m, k);
    const Times prune_times = MedianTimes(3, [&] {
      std::memcpy(w.mutable_view().data, dense.view().data, dense.bytes());
      if (!PruneMagnitude(w.mutable_view(), sparsity).ok()) std::abort();
    });
    report("prune_magnitude", "DENSE", sparsity, prune_times, static_cast<double>(dense.bytes()));
    if (gpu) {
      double bytes = 0;
      const absl::StatusOr<Times> times = TimeGpuPack(w, repetitions, &bytes);
      if (!times.ok()) {
        std::fprintf(stderr, "--gpu: %s\n", times.status().ToString().c_str());
        return 1;
      }
      report("pack_gpu", "BITMAP_GPU", sparsity, *times, bytes);
    }
    for (const std::string& name : formats) {
      const std::optional<Format> format = ParseFormat(name);
      if (!format.has_value()) {
        std::fprintf(stderr, "--formats: %s is unknown\n", name.c_str());
        return 1;
      }
      absl::StatusOr<PackedLayer> layer;
      const Times pack_times = MedianTimes(repetitions, [&] {
        layer = absl::UnknownError("");  // free the last one outside the new one's lifetime, inside the timing of both
        layer = Pack(*format, w.view());
      });
      if (!layer.ok()) {
        std::fprintf(stderr, "%s: %s\n", name.c_str(), layer.status().ToString().c_str());
        continue;
      }
      const auto bytes = static_cast<double>(layer->bytes().total());
      if (*format == Format::kThreeLayer) ReportShares(*layer);
      if (*format == Format::kRlcCsc) {
        const rlc_csc::Stats stats = rlc_csc::ComputeStats(*layer);
        std::fprintf(
            stderr, "RLC_CSC at sparsity %.2f: %.2f %% padding entries, %.2f %% unused places, of the nonzeros\n",
            layer->sparsity(), 100.0 * static_cast<double>(stats.padding_entries) / static_cast<double>(layer->nnz),
            100.0 * static_cast<double>(stats.unused_places) / static_cast<double>(layer->nnz));
      }
      report("pack", name, sparsity, pack_times, bytes);
      report("validate", name, sparsity,
             MedianTimes(3,
                         [&] {
                           if (!Validate(*layer).ok()) std::abort();
                         }),
             bytes);
    }
  }
  return 0;
}

}  // namespace
}  // namespace spmmd

// An exception ends a benchmark as well as anything.
int main(int argc, char** argv) { return spmmd::Main(argc, argv); }  // NOLINT(bugprone-exception-escape)
