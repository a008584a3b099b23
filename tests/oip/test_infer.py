"""ModelInfer and ModelStreamInfer, by Triton's own client."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from conftest import K, Layers, M, assert_close, assert_product, rows, tensor
from local_server import LocalServer
from reference import linear, magnitude
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32"])
@pytest.mark.parametrize("n", [1, 7])
def test_an_answer_has_the_type_of_the_request(
    client: triton.InferenceServerClient, layers: Layers, datatype: str, n: int
) -> None:
    for seed, (name, weight) in enumerate(layers.weights.items()):
        x = rows(seed, n, datatype)
        result = client.infer(name, [tensor(x, datatype)], request_id=f"request {seed}")
        stored = weight if weight.dtype == np.float16 else weight.astype("bfloat16")
        assert_product(result.as_numpy("y"), x, stored, datatype)
        response = result.get_response()
        assert (response.model_name, response.model_version, response.id) == (name, "1", f"request {seed}")


def test_no_rows_are_no_error(client: triton.InferenceServerClient) -> None:
    x = np.zeros((0, K), np.float32)
    request = service_pb2.ModelInferRequest(model_name="plain", raw_input_contents=[b""])
    request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    response = client._client_stub.ModelInfer(request, timeout=20.0)
    assert list(response.outputs[0].shape) == [0, M]
    assert list(response.raw_output_contents) == [b""]


def test_typed_contents(client: triton.InferenceServerClient, layers: Layers) -> None:
    x = rows(9, 2, "FP32")
    request = service_pb2.ModelInferRequest(model_name="plain", id="typed")
    request.inputs.add(name="x", datatype="FP32", shape=x.shape).contents.fp32_contents.extend(x.ravel().tolist())
    response = client._client_stub.ModelInfer(request, timeout=20.0)
    y = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(response.outputs[0].shape)
    assert_product(y, x, layers.weights["plain"], "FP32")
    assert response.id == "typed"


def test_parameters(client: triton.InferenceServerClient, layers: Layers) -> None:
    x = rows(10, 3, "FP32")
    weight = layers.weights["plain"]
    for parameters in ({"activation": "relu"}, {"activation": "relu", "of_no_meaning_here": 3, "ignore_bias": True}):
        y = client.infer("plain", [tensor(x, "FP32")], parameters=parameters).as_numpy("y")
        assert_close(y, np.maximum(linear(x, weight), 0), magnitude(x, weight), "FP32")
    kept = np.where(np.abs(x) > 0.5, x, 0).astype(np.float32)
    y = client.infer("plain", [tensor(x, "FP32")], parameters={"activation_threshold": 0.5}).as_numpy("y")
    assert_product(y, kept, weight, "FP32")
    # Triton's own: priority, timeout (microseconds), sequences that a stateless model does not look at.
    y = client.infer("plain", [tensor(x, "FP32")], priority=2, timeout=10_000_000, sequence_id=7, sequence_start=True)
    assert_product(y.as_numpy("y"), x, weight, "FP32")


def test_a_timeout_of_the_request_ends_it(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="deadline") as error:
        client.infer("plain", [tensor(rows(1, 1), "FP16")], timeout=1)
    assert error.value.status() == "StatusCode.DEADLINE_EXCEEDED"


def test_versions(client: triton.InferenceServerClient, layers: Layers) -> None:
    first = layers.register("versioned", rows(20, M))
    second = layers.register("versioned", rows(21, M))
    assert client.get_model_metadata("versioned").versions == ["2", "1"]
    x = rows(22, 2, "FP32")
    for version, weight in (("1", first), ("2", second), ("", second)):
        result = client.infer("versioned", [tensor(x, "FP32")], model_version=version)
        assert_product(result.as_numpy("y"), x, weight, "FP32")
        assert result.get_response().model_version == (version or "2")
        assert client.is_model_ready("versioned", version)
    assert not client.is_model_ready("versioned", "3")
    layers.unregister("versioned")


def test_programs_are_models(client: triton.InferenceServerClient, layers: Layers, program: str) -> None:
    metadata = client.get_model_metadata(program)
    assert [(i.name, i.datatype, list(i.shape)) for i in metadata.inputs] == [
        ("x", "FP32", [-1, K]),
        ("shift", "FP32", [-1, K]),
    ]
    assert [(o.name, o.datatype, list(o.shape)) for o in metadata.outputs] == [
        ("hidden", "FP32", [-1, M]),
        ("moved", "FP16", [-1, K]),
    ]
    assert client.is_model_ready(program)
    x, shift = rows(30, 2, "FP32"), rows(31, 2, "FP32")
    weight = layers.weights["plain"]
    inputs = [tensor(shift, "FP32", "shift"), tensor(x, "FP32")]  # any order
    result = client.infer(program, inputs)
    pre = linear(x, weight)
    assert_close(result.as_numpy("hidden"), pre / (1 + np.exp(-pre)), magnitude(x, weight), "FP32")
    assert_close(result.as_numpy("moved"), x.astype(np.float64) + shift, np.abs(x), "FP16")
    one = client.infer(program, inputs, outputs=[triton.InferRequestedOutput("moved")])
    assert one.as_numpy("hidden") is None
    assert (one.as_numpy("moved") == result.as_numpy("moved")).all()


def test_compressed_messages(client: triton.InferenceServerClient, layers: Layers) -> None:
    x = rows(40, 16)
    for algorithm in ("gzip", "deflate"):
        y = client.infer("plain", [tensor(x, "FP16")], compression_algorithm=algorithm).as_numpy("y")
        assert_product(y, x, layers.weights["plain"], "FP16")


def test_many_in_flight(client: triton.InferenceServerClient, layers: Layers) -> None:
    """async_infer: what waits together may share a launch, and every caller gets his own rows."""
    answers: queue.Queue[Any] = queue.Queue()
    xs = {str(i): rows(100 + i, 1 + i % 5, "FP32") for i in range(200)}
    for name, x in xs.items():
        client.async_infer(
            "plain", [tensor(x, "FP32")], lambda result, error: answers.put((result, error)), request_id=name
        )
    for _ in list(xs):
        result, error = answers.get(timeout=30)
        assert error is None
        name = result.get_response().id
        assert_product(result.as_numpy("y"), xs.pop(name), layers.weights["plain"], "FP32")
    assert not xs


def test_asyncio(server: LocalServer, layers: Layers) -> None:
    async def run() -> None:
        async with triton_aio.InferenceServerClient(server.address) as client:
            assert await client.is_server_ready()
            xs = [rows(50 + i, 2, "BF16") for i in range(20)]
            results = await asyncio.gather(*(client.infer("plain", [tensor(x, "BF16")]) for x in xs))
            for x, result in zip(xs, results, strict=True):
                assert_product(result.as_numpy("y"), x, layers.weights["plain"], "BF16")

    asyncio.run(run())


class Stream:
    """A ModelStreamInfer of the client; answers by request id."""

    def __init__(self, client: triton.InferenceServerClient) -> None:
        self.client = client
        self.answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: self.answers.put((result, error)))

    def next(self) -> Any:
        return self.answers.get(timeout=30)


def test_a_stream_matches_answers_by_id(client: triton.InferenceServerClient, layers: Layers) -> None:
    stream = Stream(client)
    xs = {f"id-{i}": rows(200 + i, 1 + i % 3) for i in range(300)}
    for name, x in xs.items():
        client.async_stream_infer("plain", [tensor(x, "FP16")], request_id=name)
    for _ in list(xs):
        result, error = stream.next()
        assert error is None
        assert_product(result.as_numpy("y"), xs.pop(result.get_response().id), layers.weights["plain"], "FP16")
    assert not xs
    client.stop_stream()


def test_an_error_on_a_stream_is_an_answer(client: triton.InferenceServerClient, layers: Layers) -> None:
    stream = Stream(client)
    x = rows(60, 1)
    client.async_stream_infer("nowhere", [tensor(x, "FP16")], request_id="bad")
    result, error = stream.next()
    assert result is None
    assert "nowhere" in str(error)
    client.async_stream_infer("plain", [tensor(x, "FP16")], request_id="good", enable_empty_final_response=True)
    result, error = stream.next()
    assert error is None
    assert result.get_response().id == "good"
    assert result.get_response().parameters["triton_final_response"].bool_param
    assert_product(result.as_numpy("y"), x, layers.weights["plain"], "FP16")
    client.stop_stream()


def test_a_stream_says_which_request_failed(client: triton.InferenceServerClient) -> None:
    good = service_pb2.ModelInferRequest(model_name="plain", id="good", raw_input_contents=[bytes(2 * K)])
    good.inputs.add(name="x", datatype="FP16", shape=[1, K])
    bad = service_pb2.ModelInferRequest(model_name="plain", id="bad")
    answers = client._client_stub.ModelStreamInfer(iter([bad, good]), timeout=20.0)
    by_id = {answer.infer_response.id: answer for answer in answers}
    assert set(by_id) == {"good", "bad"}
    assert by_id["good"].error_message == ""
    assert by_id["bad"].error_message.startswith("inputs: ")
    assert not by_id["bad"].infer_response.outputs


def test_a_stream_can_be_cancelled(client: triton.InferenceServerClient) -> None:
    stream = Stream(client)
    for i in range(100):
        client.async_stream_infer("plain", [tensor(rows(i, 8), "FP16")], request_id=str(i))
    client.stop_stream(cancel_requests=True)
    del stream
    assert client.infer("plain", [tensor(rows(1, 1), "FP16")]).as_numpy("y").shape == (1, M)
