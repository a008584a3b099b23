// One multiplication of dense activations on the GPU, against float64: its operands on the device at any stride and
// offset, outputs poisoned before and fenced around.
#ifndef SPMMD_TESTS_KERNELS_CUDA_DENSE_CALL_H_
#define SPMMD_TESTS_KERNELS_CUDA_DENSE_CALL_H_

#include <algorithm>
#include <random>
#include <vector>

#include "kernels/format/reference.h"
#include "tests/kernels/cuda/gpu.h"

namespace spmmd::gpu_test {

struct Options {
  DType x_dtype = DType::kF16;
  DType y_dtype = DType::kF16;
  Activation activation = Activation::kNone;
  bool bias = false;
  int64_t x_pad = 0;     // elements added to X's row stride
  int64_t x_offset = 0;  // elements by which X's first row is shifted
  int64_t y_pad = 0;
  int64_t y_offset = 0;
  uint32_t flags = 0;
  int launches = 1;
};

inline void CheckOutput(const std::vector<std::byte>& y, int64_t n, int64_t m, const Options& options,
                        const Reference& reference, int64_t k) {
  const size_t size = SizeOf(options.y_dtype);
  const int64_t stride = m + options.y_pad;
  const DenseView view{y.data() + static_cast<size_t>(options.y_offset) * size, options.y_dtype, n, m, stride};
  const absl::Status status = CompareToReference(view, reference, DefaultTolerance(options.y_dtype, k));
  EXPECT_TRUE(status.ok()) << status;
  // Nothing outside the n x m outputs was touched.
  std::vector<bool> inside(y.size());
  for (int64_t r = 0; r < n; ++r) {
    const size_t begin = static_cast<size_t>(options.y_offset + r * stride) * size;
    std::fill_n(inside.begin() + static_cast<int64_t>(begin), static_cast<size_t>(m) * size, true);
  }
  for (size_t i = 0; i < y.size(); ++i) {
    if (!inside[i] && y[i] != std::byte{0xff}) {
      ADD_FAILURE() << "byte " << i << " outside the output was written";
      return;
    }
  }
}

class DenseCall {
 public:
  // x [n, K] of options.x_dtype; the bias, if any, is made from `seed`.
  DenseCall(const DenseMatrix& w, const DenseMatrix& x, const Options& options, uint32_t seed)
      : options_(options),
        n_(x.rows()),
        m_(w.rows()),
        k_(w.cols()),
        bias_(MakeBias(options.bias ? m_ : 0, seed + 1)),
        reference_(MakeReference(w, x, bias_, options.activation)),
        x_device_(static_cast<size_t>(options.x_offset + n_ * (k_ + options.x_pad)) * SizeOf(options.x_dtype)),
        y_device_(static_cast<size_t>(options.y_offset + n_ * (m_ + options.y_pad) + 64) * SizeOf(options.y_dtype)),
        bias_device_(bias_.size() * 4) {
    const size_t x_size = SizeOf(options.x_dtype);
    call.n = n_;
    call.x_stride = k_ + options.x_pad;
    x_device_.Fill(0xff);  // NaN wherever no activation is
    for (int64_t r = 0; r < n_; ++r) {
      x_device_.Upload(x.view().row(r), static_cast<size_t>(k_) * x_size,
                       static_cast<size_t>(options.x_offset + r * call.x_stride) * x_size);
    }
    if (options.bias) bias_device_.Upload(bias_.data(), bias_.size() * 4);
    call.x = x_device_.data() + static_cast<size_t>(options.x_offset) * x_size;
    call.x_dtype = static_cast<int32_t>(options.x_dtype);
    call.y_dtype = static_cast<int32_t>(options.y_dtype);
    call.y = y_device_.data() + static_cast<size_t>(options.y_offset) * SizeOf(options.y_dtype);
    call.y_stride = m_ + options.y_pad;
    call.bias = options.bias ? reinterpret_cast<const float*>(bias_device_.data()) : nullptr;
    call.activation = static_cast<int32_t>(options.activation);
    call.flags = options.flags;
  }

  // options.launches launches, each right and all equal.
  void Run(const spmmd_cuda_layer* layer, int32_t kernel, Workspace& workspace) {
    const Gpu& gpu = Gpu::Get();
    uint64_t bytes = 0;
    GPU_OK(gpu.cuda->workspace_bytes(layer, kernel, &call, &bytes));
    workspace.Reserve(bytes);
    call.workspace = workspace.data();
    call.workspace_bytes = bytes;
    std::vector<std::byte> first;
    for (int launch = 0; launch < options_.launches; ++launch) {
      y_device_.Fill(0xff);
      GPU_OK(gpu.cuda->launch(layer, kernel, &call, gpu.stream));
      const std::vector<std::byte> y = y_device_.Download();
      CheckOutput(y, n_, m_, options_, reference_, k_);
      if (launch == 0) first = y;
      EXPECT_EQ(first, y) << "launch " << launch << " differs from the first";
      if (::testing::Test::HasFailure()) return;
    }
  }

  spmmd_cuda_matmul call = {};

 private:
  static std::vector<float> MakeBias(int64_t count, uint32_t seed) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    std::vector<float> bias;
    for (int64_t i = 0; i < count; ++i) bias.push_back(normal(rng));
    return bias;
  }
  // The multiplication is of x rounded to the weights' dtype.
  static Reference MakeReference(const DenseMatrix& w, const DenseMatrix& x, const std::vector<float>& bias,
                                 Activation activation) {
    DenseMatrix rounded = *DenseMatrix::Create(w.dtype(), x.rows(), x.cols());
    EXPECT_TRUE(ConvertDense(x.view(), rounded.mutable_view()).ok());
    return ReferenceMatmul(w.view(), rounded.view(), bias, activation);
  }

  const Options options_;
  const int64_t n_, m_, k_;
  const std::vector<float> bias_;
  const Reference reference_;
  DeviceBuffer x_device_;
  DeviceBuffer y_device_;
  DeviceBuffer bias_device_;
};

}  // namespace spmmd::gpu_test

#endif  // SPMMD_TESTS_KERNELS_CUDA_DENSE_CALL_H_
