"""Calls of spmm.v1 beside Triton's client: messages come from protoc, and gRPC takes them as bytes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc

REPOSITORY = Path(__file__).resolve().parents[2]


def load_messages(directory: Path) -> Any:
    """The module of spmm/v1/sparse_matmul.proto, written into `directory`."""
    proto = REPOSITORY / "proto"
    files = ["spmm/v1/types.proto", "spmm/v1/sparse_matmul.proto"]
    subprocess.run(["protoc", f"-I{proto}", f"--python_out={directory}", *files], check=True)
    sys.path.insert(0, str(directory))
    return importlib.import_module("spmm.v1.sparse_matmul_pb2")


def call(address: str, method: str, request: Any, response_type: Any, timeout: float = 20.0) -> Any:
    """One unary call, "spmm.v1.SparseMatmul/Execute" for instance."""
    with grpc.insecure_channel(address) as channel:
        return channel.unary_unary(f"/{method}", response_deserializer=response_type.FromString)(
            request.SerializeToString(), timeout=timeout
        )
