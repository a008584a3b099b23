// Element-wise steps of a program on the CPU.
#ifndef SPMMD_SERVER_DEVICE_ELEMENTWISE_H_
#define SPMMD_SERVER_DEVICE_ELEMENTWISE_H_

#include "kernels/base/activation.h"
#include "kernels/base/thread_pool.h"
#include "kernels/format/dense.h"

namespace spmmd::server {

enum class ElementwiseOp : uint8_t { kAdd, kMul };

// y = activation(left op right), computed in fp32, element by element; all three have the same shape and any dtypes,
// y's elements rounded to nearest even. `y` may be `left` or `right` when their dtypes are equal.
void Elementwise(ElementwiseOp op, Activation activation, const DenseView& left, const DenseView& right,
                 const MutableDenseView& y, ThreadPool& pool);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_DEVICE_ELEMENTWISE_H_
