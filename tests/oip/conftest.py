"""A real server with a few layers, and Triton's client."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import wire
from local_server import LocalServer
from reference import Array, linear, magnitude

M, K = 48, 64
NUMPY = {"FP16": np.float16, "BF16": ml_dtypes.bfloat16, "FP32": np.float32}
# Half a unit in the last place of the output's type, and what fp32 accumulation may lose.
ROUNDING = {"FP16": 2.0**-11, "BF16": 2.0**-8, "FP32": 1e-5}


def _program(variable: str, name: str) -> Path:
    path = Path(os.environ.get(variable, wire.REPOSITORY / "build" / "bin" / name))
    if not path.exists():
        pytest.fail(f"no {path}: build it, or name one in {variable}", pytrace=False)
    return path


@pytest.fixture(scope="session")
def binary() -> Path:
    return _program("SPMMD_BIN", "spmmd")


class Layers:
    """Registers layers on a server through spmmctl, and remembers their weights."""

    def __init__(self, address: str, directory: Path) -> None:
        self.address = address
        self.weights: dict[str, Array] = {}
        self._spmmctl = _program("SPMMCTL_BIN", "spmmctl")
        self._directory = directory

    def register(self, name: str, weight: Array, *flags: str) -> Array:
        path = self._directory / f"{len(self.weights)}.npy"
        np.save(path, weight)
        self._run("register", name, "--file", str(path), *flags)
        self.weights[name] = weight
        return weight

    def unregister(self, name: str) -> None:
        del self.weights[name]
        self._run("unregister", name)

    def _run(self, *arguments: str) -> None:
        subprocess.run([self._spmmctl, f"--server={self.address}", *arguments], check=True, stdout=subprocess.DEVNULL)


def sparse(seed: int, m: int = M, k: int = K, dtype: Any = np.float16) -> Array:
    rng = np.random.default_rng(seed)
    return np.asarray((rng.standard_normal((m, k)) * (rng.random((m, k)) < 0.5)).astype(dtype))


def rows(seed: int, n: int, datatype: str = "FP16", k: int = K) -> Array:
    return np.asarray(np.random.default_rng(seed).standard_normal((n, k)).astype(NUMPY[datatype]))


def tensor(x: Array, datatype: str, name: str = "x") -> triton.InferInput:
    given = triton.InferInput(name, x.shape, datatype)
    given.set_data_from_numpy(x)
    return given


def assert_close(y: Array, expected: Array, scale: Array, datatype: str) -> None:
    """Within the rounding of the output's type; `scale` is sum |w||x|."""
    assert y is not None
    assert y.shape == expected.shape
    assert y.dtype == NUMPY[datatype]
    error = np.abs(y.astype(np.float64) - expected)
    bound = ROUNDING[datatype] * np.abs(expected) + 1e-5 * scale + 1e-6
    assert (error <= bound).all(), f"off by up to {(error - bound).max()} more than allowed"


def assert_product(y: Array, x: Array, weight: Array, datatype: str) -> None:
    assert_close(y, linear(x, weight), magnitude(x, weight), datatype)


@pytest.fixture(scope="session")
def server(binary: Path) -> Iterator[LocalServer]:
    with LocalServer(binary, ["--backend=cpu", "--shared-memory"]) as server:
        yield server
        assert server.running, f"the server went down:\n{server.log()}"
    assert server.exit_code == 0


@pytest.fixture(scope="session")
def layers(server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> Layers:
    layers = Layers(server.address, tmp_path_factory.mktemp("weights"))
    layers.register("plain", sparse(1))
    layers.register("block.0/mlp/up.weight", sparse(2, 96, K))
    layers.register("fp32", sparse(3, dtype=np.float32), "--store-dtype=bf16")
    return layers


@pytest.fixture
def client(server: LocalServer, layers: Layers) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as client:
        yield client


@pytest.fixture(scope="session")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return wire.load_messages(tmp_path_factory.mktemp("messages"))


@pytest.fixture
def program(server: LocalServer, layers: Layers, messages: Any) -> Iterator[str]:
    """Id of silu(x plain^T) beside x + shift, which has no matmul."""
    request = messages.RegisterProgramRequest()
    request.program.inputs.extend(["x", "shift"])
    step = request.program.steps.add(name="hidden")
    step.matmul.layer.name = "plain"
    step.matmul.input = "x"
    step.matmul.activation = 4
    step = request.program.steps.add(name="moved")
    step.add.left, step.add.right = "x", "shift"
    request.program.outputs.add(step="hidden", dtype=3)
    request.program.outputs.add(step="moved", dtype=1)
    registered = wire.call(
        server.address, "spmm.v1.SparseMatmul/RegisterProgram", request, messages.RegisterProgramResponse
    )
    yield registered.program_id
    gone = messages.UnregisterProgramRequest(program_id=registered.program_id)
    wire.call(server.address, "spmm.v1.SparseMatmul/UnregisterProgram", gone, messages.UnregisterProgramResponse)


@pytest.fixture
def refused(client: triton.InferenceServerClient) -> Callable[..., str]:
    """Sends a request that must fail with a code; its message. The server must work afterwards."""

    def send(code: str, request: Any, field: str | None = None) -> str:
        with pytest.raises(grpc.RpcError) as error:
            client._client_stub.ModelInfer(request, timeout=20.0)
        assert error.value.code().name == code, error.value
        message = str(error.value.details())
        if field is not None:
            assert message.startswith(f"{field}: "), message
        x = rows(5, 1)
        assert client.infer("plain", [tensor(x, "FP16")]).as_numpy("y") is not None
        return message

    return send
