#include "server/catalog/catalog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <fstream>
#include <limits>
#include <thread>

#include "absl/strings/str_format.h"
#include "kernels/format/container.h"
#include "kernels/format/npy.h"
#include "tests/server/core/core_harness.h"

namespace spmmd::server {
namespace {

using testing::AppendPart;
using testing::Bytes;
using testing::Core;
using testing::CoreOptions;
using testing::DenseSpec;
using testing::Hash;
using ::testing::HasSubstr;
using testing::RandomMatrix;
using testing::Series;
using testing::Stored;

// Packed versions of a matrix, to compare what the server stores through different encodings.
struct Encoded {
  std::vector<uint64_t> row_offsets{0};
  std::vector<uint32_t> rows;
  std::vector<uint32_t> cols;
  std::string bitmap;
  std::string values;
};

Encoded Encode(const DenseView& w) {
  Encoded out;
  out.bitmap.resize(static_cast<size_t>((w.rows * w.cols + 7) / 8));
  for (int64_t r = 0; r < w.rows; ++r) {
    for (int64_t c = 0; c < w.cols; ++c) {
      if (ElementAsDouble(w, r, c) == 0) continue;
      const int64_t i = r * w.cols + c;
      out.bitmap[static_cast<size_t>(i / 8)] |= static_cast<char>(1 << (i % 8));
      out.rows.push_back(static_cast<uint32_t>(r));
      out.cols.push_back(static_cast<uint32_t>(c));
      out.values += Bytes(w.row(r) + static_cast<size_t>(c) * SizeOf(w.dtype), SizeOf(w.dtype));
    }
    out.row_offsets.push_back(out.cols.size());
  }
  return out;
}

TEST(CatalogTest, EveryEncodingStoresTheSameMatrix) {
  for (const DType dtype : {DType::kF16, DType::kBf16, DType::kF32}) {
    Core core;
    const DenseMatrix w = RandomMatrix(dtype, 37, 65, 0.6, 3);
    const Encoded encoded = Encode(w.view());
    ASSERT_TRUE(core.Register("dense", w.view()).ok());

    pb::LayerSpec spec = DenseSpec("csr", w.view());
    spec.set_nnz(static_cast<int64_t>(encoded.cols.size()));
    spec.set_encoding(pb::SOURCE_ENCODING_CSR);
    auto upload = *core.catalog.Begin(spec);
    // Parts interleaved, out of hash order, in odd chunks.
    ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_VALUES, encoded.values, 333).ok());
    ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_ROW_OFFSETS, Bytes(encoded.row_offsets), 101).ok());
    ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_COLUMN_INDICES, Bytes(encoded.cols), 77).ok());
    auto layer = upload->Finish();
    ASSERT_TRUE(layer.ok()) << layer.status();
    EXPECT_EQ(layer->content_xxh3(), Hash(Bytes(encoded.row_offsets) + Bytes(encoded.cols) + encoded.values));

    spec.set_name("coo");
    spec.set_encoding(pb::SOURCE_ENCODING_COO);
    upload = *core.catalog.Begin(spec);
    ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_ROW_INDICES, Bytes(encoded.rows)).ok());
    ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_COLUMN_INDICES, Bytes(encoded.cols)).ok());
    ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_VALUES, encoded.values).ok());
    ASSERT_TRUE(upload->Finish().ok());

    spec.set_name("bitmap");
    spec.set_encoding(pb::SOURCE_ENCODING_BITMAP_UPLOAD);
    upload = *core.catalog.Begin(spec);
    ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_BITMAP, encoded.bitmap).ok());
    ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_VALUES, encoded.values).ok());
    ASSERT_TRUE(upload->Finish().ok());

    for (const char* name : {"dense", "csr", "coo", "bitmap"}) {
      EXPECT_EQ(Bytes(Stored(core, name).view()), Bytes(w.view())) << name;
    }
  }
}

TEST(CatalogTest, LayerMessageTellsEverything) {
  Core core;
  const DenseMatrix w = RandomMatrix(DType::kF32, 64, 96, 0, 3);
  pb::LayerSpec spec = DenseSpec("block/0.weight", w.view());
  spec.set_store_dtype(pb::DATA_TYPE_F16);
  spec.mutable_magnitude()->set_sparsity(0.5);
  spec.set_has_bias(true);
  spec.set_pin(true);
  spec.set_activation_threshold(0.25f);
  const auto layer = core.Register(spec, w.view(), std::vector<float>(64, 1.0f));
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(layer->name(), "block/0.weight");
  EXPECT_EQ(layer->version(), 1);
  EXPECT_EQ(layer->dtype(), pb::DATA_TYPE_F16);
  EXPECT_EQ(layer->nnz(), 64 * 96 / 2);
  EXPECT_DOUBLE_EQ(layer->sparsity(), 0.5);
  EXPECT_EQ(layer->state(), pb::LAYER_STATE_READY);
  EXPECT_EQ(layer->format(), pb::FORMAT_BITMAP);
  EXPECT_THAT(layer->format_reason(), HasSubstr("50.0 %"));
  EXPECT_EQ(layer->dense_bytes(), 64u * 96 * 2);
  EXPECT_TRUE(layer->has_bias());
  EXPECT_TRUE(layer->pinned());
  EXPECT_EQ(layer->activation_threshold(), 0.25f);
  EXPECT_GT(layer->create_time().seconds(), 0);
  uint64_t sum = 0;
  std::vector<std::string> sections;
  for (const auto& section : layer->sections()) {
    sum += section.bytes();
    sections.push_back(section.name());
  }
  EXPECT_THAT(sections, ::testing::UnorderedElementsAre("values", "masks", "tile_starts", "column_starts", "bias"));
  EXPECT_EQ(sum, layer->bytes());
  ASSERT_EQ(layer->residency_size(), 1);
  EXPECT_EQ(layer->residency(0).device(), "cpu:0");
  EXPECT_EQ(layer->residency(0).row_end(), 64);
  EXPECT_EQ(layer->residency(0).bytes(), layer->bytes());
  EXPECT_EQ(core.device.budget().used(MemoryKind::kWeights), layer->bytes());
}

TEST(CatalogTest, AutoStoresDenseWhatIsNotSparse) {
  Core core;
  const DenseMatrix w = RandomMatrix(DType::kF16, 128, 128, 0.01, 3);
  const auto layer = core.Register("w", w.view());
  ASSERT_TRUE(layer.ok());
  EXPECT_EQ(layer->format(), pb::FORMAT_DENSE);
  EXPECT_THAT(layer->format_reason(), HasSubstr("DENSE"));
  // fp32 values gain from BITMAP later than 16-bit ones, and can be asked for.
  const DenseMatrix half = RandomMatrix(DType::kF32, 128, 128, 0.5, 3);
  const auto full = core.Register("full", half.view());
  ASSERT_TRUE(full.ok());
  EXPECT_EQ(full->format(), pb::FORMAT_DENSE);
  EXPECT_THAT(full->format_reason(), HasSubstr("fp32"));
  EXPECT_EQ(core.Register("sparse", RandomMatrix(DType::kF32, 128, 128, 0.95, 3).view())->format(), pb::FORMAT_BITMAP);
  pb::LayerSpec spec = DenseSpec("asked", half.view());
  spec.set_format(pb::FORMAT_BITMAP);
  EXPECT_EQ(core.Register(spec, half.view())->format(), pb::FORMAT_BITMAP);
}

struct BadSpec {
  const char* field;
  std::function<void(pb::LayerSpec*)> spoil;
};

TEST(CatalogTest, BadSpecsNameTheirFieldAndAllocateNothing) {
  const std::vector<BadSpec> cases = {
      {"spec.name", [](auto* s) { s->clear_name(); }},
      {"spec.name", [](auto* s) { s->set_name("white space"); }},
      {"spec.name", [](auto* s) { s->set_name(std::string(257, 'a')); }},
      {"spec.m", [](auto* s) { s->set_m(0); }},
      {"spec.m", [](auto* s) { s->set_m(-1); }},
      {"spec.m", [](auto* s) { s->set_m(std::numeric_limits<int64_t>::min()); }},
      {"spec.k", [](auto* s) { s->set_k(0); }},
      {"spec.k", [](auto* s) { s->set_k(std::numeric_limits<int64_t>::max()); }},
      {"spec.k",
       [](auto* s) {
         s->set_m(1 << 24);
         s->set_k(1 << 24);
       }},  // the product
      {"spec.dtype", [](auto* s) { s->clear_dtype(); }},
      {"spec.dtype", [](auto* s) { s->set_dtype(static_cast<pb::DataType>(99)); }},
      {"spec.store_dtype", [](auto* s) { s->set_store_dtype(static_cast<pb::DataType>(-1)); }},
      {"spec.encoding", [](auto* s) { s->clear_encoding(); }},
      {"spec.encoding", [](auto* s) { s->set_encoding(static_cast<pb::SourceEncoding>(77)); }},
      {"spec.nnz",
       [](auto* s) {
         s->set_encoding(pb::SOURCE_ENCODING_CSR);
         s->set_nnz(-1);
       }},
      {"spec.nnz",
       [](auto* s) {
         s->set_encoding(pb::SOURCE_ENCODING_COO);
         s->set_nnz(s->m() * s->k() + 1);
       }},
      {"spec.magnitude.sparsity", [](auto* s) { s->mutable_magnitude()->set_sparsity(1.0); }},
      {"spec.magnitude.sparsity", [](auto* s) { s->mutable_magnitude()->set_sparsity(std::nan("")); }},
      {"spec.nm.n",
       [](auto* s) {
         s->mutable_nm()->set_n(4);
         s->mutable_nm()->set_m(4);
       }},
      {"spec.nm.m",
       [](auto* s) {
         s->mutable_nm()->set_n(1);
         s->mutable_nm()->set_m(65);
       }},
      {"spec.format", [](auto* s) { s->set_format(static_cast<pb::Format>(42)); }},
      {"spec.placement", [](auto* s) { s->set_placement(static_cast<pb::Placement>(42)); }},
      {"spec.activation_threshold", [](auto* s) { s->set_activation_threshold(-1); }},
      {"spec.activation_threshold", [](auto* s) { s->set_activation_threshold(INFINITY); }},
      {"spec.content_xxh3", [](auto* s) { s->set_content_xxh3("abc"); }},
      {"spec.content_xxh3", [](auto* s) { s->set_content_xxh3(std::string(32, 'A')); }},
  };
  Core core;
  for (const BadSpec& c : cases) {
    pb::LayerSpec spec;
    spec.set_name("w");
    spec.set_m(16);
    spec.set_k(16);
    spec.set_dtype(pb::DATA_TYPE_F16);
    spec.set_encoding(pb::SOURCE_ENCODING_DENSE);
    c.spoil(&spec);
    const absl::Status status = core.catalog.Begin(spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.field << status;
    EXPECT_EQ(FieldOf(status), c.field) << status;
    EXPECT_EQ(core.device.budget().used(), 0u);
  }
  EXPECT_EQ(Series(core.metrics, "spmmd_upload_bytes"), 0);
}

TEST(CatalogTest, FormatsWithoutAKernelAreUnimplementedNamingTheBackend) {
  Core core;
  const DenseMatrix w = RandomMatrix(DType::kF16, 16, 16, 0.5, 1);
  pb::LayerSpec spec = DenseSpec("w", w.view());
  spec.set_format(pb::FORMAT_THREE_LAYER);
  const absl::Status status = core.catalog.Begin(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cpu"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("THREE_LAYER"));
  spec.set_dtype(pb::DATA_TYPE_F32);
  EXPECT_EQ(FieldOf(core.catalog.Begin(spec).status()), "spec.format");
}

TEST(CatalogTest, BadChunksNameTheirFieldAndBothNumbers) {
  CoreOptions options;
  options.max_chunk_bytes = 64;
  Core core(options);
  const DenseMatrix w = RandomMatrix(DType::kF16, 8, 8, 0.5, 1);
  const auto upload = *core.catalog.Begin(DenseSpec("w", w.view()));
  const auto append = [&](pb::ContentPart part, uint64_t offset, size_t bytes) {
    pb::ContentChunk chunk;
    chunk.set_part(part);
    chunk.set_offset(offset);
    chunk.set_data(std::string(bytes, '\0'));
    return upload->Append(chunk);
  };
  EXPECT_EQ(FieldOf(append(pb::CONTENT_PART_BITMAP, 0, 8)), "chunk.part");
  EXPECT_EQ(FieldOf(append(pb::CONTENT_PART_BIAS, 0, 8)), "chunk.part");
  EXPECT_EQ(FieldOf(append(static_cast<pb::ContentPart>(123), 0, 8)), "chunk.part");
  EXPECT_EQ(FieldOf(append(pb::CONTENT_PART_VALUES, 0, 65)), "chunk.data");
  EXPECT_EQ(FieldOf(append(pb::CONTENT_PART_VALUES, 8, 8)), "chunk.offset");
  EXPECT_TRUE(append(pb::CONTENT_PART_VALUES, 0, 64).ok());
  EXPECT_TRUE(append(pb::CONTENT_PART_VALUES, 64, 60).ok());
  const absl::Status past = append(pb::CONTENT_PART_VALUES, 124, 5);
  EXPECT_EQ(FieldOf(past), "chunk.data");
  EXPECT_THAT(std::string(past.message()), HasSubstr("expected 128"));
  EXPECT_EQ(upload->received_bytes(), 124u);
  // Four bytes are missing.
  const absl::Status truncated = upload->Finish().status();
  EXPECT_EQ(truncated.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(truncated), "TRUNCATED_UPLOAD");
  EXPECT_THAT(std::string(truncated.message()), HasSubstr("124 of 128"));
  EXPECT_EQ(core.catalog.Find("w", 0).status().code(), absl::StatusCode::kNotFound);
}

TEST(CatalogTest, BadContentIsRefusedWithItsPosition) {
  Core core;
  DenseMatrix w = RandomMatrix(DType::kF32, 4, 6, 0.5, 1);
  float nan = std::nanf("");
  std::memcpy(w.mutable_view().row(2) + 5 * 4, &nan, 4);
  absl::Status status = core.Register("w", w.view()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(FieldOf(status), "content");
  EXPECT_THAT(std::string(status.message()), HasSubstr("2"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("5"));
  pb::LayerSpec spec = DenseSpec("w", w.view());
  spec.set_allow_nonfinite(true);
  EXPECT_TRUE(core.Register(spec, w.view()).ok());

  const DenseMatrix good = RandomMatrix(DType::kF32, 4, 6, 0.5, 2);
  spec = DenseSpec("b", good.view());
  spec.set_has_bias(true);
  status = core.Register(spec, good.view(), {1, 2, INFINITY, 4}).status();
  EXPECT_EQ(FieldOf(status), "content");
  EXPECT_THAT(std::string(status.message()), HasSubstr("BIAS[2]"));

  spec = DenseSpec("big", good.view());
  spec.set_store_dtype(pb::DATA_TYPE_F16);
  DenseMatrix big = RandomMatrix(DType::kF32, 4, 6, 0.5, 2);
  const float large = 1e30f;
  std::memcpy(big.mutable_view().data, &large, 4);
  EXPECT_EQ(FieldOf(core.Register(spec, big.view()).status()), "spec.store_dtype");

  spec = DenseSpec("csr", good.view());
  spec.set_encoding(pb::SOURCE_ENCODING_CSR);
  spec.set_nnz(2);
  const auto upload = *core.catalog.Begin(spec);
  ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_ROW_OFFSETS, Bytes(std::vector<uint64_t>{0, 2, 2, 2, 2})).ok());
  ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_COLUMN_INDICES, Bytes(std::vector<uint32_t>{3, 3})).ok());
  ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_VALUES, Bytes(std::vector<float>{1, 2})).ok());
  status = upload->Finish().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("COLUMN_INDICES"));
}

TEST(CatalogTest, WrongHashIsDataLoss) {
  Core core;
  const DenseMatrix w = RandomMatrix(DType::kF16, 16, 16, 0.5, 1);
  pb::LayerSpec spec = DenseSpec("w", w.view());
  spec.set_content_xxh3(std::string(32, '0'));
  const absl::Status status = core.Register(spec, w.view()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReasonOf(status), "CONTENT_HASH_MISMATCH");
  EXPECT_EQ(core.device.budget().used(), 0u);
  spec.set_content_xxh3(Hash(Bytes(w.view())));
  EXPECT_TRUE(core.Register(spec, w.view()).ok());
}

TEST(CatalogTest, KnownContentIsNotAskedForAgain) {
  Core core;
  const DenseMatrix w = RandomMatrix(DType::kF16, 64, 64, 0.5, 1);
  pb::LayerSpec spec = DenseSpec("a", w.view());
  const auto first = core.Register(spec, w.view());
  ASSERT_TRUE(first.ok());
  const uint64_t used = core.device.budget().used(MemoryKind::kWeights);

  spec.set_name("b");
  spec.set_content_xxh3(first->content_xxh3());
  auto upload = *core.catalog.Begin(spec);
  EXPECT_FALSE(upload->accepted().content_needed());
  EXPECT_EQ(FieldOf(AppendPart(*upload, pb::CONTENT_PART_VALUES, "x")), "chunk");
  const auto second = upload->Finish();
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->name(), "b");
  EXPECT_EQ(core.device.budget().used(MemoryKind::kWeights), used);
  EXPECT_EQ(Bytes(Stored(core, "b").view()), Bytes(w.view()));

  // Without the hash the bytes travel, and are recognised.
  ASSERT_TRUE(core.Register("c", w.view()).ok());
  EXPECT_EQ(core.device.budget().used(MemoryKind::kWeights), used);
  EXPECT_EQ(Series(core.metrics, R"(spmmd_pack_duration_seconds_count{format="BITMAP"})"), 1);

  // Other options are other content.
  spec.set_name("d");
  spec.set_format(pb::FORMAT_DENSE);
  EXPECT_TRUE((*core.catalog.Begin(spec))->accepted().content_needed());

  // The memory goes with the last user.
  ASSERT_TRUE(core.Unregister("a").ok());
  ASSERT_TRUE(core.Unregister("c").ok());
  EXPECT_EQ(core.device.budget().used(MemoryKind::kWeights), used);
  pb::UnregisterLayerResponse response;
  ASSERT_TRUE(core.Unregister("b", 0, &response).ok());
  EXPECT_EQ(response.freed_bytes(), used);
  EXPECT_EQ(core.device.budget().used(MemoryKind::kWeights), 0u);
}

TEST(CatalogTest, ConcurrentIdenticalRegistrationsAreConvertedOnce) {
  for (const bool with_hash : {false, true}) {
    const DenseMatrix w = RandomMatrix(DType::kF16, 256, 256, 0.5, 1);
    CoreOptions options;
    // Room for one copy when the hash says that it is the same.
    if (with_hash) options.device_memory = w.bytes() * 3 / 2;
    Core core(options);
    constexpr int kThreads = 16;
    std::atomic<int> ok{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        pb::LayerSpec spec = DenseSpec(absl::StrCat("layer", t % 4), w.view());
        if (with_hash) spec.set_content_xxh3(Hash(Bytes(w.view())));
        const auto layer = core.Register(spec, w.view());
        EXPECT_TRUE(layer.ok()) << layer.status();
        if (layer.ok()) {
          EXPECT_EQ(layer->version(), 1);  // the same content under the same name is the same layer
        }
        ok += layer.ok() ? 1 : 0;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(ok, kThreads);
    EXPECT_EQ(Series(core.metrics, R"(spmmd_pack_duration_seconds_count{format="BITMAP"})"), 1);
    EXPECT_EQ(Series(core.metrics, R"(spmmd_layer_loads_total{source="upload"})"), 1);
    EXPECT_EQ(Series(core.metrics, R"(spmmd_layers{state="ready"})"), 4);
    EXPECT_EQ(core.device.budget().used(MemoryKind::kWeights), (*core.catalog.Find("layer0", 0))->content().bytes);
    EXPECT_EQ(Series(core.metrics, "spmmd_upload_bytes"), 0);
  }
}

TEST(CatalogTest, WhoWaitsForALostUploadIsToldToTryAgain) {
  Core core;
  const DenseMatrix w = RandomMatrix(DType::kF16, 64, 64, 0.5, 1);
  pb::LayerSpec spec = DenseSpec("w", w.view());
  spec.set_content_xxh3(Hash(Bytes(w.view())));
  auto leader = *core.catalog.Begin(spec);
  auto follower = *core.catalog.Begin(spec);
  EXPECT_TRUE(leader->accepted().content_needed());
  EXPECT_FALSE(follower->accepted().content_needed());
  absl::Status status;
  std::thread waiting([&] { status = follower->Finish().status(); });
  ASSERT_TRUE(AppendPart(*leader, pb::CONTENT_PART_VALUES, Bytes(w.view()).substr(0, 100)).ok());
  leader.reset();  // the connection is gone
  waiting.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(status), "CONTENT_SOURCE_LOST");
  // A liar's mistake is his own.
  leader = *core.catalog.Begin(spec);
  follower = *core.catalog.Begin(spec);
  ASSERT_TRUE(AppendPart(*leader, pb::CONTENT_PART_VALUES, std::string(w.bytes(), '\0')).ok());
  EXPECT_EQ(leader->Finish().status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(follower->Finish().status().code(), absl::StatusCode::kAborted);
  // A cancelled wait ends.
  leader = *core.catalog.Begin(spec);
  follower = *core.catalog.Begin(spec);
  follower->Cancel();
  EXPECT_EQ(follower->Finish().status().code(), absl::StatusCode::kCancelled);
  leader.reset();
  EXPECT_TRUE(core.Register(spec, w.view()).ok());
}

TEST(CatalogTest, UploadsCutOffLeaveNothing) {
  Core core;
  const DenseMatrix w = RandomMatrix(DType::kF16, 64, 64, 0.5, 1);
  for (int i = 0; i < 100; ++i) {
    const auto upload = *core.catalog.Begin(DenseSpec("w", w.view()));
    ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_VALUES, Bytes(w.view()).substr(0, 80 * i)).ok());
    EXPECT_GT(core.device.budget().used(), 0u);
    EXPECT_EQ(Series(core.metrics, R"(spmmd_layers{state="uploading"})"), 1);
    if (i % 2 == 0) {
      EXPECT_FALSE(upload->Finish().ok());
    }
  }
  EXPECT_EQ(core.device.budget().used(), 0u);
  EXPECT_EQ(Series(core.metrics, "spmmd_upload_bytes"), 0);
  for (const char* state : {"uploading", "packing", "ready", "failed"}) {
    EXPECT_EQ(Series(core.metrics, absl::StrCat("spmmd_layers{state=\"", state, "\"}")), 0) << state;
  }
  pb::ListLayersResponse list;
  ASSERT_TRUE(core.catalog.List({}, &list).ok());
  EXPECT_EQ(list.layers_size(), 0);
}

class ResumedUploadTest : public ::testing::Test {
 protected:
  ResumedUploadTest() {
    spec_ = DenseSpec("w", w_.view());
    spec_.set_has_bias(true);
    Core core;
    spec_.set_content_xxh3(core.Register(spec_, w_.view(), bias_)->content_xxh3());
  }
  CoreOptions Options(absl::Duration keep = absl::Seconds(60)) const {
    CoreOptions options;
    options.upload_resume_timeout = keep;
    options.upload_memory = 40'000;  // two such layers and some
    return options;
  }
  // Begins, sends `bytes` of the values from where the server is, and goes away.
  void SendPart(Core& core, size_t bytes, bool half_close = false) {
    const auto upload = *core.catalog.Begin(spec_);
    pb::ContentChunk chunk;
    chunk.set_part(pb::CONTENT_PART_VALUES);
    chunk.set_offset(upload->received_bytes());
    chunk.set_data(values_.substr(upload->received_bytes(), bytes));
    ASSERT_TRUE(upload->Append(chunk).ok());
    if (half_close) {
      EXPECT_FALSE(upload->Finish().ok());
    }
  }
  static double Held(Core& core) { return *Series(core.metrics, "spmmd_upload_bytes"); }

  const DenseMatrix w_ = RandomMatrix(DType::kF16, 96, 64, 0.5, 1);
  const std::vector<float> bias_ = std::vector<float>(96, 0.5f);
  const std::string values_ = Bytes(w_.view());
  pb::LayerSpec spec_;
};

TEST_F(ResumedUploadTest, GoesOnWhereTheConnectionBroke) {
  Core core(Options());
  SendPart(core, 1000);
  EXPECT_GT(Held(core), 0);
  EXPECT_EQ(core.device.budget().used(), 0u);
  EXPECT_EQ(Series(core.metrics, R"(spmmd_layers{state="uploading"})"), 0);
  // A break can look like the end of the stream.
  SendPart(core, 2000, /*half_close=*/true);
  const auto upload = *core.catalog.Begin(spec_);
  ASSERT_TRUE(upload->accepted().content_needed());
  ASSERT_EQ(upload->accepted().received_size(), 1);
  EXPECT_EQ(upload->accepted().received(0).part(), pb::CONTENT_PART_VALUES);
  EXPECT_EQ(upload->accepted().received(0).bytes(), 3000u);
  EXPECT_EQ(upload->received_bytes(), 3000u);
  pb::ContentChunk chunk;
  chunk.set_part(pb::CONTENT_PART_VALUES);
  chunk.set_offset(3001);
  EXPECT_TRUE(absl::IsInvalidArgument(upload->Append(chunk)));
  chunk.set_offset(3000);
  chunk.set_data(values_.substr(3000));
  ASSERT_TRUE(upload->Append(chunk).ok());
  ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_BIAS, Bytes(bias_)).ok());
  const auto layer = upload->Finish();
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_EQ(Bytes(Stored(core, "w").view()), values_);
  EXPECT_EQ(Held(core), 0);
}

TEST_F(ResumedUploadTest, WhoSendsItAllAgainMay) {
  Core core(Options());
  SendPart(core, 1000);
  const auto upload = *core.catalog.Begin(spec_);
  // Chunks that end within, at, and past what is there.
  ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_VALUES, values_, 300).ok());
  ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_BIAS, Bytes(bias_)).ok());
  ASSERT_TRUE(upload->Finish().ok());
  EXPECT_EQ(Bytes(Stored(core, "w").view()), values_);
}

TEST_F(ResumedUploadTest, AHashThatSomebodyElseGaveFalselyIsNotThisCallersError) {
  Core core(Options());
  {
    const auto upload = *core.catalog.Begin(spec_);
    pb::ContentChunk chunk;
    chunk.set_part(pb::CONTENT_PART_VALUES);
    chunk.set_data(std::string(500, 'x'));
    ASSERT_TRUE(upload->Append(chunk).ok());
  }
  const auto registered = [&] {
    const auto upload = *core.catalog.Begin(spec_);
    EXPECT_TRUE(AppendPart(*upload, pb::CONTENT_PART_VALUES, values_).ok());
    EXPECT_TRUE(AppendPart(*upload, pb::CONTENT_PART_BIAS, Bytes(bias_)).ok());
    return upload->Finish().status();
  };
  EXPECT_EQ(ReasonOf(registered()), reason::kContentSourceLost);
  EXPECT_TRUE(registered().ok());
  EXPECT_EQ(Held(core), 0);
}

TEST_F(ResumedUploadTest, IsForgottenInTimeAndWhenOthersNeedTheMemory) {
  {
    Core core(Options(absl::Milliseconds(30)));
    SendPart(core, 1000);
    for (int i = 0; i < 1000 && Held(core) > 0; ++i) absl::SleepFor(absl::Milliseconds(5));
    EXPECT_EQ(Held(core), 0);
    EXPECT_EQ((*core.catalog.Begin(spec_))->accepted().received_size(), 0);
  }
  Core core(Options());
  SendPart(core, 1000);
  const DenseMatrix large = RandomMatrix(DType::kF16, 230, 64, 0.5, 2);
  EXPECT_TRUE(core.Register("large", large.view()).ok());
  EXPECT_EQ(Held(core), 0);
  EXPECT_EQ((*core.catalog.Begin(spec_))->accepted().received_size(), 0);
  // Without a hash there is nothing to find it by.
  spec_.clear_content_xxh3();
  SendPart(core, 1000);
  EXPECT_EQ(Held(core), 0);
}

TEST(CatalogTest, WhatCannotFitIsRefusedBeforeTheFirstByte) {
  CoreOptions options;
  options.device_memory = 100'000;
  Core core(options);
  pb::LayerSpec spec;
  spec.set_name("w");
  spec.set_m(1000);
  spec.set_k(1000);
  spec.set_dtype(pb::DATA_TYPE_F16);
  spec.set_encoding(pb::SOURCE_ENCODING_DENSE);
  const absl::Status status = core.catalog.Begin(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "DEVICE_MEMORY");
  EXPECT_THAT(std::string(status.message()), HasSubstr("needed 2000000 bytes, free 100000 bytes, limit 100000 bytes"));
  EXPECT_EQ(core.device.budget().used(), 0u);
  // Pruned to 97 % it does fit: the estimate knows what the result will be.
  spec.mutable_magnitude()->set_sparsity(0.98);
  EXPECT_EQ(core.catalog.Begin(spec).status().code(),
            absl::StatusCode::kResourceExhausted);  // the mask alone is 128 kB
  spec.set_m(500);
  EXPECT_TRUE(core.catalog.Begin(spec).ok());

  options.device_memory = uint64_t{1} << 30;
  options.upload_memory = 1000;
  Core little_host(options);
  const absl::Status host = little_host.catalog.Begin(spec).status();
  EXPECT_EQ(host.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(host), "HOST_MEMORY");
  EXPECT_EQ(little_host.device.budget().used(), 0u);
}

TEST(CatalogTest, EstimateIsAnUpperBoundAndExactForKnownNonzeros) {
  Core core;
  int i = 0;
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    for (const auto& [m, k] :
         std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {1, 300}, {300, 1}, {513, 129}, {64, 64}}) {
      for (const double sparsity : {0.0, 0.3, 0.9, 1.0}) {
        const DenseMatrix w = RandomMatrix(dtype, m, k, sparsity, static_cast<uint32_t>(++i));
        const Encoded encoded = Encode(w.view());
        pb::LayerSpec spec = DenseSpec(absl::StrCat("w", i), w.view());
        spec.set_encoding(pb::SOURCE_ENCODING_CSR);
        spec.set_nnz(static_cast<int64_t>(encoded.cols.size()));
        const auto upload = *core.catalog.Begin(spec);
        ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_ROW_OFFSETS, Bytes(encoded.row_offsets)).ok());
        ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_COLUMN_INDICES, Bytes(encoded.cols)).ok());
        ASSERT_TRUE(AppendPart(*upload, pb::CONTENT_PART_VALUES, encoded.values).ok());
        const uint64_t estimate = upload->accepted().estimated_device_bytes();
        const auto layer = upload->Finish();
        ASSERT_TRUE(layer.ok()) << layer.status();
        EXPECT_EQ(layer->residency(0).bytes(), estimate) << m << "x" << k << " at " << sparsity;
      }
    }
  }
}

TEST(CatalogTest, VersionsCountUpAndFindPicksTheNewest) {
  Core core;
  const DenseMatrix w1 = RandomMatrix(DType::kF16, 16, 16, 0.5, 1);
  const DenseMatrix w2 = RandomMatrix(DType::kF16, 24, 16, 0.5, 2);
  ASSERT_TRUE(core.Register("w", w1.view()).ok());
  const uint64_t generation = core.catalog.generation();
  EXPECT_EQ(core.Register("w", w2.view())->version(), 2);
  EXPECT_NE(core.catalog.generation(), generation);
  EXPECT_EQ(core.Register("w", w2.view())->version(), 2);  // idempotent
  EXPECT_EQ((*core.catalog.Find("w", 0))->version(), 2);
  EXPECT_EQ((*core.catalog.Find("w", 1))->content().m, 16);
  EXPECT_EQ(core.catalog.Find("w", 3).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(core.catalog.Find("v", 0).status()), "LAYER_NOT_FOUND");
  ASSERT_TRUE(core.Unregister("w", 2).ok());
  EXPECT_EQ((*core.catalog.Find("w", 0))->version(), 1);
  EXPECT_EQ(core.Register("w", w2.view())->version(), 3);  // a number is not used twice
  pb::UnregisterLayerResponse response;
  ASSERT_TRUE(core.Unregister("w", 0, &response).ok());
  EXPECT_EQ(response.removed_versions(), 2);
  EXPECT_EQ(core.Unregister("w").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(core.device.budget().used(), 0u);
}

TEST(CatalogTest, LayersAreBounded) {
  CoreOptions options;
  options.max_layers = 2;
  Core core(options);
  ASSERT_TRUE(core.Register("a", RandomMatrix(DType::kF16, 4, 4, 0.5, 1).view()).ok());
  ASSERT_TRUE(core.Register("a", RandomMatrix(DType::kF16, 4, 4, 0.5, 2).view()).ok());
  const absl::Status status = core.Register("b", RandomMatrix(DType::kF16, 4, 4, 0.5, 3).view()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "TOO_MANY_LAYERS");
  ASSERT_TRUE(core.Unregister("a", 1).ok());
  EXPECT_TRUE(core.Register("b", RandomMatrix(DType::kF16, 4, 4, 0.5, 3).view()).ok());
}

TEST(CatalogTest, ListPagesInOrder) {
  Core core;
  for (const char* name : {"b/1", "a", "b/2", "c"}) {
    for (uint32_t seed = 1; seed <= 2; ++seed) {
      ASSERT_TRUE(core.Register(name, RandomMatrix(DType::kF16, 8, 8, 0.5, seed).view()).ok());
    }
  }
  std::vector<std::string> seen;
  pb::ListLayersRequest request;
  request.set_page_size(3);
  do {
    pb::ListLayersResponse page;
    ASSERT_TRUE(core.catalog.List(request, &page).ok());
    EXPECT_LE(page.layers_size(), 3);
    for (const auto& layer : page.layers()) {
      seen.push_back(absl::StrCat(layer.name(), ":", layer.version()));
      EXPECT_EQ(layer.sections_size(), 0);
    }
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  EXPECT_THAT(seen, ::testing::ElementsAre("a:2", "a:1", "b/1:2", "b/1:1", "b/2:2", "b/2:1", "c:2", "c:1"));

  pb::ListLayersRequest prefix;
  prefix.set_name_prefix("b/");
  pb::ListLayersResponse page;
  ASSERT_TRUE(core.catalog.List(prefix, &page).ok());
  EXPECT_EQ(page.layers_size(), 4);
  EXPECT_TRUE(page.next_page_token().empty());

  for (const char* token : {"x", "////", "djEvMS8", "djEvMC9h"}) {  // the last two: no name; version 0
    pb::ListLayersRequest bad;
    bad.set_page_token(token);
    EXPECT_EQ(FieldOf(core.catalog.List(bad, &page)), "page_token") << token;
  }
  pb::ListLayersRequest size;
  size.set_page_size(-1);
  EXPECT_EQ(FieldOf(core.catalog.List(size, &page)), "page_size");
  size.set_page_size(1001);
  EXPECT_EQ(FieldOf(core.catalog.List(size, &page)), "page_size");
}

TEST(CatalogTest, UnregisterWaitsForRequestsInFlight) {
  Core core;
  const DenseMatrix w = RandomMatrix(DType::kF16, 64, 64, 0.5, 1);
  const DenseMatrix x = RandomMatrix(DType::kF32, 2, 64, 0, 2);
  ASSERT_TRUE(core.Register("w", w.view()).ok());
  const pb::ExecuteRequest request = testing::MatmulRequest("w", x.view());
  core.device.Hold();
  pb::ExecuteResponse response;
  absl::Status executed;
  std::thread caller([&] { executed = core.Execute(request, &response); });
  core.device.AwaitRuns(1);
  std::atomic<bool> unregistered{false};
  std::thread remover([&] {
    EXPECT_TRUE(core.Unregister("w").ok());
    unregistered = true;
    EXPECT_EQ(core.device.budget().used(MemoryKind::kWeights), 0u);  // before it answers
  });
  // Out of sight at once, in memory until the request has ended.
  while (core.catalog.Find("w", 0).ok()) std::this_thread::yield();
  EXPECT_GT(core.device.budget().used(MemoryKind::kWeights), 0u);
  EXPECT_FALSE(unregistered);
  core.device.Release();
  remover.join();
  caller.join();
  ASSERT_TRUE(executed.ok()) << executed;
  EXPECT_TRUE(CompareToReference(testing::ViewOf(response.outputs(0).tensor()), ReferenceMatmul(w.view(), x.view()),
                                 DefaultTolerance(DType::kF32, 64))
                  .ok());
}

TEST(CatalogTest, ThousandCyclesLeaveMemoryWhereItWas) {
  const DenseMatrix a = RandomMatrix(DType::kF16, 192, 128, 0.5, 1);
  const DenseMatrix b = RandomMatrix(DType::kF16, 192, 128, 0.5, 2);
  CoreOptions options;
  options.device_memory = a.bytes() * 5 / 3;  // either fits, both do not
  Core core(options);
  const auto resident_pages = [] {
    std::ifstream statm("/proc/self/statm");
    int64_t size = 0;
    int64_t resident = 0;
    statm >> size >> resident;
    return resident;
  };
  int64_t early = 0;
  for (int i = 0; i < 1000; ++i) {
    const auto layer = core.Register("w", (i % 2 == 0 ? a : b).view());
    ASSERT_TRUE(layer.ok()) << i << layer.status();
    ASSERT_TRUE(core.Unregister("w").ok());
    ASSERT_EQ(core.device.budget().used(), 0u);
    if (i == 100) early = resident_pages();
  }
  EXPECT_EQ(Series(core.metrics, "spmmd_upload_bytes"), 0);
  EXPECT_EQ(Series(core.metrics, R"(spmmd_layer_bytes{format="BITMAP",layer="w"})"), std::nullopt);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LE(resident_pages(), early + early / 100 + 64);
#else
  (void)early;
#endif
}

}  // namespace
}  // namespace spmmd::server
