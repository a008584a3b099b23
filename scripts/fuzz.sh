#!/usr/bin/env bash
# `make fuzz`: builds the libFuzzer targets with clang and runs each for FUZZ_SECONDS (default 10) from its kept corpus in
# tests/fuzz/corpus. A crash leaves its input in build/fuzz and fails.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake -S . -B build/fuzz -G Ninja -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DSPMMD_ENABLE_CUDA=OFF -DSPMMD_BUILD_SERVER=OFF -DSPMMD_BUILD_TESTS=ON -DSPMMD_BUILD_BENCH=OFF -DSPMMD_BUILD_FUZZERS=ON >/dev/null
cmake --build build/fuzz --target spmmd_fuzzers
for fuzzer in build/fuzz/fuzz/*_fuzz; do
  name=$(basename "$fuzzer")
  corpus=tests/fuzz/corpus/${name%_fuzz}
  mkdir -p build/fuzz/runs/"$name"
  echo "fuzz: $name"
  "$fuzzer" -max_total_time="${FUZZ_SECONDS:-10}" -rss_limit_mb=2048 -timeout=10 -artifact_prefix=build/fuzz/ \
    -print_final_stats=0 build/fuzz/runs/"$name" "$corpus" 2>&1 | tail -n 2
done
