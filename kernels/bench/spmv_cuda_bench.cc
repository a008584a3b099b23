// Single-token kernels on a GPU beside dense cuBLAS, turn by turn: CSV with the columns of the design, section 6.
//
// Weights are N(0, 0.02), magnitude-pruned per row to the exact count; x ~ N(0, 1). Weight copies rotate so that more
// than 200 MB are touched between two uses of one; times are medians over CUDA-graph replays, dense and sparse replays
// alternating. Every configuration is checked against float64 before it is timed.
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/thread_pool.h"
#include "kernels/bench/dense_column_skip.h"
#include "kernels/cuda/spmmd_cuda.h"
#include "kernels/format/column_piece.h"
#include "kernels/format/dense.h"
#include "kernels/format/packed_layer.h"
#include "kernels/format/rlc_csc.h"
#include "kernels/format/row_stream.h"

namespace spmmd {
namespace {

#define CHECK_CUDA(call)                                                                             \
  do {                                                                                               \
    const cudaError_t error = (call);                                                                \
    if (error != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error)); \
      std::exit(1);                                                                                  \
    }                                                                                                \
  } while (false)
#define CHECK_SPMMD(call)                                                                          \
  do {                                                                                             \
    if ((call) != SPMMD_CUDA_OK) {                                                                 \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, spmmd_cuda_last_error()); \
      std::exit(1);                                                                                \
    }                                                                                              \
  } while (false)

template <typename T>
T* DeviceAlloc(size_t count) {
  void* pointer = nullptr;
  CHECK_CUDA(cudaMalloc(&pointer, count * sizeof(T)));
  return static_cast<T*>(pointer);
}

constexpr uint64_t kWorkspaceBytes = 64 << 20;
constexpr int kMultiprocessors = 132;   // of the H200 that the figures are for
constexpr int kVectors = 8;             // different x in rotation
constexpr double kRotateBytes = 240e6;  // four times the L2 of an H200

struct Shape {
  int64_t m;
  int64_t k;
};

class Timer {
 public:
  explicit Timer(cudaStream_t stream) : stream_(stream) {
    CHECK_CUDA(cudaEventCreate(&begin_));
    CHECK_CUDA(cudaEventCreate(&end_));
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  double Microseconds(cudaGraphExec_t graph) {
    CHECK_CUDA(cudaEventRecord(begin_, stream_));
    CHECK_CUDA(cudaGraphLaunch(graph, stream_));
    CHECK_CUDA(cudaEventRecord(end_, stream_));
    CHECK_CUDA(cudaEventSynchronize(end_));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return ms * 1e3;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

// A captured sequence of launches, launch(copy, vector).
class Sequence {
 public:
  Sequence(cudaStream_t stream, int launches, int copies, const std::function<void(int, int)>& launch)
      : launches_(launches) {
    cudaGraph_t graph;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches; ++i) launch(i % copies, i % kVectors);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec_, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_CUDA(cudaGraphLaunch(exec_, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
  }
  ~Sequence() { cudaGraphExecDestroy(exec_); }
  double Time(Timer& timer) { return timer.Microseconds(exec_) / launches_; }

 private:
  int launches_;
  cudaGraphExec_t exec_ = nullptr;
};

double Percentile(std::vector<double> v, double p) {
  std::sort(v.begin(), v.end());
  return v[static_cast<size_t>(p * static_cast<double>(v.size() - 1) + 0.5)];
}

uint16_t ToBits(DType dtype, float v) { return dtype == DType::kF16 ? FloatToF16(v) : FloatToBf16(v); }
float FromBits(DType dtype, uint16_t v) { return dtype == DType::kF16 ? F16ToFloat(v) : Bf16ToFloat(v); }

DenseMatrix MakeWeights(const Shape& shape, DType dtype, double sparsity, double skew, uint64_t seed) {
  DenseMatrix w = DenseMatrix::Create(dtype, shape.m, shape.k).value();
  const MutableDenseView view = w.mutable_view();
  std::vector<float> gauss(1 << 16);
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal(0, 0.02f);
  for (float& g : gauss) g = normal(rng);
  std::vector<float> column_scale(shape.k, 1.f);
  std::normal_distribution<float> unit;
  if (skew > 0) {
    for (float& s : column_scale) s = std::exp(static_cast<float>(skew) * unit(rng));
  }
  const auto keep = static_cast<int64_t>(std::llround(static_cast<double>(shape.k) * (1 - sparsity)));
  DefaultThreadPool().ParallelFor((shape.m + 63) / 64, [&](int64_t task, int) {
    std::vector<float> score(shape.k);
    std::vector<float> sorted(shape.k);
    std::vector<uint16_t> row(shape.k);
    for (int64_t r = task * 64; r < std::min(shape.m, task * 64 + 64); ++r) {
      uint64_t x = seed * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(r + 1) * 0xbf58476d1ce4e5b9ull;
      for (int64_t c = 0; c < shape.k; ++c) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        float v = gauss[x >> 20 & 0xffff];
        row[c] = ToBits(dtype, v);
        score[c] = std::abs(FromBits(dtype, row[c])) * column_scale[c] + 1e-9f * static_cast<float>(x & 0xffff);
      }
      sorted = score;
      if (keep < shape.k && keep > 0) {
        std::nth_element(sorted.begin(), sorted.begin() + (shape.k - keep), sorted.end());
      }
      const float threshold = keep > 0 && keep < shape.k ? sorted[shape.k - keep] : keep == 0 ? INFINITY : 0.f;
      auto* to = reinterpret_cast<uint16_t*>(view.row(r));
      for (int64_t c = 0; c < shape.k; ++c) to[c] = score[c] >= threshold ? row[c] : 0;
    }
  });
  return w;
}

struct Reference {
  std::vector<double> y;
  std::vector<double> scale;
};

Reference MakeReference(const DenseView& w, const std::vector<float>& x) {
  Reference reference{std::vector<double>(w.rows), std::vector<double>(w.rows)};
  DefaultThreadPool().ParallelFor((w.rows + 31) / 32, [&](int64_t task, int) {
    for (int64_t r = task * 32; r < std::min(w.rows, task * 32 + 32); ++r) {
      const auto* row = reinterpret_cast<const uint16_t*>(w.row(r));
      double y = 0;
      double scale = 0;
      for (int64_t c = 0; c < w.cols; ++c) {
        const double product = static_cast<double>(FromBits(w.dtype, row[c])) * x[c];
        y += product;
        scale += std::abs(product);
      }
      reference.y[r] = y;
      reference.scale[r] = scale;
    }
  });
  return reference;
}

double RelativeError(const std::vector<float>& y, const Reference& reference) {
  double worst = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    const double error = std::abs(y[i] - reference.y[i]);
    if (!(error <= 1e30)) return INFINITY;
    if (reference.scale[i] > 0) worst = std::max(worst, error / reference.scale[i]);
  }
  return worst;
}

struct Options {
  std::vector<Shape> shapes;
  std::vector<double> sparsities = {0.3, 0.5, 0.7};
  std::vector<DType> dtypes = {DType::kF16, DType::kBf16};
  std::vector<int> tokens = {1};
  std::vector<double> activation_sparsities;  // SpMspV when given, SpMV otherwise
  bool sweep = false;
  std::vector<int> variants = {-1};          // of the kernel; -1 is its own choice
  std::vector<std::pair<int, int>> tilings;  // SpMV: rows and warps a tile; empty: the packer's choice
  std::vector<row_stream::Coding> codings;   // bf16 SpMV; empty: all
  std::vector<uint32_t> chains = {0, SPMMD_CUDA_FLAG_CHAIN};
  int group = 1;  // rows of W as so many layers in one launch, beside dense cuBLAS on all of them at once
  int group_warps = 10;
  bool separate = false;  // the group's layers in a launch each instead, to compare with
  bool celty = false;
  int replays = 15;
  double skew = 0;
  std::string csv;
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    CHECK_SPMMD(spmmd_cuda_device_open(0, &device_));
    CHECK_CUDA(cudaStreamCreate(&stream_));
    cublasCreate(&cublas_);
    cublasSetStream(cublas_, stream_);
    CHECK_CUDA(cudaMalloc(&cublas_workspace_, 64 << 20));
    cublasSetWorkspace(cublas_, cublas_workspace_, 64 << 20);
    csv_ = options.csv.empty() ? stdout : std::fopen(options.csv.c_str(), "w");
    std::fprintf(csv_,
                 "op,format,kernel,dtype,M,K,N,sparsity,activation_sparsity,us_p50,us_p10,us_p90,bytes,GBps,"
                 "ceiling_pct,dense_us,ratio_vs_dense,rel_error,config\n");
    MeasureCeiling();
  }

  void Run() {
    for (const Shape& shape : options_.shapes) {
      for (const DType dtype : options_.dtypes) {
        for (const double sparsity : options_.sparsities) RunCase(shape, dtype, sparsity);
      }
    }
  }

 private:
  struct Device {
    std::vector<void*> copies;
    int launches() const { return std::max<int>(24, static_cast<int>(copies.size())); }
  };

  // kVectors times `tokens` activation vectors on the device, and the first of them as floats.
  struct Activations {
    uint16_t* device = nullptr;
    std::vector<float> first;
    double sparsity = 0;
  };
  static Activations MakeActivations(int64_t k, int tokens, DType dtype, double sparsity) {
    std::vector<uint16_t> bits(static_cast<size_t>(kVectors * tokens * k));
    Activations out;
    out.sparsity = sparsity;
    std::mt19937_64 rng(99);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<double> uniform;
    for (uint16_t& b : bits) b = uniform(rng) < sparsity ? 0 : ToBits(dtype, normal(rng));
    for (int64_t i = 0; i < k; ++i) out.first.push_back(FromBits(dtype, bits[static_cast<size_t>(i)]));
    out.device = DeviceAlloc<uint16_t>(bits.size());
    CHECK_CUDA(cudaMemcpy(out.device, bits.data(), bits.size() * 2, cudaMemcpyHostToDevice));
    return out;
  }

  void MeasureCeiling() {
    const uint64_t bytes = uint64_t{2} << 30;
    void* data;
    CHECK_CUDA(cudaMalloc(&data, bytes));
    CHECK_CUDA(cudaMemset(data, 1, bytes));
    Timer timer(stream_);
    Sequence read(stream_, 4, 1, [&](int, int) { CHECK_SPMMD(spmmd_cuda_read_probe(device_, data, bytes, stream_)); });
    double best = 1e30;
    for (int i = 0; i < 5; ++i) best = std::min(best, read.Time(timer));
    ceiling_ = static_cast<double>(bytes) / best * 1e6;
    std::printf("read ceiling %.0f GB/s\n", ceiling_ / 1e9);
    CHECK_CUDA(cudaFree(data));
  }

  void RunCase(const Shape& shape, DType dtype, double sparsity) {
    const DenseMatrix w = MakeWeights(shape, dtype, sparsity, options_.skew, 1234 + shape.m + shape.k);
    const int max_tokens = *std::max_element(options_.tokens.begin(), options_.tokens.end());
    const Activations dense_x = MakeActivations(shape.k, max_tokens, dtype, 0.0);
    const uint16_t* x = dense_x.device;
    auto* y = DeviceAlloc<float>(static_cast<size_t>(shape.m) * max_tokens);
    void* workspace = nullptr;
    CHECK_CUDA(cudaMalloc(&workspace, kWorkspaceBytes));
    CHECK_SPMMD(spmmd_cuda_workspace_init(device_, workspace, kWorkspaceBytes, stream_));

    // Dense baseline.
    const size_t dense_bytes = w.bytes();
    const int copies = std::max(2, static_cast<int>(std::ceil(kRotateBytes / static_cast<double>(dense_bytes))));
    std::vector<uint16_t*> dense(copies);
    for (uint16_t*& copy : dense) {
      copy = DeviceAlloc<uint16_t>(dense_bytes / 2);
      CHECK_CUDA(cudaMemcpy(copy, w.view().data, dense_bytes, cudaMemcpyHostToDevice));
    }
    const cudaDataType_t type = dtype == DType::kF16 ? CUDA_R_16F : CUDA_R_16BF;
    const auto gemm = [&](int copy, int vector) {
      const float one = 1;
      const float zero = 0;
      if (cublasGemmEx(cublas_, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(shape.m), 1, static_cast<int>(shape.k), &one,
                       dense[copy], type, static_cast<int>(shape.k), x + vector * max_tokens * shape.k, type,
                       static_cast<int>(shape.k), &zero, y, type, static_cast<int>(shape.m), CUBLAS_COMPUTE_32F,
                       CUBLAS_GEMM_DEFAULT) != CUBLAS_STATUS_SUCCESS) {
        std::fprintf(stderr, "cublasGemmEx failed\n");
        std::exit(1);
      }
    };
    const auto gemv = [&](int copy, int vector) {
      const float one = 1;
      const float zero = 0;
      const uint16_t* in = x + vector * max_tokens * shape.k;
      const int m = static_cast<int>(shape.m);
      const int k = static_cast<int>(shape.k);
      const cublasStatus_t status =
          dtype == DType::kF16
              ? cublasHSHgemvStridedBatched(
                    cublas_, CUBLAS_OP_T, k, m, &one, reinterpret_cast<const __half*>(dense[copy]), k, 0,
                    reinterpret_cast<const __half*>(in), 1, 0, &zero, reinterpret_cast<__half*>(y), 1, 0, 1)
              : cublasTSTgemvStridedBatched(cublas_, CUBLAS_OP_T, k, m, &one,
                                            reinterpret_cast<const __nv_bfloat16*>(dense[copy]), k, 0,
                                            reinterpret_cast<const __nv_bfloat16*>(in), 1, 0, &zero,
                                            reinterpret_cast<__nv_bfloat16*>(y), 1, 0, 1);
      if (status != CUBLAS_STATUS_SUCCESS) {
        std::fprintf(stderr, "cublas gemv failed\n");
        std::exit(1);
      }
    };
    gemm(0, 0);
    gemv(0, 0);
    CHECK_CUDA(cudaStreamSynchronize(stream_));
    Timer timer(stream_);
    Sequence dense_gemm(stream_, std::max(24, copies), copies, gemm);
    Sequence dense_gemv(stream_, std::max(24, copies), copies, gemv);
    {
      std::vector<double> gemm_us;
      std::vector<double> gemv_us;
      for (int i = 0; i < options_.replays; ++i) {
        gemm_us.push_back(dense_gemm.Time(timer));
        gemv_us.push_back(dense_gemv.Time(timer));
      }
      const double bytes = static_cast<double>(dense_bytes);
      Row("dense_cublas_gemmex", "DENSE", shape, dtype, 1, sparsity, gemm_us, bytes, Percentile(gemm_us, .5), 0, "");
      Row("dense_cublas_gemv", "DENSE", shape, dtype, 1, sparsity, gemv_us, bytes, Percentile(gemm_us, .5), 0, "");
    }

    const auto measure = [&](const std::vector<PackedLayer>& parts, const Activations& in, const Reference& reference,
                             const char* kernel_name, uint32_t flags, int variant, int tokens) {
      const auto group = static_cast<int>(parts.size());
      double stored = 0;
      double bytes = 0;  // what a launch reads: everything, or the pieces of active columns and all descriptors
      for (const PackedLayer& part : parts) {
        const auto size = static_cast<double>(part.bytes().total());
        stored += size;
        if (part.format == Format::kColumnPiece) {
          bytes += static_cast<double>(part.sections[0].data.size()) * (1 - in.sparsity) +
                   static_cast<double>(part.sections[1].data.size());
        } else {
          bytes += part.format == Format::kRlcCsc ? size * (1 - in.sparsity) : size;
        }
      }
      if (loaded_ != &parts || rotated_bytes_ > bytes * 1.01) {
        Unload();
        const double most = 60e9 / stored;
        const int copies = std::max(2, static_cast<int>(std::min({160.0, most, std::ceil(kRotateBytes / bytes)})));
        for (int copy = 0; copy < copies; ++copy) {
          for (int part = 0; part < group; ++part) {
            spmmd_cuda_layer* layer = nullptr;
            if (copy == 0) {
              layer = UploadLayer(parts[static_cast<size_t>(part)]);
            } else {
              CHECK_SPMMD(spmmd_cuda_layer_clone(layers_[static_cast<size_t>(part)], &layer));
            }
            layers_.push_back(layer);
          }
        }
        loaded_ = &parts;
        rotated_bytes_ = bytes;
      }
      const int32_t kernel = spmmd_cuda_find_kernel(kernel_name);
      const auto launch = [&](int copy, int vector) {
        std::vector<spmmd_cuda_matmul> calls(static_cast<size_t>(group));
        int64_t row = 0;
        for (int part = 0; part < group; ++part) {
          spmmd_cuda_matmul& call = calls[static_cast<size_t>(part)];
          call = {};
          call.x = in.device + vector * max_tokens * shape.k;
          call.n = tokens;
          call.x_stride = shape.k;
          call.x_dtype = static_cast<int32_t>(dtype);
          call.y_dtype = static_cast<int32_t>(DType::kF32);
          call.flags = flags | static_cast<uint32_t>(variant + 1) << SPMMD_CUDA_FLAG_VARIANT_SHIFT;
          call.y = y + row;
          call.y_stride = shape.m;
          call.workspace = workspace;
          call.workspace_bytes = kWorkspaceBytes;
          row += parts[static_cast<size_t>(part)].m;
        }
        if (group == 1 || options_.separate) {
          for (int part = 0; part < group; ++part) {
            CHECK_SPMMD(spmmd_cuda_launch(layers_[static_cast<size_t>(copy * group + part)], kernel,
                                          &calls[static_cast<size_t>(part)], stream_));
          }
        } else {
          CHECK_SPMMD(spmmd_cuda_launch_group(layers_.data() + copy * group, kernel, calls.data(), group, stream_));
        }
      };
      const bool accumulate = (flags & SPMMD_CUDA_FLAG_ACCUMULATE) != 0;
      CHECK_CUDA(cudaMemsetAsync(y, accumulate ? 0 : 0xff, static_cast<size_t>(shape.m) * max_tokens * 4, stream_));
      launch(0, 0);
      std::vector<float> got(shape.m);
      CHECK_CUDA(cudaMemcpyAsync(got.data(), y, got.size() * 4, cudaMemcpyDeviceToHost, stream_));
      CHECK_CUDA(cudaStreamSynchronize(stream_));
      const double error = RelativeError(got, reference);
      const int count = static_cast<int>(layers_.size()) / group;
      const PackedLayer& packed = parts[0];
      Sequence sparse(stream_, std::max(24, count), count, launch);
      std::vector<double> us;
      std::vector<double> dense_us;
      for (int i = 0; i < options_.replays; ++i) {
        dense_us.push_back(dense_gemm.Time(timer));
        us.push_back(sparse.Time(timer));
      }
      char config[160];
      if (packed.format == Format::kRowStream) {
        std::snprintf(config, sizeof(config), "rows=%ld;warps=%ld;run=%ld;code=%ld;blocks=%ld;escapes=%.4f;",
                      static_cast<long>(packed.params[0]), static_cast<long>(packed.params[1]),
                      static_cast<long>(packed.params[2]), static_cast<long>(packed.params[3]),
                      static_cast<long>(packed.params[6]),
                      static_cast<double>(row_stream::CountEscapes(packed)) / static_cast<double>(packed.nnz));
      } else {
        config[0] = 0;
      }
      const std::string text = std::string(config) + "variant=" + std::to_string(variant) +
                               ";chain=" + std::to_string(flags & SPMMD_CUDA_FLAG_CHAIN) +
                               ";group=" + std::to_string(group) + (options_.separate ? ";separate=1" : "") +
                               ";accumulate=" + std::to_string(accumulate ? 1 : 0) +
                               ";stored=" + std::to_string(static_cast<int64_t>(stored));
      Row(kernel_name, std::string(Name(packed.format)).c_str(), shape, dtype, tokens, sparsity, us, bytes,
          Percentile(dense_us, .5), error, text, in.sparsity);
      return Percentile(us, .5);
    };

    if (!options_.activation_sparsities.empty()) {
      const std::vector<PackedLayer> pieces =
          Parts(w, [](const DenseView& part) { return column_piece::Pack(part, {}).value(); });
      std::vector<PackedLayer> columns;
      if (options_.celty) columns.push_back(rlc_csc::Pack(w.view(), {}).value());
      for (const double activation_sparsity : options_.activation_sparsities) {
        const double zeros = activation_sparsity < 0 ? sparsity : activation_sparsity;
        const Activations sparse_x = MakeActivations(shape.k, max_tokens, dtype, zeros);
        const Reference reference = MakeReference(w.view(), sparse_x.first);
        for (const uint32_t mode : {0u, SPMMD_CUDA_FLAG_ACCUMULATE}) {
          for (const uint32_t chain : options_.chains) {
            double best = 1e30;
            int best_variant = 0;
            for (const int variant : options_.variants) {
              const double us = measure(pieces, sparse_x, reference, "column_piece_spmspv", mode | chain, variant, 1);
              if (us < best) {
                best = us;
                best_variant = variant;
              }
            }
            std::printf("spmspv %ldx%ld %s %.1f/%.1f %s%s %.2f us variant %d\n", static_cast<long>(shape.m),
                        static_cast<long>(shape.k), std::string(Name(dtype)).c_str(), sparsity, zeros,
                        mode != 0 ? "accumulate" : "overwrite", chain != 0 ? "+chain" : "", best, best_variant);
          }
        }
        if (dtype == DType::kF16 && options_.group == 1) {
          MeasureColumnSkip(w, shape, sparsity, sparse_x, reference, y, dense_gemm, timer);
        }
        for (int variant = 0; options_.celty && variant < (options_.sweep ? 10 : 2); ++variant) {
          measure(columns, sparse_x, reference, "rlc_csc_spmspv", 0u, variant, 1);
        }
        std::fflush(stdout);
        CHECK_CUDA(cudaFree(sparse_x.device));
      }
      Unload();
    } else {
      const Reference reference = MakeReference(w.view(), dense_x.first);
      const auto measure_spmv = [&](const std::vector<PackedLayer>& packed, int variant, uint32_t flags, int tokens) {
        return measure(packed, dense_x, reference, "row_stream_spmv", flags, variant, tokens);
      };
      if (options_.sweep) {
        Sweep(w, shape, dtype, sparsity, measure_spmv);
      } else {
        std::vector<std::optional<row_stream::Coding>> codings = {std::nullopt};
        if (dtype == DType::kBf16) {
          codings = {row_stream::Coding::kVerbatim, row_stream::Coding::kCode2, row_stream::Coding::kCode3};
          if (!options_.codings.empty()) codings.assign(options_.codings.begin(), options_.codings.end());
        }
        std::vector<std::pair<int, int>> tilings = options_.tilings;
        if (tilings.empty()) tilings.emplace_back(0, 0);
        for (const auto& coding : codings) {
          for (const auto& [rows, warps] : tilings) {
            row_stream::Options tuning;
            tuning.coding = coding;
            tuning.rows_per_tile = rows;
            tuning.warps = warps;
            const std::vector<PackedLayer> packed = Parts(w, [&](const DenseView& part) {
              row_stream::Options own = tuning;
              own.multiprocessors =
                  options_.separate ? kMultiprocessors : std::max(1, kMultiprocessors / options_.group);
              // Layers of one launch share their number of warps; on its own, a layer has the packer's choice.
              if (options_.group > 1 && !options_.separate) own.warps = options_.group_warps;
              return row_stream::Pack(part, {}, own).value();
            });
            for (const int tokens : options_.tokens) {
              for (const int variant : options_.variants) {
                for (const uint32_t chain : options_.chains) measure_spmv(packed, variant, chain, tokens);
              }
            }
            Unload();
          }
        }
      }
    }
    Unload();
    for (uint16_t* copy : dense) CHECK_CUDA(cudaFree(copy));
    CHECK_CUDA(cudaFree(dense_x.device));
    CHECK_CUDA(cudaFree(y));
    CHECK_CUDA(cudaFree(workspace));
    std::fflush(csv_);
  }

  // y += W x from a dense W stored by columns, the columns of zeros skipped.
  void MeasureColumnSkip(const DenseMatrix& w, const Shape& shape, double sparsity, const Activations& in,
                         const Reference& reference, float* y, Sequence& dense_gemm, Timer& timer) {
    std::vector<uint16_t> columns(static_cast<size_t>(shape.m * shape.k));
    DefaultThreadPool().ParallelFor((shape.k + 63) / 64, [&](int64_t task, int) {
      for (int64_t r = 0; r < shape.m; ++r) {
        const auto* row = reinterpret_cast<const uint16_t*>(w.view().row(r));
        for (int64_t c = task * 64; c < std::min(shape.k, task * 64 + 64); ++c) columns[c * shape.m + r] = row[c];
      }
    });
    const size_t all = columns.size() * 2;
    const double bytes = static_cast<double>(all) * (1 - in.sparsity);
    const int copies = std::max(2, static_cast<int>(std::ceil(kRotateBytes / bytes)));
    std::vector<uint16_t*> device(copies);
    for (uint16_t*& copy : device) {
      copy = DeviceAlloc<uint16_t>(columns.size());
      CHECK_CUDA(cudaMemcpy(copy, copy == device[0] ? columns.data() : device[0], all, cudaMemcpyDefault));
    }
    const auto launch = [&](int copy, int vector) {
      LaunchDenseColumnSkip(device[static_cast<size_t>(copy)], in.device + vector * shape.k, y,
                            static_cast<int>(shape.m), static_cast<int>(shape.k), kMultiprocessors, stream_);
      CHECK_CUDA(cudaGetLastError());
    };
    CHECK_CUDA(cudaMemsetAsync(y, 0, static_cast<size_t>(shape.m) * 4, stream_));
    launch(0, 0);
    std::vector<float> got(shape.m);
    CHECK_CUDA(cudaMemcpyAsync(got.data(), y, got.size() * 4, cudaMemcpyDeviceToHost, stream_));
    CHECK_CUDA(cudaStreamSynchronize(stream_));
    Sequence skip(stream_, std::max(24, copies), copies, launch);
    std::vector<double> us;
    std::vector<double> dense_us;
    for (int i = 0; i < options_.replays; ++i) {
      dense_us.push_back(dense_gemm.Time(timer));
      us.push_back(skip.Time(timer));
    }
    Row("dense_column_skip", "DENSE", shape, DType::kF16, 1, sparsity, us, bytes, Percentile(dense_us, .5),
        RelativeError(got, reference), "accumulate=1;stored=" + std::to_string(all), in.sparsity);
    for (uint16_t* copy : device) CHECK_CUDA(cudaFree(copy));
  }

  // Tilings around whole numbers of tiles a multiprocessor, with 20 to 64 warps on each.
  template <typename Measure>
  void Sweep(const DenseMatrix& w, const Shape& shape, DType dtype, double sparsity, const Measure& measure) {
    double best = 1e30;
    std::string best_config;
    for (const int per_sm : {1, 2, 3}) {
      const auto rows = static_cast<int>((shape.m + 132 * per_sm - 1) / (132 * per_sm));
      if (rows < 8 || rows > 128) continue;
      // Of the block sizes in range, the two that waste the fewest slots.
      std::vector<std::pair<double, int>> choices;
      for (int warps = 4; warps <= 16; ++warps) {
        const int resident = std::min(per_sm, 48 / warps);
        if (resident * warps < 8 || (per_sm < 4 && resident * warps > 48) || rows > warps * 32) continue;
        row_stream::Options tuning;
        tuning.warps = warps;
        tuning.rows_per_tile = rows;
        const double keep = static_cast<double>(shape.k) * (1 - sparsity);
        const double slots = keep * (sparsity > 0.6 ? 1.004 : sparsity > 0.4 ? 1.067 : 1.008);
        const int pieces = 32 * warps / rows;
        const double blocks = std::ceil(slots / (16.0 * pieces));
        const double waste = blocks * 16 * 32 * warps / (slots * rows) + (resident * warps < 14 ? 0.03 : 0.0);
        choices.push_back({waste, warps});
      }
      std::sort(choices.begin(), choices.end());
      for (size_t i = 0; i < std::min<size_t>(5, choices.size()); ++i) {
        row_stream::Options tuning;
        tuning.warps = choices[i].second;
        tuning.rows_per_tile = rows;
        if (dtype == DType::kBf16) tuning.coding = row_stream::Coding::kCode2;
        std::vector<PackedLayer> packed;
        packed.push_back(row_stream::Pack(w.view(), {}, tuning).value());
        for (int variant = 0; variant < 2; ++variant) {
          const double us = measure(packed, variant, 0u, 1);
          if (us < best) {
            best = us;
            char text[80];
            std::snprintf(text, sizeof(text), "per_sm=%d rows=%d warps=%d variant=%d", per_sm, rows, choices[i].second,
                          variant);
            best_config = text;
          }
        }
        Unload();
      }
    }
    std::printf("best %ldx%ld %s %.1f: %.2f us %s\n", static_cast<long>(shape.m), static_cast<long>(shape.k),
                std::string(Name(dtype)).c_str(), sparsity, best, best_config.c_str());
    std::fflush(stdout);
  }

  // W's rows as options_.group layers.
  template <typename PackOne>
  std::vector<PackedLayer> Parts(const DenseMatrix& w, const PackOne& pack) const {
    std::vector<PackedLayer> parts;
    const DenseView all = w.view();
    for (int i = 0; i < options_.group; ++i) {
      DenseView part = all;
      const int64_t first = all.rows * i / options_.group;
      part.data = all.row(first);
      part.rows = all.rows * (i + 1) / options_.group - first;
      parts.push_back(pack(part));
    }
    return parts;
  }

  spmmd_cuda_layer* UploadLayer(const PackedLayer& packed) {
    std::vector<spmmd_cuda_section> sections;
    for (const Section& s : packed.sections) sections.push_back({s.id, 0, s.data.data(), s.data.size()});
    spmmd_cuda_layer_desc desc = {};
    desc.format = static_cast<int32_t>(packed.format);
    desc.dtype = static_cast<int32_t>(packed.dtype);
    desc.layout_version = packed.layout_version;
    desc.num_sections = static_cast<uint32_t>(sections.size());
    desc.m = packed.m;
    desc.k = packed.k;
    desc.nnz = packed.nnz;
    std::copy(packed.params.begin(), packed.params.end(), desc.params);
    desc.sections = sections.data();
    spmmd_cuda_layer* layer = nullptr;
    CHECK_SPMMD(spmmd_cuda_layer_upload(device_, &desc, &layer));
    return layer;
  }

  void Unload() {
    for (spmmd_cuda_layer* layer : layers_) spmmd_cuda_layer_free(layer);
    layers_.clear();
    loaded_ = nullptr;
  }

  void Row(const char* kernel, const char* format, const Shape& shape, DType dtype, int tokens, double sparsity,
           const std::vector<double>& us, double bytes, double dense_us, double error, const std::string& config,
           double activation_sparsity = 0) {
    const double p50 = Percentile(us, .5);
    std::fprintf(csv_, "%s,%s,%s,%s,%ld,%ld,%d,%.2f,%.2f,%.2f,%.2f,%.2f,%.0f,%.1f,%.1f,%.2f,%.3f,%.2e,%s\n",
                 options_.activation_sparsities.empty() ? "spmv" : "spmspv", format, kernel,
                 std::string(Name(dtype)).c_str(), static_cast<long>(shape.m), static_cast<long>(shape.k), tokens,
                 sparsity, activation_sparsity, p50, Percentile(us, .1), Percentile(us, .9), bytes, bytes / p50 / 1e3,
                 100 * bytes / (p50 * 1e-6) / ceiling_, dense_us, dense_us / p50, error, config.c_str());
  }

  const Options options_;
  spmmd_cuda_device* device_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cublasHandle_t cublas_ = nullptr;
  void* cublas_workspace_ = nullptr;
  std::FILE* csv_ = nullptr;
  double ceiling_ = 1;
  std::vector<spmmd_cuda_layer*> layers_;
  const std::vector<PackedLayer>* loaded_ = nullptr;
  double rotated_bytes_ = 0;
};

int Main(int argc, char** argv) {
  Options options;
  options.shapes = {{4096, 4096},  {11008, 4096}, {4096, 11008}, {5120, 5120},
                    {13824, 5120}, {5120, 13824}, {7168, 7168},  {28672, 7168}};
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const auto value = [&](const char* name) -> const char* {
      const std::string prefix = std::string("--") + name + "=";
      return arg.rfind(prefix, 0) == 0 ? argv[i] + prefix.size() : nullptr;
    };
    if (const char* v = value("csv")) options.csv = v;
    if (const char* v = value("replays")) options.replays = std::atoi(v);
    if (const char* v = value("skew")) options.skew = std::atof(v);
    if (arg == "--sweep") options.sweep = true;
    if (arg == "--celty") options.celty = true;
    if (arg == "--separate") options.separate = true;
    if (arg == "--no-chain") options.chains = {0};
    if (const char* v = value("variants")) {
      options.variants.clear();
      for (char* p = const_cast<char*>(v); *p != 0;) {
        options.variants.push_back(static_cast<int>(std::strtol(p, &p, 10)));
        if (*p == ',') ++p;
      }
    }
    if (const char* v = value("codings")) {
      for (const char* p = v; *p != 0; ++p) {
        if (*p == '0' || *p == '2' || *p == '3') options.codings.push_back(static_cast<row_stream::Coding>(*p - '0'));
      }
    }
    if (const char* v = value("tilings")) {  // ROWSxWARPS,...
      for (char* p = const_cast<char*>(v); *p != 0;) {
        const auto rows = static_cast<int>(std::strtol(p, &p, 10));
        if (*p == 'x') ++p;
        options.tilings.emplace_back(rows, static_cast<int>(std::strtol(p, &p, 10)));
        if (*p == ',') ++p;
      }
    }
    if (const char* v = value("group")) options.group = std::max(1, std::atoi(v));
    if (const char* v = value("group-warps")) options.group_warps = std::max(1, std::atoi(v));
    if (const char* v = value("tokens")) {
      options.tokens.clear();
      for (const char* p = v; *p != 0; ++p) {
        if (*p >= '1' && *p <= '9') options.tokens.push_back(*p - '0');
      }
    }
    if (const char* v = value("dtype")) {
      options.dtypes = {std::string(v) == "fp16" ? DType::kF16 : DType::kBf16};
    }
    if (const char* v = value("activation-sparsity")) {  // "same" takes the weights'
      for (char* p = const_cast<char*>(v); *p != 0;) {
        if (std::strncmp(p, "same", 4) == 0) {
          options.activation_sparsities.push_back(-1);
          p += 4;
        } else {
          options.activation_sparsities.push_back(std::strtod(p, &p));
        }
        if (*p == ',') ++p;
      }
    }
    if (const char* v = value("sparsity")) {
      options.sparsities.clear();
      for (char* p = const_cast<char*>(v); *p != 0;) {
        options.sparsities.push_back(std::strtod(p, &p));
        if (*p == ',') ++p;
      }
    }
    if (const char* v = value("shapes")) {
      options.shapes.clear();
      for (char* p = const_cast<char*>(v); *p != 0;) {
        Shape shape;
        shape.m = std::strtol(p, &p, 10);
        if (*p == 'x') ++p;
        shape.k = std::strtol(p, &p, 10);
        if (*p == ',') ++p;
        options.shapes.push_back(shape);
      }
    }
  }
  Bench(options).Run();
  return 0;
}

}  // namespace
}  // namespace spmmd

int main(int argc, char** argv) { return spmmd::Main(argc, argv); }
