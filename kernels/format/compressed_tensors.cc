#include "kernels/format/compressed_tensors.h"

#include <bit>
#include <cstdint>
#include <cstring>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/import.h"

namespace spmmd {
namespace {

constexpr absl::string_view kWeight = ".weight";
constexpr absl::string_view kParts[] = {".shape", ".compressed", ".bitmask", ".row_offsets"};

bool HasBitmaskForm(const SafetensorsCheckpoint& checkpoint, absl::string_view prefix) {
  return checkpoint.Contains(absl::StrCat(prefix, ".shape")) &&
         checkpoint.Contains(absl::StrCat(prefix, ".compressed")) &&
         checkpoint.Contains(absl::StrCat(prefix, ".bitmask"));
}

absl::Status InvalidPart(absl::string_view part, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("compressed-tensors '", part, "': ", what));
}

int64_t LoadInt64(const SafetensorsTensor& tensor, int64_t index) {
  int64_t value;
  std::memcpy(&value, tensor.data.data() + static_cast<size_t>(index) * sizeof(value), sizeof(value));
  return value;
}

// `sparse-bitmask` says where each row's values start. The bitmap says it too; a file whose two words differ is broken.
absl::Status CheckRowOffsets(const SafetensorsTensor& offsets, absl::string_view name, int64_t m, int64_t k,
                             const SafetensorsTensor& bitmask) {
  if (offsets.dtype != "I64" || offsets.shape != std::vector<int64_t>{m}) {
    return InvalidPart(name, absl::StrCat("is not int64 [", m, "]"));
  }
  const auto row_bytes = static_cast<size_t>((k + 7) / 8);
  int64_t expected = 0;
  for (int64_t row = 0; row < m; ++row) {
    if (LoadInt64(offsets, row) != expected) {
      return InvalidPart(name, absl::StrCat("row ", row, " starts at ", LoadInt64(offsets, row),
                                            " where the bitmask says ", expected));
    }
    for (const std::byte bits : bitmask.data.subspan(static_cast<size_t>(row) * row_bytes, row_bytes)) {
      expected += std::popcount(std::to_integer<uint8_t>(bits));
    }
  }
  return absl::OkStatus();
}

// The parts of a bitmask form that say what it is.
struct BitmaskForm {
  int64_t m = 0;
  int64_t k = 0;
  SafetensorsTensor values;
};

absl::StatusOr<BitmaskForm> FindBitmaskForm(SafetensorsCheckpoint* checkpoint, absl::string_view prefix) {
  const std::string shape_name = absl::StrCat(prefix, ".shape");
  BitmaskForm form;
  SPMMD_ASSIGN_OR_RETURN(const SafetensorsTensor shape, checkpoint->Find(shape_name));
  SPMMD_ASSIGN_OR_RETURN(form.values, checkpoint->Find(absl::StrCat(prefix, ".compressed")));
  if (shape.dtype != "I64" || shape.data.size() != 2 * sizeof(int64_t)) {
    return InvalidPart(shape_name, "is not two int64");
  }
  form.m = LoadInt64(shape, 0);
  form.k = LoadInt64(shape, 1);
  if (absl::Status status = CheckShape(form.m, form.k); !status.ok()) {
    return InvalidPart(shape_name, status.message());
  }
  return form;
}

absl::StatusOr<DenseMatrix> ReadBitmaskForm(SafetensorsCheckpoint* checkpoint, absl::string_view prefix) {
  const std::string values_name = absl::StrCat(prefix, ".compressed");
  const std::string bitmask_name = absl::StrCat(prefix, ".bitmask");
  const std::string offsets_name = absl::StrCat(prefix, ".row_offsets");
  SPMMD_ASSIGN_OR_RETURN(const BitmaskForm form, FindBitmaskForm(checkpoint, prefix));
  SPMMD_ASSIGN_OR_RETURN(const SafetensorsTensor bitmask, checkpoint->Find(bitmask_name));
  DType dtype = DType::kF16;
  if (form.values.dtype == "BF16") {
    dtype = DType::kBf16;
  } else if (form.values.dtype == "F32") {
    dtype = DType::kF32;
  } else if (form.values.dtype != "F16") {
    return InvalidPart(values_name,
                       absl::StrCat("dtype ", form.values.dtype, " is not supported: F16, BF16 and F32 are"));
  }
  const int64_t row_bytes = (form.k + 7) / 8;
  if (bitmask.dtype != "U8" || bitmask.data.size() != static_cast<size_t>(form.m) * static_cast<size_t>(row_bytes)) {
    return InvalidPart(bitmask_name, absl::StrCat("is not uint8 [", form.m, ", ", row_bytes, "]"));
  }
  if (checkpoint->Contains(offsets_name)) {
    SPMMD_ASSIGN_OR_RETURN(const SafetensorsTensor offsets, checkpoint->Find(offsets_name));
    SPMMD_RETURN_IF_ERROR(CheckRowOffsets(offsets, offsets_name, form.m, form.k, bitmask));
  }
  absl::StatusOr<DenseMatrix> matrix = ImportRowBitmap(dtype, form.m, form.k, bitmask.data, form.values.data);
  if (!matrix.ok()) return InvalidPart(prefix, matrix.status().message());
  return matrix;
}

// "P" when `name` is "P.weight", no tensor of that name is there and a bitmask form of P is; else empty.
absl::string_view BitmaskPrefix(const SafetensorsCheckpoint& checkpoint, absl::string_view name) {
  if (checkpoint.Contains(name) || !absl::EndsWith(name, kWeight)) return "";
  const absl::string_view prefix = absl::StripSuffix(name, kWeight);
  return HasBitmaskForm(checkpoint, prefix) ? prefix : "";
}

}  // namespace

absl::StatusOr<WeightDescription> DescribeCheckpointWeight(SafetensorsCheckpoint* checkpoint, absl::string_view name) {
  if (const absl::string_view prefix = BitmaskPrefix(*checkpoint, name); !prefix.empty()) {
    SPMMD_ASSIGN_OR_RETURN(const BitmaskForm form, FindBitmaskForm(checkpoint, prefix));
    return WeightDescription{form.values.dtype, {form.m, form.k}};
  }
  SPMMD_ASSIGN_OR_RETURN(const SafetensorsTensor tensor, checkpoint->Find(name));
  return WeightDescription{tensor.dtype, tensor.shape};
}

absl::StatusOr<DenseMatrix> ReadCheckpointWeight(SafetensorsCheckpoint* checkpoint, absl::string_view name) {
  const absl::string_view prefix = BitmaskPrefix(*checkpoint, name);
  return prefix.empty() ? checkpoint->ReadMatrix(name) : ReadBitmaskForm(checkpoint, prefix);
}

std::vector<std::string> CheckpointWeightNames(const SafetensorsCheckpoint& checkpoint) {
  std::set<std::string> names;
  for (const std::string& name : checkpoint.TensorNames()) {
    std::string shown = name;
    for (const absl::string_view part : kParts) {
      if (!absl::EndsWith(name, part)) continue;
      const absl::string_view prefix = absl::StripSuffix(name, part);
      if (HasBitmaskForm(checkpoint, prefix)) shown = absl::StrCat(prefix, kWeight);
      break;
    }
    names.insert(std::move(shown));
  }
  return {names.begin(), names.end()};
}

}  // namespace spmmd
