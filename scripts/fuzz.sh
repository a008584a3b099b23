#!/usr/bin/env bash
# `make fuzz`: builds the libFuzzer targets with clang and runs each for FUZZ_SECONDS (default 10) from its kept corpus in
# tests/fuzz/corpus. A crash leaves its input in build/fuzz and fails.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake -S . -B build/fuzz -G Ninja -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DSPMMD_ENABLE_CUDA=OFF -DSPMMD_BUILD_SERVER=OFF -DSPMMD_BUILD_TESTS=ON -DSPMMD_BUILD_BENCH=OFF -DSPMMD_BUILD_FUZZERS=ON >/dev/null
cmake --build build/fuzz --target spmmd_fuzzers

run_fuzzer() {
  local name corpus log
  name=$(basename "$1")
  corpus=tests/fuzz/corpus/${name%_fuzz}
  log=build/fuzz/$name.log
  mkdir -p build/fuzz/runs/"$name"
  if "$1" -max_total_time="${FUZZ_SECONDS:-10}" -rss_limit_mb=2048 -timeout=10 -artifact_prefix=build/fuzz/ \
    build/fuzz/runs/"$name" "$corpus" >"$log" 2>&1; then
    echo "fuzz: $name: $(tail -n 1 "$log")"
  else
    tail -n 40 "$log"
    echo "fuzz: $name failed; its input is in build/fuzz" >&2
    return 1
  fi
}
export -f run_fuzzer
# shellcheck disable=SC2016  # the inner shell expands it
printf '%s\n' build/fuzz/fuzz/*_fuzz | xargs -P "$(nproc)" -I{} bash -c 'run_fuzzer "$1"' _ {}
