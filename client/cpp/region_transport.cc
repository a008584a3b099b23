#include "client/cpp/region_transport.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "client/cpp/status.h"
#include "client/cpp/tensor.h"

namespace spmmd::client {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kMinRegionBytes = uint64_t{1} << 20;
constexpr uint64_t kMaxFreeBytes = uint64_t{256} << 20;
constexpr size_t kMaxPrograms = 1024;

uint64_t Align(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

std::string KeyOf(const v1::ExecuteRequest& request) {
  return request.has_program() ? request.program().SerializeAsString() : request.program_id();
}

bool SaysWhereOutputsGo(const v1::ExecuteRequest& request) {
  if (request.outputs_size() > 0) return true;
  return std::any_of(request.program().outputs().begin(), request.program().outputs().end(),
                     [](const v1::OutputSpec& output) { return output.has_region(); });
}

// Whether it went wrong for the region's sake: the server was started anew, or a layer has another shape by now.
bool IsAboutRegions(const absl::Status& status) {
  const std::string reason = ErrorReason(status);
  if (reason == "REGION_NOT_FOUND" || reason == "REGION_BROKEN") return true;
  for (const FieldViolation& violation : FieldViolations(status)) {
    if (absl::StrContains(violation.field, ".region")) return true;
  }
  return false;
}

}  // namespace

absl::StatusOr<v1::ExecuteResponse> RegionTransport::Execute(const v1::ExecuteRequest& request, Send send) {
  uint64_t input_bytes = 0;
  int64_t rows = 0;
  for (const v1::NamedInput& input : request.inputs()) {
    const v1::Tensor& tensor = input.dense();
    if (tensor.data().size() < min_bytes_ || tensor.shape_size() != 2) continue;
    input_bytes += Align(tensor.data().size());
    rows = tensor.shape(0);
  }
  if (input_bytes == 0 || SaysWhereOutputsGo(request)) return send(request);
  const std::string key = KeyOf(request);
  std::vector<Width> widths;
  {
    absl::MutexLock lock(&mutex_);
    if (off_) return send(request);
    if (const auto known = widths_.find(key); known != widths_.end()) widths = known->second;
  }
  uint64_t output_bytes = 0;
  for (const Width& width : widths) {
    const uint64_t bytes = static_cast<uint64_t>(rows) * static_cast<uint64_t>(width.cols) * width.element;
    if (bytes >= min_bytes_) output_bytes += Align(bytes);
  }
  std::unique_ptr<SharedRegion> region = Take(input_bytes + output_bytes);
  if (region == nullptr) return send(request);
  absl::StatusOr<v1::ExecuteResponse> response = ExecuteIn(*region, request, widths, send);
  Give(std::move(region));
  if (!response.ok() && IsAboutRegions(response.status())) {
    {
      absl::MutexLock lock(&mutex_);
      widths_.erase(key);
    }
    response = send(request);
  }
  if (response.ok() && widths.empty()) {
    for (const v1::NamedOutput& output : response->outputs()) {
      if (output.tensor().shape_size() != 2) return response;
      widths.push_back({output.tensor().shape(1), ElementSize(output.tensor().dtype())});
    }
    absl::MutexLock lock(&mutex_);
    if (widths_.size() < kMaxPrograms) widths_[key] = std::move(widths);
  }
  return response;
}

absl::StatusOr<v1::ExecuteResponse> RegionTransport::ExecuteIn(SharedRegion& region, const v1::ExecuteRequest& request,
                                                               const std::vector<Width>& widths, Send send) {
  v1::ExecuteRequest placed;
  if (request.has_program()) *placed.mutable_program() = request.program();
  if (!request.has_program()) placed.set_program_id(request.program_id());
  placed.set_priority(request.priority());
  uint64_t end = 0;
  int64_t rows = 0;
  for (const v1::NamedInput& input : request.inputs()) {
    const v1::Tensor& tensor = input.dense();
    if (tensor.data().size() < min_bytes_ || tensor.shape_size() != 2) {
      *placed.add_inputs() = input;
      continue;
    }
    rows = tensor.shape(0);
    std::memcpy(region.data() + end, tensor.data().data(), tensor.data().size());
    v1::NamedInput& there = *placed.add_inputs();
    there.set_name(input.name());
    v1::Tensor& dense = *there.mutable_dense();
    dense.set_dtype(tensor.dtype());
    *dense.mutable_shape() = tensor.shape();
    *dense.mutable_region() = region.Slice(end, tensor.data().size());
    end += Align(tensor.data().size());
  }
  // Only a program of the request's own says here where its outputs go: a registered one would need its steps' names.
  std::vector<std::pair<int, v1::RegionSlice>> outputs;
  for (int o = 0; request.has_program() && o < static_cast<int>(widths.size()); ++o) {
    const Width& width = widths[static_cast<size_t>(o)];
    const uint64_t bytes = static_cast<uint64_t>(rows) * static_cast<uint64_t>(width.cols) * width.element;
    if (bytes < min_bytes_ || o >= placed.program().outputs_size()) continue;
    outputs.emplace_back(o, region.Slice(end, bytes));
    *placed.mutable_program()->mutable_outputs(o)->mutable_region() = outputs.back().second;
    end += Align(bytes);
  }
  absl::StatusOr<v1::ExecuteResponse> response = send(placed);
  if (!response.ok()) return response;
  for (const auto& [o, slice] : outputs) {
    if (o >= response->outputs_size()) return absl::InternalError("the response lacks an output");
    response->mutable_outputs(o)->mutable_tensor()->set_data(region.data() + slice.offset(), slice.size());
  }
  absl::MutexLock lock(&mutex_);
  ++placed_;
  return response;
}

int64_t RegionTransport::placed() const {
  absl::MutexLock lock(&mutex_);
  return placed_;
}

std::unique_ptr<SharedRegion> RegionTransport::Take(uint64_t bytes) {
  uint64_t size = kMinRegionBytes;
  while (size < bytes) size *= 2;
  std::vector<std::unique_ptr<SharedRegion>> lost;  // unmapped outside the lock
  {
    absl::MutexLock lock(&mutex_);
    if (!memory_.alive()) lost.swap(free_);
    auto best = free_.end();
    for (auto region = free_.begin(); region != free_.end(); ++region) {
      const uint64_t has = (*region)->size();
      if (has < size || has > 4 * size) continue;
      if (best == free_.end() || has < (*best)->size()) best = region;
    }
    if (best != free_.end()) {
      std::unique_ptr<SharedRegion> taken = std::move(*best);
      free_.erase(best);
      return taken;
    }
  }
  auto region = memory_.Create(size, {});
  if (region.ok()) return *std::move(region);
  absl::MutexLock lock(&mutex_);
  off_ = true;
  return nullptr;
}

void RegionTransport::Give(std::unique_ptr<SharedRegion> region) {
  absl::MutexLock lock(&mutex_);
  uint64_t bytes = region->size();
  for (const auto& free : free_) bytes += free->size();
  if (bytes <= kMaxFreeBytes) free_.push_back(std::move(region));
}

}  // namespace spmmd::client
