#include "server/device/cuda_dispatch.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "kernels/dispatch/spmv_choice.h"
#include "server/log/log.h"

namespace spmmd::server {
namespace {

// No sparse kernel gains above this share of nonzeros: at 50 % zeros BITMAP reads 0.61 to 0.64 of what dense does, at
// 25 % 0.9, and decodes.
constexpr double kMaxSparseDensity = 0.75;
// A 2:4 mask with fewer nonzeros than this is better stored by what it has than by what 2:4 allows.
constexpr double kMinTwoOfFourDensity = 0.4;
// Unless measured: below 4 Mi elements an H200 is as fast dense, and below 16 Mi BITMAP is as fast as THREE_LAYER on
// 2:4 masks (docs/measurements.md).
constexpr int64_t kSmallElements = int64_t{4} << 20;
constexpr int64_t kSmallTwoOfFour = int64_t{16} << 20;
// What decoding runs at. Beyond it a dense copy may serve beside a sparse layer.
constexpr int64_t kDecodeTokens = 32;
constexpr double kGain = 0.97;  // of dense's time, that a sparse kernel must do with at some width of decoding

std::string FileOf(const DeviceOptions& options, const char* device) {
  if (!options.tune_kernels || options.tuning_dir.empty()) return "";
  std::string name(device);
  for (char& c : name) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c))) c = '-';
  }
  return (std::filesystem::path(options.tuning_dir) / "tuning" / absl::StrCat("cuda-", name, ".tsv")).string();
}

// "N = 1 10.1/13.3 us, ..." of BITMAP and DENSE.
std::string TimesText(const CudaWidths& widths) {
  std::string text;
  for (const CudaWidth& width : widths) {
    const int64_t n = width.tokens;
    if (n != 1 && n != 8 && n != 32 && n != 128 && n != 512) continue;
    absl::StrAppendFormat(&text, "%sN = %d %.1f/%.1f", text.empty() ? "" : ", ", n, width.sparse_us, width.dense_us);
  }
  return text;
}

// The number of tokens from which on DENSE is faster throughout; -1 when it never is.
int64_t DenseFrom(const CudaWidths& widths) {
  int64_t from = -1;
  for (auto width = widths.rbegin(); width != widths.rend() && width->dense_is_faster(); ++width) {
    // An entry stands for the numbers of tokens since the one before it.
    from = std::next(width) == widths.rend() ? 1 : std::next(width)->tokens + 1;
  }
  return from;
}

FormatChoice ForSparseActivations(const FormatQuery& query, double zeros, double bandwidth,
                                  const CudaDispatch::Bytes& bytes) {
  SpmvCopies copies;
  copies.m = query.m;
  copies.k = query.k;
  copies.nnz = query.nnz;
  copies.row_stream_bytes = static_cast<int64_t>(bytes(Format::kRowStream));
  copies.column_piece_bytes = static_cast<int64_t>(bytes(Format::kColumnPiece));
  const SpmvTuning tuning = bandwidth > 0 ? ScaledSpmvTuning(bandwidth) : H200SpmvTuning();
  const int64_t columns = LargestSpmspvColumns(tuning, copies, /*accumulate=*/false);
  const double half_us = PredictSpmvUs(tuning, copies, SpmvKernel::kSpmspv, query.k / 2, false);
  const double spmv_us = PredictSpmvUs(tuning, copies, SpmvKernel::kSpmv, query.k, false);
  const std::string times = absl::StrFormat(
      "predicted for one token: skipping half of the columns takes %.1f us, reading all in row order %.1f", half_us,
      spmv_us);
  if (2 * columns >= query.k) {
    return {Format::kColumnPiece,
            absl::StrFormat("RLC_CSC (column pieces): %.1f %% of the elements are zero and the layer's activations are "
                            "sparse (activation_threshold); %s; about %d bytes, DENSE takes %d.",
                            zeros, times, copies.column_piece_bytes, bytes(Format::kDense))};
  }
  return {Format::kRowStream,
          absl::StrFormat("ROW_STREAM: %.1f %% of the elements are zero; the layer's activations are sparse "
                          "(activation_threshold), but skipping columns of a layer this small pays below %d of %d "
                          "only; %s.",
                          zeros, std::max<int64_t>(columns, 0), query.k, times)};
}

}  // namespace

CudaDispatch::CudaDispatch(std::shared_ptr<const CudaLibrary> library, CudaContext* context, MemoryBudget* budget,
                           const DeviceOptions& options, CudaTuner::Exclusively exclusively)
    : library_(std::move(library)),
      context_(context),
      budget_(budget),
      tune_(options.tune_kernels),
      shadows_(options.dense_shadows),
      file_(FileOf(options, context->info().name)),
      table_(library_.get()),
      tuner_(library_, context->device(), std::move(exclusively)) {
  if (file_.empty()) return;
  const absl::Status read = table_.Load(file_, context_->info().name);
  if (read.ok()) {
    LogInfo("kernel times read",
            {{"device", context_->id()}, {"file", file_}, {"shapes", static_cast<int64_t>(table_.size())}});
  } else if (!absl::IsNotFound(read)) {
    LogWarning("kernel times are measured anew", {{"device", context_->id()}, {"reason", std::string(read.message())}});
  }
}

std::shared_ptr<const CudaWidths> CudaDispatch::Times(const CudaShape& shape, bool sparse, bool again) {
  const auto known = [&]() -> std::shared_ptr<const CudaWidths> {
    std::shared_ptr<const CudaWidths> widths = table_.Find(shape);
    return widths != nullptr && (!sparse || widths->front().kernel >= 0) ? widths : nullptr;
  };
  if (auto widths = known(); !tune_ || (widths != nullptr && !again)) return widths;
  absl::MutexLock lock(&measuring_);
  if (auto widths = known(); widths != nullptr && !again) return widths;
  const absl::StatusOr<MemoryBudget::Reservation> memory =
      budget_->ReserveSpare(MemoryKind::kWorkspace, CudaTuner::MemoryBytes(shape));
  if (!memory.ok()) return known();
  const absl::Time start = absl::Now();
  absl::StatusOr<CudaWidths> measured = tuner_.Measure(shape, sparse);
  if (!measured.ok()) {
    LogWarning("kernels not measured", {{"device", context_->id()},
                                        {"m", shape.m},
                                        {"k", shape.k},
                                        {"reason", std::string(measured.status().message())}});
    return known();
  }
  table_.Put(shape, *std::move(measured));
  LogInfo("kernels measured", {{"device", context_->id()},
                               {"dtype", Name(shape.dtype)},
                               {"m", shape.m},
                               {"k", shape.k},
                               {"nonzeros_percent", shape.density_pct},
                               {"seconds", absl::ToDoubleSeconds(absl::Now() - start)}});
  if (!file_.empty()) {
    std::error_code error;
    std::filesystem::create_directories(std::filesystem::path(file_).parent_path(), error);
    const absl::Status saved = table_.Save(file_, context_->info().name);
    if (!saved.ok()) LogWarning("kernel times not kept", {{"reason", std::string(saved.message())}});
  }
  return known();
}

FormatChoice CudaDispatch::Choose(const FormatQuery& query, double bandwidth, const Bytes& bytes) {
  const double elements = static_cast<double>(query.m) * static_cast<double>(query.k);
  const double density = static_cast<double>(query.nnz) / elements;
  const double zeros = 100 * (1 - density);
  const bool sparse = density <= kMaxSparseDensity;
  const CudaShape shape = CudaShape::Of(query.dtype, query.m, query.k, query.nnz);
  const auto times = [&] { return query.may_measure ? Times(shape, sparse) : table_.Find(shape); };
  if (!sparse) {
    times();  // for the fastest of cublasLt's algorithms
    return {Format::kDense,
            absl::StrFormat("DENSE: %.1f %% of the elements are zero; sparse kernels gain from %.0f %%.", zeros,
                            100 * (1 - kMaxSparseDensity))};
  }
  // What SpMspV and 2:4 kernels cost was measured where the kernels made for compute capability 9.0 run; elsewhere the
  // measured table alone decides.
  const bool portable = context_->info().usable != 1;
  if (query.sparse_activations && !portable) return ForSparseActivations(query, zeros, bandwidth, bytes);
  if (query.two_of_four && !portable && density >= kMinTwoOfFourDensity && query.m * query.k >= kSmallTwoOfFour) {
    return {
        Format::kThreeLayer,
        absl::StrFormat("THREE_LAYER: no more than 2 of 4 neighbours along K are nonzero, which sparse tensor cores "
                        "multiply as they are; about %d bytes, DENSE takes %d.",
                        bytes(Format::kThreeLayer), bytes(Format::kDense))};
  }
  const std::string sizes =
      absl::StrFormat("about %d bytes, DENSE takes %d", bytes(Format::kBitmapGpu), bytes(Format::kDense));
  const std::shared_ptr<const CudaWidths> widths = times();
  if (widths == nullptr || widths->front().kernel < 0) {
    if (query.m * query.k < kSmallElements) {
      return {Format::kDense, absl::StrFormat("DENSE: %.1f %% of the elements are zero, but a layer of less than %d Mi "
                                              "elements is as fast dense; %s.",
                                              zeros, kSmallElements >> 20, sizes)};
    }
    return {Format::kBitmapGpu, absl::StrFormat("BITMAP: %.1f %% of the elements are zero; %s.", zeros, sizes)};
  }
  const bool gains = std::any_of(widths->begin(), widths->end(), [](const CudaWidth& width) {
    return width.tokens <= kDecodeTokens && width.sparse_us < kGain * width.dense_us;
  });
  const std::string measured = absl::StrCat("measured us, BITMAP/DENSE: ", TimesText(*widths));
  if (!gains) {
    return {Format::kDense,
            absl::StrFormat("DENSE: %.1f %% of the elements are zero, but BITMAP is no faster up to N = %d (%s); %s.",
                            zeros, kDecodeTokens, measured, sizes)};
  }
  const int64_t from = DenseFrom(*widths);
  const std::string copy =
      from < 0 || !shadows_ ? "" : absl::StrFormat("; from N = %d on a dense copy runs where memory is spare", from);
  return {Format::kBitmapGpu,
          absl::StrFormat("BITMAP: %.1f %% of the elements are zero (%s%s); %s.", zeros, measured, copy, sizes)};
}

}  // namespace spmmd::server
