#include "server/rpc/execute_wire.h"

#include <utility>

#include "google/protobuf/io/coded_stream.h"
#include "kernels/base/status_macros.h"
#include "server/rpc/execute_skim.h"
#include "server/rpc/unary_call.h"

namespace spmmd::server {
namespace {

using google::protobuf::io::CodedOutputStream;
using wire::AppendField;
using wire::AppendVarint;
using wire::kBytes;
using wire::kVarint;
using wire::Tag;

// Slices of a message under construction.
class Writer {
 public:
  std::string& text() { return text_; }
  // The buffer's bytes follow what was written so far.
  void Add(HostBuffer buffer) {
    Flush();
    auto* const owned = new HostBuffer(std::move(buffer));
    slices_.emplace_back(
        owned->data(), owned->bytes(), [](void* data) { delete static_cast<HostBuffer*>(data); }, owned);
  }
  grpc::ByteBuffer Take() {
    Flush();
    return {slices_.data(), slices_.size()};
  }

 private:
  void Flush() {
    if (text_.empty()) return;
    slices_.emplace_back(text_.data(), text_.size());
    text_.clear();
  }

  std::string text_;
  std::vector<grpc::Slice> slices_;
};

size_t VarintSize(uint64_t value) { return CodedOutputStream::VarintSize64(value); }

// Of a field of `bytes` bytes whose tag takes one.
uint64_t FieldSize(uint64_t bytes) { return 1 + VarintSize(bytes) + bytes; }

// The parts of a NamedOutput around its payload; without one, all of it is in `head`.
struct OutputParts {
  std::string head;
  uint64_t size = 0;
};

// `payload` > 0: the tensor's data, which comes behind the head.
OutputParts MakeOutput(const pb::NamedOutput& output, uint64_t payload) {
  OutputParts parts;
  if (payload == 0) {
    parts.head = output.SerializeAsString();
    parts.size = parts.head.size();
    return parts;
  }
  // `data` is the last field of a tensor that has no region, and the tensor the last of the output.
  pb::Tensor shape;
  shape.set_dtype(output.tensor().dtype());
  *shape.mutable_shape() = output.tensor().shape();
  const std::string tensor = shape.SerializeAsString();
  AppendField(1, output.name(), &parts.head);
  AppendVarint(Tag(2, kBytes), &parts.head);
  AppendVarint(tensor.size() + FieldSize(payload), &parts.head);
  parts.head += tensor;
  AppendVarint(Tag(3, kBytes), &parts.head);
  AppendVarint(payload, &parts.head);
  parts.size = parts.head.size() + payload;
  return parts;
}

void Write(const pb::ExecuteResponse& response, std::vector<HostBuffer> outputs, bool in_stream, uint64_t request_id,
           Writer* out) {
  outputs.resize(static_cast<size_t>(response.outputs_size()));
  std::vector<OutputParts> parts;
  uint64_t size = 0;
  for (size_t o = 0; o < outputs.size(); ++o) {
    parts.push_back(MakeOutput(response.outputs(static_cast<int>(o)), outputs[o].bytes()));
    size += FieldSize(parts.back().size);
  }
  const std::string timing = response.has_timing() ? response.timing().SerializeAsString() : std::string();
  if (response.has_timing()) size += FieldSize(timing.size());
  std::string& text = out->text();
  if (in_stream) {
    if (request_id != 0) {
      AppendVarint(Tag(1, kVarint), &text);
      AppendVarint(request_id, &text);
    }
    AppendVarint(Tag(2, kBytes), &text);
    AppendVarint(size, &text);
  }
  for (size_t o = 0; o < outputs.size(); ++o) {
    AppendVarint(Tag(1, kBytes), &text);
    AppendVarint(parts[o].size, &text);
    text += parts[o].head;
    if (outputs[o].bytes() > 0) out->Add(std::move(outputs[o]));
  }
  if (response.has_timing()) AppendField(2, timing, &text);
}

}  // namespace

absl::Status ReceivedRequest::ParseExecute(Engine& engine, grpc::ByteBuffer* bytes) {
  return Parse(engine, bytes, /*stream=*/false, nullptr);
}

absl::Status ReceivedRequest::ParseStream(Engine& engine, grpc::ByteBuffer* bytes, uint64_t* request_id) {
  return Parse(engine, bytes, /*stream=*/true, request_id);
}

absl::Status ReceivedRequest::Parse(Engine& engine, grpc::ByteBuffer* bytes, bool stream, uint64_t* request_id) {
  std::vector<absl::string_view> views;
  SkimmedRequest skimmed;
  bool plain = bytes->Dump(&slices_).ok();
  for (const grpc::Slice& slice : slices_)
    views.emplace_back(reinterpret_cast<const char*>(slice.begin()), slice.size());
  if (plain) {
    plain = stream ? SkimExecuteStreamRequest(views, Payloads::kMinBytes, request_id, &skimmed)
                   : SkimExecuteRequest(views, Payloads::kMinBytes, &skimmed);
  }
  if (plain && !skimmed.program.empty()) {
    known_ = engine.Recall(skimmed.program);
    if (known_ == nullptr) {
      // The order of fields does not matter, but that this one's lies before `rest` keeps no copy of that.
      std::string all;
      AppendField(1, skimmed.program, &all);
      skimmed.rest = all + skimmed.rest;
      program_ = std::move(skimmed.program);
    }
  }
  if (plain) {
    // What is left is a message if, and only if, all of it is.
    if (!message_.ParseFromString(skimmed.rest)) {
      return stream ? MalformedMessage<pb::ExecuteStreamRequest>() : MalformedMessage<pb::ExecuteRequest>();
    }
    payloads_.inputs = std::move(skimmed.inputs);
    bytes->Clear();
    return absl::OkStatus();
  }
  ReleaseBytes();
  if (!stream) return ParseMessage(bytes, &message_);
  pb::ExecuteStreamRequest whole;
  SPMMD_RETURN_IF_ERROR(ParseMessage(bytes, &whole));
  *request_id = whole.request_id();
  message_ = std::move(*whole.mutable_request());
  return absl::OkStatus();
}

void ReceivedRequest::ReleaseBytes() {
  payloads_.inputs.clear();
  slices_.clear();
}

void ReceivedRequest::Describe(Engine::Caller* caller) {
  caller->payloads = &payloads_;
  caller->known = known_;
  caller->program_bytes = program_;
}

grpc::ByteBuffer SerializeExecuteResponse(const pb::ExecuteResponse& response, std::vector<HostBuffer> outputs) {
  Writer out;
  Write(response, std::move(outputs), /*in_stream=*/false, 0, &out);
  return out.Take();
}

grpc::ByteBuffer SerializeExecuteStreamResponse(uint64_t request_id, const pb::ExecuteResponse& response,
                                                std::vector<HostBuffer> outputs) {
  Writer out;
  Write(response, std::move(outputs), /*in_stream=*/true, request_id, &out);
  return out.Take();
}

}  // namespace spmmd::server
