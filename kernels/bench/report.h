// One measured configuration, and the tables made of many: the CSV of the contract (design, section 6) and a Markdown
// summary.
#ifndef SPMMD_KERNELS_BENCH_REPORT_H_
#define SPMMD_KERNELS_BENCH_REPORT_H_

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace spmmd::bench {

struct Row {
  std::string op;      // spmm, spmv, spmspv
  std::string format;  // BITMAP, ...
  std::string kernel;
  std::string dtype;  // of the stored weights
  int64_t m = 0;
  int64_t k = 0;
  int64_t n = 0;
  double sparsity = 0;             // measured share of zeros in W
  double activation_sparsity = 0;  // share of zeros in x; 0 unless op is spmspv
  double us_p50 = 0;
  double us_p10 = 0;
  double us_p90 = 0;
  int64_t bytes = 0;       // what one call must read and write
  double gbps = 0;         // bytes / us_p50
  double ceiling_pct = 0;  // gbps in percent of the read bandwidth measured in the same run
  double dense_us = 0;     // median of the dense baseline, measured turn by turn with the row's own calls
  double rel_error = 0;    // max |y - ref| / sum|w||x| against double precision
  // Behind the contract's columns.
  std::string x_dtype;      // what x came as; which kernel runs can depend on it
  double ceiling_gbps = 0;  // the read bandwidth that ceiling_pct refers to
  double own_spmv_us = 0;   // spmspv only: our own SpMV on the same layer, turn by turn
  // Not in the CSV.
  double packed_share = 0;  // packed bytes / bytes of the dense matrix in the same dtype
};

std::string CsvHeader();
std::string CsvLine(const Row& row);

// `notes` are printed as a list above the table.
void WriteMarkdown(std::FILE* out, const std::vector<std::string>& notes, const std::vector<Row>& rows);

}  // namespace spmmd::bench

#endif  // SPMMD_KERNELS_BENCH_REPORT_H_
