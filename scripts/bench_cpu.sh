#!/usr/bin/env bash
# `make bench`: every CPU operation beside OpenBLAS in one process, turn by turn. CSV and Markdown go to bench-results/.
set -euo pipefail
cd "$(dirname "$0")/.."
out="bench-results"
mkdir -p "$out"
shapes=${SHAPES:-4096x4096,11008x4096}
bench=build/bin/spmm_bench

run() { # run OP [extra flags]: appends to one CSV an operation
  local op=$1
  shift
  "$bench" --backend=cpu --op="$op" --shapes="$shapes" --csv="$out/cpu-$op.csv" --markdown="$out/cpu-$op.md" "$@"
}
run spmv --formats=bitmap --dtype=bf16 --sparsity=0.3,0.5,0.7
run spmm --formats=bitmap --dtype=bf16 --sparsity=0.5,0.7 --tokens=2,4,8,16,32,64
run spmspv --formats=bitmap --dtype=bf16 --sparsity=0.3,0.5,0.7 --activation-sparsity=0.3,0.5,0.7,0.9
{
  echo "# CPU benchmark"
  echo
  echo "$(date -u +%F), $(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2- | xargs), $(nproc) threads. \`make bench\`."
  for op in spmv spmm spmspv; do
    echo
    echo "## $op"
    echo
    cat "$out/cpu-$op.md"
  done
} >"$out/cpu.md"
echo "bench: $out/cpu.md"
