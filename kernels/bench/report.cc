#include "kernels/bench/report.h"

#include "absl/strings/str_format.h"

namespace spmmd::bench {

std::string CsvHeader() {
  return "op,format,kernel,dtype,M,K,N,sparsity,activation_sparsity,us_p50,us_p10,us_p90,bytes,GBps,ceiling_pct,"
         "dense_us,ratio_vs_dense,rel_error,x_dtype,ceiling_GBps,own_spmv_us";
}

std::string CsvLine(const Row& row) {
  return absl::StrFormat("%s,%s,%s,%s,%d,%d,%d,%.4f,%.4f,%.2f,%.2f,%.2f,%d,%.2f,%.1f,%.2f,%.3f,%.3g,%s,%.1f,%.2f",
                         row.op, row.format, row.kernel, row.dtype, row.m, row.k, row.n, row.sparsity,
                         row.activation_sparsity, row.us_p50, row.us_p10, row.us_p90, row.bytes, row.gbps,
                         row.ceiling_pct, row.dense_us, row.dense_us / row.us_p50, row.rel_error, row.x_dtype,
                         row.ceiling_gbps, row.own_spmv_us);
}

void WriteMarkdown(std::FILE* out, const std::vector<std::string>& notes, const std::vector<Row>& rows) {
  absl::FPrintF(out, "# spmm_bench\n\n");
  for (const std::string& note : notes) absl::FPrintF(out, "- %s\n", note);
  absl::FPrintF(
      out,
      "\n| op | x | M x K | N | W zeros | x zeros | format | kernel | bytes vs dense | median us (p10-p90) | GB/s (of "
      "ceiling) | dense us | ratio vs dense | vs own SpMV | rel. error |\n");
  absl::FPrintF(out, "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
  for (const Row& row : rows) {
    const std::string own =
        row.own_spmv_us > 0 ? absl::StrFormat("%.2fx", row.own_spmv_us / row.us_p50) : std::string("-");
    absl::FPrintF(out,
                  "| %s %s | %s | %dx%d | %d | %.0f %% | %.0f %% | %s | %s | %.1f %% | %.1f (%.1f-%.1f) | %.1f (%.0f "
                  "%% of %.1f) | %.1f | "
                  "%.2fx | %s | %.1e |\n",
                  row.op, row.dtype, row.x_dtype, row.m, row.k, row.n, 100 * row.sparsity,
                  100 * row.activation_sparsity, row.format, row.kernel, 100 * row.packed_share, row.us_p50, row.us_p10,
                  row.us_p90, row.gbps, row.ceiling_pct, row.ceiling_gbps, row.dense_us, row.dense_us / row.us_p50, own,
                  row.rel_error);
  }
}

}  // namespace spmmd::bench
