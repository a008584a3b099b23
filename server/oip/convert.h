// From a ModelInferRequest to the ExecuteRequest that computes it, and back. Tensors' bytes are moved, not copied; only
// elements in `contents` are, once.
//
// Names, datatypes, parameters and where the bytes are is checked here; shapes, sizes and regions by the engine, whose
// errors ToInferError() gives the paths of the request that the caller sent.
#ifndef SPMMD_SERVER_OIP_CONVERT_H_
#define SPMMD_SERVER_OIP_CONVERT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "inference/grpc_service.pb.h"
#include "server/oip/model.h"
#include "server/pb.h"
#include "spmm/v1/sparse_matmul.pb.h"

namespace spmmd::server {

// What is kept of a request until its answer is written.
struct InferContext {
  std::string model_name;
  int64_t model_version = 0;
  std::string id;
  int64_t rows = 0;  // of the first input, unchecked
  // Zero: none.
  absl::Duration timeout;
  // The caller asked for the mark that says "this was the last response".
  bool wants_final_mark = false;

  struct Output {
    int index = 0;        // in ExecuteResponse.outputs
    int requested = -1;   // in ModelInferRequest.outputs; -1: it names none
    bool region = false;  // written into shared memory
  };
  std::vector<Output> outputs;             // in the order of the answer
  std::vector<std::string> content_paths;  // by input: the field that its bytes came in
};

// INVALID_ARGUMENT naming the field: a tensor that the model has not, a datatype that is none of FP16, BF16, FP32,
// bytes missing, left over or in two places, a parameter of the wrong type. Parameters that mean nothing here are
// ignored. The request's tensors are moved from, also when an error is returned.
absl::Status ToExecute(const Model& model, inference::ModelInferRequest* request, pb::ExecuteRequest* execute,
                       InferContext* context);

// An error of the engine about `execute`, in the caller's terms. OK stays OK.
absl::Status ToInferError(const absl::Status& status, const InferContext& context);

// `result` is the complete answer of the engine; its tensors are moved from.
void ToInferResponse(const InferContext& context, pb::ExecuteResponse* result, inference::ModelInferResponse* response);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_OIP_CONVERT_H_
