#!/usr/bin/env bash
# `make bench`: every CPU operation beside OpenBLAS in one process, turn by turn. CSV and Markdown go to bench-results/.
set -euo pipefail
cd "$(dirname "$0")/.."
out="bench-results"
mkdir -p "$out"
shapes=${SHAPES:-4096x4096,11008x4096}
bench=build/bin/spmm_bench

run() { # run NAME [extra flags]: one CSV a name, whose first word is the operation
  local name=$1
  shift
  "$bench" --backend=cpu --op="${name%%-*}" --shapes="$shapes" --formats=bitmap --csv="$out/cpu-$name.csv" --markdown="$out/cpu-$name.md" "$@"
}
# bf16 weights run with x in fp32 and in bf16, which is a path of its own on some CPUs.
run spmv-bf16 --dtype=bf16 --sparsity=0.3,0.5,0.7
run spmv-fp16 --dtype=fp16 --sparsity=0.3,0.5,0.7
run spmm --dtype=bf16 --sparsity=0.5,0.7 --tokens=2,4,8,16,32,64
run spmspv --dtype=bf16 --sparsity=0.3,0.5,0.7 --activation-sparsity=0.3,0.5,0.7,0.9
{
  echo "# CPU benchmark"
  echo
  echo "$(date -u +%F), $(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2- | xargs), $(nproc) threads. \`make bench\`."
  for name in spmv-bf16 spmv-fp16 spmm spmspv; do
    echo
    echo "## $name"
    echo
    cat "$out/cpu-$name.md"
  done
} >"$out/cpu.md"
echo "bench: $out/cpu.md"
