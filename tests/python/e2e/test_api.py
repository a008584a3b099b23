"""The whole API through the real server, against float64."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import BLOCK, assert_product, sparse_weight
from local_server import LocalServer
from minilm import gelu, prune_magnitude
from reference import Array, bound, linear
from safetensors.numpy import load_file

import spmmd

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def activations(rng: np.random.Generator, n: int, k: int, dtype: Any = np.float32) -> Array:
    return rng.standard_normal((n, k)).astype(dtype)


def test_server_says_who_it_is(client: spmmd.Client, server: LocalServer) -> None:
    info = client.server_info()
    assert info.version == spmmd.__version__
    assert info.backend == server.backend
    assert {spmmd.Format.DENSE, spmmd.Format.BITMAP} <= set(info.formats)
    assert info.limits.max_chunk_bytes >= 1 << 20
    assert info.limits.max_tokens >= 1
    devices = client.device_info()
    assert len(devices) == int(server.devices)
    for device in devices:
        assert device.healthy
        assert 0 < device.memory_budget_bytes <= device.memory_total_bytes
        assert device.measured_bandwidth_bytes_per_second > 1e8


def test_health(client: spmmd.Client) -> None:
    for service in ("", "spmm.v1.SparseMatmul", "spmm.v1.LayerCatalog"):
        assert client.health(service) == spmmd.HealthStatus.SERVING
    with pytest.raises(spmmd.NotFoundError):
        client.health("nobody")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encoding", ["dense", "csr", "coo", "bitmap"])
def test_every_encoding_and_type_is_the_same_layer(
    client: spmmd.Client, rng: np.random.Generator, encoding: str, dtype: Any
) -> None:
    weight = sparse_weight(rng, 37, 83, dtype)
    rows, columns = np.nonzero(weight)
    values = weight[rows, columns]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=37))])
    shuffled = rng.permutation(len(values))
    sources: dict[str, Any] = {
        "dense": weight,
        "csr": spmmd.CSR(weight.shape, offsets, columns, values),
        "coo": spmmd.COO(weight.shape, rows[shuffled], columns[shuffled], values[shuffled]),
        "bitmap": spmmd.Bitmap.from_dense(weight),
    }
    layer = client.register(f"w/{encoding}", sources[encoding])
    assert layer.shape == (37, 83)
    assert layer.dtype is not None
    assert layer.dtype.numpy == np.dtype(dtype)
    assert layer.nnz == np.count_nonzero(weight)
    assert layer.sparsity == pytest.approx(1 - layer.nnz / weight.size)
    assert layer.state == spmmd.LayerState.READY
    x = activations(rng, 5, 83)
    assert_product(client.matmul(f"w/{encoding}", x), x, weight)


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (7, 13), (64, 64), (129, 257)])
@pytest.mark.parametrize("format", ["dense", "bitmap"])
def test_shapes_and_batch_widths(
    client: spmmd.Client, rng: np.random.Generator, format: str, shape: tuple[int, int]
) -> None:
    weight = sparse_weight(rng, *shape)
    layer = client.register("w", weight, format=format)
    assert layer.format == spmmd.Format[format.upper()]
    for n in (0, 1, 2, 3, 8, 33):
        x = activations(rng, n, shape[1])
        assert_product(client.matmul("w", x), x, weight)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_all_zero_and_fully_dense(client: spmmd.Client, rng: np.random.Generator, density: float) -> None:
    weight = sparse_weight(rng, 20, 30, density=density)
    for format in ("dense", "bitmap"):
        client.register(format, weight, format=format)
        x = activations(rng, 4, 30)
        assert_product(client.matmul(format, x), x, weight)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_activation_types(client: spmmd.Client, rng: np.random.Generator, x_dtype: Any, out_dtype: Any) -> None:
    weight = sparse_weight(rng, 24, 40)
    client.register("w", weight)
    x = activations(rng, 3, 40, x_dtype)
    y = client.matmul("w", x, out_dtype=out_dtype)
    assert y.dtype == np.dtype(out_dtype)
    exact = client.matmul("w", x)
    assert_product(exact, x, weight)
    np.testing.assert_array_equal(y, exact.astype(out_dtype))  # rounds to nearest even


def silu(y: Array) -> Array:
    return np.asarray(y / (1 + np.exp(-y)))


def gelu_tanh(y: Array) -> Array:
    return np.asarray(0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "none": lambda y: y,
    "relu": lambda y: np.maximum(y, 0),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_bias_and_activation(client: spmmd.Client, rng: np.random.Generator, name: str) -> None:
    weight, bias = sparse_weight(rng, 50, 60), rng.standard_normal(50).astype(np.float32)
    assert client.register("w", weight, bias=bias).has_bias
    x = activations(rng, 9, 60) * 0.3
    for used in (bias, None):
        y = client.matmul("w", x, activation=name, bias=used is not None)
        expected = ACTIVATIONS[name](linear(x, weight, used))
        assert (np.abs(y - expected) <= 1.2 * bound(x, weight, used)).all()


@pytest.mark.parametrize("store", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_magnitude_pruning_on_the_stored_type(
    client: spmmd.Client, rng: np.random.Generator, store: str, sparsity: float
) -> None:
    weight = rng.standard_normal((40, 50)).astype(np.float32)
    layer = client.register("w", weight, prune=sparsity, store_dtype=store)
    assert layer.dtype == spmmd.DType[store.upper()]
    pruned = prune_magnitude(weight.astype(spmmd.DType[store.upper()].numpy), sparsity)
    assert layer.nnz == np.count_nonzero(pruned) == round(2000 * (1 - sparsity))
    x = activations(rng, 4, 50)
    assert_product(client.matmul("w", x), x, pruned)


def test_n_m_pruning_keeps_the_largest(client: spmmd.Client, rng: np.random.Generator) -> None:
    weight = rng.permutation(8 * 12).reshape(8, 12).astype(np.float16) + 1
    layer = client.register("w", weight, prune=spmmd.NM(2, 4))
    groups = weight.reshape(8, 3, 4)
    kept = np.where(groups.argsort(axis=2).argsort(axis=2) >= 2, groups, 0).reshape(8, 12)
    assert layer.nnz == 48
    x = activations(rng, 3, 12)
    assert_product(client.matmul("w", x), x, kept)


def test_real_layers_from_the_model_repository(client: spmmd.Client) -> None:
    tensors = load_file(BLOCK)
    layer = client.register_file(
        "up", "block.safetensors", tensor="up.weight", bias_tensor="up.bias", prune=0.5, format="bitmap"
    )
    assert layer.shape == (1536, 384)
    assert layer.has_bias
    assert layer.sparsity == pytest.approx(0.5)
    assert sum(section.bytes for section in layer.sections) == layer.bytes
    assert layer.dense_bytes == 1536 * 384 * 2
    assert layer.bytes < 0.6 * layer.dense_bytes
    assert sum(r.row_end - r.row_begin for r in layer.residency) == 1536
    x = tensors["up.input"]
    assert_product(client.matmul("up", x), x, prune_magnitude(tensors["up.weight"], 0.5), tensors["up.bias"])


def test_npy_from_the_model_repository(client: spmmd.Client, rng: np.random.Generator) -> None:
    assert client.register_file("npy", "sub/w.npy").shape == (3, 4)
    x = activations(rng, 2, 4)
    assert_product(client.matmul("npy", x), x, np.arange(12, dtype=np.float32).reshape(3, 4))


def test_known_content_is_not_asked_for_again(client: spmmd.Client, rng: np.random.Generator) -> None:
    weight = sparse_weight(rng, 600, 700)
    events: list[spmmd.Progress] = []
    first = client.register("first", weight, progress=events.append)
    assert events[0].content_needed
    assert events[0].content_bytes == weight.nbytes
    events.clear()
    second = client.register("second", weight, progress=events.append)
    assert not events[0].content_needed
    assert first.content_xxh3 == second.content_xxh3 != ""
    x = activations(rng, 2, 700)
    assert_product(client.matmul("second", x), x, weight)


def test_sparse_activations(client: spmmd.Client, rng: np.random.Generator) -> None:
    weight, bias = sparse_weight(rng, 70, 90), rng.standard_normal(70)
    client.register("w", weight, bias=bias)
    x = activations(rng, 6, 90)
    x[2] = 0
    x[3, 5:] = 0
    halved = np.where(np.abs(x) <= 0.7, np.float32(0), x)
    assert_product(client.matmul("w", spmmd.SparseRows.from_dense(x, 0.7)), halved, weight, bias)
    assert_product(client.matmul("w", x, threshold=0.7), halved, weight, bias)
    assert_product(client.matmul("w", spmmd.SparseRows.from_dense(halved[0])), halved[:1], weight, bias)
    for dtype in DTYPES:
        rows = spmmd.SparseRows.from_dense(halved.astype(dtype))
        assert_product(client.matmul("w", rows), halved.astype(dtype), weight, bias)
    none = spmmd.SparseRows((2, 90), np.zeros(3, np.uint64), np.zeros(0, np.uint32), np.zeros(0, np.float32))
    assert_product(client.matmul("w", none), np.zeros((2, 90)), weight, bias)


def test_default_threshold_of_a_layer(client: spmmd.Client, rng: np.random.Generator) -> None:
    weight = sparse_weight(rng, 30, 40)
    assert client.register("w", weight, activation_threshold=0.5).activation_threshold == 0.5
    x = activations(rng, 1, 40)
    assert_product(client.matmul("w", x), np.where(np.abs(x) <= 0.5, 0, x), weight)
    assert_product(client.matmul("w", x, threshold=0.0), x, weight)
    assert_product(client.matmul("w", x, threshold=1.0), np.where(np.abs(x) <= 1, 0, x), weight)


def gated_mlp() -> spmmd.Program:
    program = spmmd.Program()
    x = program.input("x")
    gate = program.matmul("gate", x, activation="silu", name="gate")
    up = program.matmul("up", x, name="up")
    hidden = program.mul(gate, up, name="hidden")
    down = program.matmul("down", hidden, name="down")
    program.output(down)
    program.output(program.add(down, x, activation="relu", name="residual"), dtype="bf16")
    return program


def test_gated_mlp_in_one_call(client: spmmd.Client, rng: np.random.Generator) -> None:
    weights = {
        name: sparse_weight(rng, *shape) * np.float16(0.2)
        for name, shape in {"gate": (96, 48), "up": (96, 48), "down": (48, 96)}.items()
    }
    for name, weight in weights.items():
        client.register(name, weight)
    x = activations(rng, 4, 48)
    hidden = silu(linear(x, weights["gate"])) * linear(x, weights["up"])
    expected = linear(hidden, weights["down"])
    registered = client.register_program(gated_mlp())
    for program in (gated_mlp(), registered):
        outputs = client.execute(program, x)
        assert list(outputs) == ["down", "residual"]
        np.testing.assert_allclose(outputs["down"], expected, rtol=1e-4, atol=1e-4)
        residual = outputs["residual"].astype(np.float32)
        np.testing.assert_allclose(residual, np.maximum(expected + x, 0), rtol=1e-2, atol=1e-2)
        assert outputs.timing.kernel > 0
        assert outputs.timing.total >= outputs.timing.kernel
    client.unregister_program(registered)
    with pytest.raises(spmmd.NotFoundError):
        client.execute(registered, x)
    with pytest.raises(spmmd.NotFoundError):
        client.unregister_program(registered)


def test_versions(client: spmmd.Client, rng: np.random.Generator) -> None:
    old, new = sparse_weight(rng, 10, 20), sparse_weight(rng, 10, 20)
    assert client.register("w", old).version == 1
    assert client.register("w", new).version == 2
    x = activations(rng, 2, 20)
    assert_product(client.matmul("w", x), x, new)
    assert_product(client.matmul("w", x, version=1), x, old)
    assert [layer.version for layer in client.list("w")] == [2, 1]
    assert client.get("w").version == 2
    assert client.unregister("w", version=1).versions == 1
    with pytest.raises(spmmd.NotFoundError):
        client.matmul("w", x, version=1)
    removed = client.unregister("w")
    assert removed.versions == 1
    assert removed.freed_bytes > 0
    with pytest.raises(spmmd.NotFoundError) as caught:
        client.matmul("w", x)
    assert caught.value.reason == "LAYER_NOT_FOUND"


def test_list_is_sorted_and_filtered(client: spmmd.Client) -> None:
    for name in ("b", "a/2", "a/10", "a/1"):
        client.register(name, np.ones((2, 3), np.float16))
    assert [layer.name for layer in client.list()] == ["a/1", "a/10", "a/2", "b"]
    assert [layer.name for layer in client.list("a/1")] == ["a/1", "a/10"]
    assert client.list("zzz") == []


def test_pin_warm_benchmark(client: spmmd.Client, rng: np.random.Generator) -> None:
    client.register("w", sparse_weight(rng, 128, 256))
    assert client.pin("w").pinned
    assert not client.pin("w", False).pinned
    assert client.warm("w").state == spmmd.LayerState.READY
    speeds = client.benchmark("w", [1, 8], repetitions=5)
    assert [speed.tokens for speed in speeds] == [1, 8]
    for speed in speeds:
        assert 0 < speed.seconds_p10 <= speed.seconds_p50 <= speed.seconds_p90
        assert speed.dense_seconds_p50 > 0
        assert speed.bytes > 0
        assert speed.kernel
    assert client.benchmark("w", [1], repetitions=3, dense=False)[0].dense_seconds_p50 == 0
    assert client.get("w").speeds


def test_stream_of_many_with_errors_between(client: spmmd.Client, rng: np.random.Generator) -> None:
    weights = {f"w{i}": sparse_weight(rng, 30 + i, 40) for i in range(3)}
    for name, weight in weights.items():
        client.register(name, weight)
    inputs = [activations(rng, 1 + i % 3, 40) for i in range(60)]
    with client.stream(max_in_flight=16) as stream:
        futures = [stream.matmul(f"w{i % 3}", x) for i, x in enumerate(inputs)]
        wrong_layer = stream.matmul("nobody", inputs[0])
        wrong_k = stream.matmul("w0", activations(rng, 1, 41))
        after = stream.matmul("w1", inputs[0])
    for i, future in enumerate(futures):
        assert_product(future.result(), inputs[i], weights[f"w{i % 3}"])
    with pytest.raises(spmmd.NotFoundError) as missing:
        wrong_layer.result()
    assert missing.value.reason == "LAYER_NOT_FOUND"
    with pytest.raises(spmmd.InvalidArgumentError) as mismatch:
        wrong_k.result()
    assert mismatch.value.field_violations
    assert_product(after.result(), inputs[0], weights["w1"])


def test_many_threads_and_layers_keep_their_own_results(client: spmmd.Client, rng: np.random.Generator) -> None:
    weights = [sparse_weight(rng, 64, 128) for _ in range(3)]
    for i, weight in enumerate(weights):
        client.register(f"w{i}", weight)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        own = np.random.default_rng(seed)
        try:
            for i in range(25):
                x = activations(own, 1 + int(own.integers(5)), 128)
                assert_product(client.matmul(f"w{i % 3}", x), x, weights[i % 3])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_requests_in_flight_survive_reregistration(client: spmmd.Client, rng: np.random.Generator) -> None:
    versions = [sparse_weight(rng, 64, 128) for _ in range(8)]
    client.register("w", versions[0])
    x = activations(rng, 2, 128)
    answers: list[Array] = []
    errors: list[BaseException] = []
    stop = threading.Event()

    def work() -> None:
        try:
            while not stop.is_set():
                answers.append(client.matmul("w", x))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for weight in versions[1:]:
        client.register("w", weight)
    stop.set()
    thread.join()
    assert errors == []
    expected = [linear(x, weight) for weight in versions]
    allowed = bound(x, versions[0]) * 10
    assert answers
    for y in answers:
        assert any((np.abs(y - e) <= allowed).all() for e in expected)


async def test_async_client(server: LocalServer, client: spmmd.Client, rng: np.random.Generator) -> None:
    weight = sparse_weight(rng, 30, 40)
    async with spmmd.AsyncClient(server.address) as aclient:
        assert (await aclient.register("w", weight, prune=0.6)).sparsity >= 0.6
        pruned = prune_magnitude(weight, 0.6)
        inputs = [activations(rng, 2, 40) for _ in range(20)]
        for x, y in zip(inputs, await asyncio.gather(*(aclient.matmul("w", x) for x in inputs)), strict=True):
            assert_product(y, x, pruned)
        async with aclient.stream() as stream:
            futures = [await stream.matmul("w", x) for x in inputs]
            for x, y in zip(inputs, await asyncio.gather(*futures), strict=True):
                assert_product(y, x, pruned)
        with pytest.raises(spmmd.NotFoundError):
            await aclient.matmul("nobody", inputs[0])
        assert (await aclient.server_info()).version == spmmd.__version__
        assert await aclient.health() == spmmd.HealthStatus.SERVING
        assert (await aclient.unregister("w")).versions == 1


def test_deadline(client: spmmd.Client, rng: np.random.Generator) -> None:
    client.register("w", sparse_weight(rng, 500, 500))
    with pytest.raises(spmmd.DeadlineExceededError):
        client.matmul("w", activations(rng, 200, 500), timeout=1e-5)
    x = activations(rng, 1, 500)
    assert client.matmul("w", x).shape == (1, 500)


def test_unix_socket_and_clean_drain(binary: Path, tmp_path: Path) -> None:
    server = LocalServer(binary, listen=f"unix:{tmp_path}/s.sock")
    with server, spmmd.Client(server.address) as client:
        client.register("w", np.eye(3, dtype=np.float32))
        assert client.matmul("w", np.ones(3, np.float32)).tolist() == [1, 1, 1]
    assert server.exit_code == 0
