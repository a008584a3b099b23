// Weights and activations from local files.
#ifndef SPMMD_CLIENT_CLI_WEIGHTS_H_
#define SPMMD_CLIENT_CLI_WEIGHTS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/parse.h"
#include "client/cpp/tensor.h"
#include "kernels/format/dense.h"

namespace spmmd::cli {

// The matrix of a .npy file, the named tensor of a .safetensors file ("P.weight" also in the bitmask forms of
// compressed-tensors), or what a packed-layer file holds. A .safetensors file with a single matrix needs no name.
// Errors name the file, and list tensors when the name is missing or wrong.
absl::StatusOr<DenseMatrix> ReadMatrix(const FileAndTensor& file);

// A matrix as a layer's weights: INVALID_ARGUMENT for a vector, which ReadMatrix gives as one row and which is most
// likely a bias.
absl::StatusOr<DenseMatrix> ReadLayerWeights(const FileAndTensor& file);

// The bias in a packed-layer file; empty when it has none, and for every other file.
absl::StatusOr<std::vector<float>> PackedBias(const FileAndTensor& file);

// A vector of `m` elements as fp32. `bias` is a file, or the name of a tensor in `weights`, which must then be a
// .safetensors file.
absl::StatusOr<std::vector<float>> ReadBias(const std::string& bias, const FileAndTensor& weights, int64_t m);

// A view for the client library.
client::DenseRows ToRows(const DenseMatrix& matrix);

// Writes a result as .npy.
absl::Status WriteMatrix(const std::string& path, const client::Matrix& matrix);

}  // namespace spmmd::cli

#endif  // SPMMD_CLIENT_CLI_WEIGHTS_H_
