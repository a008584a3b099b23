// Layers that leave their devices when memory is short, and come back when they are used.
#include "server/catalog/residency.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "tests/server/core/core_harness.h"

namespace spmmd::server {
namespace {

using testing::AddMatmul;
using testing::Core;
using testing::CoreOptions;
using testing::DenseSpec;
using ::testing::HasSubstr;
using testing::HeldDevice;
using testing::MatmulRequest;
using testing::RandomMatrix;
using testing::Series;
using testing::SetTensor;
using testing::ViewOf;

constexpr int64_t kRows = 256;
constexpr int64_t kCols = 128;

DenseMatrix Weights(int index) {
  return RandomMatrix(DType::kF16, kRows, kCols, 0.5, 100 + static_cast<uint32_t>(index));
}
std::string NameOf(int index) { return absl::StrCat("layer", index); }

// The bits that a layer of Weights(index) gives for Input().
DenseMatrix Input() { return RandomMatrix(DType::kF32, 3, kCols, 0, 7); }

class ResidencyTest : public ::testing::Test {
 protected:
  ResidencyTest() {
    std::string pattern = ::testing::TempDir() + "/residency_XXXXXX";
    cache_dir_ = mkdtemp(pattern.data());
    // What one layer takes, and what registering one sets aside.
    Core core;
    const DenseMatrix w = Weights(0);
    auto upload = core.catalog.Begin(DenseSpec("w", w.view()));
    estimate_ = (*upload)->accepted().estimated_device_bytes();
    upload->reset();
    packed_ = core.Register("w", w.view())->bytes();
  }
  ~ResidencyTest() override { std::filesystem::remove_all(cache_dir_); }

  // Memory for `layers` resident ones, and for registering when there is one less.
  uint64_t MemoryFor(int layers) const { return packed_ * static_cast<uint64_t>(layers - 1) + estimate_ + 4096; }

  CoreOptions Options(int layers, bool cache = true) const {
    CoreOptions options;
    options.device_memory = MemoryFor(layers);
    if (cache) options.cache_dir = cache_dir_;
    return options;
  }

  static absl::StatusOr<pb::Layer> Register(Core& core, int index) {
    const DenseMatrix w = Weights(index);
    return core.Register(NameOf(index), w.view());
  }
  // Runs the layer and compares with the reference.
  static absl::Status Use(Core& core, int index, absl::Time deadline = absl::InfiniteFuture()) {
    const DenseMatrix x = Input();
    pb::ExecuteResponse response;
    const absl::Status status = core.Execute(MatmulRequest(NameOf(index), x.view()), &response, deadline);
    if (!status.ok()) return status;
    return Compare(index, x.view(), response.outputs(0).tensor());
  }
  static absl::Status Compare(int index, const DenseView& x, const pb::Tensor& y) {
    const DenseMatrix w = Weights(index);
    const Reference expected = ReferenceMatmul(w.view(), x);
    const DenseView got = ViewOf(y);
    for (int64_t i = 0; i < got.rows * got.cols; ++i) {
      const double value = ElementAsDouble(got, i / got.cols, i % got.cols);
      const double error = std::abs(value - expected.y[static_cast<size_t>(i)]);
      if (!(error <= 1e-5 + 1e-5 * expected.scale[static_cast<size_t>(i)])) {
        return absl::InternalError(absl::StrCat("element ", i, " of ", NameOf(index), ": ", value));
      }
    }
    return absl::OkStatus();
  }
  static pb::Layer Describe(Core& core, int index) {
    pb::GetLayerRequest request;
    request.mutable_layer()->set_name(NameOf(index));
    pb::GetLayerResponse response;
    EXPECT_TRUE(core.catalog.Get(request, &response).ok());
    return response.layer();
  }
  static pb::LayerState State(Core& core, int index) { return Describe(core, index).state(); }
  static absl::Status Pin(Core& core, int index, bool pinned) {
    pb::PinLayerRequest request;
    request.mutable_layer()->set_name(NameOf(index));
    request.set_pinned(pinned);
    pb::PinLayerResponse response;
    return core.catalog.Pin(request, &response);
  }
  static double Evictions(Core& core, const std::string& to) {
    return Series(core.metrics, "spmmd_layer_evictions_total{to=\"" + to + "\"}").value_or(-1);
  }
  static double Loads(Core& core, const std::string& source) {
    return Series(core.metrics, "spmmd_layer_loads_total{source=\"" + source + "\"}").value_or(0);
  }
  static double Layers(Core& core, const std::string& state) {
    return Series(core.metrics, "spmmd_layers{state=\"" + state + "\"}").value_or(-1);
  }

  std::string cache_dir_;
  uint64_t packed_ = 0;
  uint64_t estimate_ = 0;
};

TEST_F(ResidencyTest, AFullDeviceEvictsTheLeastRecentlyUsed) {
  Core core(Options(2));
  ASSERT_TRUE(Register(core, 0).ok());
  ASSERT_TRUE(Register(core, 1).ok());
  ASSERT_TRUE(Use(core, 0).ok());
  const auto third = Register(core, 2);
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_EQ(State(core, 0), pb::LAYER_STATE_READY);
  EXPECT_EQ(State(core, 2), pb::LAYER_STATE_READY);
  const pb::Layer evicted = Describe(core, 1);
  EXPECT_EQ(evicted.state(), pb::LAYER_STATE_EVICTED);
  ASSERT_EQ(evicted.residency_size(), 1);
  EXPECT_EQ(evicted.residency(0).bytes(), 0);
  EXPECT_GT(evicted.bytes(), 0);
  EXPECT_EQ(Layers(core, "ready"), 2);
  EXPECT_EQ(Layers(core, "evicted"), 1);
  EXPECT_EQ(Evictions(core, "cache"), 1);
  EXPECT_EQ(Evictions(core, "host"), 0);

  // A use brings it back, and the next in line leaves.
  const absl::Status used = Use(core, 1);
  ASSERT_TRUE(used.ok()) << used;
  EXPECT_EQ(State(core, 0), pb::LAYER_STATE_EVICTED);
  EXPECT_EQ(State(core, 1), pb::LAYER_STATE_READY);
  EXPECT_EQ(Describe(core, 1).residency(0).bytes(), evicted.bytes());
  EXPECT_EQ(Loads(core, "cache"), 1);
  EXPECT_LE(core.device.budget().used(), core.device.budget().limit());
  for (const int layer : {0, 1, 2}) {
    EXPECT_TRUE(Use(core, layer).ok());
    EXPECT_TRUE(core.Unregister(NameOf(layer)).ok());
  }
  EXPECT_EQ(core.device.budget().used(MemoryKind::kWeights), 0);
  EXPECT_EQ(Layers(core, "ready") + Layers(core, "evicted"), 0);
}

TEST_F(ResidencyTest, HostMemoryOfACpuIsNoPlaceToGo) {
  Core core(Options(2, /*cache=*/false));
  ASSERT_TRUE(Register(core, 0).ok());
  ASSERT_TRUE(Register(core, 1).ok());
  const absl::Status refused = Register(core, 2).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(ReasonOf(refused), reason::kDeviceMemory);
  EXPECT_EQ(Layers(core, "ready"), 2);
  EXPECT_TRUE(Use(core, 0).ok());
}

TEST_F(ResidencyTest, EvictionCanBeSwitchedOff) {
  CoreOptions options = Options(2);
  options.residency.evict = false;
  Core core(options);
  ASSERT_TRUE(Register(core, 0).ok());
  ASSERT_TRUE(Register(core, 1).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(Register(core, 2).status()));
  EXPECT_EQ(Layers(core, "ready"), 2);
}

TEST_F(ResidencyTest, WhatIsUnregisteredMakesRoomBeforeTheAnswer) {
  CoreOptions options = Options(1);
  options.residency.evict = false;
  Core core(options);
  for (int round = 0; round < 100; ++round) {
    // Each takes more than half of the budget.
    const auto layer = Register(core, round % 2);
    ASSERT_TRUE(layer.ok()) << round << ": " << layer.status();
    ASSERT_GT(2 * estimate_, core.device.budget().limit());
    ASSERT_TRUE(core.Unregister(NameOf(round % 2)).ok());
    ASSERT_EQ(core.device.budget().used(MemoryKind::kWeights), 0);
  }
}

TEST_F(ResidencyTest, HostMemoryComesBeforeTheCacheAndIsBounded) {
  CoreOptions options = Options(2);
  options.residency.host_limit_bytes = packed_ + packed_ / 2;  // one layer
  Core core(options);
  core.device.PretendOwnMemory();
  for (const int layer : {0, 1, 2}) ASSERT_TRUE(Register(core, layer).ok());
  EXPECT_EQ(State(core, 0), pb::LAYER_STATE_EVICTED);
  EXPECT_EQ(Evictions(core, "host"), 1);
  EXPECT_EQ(Series(core.metrics, "spmmd_host_layer_bytes"), static_cast<double>(Describe(core, 0).bytes()));
  // The next one takes its place there.
  ASSERT_TRUE(Register(core, 3).ok());
  EXPECT_EQ(Evictions(core, "host"), 2);
  EXPECT_EQ(Series(core.metrics, "spmmd_host_layer_bytes"), static_cast<double>(Describe(core, 1).bytes()));
  ASSERT_TRUE(Use(core, 1).ok());
  EXPECT_EQ(Loads(core, "host"), 1);
  ASSERT_TRUE(Use(core, 0).ok());
  EXPECT_EQ(Loads(core, "cache"), 1);
  for (const int layer : {0, 1, 2, 3}) {
    ASSERT_TRUE(Use(core, layer).ok()) << layer;
    ASSERT_TRUE(core.Unregister(NameOf(layer)).ok());
  }
  EXPECT_EQ(Series(core.metrics, "spmmd_host_layer_bytes"), 0);
  EXPECT_EQ(core.device.budget().used(MemoryKind::kWeights), 0);
}

TEST_F(ResidencyTest, WithoutACacheHostMemoryIsTheEnd) {
  CoreOptions options = Options(2, /*cache=*/false);
  options.residency.host_limit_bytes = packed_ + packed_ / 2;
  Core core(options);
  core.device.PretendOwnMemory();
  for (const int layer : {0, 1, 2}) ASSERT_TRUE(Register(core, layer).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(Register(core, 3).status()));
  // Those that are there still take turns.
  for (const int layer : {0, 1, 2, 0, 1, 2}) {
    const absl::Status used = Use(core, layer);
    EXPECT_TRUE(used.ok()) << layer << ": " << used;
  }
}

TEST_F(ResidencyTest, PinnedLayersStay) {
  Core core(Options(2));
  ASSERT_TRUE(Register(core, 0).ok());
  ASSERT_TRUE(Pin(core, 0, true).ok());
  ASSERT_TRUE(Register(core, 1).ok());
  for (const int layer : {2, 3, 4}) ASSERT_TRUE(Register(core, layer).ok());
  EXPECT_EQ(State(core, 0), pb::LAYER_STATE_READY);
  EXPECT_EQ(Layers(core, "ready"), 2);
  EXPECT_EQ(Layers(core, "evicted"), 3);
  // Pinning brings an evicted layer back.
  ASSERT_EQ(State(core, 1), pb::LAYER_STATE_EVICTED);
  ASSERT_TRUE(Pin(core, 1, true).ok());
  EXPECT_EQ(State(core, 1), pb::LAYER_STATE_READY);
  // Now pins alone fill the device.
  const absl::Status refused = Pin(core, 2, true);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_FALSE(Describe(core, 2).pinned());
  EXPECT_TRUE(absl::IsResourceExhausted(Use(core, 2)));
  EXPECT_TRUE(absl::IsResourceExhausted(Register(core, 5).status()));
  EXPECT_TRUE(Use(core, 1).ok());
  ASSERT_TRUE(Pin(core, 1, false).ok());
  EXPECT_TRUE(Use(core, 2).ok());
  EXPECT_EQ(State(core, 1), pb::LAYER_STATE_EVICTED);
  EXPECT_EQ(State(core, 0), pb::LAYER_STATE_READY);
}

TEST_F(ResidencyTest, APinnedRegistrationIsPinnedFromTheStart) {
  Core core(Options(2));
  const DenseMatrix w = Weights(0);
  pb::LayerSpec spec = DenseSpec(NameOf(0), w.view());
  spec.set_pin(true);
  ASSERT_TRUE(core.Register(spec, w.view()).ok());
  for (const int layer : {1, 2, 3}) ASSERT_TRUE(Register(core, layer).ok());
  EXPECT_EQ(State(core, 0), pb::LAYER_STATE_READY);
  // Unregistered, its pin is gone with it.
  ASSERT_TRUE(core.Unregister(NameOf(0)).ok());
  EXPECT_EQ(core.device.budget().used(MemoryKind::kWeights), Describe(core, 3).bytes());
}

TEST_F(ResidencyTest, ALayerInUseIsWaitedForAndNotEvicted) {
  Core core(Options(1));
  ASSERT_TRUE(Register(core, 0).ok());
  core.device.Hold();
  std::thread user([&] {
    const absl::Status used = Use(core, 0);
    EXPECT_TRUE(used.ok()) << used;
  });
  core.device.AwaitRuns(1);
  std::atomic<bool> registered{false};
  std::thread registrar([&] {
    const auto layer = Register(core, 1);
    EXPECT_TRUE(layer.ok()) << layer.status();
    registered = true;
  });
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_FALSE(registered.load());
  EXPECT_EQ(State(core, 0), pb::LAYER_STATE_READY);
  core.device.Release();
  user.join();
  registrar.join();
  EXPECT_EQ(State(core, 0), pb::LAYER_STATE_EVICTED);
  EXPECT_EQ(State(core, 1), pb::LAYER_STATE_READY);
}

TEST_F(ResidencyTest, OneReloadServesManyCallers) {
  Core core(Options(2));
  for (const int layer : {0, 1, 2}) ASSERT_TRUE(Register(core, layer).ok());
  ASSERT_EQ(State(core, 0), pb::LAYER_STATE_EVICTED);
  std::vector<std::thread> callers;
  for (int i = 0; i < 8; ++i) {
    callers.emplace_back([&] {
      const absl::Status used = Use(core, 0);
      EXPECT_TRUE(used.ok()) << used;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(Loads(core, "cache"), 1);
  EXPECT_EQ(Series(core.metrics, "spmmd_requests_waiting_for_layers"), 0);
}

TEST_F(ResidencyTest, AProgramHoldsAllItsLayersOrFailsAtOnce) {
  Core core(Options(2));
  for (const int layer : {0, 1, 2}) ASSERT_TRUE(Register(core, layer).ok());
  const DenseMatrix x = Input();
  const auto request = [&](const std::vector<int>& layers) {
    pb::ExecuteRequest out;
    out.mutable_program()->add_inputs("x");
    for (const int layer : layers) {
      AddMatmul(out.mutable_program(), absl::StrCat("y", layer), NameOf(layer), "x");
      out.mutable_program()->add_outputs()->set_step(absl::StrCat("y", layer));
    }
    out.add_inputs()->set_name("x");
    SetTensor(x.view(), out.mutable_inputs(0)->mutable_dense());
    return out;
  };
  for (const auto& pair : {std::vector<int>{0, 1}, {1, 2}, {2, 0}}) {
    pb::ExecuteResponse response;
    const absl::Status status = core.Execute(request(pair), &response);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(Compare(pair[0], x.view(), response.outputs(0).tensor()).ok());
    EXPECT_TRUE(Compare(pair[1], x.view(), response.outputs(1).tensor()).ok());
  }
  pb::ExecuteResponse response;
  const absl::Status status = core.Execute(request({0, 1, 2}), &response);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_TRUE(Use(core, 1).ok());
}

TEST_F(ResidencyTest, WaitingForALayerEndsWithCancellationAndDeadline) {
  Core core(Options(1));
  ASSERT_TRUE(Register(core, 0).ok());
  ASSERT_TRUE(Register(core, 1).ok());
  core.device.Hold();
  std::thread user([&] { EXPECT_TRUE(Use(core, 1).ok()); });
  core.device.AwaitRuns(1);
  // Layer 0 can only come back when layer 1 is let go.
  const DenseMatrix x = Input();
  const pb::ExecuteRequest request = MatmulRequest(NameOf(0), x.view());
  pb::ExecuteResponse response;
  absl::Notification ended;
  absl::Status result;
  const Engine::Call call = core.engine.Execute(request, &response, absl::InfiniteFuture(), [&](absl::Status status) {
    result = std::move(status);
    ended.Notify();
  });
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(Series(core.metrics, "spmmd_requests_waiting_for_layers"), 1);
  EXPECT_FALSE(ended.HasBeenNotified());
  core.engine.Cancel(call);
  ended.WaitForNotification();
  EXPECT_TRUE(absl::IsCancelled(result)) << result;
  const absl::Status late = Use(core, 0, absl::Now() + absl::Milliseconds(30));
  EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
  core.device.Release();
  user.join();
  EXPECT_EQ(Series(core.metrics, "spmmd_requests_waiting_for_layers"), 0);
  EXPECT_TRUE(Use(core, 0).ok());
}

TEST_F(ResidencyTest, TooManyMayNotWait) {
  CoreOptions options = Options(1);
  options.queue.max_depth = 1;
  Core core(options);
  ASSERT_TRUE(Register(core, 0).ok());
  ASSERT_TRUE(Register(core, 1).ok());
  core.device.Hold();
  std::thread user([&] { EXPECT_TRUE(Use(core, 1).ok()); });
  core.device.AwaitRuns(1);
  std::thread waiting([&] { EXPECT_TRUE(Use(core, 0).ok()); });
  while (Series(core.metrics, "spmmd_requests_waiting_for_layers") != 1) absl::SleepFor(absl::Milliseconds(1));
  const absl::Status refused = Use(core, 0);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(ReasonOf(refused), reason::kQueueFull);
  core.device.Release();
  user.join();
  waiting.join();
}

TEST_F(ResidencyTest, LostBytesAreAnErrorUntilTheLayerIsRegisteredAgain) {
  Core core(Options(1));
  ASSERT_TRUE(Register(core, 0).ok());
  ASSERT_TRUE(Register(core, 1).ok());
  ASSERT_EQ(State(core, 0), pb::LAYER_STATE_EVICTED);
  for (const auto& entry : std::filesystem::directory_iterator(cache_dir_)) {
    std::fstream damage(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    damage.seekp(5000);
    damage.put('!');
  }
  const absl::Status lost = Use(core, 0);
  EXPECT_TRUE(absl::IsDataLoss(lost)) << lost;
  const pb::Layer layer = Describe(core, 0);
  EXPECT_EQ(layer.state(), pb::LAYER_STATE_FAILED);
  EXPECT_THAT(layer.error(), HasSubstr("register it again"));
  EXPECT_EQ(Layers(core, "failed"), 1);
  EXPECT_TRUE(absl::IsDataLoss(Use(core, 0)));
  EXPECT_EQ(Series(core.metrics, "spmmd_cache_events_total{event=\"corrupt\"}"), 1);
  const auto again = Register(core, 0);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->version(), 2);
  EXPECT_TRUE(Use(core, 0).ok());
  ASSERT_TRUE(core.Unregister(NameOf(0)).ok());
  EXPECT_EQ(Layers(core, "failed"), 0);
}

TEST_F(ResidencyTest, RegisteringEvictedContentBringsItBack) {
  Core core(Options(1));
  ASSERT_TRUE(Register(core, 0).ok());
  ASSERT_TRUE(Register(core, 1).ok());
  ASSERT_EQ(State(core, 0), pb::LAYER_STATE_EVICTED);
  const auto again = Register(core, 0);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->version(), 1);
  EXPECT_EQ(again->state(), pb::LAYER_STATE_READY);
}

TEST_F(ResidencyTest, WarmingAndTimingBringALayerBack) {
  Core core(Options(1));
  ASSERT_TRUE(Register(core, 0).ok());
  ASSERT_TRUE(Register(core, 1).ok());
  pb::WarmLayerRequest warm;
  warm.mutable_layer()->set_name(NameOf(0));
  pb::WarmLayerResponse warmed;
  ASSERT_TRUE(core.engine.Warm(warm, &warmed).ok());
  EXPECT_EQ(warmed.layer().state(), pb::LAYER_STATE_READY);
  pb::BenchmarkRequest benchmark;
  benchmark.mutable_layer()->set_name(NameOf(1));
  benchmark.add_tokens(1);
  benchmark.set_repetitions(1);
  benchmark.set_skip_dense(true);
  pb::BenchmarkResponse timed;
  const absl::Status status = core.engine.Benchmark(benchmark, &timed);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(State(core, 1), pb::LAYER_STATE_READY);
}

TEST_F(ResidencyTest, UnregisteringAnEvictedLayerLetsItsFileGo) {
  CoreOptions options = Options(1);
  options.cache_limit = 2 * packed_ + (40 << 10);  // two files
  Core core(options);
  ASSERT_TRUE(Register(core, 0).ok());
  ASSERT_TRUE(Register(core, 1).ok());
  ASSERT_TRUE(Register(core, 2).ok());
  // Both evicted layers need their files: there is no room for a third, so that nothing can leave.
  EXPECT_EQ(Layers(core, "evicted"), 2);
  EXPECT_TRUE(absl::IsResourceExhausted(Register(core, 3).status()));
  EXPECT_TRUE(core.Unregister(NameOf(0)).ok());
  const auto layer = Register(core, 3);
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_TRUE(core.Unregister(NameOf(2)).ok());
  EXPECT_TRUE(Use(core, 1).ok());
  EXPECT_LE(Series(core.metrics, "spmmd_cache_bytes").value(), static_cast<double>(options.cache_limit));
}

// A layer on several devices leaves all of them at once.
TEST_F(ResidencyTest, ReplicatedAndShardedLayersTakeTurns) {
  for (const pb::Placement placement : {pb::PLACEMENT_REPLICATED, pb::PLACEMENT_SHARDED}) {
    for (const bool own_memory : {false, true}) {
      Metrics metrics;
      std::vector<std::unique_ptr<HeldDevice>> devices;
      std::vector<Device*> all;
      for (int i = 0; i < 2; ++i) {
        DeviceOptions options;
        options.memory_limit_bytes = placement == pb::PLACEMENT_SHARDED ? estimate_ * 13 / 16 : MemoryFor(1);
        options.measure_bandwidth = false;
        devices.push_back(std::make_unique<HeldDevice>(options, &metrics, i));
        if (own_memory) devices.back()->PretendOwnMemory();
        all.push_back(devices.back().get());
      }
      LayerCatalog::Options options;
      options.cache_dir = cache_dir_;
      options.residency.host_limit_bytes = own_memory ? packed_ + 4096 : 0;
      LayerCatalog catalog(options, all, &metrics);
      Engine engine(Engine::Options(), &catalog, &metrics);
      const std::vector<float> bias(kRows, 0.25f);
      for (const int index : {0, 1, 2}) {
        const DenseMatrix w = Weights(index);
        pb::LayerSpec spec = DenseSpec(NameOf(index), w.view());
        spec.set_placement(placement);
        spec.set_has_bias(true);
        const auto layer = testing::RegisterIn(catalog, spec, w.view(), bias);
        ASSERT_TRUE(layer.ok()) << layer.status();
        EXPECT_EQ(layer->residency_size(), 2);
      }
      const DenseMatrix x = Input();
      for (const int index : {0, 1, 2, 1, 0}) {
        pb::ExecuteResponse response;
        const absl::Status status = testing::ExecuteOn(engine, MatmulRequest(NameOf(index), x.view()), &response);
        ASSERT_TRUE(status.ok()) << status;
        const DenseMatrix w = Weights(index);
        const Reference expected = ReferenceMatmul(w.view(), x.view(), bias);
        const DenseView y = ViewOf(response.outputs(0).tensor());
        for (int64_t i = 0; i < y.rows * y.cols; ++i) {
          ASSERT_NEAR(ElementAsDouble(y, i / y.cols, i % y.cols), expected.y[static_cast<size_t>(i)],
                      1e-5 + 1e-5 * expected.scale[static_cast<size_t>(i)]);
        }
      }
      for (const int index : {0, 1, 2}) ASSERT_TRUE(testing::UnregisterFrom(catalog, NameOf(index)).ok());
      for (const auto& device : devices) EXPECT_EQ(device->budget().used(MemoryKind::kWeights), 0);
    }
  }
}

// Many callers over more layers than fit, with registrations, pins and cancellations in between: every answer is right
// or an honest refusal, and in the end nothing is held.
TEST_F(ResidencyTest, Churn) {
  constexpr int kLayers = 8;
  constexpr int kThreads = 4;
  constexpr int kRounds = 40;
  CoreOptions options = Options(3);
  options.residency.host_limit_bytes = 2 * packed_ + 4096;
  Core core(options);
  core.device.PretendOwnMemory();
  for (int layer = 0; layer < kLayers; ++layer) ASSERT_TRUE(Register(core, layer).ok());
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&core, t] {
      std::mt19937 random(static_cast<uint32_t>(t));
      for (int round = 0; round < kRounds; ++round) {
        const int layer = static_cast<int>(random() % kLayers);
        switch (random() % 8) {
          case 0:
            if (const auto status = Pin(core, layer, true); !status.ok()) {
              EXPECT_TRUE(absl::IsResourceExhausted(status) || absl::IsNotFound(status)) << status;
            }
            Pin(core, layer, false).IgnoreError();
            break;
          case 1: {
            // Layers that only this thread registers and removes.
            const int own = kLayers + t;
            const auto registered = Register(core, own);
            EXPECT_TRUE(registered.ok() || absl::IsResourceExhausted(registered.status())) << registered.status();
            if (registered.ok()) {
              EXPECT_TRUE(core.Unregister(NameOf(own)).ok());
            }
            break;
          }
          case 2: {
            const absl::Status status = Use(core, layer, absl::Now() + absl::Microseconds(random() % 2000));
            EXPECT_TRUE(status.ok() || absl::IsDeadlineExceeded(status) || absl::IsResourceExhausted(status)) << status;
            break;
          }
          default: {
            const absl::Status status = Use(core, layer);
            EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  core.engine.Drain();
  EXPECT_EQ(Layers(core, "ready") + Layers(core, "evicted"), kLayers);
  EXPECT_EQ(Series(core.metrics, "spmmd_requests_waiting_for_layers"), 0);
  for (int layer = 0; layer < kLayers; ++layer) {
    EXPECT_TRUE(Use(core, layer).ok()) << layer;
    EXPECT_TRUE(core.Unregister(NameOf(layer)).ok());
  }
  EXPECT_EQ(core.device.budget().used(MemoryKind::kWeights), 0);
  EXPECT_EQ(Series(core.metrics, "spmmd_host_layer_bytes"), 0);
  EXPECT_EQ(Layers(core, "ready") + Layers(core, "evicted") + Layers(core, "failed"), 0);
}

}  // namespace
}  // namespace spmmd::server
