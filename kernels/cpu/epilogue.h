// From partial sums to outputs: summation over K ranges, bias, activation, conversion. Vectorised, dispatched at run
// time.
#ifndef SPMMD_KERNELS_CPU_EPILOGUE_H_
#define SPMMD_KERNELS_CPU_EPILOGUE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/activation.h"
#include "kernels/base/dtype.h"
#include "kernels/cpu/bitmap_kernels.h"

namespace spmmd::cpu {

// values[i] = activation(values[i] + bias[i]) for i < count; bias may be null. The memory behind `count` must be
// readable and writable up to the next multiple of 16 elements and is overwritten.
void ApplyEpilogue(float* values, int64_t count, const float* bias, Activation activation);

// Sums of one row block in `parts` buffers of shape [groups][tokens][kGroupRows], each `stride` floats from the one
// before.
struct PartialSums {
  const float* first = nullptr;
  int64_t parts = 1;
  int64_t stride = 0;
  int tokens = 1;
  RowOrder order = RowOrder::kNatural;
};

// Adds the parts up in their order and finishes the outputs of one token: `rows` elements of `y_type` at y. `bias`
// points at the block's first row, or is null.
void FinishToken(const PartialSums& sums, int token, int64_t rows, const float* bias, Activation activation,
                 DType y_type, std::byte* y);

// total[i] += part[i]; count is a multiple of 32, both 64-byte aligned.
void AddPart(const float* part, int64_t count, float* total);

}  // namespace spmmd::cpu

#endif  // SPMMD_KERNELS_CPU_EPILOGUE_H_
