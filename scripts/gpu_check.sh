#!/usr/bin/env bash
# `make test-gpu`: every GPU test program, plain and under compute-sanitizer, on a machine with an NVIDIA GPU. Where the
# kernels made for compute capability 9.0 run, the portable ones (SPMMD_CUDA_PORTABLE=1) are tested after them.
#
#   scripts/gpu_check.sh [DIR]    DIR holds the test programs (default build/tests)
#
# TOOLS="memcheck ..." chooses the sanitizer tools, none with TOOLS=""; JOBS=4 programs run at a time; LIMIT=300 seconds
# for each; PORTABLE=0 leaves the portable kernels out. Logs go to gpu-check/. What the tools cannot judge is taken out
# here, with the reason:
#   racecheck  the dense baseline (SPMMD_GPU_SANITIZER tells spmm_cuda_test): racecheck breaks cuBLASLt's kernels, and
#              leaving these out by name ends in a hardware exception. Large shapes: racecheck is a thousand times
#              slower than the kernels, and their schedules are the small ones' over more rounds.
#   synccheck  tracks a limited number of barriers unless told of more, and fails spuriously beyond.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=${1:-build/tests}
tools=${TOOLS-memcheck racecheck initcheck synccheck}
jobs=${JOBS:-4}
logs=gpu-check
limit=${LIMIT:-300}

if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "test-gpu: no usable NVIDIA GPU on this machine (nvidia-smi -L fails)" >&2
  exit 1
fi
for tool in $tools; do
  if ! command -v compute-sanitizer >/dev/null; then
    echo "test-gpu: no compute-sanitizer for $tool; TOOLS=\"\" runs the programs without" >&2
    exit 1
  fi
done
export SPMMD_REQUIRE_GPU=1
rm -rf "$logs"
mkdir -p "$logs"

check() { # name command...
  local name=$1 start=$SECONDS rc=0
  shift
  timeout "$limit" "$@" >"$logs/$name.txt" 2>&1 || rc=$?
  printf '%-52s %s, %d s\n' "$name" "$([[ $rc == 0 ]] && echo passed || echo "FAILED ($rc), see $logs/$name.txt")" $((SECONDS - start))
  [[ $rc == 0 ]] || touch "$logs/failed"
}

start() { # name command...
  while (($(jobs -rp | wc -l) >= jobs)); do wait -n || true; done
  check "$@" &
}

check_programs() { # suffix environment...
  local suffix=$1 program name tool options filter
  shift
  for program in "$tests"/*_cuda_test "$tests"/three_layer_layout_test "$tests"/server_cuda_*_test; do
    [[ -x $program ]] || continue
    name=$(basename "$program")$suffix
    start "$name" env "$@" "$program"
    for tool in $tools; do
      options=(--tool "$tool" --error-exitcode 9 --launch-timeout 60)
      filter='*'
      case $tool in
        racecheck) filter='-*LargeShapes*' ;;
        synccheck) options+=(--num-cuda-barriers 65536) ;;
      esac
      start "$name.$tool" env "$@" SPMMD_GPU_SANITIZER="$tool" compute-sanitizer "${options[@]}" "$program" --gtest_filter="$filter"
    done
  done
}

check_programs "" SPMMD_CUDA_PORTABLE=0
if [[ ${PORTABLE:-1} != 0 && $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0) == 9.0 ]]; then
  check_programs .portable SPMMD_CUDA_PORTABLE=1
fi
wait
if ! compgen -G "$logs/*.txt" >/dev/null; then
  echo "test-gpu: no test programs in $tests" >&2
  exit 1
fi
[[ ! -e $logs/failed ]]
