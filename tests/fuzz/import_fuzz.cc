// The importers of uploads (CSR, COO, both bitmaps, dense): whatever is accepted has at most the entries that came in.
#include <cstdlib>
#include <vector>

#include "kernels/base/thread_pool.h"
#include "kernels/format/import.h"
#include "tests/fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  spmmd::SetDefaultThreads(1);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using spmmd::Bytes;
  spmmd::fuzz::FuzzInput input(data, size);
  const int64_t encoding = input.Integer(0, 4);
  const auto dtype = static_cast<spmmd::DType>(input.Integer(0, 4));
  const int64_t m = input.Integer(0, 70);
  const int64_t k = input.Integer(0, 70);
  const size_t element = spmmd::IsValid(dtype) ? spmmd::SizeOf(dtype) : 2;
  // Part sizes are what they should be, give or take: most of the time the contents decide.
  const auto entries = static_cast<size_t>(input.Integer(0, 300));
  const auto take = [&](size_t bytes) {
    if (input.Integer(0, 49) == 49) bytes = static_cast<size_t>(input.Integer(0, static_cast<int64_t>(2 * bytes + 2)));
    return input.Bytes(bytes);
  };
  const auto bytes = [](const std::vector<uint8_t>& part) {
    return Bytes(reinterpret_cast<const std::byte*>(part.data()), part.size());
  };
  absl::StatusOr<spmmd::DenseMatrix> matrix = absl::InternalError("");
  switch (encoding) {
    case 0:
      matrix = spmmd::ImportDense(dtype, m, k, bytes(take(static_cast<size_t>(m * k) * element)));
      break;
    case 1: {
      const std::vector<uint8_t> offsets = take((static_cast<size_t>(m) + 1) * 8);
      const std::vector<uint8_t> columns = take(entries * 4);
      matrix = spmmd::ImportCsr(dtype, m, k, bytes(offsets), bytes(columns), bytes(take(entries * element)));
      break;
    }
    case 2: {
      const std::vector<uint8_t> rows = take(entries * 4);
      const std::vector<uint8_t> columns = take(entries * 4);
      matrix = spmmd::ImportCoo(dtype, m, k, bytes(rows), bytes(columns), bytes(take(entries * element)));
      break;
    }
    case 3: {
      const std::vector<uint8_t> bitmap = take(static_cast<size_t>((m * k + 7) / 8));
      matrix = spmmd::ImportBitmap(dtype, m, k, bytes(bitmap), bytes(take(entries * element)));
      break;
    }
    default: {
      const std::vector<uint8_t> bitmap = take(static_cast<size_t>(m * ((k + 7) / 8)));
      matrix = spmmd::ImportRowBitmap(dtype, m, k, bytes(bitmap), bytes(take(entries * element)));
      break;
    }
  }
  if (!matrix.ok()) {
    if (!absl::IsInvalidArgument(matrix.status())) std::abort();
    return 0;
  }
  if (matrix->rows() != m || matrix->cols() != k) std::abort();
  if (encoding != 0 && spmmd::ScanDense(matrix->view()).nnz > static_cast<int64_t>(entries) + 700) std::abort();
  return 0;
}
