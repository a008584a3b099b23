#!/usr/bin/env bash
# Installs what the build, the tests and the demo need and this machine lacks: Debian packages (scripts/apt-packages.txt) and
# a Python virtual environment in .venv (scripts/requirements.txt). Quick when nothing is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

# --dev adds the linters and clang with its fuzzing runtime; --ops what the operators' tests use: Prometheus, helm, Kubernetes'
# schemas, the Grafana SDK; --triton an environment of its own for tests/oip: Triton's client and perf_analyzer.
package_lists=(scripts/apt-packages.txt)
requirements=(scripts/requirements.txt)
ops=0
triton=0
for option in "$@"; do
  case "$option" in
    --dev)
      package_lists+=(scripts/apt-packages-dev.txt)
      requirements+=(scripts/requirements-dev.txt)
      ;;
    --ops)
      package_lists+=(scripts/apt-packages-ops.txt)
      requirements+=(scripts/requirements-ops.txt)
      ops=1
      ;;
    --triton)
      package_lists+=(scripts/apt-packages-triton.txt)
      triton=1
      ;;
    *) echo "setup: unknown option $option" >&2; exit 2 ;;
  esac
done

mapfile -t packages < <(cat "${package_lists[@]}")
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$' || missing+=("$package")
done
if [ "${#missing[@]}" -gt 0 ]; then
  echo "setup: installing ${missing[*]}"
  sudo=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "setup: not root and no sudo; as root run: apt-get install ${missing[*]}" >&2; exit 1; }
    sudo=(sudo)
  fi
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

stamp=".venv/.installed-$(cat "${requirements[@]}" | sha256sum | cut -c1-16)"
if [ ! -e "$stamp" ]; then
  echo "setup: creating .venv"
  [ -x .venv/bin/python ] || "${PYTHON:-/usr/bin/python3}" -m venv .venv
  args=()
  for file in "${requirements[@]}"; do args+=(-r "$file"); done
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "${args[@]}"
  touch "$stamp"
fi
if [ "$ops" -eq 1 ] && ! scripts/get_helm.sh; then echo "setup: no helm; its tests will skip" >&2; fi

if [ "$triton" -eq 1 ]; then
  stamp=".venv/triton/.installed-$(cat scripts/requirements-triton.txt scripts/requirements-perf-analyzer.txt | sha256sum | cut -c1-16)"
  if [ ! -e "$stamp" ]; then
    echo "setup: creating .venv/triton"
    "${PYTHON:-/usr/bin/python3}" -m venv .venv/triton
    .venv/triton/bin/python -m pip install --quiet --disable-pip-version-check -r scripts/requirements-triton.txt
    # Its wheels are for x86-64; elsewhere the test that runs perf_analyzer skips.
    if [ "$(uname -m)" = x86_64 ]; then
      .venv/triton/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
        --target .venv/triton/perf_analyzer -r scripts/requirements-perf-analyzer.txt
    fi
    touch "$stamp"
  fi
fi
