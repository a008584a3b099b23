"""Health, metadata, statistics, repository control, tokens and drain, by Triton's own client."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from conftest import K, Layers, M, rows, sparse, tensor
from google.protobuf import descriptor_pb2
from local_server import LocalServer
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException


def code_of(error: pytest.ExceptionInfo[InferenceServerException]) -> str:
    return str(error.value.status()).removeprefix("StatusCode.")


def fields(descriptor: descriptor_pb2.FileDescriptorProto) -> dict[str, Any]:
    """Number, type and label of every field, and every enum value, by full name."""
    found: dict[str, Any] = {}

    def walk(message: descriptor_pb2.DescriptorProto, prefix: str) -> None:
        name = f"{prefix}.{message.name}"
        for field in message.field:
            found[f"{name}.{field.name}"] = (field.number, field.type, field.label, field.type_name)
        for nested in message.nested_type:
            walk(nested, name)

    for message in descriptor.message_type:
        walk(message, "")
    for enum in descriptor.enum_type:
        for value in enum.value:
            found[f"{enum.name}.{value.name}"] = value.number
    for service in descriptor.service:
        for method in service.method:
            found[f"{service.name}/{method.name}"] = (
                method.input_type,
                method.output_type,
                method.client_streaming,
                method.server_streaming,
            )
    return found


def test_our_messages_are_tritons(tmp_path: Path) -> None:
    """Everything in proto/inference has the number and type that Triton gives it, and no method is missing."""
    import subprocess

    from wire import REPOSITORY

    out = tmp_path / "ours"
    command = ["protoc", f"-I{REPOSITORY / 'proto'}", f"--descriptor_set_out={out}", "--include_imports"]
    subprocess.run([*command, "inference/grpc_service.proto"], check=True)
    ours = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    for file, module in zip(ours.file, (model_config_pb2, service_pb2), strict=True):
        theirs = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(theirs)
        assert file.package == theirs.package
        expected = fields(theirs)
        given = fields(file)
        assert given.items() <= expected.items(), set(given.items()) - set(expected.items())
        assert {name for name in expected if "/" in name} <= set(given)


def test_health(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("plain")
    assert client.is_model_ready("plain", "1")
    assert client.is_model_ready("block.0/mlp/up.weight")
    assert not client.is_model_ready("plain", "2")
    assert not client.is_model_ready("plain", "latest")
    assert not client.is_model_ready("nowhere")


def test_metadata(client: triton.InferenceServerClient) -> None:
    server = client.get_server_metadata()
    assert server.name == "spmmd"
    assert {"model_configuration", "statistics", "model_repository", "system_shared_memory"} <= set(server.extensions)
    model = client.get_model_metadata("block.0/mlp/up.weight")
    assert model.name == "block.0/mlp/up.weight"
    assert (model.versions, model.platform) == (["1"], "spmmd")
    assert [(t.name, t.datatype, list(t.shape)) for t in model.inputs] == [("x", "FP16", [-1, K])]
    assert [(t.name, t.datatype, list(t.shape)) for t in model.outputs] == [("y", "FP16", [-1, 96])]
    assert client.get_model_metadata("fp32").inputs[0].datatype == "BF16"
    config = client.get_model_config("plain").config
    assert config.max_batch_size == 65536
    assert [(t.name, t.data_type, list(t.dims)) for t in config.input] == [("x", model_config_pb2.TYPE_FP16, [K])]
    assert [(t.name, t.data_type, list(t.dims)) for t in config.output] == [("y", model_config_pb2.TYPE_FP16, [M])]
    assert not config.model_transaction_policy.decoupled
    assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
    for ask in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics):
        with pytest.raises(InferenceServerException, match="nowhere") as error:
            ask("nowhere")
        assert code_of(error) == "NOT_FOUND"
        with pytest.raises(InferenceServerException, match="version: ") as error:
            ask("plain", "-1")
        assert code_of(error) == "INVALID_ARGUMENT"


def test_statistics(client: triton.InferenceServerClient, layers: Layers) -> None:
    layers.register("counted", sparse(5))

    def numbers() -> Any:
        return client.get_inference_statistics("counted").model_stats[0]

    before = numbers()
    assert (before.name, before.version, before.inference_count, before.last_inference) == ("counted", "1", 0, 0)
    assert before.memory_usage[0].type == "CPU"
    assert before.memory_usage[0].byte_size > 0
    began = time.time()
    for n in (1, 4, 4):
        client.infer("counted", [tensor(rows(n, n), "FP16")])
    with pytest.raises(InferenceServerException):
        client.infer("counted", [tensor(rows(1, 1, k=K + 1), "FP16")])
    elapsed = (time.time() - began) * 1e9
    after = numbers()
    stats = after.inference_stats
    assert (after.inference_count, after.execution_count) == (9, 3)
    assert (stats.success.count, stats.fail.count) == (3, 1)
    assert abs(after.last_inference / 1000 - time.time()) < 60
    parts = [stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output]
    assert [part.count for part in parts] == [3] * 4
    assert stats.compute_infer.ns > 0
    assert stats.success.ns == sum(part.ns for part in parts)
    assert stats.success.ns + stats.fail.ns <= elapsed
    assert [(b.batch_size, b.compute_infer.count) for b in after.batch_stats] == [(1, 1), (4, 2)]
    assert sum(b.compute_infer.ns for b in after.batch_stats) == pytest.approx(stats.compute_infer.ns, abs=10)
    everything = {(s.name, s.version): s for s in client.get_inference_statistics().model_stats}
    assert everything["counted", "1"].inference_count == 9
    # Another layer under the old name does not inherit the numbers.
    layers.unregister("counted")
    layers.register("counted", sparse(6))
    assert numbers().inference_count == 0
    layers.unregister("counted")


def test_repository(client: triton.InferenceServerClient, layers: Layers, program: str) -> None:
    layers.register("a/b/c", sparse(7))
    index = {(m.name, m.version): m.state for m in client.get_model_repository_index().models}
    assert index["a/b/c", "1"] == "READY"
    assert index[program, "1"] == "READY"
    assert {"plain", "fp32", "block.0/mlp/up.weight"} <= {name for name, _ in index}
    client.load_model("a/b/c")
    client.load_model(program)
    with pytest.raises(InferenceServerException, match="parameters\\[config\\]") as error:
        client.load_model("a/b/c", config="{}")
    assert code_of(error) == "INVALID_ARGUMENT"
    client.unload_model("a/b/c")
    del layers.weights["a/b/c"]
    assert not client.is_model_ready("a/b/c")
    for change in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException, match="a/b/c") as error:
            change("a/b/c")
        assert code_of(error) == "NOT_FOUND"
    with pytest.raises(InferenceServerException, match="a/b/c"):
        client.infer("a/b/c", [tensor(rows(1, 1), "FP16")])


def test_what_is_not_offered_says_so(client: triton.InferenceServerClient) -> None:
    for ask in (client.get_trace_settings, client.get_log_settings):
        with pytest.raises(InferenceServerException, match="does not offer") as error:
            ask()
        assert code_of(error) == "UNIMPLEMENTED"
    with pytest.raises(InferenceServerException, match="GPU") as error:
        client.register_cuda_shared_memory("region", b"A" * 88, 0, 64)
    assert code_of(error) == "UNIMPLEMENTED"
    assert not client.get_cuda_shared_memory_status().regions
    client.unregister_cuda_shared_memory()


def test_tokens(binary: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("data data-token-0123456789\nadmin admin-token-0123456789\n")
    np.save(tmp_path / "w.npy", sparse(1))
    flags = ["--backend=cpu", f"--auth-token-file={tokens}", f"--model-repository={tmp_path}", "--preload=w=w.npy"]
    data = {"authorization": "Bearer data-token-0123456789"}
    admin = {"authorization": "Bearer admin-token-0123456789"}
    x = [tensor(rows(1, 1), "FP16")]
    with LocalServer(binary, flags) as server, triton.InferenceServerClient(server.address) as client:
        # Like grpc.health.v1, what probes ask is free.
        assert client.is_server_live()
        assert client.is_server_ready()
        for ask in (lambda: client.infer("w", x), lambda: client.is_model_ready("w"), client.get_server_metadata):
            with pytest.raises(InferenceServerException) as error:
                ask()
            assert code_of(error) == "UNAUTHENTICATED"
        for headers in (data, admin):
            assert client.is_model_ready("w", headers=headers)
            assert client.infer("w", x, headers=headers).as_numpy("y").shape == (1, M)
        for change in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException) as error:
                change("w", headers=data)
            assert code_of(error) == "PERMISSION_DENIED"
        client.load_model("w", headers=admin)
        client.unload_model("w", headers=admin)
        assert not client.is_model_ready("w", headers=data)


def test_a_drain_shows_before_it_refuses(binary: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", sparse(1))
    flags = ["--backend=cpu", f"--model-repository={tmp_path}", "--preload=w=w.npy", "--drain-delay=2s"]
    x = [tensor(rows(1, 1), "FP16")]
    with LocalServer(binary, flags) as server, triton.InferenceServerClient(server.address) as client:
        assert client.is_server_ready()
        os.kill(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + 20
        while client.is_server_ready():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # No model vanishes, and what still comes is still computed.
        assert client.is_server_live()
        assert client.is_model_ready("w")
        assert client.infer("w", x).as_numpy("y").shape == (1, M)
        # By itself: a second signal, which leaving the block sends, would cut the drain short.
        while server.running:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert server.exit_code == 0
