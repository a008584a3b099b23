// Sparse checkpoints of the `compressed-tensors` library (llm-compressor, vLLM). A linear layer `P` is stored in one of
// three ways, which may be mixed in one checkpoint:
//   dense-saved         P.weight [M, K]
//   sparse-bitmask      P.shape int64 [2], P.compressed [nnz], P.bitmask uint8 [M, ceil(K / 8)] (bit c % 8 of byte c /
//   8,
//                       least significant first), P.row_offsets int64 [M] (where a row's values start)
//   sparse-24-bitmask   P.shape int64 [2, 1], P.compressed [M, K / 2], P.bitmask as above: exactly two bits of every
//   four
//                       columns, so values may be zero
// The two bitmask forms have no runtime elsewhere any more; here they load as any other layer.
#ifndef SPMMD_KERNELS_FORMAT_COMPRESSED_TENSORS_H_
#define SPMMD_KERNELS_FORMAT_COMPRESSED_TENSORS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/format/dense.h"
#include "kernels/format/safetensors.h"

namespace spmmd {

// The weight named `name` as a matrix: a tensor of that name as it is; else, for "P.weight", the bitmask form of P.
// Errors as SafetensorsCheckpoint::ReadMatrix; INVALID_ARGUMENT naming the part when the parts disagree, and for
// quantized values.
absl::StatusOr<DenseMatrix> ReadCheckpointWeight(SafetensorsCheckpoint* checkpoint, absl::string_view name);

// What ReadCheckpointWeight would read, without reading it: the element type as .safetensors spells it ("BF16"), and
// the shape. The values are not checked.
struct WeightDescription {
  std::string dtype;
  std::vector<int64_t> shape;
};
absl::StatusOr<WeightDescription> DescribeCheckpointWeight(SafetensorsCheckpoint* checkpoint, absl::string_view name);

// Names that ReadCheckpointWeight may be asked for: every tensor that is no part of a bitmask form, and "P.weight" for
// each of those. Ascending.
std::vector<std::string> CheckpointWeightNames(const SafetensorsCheckpoint& checkpoint);

}  // namespace spmmd

#endif  // SPMMD_KERNELS_FORMAT_COMPRESSED_TENSORS_H_
