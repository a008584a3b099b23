// One token, three kernels: SpMV reads all of a ROW_STREAM copy, SpMspV the active columns of a COLUMN_PIECE copy,
// dense all of a dense one. Which is fastest follows from the bytes each must read and from what a launch costs,
// fitted to measurements (docs/kernels.md, "One token"). Plain arithmetic: no device, no allocation.
#ifndef SPMMD_KERNELS_DISPATCH_SPMV_CHOICE_H_
#define SPMMD_KERNELS_DISPATCH_SPMV_CHOICE_H_

#include <cstdint>
#include <optional>

namespace spmmd {

enum class SpmvKernel : uint8_t { kSpmv, kSpmspv, kDense };

// Microseconds of one launch: fixed + per_mib * MiB read + per_mi_element * Mi elements decoded. Those are the nonzeros
// for SpMV, the dense elements of the active columns for SpMspV, which decodes in lockstep, and none for dense.
struct SpmvCost {
  double fixed_us = 0;
  double us_per_mib = 0;
  double us_per_mi_element = 0;
};

// One device. Every figure comes from a fit over the eight shapes of docs/measurements-spmv.md.
struct SpmvTuning {
  SpmvCost spmv;               // verbatim or coded values: they differ in bytes alone
  SpmvCost spmspv_overwrite;   // y = W x
  SpmvCost spmspv_accumulate;  // y += W x in fp32
  SpmvCost dense;
};

// Measured on an H200 (4.6 TB/s when reading only). `chained`: launches with SPMMD_CUDA_FLAG_CHAIN, whose start hides
// behind the kernel before them; dense is charged the same, it has no such launch.
SpmvTuning H200SpmvTuning(bool chained = false);

// The same kernels on a device that reads `bytes_per_second` at best: what depends on bytes scales, the rest stays.
SpmvTuning ScaledSpmvTuning(double bytes_per_second, bool chained = false);

// What is resident of a layer W [m, k]; 0 bytes: no such copy.
struct SpmvCopies {
  int64_t m = 0;
  int64_t k = 0;
  int64_t nnz = 0;
  int64_t row_stream_bytes = 0;
  int64_t column_piece_bytes = 0;
  int64_t dense_bytes = 0;
};

struct SpmvChoice {
  SpmvKernel kernel = SpmvKernel::kDense;
  double us = 0;  // predicted
};

// Predicted microseconds, infinite when the copy that `kernel` reads is not resident. `active_columns` of [0, k] are
// the entries of x that count; only kSpmspv cares. `accumulate` asks for y += W x, which only kSpmspv can do: the
// others are charged a second, small launch that adds.
double PredictSpmvUs(const SpmvTuning& tuning, const SpmvCopies& copies, SpmvKernel kernel, int64_t active_columns,
                     bool accumulate);

// The fastest kernel among the resident copies; nullopt when there are none.
std::optional<SpmvChoice> ChooseSpmv(const SpmvTuning& tuning, const SpmvCopies& copies, int64_t active_columns,
                                     bool accumulate);

// The most active columns for which kSpmspv is the fastest of `copies`; -1 when it never is. Below it a COLUMN_PIECE
// copy earns its memory.
int64_t LargestSpmspvColumns(const SpmvTuning& tuning, const SpmvCopies& copies, bool accumulate);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_DISPATCH_SPMV_CHOICE_H_
