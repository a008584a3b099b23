#!/usr/bin/env bash
# `make test-gpu`: every GPU test program, plain and under compute-sanitizer, on a machine with an NVIDIA GPU.
#
#   scripts/gpu_check.sh [DIR]    DIR holds the test programs (default build/tests)
#
# TOOLS="memcheck ..." chooses the sanitizer tools, none with TOOLS="". Logs go to gpu-check/. What the tools cannot judge
# is taken out here, with the reason:
#   racecheck  the dense baseline (SPMMD_GPU_SANITIZER tells spmm_cuda_test): racecheck breaks cuBLASLt's kernels, and
#              leaving these out by name ends in a hardware exception. Large shapes: racecheck is a thousand times
#              slower than the kernels, and their schedules are the small ones' over more rounds.
#   synccheck  tracks a limited number of barriers unless told of more, and fails spuriously beyond.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=${1:-build/tests}
tools=${TOOLS-memcheck racecheck initcheck synccheck}
logs=gpu-check
limit=${LIMIT:-300} # seconds a program and tool

if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "test-gpu: no usable NVIDIA GPU on this machine (nvidia-smi -L fails)" >&2
  exit 1
fi
export SPMMD_REQUIRE_GPU=1
mkdir -p "$logs"
failed=0

check() { # name command...
  local name=$1 start=$SECONDS rc=0
  shift
  timeout "$limit" "$@" >"$logs/$name.txt" 2>&1 || rc=$?
  printf '%-42s %s, %d s\n' "$name" "$([[ $rc == 0 ]] && echo passed || echo "FAILED ($rc), see $logs/$name.txt")" $((SECONDS - start))
  [[ $rc == 0 ]] || failed=1
}

for program in "$tests"/*_cuda_test "$tests"/three_layer_layout_test "$tests"/server_cuda_*_test; do
  [[ -x $program ]] || continue
  name=$(basename "$program")
  check "$name" "$program"
  for tool in $tools; do
    options=(--tool "$tool" --error-exitcode 9 --launch-timeout 60)
    filter='*'
    case $tool in
      racecheck) filter='-*LargeShapes*' ;;
      synccheck) options+=(--num-cuda-barriers 65536) ;;
    esac
    check "$name.$tool" env SPMMD_GPU_SANITIZER="$tool" compute-sanitizer "${options[@]}" "$program" --gtest_filter="$filter"
  done
done
exit $failed
