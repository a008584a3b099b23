#include "kernels/dispatch/cuda_tuning.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace spmmd {
namespace {

constexpr char kMagic[] = "spmmd-cuda-tuning 1";
constexpr char kNoKernel[] = "-";
constexpr size_t kMaxFileBytes = size_t{64} << 20;

std::string Checksum(absl::string_view text) {
  return absl::StrCat("xxh3\t", absl::Hex(XXH3_64bits(text.data(), text.size()), absl::kZeroPad16));
}

std::optional<DType> DTypeOf(absl::string_view name) {
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    if (std::string_view(name.data(), name.size()) == Name(dtype)) return dtype;
  }
  return std::nullopt;
}

bool ParseLine(const CudaLibrary& cuda, absl::string_view line, CudaShape* shape, CudaWidth* width) {
  const std::vector<absl::string_view> fields = absl::StrSplit(line, '\t');
  if (fields.size() != 9) return false;
  const std::optional<DType> dtype = DTypeOf(fields[0]);
  if (!dtype.has_value()) return false;
  shape->dtype = *dtype;
  if (!absl::SimpleAtoi(fields[1], &shape->m) || !absl::SimpleAtoi(fields[2], &shape->k) ||
      !absl::SimpleAtoi(fields[3], &shape->density_pct) || !absl::SimpleAtoi(fields[4], &width->tokens) ||
      !absl::SimpleAtod(fields[6], &width->sparse_us) || !absl::SimpleAtod(fields[7], &width->dense_us) ||
      !absl::SimpleAtoi(fields[8], &width->dense_candidate)) {
    return false;
  }
  const auto is_time = [](double us) { return std::isfinite(us) && us >= 0; };
  if (shape->m < 1 || shape->k < 1 || shape->density_pct < 0 || shape->density_pct > 100 || width->tokens < 1 ||
      !is_time(width->sparse_us) || !is_time(width->dense_us) || width->dense_candidate < -1) {
    return false;
  }
  width->kernel = fields[5] == kNoKernel ? -1 : cuda.find_kernel(std::string(fields[5]).c_str());
  return fields[5] == kNoKernel || width->kernel >= 0;
}

}  // namespace

CudaShape CudaShape::Of(DType dtype, int64_t m, int64_t k, int64_t nnz) {
  constexpr int kStep = 5;
  const double density = static_cast<double>(nnz) / (static_cast<double>(m) * static_cast<double>(k));
  return {dtype, m, k, static_cast<int>(std::lround(density * 100 / kStep)) * kStep};
}

const CudaWidth& WidthFor(const CudaWidths& widths, int64_t tokens) {
  const auto found = std::lower_bound(widths.begin(), widths.end(), tokens,
                                      [](const CudaWidth& width, int64_t n) { return width.tokens < n; });
  return found == widths.end() ? widths.back() : *found;
}

std::shared_ptr<const CudaWidths> CudaTuningTable::Find(const CudaShape& shape) const {
  absl::MutexLock lock(&mutex_);
  const auto found = shapes_.find(shape);
  return found == shapes_.end() ? nullptr : found->second;
}

void CudaTuningTable::Put(const CudaShape& shape, CudaWidths widths) {
  auto entry = std::make_shared<const CudaWidths>(std::move(widths));
  absl::MutexLock lock(&mutex_);
  shapes_[shape] = std::move(entry);
}

size_t CudaTuningTable::size() const {
  absl::MutexLock lock(&mutex_);
  return shapes_.size();
}

std::string CudaTuningTable::Head(absl::string_view device) const {
  absl::call_once(identified_, [this] { identity_ = cuda_->Identity(); });
  return absl::StrCat(kMagic, "\t", device, "\t", identity_);
}

absl::Status CudaTuningTable::Save(const std::string& path, absl::string_view device) const {
  std::string text = absl::StrCat(Head(device), "\n");
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [shape, widths] : shapes_) {
      for (const CudaWidth& width : *widths) {
        absl::StrAppendFormat(&text, "%s\t%d\t%d\t%d\t%d\t%s\t%.3f\t%.3f\t%d\n", std::string(Name(shape.dtype)),
                              shape.m, shape.k, shape.density_pct, width.tokens,
                              width.kernel < 0 ? kNoKernel : cuda_->kernel_name(width.kernel), width.sparse_us,
                              width.dense_us, width.dense_candidate);
      }
    }
  }
  absl::StrAppend(&text, Checksum(text), "\n");
  // A name of its own: two devices of one name may write at the same time.
  const std::string beside = absl::StrCat(path, ".", absl::Hex(reinterpret_cast<uintptr_t>(this)), ".new");
  {
    std::ofstream out(beside, std::ios::binary | std::ios::trunc);
    out << text;
    out.close();
    if (!out) {
      std::remove(beside.c_str());
      return absl::UnavailableError(absl::StrCat(beside, ": cannot be written"));
    }
  }
  if (std::rename(beside.c_str(), path.c_str()) != 0) {
    std::remove(beside.c_str());
    return absl::UnavailableError(absl::StrCat(path, ": cannot be replaced"));
  }
  return absl::OkStatus();
}

absl::Status CudaTuningTable::Load(const std::string& path, absl::string_view device) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  std::string text;
  text.resize(kMaxFileBytes + 1);
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(in.gcount()));
  const auto damaged = [&](absl::string_view what) { return absl::DataLossError(absl::StrCat(path, ": ", what)); };
  if (text.size() > kMaxFileBytes) return damaged("larger than 64 MiB");
  // The last line is the checksum of all before it.
  const size_t end = text.empty() || text.back() != '\n' ? std::string::npos : text.rfind('\n', text.size() - 2);
  if (end == std::string::npos) return damaged("cut off");
  const absl::string_view body = absl::string_view(text).substr(0, end + 1);
  if (absl::string_view(text).substr(end + 1, text.size() - end - 2) != Checksum(body)) {
    return damaged("its checksum is wrong");
  }
  const std::vector<absl::string_view> lines = absl::StrSplit(body.substr(0, body.size() - 1), '\n');
  if (lines.front() != Head(device)) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": measured with another GPU or library"));
  }
  std::map<CudaShape, CudaWidths> read;
  for (size_t i = 1; i < lines.size(); ++i) {
    CudaShape shape;
    CudaWidth width;
    if (!ParseLine(*cuda_, lines[i], &shape, &width)) return damaged(absl::StrCat("line ", i + 1, " is not a width"));
    CudaWidths& widths = read[shape];
    if (!widths.empty() && widths.back().tokens >= width.tokens) {
      return damaged(absl::StrCat("line ", i + 1, " is out of order"));
    }
    widths.push_back(width);
  }
  for (auto& [shape, widths] : read) Put(shape, std::move(widths));
  return absl::OkStatus();
}

}  // namespace spmmd
