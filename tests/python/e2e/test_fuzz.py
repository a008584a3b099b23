"""Random and mutated messages to every RPC: canonical answers, and a server that stays up with its memory as before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from e2e.wire import GOOD, VALUES, chunk, dense, matmul, request, sparse, spec
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from local_server import LocalServer

import spmmd
from spmmd._proto import layer_catalog_pb2 as catalog_pb2
from spmmd._proto import sparse_matmul_pb2 as matmul_pb2

LAYER: Any = {"name": "w"}
SEEDS: dict[str, list[bytes]] = {
    "/spmm.v1.SparseMatmul/Execute": [
        request().SerializeToString(),
        request([{"name": "x", "sparse": sparse()}]).SerializeToString(),
        request(
            [{"name": "x", "dense": dense(4)}],
            [
                matmul("a", activation=2),
                matmul("b", activation_threshold=0.5),
                {"name": "y", "mul": {"left": "a", "right": "b"}},
            ],
            [{"step": "y", "dtype": 1}],
        ).SerializeToString(),
    ],
    "/spmm.v1.SparseMatmul/RegisterProgram": [
        matmul_pb2.RegisterProgramRequest(program=request().program).SerializeToString()
    ],
    "/spmm.v1.SparseMatmul/UnregisterProgram": [
        matmul_pb2.UnregisterProgramRequest(program_id="1").SerializeToString()
    ],
    "/spmm.v1.SparseMatmul/ServerInfo": [b""],
    "/spmm.v1.SparseMatmul/DeviceInfo": [b""],
    "/spmm.v1.SparseMatmul/RegisterRegion": [
        matmul_pb2.RegisterRegionRequest(name="r", size=4096, posix_shm="/no-such-region").SerializeToString()
    ],
    "/spmm.v1.SparseMatmul/UnregisterRegion": [matmul_pb2.UnregisterRegionRequest(name="r").SerializeToString()],
    "/spmm.v1.SparseMatmul/OpenRing": [
        matmul_pb2.OpenRingRequest(region="r", entries=2, program_ids=["1"]).SerializeToString()
    ],
    "/spmm.v1.SparseMatmul/CloseRing": [matmul_pb2.CloseRingRequest(ring_id="1").SerializeToString()],
    "/spmm.v1.LayerCatalog/ListLayers": [
        catalog_pb2.ListLayersRequest(name_prefix="w", page_size=1).SerializeToString()
    ],
    "/spmm.v1.LayerCatalog/GetLayer": [catalog_pb2.GetLayerRequest(layer=LAYER).SerializeToString()],
    "/spmm.v1.LayerCatalog/UnregisterLayer": [
        catalog_pb2.UnregisterLayerRequest(layer={"name": "other", "version": 1}).SerializeToString()
    ],
    "/spmm.v1.LayerCatalog/PinLayer": [catalog_pb2.PinLayerRequest(layer=LAYER).SerializeToString()],
    "/spmm.v1.LayerCatalog/WarmLayer": [catalog_pb2.WarmLayerRequest(layer=LAYER).SerializeToString()],
    "/spmm.v1.LayerCatalog/Benchmark": [
        catalog_pb2.BenchmarkRequest(layer=LAYER, tokens=[1, 2], repetitions=2).SerializeToString()
    ],
}
STREAM_SEED = matmul_pb2.ExecuteStreamRequest(request_id=7, request=request()).SerializeToString()
UPLOAD_SEEDS = [
    [message.SerializeToString() for message in (spec(name="fuzzed"), chunk(VALUES, GOOD))],
    [
        message.SerializeToString()
        for message in (
            spec(name="fuzzed", encoding=catalog_pb2.SOURCE_ENCODING_CSR, nnz=2, magnitude={"sparsity": 0.5}),
            chunk(catalog_pb2.CONTENT_PART_ROW_OFFSETS, np.array([0, 1, 2], np.uint64).tobytes()),
            chunk(catalog_pb2.CONTENT_PART_COLUMN_INDICES, np.array([0, 2], np.uint32).tobytes()),
            chunk(VALUES, np.array([1, 2], np.float32).tobytes()),
        )
    ],
    [
        spec(name="fuzzed", file={"path": "block.safetensors", "tensor": "q.weight"}, m=0, k=0).SerializeToString(),
    ],
]

# INTERNAL is what gRPC itself answers to bytes that are not a message; a message that parses must not get it.
FATAL = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
DEADLINE = 5.0


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A valid message with a few bytes changed, cut out, repeated or put in; or random bytes."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        if not data:
            data += draw(st.binary(min_size=1, max_size=16))
        at = draw(st.integers(0, len(data) - 1))
        kind = draw(st.sampled_from(["flip", "set", "cut", "repeat", "insert"]))
        if kind == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set":
            data[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 8))]
        elif kind == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 16))]
        else:
            data[at:at] = draw(st.binary(min_size=1, max_size=8))
    return bytes(data)


def anything(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    return mutated(seeds) | st.binary(max_size=64)


FUZZ = settings(
    max_examples=200,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def channel(server: LocalServer) -> Iterator[Any]:
    channel: Any = grpc.insecure_channel(server.address)  # without serializers calls take and give bytes
    yield channel
    channel.close()


@pytest.fixture(autouse=True)
def unharmed(server: LocalServer, client: spmmd.Client) -> Iterator[None]:
    """The server is the same process afterwards, multiplies right, and holds no more than before."""
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    client.register("w", weight)
    client.pin("w")
    pid = server.pid
    yield
    assert server.running
    assert server.pid == pid
    assert client.health() == spmmd.HealthStatus.SERVING
    client.register("w2", weight)
    assert client.matmul("w2", np.ones(3, np.float32)).tolist() == [3, 12]


def parses(message: Any, data: bytes) -> bool:
    try:
        message.ParseFromString(data)
    except Exception:
        return False
    return True


def answer(call: Any, what: bytes) -> None:
    """Reads a call to its end; anything but a canonical refusal is a failure."""
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        status: Any = error
        assert status.code() not in FATAL, f"{status.code()} {status.details()} for {what!r}"


REQUESTS: dict[str, Any] = {
    "Execute": matmul_pb2.ExecuteRequest,
    "RegisterProgram": matmul_pb2.RegisterProgramRequest,
    "Benchmark": catalog_pb2.BenchmarkRequest,
}


@pytest.mark.parametrize("method", SEEDS, ids=lambda method: method.rpartition("/")[2])
def test_unary(channel: Any, method: str) -> None:
    call = channel.unary_unary(method)

    @seed(20260101)
    @FUZZ
    @given(anything(SEEDS[method]))
    def fuzz(data: bytes) -> None:
        kind = REQUESTS.get(method.rpartition("/")[2])
        try:
            call(data, timeout=DEADLINE)
        except grpc.RpcError as error:
            status: Any = error
            assert status.code() not in FATAL, f"{status.code()} {status.details()} for {data!r}"
            if status.code() == grpc.StatusCode.INTERNAL and kind is not None:
                assert not parses(kind(), data), f"{status.details()} for {data!r}"

    fuzz()


def test_execute_stream(channel: Any) -> None:
    call = channel.stream_stream("/spmm.v1.SparseMatmul/ExecuteStream")

    @seed(20260102)
    @FUZZ
    @given(st.lists(anything([STREAM_SEED]), max_size=4))
    def fuzz(messages: list[bytes]) -> None:
        answer(call(iter(messages), timeout=DEADLINE), b"|".join(messages))

    fuzz()


def test_register_layer(channel: Any, client: spmmd.Client) -> None:
    call = channel.stream_stream("/spmm.v1.LayerCatalog/RegisterLayer")

    @st.composite
    def uploads(draw: st.DrawFn) -> list[bytes]:
        messages = list(draw(st.sampled_from(UPLOAD_SEEDS)))
        for _ in range(draw(st.integers(1, 2))):
            at = draw(st.integers(0, len(messages) - 1))
            messages[at] = draw(anything([messages[at]]))
        if draw(st.booleans()):
            messages = messages[: draw(st.integers(0, len(messages)))]
        return messages

    @seed(20260103)
    @settings(FUZZ, max_examples=400)
    @given(uploads())
    def fuzz(messages: list[bytes]) -> None:
        answer(call(iter(messages), timeout=DEADLINE), b"|".join(messages))

    fuzz()
    for name in {layer.name for layer in client.list()} - {"w"}:
        client.unregister(name)
