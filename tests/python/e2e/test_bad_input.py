"""Every kind of bad input: a canonical code that names the field, a server that goes on, memory as before."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from e2e.wire import F32, GOOD, VALUES, Wire, chunk, dense, matmul, request, sparse, spec
from local_server import LocalServer

import spmmd
from spmmd._proto import layer_catalog_pb2 as catalog_pb2
from spmmd._proto import sparse_matmul_pb2 as matmul_pb2
from spmmd._proto import types_pb2
from spmmd.errors import SpmmdError

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
DATA_LOSS = grpc.StatusCode.DATA_LOSS

COLUMNS = catalog_pb2.CONTENT_PART_COLUMN_INDICES
ROWS = catalog_pb2.CONTENT_PART_ROW_INDICES
OFFSETS = catalog_pb2.CONTENT_PART_ROW_OFFSETS
BITS = catalog_pb2.CONTENT_PART_BITMAP
BIAS = catalog_pb2.CONTENT_PART_BIAS
CSR = catalog_pb2.SOURCE_ENCODING_CSR
COO = catalog_pb2.SOURCE_ENCODING_COO
BITMAP = catalog_pb2.SOURCE_ENCODING_BITMAP_UPLOAD

NAN = float("nan")
INF = float("inf")


@pytest.fixture(scope="module")
def wire(server: LocalServer) -> Iterator[Wire]:
    wire = Wire(server.address)
    yield wire
    wire.close()


@pytest.fixture
def good(client: spmmd.Client) -> Iterator[None]:
    """Layers w [2, 3] and tall [5, 3]; afterwards the server must still multiply and hold no more than before."""
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    client.register("w", weight)
    client.register("tall", np.ones((5, 3), np.float32))
    before = sum(device.memory_weights_bytes for device in client.device_info())
    names = [layer.name for layer in client.list()]
    yield
    assert client.matmul("w", np.ones(3, np.float32)).tolist() == [3, 12]
    assert [layer.name for layer in client.list()] == names
    assert sum(device.memory_weights_bytes for device in client.device_info()) == before


def refused(result: Any, code: grpc.StatusCode, field: str) -> SpmmdError:
    """Checks the code, the field (in the violations of INVALID_ARGUMENT, else in the text) and the reason."""
    assert isinstance(result, SpmmdError), f"accepted: {result}"
    assert result.code == code, str(result)
    assert result.reason, str(result)
    assert result.reason == result.reason.upper()
    if code == INVALID:
        named = [violation.field for violation in result.field_violations]
        assert any(field in name for name in named), f"{named} do not name {field}: {result}"
        assert all(violation.description for violation in result.field_violations)
    else:
        assert field in result.message, str(result)
    return result


# ---- registration: the spec

SPECS: list[tuple[str, dict[str, Any], str]] = [
    ("empty name", {"name": ""}, "name"),
    ("long name", {"name": "x" * 257}, "name"),
    ("space in name", {"name": "a b"}, "name"),
    ("control character in name", {"name": "a\n"}, "name"),
    ("zero rows", {"m": 0}, "m"),
    ("zero columns", {"k": 0}, "k"),
    ("negative rows", {"m": -1}, "m"),
    ("negative columns", {"k": -(2**62)}, "k"),
    ("too many rows", {"m": 2**24 + 1}, "m"),
    ("too many columns", {"k": 2**24 + 1}, "k"),
    ("product past the limit", {"m": 2**24, "k": 2**24}, "k"),
    ("product overflows", {"m": 2**63 - 1, "k": 2**63 - 1}, "m"),
    ("no dtype", {"dtype": 0}, "dtype"),
    ("unknown dtype", {"dtype": 77}, "dtype"),
    ("negative dtype", {"dtype": -1}, "dtype"),
    ("unknown store_dtype", {"store_dtype": 77}, "store_dtype"),
    ("no encoding", {"encoding": 0}, "encoding"),
    ("unknown encoding", {"encoding": 9}, "encoding"),
    ("unknown format", {"format": 77}, "format"),
    ("unknown placement", {"placement": 77}, "placement"),
    ("negative nnz", {"encoding": CSR, "nnz": -1}, "nnz"),
    ("nnz past the shape", {"encoding": COO, "nnz": 7}, "nnz"),
    ("sparsity of one", {"magnitude": {"sparsity": 1.0}}, "sparsity"),
    ("negative sparsity", {"magnitude": {"sparsity": -0.1}}, "sparsity"),
    ("NaN sparsity", {"magnitude": {"sparsity": NAN}}, "sparsity"),
    ("n of zero", {"nm": {"n": 0, "m": 4}}, "nm"),
    ("n equal to m", {"nm": {"n": 4, "m": 4}}, "nm"),
    ("m of one", {"nm": {"n": 1, "m": 1}}, "nm"),
    ("m past 64", {"nm": {"n": 2, "m": 65}}, "nm"),
    ("NaN threshold", {"activation_threshold": NAN}, "activation_threshold"),
    ("infinite threshold", {"activation_threshold": INF}, "activation_threshold"),
    ("negative threshold", {"activation_threshold": -1.0}, "activation_threshold"),
    ("short hash", {"content_xxh3": "abc"}, "content_xxh3"),
    ("upper-case hash", {"content_xxh3": "A" * 32}, "content_xxh3"),
    ("absolute path", {"file": {"path": "/etc/passwd"}}, "path"),
    ("path that climbs out", {"file": {"path": "../outside/secret.npy"}}, "path"),
    ("path that climbs out inside", {"file": {"path": "sub/../../x.npy"}}, "path"),
    ("link that leads out", {"file": {"path": "link.npy"}}, "path"),
    ("folder link that leads out", {"file": {"path": "linked-folder/secret.npy"}}, "path"),
    ("empty path", {"file": {"path": ""}}, "path"),
    ("path with a NUL", {"file": {"path": "sub/w.npy\0"}}, "path"),
    ("other kind of file", {"file": {"path": "notes.txt"}}, "path"),
    ("shape other than the file's", {"file": {"path": "sub/w.npy"}, "m": 4, "k": 3}, "m"),
]


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize(("fields", "field"), [case[1:] for case in SPECS], ids=[case[0] for case in SPECS])
def test_bad_spec(wire: Wire, fields: dict[str, Any], field: str) -> None:
    refused(wire.register([spec(**fields), chunk(VALUES, GOOD)]), INVALID, field)


@pytest.mark.usefixtures("good")
def test_no_message_at_all(wire: Wire) -> None:
    refused(wire.register([]), INVALID, "payload")


@pytest.mark.usefixtures("good")
def test_first_message_must_be_the_spec(wire: Wire) -> None:
    refused(wire.register([chunk(VALUES, GOOD)]), INVALID, "payload")
    refused(wire.register([catalog_pb2.RegisterLayerRequest()]), INVALID, "payload")


@pytest.mark.usefixtures("good")
def test_layer_that_cannot_fit_is_refused_before_any_chunk(wire: Wire) -> None:
    error = refused(wire.register([spec(m=2**18, k=2**18)]), EXHAUSTED, "bytes")
    assert int(error.metadata["needed"]) >= 2**36


# ---- registration: the content


def offsets(*values: int) -> tuple[int, bytes]:
    return OFFSETS, struct.pack(f"<{len(values)}Q", *values)


def columns(*values: int) -> tuple[int, bytes]:
    return COLUMNS, struct.pack(f"<{len(values)}I", *values)


def rows(*values: int) -> tuple[int, bytes]:
    return ROWS, struct.pack(f"<{len(values)}I", *values)


def values(*numbers: float) -> tuple[int, bytes]:
    return VALUES, struct.pack(f"<{len(numbers)}f", *numbers)


CSR2 = {"encoding": CSR, "nnz": 2}
COO2 = {"encoding": COO, "nnz": 2}
BIT2 = {"encoding": BITMAP, "nnz": 2}

CONTENTS: list[tuple[str, dict[str, Any], list[tuple[int, bytes]], grpc.StatusCode, str, str]] = [
    ("NaN weight", {}, [values(1, 2, NAN, 4, 5, 6)], INVALID, "content", "NaN at row 0, column 2"),
    ("infinite weight", {}, [values(1, 2, 3, 4, 5, -INF)], INVALID, "content", "row 1, column 2"),
    ("narrowing to infinity", {"store_dtype": 1}, [values(1, 2, 3, 4, 5, 1e6)], INVALID, "store_dtype", ""),
    (
        "NaN bias",
        {"has_bias": True},
        [(VALUES, GOOD), (BIAS, struct.pack("<2f", 0, NAN))],
        INVALID,
        "content",
        "BIAS[1]",
    ),
    ("truncated", {}, [(VALUES, GOOD[:-4])], INVALID, "chunk.data", "20 of 24 bytes of VALUES"),
    ("nothing", {}, [], INVALID, "chunk.data", "0 of 24 bytes of VALUES"),
    ("missing bias", {"has_bias": True}, [(VALUES, GOOD)], INVALID, "chunk.data", "BIAS"),
    ("bias not announced", {}, [(VALUES, GOOD), (BIAS, bytes(8))], INVALID, "chunk.part", ""),
    ("too long", {}, [(VALUES, GOOD + bytes(4))], INVALID, "chunk.data", "VALUES"),
    ("a chunk too many", {}, [(VALUES, GOOD[:12]), (VALUES, GOOD[12:]), (VALUES, bytes(4))], INVALID, "chunk", ""),
    ("part of another encoding", {}, [offsets(0, 1, 2)], INVALID, "chunk.part", ""),
    ("unspecified part", {}, [(0, GOOD)], INVALID, "chunk.part", ""),
    ("unknown part", {}, [(99, GOOD)], INVALID, "chunk.part", ""),
    ("other content than hashed", {"content_xxh3": "0" * 32}, [(VALUES, GOOD)], DATA_LOSS, "content", ""),
    (
        "CSR offsets not from 0",
        CSR2,
        [offsets(1, 1, 2), columns(0, 1), values(1, 2)],
        INVALID,
        "content",
        "ROW_OFFSETS",
    ),
    ("CSR offsets decrease", CSR2, [offsets(0, 3, 2), columns(0, 1), values(1, 2)], INVALID, "content", "ROW_OFFSETS"),
    ("CSR offsets end early", CSR2, [offsets(0, 1, 1), columns(0, 1), values(1, 2)], INVALID, "content", "ROW_OFFSETS"),
    (
        "CSR offsets huge",
        CSR2,
        [offsets(0, 2**64 - 1, 2), columns(0, 1), values(1, 2)],
        INVALID,
        "content",
        "ROW_OFFSETS",
    ),
    (
        "CSR column past K",
        CSR2,
        [offsets(0, 1, 2), columns(0, 3), values(1, 2)],
        INVALID,
        "content",
        "COLUMN_INDICES[1]",
    ),
    ("CSR duplicate", CSR2, [offsets(0, 2, 2), columns(1, 1), values(1, 2)], INVALID, "content", "COLUMN_INDICES[1]"),
    ("CSR unsorted", CSR2, [offsets(0, 2, 2), columns(1, 0), values(1, 2)], INVALID, "content", "COLUMN_INDICES[1]"),
    ("CSR NaN", CSR2, [offsets(0, 1, 2), columns(0, 1), values(1, NAN)], INVALID, "content", "NaN at row 1, column 1"),
    ("COO row past M", COO2, [rows(0, 2), columns(0, 1), values(1, 2)], INVALID, "content", "ROW_INDICES[1]"),
    (
        "COO column past K",
        COO2,
        [rows(0, 1), columns(0, 2**32 - 1), values(1, 2)],
        INVALID,
        "content",
        "COLUMN_INDICES[1]",
    ),
    ("COO duplicate", COO2, [rows(1, 1), columns(1, 1), values(1, 2)], INVALID, "content", "(1, 1)"),
    ("bitmap with more bits", BIT2, [(BITS, b"\x07"), values(1, 2)], INVALID, "content", "BITMAP"),
    ("bitmap with fewer bits", BIT2, [(BITS, b"\x01"), values(1, 2)], INVALID, "content", "BITMAP"),
    ("bitmap with bits past the end", BIT2, [(BITS, b"\x81"), values(1, 2)], INVALID, "content", "BITMAP"),
]


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize(
    ("fields", "parts", "code", "field", "text"), [case[1:] for case in CONTENTS], ids=[case[0] for case in CONTENTS]
)
def test_bad_content(
    wire: Wire, fields: dict[str, Any], parts: list[tuple[int, bytes]], code: grpc.StatusCode, field: str, text: str
) -> None:
    """Errors of the content as a whole say in their text which part and position."""
    error = refused(wire.register([spec(**fields), *(chunk(part, data) for part, data in parts)]), code, field)
    assert text in error.message


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize("offset", [4, 20, 2**64 - 1])
def test_chunk_out_of_place(wire: Wire, offset: int) -> None:
    refused(wire.register([spec(), chunk(VALUES, GOOD[:12]), chunk(VALUES, GOOD[12:], offset)]), INVALID, "offset")


@pytest.mark.usefixtures("good")
def test_second_spec(wire: Wire) -> None:
    refused(wire.register([spec(), chunk(VALUES, GOOD[:12]), spec()]), INVALID, "payload")


@pytest.mark.usefixtures("good")
def test_nonfinite_weights_are_stored_when_allowed(client: spmmd.Client) -> None:
    weight = np.array([[1, np.inf], [2, 3]], np.float32)
    client.register("inf", weight, allow_nonfinite=True)
    assert client.matmul("inf", np.array([1, 1], np.float32)).tolist() == [np.inf, 5]
    client.unregister("inf")


@pytest.mark.usefixtures("good")
def test_upload_cut_off_leaves_nothing(server: LocalServer, client: spmmd.Client) -> None:
    def stop(progress: spmmd.Progress) -> None:
        raise RuntimeError("stop")

    with spmmd.Client(server.address, chunk_bytes=4096) as other, pytest.raises(RuntimeError, match="stop"):
        other.register("cut", np.ones((2000, 2000), np.float32), progress=stop)
    assert client.list("cut") == []


DAMAGED = ["magic.npy", "magic.safetensors", "cut.safetensors", "cut.npy", "huge.safetensors", "empty.safetensors"]
DAMAGED += ["strings.npy", "vector.npy"]


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize("path", DAMAGED)
def test_damaged_file(client: spmmd.Client, path: str) -> None:
    tensor = "up.weight" if path.endswith(".safetensors") else ""
    with pytest.raises((spmmd.InvalidArgumentError, spmmd.DataLossError)) as caught:
        client.register_file("bad", path, tensor=tensor)
    assert path in caught.value.message or any("file" in v.field for v in caught.value.field_violations)


@pytest.mark.usefixtures("good")
def test_missing_file_and_tensor(client: spmmd.Client) -> None:
    with pytest.raises(spmmd.NotFoundError, match=r"none\.npy"):
        client.register_file("bad", "none.npy")
    with pytest.raises(spmmd.SpmmdError, match="nobody") as caught:
        client.register_file("bad", "block.safetensors", tensor="nobody")
    assert caught.value.code in (INVALID, NOT_FOUND)
    with pytest.raises(spmmd.SpmmdError) as bias:
        client.register_file("bad", "block.safetensors", tensor="up.weight", bias_tensor="q.bias")
    assert bias.value.code == INVALID


# ---- execution


def x(**fields: Any) -> list[dict[str, Any]]:
    return [{"name": "x", "dense": dense(**fields)}]


def sx(**fields: Any) -> list[dict[str, Any]]:
    return [{"name": "x", "sparse": sparse(**fields)}]


def u64(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def add(name: str, left: str, right: str) -> dict[str, Any]:
    return {"name": name, "add": {"left": left, "right": right}}


TWO_INPUTS = [{"name": "x", "dense": dense()}, {"name": "z", "dense": dense(2)}]

EXECUTIONS: list[tuple[str, matmul_pb2.ExecuteRequest, grpc.StatusCode, str]] = [
    ("unknown layer", request(steps=[matmul(layer="nobody")]), NOT_FOUND, "nobody"),
    (
        "unknown version",
        request(steps=[{"name": "y", "matmul": {"layer": {"name": "w", "version": 9}, "input": "x"}}]),
        NOT_FOUND,
        "w",
    ),
    (
        "negative version",
        request(steps=[{"name": "y", "matmul": {"layer": {"name": "w", "version": -1}, "input": "x"}}]),
        INVALID,
        "version",
    ),
    ("empty layer name", request(steps=[matmul(layer="")]), INVALID, "layer"),
    ("K mismatch", request(x(columns=4)), INVALID, "inputs[0]"),
    ("K mismatch of sparse", request(sx(shape=[2, 4])), INVALID, "inputs[0]"),
    ("K mismatch between steps", request(steps=[matmul("a"), matmul("y", "a")]), INVALID, "steps[1]"),
    ("no dtype", request(x(dtype=0)), INVALID, "dtype"),
    ("unknown dtype", request(x(dtype=77)), INVALID, "dtype"),
    ("unknown output dtype", request(outputs=[{"step": "y", "dtype": 77}]), INVALID, "dtype"),
    ("unknown activation", request(steps=[matmul(activation=77)]), INVALID, "activation"),
    ("no shape", request(x(shape=[])), INVALID, "shape"),
    ("one dimension", request(x(shape=[3])), INVALID, "shape"),
    ("three dimensions", request(x(shape=[1, 1, 3])), INVALID, "shape"),
    ("negative rows", request(x(shape=[-1, 3])), INVALID, "shape"),
    ("no columns", request(x(shape=[1, 0], data=b"")), INVALID, "shape"),
    ("product overflows", request(x(shape=[2**62, 2**62])), INVALID, "shape"),
    ("bytes overflow to the right count", request(x(shape=[2**62, 3])), INVALID, "shape"),
    ("too few bytes", request(x(data=bytes(11))), INVALID, "data"),
    ("too many bytes", request(x(data=bytes(16))), INVALID, "data"),
    ("no content", request([{"name": "x", "dense": {"dtype": F32, "shape": [1, 3]}}]), INVALID, "inputs[0]"),
    ("no value", request([{"name": "x"}]), INVALID, "inputs[0]"),
    ("no target", matmul_pb2.ExecuteRequest(inputs=x()), INVALID, "target"),
    ("unknown program", matmul_pb2.ExecuteRequest(program_id="nobody", inputs=x()), NOT_FOUND, "nobody"),
    ("input missing", request([]), INVALID, "inputs"),
    ("input unknown", request([*x(), {"name": "z", "dense": dense()}]), INVALID, "inputs[1]"),
    ("input twice", request([*x(), *x()]), INVALID, "inputs[1]"),
    (
        "different numbers of rows",
        request(TWO_INPUTS, [matmul(), matmul("b", "z")], names=["x", "z"]),
        INVALID,
        "inputs",
    ),
    ("no inputs declared", request(names=[]), INVALID, "inputs"),
    ("no steps", request(steps=[]), INVALID, "steps"),
    ("no outputs", request(outputs=[]), INVALID, "outputs"),
    ("too many inputs", request(names=["x", *(f"i{i}" for i in range(16))]), INVALID, "inputs"),
    ("too many steps", request(steps=[matmul(), *(matmul(f"s{i}") for i in range(64))]), INVALID, "steps"),
    ("too many outputs", request(outputs=[{"step": "y"}] * 17), INVALID, "outputs"),
    ("duplicate step", request(steps=[matmul(), matmul()]), INVALID, "steps[1].name"),
    ("duplicate input", request(names=["x", "x"]), INVALID, "inputs[1]"),
    ("step named like an input", request(steps=[matmul("x"), matmul()]), INVALID, "steps[0].name"),
    ("step that reads itself", request(steps=[matmul("y", "y")]), INVALID, "steps[0]"),
    ("cycle", request(steps=[add("y", "x", "b"), add("b", "y", "x")]), INVALID, "steps[0]"),
    ("unknown operand", request(steps=[add("y", "x", "nobody")]), INVALID, "steps[0]"),
    ("unknown output", request(outputs=[{"step": "nobody"}]), INVALID, "outputs[0]"),
    ("output that is an input", request(outputs=[{"step": "x"}]), INVALID, "outputs[0]"),
    ("empty step name", request(steps=[matmul("")]), INVALID, "steps[0].name"),
    ("long step name", request(steps=[matmul("s" * 65)]), INVALID, "steps[0].name"),
    ("step without an operation", request(steps=[{"name": "y"}]), INVALID, "steps[0]"),
    (
        "shapes differ in add",
        request(steps=[matmul("a"), matmul("b", layer="tall"), add("y", "a", "b")]),
        INVALID,
        "steps[2]",
    ),
    ("sparse operand of add", request(sx(), [add("y", "x", "x")]), INVALID, "inputs[0].sparse"),
    ("NaN threshold", request(steps=[matmul(activation_threshold=NAN)]), INVALID, "activation_threshold"),
    ("negative threshold", request(steps=[matmul(activation_threshold=-1.0)]), INVALID, "activation_threshold"),
    ("infinite threshold", request(steps=[matmul(activation_threshold=INF)]), INVALID, "activation_threshold"),
    ("sparse without dtype", request(sx(dtype=0)), INVALID, "dtype"),
    ("sparse shape", request(sx(shape=[2])), INVALID, "shape"),
    ("sparse offsets missing", request(sx(row_offsets=b"")), INVALID, "row_offsets"),
    ("sparse offsets short", request(sx(row_offsets=u64(0, 3))), INVALID, "row_offsets"),
    ("sparse offsets not from 0", request(sx(row_offsets=u64(1, 2, 3))), INVALID, "row_offsets"),
    ("sparse offsets decrease", request(sx(row_offsets=u64(0, 4, 3))), INVALID, "row_offsets"),
    ("sparse offsets end early", request(sx(row_offsets=u64(0, 2, 2))), INVALID, "row_offsets"),
    ("sparse offsets cut", request(sx(row_offsets=u64(0, 2, 3)[:-1])), INVALID, "row_offsets"),
    ("sparse index past K", request(sx(indices=u32(0, 3, 1))), INVALID, "indices"),
    ("sparse index twice", request(sx(indices=u32(2, 2, 1))), INVALID, "indices"),
    ("sparse indices unsorted", request(sx(indices=u32(2, 0, 1))), INVALID, "indices"),
    ("sparse indices cut", request(sx(indices=u32(0, 2, 1)[:-1])), INVALID, "indices"),
    ("sparse values short", request(sx(values=bytes(8))), INVALID, "values"),
    ("sparse rows overflow", request(sx(shape=[2**63 - 1, 3])), INVALID, "shape"),
]


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize(
    ("bad", "code", "field"), [case[1:] for case in EXECUTIONS], ids=[case[0] for case in EXECUTIONS]
)
def test_bad_execution(wire: Wire, bad: matmul_pb2.ExecuteRequest, code: grpc.StatusCode, field: str) -> None:
    refused(wire.execute(bad), code, field)


@pytest.mark.usefixtures("good")
def test_too_many_tokens(wire: Wire, client: spmmd.Client) -> None:
    limit = client.server_info().limits.max_tokens
    shape = [limit + 1, 3]
    half = types_pb2.DATA_TYPE_F16
    refused(wire.execute(request(x(dtype=half, shape=shape, data=bytes(2 * 3 * shape[0])))), INVALID, "shape")


@pytest.mark.usefixtures("good")
def test_region_that_was_never_registered(wire: Wire) -> None:
    tensor = {"dtype": F32, "shape": [1, 3], "region": {"region": "nobody", "offset": 0, "size": 12}}
    result = wire.execute(request([{"name": "x", "dense": tensor}]))
    assert isinstance(result, SpmmdError)
    assert result.code in (NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)


@pytest.mark.usefixtures("good")
def test_bad_program_is_refused_at_registration(wire: Wire) -> None:
    program = request(steps=[matmul("y", "later"), matmul("later")]).program
    result = wire.call(wire.matmul.RegisterProgram, matmul_pb2.RegisterProgramRequest(program=program))
    refused(result, INVALID, "steps[0]")


@pytest.mark.usefixtures("good")
def test_stream_request_id_in_flight_twice_or_bad_request_leaves_the_stream(wire: Wire) -> None:
    bad = request(steps=[matmul(layer="nobody")])
    messages = [matmul_pb2.ExecuteStreamRequest(request_id=i, request=bad if i % 2 else request()) for i in range(10)]
    answers = {a.request_id: a for a in wire.matmul.ExecuteStream(iter(messages), timeout=20)}
    assert sorted(answers) == list(range(10))
    for i, answer in answers.items():
        assert answer.WhichOneof("result") == ("error" if i % 2 else "response")
        if i % 2:
            assert answer.error.code == NOT_FOUND.value[0]
            assert answer.error.status_details


OTHERS: list[tuple[str, Callable[[Wire], Any], Any, grpc.StatusCode, str]] = [
    ("get without a name", lambda w: w.catalog.GetLayer, catalog_pb2.GetLayerRequest(), INVALID, "layer"),
    ("get unknown", lambda w: w.catalog.GetLayer, catalog_pb2.GetLayerRequest(layer={"name": "q"}), NOT_FOUND, "q"),
    (
        "unregister unknown",
        lambda w: w.catalog.UnregisterLayer,
        catalog_pb2.UnregisterLayerRequest(layer={"name": "q"}),
        NOT_FOUND,
        "q",
    ),
    ("pin unknown", lambda w: w.catalog.PinLayer, catalog_pb2.PinLayerRequest(layer={"name": "q"}), NOT_FOUND, "q"),
    ("warm unknown", lambda w: w.catalog.WarmLayer, catalog_pb2.WarmLayerRequest(layer={"name": "q"}), NOT_FOUND, "q"),
    (
        "benchmark unknown",
        lambda w: w.catalog.Benchmark,
        catalog_pb2.BenchmarkRequest(layer={"name": "q"}),
        NOT_FOUND,
        "q",
    ),
    (
        "benchmark of no tokens",
        lambda w: w.catalog.Benchmark,
        catalog_pb2.BenchmarkRequest(layer={"name": "w"}, tokens=[0]),
        INVALID,
        "tokens",
    ),
    (
        "benchmark of too many tokens",
        lambda w: w.catalog.Benchmark,
        catalog_pb2.BenchmarkRequest(layer={"name": "w"}, tokens=[65537]),
        INVALID,
        "tokens",
    ),
    (
        "benchmark of too many widths",
        lambda w: w.catalog.Benchmark,
        catalog_pb2.BenchmarkRequest(layer={"name": "w"}, tokens=[1] * 33),
        INVALID,
        "tokens",
    ),
    (
        "benchmark repetitions",
        lambda w: w.catalog.Benchmark,
        catalog_pb2.BenchmarkRequest(layer={"name": "w"}, repetitions=10001),
        INVALID,
        "repetitions",
    ),
    (
        "negative page size",
        lambda w: w.catalog.ListLayers,
        catalog_pb2.ListLayersRequest(page_size=-1),
        INVALID,
        "page_size",
    ),
    (
        "page size past the limit",
        lambda w: w.catalog.ListLayers,
        catalog_pb2.ListLayersRequest(page_size=1001),
        INVALID,
        "page_size",
    ),
    (
        "foreign page token",
        lambda w: w.catalog.ListLayers,
        catalog_pb2.ListLayersRequest(page_token="mine"),
        INVALID,
        "page_token",
    ),
    (
        "unknown program",
        lambda w: w.matmul.UnregisterProgram,
        matmul_pb2.UnregisterProgramRequest(program_id="q"),
        NOT_FOUND,
        "q",
    ),
]


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize(
    ("method", "bad", "code", "field"), [case[1:] for case in OTHERS], ids=[case[0] for case in OTHERS]
)
def test_bad_request(wire: Wire, method: Callable[[Wire], Any], bad: Any, code: grpc.StatusCode, field: str) -> None:
    refused(wire.call(method(wire), bad), code, field)
