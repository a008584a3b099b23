// How often ROW_STREAM's bfloat16 codes escape on a real checkpoint: every two-dimensional tensor of a .safetensors
// file is rounded to bf16, pruned by magnitude and packed with each code. One CSV line a tensor and sparsity, then the
// totals, weighted by nonzeros.
//
//   row_stream_escapes model.safetensors > escapes.csv
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/format/prune.h"
#include "kernels/format/row_stream.h"
#include "kernels/format/safetensors.h"

namespace spmmd {
namespace {

int Main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: row_stream_escapes FILE.safetensors\n");
    return 2;
  }
  auto checkpoint = SafetensorsCheckpoint::Open(argv[1]);
  if (!checkpoint.ok()) {
    std::fprintf(stderr, "%s\n", std::string(checkpoint.status().message()).c_str());
    return 1;
  }
  constexpr double kSparsities[] = {0.3, 0.5, 0.7};
  struct Total {
    int64_t nnz = 0;
    int64_t escapes[2] = {0, 0};
    double bytes[3] = {0, 0, 0};
    double dense = 0;
    int64_t chosen[4] = {0, 0, 0, 0};
  } totals[3];
  std::printf("tensor,M,K,sparsity,escapes2,escapes3,bytes_verbatim,bytes_code2,bytes_code3,chosen\n");
  for (const std::string& name : checkpoint->TensorNames()) {
    auto matrix = checkpoint->ReadMatrix(name);
    if (!matrix.ok() || matrix->rows() < 64 || matrix->cols() < 64) continue;
    for (size_t s = 0; s < std::size(kSparsities); ++s) {
      DenseMatrix w = DenseMatrix::Create(DType::kBf16, matrix->rows(), matrix->cols()).value();
      if (!ConvertDense(matrix->view(), w.mutable_view()).ok()) return 1;
      if (!PruneMagnitude(w.mutable_view(), kSparsities[s]).ok()) return 1;
      Total& total = totals[s];
      double share[2];
      double bytes[3];
      const auto dense = static_cast<double>(w.bytes());
      for (int code = 0; code < 3; ++code) {
        row_stream::Options options;
        options.coding = code == 0   ? row_stream::Coding::kVerbatim
                         : code == 1 ? row_stream::Coding::kCode2
                                     : row_stream::Coding::kCode3;
        auto packed = row_stream::Pack(w.view(), {}, options);
        if (!packed.ok()) return 1;
        bytes[code] = static_cast<double>(packed->bytes().total()) / dense;
        total.bytes[code] += static_cast<double>(packed->bytes().total());
        if (code == 0) {
          total.nnz += packed->nnz;
          continue;
        }
        const int64_t escapes = row_stream::CountEscapes(*packed);
        share[code - 1] = static_cast<double>(escapes) / static_cast<double>(packed->nnz);
        total.escapes[code - 1] += escapes;
      }
      total.dense += dense;
      const auto chosen = row_stream::Pack(w.view(), {}, {});
      if (!chosen.ok()) return 1;
      const int64_t code = chosen->params[row_stream::kParamCoding];
      ++total.chosen[code];
      std::printf("%s,%lld,%lld,%.1f,%.5f,%.5f,%.4f,%.4f,%.4f,%lld\n", name.c_str(), static_cast<long long>(w.rows()),
                  static_cast<long long>(w.cols()), kSparsities[s], share[0], share[1], bytes[0], bytes[1], bytes[2],
                  static_cast<long long>(code));
    }
  }
  for (size_t s = 0; s < std::size(kSparsities); ++s) {
    const Total& t = totals[s];
    if (t.nnz == 0) continue;
    const auto nnz = static_cast<double>(t.nnz);
    std::printf("TOTAL,,,%.1f,%.5f,%.5f,%.4f,%.4f,%.4f,%lld/%lld/%lld\n", kSparsities[s],
                static_cast<double>(t.escapes[0]) / nnz, static_cast<double>(t.escapes[1]) / nnz, t.bytes[0] / t.dense,
                t.bytes[1] / t.dense, t.bytes[2] / t.dense, static_cast<long long>(t.chosen[0]),
                static_cast<long long>(t.chosen[2]), static_cast<long long>(t.chosen[3]));
  }
  return 0;
}

}  // namespace
}  // namespace spmmd

int main(int argc, char** argv) { return spmmd::Main(argc, argv); }
