#include "server/device/cpu_device.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "hwy/targets.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/matmul.h"
#include "kernels/format/bitmap.h"
#include "server/device/cpu_runner.h"
#include "server/errors.h"

namespace spmmd::server {
namespace {

uint64_t PhysicalMemory() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE));
}

std::string ProcessorName() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(':');
    if (colon != std::string::npos) return std::string(absl::StripAsciiWhitespace(line.substr(colon + 1)));
  }
  return "CPU";
}

// Bytes a second that all cores together read from memory: repeated sums over a buffer that no cache holds.
double MeasureReadBandwidth(ThreadPool& pool, uint64_t memory_limit) {
  const size_t bytes = std::min<size_t>(size_t{256} << 20, memory_limit / 8);
  constexpr int64_t kTasks = 256;
  constexpr absl::Duration kTime = absl::Milliseconds(50);
  absl::StatusOr<Buffer> buffer = Buffer::Allocate(bytes);
  if (!buffer.ok()) return 0;
  const absl::Span<uint64_t> words = buffer->MutableAs<uint64_t>();
  const size_t words_a_task = words.size() / kTasks / 16 * 16;
  std::vector<uint64_t> sums(kTasks);
  // The first pass writes: untouched pages are all the same zero page.
  pool.ParallelFor(kTasks, [&](int64_t task, int /*worker*/) {
    std::fill_n(words.begin() + static_cast<int64_t>(words_a_task) * task, words_a_task, static_cast<uint64_t>(task));
  });
  double best = 0;
  const absl::Time end = absl::Now() + kTime;
  do {
    const absl::Time start = absl::Now();
    pool.ParallelFor(kTasks, [&](int64_t task, int /*worker*/) {
      const uint64_t* from = words.data() + words_a_task * static_cast<size_t>(task);
      // Several chains, so that the sum is bound by memory and not by one adder.
      std::array<uint64_t, 16> sum{};
      for (size_t i = 0; i < words_a_task; i += sum.size()) {
        for (size_t j = 0; j < sum.size(); ++j) sum[j] += from[i + j];
      }
      for (const uint64_t s : sum) sums[static_cast<size_t>(task)] += s;
    });
    best = std::max(best, static_cast<double>(words_a_task * kTasks * sizeof(uint64_t)) /
                              absl::ToDoubleSeconds(absl::Now() - start));
  } while (absl::Now() < end);
  // Makes the sums observable; they are 0 only if nothing was read.
  return std::any_of(sums.begin(), sums.end(), [](uint64_t s) { return s != 0; }) ? best : 0;
}

// AUTO stores BITMAP up to this share of nonzeros. Measured on a Zen 4 CPU with two cores, 4096x4096, beside the DENSE
// kernels: 16-bit values are ahead at every width up to 85 % (1.4 to 2 times at 50 %), fp32 values only up to 10 %.
// There is no rule of size: a small layer is faster DENSE while it stays in the L2 cache and slower once others pass
// between, which its size does not tell (docs/measurements-cpu.md).
double MaxBitmapDensity(DType dtype) { return dtype == DType::kF32 ? 0.10 : 0.85; }

uint64_t DenseBytes(DType dtype, int64_t m, int64_t k) { return static_cast<uint64_t>(m * k) * SizeOf(dtype); }

}  // namespace

CpuDevice::CpuDevice(const DeviceOptions& options, Metrics* metrics, ThreadPool* pool, int index)
    : Device(absl::StrCat("cpu:", index), "cpu", options, PhysicalMemory(), metrics),
      pool_(pool != nullptr ? *pool : DefaultThreadPool()),
      runner_(std::make_unique<CpuRunner>(id(), &budget(), &pool_, metrics)) {
  name_ = ProcessorName();
  architecture_ = hwy::TargetName(hwy::SupportedTargets() & -hwy::SupportedTargets());
  if (options.measure_bandwidth) set_measured_bandwidth(MeasureReadBandwidth(pool_, budget().limit()));
  Start();
}

CpuDevice::~CpuDevice() { Shutdown(); }

bool CpuDevice::CanExecute(Format format) const { return cpu::CanExecute(format); }

FormatChoice CpuDevice::ChooseFormat(const FormatQuery& query) const {
  const DType dtype = query.dtype;
  const int64_t m = query.m;
  const int64_t k = query.k;
  const int64_t nnz = query.nnz;
  const double density = static_cast<double>(nnz) / static_cast<double>(m * k);
  const uint64_t bitmap_bytes = bitmap::PackedBytes(dtype, m, k, nnz);
  const uint64_t dense_bytes = DenseBytes(dtype, m, k);
  const std::string sizes = absl::StrFormat("BITMAP takes %d bytes, DENSE %d", bitmap_bytes, dense_bytes);
  if (bitmap_bytes >= dense_bytes) {
    return {Format::kDense,
            absl::StrFormat("DENSE: %.1f %% of the elements are zero and %s.", 100 * (1 - density), sizes)};
  }
  if (density > MaxBitmapDensity(dtype)) {
    return {Format::kDense,
            absl::StrFormat("DENSE: %.1f %% of the elements are zero; BITMAP is faster from %.0f %% in %s.",
                            100 * (1 - density), 100 * (1 - MaxBitmapDensity(dtype)), std::string(Name(dtype)))};
  }
  return {Format::kBitmap,
          absl::StrFormat("BITMAP: %.1f %% of the elements are zero; %s.", 100 * (1 - density), sizes)};
}

uint64_t CpuDevice::EstimateBytes(Format format, DType dtype, int64_t m, int64_t k, int64_t max_nnz) const {
  return format == Format::kBitmap ? bitmap::PackedBytes(dtype, m, k, max_nnz) : DenseBytes(dtype, m, k);
}

absl::StatusOr<std::unique_ptr<ResidentLayer>> CpuDevice::Load(PackedLayer packed, std::vector<float> bias,
                                                               MemoryBudget::Reservation weights) {
  if (!CanExecute(packed.format)) {
    return MakeError(absl::StatusCode::kUnimplemented, reason::kUnsupported,
                     absl::StrCat("backend cpu has no kernel for format ", std::string(Name(packed.format))));
  }
  const uint64_t bytes = packed.bytes().total() + bias.size() * sizeof(float);
  if (bytes > weights.bytes()) SPMMD_RETURN_IF_ERROR(budget().Grow(weights, bytes - weights.bytes()));
  weights.ShrinkTo(bytes);
  return std::make_unique<CpuLayer>(std::move(packed), std::move(bias), std::move(weights));
}

absl::StatusOr<StoredLayer> CpuDevice::Save(const ResidentLayer& layer) const {
  const auto& resident = static_cast<const CpuLayer&>(layer);
  return StoredLayer{resident.packed(), resident.bias()};
}

absl::StatusOr<DenseMatrix> CpuDevice::ReadBack(const ResidentLayer& layer) const {
  return Unpack(static_cast<const CpuLayer&>(layer).packed());
}

absl::Status CpuDevice::Run(absl::Span<Job* const> jobs) { return runner_->Run(jobs); }

}  // namespace spmmd::server
