#!/usr/bin/env bash
# Regenerates client/python/src/spmmd/_proto after a change of proto/ (an editable install does not notice one).
# PYTHON names an interpreter with grpcio-tools; the repository's .venv by default.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec "${PYTHON:-${root}/.venv/bin/python}" "${root}/client/python/generate_protos.py"
