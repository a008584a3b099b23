#include "client/cpp/upload.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/status.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/support/client_callback.h"
#include "grpcpp/support/slice.h"

namespace spmmd::client {
namespace {

using ::google::protobuf::internal::WireFormatLite;
using ::google::protobuf::io::CodedOutputStream;

constexpr char kMethod[] = "/spmm.v1.LayerCatalog/RegisterLayer";

// Chunks made ahead of the one that the transport is taking, so that copying (and reading a mapped file from disk)
// overlaps with sending.
constexpr size_t kLookAhead = 2;

grpc::ByteBuffer EncodeSpec(const v1::LayerSpec& spec) {
  v1::RegisterLayerRequest request;
  *request.mutable_spec() = spec;
  const grpc::Slice slice(request.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

// The caller's thread runs Run: it makes chunks and reports progress. gRPC's threads run the On... functions: they send
// what is ready and take in the server's events.
class Upload : public grpc::ClientBidiReactor<grpc::ByteBuffer, v1::RegisterLayerResponse> {
 public:
  Upload(grpc::ClientContext& context, const LayerContent* content, const ProgressCallback& progress, bool* under_way)
      : context_(context), content_(content), progress_(progress), under_way_(under_way) {}

  absl::StatusOr<RegisterResult> Run(const std::shared_ptr<grpc::Channel>& channel, const v1::LayerSpec& spec,
                                     size_t chunk_bytes) {
    grpc::TemplatedGenericStub<grpc::ByteBuffer, v1::RegisterLayerResponse> stub(channel);
    stub.PrepareBidiStreamingCall(&context_, kMethod, grpc::StubOptions(), this);
    AddHold();  // for the operations that this thread starts
    {
      absl::MutexLock lock(&mutex_);
      writing_ = true;
      current_ = EncodeSpec(spec);
      StartWrite(&current_);
    }
    StartRead(&response_);
    StartCall();

    if (WaitForAcceptance()) SendContent(chunk_bytes);
    {
      absl::MutexLock lock(&mutex_);
      chunks_complete_ = true;
      if (!writing_ && !broken_) StartWritesDone();
    }
    RemoveHold();
    return WaitForResult();
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    sent_ += std::exchange(current_bytes_, 0);
    if (!ok) {
      broken_ = true;
    } else if (!ready_.empty()) {
      StartNextWrite();
    } else if (chunks_complete_) {
      StartWritesDone();
    }
  }

  void OnReadDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    if (!ok) {
      broken_ = true;
      return;
    }
    switch (response_.event_case()) {
      case v1::RegisterLayerResponse::kAccepted:
        accepted_ = response_.accepted();
        break;
      case v1::RegisterLayerResponse::kProgress:
        received_ = response_.progress().received_bytes();
        server_state_ = response_.progress().state();
        ++events_;
        break;
      case v1::RegisterLayerResponse::kLayer:
        layer_ = std::move(*response_.mutable_layer());
        break;
      case v1::RegisterLayerResponse::EVENT_NOT_SET:
        break;  // an event of a newer server
    }
    StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    absl::MutexLock lock(&mutex_);
    status_ = status;
    broken_ = true;
  }

 private:
  struct Chunk {
    grpc::ByteBuffer buffer;
    size_t bytes = 0;
  };

  // True when content is to be sent.
  bool WaitForAcceptance() {
    absl::MutexLock lock(&mutex_);
    const auto known = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return accepted_.has_value() || broken_; };
    mutex_.Await(absl::Condition(&known));
    if (!accepted_.has_value() || !accepted_->content_needed()) return false;
    if (content_ != nullptr) return true;
    protocol_error_ = absl::InternalError("the server asks for content of a layer that it is to read from a file");
    context_.TryCancel();
    return false;
  }

  // Bytes of a part that the server has from an upload that was cut off.
  size_t Received(v1::ContentPart part) {
    absl::MutexLock lock(&mutex_);
    for (const v1::PartReceived& received : accepted_->received()) {
      if (received.part() == part) return received.bytes();
    }
    return 0;
  }

  void SendContent(size_t chunk_bytes) {
    for (const LayerContent::Part& part : content_->parts()) {
      for (size_t offset = Received(part.part); offset < part.bytes.size(); offset += chunk_bytes) {
        const auto data = part.bytes.subspan(offset, chunk_bytes);
        Chunk chunk{EncodeChunk(part.part, offset, data), data.size()};
        absl::MutexLock lock(&mutex_);
        const auto wanted = [this]()
                                ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ready_.size() < kLookAhead || broken_; };
        mutex_.Await(absl::Condition(&wanted));
        if (broken_) return;
        ready_.push_back(std::move(chunk));
        if (!writing_) StartNextWrite();
        Report();
        if (cancelled_) return;
      }
    }
  }

  absl::StatusOr<RegisterResult> WaitForResult() {
    absl::MutexLock lock(&mutex_);
    int reported = events_;
    while (!status_.has_value()) {
      const auto news = [this, &reported]()
                            ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return status_.has_value() || events_ != reported; };
      mutex_.Await(absl::Condition(&news));
      reported = events_;
      if (!status_.has_value()) Report();
    }
    if (!protocol_error_.ok()) return protocol_error_;
    if (!status_->ok() && cancelled_) return absl::CancelledError("cancelled by the progress callback");
    if (!status_->ok()) {
      *under_way_ = accepted_.has_value() && accepted_->content_needed();
      return FromGrpcStatus(*status_);
    }
    if (!layer_.has_value()) return absl::InternalError("the server ended the registration without a layer");
    const bool uploaded = accepted_.has_value() && accepted_->content_needed();
    return RegisterResult{*std::move(layer_), uploaded, sent_};
  }

  void StartNextWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    current_.Swap(&ready_.front().buffer);
    current_bytes_ = ready_.front().bytes;
    ready_.pop_front();
    writing_ = true;
    StartWrite(&current_);
  }

  // Calls the callback with the lock released, on the caller's thread.
  void Report() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (progress_ == nullptr || cancelled_) return;
    RegisterProgress progress;
    progress.state = server_state_;
    progress.sent_bytes = sent_;
    progress.received_bytes = received_;
    progress.total_bytes = accepted_.has_value() && accepted_->content_needed() ? accepted_->content_bytes() : 0;
    mutex_.Unlock();
    const bool go_on = progress_(progress);
    mutex_.Lock();
    if (!go_on) {
      cancelled_ = true;
      context_.TryCancel();
    }
  }

  grpc::ClientContext& context_;
  const LayerContent* const content_;
  const ProgressCallback& progress_;
  bool* const under_way_;
  v1::RegisterLayerResponse response_;  // written by gRPC between StartRead and OnReadDone

  absl::Mutex mutex_;
  grpc::ByteBuffer current_ ABSL_GUARDED_BY(mutex_);  // read by gRPC while writing_
  size_t current_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Chunk> ready_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool chunks_complete_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;  // nothing more can be sent, or nothing more will be answered
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t sent_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t received_ ABSL_GUARDED_BY(mutex_) = 0;
  int events_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::LayerState server_state_ ABSL_GUARDED_BY(mutex_) = v1::LAYER_STATE_UPLOADING;
  std::optional<v1::RegisterAccepted> accepted_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::Layer> layer_ ABSL_GUARDED_BY(mutex_);
  absl::Status protocol_error_ ABSL_GUARDED_BY(mutex_);
  std::optional<grpc::Status> status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

grpc::ByteBuffer EncodeChunk(v1::ContentPart part, uint64_t offset, absl::Span<const std::byte> data) {
  // The data come last in the message, so that everything before them is the serialised message without them plus one
  // more field header, all inside the length-delimited field `chunk` of the request.
  v1::ContentChunk head;
  head.set_part(part);
  head.set_offset(offset);
  const auto data_bytes = static_cast<uint32_t>(data.size());
  const size_t data_field_header = 1 + CodedOutputStream::VarintSize32(data_bytes);
  const auto chunk_bytes = static_cast<uint32_t>(head.ByteSizeLong() + data_field_header + data.size());

  uint8_t header[64];
  uint8_t* end = WireFormatLite::WriteTagToArray(v1::RegisterLayerRequest::kChunkFieldNumber,
                                                 WireFormatLite::WIRETYPE_LENGTH_DELIMITED, header);
  end = CodedOutputStream::WriteVarint32ToArray(chunk_bytes, end);
  end = head.SerializeWithCachedSizesToArray(end);
  end = WireFormatLite::WriteTagToArray(v1::ContentChunk::kDataFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED,
                                        end);
  end = CodedOutputStream::WriteVarint32ToArray(data_bytes, end);

  const auto header_bytes = static_cast<size_t>(end - header);
  grpc::Slice slice(header_bytes + data.size());
  auto* bytes = const_cast<uint8_t*>(slice.begin());  // a fresh slice: nobody else sees it yet
  std::memcpy(bytes, header, header_bytes);
  if (!data.empty()) std::memcpy(bytes + header_bytes, data.data(), data.size());
  return grpc::ByteBuffer(&slice, 1);
}

absl::StatusOr<RegisterResult> RunUpload(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext& context,
                                         const v1::LayerSpec& spec, const LayerContent* content, size_t chunk_bytes,
                                         const ProgressCallback& progress, bool* under_way) {
  *under_way = false;
  Upload upload(context, content, progress, under_way);
  return upload.Run(channel, spec, chunk_bytes);
}

}  // namespace spmmd::client
