#!/usr/bin/env bash
# Everything a reviewer should not have to say. Needs a configured build/ for compile_commands.json.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
status=0
step() {
  local name=$1
  shift
  if "$@"; then echo "lint: $name ok"; else echo "lint: $name FAILED"; status=1; fi
}
mapfile -t cxx < <(git ls-files -- '*.h' '*.cc' '*.cu' '*.cuh' '*.proto' ':!proto/google' ':!proto/grpc' ':!proto/inference')
mapfile -t shell < <(git ls-files -- '*.sh' .ci/run .ci/fuzz)
mapfile -t sources < <(git ls-files -- 'kernels/*.cc' 'server/*.cc' 'client/*.cc')

step clang-format clang-format --dry-run -Werror "${cxx[@]}"
step buf .venv/bin/buf lint proto
step shellcheck shellcheck "${shell[@]}"
step ruff .venv/bin/ruff check client tests scripts helm
step ruff-format .venv/bin/ruff format --check tests/operate helm scripts/metrics_doc.py scripts/dashboard_pictures.py scripts/scale_out_sim.py scripts/alert_walkthrough.py scripts/kube_walkthrough.py
step yamllint yamllint --strict helm/spmmd/values.yaml helm/spmmd/Chart.yaml helm/spmmd/files/rules.yaml helm/spmmd/ci docker tests/operate
step hadolint .venv/bin/hadolint docker/Dockerfile
if [ -x .venv/bin/helm ]; then step helm .venv/bin/helm lint --strict --quiet helm/spmmd; fi
step mypy .venv/bin/mypy
step mypy-operate .venv/bin/mypy --config-file tests/operate/mypy.ini
if [ "${LINT_TIDY:-1}" = 1 ]; then
  step clang-tidy xargs -a <(printf '%s\n' "${sources[@]}") -P "$(nproc)" -n 4 clang-tidy -p build --quiet
fi
exit "$status"
