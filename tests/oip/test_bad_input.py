"""Bad requests get a clear error that names the field of the protocol's message, and the server goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from conftest import K, M
from tritonclient.grpc import service_pb2


def request(shape: Any = (2, K), datatype: str = "FP16", raw: list[bytes] | None = None, **fields: Any) -> Any:
    """A good request but for what the arguments change."""
    message = service_pb2.ModelInferRequest(**{"model_name": "plain", **fields})
    message.inputs.add(name="x", datatype=datatype, shape=shape)
    message.raw_input_contents.extend([bytes(2 * 2 * K)] if raw is None else raw)
    return message


def test_shapes(refused: Callable[..., str]) -> None:
    for shape, field in [
        ([2], "inputs[0].shape"),
        ([], "inputs[0].shape"),
        ([1, 2, K], "inputs[0].shape"),
        ([2, K + 1], "inputs[0].shape[1]"),
        ([2, 0], "inputs[0].shape[1]"),
        ([-1, K], "inputs[0].shape[0]"),
        ([2, -K], "inputs[0].shape[1]"),
        ([2**31, 2**31], "inputs[0].shape[1]"),
        ([2**62, 4], "inputs[0].shape[1]"),
        ([-(2**63), -(2**63)], "inputs[0].shape[1]"),
        ([2**63 - 1, 2**63 - 1], "inputs[0].shape[1]"),
        ([2, 2**40], "inputs[0].shape[1]"),
        ([2**58, K], "inputs[0].shape[0]"),
        ([2**63 - 1, K], "inputs[0].shape[0]"),
        ([-(2**63), K], "inputs[0].shape[0]"),
        ([65537, K], "inputs[0].shape[0]"),
    ]:
        refused("INVALID_ARGUMENT", request(shape), field)
    for shape in ([2**62, K], [-1, K], [2**58, K]):
        typed = request(shape, "FP32", [])
        typed.inputs[0].contents.fp32_contents.extend([1.0] * 4)
        refused("INVALID_ARGUMENT", typed, "inputs[0].shape[0]")


@pytest.mark.parametrize("size", [0, 1, 2 * 2 * K - 1, 2 * 2 * K + 1, 2 * 2 * K * 2])
def test_sizes(refused: Callable[..., str], size: int) -> None:
    message = refused("INVALID_ARGUMENT", request(raw=[bytes(size)]), "raw_input_contents[0]")
    assert f"expected {2 * 2 * K} bytes, got {size}" in message


def test_contents(refused: Callable[..., str]) -> None:
    refused("INVALID_ARGUMENT", request(raw=[]), "inputs[0]")
    refused("INVALID_ARGUMENT", request(raw=[bytes(4 * K)] * 2), "raw_input_contents")
    both = request()
    both.inputs[0].contents.fp32_contents.append(1.0)
    refused("INVALID_ARGUMENT", both, "inputs[0].contents")
    half = request(raw=[])
    half.inputs[0].contents.fp32_contents.append(1.0)
    refused("INVALID_ARGUMENT", half, "inputs[0].contents")
    short = request(datatype="FP32", raw=[])
    short.inputs[0].contents.fp32_contents.extend([1.0] * (2 * K - 1))
    assert f"expected {2 * K} elements" in refused("INVALID_ARGUMENT", short, "inputs[0].contents.fp32_contents")
    other = request(datatype="FP32", raw=[])
    other.inputs[0].contents.int_contents.extend([1] * (2 * K))
    refused("INVALID_ARGUMENT", other, "inputs[0].contents")


def test_names(refused: Callable[..., str]) -> None:
    refused("NOT_FOUND", request(model_name="nowhere"), "model_name")
    refused("INVALID_ARGUMENT", request(model_name=""), "model_name")
    refused("NOT_FOUND", request(model_version="2"), "model_name")
    for version in ("0", "-1", "one", "1.0", "99999999999999999999", "x" * 10_000):
        refused("INVALID_ARGUMENT", request(model_version=version), "model_version")
    renamed = request()
    renamed.inputs[0].name = "input"
    refused("INVALID_ARGUMENT", renamed, "inputs[0].name")
    for datatype in ("INT8", "FP64", "fp16", "BYTES", ""):
        refused("INVALID_ARGUMENT", request(datatype=datatype), "inputs[0].datatype")
    twice = request(raw=[bytes(4 * K)] * 2)
    twice.inputs.add(name="x", datatype="FP16", shape=[2, K])
    refused("INVALID_ARGUMENT", twice, "inputs[1].name")
    none = service_pb2.ModelInferRequest(model_name="plain")
    refused("INVALID_ARGUMENT", none, "inputs")
    none.raw_input_contents.append(b"")
    refused("INVALID_ARGUMENT", none, "raw_input_contents")
    output = request()
    output.outputs.add(name="z")
    refused("INVALID_ARGUMENT", output, "outputs[0].name")
    output.outputs[0].name = "y"
    output.outputs.add(name="y")
    refused("INVALID_ARGUMENT", output, "outputs[1].name")


def test_parameters(refused: Callable[..., str]) -> None:
    for name, kind, value in [
        ("priority", "string_param", "high"),
        ("priority", "int64_param", -1),
        ("timeout", "int64_param", -1),
        ("timeout", "double_param", 1.0),
        ("activation", "string_param", "tanh"),
        ("activation", "int64_param", 1),
        ("ignore_bias", "string_param", "yes"),
        ("activation_threshold", "string_param", "0.5"),
        ("activation_threshold", "double_param", -1.0),
        ("activation_threshold", "double_param", float("nan")),
    ]:
        message = request()
        setattr(message.parameters[name], kind, value)
        refused("INVALID_ARGUMENT", message, f"parameters[{name}]")
    classes = request()
    classes.outputs.add(name="y").parameters["classification"].int64_param = 3
    refused("INVALID_ARGUMENT", classes, "outputs[0].parameters[classification]")


def test_programs(refused: Callable[..., str], program: str) -> None:
    good = service_pb2.ModelInferRequest(model_name=program)
    for name in ("x", "shift"):
        good.inputs.add(name=name, datatype="FP16", shape=[2, K])
        good.raw_input_contents.append(bytes(4 * K))
    missing = service_pb2.ModelInferRequest()
    missing.CopyFrom(good)
    del missing.inputs[1], missing.raw_input_contents[1]
    refused("INVALID_ARGUMENT", missing, "inputs")
    unequal = service_pb2.ModelInferRequest()
    unequal.CopyFrom(good)
    unequal.inputs[1].shape[0] = 1
    unequal.raw_input_contents[1] = bytes(2 * K)
    refused("INVALID_ARGUMENT", unequal, "inputs[1].shape[0]")
    short = service_pb2.ModelInferRequest()
    short.CopyFrom(good)
    del short.raw_input_contents[1]
    refused("INVALID_ARGUMENT", short, "raw_input_contents")
    fixed = service_pb2.ModelInferRequest()
    fixed.CopyFrom(good)
    fixed.parameters["activation"].string_param = "relu"
    refused("INVALID_ARGUMENT", fixed, "parameters[activation]")
    fixed.parameters.clear()
    fixed.model_version = "2"
    refused("NOT_FOUND", fixed, "model_version")


def test_bytes_that_are_no_message(client: triton.InferenceServerClient) -> None:
    rng = np.random.default_rng(0)
    good = request().SerializeToString()
    send = client._channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    codes = set()
    for i in range(300):
        data = bytearray(good)
        for position in rng.integers(0, len(data), 1 + i % 8):
            data[position] = rng.integers(0, 256)
        if i % 3 == 0:
            del data[rng.integers(0, len(data)) :]
        try:
            send(bytes(data), timeout=20.0)
        except grpc.RpcError as error:
            codes.add(error.code().name)
    assert codes
    assert codes <= {"INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED"}  # a timeout may be what became of the bytes
    assert client.infer("plain", [_zeros()]).as_numpy("y").shape == (1, M)


def _zeros() -> triton.InferInput:
    given = triton.InferInput("x", [1, K], "FP16")
    given.set_data_from_numpy(np.zeros((1, K), np.float16))
    return given
