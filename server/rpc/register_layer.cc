#include "server/rpc/register_layer.h"

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "server/catalog/catalog.h"
#include "server/errors.h"
#include "server/pb.h"
#include "server/rpc/idle_timer.h"
#include "server/rpc/unary_call.h"
#include "spmm/v1/layer_catalog.pb.h"

namespace spmmd::server {
namespace {

constexpr absl::Duration kProgressInterval = absl::Milliseconds(100);
constexpr absl::Duration kCancelGrace = absl::Milliseconds(10);

// One thing happens at a time: a read, or work on a blocking thread; each step starts the next. Only writes overlap
// with them, and only OnCancel comes at any time.
class RegisterLayerCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  RegisterLayerCall(RpcContext& rpc, const Method& method, grpc::CallbackServerContext* context)
      : scope_(rpc, method, context), idle_(rpc.limits.upload_idle_timeout, [this] { OnIdle(); }) {
    const int uploads = rpc.uploads.fetch_add(1, std::memory_order_relaxed);
    if (absl::Status status = scope_.Admit(); !status.ok()) {
      End(std::move(status));
    } else if (uploads >= rpc.limits.max_uploads) {
      End(Exhausted("TOO_MANY_UPLOADS", "all " + std::to_string(rpc.limits.max_uploads) + " uploads are in use",
                    absl::Seconds(1)));
    } else {
      Read();
    }
  }

  void OnReadDone(bool ok) override {
    if (!idle_.Stop()) return;  // too late: the call is being ended
    if (upload_ == nullptr) {
      OnSpec(ok);
    } else if (ok) {
      OnChunk();
    } else {
      // The caller is done, or gone too early: Finish() knows which part is missing.
      RunFinish();
    }
  }

  // A failed write is a cancelled call, and OnCancel says so.
  void OnWriteDone(bool /*ok*/) override {
    bool send_end = false;
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
      send_end = end_.has_value();
    }
    if (send_end) SendEnd();
  }

  void OnCancel() override {
    std::shared_ptr<Upload> upload;
    {
      absl::MutexLock lock(&mutex_);
      cancelled_ = true;
      upload = upload_;
    }
    if (upload != nullptr) upload->Cancel();
  }

  void OnDone() override { delete this; }

 private:
  ~RegisterLayerCall() override = default;

  void Read() {
    idle_.Start();
    StartRead(&in_);
  }

  // The next step after a read that did not end. Whoever stalls must not hold memory and a place that others wait for.
  void OnIdle() {
    scope_.rpc().blocking->Run([this] {
      const absl::Duration timeout = scope_.rpc().limits.upload_idle_timeout;
      std::string message = absl::StrCat(upload_ == nullptr ? "payload" : "chunk", ": no message for ",
                                         absl::FormatDuration(timeout), " (--upload-idle-timeout)");
      if (upload_ != nullptr) {
        absl::StrAppend(&message, ", with ", upload_->received_bytes(), " of ", upload_->accepted().content_bytes(),
                        " bytes of content received");
      }
      End(MakeError(absl::StatusCode::kDeadlineExceeded, reason::kUploadIdle, message,
                    {{"timeout_seconds", absl::StrCat(absl::ToDoubleSeconds(timeout))}}));
    });
  }

  void OnSpec(bool ok) {
    if (!ok) {
      End(FieldError("payload", "the stream ended before its first message, the spec"));
      return;
    }
    if (absl::Status status = ParseMessage(&in_, &request_); !status.ok()) {
      End(std::move(status));
      return;
    }
    if (!request_.has_spec()) {
      End(FieldError("payload", "the first message must be the spec"));
      return;
    }
    scope_.rpc().blocking->Run([this] { BeginUpload(); });
  }

  void BeginUpload() {
    auto begun = scope_.rpc().catalog->Begin(request_.spec());
    if (!begun.ok()) {
      End(begun.status());
      return;
    }
    {
      absl::MutexLock lock(&mutex_);
      upload_ = *std::move(begun);
    }
    if (Cancelled()) {
      End(absl::CancelledError("cancelled by the caller"));
      return;
    }
    const pb::RegisterAccepted& accepted = upload_->accepted();
    response_.mutable_accepted()->CopyFrom(accepted);
    TryWrite();
    if (accepted.content_needed()) {
      Read();
    } else {
      FinishUpload();
    }
  }

  void OnChunk() {
    absl::Status status = ParseMessage(&in_, &request_);
    if (status.ok() && !request_.has_chunk()) {
      status = FieldError("payload", "every message after the first must be a chunk");
    }
    if (status.ok()) status = upload_->Append(request_.chunk());
    if (!status.ok()) {
      End(std::move(status));
      return;
    }
    // On until the caller half-closes, also when everything is there: what still follows has no place in this shape.
    SendProgress(pb::LAYER_STATE_UPLOADING);
    Read();
  }

  void RunFinish() {
    scope_.rpc().blocking->Run([this] {
      request_.Clear();
      // A caller that was lost or has cancelled shows as the end of its stream first, like one that has half-closed,
      // and as a cancellation a moment later.
      {
        absl::MutexLock lock(&mutex_);
        mutex_.AwaitWithTimeout(absl::Condition(&cancelled_), kCancelGrace);
      }
      FinishUpload();
    });
  }

  void FinishUpload() {
    if (Cancelled()) {
      End(absl::CancelledError("cancelled by the caller"));
      return;
    }
    SendProgress(pb::LAYER_STATE_PACKING);
    auto layer = upload_->Finish();
    if (layer.ok()) {
      layer_ = *std::move(layer);
      End(absl::OkStatus());
    } else {
      End(Cancelled() ? absl::CancelledError("cancelled by the caller") : layer.status());
    }
  }

  bool Cancelled() {
    absl::MutexLock lock(&mutex_);
    return cancelled_;
  }

  // A progress event, unless one was sent just now or a write is still under way.
  void SendProgress(pb::LayerState state) {
    const absl::Time now = absl::Now();
    if (now - last_progress_ < kProgressInterval) return;
    {
      absl::MutexLock lock(&mutex_);
      if (writing_) return;
    }
    last_progress_ = now;
    response_.mutable_progress()->set_state(state);
    response_.mutable_progress()->set_received_bytes(upload_->received_bytes());
    TryWrite();
  }

  // Writes response_. Only one step at a time gets here, and none while a write is under way.
  void TryWrite() {
    if (!SerializeMessage(response_, &out_).ok()) return;
    absl::MutexLock lock(&mutex_);
    writing_ = true;
    StartWrite(&out_);
  }

  // The last step. What the upload holds is freed before the caller learns of the end.
  void End(absl::Status status) {
    std::shared_ptr<Upload> upload;
    bool send = false;
    {
      absl::MutexLock lock(&mutex_);
      upload = std::move(upload_);
      upload_ = nullptr;
    }
    upload.reset();
    scope_.rpc().uploads.fetch_sub(1, std::memory_order_relaxed);
    {
      absl::MutexLock lock(&mutex_);
      end_ = std::move(status);
      send = !writing_;
    }
    if (send) SendEnd();
  }

  void SendEnd() {
    absl::Status status;
    {
      absl::MutexLock lock(&mutex_);
      status = *end_;
    }
    if (status.ok()) {
      response_.mutable_layer()->Swap(&layer_);
      status = SerializeMessage(response_, &out_);
    }
    if (status.ok()) {
      StartWriteAndFinish(&out_, grpc::WriteOptions(), scope_.Finish(status));
    } else {
      Finish(scope_.Finish(status));
    }
  }

  CallScope scope_;
  IdleTimer idle_;  // runs while a read is under way
  grpc::ByteBuffer in_;
  grpc::ByteBuffer out_;
  pb::RegisterLayerRequest request_;
  pb::RegisterLayerResponse response_;
  pb::Layer layer_;
  absl::Time last_progress_ = absl::InfinitePast();

  absl::Mutex mutex_;
  // Set once, by the step that begins it, and taken by End; OnCancel reads it at any time.
  std::shared_ptr<Upload> upload_;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* NewRegisterLayerCall(
    RpcContext& rpc, const Method& method, grpc::CallbackServerContext* context) {
  return new RegisterLayerCall(rpc, method, context);
}

}  // namespace spmmd::server
