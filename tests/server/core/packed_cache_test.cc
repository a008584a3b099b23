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

#include "absl/time/clock.h"
#include "kernels/format/npy.h"
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
    explicit Life(const std::string& directory, int count = 1, const std::string& repository = "") {
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
      options.model_repository = repository;
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

TEST_F(PackedCacheTest, ContentThatIsOnDiskNeedNotBeSent) {
  pb::LayerSpec spec = Spec();
  {
    Life first(directory_);
    spec.set_content_xxh3(Serve(first, Spec()).content_xxh3());
  }
  const std::string y = last_;
  {
    Life second(directory_);
    auto upload = second.catalog->Begin(spec);
    ASSERT_TRUE(upload.ok()) << upload.status();
    EXPECT_FALSE((*upload)->accepted().content_needed());
    const auto layer = (*upload)->Finish();
    ASSERT_TRUE(layer.ok()) << layer.status();
    EXPECT_TRUE(layer->has_bias());
    upload->reset();
    Serve(second, spec);
    EXPECT_EQ(second.Loads("cache"), 1);
    EXPECT_EQ(last_, y);
  }
  // A damaged file is found out when it is read; then the content is needed after all.
  {
    std::fstream damage(Files().front(), std::ios::in | std::ios::out | std::ios::binary);
    damage.seekp(5000);
    damage.put('!');
  }
  Life third(directory_);
  auto upload = third.catalog->Begin(spec);
  ASSERT_TRUE(upload.ok()) << upload.status();
  const absl::Status lost = (*upload)->Finish().status();
  EXPECT_TRUE(absl::IsAborted(lost)) << lost;
  EXPECT_EQ(ReasonOf(lost), reason::kContentSourceLost);
  upload->reset();
  EXPECT_EQ(third.devices[0]->budget().used(), 0);
  Serve(third, spec);
  EXPECT_EQ(third.Loads("upload"), 1);
  EXPECT_EQ(last_, y);
}

TEST_F(PackedCacheTest, AFileThatHasNotChangedIsNotReadAgain) {
  const std::string repository = directory_ + "/repository";
  std::filesystem::create_directory(repository);
  const auto write = [&](const DenseMatrix& w) {
    const std::string path = repository + "/w.npy";
    ASSERT_TRUE(WriteNpy(path, w.view()).ok());
  };
  write(w_);
  pb::LayerSpec spec;
  spec.set_name("w");
  spec.mutable_file()->set_path("w.npy");
  const auto serve = [&](Life& life) {
    auto upload = life.catalog->Begin(spec);
    ASSERT_TRUE(upload.ok()) << upload.status();
    const auto layer = (*upload)->Finish();
    ASSERT_TRUE(layer.ok()) << layer.status();
    const DenseMatrix x = RandomMatrix(DType::kF16, 2, 96, 0, 2);
    pb::ExecuteResponse response;
    ASSERT_TRUE(testing::ExecuteOn(*life.engine, MatmulRequest("w", x.view()), &response).ok());
    last_ = response.outputs(0).tensor().data();
  };
  Life first(directory_, 1, repository);
  serve(first);
  EXPECT_EQ(first.Loads("file"), 1);
  const std::string y = last_;
  {
    Life second(directory_, 1, repository);
    auto upload = second.catalog->Begin(spec);
    ASSERT_TRUE(upload.ok());
    // Nothing was set aside for reading it.
    EXPECT_EQ(Series(second.metrics, "spmmd_upload_bytes"), 0);
    ASSERT_TRUE((*upload)->Finish().ok());
    EXPECT_EQ(second.Loads("cache"), 1);
  }
  // Other weights in a file of the same name and size.
  const DenseMatrix other = RandomMatrix(DType::kF16, 200, 96, 0.1, 9);
  write(other);
  Life third(directory_, 1, repository);
  serve(third);
  EXPECT_EQ(third.Loads("file"), 1);
  EXPECT_NE(last_, y);
  // The packed file is gone, what the source had is still known.
  for (const auto& file : Files()) {
    if (file.extension() == ".spmmd") std::filesystem::remove(file);
  }
  Life fourth(directory_, 1, repository);
  serve(fourth);
  EXPECT_EQ(fourth.Loads("file"), 1);
}

TEST_F(PackedCacheTest, TheLeastRecentlyUsedGoWhenTheDirectoryIsFull) {
  Metrics metrics;
  const auto packed = Pack(Format::kBitmap, w_.view(), {});
  ASSERT_TRUE(packed.ok());
  const StoredLayer part{*packed, bias_};
  const auto key = [](const std::string& name) { return PackedCache::Key{name, "cpu", 0, 1}; };
  const std::string a = "a";
  const std::string b = "b";
  const std::string c = "c";
  const std::string d = "d";
  uint64_t bytes = 0;
  {
    PackedCache cache(directory_, 0, &metrics);
    for (const std::string* name : {&a, &b, &c}) {
      ASSERT_TRUE(cache.Store(key(*name), part, "reason").ok());
      absl::SleepFor(absl::Milliseconds(5));
    }
    bytes = cache.bytes() / 3;
    EXPECT_GE(bytes, part.bytes());
    // A use counts, over restarts too.
    ASSERT_TRUE(cache.Find(key(a)).has_value());
  }
  const std::string file_of_c = PackedCache(directory_, 0, &metrics).PathOf(key(c));
  std::filesystem::rename(file_of_c, file_of_c + ".corrupt");
  std::ofstream(directory_ + "/notes.txt") << "not ours";
  // The corrupt file goes first, though it is the youngest.
  PackedCache cache(directory_, 3 * bytes, &metrics);
  EXPECT_EQ(cache.bytes(), 3 * bytes);
  absl::SleepFor(absl::Milliseconds(5));
  ASSERT_TRUE(cache.Store(key(d), part, "reason").ok());
  EXPECT_FALSE(std::filesystem::exists(file_of_c + ".corrupt"));
  EXPECT_EQ(cache.bytes(), 3 * bytes);
  EXPECT_TRUE(cache.Contains(key(a)) && cache.Contains(key(b)) && cache.Contains(key(d)));
  ASSERT_TRUE(cache.Hold(key(b)));
  ASSERT_TRUE(cache.Store(key(c), part, "reason").ok());
  EXPECT_FALSE(cache.Contains(key(a)));  // b is older, but held
  EXPECT_TRUE(cache.Find(key(b)).has_value());
  EXPECT_EQ(Series(metrics, "spmmd_cache_events_total{event=\"evict\"}"), 2);
  // What is held and what is to be written do not fit together.
  ASSERT_TRUE(cache.Hold(key(c)));
  ASSERT_TRUE(cache.Hold(key(d)));
  EXPECT_TRUE(absl::IsResourceExhausted(cache.Store(key(a), part, "reason")));
  EXPECT_EQ(cache.bytes(), 3 * bytes);
  cache.Release(key(c));
  EXPECT_TRUE(cache.Store(key(a), part, "reason").ok());
  EXPECT_FALSE(cache.Contains(key(c)));
  EXPECT_FALSE(cache.Hold(key(c)));
  EXPECT_TRUE(std::filesystem::exists(directory_ + "/notes.txt"));
  // A smaller limit holds from the start.
  PackedCache smaller(directory_, bytes + 100, &metrics);
  EXPECT_EQ(smaller.bytes(), bytes);
}

TEST_F(PackedCacheTest, AnUnwritableDirectoryCostsOnlyTheCache) {
  Life life("/proc/none");
  Serve(life, Spec());
  EXPECT_EQ(life.Loads("upload"), 1);
}

}  // namespace
}  // namespace spmmd::server
