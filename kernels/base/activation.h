// The activation functions that a matmul may apply to its output, shared by every backend, with the double-precision
// definition that tests compare against.
#ifndef SPMMD_KERNELS_BASE_ACTIVATION_H_
#define SPMMD_KERNELS_BASE_ACTIVATION_H_

#include <cmath>
#include <cstdint>
#include <string_view>

namespace spmmd {

enum class Activation : uint8_t {
  kNone = 0,
  kRelu = 1,
  kGelu = 2,      // exact: x * Phi(x), by erf
  kGeluTanh = 3,  // the tanh approximation of GPT-2
  kSilu = 4,      // x * sigmoid(x)
};

// True for the five values above; a value read from a request must pass it before it is used.
constexpr bool IsValid(Activation activation) { return static_cast<uint8_t>(activation) <= 4; }

constexpr std::string_view Name(Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return "none";
    case Activation::kRelu:
      return "relu";
    case Activation::kGelu:
      return "gelu";
    case Activation::kGeluTanh:
      return "gelu_tanh";
    case Activation::kSilu:
      return "silu";
  }
  return "invalid";
}

// The definition, in double precision. NaN gives NaN for every activation, ReLU included.
inline double ActivateDouble(Activation activation, double x) {
  constexpr double kInvSqrt2 = 0.70710678118654752440;
  constexpr double kSqrt2OverPi = 0.79788456080286535588;
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < 0 ? 0.0 : x;
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x * kInvSqrt2);
    case Activation::kGeluTanh:
      return 0.5 * x * (1.0 + std::tanh(kSqrt2OverPi * (x + 0.044715 * x * x * x)));
    case Activation::kSilu:
      return x / (1.0 + std::exp(-x));
  }
  return x;
}

}  // namespace spmmd

#endif  // SPMMD_KERNELS_BASE_ACTIVATION_H_
