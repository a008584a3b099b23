#include "server/catalog/layer.h"

#include <utility>

#include "server/catalog/types.h"

namespace spmmd::server {
namespace {

// As a dense matrix of its own type.
int64_t DenseBytes(const LayerContent& content) {
  return content.m * content.k * static_cast<int64_t>(SizeOf(content.dtype));
}

}  // namespace

LayerContent::~LayerContent() {
  if (residency != nullptr) residency->Remove(this);
}

const ResidentLayer* LayerContent::On(const ResidentCopies& resident, const Device* device) const {
  for (size_t i = 0; i < copies.size(); ++i) {
    if (copies[i].device == device) return resident.layers[i].get();
  }
  return nullptr;
}

ServedLayer::ServedLayer(const pb::LayerSpec& spec, int64_t version, std::shared_ptr<const LayerContent> content,
                         absl::Time created, Metrics* metrics)
    : name_(spec.name()),
      version_(version),
      placement_(spec.placement()),
      activation_threshold_(spec.has_activation_threshold() ? std::optional<float>(spec.activation_threshold())
                                                            : std::nullopt),
      deterministic_(spec.deterministic()),
      created_(created),
      metrics_(metrics),
      content_(std::move(content)),
      pinned_(false),
      freed_(std::make_shared<absl::Notification>()) {
  set_pinned(spec.pin());
  content_->residence.AddServed(1, metrics_);
  metrics_->AddLayerBytes(name_, std::string(Name(content_->format)), static_cast<int64_t>(content_->bytes));
  metrics_->AddLayerDenseBytes(std::string(Name(content_->format)), DenseBytes(*content_));
}

ServedLayer::~ServedLayer() {
  content_->residence.AddServed(-1, metrics_);
  set_pinned(false);
  metrics_->AddLayerBytes(name_, std::string(Name(content_->format)), -static_cast<int64_t>(content_->bytes));
  metrics_->AddLayerDenseBytes(std::string(Name(content_->format)), -DenseBytes(*content_));
  content_.reset();
  freed_->Notify();
}

void ServedLayer::set_pinned(bool pinned) const {
  if (pinned_.exchange(pinned) != pinned) content_->residence.AddPin(pinned ? 1 : -1);
}

void ServedLayer::SetSpeeds(std::vector<pb::LayerSpeed> speeds) const {
  absl::MutexLock lock(&mutex_);
  speeds_ = std::move(speeds);
}

void ServedLayer::Describe(bool full, pb::Layer* out) const {
  const LayerContent& content = *content_;
  out->set_name(name_);
  out->set_version(version_);
  out->set_m(content.m);
  out->set_k(content.k);
  out->set_dtype(ToProto(content.dtype));
  out->set_nnz(content.nnz);
  out->set_sparsity(1.0 - static_cast<double>(content.nnz) / static_cast<double>(content.m * content.k));
  out->set_state(content.residence.state());
  out->set_error(content.residence.error());
  out->set_format(ToProto(content.format));
  out->set_format_reason(content.format_reason);
  out->set_bytes(content.bytes);
  out->set_dense_bytes(static_cast<uint64_t>(DenseBytes(content)));
  out->set_has_bias(content.has_bias);
  if (activation_threshold_.has_value()) out->set_activation_threshold(*activation_threshold_);
  out->set_deterministic(deterministic_);
  out->set_placement(placement_);
  const std::shared_ptr<const ResidentCopies> resident = content.residence.Peek();
  for (const LayerContent::Copy& copy : content.copies) {
    pb::LayerResidency& residency = *out->add_residency();
    residency.set_device(copy.device->id());
    residency.set_row_begin(copy.row_begin);
    residency.set_row_end(copy.row_end);
    residency.set_bytes(out->state() == pb::LAYER_STATE_READY ? copy.bytes : 0);
    if (resident != nullptr) {
      const size_t part = static_cast<size_t>(&copy - content.copies.data());
      residency.set_dense_shadow_bytes(resident->layers[part]->shadow_bytes());
    }
  }
  out->set_pinned(pinned());
  out->set_content_xxh3(content.xxh3);
  const int64_t nanos = absl::ToUnixNanos(created_);
  out->mutable_create_time()->set_seconds(nanos / 1'000'000'000);
  out->mutable_create_time()->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
  out->set_pack_seconds(content.pack_seconds);
  if (!full) return;
  for (const pb::LayerSection& section : content.sections) *out->add_sections() = section;
  absl::MutexLock lock(&mutex_);
  for (const pb::LayerSpeed& speed : speeds_) *out->add_speeds() = speed;
}

}  // namespace spmmd::server
