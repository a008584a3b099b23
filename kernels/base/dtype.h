// Element types of weights and activations, and their scalar conversions.
#ifndef SPMMD_KERNELS_BASE_DTYPE_H_
#define SPMMD_KERNELS_BASE_DTYPE_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace spmmd {

// IEEE binary16, bfloat16 (the upper half of binary32) and IEEE binary32; little-endian in memory. The numeric
// values are stored in packed files: never renumber.
enum class DType : uint8_t { kF16 = 1, kBf16 = 2, kF32 = 3 };

// True for the three values above; a value read from a file or a request must pass it before it is used.
constexpr bool IsValid(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBf16 || dtype == DType::kF32; }

// Bytes per element: 2 or 4.
constexpr size_t SizeOf(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// "fp16", "bf16", "fp32": the spelling of flags, JSON and CSV.
constexpr std::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return "fp16";
    case DType::kBf16:
      return "bf16";
    case DType::kF32:
      return "fp32";
  }
  return "invalid";
}

// Exact widening of a bfloat16 bit pattern.
constexpr float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Round to nearest even; NaN stays NaN (quiet).
constexpr uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Exact widening of a binary16 bit pattern, subnormals, infinities and NaNs included.
constexpr float F16ToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  // Subnormal: mantissa * 2^-24, exact in binary32.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

// Round to nearest even; overflow gives infinity, NaN stays NaN (quiet).
constexpr uint16_t FloatToF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to >= 65520: infinity
  if (magnitude < 0x38800000u) {
    // Below the smallest normal 2^-14: adding 0.5 aligns the last kept bit (2^-24) to binary32's last bit, so the
    // hardware's own round-to-nearest-even does the rounding.
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(aligned) - std::bit_cast<uint32_t>(0.5f)));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace spmmd

#endif  // SPMMD_KERNELS_BASE_DTYPE_H_
