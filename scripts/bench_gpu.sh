#!/usr/bin/env bash
# `make bench-gpu`: every GPU operation beside cuBLASLt in one process, turn by turn. CSV goes to bench-results/.
#   SHAPES=MxK,...  SPARSITY=0.5,...  TOKENS=2,...  narrow the SpMM grid, which takes about two minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "bench-gpu: no usable NVIDIA GPU on this machine (nvidia-smi -L fails)" >&2
  exit 1
fi
out="bench-results"
mkdir -p "$out"
shapes=${SHAPES:-4096x4096,11008x4096,4096x11008,5120x5120,13824x5120,5120x13824,7168x7168,28672x7168,7168x28672,9216x9216,36864x9216,9216x36864,65536x16384}
bench=build/bin/spmm_bench
"$bench" --backend=cuda --op=spmm --dtype=fp16 --shapes="$shapes" --sparsity="${SPARSITY:-0.5,0.6,0.7}" \
  --tokens="${TOKENS:-2,4,8,16,32,64,128,256}" --rounds=5 --csv="$out/gpu-spmm.csv" --markdown="$out/gpu-spmm.md"
# What the grid leaves out: bf16, uneven columns, few zeros, many tokens, the sparse tensor cores.
few=4096x4096,11008x4096,28672x7168
part() { # name options...
  local name=$1
  shift
  "$bench" --backend=cuda --op=spmm --shapes="$few" --rounds=5 --csv="$out/gpu-spmm-$name.csv" "$@"
}
part bf16 --dtype=bf16 --sparsity=0.5,0.7 --tokens=8,16,32,64
part skewed-0.5 --mask=skewed --skew-sigma=0.5 --sparsity=0.5 --tokens=8,16,32,64
part skewed-1 --mask=skewed --skew-sigma=1 --sparsity=0.5 --tokens=8,16,32,64
part few-zeros --sparsity=0.3,0.4 --tokens=8,16,32,64
part many-tokens --sparsity=0.5 --tokens=512,1024
part three-layer --formats=THREE_LAYER --sparsity=0.5 --tokens=8,16,32,64
part three-layer-2-4 --formats=THREE_LAYER --mask=2:4 --sparsity=0.5 --tokens=8,16,32,64
build/bin/spmv_cuda_bench --shapes="$shapes" --csv="$out/gpu-spmv.csv"
build/bin/spmv_cuda_bench --shapes="$shapes" --activation-sparsity=same --celty --csv="$out/gpu-spmspv.csv"
echo "bench-gpu: $out/gpu-spmm*.csv $out/gpu-spmm.md $out/gpu-spmv.csv $out/gpu-spmspv.csv"
