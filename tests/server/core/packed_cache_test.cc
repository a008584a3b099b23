// Layers that come back from the packed cache.
#include "server/catalog/packed_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "tests/server/core/core_harness.h"

namespace spmmd::server {
namespace {

using testing::DenseSpec;
using testing::HeldDevice;
using testing::MatmulRequest;
using testing::RandomMatrix;
using testing::Series;
using testing::ViewOf;

class PackedCacheTest : public ::testing::Test {
 protected:
  PackedCacheTest() {
    std::string pattern = ::testing::TempDir() + "/packed_cache_XXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  ~PackedCacheTest() override { std::filesystem::remove_all(directory_); }

  // A server's life.
  struct Life {
    explicit Life(const std::string& directory, int count = 1) {
      std::vector<Device*> all;
      for (int i = 0; i < count; ++i) {
        DeviceOptions options;
        options.memory_limit_bytes = uint64_t{1} << 28;
        options.measure_bandwidth = false;
        devices.push_back(std::make_unique<HeldDevice>(options, &metrics, i));
        all.push_back(devices.back().get());
      }
      LayerCatalog::Options options;
      options.cache_dir = directory;
      catalog = std::make_unique<LayerCatalog>(options, all, &metrics);
      engine = std::make_unique<Engine>(Engine::Options(), catalog.get(), &metrics);
    }
    double Loads(const std::string& source) {
      return Series(metrics, "spmmd_layer_loads_total{source=\"" + source + "\"}").value_or(0);
    }
    Metrics metrics;
    std::vector<std::unique_ptr<HeldDevice>> devices;
    std::unique_ptr<LayerCatalog> catalog;
    std::unique_ptr<Engine> engine;
  };

  std::vector<std::filesystem::path> Files() const {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) files.push_back(entry.path());
    return files;
  }

  pb::LayerSpec Spec() const {
    pb::LayerSpec spec = DenseSpec("w", w_.view());
    spec.set_has_bias(true);
    spec.mutable_magnitude()->set_sparsity(0.6);
    return spec;
  }
  // Registers and checks the layer; the message.
  pb::Layer Serve(Life& life, const pb::LayerSpec& spec) {
    const auto layer = testing::RegisterIn(*life.catalog, spec, w_.view(), bias_);
    EXPECT_TRUE(layer.ok()) << layer.status();
    const DenseMatrix x = RandomMatrix(DType::kF16, 2, 96, 0, 2);
    pb::ExecuteResponse response;
    EXPECT_TRUE(testing::ExecuteOn(*life.engine, MatmulRequest("w", x.view()), &response).ok());
    last_ = response.outputs(0).tensor().data();
    return layer.ok() ? *layer : pb::Layer();
  }

  std::string directory_;
  const DenseMatrix w_ = RandomMatrix(DType::kF16, 200, 96, 0.1, 1);
  const std::vector<float> bias_ = std::vector<float>(200, 0.5f);
  std::string last_;
};

TEST_F(PackedCacheTest, ASecondLifePacksNothing) {
  Life first(directory_);
  pb::Layer packed = Serve(first, Spec());
  const std::string y = last_;
  EXPECT_EQ(first.Loads("upload"), 1);
  ASSERT_EQ(Files().size(), 1);

  Life second(directory_);
  pb::Layer cached = Serve(second, Spec());
  EXPECT_EQ(second.Loads("cache"), 1);
  EXPECT_EQ(second.Loads("upload"), 0);
  EXPECT_EQ(last_, y);
  EXPECT_EQ(cached.format_reason(), packed.format_reason());
  for (pb::Layer* layer : {&packed, &cached}) {
    layer->clear_create_time();
    layer->clear_pack_seconds();
  }
  EXPECT_EQ(cached.SerializeAsString(), packed.SerializeAsString());
  EXPECT_EQ(second.devices[0]->budget().used(MemoryKind::kWeights), cached.residency(0).bytes());
}

TEST_F(PackedCacheTest, OtherOptionsAreOtherFiles) {
  Life life(directory_);
  Serve(life, Spec());
  pb::LayerSpec denser = Spec();
  denser.mutable_magnitude()->set_sparsity(0.5);
  Serve(life, denser);
  EXPECT_EQ(life.Loads("cache"), 0);
  EXPECT_EQ(Files().size(), 2);
}

TEST_F(PackedCacheTest, ADamagedFileIsSetAsideAndMadeAgain) {
  {
    Life first(directory_);
    Serve(first, Spec());
  }
  const std::string y = last_;
  const std::filesystem::path file = Files().front();
  {
    std::fstream damage(file, std::ios::in | std::ios::out | std::ios::binary);
    damage.seekp(5000);
    damage.put('!');
  }
  Life second(directory_);
  Serve(second, Spec());
  EXPECT_EQ(second.Loads("cache"), 0);
  EXPECT_EQ(last_, y);
  EXPECT_TRUE(std::filesystem::exists(file));
  EXPECT_TRUE(std::filesystem::exists(file.string() + ".corrupt"));
  Life third(directory_);
  Serve(third, Spec());
  EXPECT_EQ(third.Loads("cache"), 1);
}

TEST_F(PackedCacheTest, ShardsHaveTheirFiles) {
  pb::LayerSpec spec = Spec();
  spec.set_placement(pb::PLACEMENT_SHARDED);
  {
    Life first(directory_, 2);
    Serve(first, spec);
  }
  EXPECT_EQ(Files().size(), 2);
  const std::string y = last_;
  Life second(directory_, 2);
  const pb::Layer layer = Serve(second, spec);
  EXPECT_EQ(second.Loads("cache"), 1);
  EXPECT_EQ(layer.residency_size(), 2);
  EXPECT_EQ(last_, y);
  // Another number of devices cuts elsewhere.
  Life third(directory_, 3);
  Serve(third, spec);
  EXPECT_EQ(third.Loads("cache"), 0);
  EXPECT_EQ(Files().size(), 5);
}

TEST_F(PackedCacheTest, AnUnwritableDirectoryCostsOnlyTheCache) {
  Life life("/proc/none");
  Serve(life, Spec());
  EXPECT_EQ(life.Loads("upload"), 1);
}

}  // namespace
}  // namespace spmmd::server
