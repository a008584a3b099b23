"""Triton's system shared-memory extension, by Triton's own client and its helper for regions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as triton_shm
from conftest import K, Layers, M, assert_product, rows, sparse, tensor
from local_server import LocalServer
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

SIZE = 64 * 1024
KEY = "/spmmd-oip-test"


@pytest.fixture
def region(client: triton.InferenceServerClient) -> Iterator[Any]:
    handle = triton_shm.create_shared_memory_region("tensors", KEY, SIZE)
    client.register_system_shared_memory("tensors", KEY, SIZE)
    yield handle
    client.unregister_system_shared_memory()
    triton_shm.destroy_shared_memory_region(handle)


def region_of(shape: tuple[int, ...], datatype: str, offset: int, size: int, name: str = "x") -> triton.InferInput:
    given = triton.InferInput(name, shape, datatype)
    given.set_shared_memory("tensors", size, offset)
    return given


def output_in(size: int, offset: int) -> triton.InferRequestedOutput:
    output = triton.InferRequestedOutput("y")
    output.set_shared_memory("tensors", size, offset)
    return output


def test_tensors_are_read_and_written_in_place(
    client: triton.InferenceServerClient, layers: Layers, region: Any
) -> None:
    weight = layers.weights["plain"]
    x = rows(1, 4)
    triton_shm.set_shared_memory_region(region, [x])
    given = region_of(x.shape, "FP16", 0, x.nbytes)
    # Input there, output in the answer; both there; output alone, in a place larger than it needs.
    assert_product(client.infer("plain", [given]).as_numpy("y"), x, weight, "FP16")
    for inputs, size in (([given], 4 * M * 2), ([tensor(x, "FP16")], 8192)):
        triton_shm.set_shared_memory_region(region, [np.full(4 * M, -1, np.float16)], offset=4096)
        result = client.infer("plain", inputs, outputs=[output_in(size, 4096)])
        output = result.get_output("y")
        assert list(output.shape) == [4, M]
        assert output.parameters["shared_memory_region"].string_param == "tensors"
        assert output.parameters["shared_memory_byte_size"].int64_param == 4 * M * 2
        assert output.parameters["shared_memory_offset"].int64_param == 4096
        assert list(result.get_response().raw_output_contents) == [b""]
        y = triton_shm.get_contents_as_numpy(region, np.float16, [4, M], offset=4096)
        assert_product(np.array(y), x, weight, "FP16")


def test_raw_and_shared_inputs_mix(client: triton.InferenceServerClient, program: str, region: Any) -> None:
    x, shift = rows(2, 3, "FP32"), rows(3, 3, "FP32")
    triton_shm.set_shared_memory_region(region, [x])
    inputs = [region_of(x.shape, "FP32", 0, x.nbytes), tensor(shift, "FP32", "shift")]
    mixed, plain = client.infer(program, inputs), client.infer(program, [tensor(x, "FP32"), inputs[1]])
    for name in ("hidden", "moved"):
        assert (mixed.as_numpy(name) == plain.as_numpy(name)).all()


def test_on_a_stream_and_on_another_connection(server: LocalServer, layers: Layers, region: Any) -> None:
    """As in Triton, a region belongs to the server: perf_analyzer registers on one connection and infers on others."""
    x = rows(4, 2)
    triton_shm.set_shared_memory_region(region, [x])
    message = service_pb2.ModelInferRequest(model_name="plain")
    given = message.inputs.add(name="x", datatype="FP16", shape=x.shape)
    given.parameters["shared_memory_region"].string_param = "tensors"
    given.parameters["shared_memory_byte_size"].int64_param = x.nbytes
    channel = [("grpc.use_local_subchannel_pool", 1)]
    with triton.InferenceServerClient(server.address, channel_args=channel) as other:
        answers = list(other._client_stub.ModelStreamInfer(iter([message] * 3), timeout=20.0))
    assert len(answers) == 3
    for answer in answers:
        assert answer.error_message == ""
        y = np.frombuffer(answer.infer_response.raw_output_contents[0], np.float16).reshape(2, M)
        assert_product(y, x, layers.weights["plain"], "FP16")


def test_status_and_names(client: triton.InferenceServerClient, region: Any) -> None:
    status = client.get_system_shared_memory_status().regions
    assert list(status) == ["tensors"]
    assert (status["tensors"].key, status["tensors"].offset, status["tensors"].byte_size) == (KEY, 0, SIZE)
    client.register_system_shared_memory("part", KEY.lstrip("/"), 512, offset=4096)
    assert client.get_system_shared_memory_status("part").regions["part"].offset == 4096
    with pytest.raises(InferenceServerException, match="part") as error:
        client.register_system_shared_memory("part", KEY, 512)
    assert error.value.status() == "StatusCode.ALREADY_EXISTS"
    client.unregister_system_shared_memory("part")
    client.unregister_system_shared_memory("part")  # no error, as in Triton
    with pytest.raises(InferenceServerException, match="part") as error:
        client.get_system_shared_memory_status("part")
    assert error.value.status() == "StatusCode.NOT_FOUND"
    client.unregister_system_shared_memory()
    assert not client.get_system_shared_memory_status().regions


def test_bad_registrations(client: triton.InferenceServerClient, region: Any) -> None:
    for name, key, size, offset, code, field in [
        ("a", KEY, SIZE + 1, 0, "INVALID_ARGUMENT", "byte_size"),
        ("a", KEY, 1, SIZE, "INVALID_ARGUMENT", "offset"),
        ("a", KEY, 2**64 - 8, 16, "INVALID_ARGUMENT", "size"),
        ("a", KEY, 0, 0, "INVALID_ARGUMENT", "byte_size"),
        ("", KEY, 64, 0, "INVALID_ARGUMENT", "name"),
        ("a b", KEY, 64, 0, "INVALID_ARGUMENT", "name"),
        ("a", "/no-such-object", 64, 0, "NOT_FOUND", "no-such-object"),
        ("a", "/../etc/passwd", 64, 0, "INVALID_ARGUMENT", "key"),
        ("a", "", 64, 0, "INVALID_ARGUMENT", "key"),
    ]:
        with pytest.raises(InferenceServerException, match=field) as error:
            client.register_system_shared_memory(name, key, size, offset=offset)
        assert error.value.status() == f"StatusCode.{code}", error.value
    assert list(client.get_system_shared_memory_status().regions) == ["tensors"]


def test_bad_uses(client: triton.InferenceServerClient, region: Any) -> None:
    shape = (2, K)
    size = 2 * K * 2
    for offset, given, field in [
        (SIZE, size, "shared_memory_offset"),
        (SIZE - size + 2, size, "shared_memory_offset"),
        (2**63 - 8, size, "shared_memory_offset"),
        (1, size, "shared_memory_offset"),  # not aligned
        (0, size - 1, "shared_memory_byte_size"),
        (0, size + 1, "shared_memory_byte_size"),
    ]:
        with pytest.raises(InferenceServerException, match=f"inputs\\[0\\].parameters\\[{field}\\]: ") as error:
            client.infer("plain", [region_of(shape, "FP16", offset, given)])
        assert error.value.status() == "StatusCode.INVALID_ARGUMENT"
    x = tensor(rows(1, 2), "FP16")
    for offset, given, field in [
        (0, 2 * M * 2 - 1, "shared_memory_byte_size"),
        (SIZE - 2, 2 * M * 2, "shared_memory_offset"),
    ]:
        with pytest.raises(InferenceServerException, match=f"outputs\\[0\\].parameters\\[{field}\\]: ") as error:
            client.infer("plain", [x], outputs=[output_in(given, offset)])
        assert error.value.status() == "StatusCode.INVALID_ARGUMENT"
    # The output over the input.
    with pytest.raises(InferenceServerException, match="overlap"):
        client.infer("plain", [region_of(shape, "FP16", 0, size)], outputs=[output_in(2 * M * 2, 0)])
    client.unregister_system_shared_memory("tensors")
    with pytest.raises(InferenceServerException, match=r"inputs\[0\].parameters\[shared_memory_region\]: ") as error:
        client.infer("plain", [region_of(shape, "FP16", 0, size)])
    assert error.value.status() == "StatusCode.NOT_FOUND"


def test_memory_that_is_taken_away_costs_its_request_only(client: triton.InferenceServerClient, layers: Layers) -> None:
    block = shared_memory.SharedMemory(create=True, size=SIZE)
    try:
        client.register_system_shared_memory("tensors", f"/{block.name.lstrip('/')}", SIZE)
        os.truncate(Path("/dev/shm", block.name.lstrip("/")), 0)
        with pytest.raises(InferenceServerException, match="gone") as error:
            client.infer("plain", [region_of((2, K), "FP16", 0, 2 * K * 2)])
        assert error.value.status() == "StatusCode.FAILED_PRECONDITION"
        x = rows(1, 2)
        assert_product(client.infer("plain", [tensor(x, "FP16")]).as_numpy("y"), x, layers.weights["plain"], "FP16")
    finally:
        client.unregister_system_shared_memory()
        block.close()
        block.unlink()


def test_cycles_leave_nothing(server: LocalServer, client: triton.InferenceServerClient, region: Any) -> None:
    descriptors = Path(f"/proc/{server.pid}/fd")
    maps = Path(f"/proc/{server.pid}/maps")

    def held() -> tuple[int, int]:
        return sum(1 for _ in descriptors.iterdir()), maps.read_text().count(KEY)

    baseline = held()
    for _ in range(300):
        client.register_system_shared_memory("again", KEY, SIZE)
        client.unregister_system_shared_memory("again")
    after = held()
    assert after[1] == baseline[1]
    assert after[0] <= baseline[0] + 2  # a connection or two of other tests may come or go


def test_off_by_default(binary: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", sparse(1))
    with LocalServer(binary, ["--backend=cpu"]) as server, triton.InferenceServerClient(server.address) as client:
        assert "system_shared_memory" not in client.get_server_metadata().extensions
        with pytest.raises(InferenceServerException, match="--shared-memory") as error:
            client.register_system_shared_memory("tensors", KEY, SIZE)
        assert error.value.status() == "StatusCode.FAILED_PRECONDITION"
        assert not client.get_system_shared_memory_status().regions
        client.unregister_system_shared_memory()
