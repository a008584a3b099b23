#include "server/engine/regions.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "server/device/device.h"
#include "server/errors.h"

namespace spmmd::server {

absl::StatusOr<std::byte*> BindSlice(const RegionSet* regions, const pb::RegionSlice& slice, const std::string& path,
                                     DType dtype, uint64_t bytes, bool output, Job* job) {
  absl::StatusOr<std::shared_ptr<const Region>> found =
      regions != nullptr ? regions->Find(slice.region()) : RegionNotFound(slice.region());
  if (!found.ok()) return AtField(absl::StrCat(path, ".region"), found.status());
  const Region& region = **found;
  if (slice.size() != bytes) {
    return FieldError(absl::StrCat(path, ".size"), absl::StrCat("expected ", bytes, " bytes, got ", slice.size()));
  }
  SPMMD_ASSIGN_OR_RETURN(std::byte* const data, region.Slice(path, slice.offset(), bytes));
  if (reinterpret_cast<uintptr_t>(data) % SizeOf(dtype) != 0) {
    return FieldError(absl::StrCat(path, ".offset"),
                      absl::StrCat(slice.offset(), " is not aligned to the ", SizeOf(dtype), " bytes of an element"));
  }
  if (const absl::Status there = region.Check(); !there.ok()) return AtField(path, there);
  if (region.device() != nullptr) {
    if (job->memory_device != nullptr && job->memory_device != region.device()) {
      return MakeError(absl::StatusCode::kFailedPrecondition, reason::kUnsupported,
                       absl::StrCat(path, ": region \"", slice.region(), "\" is on ", region.device()->id(),
                                    ", another of the request's on ", job->memory_device->id()));
    }
    job->memory_device = region.device();
  }
  for (const RegionUse& use : job->regions) {
    if (!output && !use.output) continue;
    if (!Region::Overlap(region, data, bytes, *use.region, use.data, use.bytes)) continue;
    return FieldError(path, absl::StrCat(bytes, " bytes at offset ", slice.offset(), " of region \"", slice.region(),
                                         "\" overlap ", use.path));
  }
  job->regions.push_back({*std::move(found), data, bytes, output, path});
  return data;
}

absl::Status CheckRegions(const Job& job) {
  for (const RegionUse& use : job.regions) {
    if (use.region->broken()) return AtField(use.path, use.region->Check());
  }
  return absl::OkStatus();
}

}  // namespace spmmd::server
