#include "kernels/bench/read_ceiling.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "kernels/base/buffer.h"

#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/bench/read_ceiling.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spmmd::bench {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

uint32_t SumImpl(const uint32_t* from, size_t count) {
  const hn::ScalableTag<uint32_t> d;
  const size_t lanes = hn::Lanes(d);
  auto a = hn::Zero(d), b = a, c = a, e = a;
  for (size_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
    a = hn::Add(a, hn::Load(d, from + i));
    b = hn::Add(b, hn::Load(d, from + i + lanes));
    c = hn::Add(c, hn::Load(d, from + i + 2 * lanes));
    e = hn::Add(e, hn::Load(d, from + i + 3 * lanes));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(a, b), hn::Add(c, e))));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace spmmd::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spmmd::bench {
namespace {
HWY_EXPORT(SumImpl);
}  // namespace

double ReadCeilingGbps(ThreadPool& pool) {
  constexpr size_t kBytes = size_t{256} << 20;
  constexpr int64_t kTasks = 256;
  constexpr size_t kTaskWords = kBytes / sizeof(uint32_t) / kTasks;
  static const Buffer* const buffer = [&] {
    absl::StatusOr<Buffer> made = Buffer::Allocate(kBytes);
    if (!made.ok()) return new Buffer;
    // Written once: untouched pages would all be the same zero page.
    uint32_t* words = made->MutableAs<uint32_t>().data();
    pool.ParallelFor(kTasks, [&](int64_t task, int /*worker*/) {
      for (size_t i = 0; i < kTaskWords; ++i) {
        words[static_cast<size_t>(task) * kTaskWords + i] = static_cast<uint32_t>(i);
      }
    });
    return new Buffer(*std::move(made));
  }();
  if (buffer->size() == 0) return 0;
  const uint32_t* words = buffer->As<uint32_t>().data();
  double best = 0;
  std::atomic<uint32_t> sum{0};  // keeps the reads alive
  for (int pass = 0; pass < 7; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    pool.ParallelFor(kTasks, [&](int64_t task, int /*worker*/) {
      sum += HWY_DYNAMIC_DISPATCH(SumImpl)(words + static_cast<size_t>(task) * kTaskWords, kTaskWords);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(kBytes) / seconds.count() / 1e9);
  }
  return best;
}
}  // namespace spmmd::bench
#endif  // HWY_ONCE
