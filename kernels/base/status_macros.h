// Early return on an absl::Status error. Abseil's own macros are not part of its public release.
#ifndef SPMMD_KERNELS_BASE_STATUS_MACROS_H_
#define SPMMD_KERNELS_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define SPMMD_RETURN_IF_ERROR(expr)                                 \
  do {                                                              \
    if (::absl::Status spmmd_status = (expr); !spmmd_status.ok()) { \
      return spmmd_status;                                          \
    }                                                               \
  } while (false)

#define SPMMD_CONCAT_INNER(a, b) a##b
#define SPMMD_CONCAT(a, b) SPMMD_CONCAT_INNER(a, b)

// SPMMD_ASSIGN_OR_RETURN(auto x, MakeX());
#define SPMMD_ASSIGN_OR_RETURN(lhs, expr) \
  SPMMD_ASSIGN_OR_RETURN_IMPL(SPMMD_CONCAT(spmmd_status_or_, __LINE__), lhs, expr)
#define SPMMD_ASSIGN_OR_RETURN_IMPL(result, lhs, expr) \
  auto result = (expr);                                \
  if (!result.ok()) {                                  \
    return std::move(result).status();                 \
  }                                                    \
  lhs = *std::move(result)

#endif  // SPMMD_KERNELS_BASE_STATUS_MACROS_H_
