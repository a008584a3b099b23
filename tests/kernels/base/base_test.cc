// Element types, buffers and the activations' definitions.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "gtest/gtest.h"
#include "kernels/base/activation.h"
#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"

namespace spmmd {
namespace {

TEST(DtypeTest, HalfRoundTripsThroughFloat) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float f16 = F16ToFloat(half);
    if (f16 == f16) {
      EXPECT_EQ(FloatToF16(f16), half);
    } else {
      EXPECT_EQ(FloatToF16(f16), half | 0x200);  // NaNs become quiet and keep their payload
    }
    const float bf16 = Bf16ToFloat(half);
    if (bf16 == bf16) {
      EXPECT_EQ(FloatToBf16(bf16), half);
    } else {
      EXPECT_EQ(FloatToBf16(bf16), half | 0x40);
    }
  }
}

TEST(DtypeTest, F16Values) {
  EXPECT_EQ(F16ToFloat(0x3c00), 1.0f);
  EXPECT_EQ(F16ToFloat(0xc000), -2.0f);
  EXPECT_EQ(F16ToFloat(0x7bff), 65504.0f);
  EXPECT_EQ(F16ToFloat(0x0001), 0x1p-24f);
  EXPECT_EQ(F16ToFloat(0x03ff), 0x1p-14f - 0x1p-24f);
  EXPECT_TRUE(std::isinf(F16ToFloat(0xfc00)) && F16ToFloat(0xfc00) < 0);
  EXPECT_TRUE(std::signbit(F16ToFloat(0x8000)));
}

TEST(DtypeTest, NarrowingRoundsToNearestEven) {
  // Halfway between two neighbours goes to the even one, in the normal and in the subnormal range.
  EXPECT_EQ(FloatToF16(1.0f + 0x1p-11f), 0x3c00);
  EXPECT_EQ(FloatToF16(1.0f + 0x3p-11f), 0x3c02);
  EXPECT_EQ(FloatToF16(std::nextafter(1.0f + 0x1p-11f, 2.0f)), 0x3c01);
  EXPECT_EQ(FloatToF16(0x1p-25f), 0x0000);
  EXPECT_EQ(FloatToF16(0x3p-25f), 0x0002);
  EXPECT_EQ(FloatToF16(0x1.8p-25f), 0x0001);
  EXPECT_EQ(FloatToF16(0x1p-14f - 0x1p-26f), 0x0400);  // a subnormal rounds up into the normal range
  EXPECT_EQ(FloatToF16(65519.996f), 0x7bff);
  EXPECT_EQ(FloatToF16(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToF16(-1e30f), 0xfc00);
  EXPECT_EQ(FloatToBf16(1.0f + 0x1p-8f), 0x3f80);
  EXPECT_EQ(FloatToBf16(1.0f + 0x3p-8f), 0x3f82);
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::max()), 0x7f80);
}

TEST(BufferTest, AlignedZeroedAndReadableBehindTheEnd) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{4097}, size_t{5} << 20}) {
    const Buffer buffer = *Buffer::Allocate(bytes);
    EXPECT_EQ(buffer.size(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % Buffer::kAlignment, 0u);
    EXPECT_TRUE(std::all_of(buffer.data(), buffer.data() + bytes + Buffer::kAlignment,
                            [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST(BufferTest, CopiesShareTheMemory) {
  Buffer first = *Buffer::Allocate(100);
  const Buffer second = first;
  first.MutableAs<uint32_t>()[3] = 7;
  EXPECT_EQ(second.As<uint32_t>()[3], 7u);
  EXPECT_EQ(second.As<uint32_t>().size(), 25u);
  first = Buffer();
  EXPECT_EQ(second.As<uint32_t>()[3], 7u);
}

TEST(BufferTest, BorrowedKeepsTheOwnerAndCannotBeWritten) {
  auto owner = std::make_shared<Buffer>(*Buffer::Allocate(256));
  const std::weak_ptr<Buffer> watch = owner;
  Buffer borrowed = Buffer::Borrow({owner->data(), 128}, owner);
  owner.reset();
  EXPECT_FALSE(watch.expired());
  EXPECT_EQ(borrowed.size(), 128u);
  EXPECT_EQ(borrowed.mutable_data(), nullptr);
  EXPECT_TRUE(borrowed.MutableAs<float>().empty());
  borrowed = Buffer();
  EXPECT_TRUE(watch.expired());
}

TEST(BufferTest, RefusesWhatNoHostHas) {
  const absl::Status status = Buffer::Allocate(std::numeric_limits<size_t>::max() - 3).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
}

TEST(ActivationTest, Values) {
  EXPECT_EQ(ActivateDouble(Activation::kNone, -3.0), -3.0);
  EXPECT_EQ(ActivateDouble(Activation::kRelu, -3.0), 0.0);
  EXPECT_EQ(ActivateDouble(Activation::kRelu, 3.0), 3.0);
  // torch.nn.functional: gelu(1.), gelu(1., approximate="tanh"), silu(1.).
  EXPECT_NEAR(ActivateDouble(Activation::kGelu, 1.0), 0.8413447460685429, 1e-15);
  EXPECT_NEAR(ActivateDouble(Activation::kGeluTanh, 1.0), 0.8411919906082768, 1e-12);
  EXPECT_NEAR(ActivateDouble(Activation::kSilu, 1.0), 0.7310585786300049, 1e-15);
  for (int i = 0; i <= 4; ++i) {
    EXPECT_TRUE(IsValid(static_cast<Activation>(i)));
    EXPECT_TRUE(std::isnan(ActivateDouble(static_cast<Activation>(i), NAN)));
  }
  EXPECT_FALSE(IsValid(static_cast<Activation>(5)));
}

}  // namespace
}  // namespace spmmd
