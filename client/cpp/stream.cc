#include "client/cpp/stream.h"

#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/status.h"
#include "grpcpp/support/client_callback.h"

namespace spmmd::client {

class Stream::Reactor : public grpc::ClientBidiReactor<v1::ExecuteStreamRequest, v1::ExecuteStreamResponse> {
 public:
  Reactor(v1::SparseMatmul::StubInterface& stub, grpc::ClientContext& context) : context_(context) {
    stub.async()->ExecuteStream(&context, this);
    AddHold();  // for writes that callers start; released once no more can follow
    StartRead(&response_);
    StartCall();
  }

  void Submit(v1::ExecuteRequest request, Callback done) {
    absl::Status refused;
    {
      absl::MutexLock lock(&mutex_);
      if (!over_ && !closing_) {
        const uint64_t id = next_id_++;
        pending_.emplace(id, std::move(done));
        v1::ExecuteStreamRequest& queued = queue_.emplace_back();
        queued.set_request_id(id);
        *queued.mutable_request() = std::move(request);
        if (!writing_) StartNextWrite();
        return;
      }
      if (over_ && !status_.has_value()) {
        // The stream has ended, and OnDone is about to say how.
        pending_.emplace(next_id_++, std::move(done));
        return;
      }
      refused = over_ ? EndStatus() : absl::FailedPreconditionError("the stream is closed");
    }
    done(std::move(refused));
  }

  absl::Status Close() {
    {
      absl::MutexLock lock(&mutex_);
      closing_ = true;
      if (!over_ && !writing_) HalfClose();
    }
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&done_));
    return closed_status_;
  }

  void Cancel() {
    context_.TryCancel();
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&done_));
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    queue_.pop_front();
    if (!ok) {
      End();
    } else if (!queue_.empty() && !over_) {
      StartNextWrite();
    } else if (closing_ && !over_) {
      HalfClose();
    }
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      absl::MutexLock lock(&mutex_);
      End();
      return;
    }
    Callback done;
    {
      absl::MutexLock lock(&mutex_);
      if (const auto found = pending_.find(response_.request_id()); found != pending_.end()) {
        done = std::move(found->second);
        pending_.erase(found);
      } else {
        protocol_error_ = absl::InternalError(
            absl::StrCat("the server answered request ", response_.request_id(), ", which is not in flight"));
      }
    }
    if (done == nullptr) {
      context_.TryCancel();
    } else if (response_.has_response()) {
      done(std::move(*response_.mutable_response()));
    } else if (response_.has_error()) {
      absl::Status error = FromStreamError(response_.error());
      done(error.ok() ? absl::InternalError("the server answered a request with an error of code OK")
                      : std::move(error));
    } else {
      done(absl::InternalError("the server answered a request with neither a response nor an error"));
    }
    StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    std::unordered_map<uint64_t, Callback> unanswered;
    absl::Status for_unanswered;
    {
      absl::MutexLock lock(&mutex_);
      End();
      status_ = FromGrpcStatus(status);
      if (!protocol_error_.ok()) status_ = protocol_error_;
      for_unanswered = EndStatus();
      unanswered.swap(pending_);
    }
    for (auto& [id, done] : unanswered) done(for_unanswered);
    absl::MutexLock lock(&mutex_);
    // Ending well with requests unanswered is not ending well.
    closed_status_ = unanswered.empty() ? *status_ : for_unanswered;
    done_ = true;
  }

 private:
  // What a request gets that the stream can no longer answer.
  absl::Status EndStatus() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (status_.has_value() && !status_->ok()) return *status_;
    return absl::UnavailableError("the stream ended before the request was answered");
  }

  void StartNextWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    writing_ = true;
    StartWrite(&queue_.front());
  }

  void HalfClose() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (half_closed_) return;
    half_closed_ = true;
    StartWritesDone();
    ReleaseHold();
  }

  // No more writes will be started.
  void End() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    over_ = true;
    ReleaseHold();
  }

  void ReleaseHold() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (std::exchange(holding_, false)) RemoveHold();
  }

  grpc::ClientContext& context_;
  v1::ExecuteStreamResponse response_;  // written by gRPC between StartRead and OnReadDone

  absl::Mutex mutex_;
  std::deque<v1::ExecuteStreamRequest> queue_ ABSL_GUARDED_BY(mutex_);  // the front is read by gRPC while writing_
  std::unordered_map<uint64_t, Callback> pending_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  bool holding_ ABSL_GUARDED_BY(mutex_) = true;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status protocol_error_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> status_ ABSL_GUARDED_BY(mutex_);
  absl::Status closed_status_ ABSL_GUARDED_BY(mutex_);
};

Stream::Stream(v1::SparseMatmul::StubInterface& stub, std::unique_ptr<grpc::ClientContext> context)
    : context_(std::move(context)), reactor_(std::make_unique<Reactor>(stub, *context_)) {}

Stream::~Stream() { reactor_->Cancel(); }

std::future<absl::StatusOr<v1::ExecuteResponse>> Stream::Submit(v1::ExecuteRequest request) {
  // std::function wants something copyable.
  auto promise = std::make_shared<std::promise<absl::StatusOr<v1::ExecuteResponse>>>();
  std::future<absl::StatusOr<v1::ExecuteResponse>> future = promise->get_future();
  reactor_->Submit(std::move(request), [promise](absl::StatusOr<v1::ExecuteResponse> response) {
    promise->set_value(std::move(response));
  });
  return future;
}

void Stream::Submit(v1::ExecuteRequest request, Callback done) {
  reactor_->Submit(std::move(request), std::move(done));
}

absl::Status Stream::Close() { return reactor_->Close(); }

}  // namespace spmmd::client
