"""Generates src/spmmd/_proto from proto/spmm/v1 (run by setup.py and scripts/gen_python_protos.sh).

The modules are moved from the package `spmm.v1` into `spmmd._proto`, so that nothing but `spmmd` is installed.
"""

import re
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
TARGET = HERE / "src" / "spmmd" / "_proto"


def proto_root() -> Path:
    """The repository's proto folder, or the copy that a source distribution carries."""
    for root in (HERE.parent.parent / "proto", HERE / "proto"):
        if (root / "spmm" / "v1").is_dir():
            return root
    raise SystemExit(f"{HERE}: no proto/spmm/v1 beside this package; build from a clone or a source distribution")


def main() -> int:
    root = proto_root()
    protos = sorted(str(p.relative_to(root)) for p in (root / "spmm" / "v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as out:
        arguments = ["protoc", f"-I{root}", f"-I{resources.files('grpc_tools') / '_proto'}"]
        arguments += [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}", *protos]
        if protoc.main(arguments) != 0:
            return 1
        for generated in sorted((Path(out) / "spmm" / "v1").iterdir()):
            text = re.sub(r"^from spmm\.v1 import", "from spmmd._proto import", generated.read_text(), flags=re.M)
            target = TARGET / generated.name
            target.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
