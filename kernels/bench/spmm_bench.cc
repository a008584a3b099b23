// spmm_bench: sparse kernels beside the dense baseline, as CSV and Markdown (design, section 6).
//
//   spmm_bench --backend=cpu --op=spmv --dtype=bf16 --shapes=4096x4096,11008x4096 --sparsity=0.5,0.7 --csv=spmv.csv
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/thread_pool.h"
#include "kernels/bench/cpu_bench.h"
#include "kernels/bench/cuda_spmm.h"
#include "kernels/bench/report.h"

namespace spmmd::bench {
namespace {

struct Flags {
  std::string backend = "cpu";
  std::string mask = "uniform";
  std::string dtype = "fp16";
  double skew_sigma = 1.0;
  int threads = 0;
  std::vector<std::string> x_dtypes;
  std::vector<std::string> formats;
  std::vector<std::string> shapes;
  std::string csv;
  std::string markdown;
  BenchOptions bench;
};

// "4096x11008" -> {4096, 11008}.
absl::StatusOr<std::pair<int64_t, int64_t>> ParseShape(const std::string& text) {
  const size_t x = text.find('x');
  std::pair<int64_t, int64_t> shape;
  const char* end = text.data() + text.size();
  if (x != std::string::npos) {
    const auto m = std::from_chars(text.data(), text.data() + x, shape.first);
    const auto k = std::from_chars(text.data() + x + 1, end, shape.second);
    if (m.ec == std::errc() && m.ptr == text.data() + x && k.ec == std::errc() && k.ptr == end) {
      if (absl::Status status = CheckShape(shape.first, shape.second); !status.ok()) return status;
      return shape;
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("shapes: '", text, "' is not MxK"));
}

DType DTypeOf(const std::string& name) {
  return name == "fp16" ? DType::kF16 : name == "bf16" ? DType::kBf16 : DType::kF32;
}

absl::Status Complete(Flags& flags) {
  BenchOptions& bench = flags.bench;
  bench.dtype = DTypeOf(flags.dtype);
  for (const std::string& name : flags.x_dtypes) bench.x_dtypes.push_back(DTypeOf(name));
  if (bench.x_dtypes.empty()) {
    bench.x_dtypes = {DType::kF32};
    if (bench.dtype == DType::kBf16) bench.x_dtypes.push_back(DType::kBf16);  // a path of its own
  }
  bench.mask.sigma = flags.mask == "skewed" ? flags.skew_sigma : 0.0;
  bench.mask.two_four = flags.mask == "2:4";
  for (const std::string& text : flags.shapes) {
    absl::StatusOr<std::pair<int64_t, int64_t>> shape = ParseShape(text);
    if (!shape.ok()) return shape.status();
    bench.shapes.push_back(*shape);
  }
  for (const std::string& text : flags.formats) {
    const std::optional<Format> format = ParseFormat(text);
    if (!format.has_value()) return absl::InvalidArgumentError(absl::StrCat("formats: '", text, "' is unknown"));
    bench.formats.push_back(*format);
  }
  return absl::OkStatus();
}

absl::Status Run(const Flags& flags, std::FILE* csv, std::vector<Row>* rows) {
  const auto emit = [&](const Row& row) {
    if (csv != nullptr) {
      absl::FPrintF(csv, "%s\n", CsvLine(row));
      std::fflush(csv);
    }
    rows->push_back(row);
  };
  if (flags.backend == "cpu") return RunCpu(flags.bench, emit);
  if (flags.bench.op == "spmm") return RunCudaSpmm(flags.bench, emit);
  return absl::UnimplementedError("op: --backend=cuda measures spmm; spmv_cuda_bench measures single tokens");
}

int Main(int argc, char** argv) {
  CLI::App app("Sparse kernels beside the dense baseline, turn by turn in one process.");
  Flags flags;
  flags.shapes = {"4096x4096", "11008x4096", "4096x11008"};
  flags.formats = {"BITMAP"};
  flags.bench.tokens = {1, 2, 4, 8, 16, 32};
  flags.bench.sparsity = {0.5, 0.7};
  flags.bench.activation_sparsity = {0.5};
  app.add_option("--backend", flags.backend, "cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--op", flags.bench.op, "spmm, spmv or spmspv")
      ->check(CLI::IsMember({"spmm", "spmv", "spmspv"}))
      ->capture_default_str();
  app.add_option("--dtype", flags.dtype, "stored weights: fp16, bf16 or fp32")
      ->check(CLI::IsMember({"fp16", "bf16", "fp32"}))
      ->capture_default_str();
  app.add_option("--x-dtype", flags.x_dtypes,
                 "cpu: what x comes as; by default fp32, and bf16 too when the weights are")
      ->delimiter(',')
      ->check(CLI::IsMember({"fp16", "bf16", "fp32"}));
  app.add_option("--mask", flags.mask, "uniform, skewed (log-normal column scales in the pruning score) or 2:4")
      ->check(CLI::IsMember({"uniform", "skewed", "2:4"}))
      ->capture_default_str();
  app.add_option("--skew-sigma", flags.skew_sigma, "sigma of --mask=skewed")
      ->check(CLI::Range(0.0, 4.0))
      ->capture_default_str();
  app.add_option("--formats", flags.formats, "formats, e.g. BITMAP,DENSE")->delimiter(',')->capture_default_str();
  app.add_option("--shapes", flags.shapes, "MxK,...")->delimiter(',')->capture_default_str();
  app.add_option("--tokens", flags.bench.tokens, "values of N for spmm")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--sparsity", flags.bench.sparsity, "shares of zeros in W")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--activation-sparsity", flags.bench.activation_sparsity, "shares of zeros in x for spmspv")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--csv", flags.csv, "file for the CSV; '-' or nothing for stdout");
  app.add_option("--markdown", flags.markdown, "file for a Markdown summary");
  app.add_option("--rounds", flags.bench.rounds, "turns of either side")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app.add_option("--calls", flags.bench.calls, "timed calls a turn")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app.add_flag("--auto", flags.bench.automatic,
               "cuda: a row AUTO, what dispatch takes for a BITMAP layer with a dense copy after measuring its shape");
  app.add_option("--variants", flags.bench.variants, "cuda: also this many internal variants of each kernel")
      ->check(CLI::Range(0, 14))
      ->capture_default_str();
  app.add_option("--threads", flags.threads, "our threads, 0 for all cores (OpenBLAS has OPENBLAS_NUM_THREADS)")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  app.add_option("--seed", flags.bench.seed)->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  if (const absl::Status status = Complete(flags); !status.ok()) {
    absl::FPrintF(stderr, "spmm_bench: %s\n", std::string(status.message()));
    return 2;
  }
  SetDefaultThreads(flags.threads);
  const bool to_stdout = flags.csv.empty() || flags.csv == "-";
  std::FILE* csv = to_stdout ? stdout : std::fopen(flags.csv.c_str(), "w");
  if (csv == nullptr) {
    absl::FPrintF(stderr, "spmm_bench: csv: cannot write %s\n", flags.csv);
    return 2;
  }
  absl::FPrintF(csv, "%s\n", CsvHeader());
  std::vector<Row> rows;
  const absl::Status status = Run(flags, csv, &rows);
  if (!to_stdout) std::fclose(csv);
  if (!status.ok()) {
    absl::FPrintF(stderr, "spmm_bench: %s\n", std::string(status.message()));
    return 1;
  }
  if (!flags.markdown.empty()) {
    std::FILE* markdown = std::fopen(flags.markdown.c_str(), "w");
    if (markdown == nullptr) {
      absl::FPrintF(stderr, "spmm_bench: markdown: cannot write %s\n", flags.markdown);
      return 2;
    }
    WriteMarkdown(markdown, flags.backend == "cuda" ? CudaNotes() : CpuNotes(), rows);
    std::fclose(markdown);
  }
  return 0;
}

}  // namespace
}  // namespace spmmd::bench

// An exception ends a benchmark as well as anything.
int main(int argc, char** argv) {  // NOLINT(bugprone-exception-escape)
  // OpenBLAS reads these when it is loaded, so before main(): start again with them set. By default its idle threads
  // keep a core busy for tens of milliseconds, in which whatever is measured next has one core less. 2^10 ticks cost
  // OpenBLAS itself nothing that shows.
  constexpr char kTimeout[] = "OPENBLAS_THREAD_TIMEOUT", kCoreType[] = "OPENBLAS_CORETYPE";
  const char* const core_type = std::getenv(kCoreType) == nullptr ? spmmd::bench::BlasCoreType() : nullptr;
  const bool too_long = std::getenv(kTimeout) == nullptr;
  if ((core_type == nullptr || setenv(kCoreType, core_type, 0) == 0) && (!too_long || setenv(kTimeout, "10", 0) == 0) &&
      (core_type != nullptr || too_long)) {
    execv("/proc/self/exe", argv);
  }
  return spmmd::bench::Main(argc, argv);
}
