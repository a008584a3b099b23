// BindInputs and FindOutputSlices: from the tensors of a request to the values of a job.
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/dense.h"
#include "server/catalog/types.h"
#include "server/device/device.h"
#include "server/engine/program.h"
#include "server/engine/regions.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

struct Shape {
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  uint64_t bytes() const { return static_cast<uint64_t>(rows) * static_cast<uint64_t>(cols) * SizeOf(dtype); }
};

// The checks that a dense and a sparse tensor share. `Message` has dtype and shape.
template <typename Message>
absl::StatusOr<Shape> ReadShape(const Message& tensor, const std::string& path, int64_t max_tokens) {
  Shape shape;
  if (tensor.dtype() == pb::DATA_TYPE_UNSPECIFIED) return FieldError(absl::StrCat(path, ".dtype"), "must be set");
  const std::optional<DType> dtype = FromProto(tensor.dtype());
  if (!dtype.has_value()) {
    return FieldError(absl::StrCat(path, ".dtype"), absl::StrCat("unknown value ", static_cast<int>(tensor.dtype())));
  }
  shape.dtype = *dtype;
  if (tensor.shape_size() != 2) {
    return FieldError(absl::StrCat(path, ".shape"),
                      absl::StrCat(tensor.shape_size(), " dimensions, expected 2: [rows, columns]"));
  }
  shape.rows = tensor.shape(0);
  shape.cols = tensor.shape(1);
  if (shape.rows < 0) return FieldError(absl::StrCat(path, ".shape[0]"), absl::StrCat(shape.rows, " is negative"));
  if (shape.rows > max_tokens) {
    return FieldError(absl::StrCat(path, ".shape[0]"),
                      absl::StrCat(shape.rows, " rows exceed the limit of ", max_tokens, " tokens"));
  }
  if (shape.cols < 1 || shape.cols > kMaxDim) {
    return FieldError(absl::StrCat(path, ".shape[1]"), absl::StrCat(shape.cols, " is not within 1 to ", kMaxDim));
  }
  // No overflow: rows <= max_tokens < 2^31, columns <= 2^24, 4 bytes.
  return shape;
}

absl::Status ByteCount(const std::string& path, uint64_t expected, uint64_t got) {
  return FieldError(path, absl::StrCat("expected ", expected, " bytes, got ", got));
}

const Payloads::Input* PayloadOf(const Payloads* payloads, int input) {
  if (payloads == nullptr || payloads->inputs.size() <= static_cast<size_t>(input)) return nullptr;
  return &payloads->inputs[static_cast<size_t>(input)];
}

absl::Status BindDense(const pb::Tensor& tensor, const std::string& path, int64_t max_tokens, const RegionSet* regions,
                       const Payloads::Input* payload, InputValue* value, int64_t* rows, int64_t* cols, Job* job) {
  SPMMD_ASSIGN_OR_RETURN(const Shape shape, ReadShape(tensor, path, max_tokens));
  const std::byte* data = nullptr;
  switch (tensor.content_case()) {
    case pb::Tensor::kData:
      if (payload != nullptr && payload->present()) {
        if (payload->bytes != shape.bytes()) {
          return ByteCount(absl::StrCat(path, ".data"), shape.bytes(), payload->bytes);
        }
        job->buffers.push_back(job->plan->devices.front()->host_buffers().Take(payload->bytes));
        Gather(payload->pieces, job->buffers.back().data());
        data = job->buffers.back().data();
        value->pinned = job->buffers.back().pinned();
        break;
      }
      if (tensor.data().size() != shape.bytes()) {
        return ByteCount(absl::StrCat(path, ".data"), shape.bytes(), tensor.data().size());
      }
      // A string's bytes are aligned for every element type.
      data = reinterpret_cast<const std::byte*>(tensor.data().data());
      break;
    case pb::Tensor::kRegion: {
      SPMMD_ASSIGN_OR_RETURN(data, BindSlice(regions, tensor.region(), absl::StrCat(path, ".region"), shape.dtype,
                                             shape.bytes(), /*output=*/false, job));
      value->on_device = job->regions.back().region->device() != nullptr;
      break;
    }
    case pb::Tensor::CONTENT_NOT_SET:
      return FieldError(path, "one of data, region must be set");
  }
  value->dense = {data, shape.dtype, shape.rows, shape.cols, shape.cols};
  *rows = shape.rows;
  *cols = shape.cols;
  job->bytes += shape.bytes();
  return absl::OkStatus();
}

float ElementAt(DType dtype, const char* data, size_t i) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, data + i * sizeof(value), sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, data + i * sizeof(bits), sizeof(bits));
  return dtype == DType::kF16 ? F16ToFloat(bits) : Bf16ToFloat(bits);
}

absl::Status ReadOffsets(const std::string& bytes, const std::string& path, const Shape& shape, uint64_t entries,
                         std::vector<uint64_t>* offsets) {
  if (bytes.empty() && shape.rows == 1) {
    *offsets = {0, entries};
    return absl::OkStatus();
  }
  const uint64_t count = static_cast<uint64_t>(shape.rows) + 1;
  if (bytes.size() != count * sizeof(uint64_t)) return ByteCount(path, count * sizeof(uint64_t), bytes.size());
  offsets->resize(count);
  std::memcpy(offsets->data(), bytes.data(), bytes.size());
  if (offsets->front() != 0) {
    return FieldError(absl::StrCat(path, "[0]"), absl::StrCat(offsets->front(), ", expected 0"));
  }
  for (size_t i = 1; i < count; ++i) {
    if ((*offsets)[i] < (*offsets)[i - 1]) {
      return FieldError(absl::StrCat(path, "[", i, "]"),
                        absl::StrCat((*offsets)[i], " is less than the offset before it, ", (*offsets)[i - 1]));
    }
  }
  if (offsets->back() != entries) {
    return FieldError(absl::StrCat(path, "[", shape.rows, "]"),
                      absl::StrCat(offsets->back(), ", expected the number of indices, ", entries));
  }
  return absl::OkStatus();
}

absl::Status BindSparse(const pb::SparseTensor& tensor, const std::string& path, int64_t max_tokens, InputValue* value,
                        int64_t* rows, int64_t* cols, uint64_t* bytes) {
  SPMMD_ASSIGN_OR_RETURN(const Shape shape, ReadShape(tensor, path, max_tokens));
  if (tensor.indices().size() % sizeof(uint32_t) != 0) {
    return FieldError(absl::StrCat(path, ".indices"),
                      absl::StrCat(tensor.indices().size(), " bytes are not a multiple of 4"));
  }
  const uint64_t entries = tensor.indices().size() / sizeof(uint32_t);
  if (tensor.values().size() != entries * SizeOf(shape.dtype)) {
    return ByteCount(absl::StrCat(path, ".values"), entries * SizeOf(shape.dtype), tensor.values().size());
  }
  SparseRows& sparse = value->sparse.emplace();
  sparse.rows = shape.rows;
  sparse.cols = shape.cols;
  SPMMD_RETURN_IF_ERROR(
      ReadOffsets(tensor.row_offsets(), absl::StrCat(path, ".row_offsets"), shape, entries, &sparse.offsets));
  sparse.indices = {reinterpret_cast<const uint32_t*>(tensor.indices().data()), entries};
  for (int64_t row = 0; row < shape.rows; ++row) {
    const uint64_t begin = sparse.offsets[static_cast<size_t>(row)];
    const uint64_t end = sparse.offsets[static_cast<size_t>(row) + 1];
    for (uint64_t i = begin; i < end; ++i) {
      const uint32_t index = sparse.indices[i];
      if (index >= static_cast<uint64_t>(shape.cols)) {
        return FieldError(absl::StrCat(path, ".indices[", i, "]"),
                          absl::StrCat(index, " is not below the number of columns, ", shape.cols));
      }
      if (i > begin && index <= sparse.indices[i - 1]) {
        return FieldError(
            absl::StrCat(path, ".indices[", i, "]"),
            absl::StrCat(index, " after ", sparse.indices[i - 1], " in row ", row, ": not strictly ascending"));
      }
    }
  }
  sparse.values.resize(entries);
  for (size_t i = 0; i < entries; ++i) sparse.values[i] = ElementAt(shape.dtype, tensor.values().data(), i);
  *rows = shape.rows;
  *cols = shape.cols;
  *bytes += tensor.indices().size() + tensor.values().size() + tensor.row_offsets().size();
  return absl::OkStatus();
}

}  // namespace

absl::Status BindInputs(const pb::ExecuteRequest& request, const Plan& plan, int64_t max_tokens,
                        const RegionSet* regions, const Payloads* payloads, Job* job) {
  const size_t count = plan.input_names.size();
  job->inputs.clear();
  job->inputs.resize(count);
  std::vector<bool> seen(count);
  std::vector<int64_t> class_cols = plan.class_cols;
  // Who fixed a width that the plan leaves open, for messages.
  std::string rows_from;
  for (int i = 0; i < request.inputs_size(); ++i) {
    const pb::NamedInput& input = request.inputs(i);
    const std::string path = absl::StrCat("inputs[", i, "]");
    size_t index = 0;
    while (index < count && plan.input_names[index] != input.name()) ++index;
    if (index == count) {
      return FieldError(absl::StrCat(path, ".name"),
                        absl::StrCat("\"", input.name(), "\" is not an input of the program"));
    }
    if (seen[index]) {
      return FieldError(absl::StrCat(path, ".name"), absl::StrCat("\"", input.name(), "\" is given twice"));
    }
    seen[index] = true;

    InputValue& value = job->inputs[index];
    int64_t rows = 0;
    int64_t cols = 0;
    std::string value_path;
    if (input.has_dense()) {
      value_path = absl::StrCat(path, ".dense");
      SPMMD_RETURN_IF_ERROR(
          BindDense(input.dense(), value_path, max_tokens, regions, PayloadOf(payloads, i), &value, &rows, &cols, job));
    } else if (input.has_sparse()) {
      value_path = absl::StrCat(path, ".sparse");
      if (plan.input_dense_only[index]) {
        return FieldError(value_path, absl::StrCat("\"", input.name(),
                                                   "\" is read by an element-wise step, which takes "
                                                   "dense inputs only"));
      }
      SPMMD_RETURN_IF_ERROR(BindSparse(input.sparse(), value_path, max_tokens, &value, &rows, &cols, &job->bytes));
    } else {
      return FieldError(path, "one of dense, sparse must be set");
    }
    int64_t& expected = class_cols[static_cast<size_t>(plan.width_class[index])];
    if (expected >= 0 && cols != expected) {
      return FieldError(absl::StrCat(value_path, ".shape[1]"),
                        absl::StrCat(cols, " columns, expected ", expected, " (K of the layers that read it)"));
    }
    expected = cols;
    if (rows_from.empty()) {
      job->rows = rows;
      rows_from = input.name();
    } else if (rows != job->rows) {
      return FieldError(absl::StrCat(value_path, ".shape[0]"),
                        absl::StrCat(rows, " rows, but input \"", rows_from, "\" has ", job->rows));
    }
  }
  for (size_t index = 0; index < count; ++index) {
    if (!seen[index]) {
      return FieldError("inputs", absl::StrCat("input \"", plan.input_names[index], "\" of the program is missing"));
    }
  }
  job->step_cols.resize(plan.steps.size());
  for (size_t s = 0; s < plan.steps.size(); ++s) {
    job->step_cols[s] = class_cols[static_cast<size_t>(plan.width_class[count + s])];
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<const pb::RegionSlice*>> FindOutputSlices(const pb::ExecuteRequest& request,
                                                                     const pb::Program& program, const Plan& plan) {
  std::vector<const pb::RegionSlice*> slices(plan.outputs.size(), nullptr);
  for (size_t o = 0; o < slices.size(); ++o) {
    const pb::OutputSpec& output = program.outputs(static_cast<int>(o));
    if (output.has_region()) slices[o] = &output.region();
  }
  if (request.outputs_size() == 0) return slices;
  if (request.outputs_size() > kMaxOutputs) {
    return FieldError("outputs", absl::StrCat(request.outputs_size(), " entries, the limit is ", kMaxOutputs));
  }
  std::vector<bool> replaced(slices.size());
  for (int i = 0; i < request.outputs_size(); ++i) {
    const pb::OutputSpec& given = request.outputs(i);
    const std::string path = absl::StrCat("outputs[", i, "]");
    // The first output of that step (and type, when one is given) that no earlier entry took.
    size_t o = 0;
    bool named = false;
    for (; o < slices.size(); ++o) {
      const pb::OutputSpec& output = program.outputs(static_cast<int>(o));
      if (output.step() != given.step()) continue;
      named = true;
      const bool same_type =
          given.dtype() == pb::DATA_TYPE_UNSPECIFIED || FromProto(given.dtype()) == plan.outputs[o].dtype;
      if (same_type && !replaced[o]) break;
    }
    if (o == slices.size()) {
      return FieldError(absl::StrCat(path, named ? ".dtype" : ".step"),
                        absl::StrCat("\"", given.step(), "\" is ",
                                     named ? "no output of the program in this type, or is given twice"
                                           : "not an output of the program"));
    }
    replaced[o] = true;
    slices[o] = given.has_region() ? &given.region() : nullptr;
  }
  return slices;
}

}  // namespace spmmd::server
