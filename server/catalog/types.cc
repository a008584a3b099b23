#include "server/catalog/types.h"

namespace spmmd::server {

std::optional<DType> FromProto(pb::DataType dtype) {
  switch (dtype) {
    case pb::DATA_TYPE_F16:
      return DType::kF16;
    case pb::DATA_TYPE_BF16:
      return DType::kBf16;
    case pb::DATA_TYPE_F32:
      return DType::kF32;
    default:
      return std::nullopt;
  }
}

std::optional<Format> FromProto(pb::Format format) {
  switch (format) {
    case pb::FORMAT_DENSE:
      return Format::kDense;
    case pb::FORMAT_THREE_LAYER:
      return Format::kThreeLayer;
    case pb::FORMAT_RLC_CSC:
      return Format::kRlcCsc;
    case pb::FORMAT_BITMAP:
      return Format::kBitmap;
    case pb::FORMAT_ROW_STREAM:
      return Format::kRowStream;
    default:
      return std::nullopt;
  }
}

std::optional<Activation> FromProto(pb::Activation activation) {
  switch (activation) {
    case pb::ACTIVATION_UNSPECIFIED:
      return Activation::kNone;
    case pb::ACTIVATION_RELU:
      return Activation::kRelu;
    case pb::ACTIVATION_GELU:
      return Activation::kGelu;
    case pb::ACTIVATION_GELU_TANH:
      return Activation::kGeluTanh;
    case pb::ACTIVATION_SILU:
      return Activation::kSilu;
    default:
      return std::nullopt;
  }
}

pb::DataType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return pb::DATA_TYPE_F16;
    case DType::kBf16:
      return pb::DATA_TYPE_BF16;
    case DType::kF32:
      return pb::DATA_TYPE_F32;
  }
  return pb::DATA_TYPE_UNSPECIFIED;
}

pb::Format ToProto(Format format) {
  switch (format) {
    case Format::kDense:
      return pb::FORMAT_DENSE;
    case Format::kThreeLayer:
      return pb::FORMAT_THREE_LAYER;
    case Format::kRlcCsc:
    case Format::kColumnPiece:
      return pb::FORMAT_RLC_CSC;
    case Format::kBitmap:
    case Format::kBitmapGpu:
      return pb::FORMAT_BITMAP;
    case Format::kRowStream:
      return pb::FORMAT_ROW_STREAM;
    case Format::kCsr:
    case Format::kCoo:
      break;  // interchange only
  }
  return pb::FORMAT_UNSPECIFIED;
}

}  // namespace spmmd::server
