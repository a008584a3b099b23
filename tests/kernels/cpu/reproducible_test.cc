// What bitmap_kernels.h promises: a row's bits depend neither on batch mates, nor on the number of threads, nor on
// whether x is dense or sparse.
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/matmul.h"
#include "kernels/format/bitmap.h"
#include "tests/kernels/cpu/operands.h"

namespace spmmd::testing {
namespace {

std::string Product(const PackedLayer& layer, const DenseView& x, ThreadPool& pool) {
  Strided y(DType::kF32, x.rows, layer.m, 2);
  EXPECT_TRUE(cpu::Matmul(layer, x, {}, y.view(), pool).ok());
  return RowBytes(y.const_view());
}

TEST(ReproducibleTest, SameBitsForAnyBatch) {
  for (const DType dtype : kAllDtypes) {
    const DenseMatrix w = Weights(dtype, 210, 700, 0.5, 1);
    const PackedLayer layer = *Pack(Format::kBitmap, w.view());
    const Strided x = Tokens(DType::kF32, 61, 700, 2);
    std::string alone;
    for (int64_t n = 0; n < 61; ++n) {
      DenseView one = x.const_view();
      one.data = x.const_view().row(n);
      one.rows = 1;
      alone += Product(layer, one, DefaultThreadPool());
    }
    for (int64_t n = 1; n <= 61; n += n < 14 ? 1 : 11) {
      DenseView some = x.const_view();
      some.rows = n;
      EXPECT_EQ(Product(layer, some, DefaultThreadPool()), alone.substr(0, static_cast<size_t>(n * 210) * 4))
          << Name(dtype) << " N=" << n;
    }
  }
}

TEST(ReproducibleTest, SameBitsForAnyNumberOfThreads) {
  for (const Format format : {Format::kBitmap, Format::kDense}) {
    const DenseMatrix w = Weights(DType::kBf16, 4200, 300, 0.5, 3);  // two row blocks: both ways of splitting
    const PackedLayer layer = *Pack(format, w.view());
    for (const int64_t n : {1, 7}) {
      const Strided x = Tokens(DType::kF32, n, 300, 4);
      ThreadPool single(1);
      const std::string expected = Product(layer, x.const_view(), single);
      for (const int threads : {2, 3, 8}) {
        ThreadPool pool(threads);
        EXPECT_EQ(Product(layer, x.const_view(), pool), expected) << Name(format) << " threads " << threads;
      }
    }
  }
}

// The more threads, the more tasks, down to a few strips each: also of layers with fewer strips than that.
TEST(ReproducibleTest, SameBitsForAnyCut) {
  for (const auto& [m, k] : {std::pair<int64_t, int64_t>{4096 + 130, 530}, {1536, 384}, {320, 2000}, {4096, 256}}) {
    for (const DType dtype : kAllDtypes) {
      const PackedLayer layer = *Pack(Format::kBitmap, Weights(dtype, m, k, 0.6, 7).view());
      const Strided x = Tokens(DType::kF32, 6, k, 8);
      const SparseOperand sparse = SparseTokens(k, 0.5, 9);
      std::vector<std::string> expected;
      for (const int threads : {1, 3, 16, 64}) {
        ThreadPool pool(threads);
        Strided y(DType::kF32, 1, m, 0);
        ASSERT_TRUE(cpu::MatmulSparse(layer, sparse.view(), {}, y.view(), pool).ok());
        DenseView one = x.const_view();
        one.rows = 1;
        const std::vector<std::string> got = {Product(layer, one, pool), Product(layer, x.const_view(), pool),
                                              RowBytes(y.const_view())};
        if (threads == 1) expected = got;
        EXPECT_TRUE(got == expected) << m << "x" << k << " " << Name(dtype) << " threads " << threads;
      }
    }
  }
}

TEST(ReproducibleTest, SameBitsForSparseX) {
  for (const DType dtype : kAllDtypes) {
    const DenseMatrix w = Weights(dtype, 210, 700, 0.5, 5);
    const PackedLayer layer = *Pack(Format::kBitmap, w.view());
    const SparseOperand sparse = SparseTokens(700, 0.4, 6);
    std::vector<float> x(700);
    for (size_t i = 0; i < sparse.indices.size(); ++i) x[sparse.indices[i]] = sparse.values[i];
    Strided y(DType::kF32, 1, 210, 0);
    ASSERT_TRUE(cpu::MatmulSparse(layer, sparse.view(), {}, y.view(), DefaultThreadPool()).ok());
    const DenseView view{reinterpret_cast<const std::byte*>(x.data()), DType::kF32, 1, 700, 700};
    EXPECT_EQ(RowBytes(y.const_view()), Product(layer, view, DefaultThreadPool())) << Name(dtype);
  }
}

// Every exponent from `lowest` on, 8 significant bits.
float AnyBf16(std::mt19937& random, int lowest, int count) {
  const auto exponent = static_cast<uint16_t>(127 + lowest + static_cast<int>(random() % static_cast<uint32_t>(count)));
  const auto bits = static_cast<uint16_t>((random() & 0x807fu) | static_cast<uint32_t>(exponent << 7));
  return Bf16ToFloat(bits);
}

TEST(ReproducibleTest, SameBitsForBothBf16Decoders) {
  std::mt19937 random(9);
  std::uniform_int_distribution<int> size(1, 300);
  for (int i = 0; i < 40; ++i) {
    const int64_t m = size(random), k = i % 8 == 0 ? 600 : size(random);
    // Moderate values that cancel, or everything down to the smallest that kBf16Dot takes.
    const bool wide = i % 2 == 0;
    DenseMatrix w = Weights(DType::kBf16, m, k, i % 3 == 0 ? 0.3 : 0.6, static_cast<uint64_t>(i));
    if (wide) {
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t c = 0; c < k; ++c) {
          if (random() % 2 == 0) StoreValue(w.mutable_view(), r, c, AnyBf16(random, -48, 60));
        }
      }
    }
    const PackedLayer layer = *Pack(Format::kBitmap, w.view());
    ASSERT_EQ(layer.params[bitmap::kNoTinyParam], 1);
    PackedLayer general = layer;
    general.params[bitmap::kNoTinyParam] = 0;
    const int64_t n = 1 + i % 20;
    Strided x = Tokens(DType::kBf16, n, k, static_cast<uint64_t>(i));
    if (wide) {
      for (int64_t r = 0; r < n; ++r) {
        for (int64_t c = 0; c < k; ++c) {
          StoreValue(x.view(), r, c, random() % 4 == 0 ? 0.0f : AnyBf16(random, -64, 90));
        }
      }
    }
    EXPECT_EQ(Product(layer, x.const_view(), DefaultThreadPool()),
              Product(general, x.const_view(), DefaultThreadPool()))
        << "M=" << m << " K=" << k << " N=" << n;
    SparseOperand sparse;
    for (int64_t c = 0; c < k; ++c) {
      if (random() % 3 == 0) continue;
      sparse.indices.push_back(static_cast<uint32_t>(c));
      sparse.values.push_back(AnyBf16(random, wide ? -64 : -4, 8));
    }
    Strided y(DType::kF32, 1, m, 0), general_y(DType::kF32, 1, m, 0);
    ASSERT_TRUE(cpu::MatmulSparse(layer, sparse.view(), {}, y.view(), DefaultThreadPool()).ok());
    ASSERT_TRUE(cpu::MatmulSparse(general, sparse.view(), {}, general_y.view(), DefaultThreadPool()).ok());
    EXPECT_EQ(RowBytes(y.const_view()), RowBytes(general_y.const_view())) << "M=" << m << " K=" << k;
  }
}

TEST(ReproducibleTest, SameBitsForBothFp16Decoders) {
  const DenseMatrix w = Weights(DType::kF16, 130, 90, 0.5, 7);
  const PackedLayer layer = *Pack(Format::kBitmap, w.view());
  Strided x = Tokens(DType::kF32, 2, 90, 8);
  DenseView first = x.const_view();
  first.rows = 1;
  const std::string expected = Product(layer, first, DefaultThreadPool());
  StoreValue(x.view(), 1, 5, 1e30f);  // the batch mate forces the general decoder
  EXPECT_EQ(Product(layer, x.const_view(), DefaultThreadPool()).substr(0, 130 * 4), expected);
}

TEST(ReproducibleTest, ConcurrentCallers) {
  const DenseMatrix w = Weights(DType::kF16, 300, 200, 0.5, 9);
  const PackedLayer layer = *Pack(Format::kBitmap, w.view());
  const Strided x = Tokens(DType::kF32, 3, 200, 10);
  ThreadPool pool(3);
  const std::string expected = Product(layer, x.const_view(), pool);
  std::vector<std::thread> callers;
  std::vector<int> wrong(4);
  for (size_t t = 0; t < wrong.size(); ++t) {
    callers.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) wrong[t] += Product(layer, x.const_view(), pool) == expected ? 0 : 1;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

}  // namespace
}  // namespace spmmd::testing
