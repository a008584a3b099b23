"""Before anything imports the client: its wire modules are made again when a proto file is newer than they are."""

from __future__ import annotations

import subprocess
import sys

from helpers import REPOSITORY

_PACKAGE = REPOSITORY / "client" / "python"


def _stale() -> bool:
    generated = list((_PACKAGE / "src" / "spmmd" / "_proto").glob("*_pb2*"))
    protos = list((REPOSITORY / "proto" / "spmm" / "v1").glob("*.proto"))
    return not generated or max(p.stat().st_mtime for p in protos) > min(g.stat().st_mtime for g in generated)


if _stale():
    subprocess.run([sys.executable, str(_PACKAGE / "generate_protos.py")], check=True)
