"""The synchronous client against the fake server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from unit.fake_server import FakeServer, bad_field, queue_full, status

import spmmd

WEIGHT = np.random.default_rng(1).standard_normal((30, 40)).astype(np.float16)
X = np.random.default_rng(2).standard_normal((5, 40)).astype(np.float32)
Y = X @ WEIGHT.astype(np.float32).T


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_upload_arrives_in_chunks_and_reports_progress(client: spmmd.Client, server: FakeServer) -> None:
    events: list[spmmd.Progress] = []
    layer = client.register("w", WEIGHT, bias=np.ones(30), progress=events.append)
    assert layer.shape == (30, 40)
    assert layer.format == spmmd.Format.AUTO  # an unknown format of a newer server
    assert layer.create_time.timestamp() == 1_700_000_000
    assert [len(chunk.data) for chunk in server.chunks] == [1000, 1000, 400, 120]
    assert events[0].content_needed
    assert [event.received_bytes for event in events] == [0, 1000, 2000, 2400, 2520]
    np.testing.assert_array_equal(server.weight("w"), WEIGHT.astype(np.float32))


def test_known_content_is_not_uploaded_again(client: spmmd.Client, server: FakeServer) -> None:
    client.register("first", WEIGHT)
    server.chunks.clear()
    events: list[spmmd.Progress] = []
    client.register("second", WEIGHT.copy(), progress=events.append)
    assert server.chunks == []
    assert [event.content_needed for event in events] == [False]
    close(client.matmul("second", X), Y)


def test_file_source_uploads_nothing(client: spmmd.Client, server: FakeServer) -> None:
    client.register_file("f", "model.safetensors", tensor="a.weight", bias_tensor="a.bias", prune=spmmd.NM(2, 4))
    assert server.chunks == []
    spec = server.specs[0]
    assert (spec.file.path, spec.file.tensor, spec.file.bias_tensor) == ("model.safetensors", "a.weight", "a.bias")
    assert spec.has_bias
    assert (spec.nm.n, spec.nm.m) == (2, 4)


def test_refusal_in_the_middle_of_an_upload_is_reported(client: spmmd.Client, server: FakeServer) -> None:
    server.fail_after_chunks = (2, bad_field("chunk.data", "goes past the part"))
    with pytest.raises(spmmd.InvalidArgumentError) as caught:
        client.register("w", np.ones((1000, 1000), np.float32))
    assert caught.value.field_violations == (spmmd.FieldViolation("chunk.data", "goes past the part"),)
    assert len(server.chunks) < 4000


def test_refused_spec_sends_no_chunk_and_leaves_no_thread(client: spmmd.Client, server: FakeServer) -> None:
    client.register("warm-up", WEIGHT)
    before = threading.active_count()
    for _ in range(5):
        server.fail = bad_field("spec.name", "empty")
        with pytest.raises(spmmd.InvalidArgumentError):
            client.register("", np.ones((3, 3), np.float32))
    deadline = time.monotonic() + 5
    while threading.active_count() > before + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before + 1


def test_exception_from_progress_cancels_the_upload(client: spmmd.Client, server: FakeServer) -> None:
    def stop(progress: spmmd.Progress) -> None:
        if progress.received_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.register("w", np.ones((1000, 1000), np.float32), progress=stop)
    assert server.upload_ended.wait(10)
    assert "w" not in server.layers


def test_stream_that_ends_without_a_layer_is_an_error(client: spmmd.Client, server: FakeServer) -> None:
    server.end_without_layer = True
    with pytest.raises(spmmd.InternalError, match="without a layer"):
        client.register("w", WEIGHT)


def test_list_follows_the_pages(client: spmmd.Client) -> None:
    for name in ("b", "a/1", "a/2", "a/3"):
        client.register(name, WEIGHT)
    assert [layer.name for layer in client.list()] == ["a/1", "a/2", "a/3", "b"]
    assert [layer.name for layer in client.list("a/")] == ["a/1", "a/2", "a/3"]


def test_matmul_keeps_leading_dimensions(client: spmmd.Client) -> None:
    client.register("w", WEIGHT)
    close(client.matmul("w", X), Y)
    close(client.matmul("w", X[0]), Y[0])
    assert client.matmul("w", X[0]).shape == (30,)
    assert client.matmul("w", np.stack([X, X])).shape == (2, 5, 30)
    assert client.matmul("w", X[:0]).shape == (0, 30)
    assert client.matmul("w", np.zeros((2, 0, 40), np.float32)).shape == (2, 0, 30)
    close(client.matmul("w", X.astype(np.float64)), Y)
    close(client.matmul("w", X, activation="relu"), np.maximum(Y, 0))


def test_results_are_writable(client: spmmd.Client) -> None:
    client.register("w", WEIGHT)
    y = client.matmul("w", X)
    y += 1
    close(y, Y + 1)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_matmul_takes_and_gives_every_type(client: spmmd.Client, dtype: Any) -> None:
    client.register("w", WEIGHT)
    y = client.matmul("w", X.astype(dtype), out_dtype=dtype)
    assert y.dtype == np.dtype(dtype)
    np.testing.assert_allclose(y.astype(np.float32), Y, rtol=0.05, atol=0.2)


def test_sparse_activations_and_threshold(client: spmmd.Client, server: FakeServer) -> None:
    client.register("w", WEIGHT)
    expected = np.where(np.abs(X) <= 0.5, 0, X) @ WEIGHT.astype(np.float32).T
    close(client.matmul("w", spmmd.SparseRows.from_dense(X, 0.5)), expected)
    assert server.requests[-1].inputs[0].HasField("sparse")
    close(client.matmul("w", X, threshold=0.5), expected)
    close(client.matmul("w", X, threshold=0.0), Y)
    assert server.requests[-1].program.steps[0].matmul.HasField("activation_threshold")
    client.matmul("w", X)
    assert not server.requests[-1].program.steps[0].matmul.HasField("activation_threshold")


def test_program_runs_in_one_call_and_by_id(client: spmmd.Client, server: FakeServer) -> None:
    client.register("w", WEIGHT)
    program = spmmd.Program()
    x = program.input("x")
    gate = program.matmul("w", x, activation="relu", name="gate")
    up = program.matmul("w", x)
    program.output(program.mul(gate, up, name="product"), dtype="f16")
    program.output(program.add(gate, up, name="sum"))
    server.requests.clear()
    outputs = client.execute(program, X)
    assert len(server.requests) == 1
    assert list(outputs) == ["product", "sum"]
    assert outputs["product"].dtype == np.float16
    close(outputs["sum"], np.maximum(Y, 0) + Y)
    assert outputs.timing.kernel == pytest.approx(1.5e-6)

    registered = client.register_program(program)
    close(client.execute(registered, {"x": X})["sum"], np.maximum(Y, 0) + Y)
    assert server.requests[-1].program_id == registered.id
    assert not server.requests[-1].HasField("program")
    client.unregister_program(registered)
    assert server.programs == {}


def test_program_without_outputs_returns_its_last_step(client: spmmd.Client) -> None:
    client.register("w", WEIGHT)
    program = spmmd.Program()
    program.matmul("w", program.input("x"))
    close(client.execute(program, X)["step1"], Y)


def test_several_inputs_need_a_mapping() -> None:
    program = spmmd.Program()
    program.add(program.input("a"), program.input("b"))
    with pytest.raises(ValueError, match="pass a mapping"):
        spmmd.Client("127.0.0.1:1").execute(program, X)


def test_token_travels_as_bearer(server: FakeServer) -> None:
    with spmmd.Client(server.address, token="s3cret") as client:
        client.list()
    assert server.metadata["authorization"] == "Bearer s3cret"


def test_large_messages_pass_both_ways(client: spmmd.Client) -> None:
    client.register("w", np.ones((600, 4), np.float16))
    assert client.matmul("w", np.ones((4000, 4), np.float32)).nbytes > 4 << 20
    client.register("wide", np.ones((2, 3000), np.float16))
    assert client.matmul("wide", np.ones((500, 3000), np.float32)).shape == (500, 2)


ERRORS: list[tuple[grpc.StatusCode, type[spmmd.SpmmdError]]] = [
    (grpc.StatusCode.CANCELLED, spmmd.CancelledError),
    (grpc.StatusCode.INVALID_ARGUMENT, spmmd.InvalidArgumentError),
    (grpc.StatusCode.DEADLINE_EXCEEDED, spmmd.DeadlineExceededError),
    (grpc.StatusCode.NOT_FOUND, spmmd.NotFoundError),
    (grpc.StatusCode.ALREADY_EXISTS, spmmd.AlreadyExistsError),
    (grpc.StatusCode.PERMISSION_DENIED, spmmd.PermissionDeniedError),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, spmmd.ResourceExhaustedError),
    (grpc.StatusCode.FAILED_PRECONDITION, spmmd.FailedPreconditionError),
    (grpc.StatusCode.UNIMPLEMENTED, spmmd.UnimplementedError),
    (grpc.StatusCode.INTERNAL, spmmd.InternalError),
    (grpc.StatusCode.UNAVAILABLE, spmmd.UnavailableError),
    (grpc.StatusCode.DATA_LOSS, spmmd.DataLossError),
    (grpc.StatusCode.UNAUTHENTICATED, spmmd.UnauthenticatedError),
    (grpc.StatusCode.OUT_OF_RANGE, spmmd.SpmmdError),
]


@pytest.mark.parametrize(("code", "cls"), ERRORS, ids=lambda value: getattr(value, "name", ""))
def test_every_code_has_its_class(
    client: spmmd.Client, server: FakeServer, code: grpc.StatusCode, cls: type[spmmd.SpmmdError]
) -> None:
    server.fail = status(code, "because")
    with pytest.raises(cls) as caught:
        client.list()
    assert type(caught.value) is cls
    assert caught.value.code == code
    assert str(caught.value) == f"{code.name}: because"


def test_details_are_decoded(client: spmmd.Client, server: FakeServer) -> None:
    server.fail = bad_field("program.steps[2].matmul.layer", "unknown layer")
    with pytest.raises(spmmd.InvalidArgumentError) as caught:
        client.list()
    assert caught.value.reason == "INVALID_FIELD"
    assert caught.value.metadata == {"k": "v"}
    assert caught.value.field_violations[0].field == "program.steps[2].matmul.layer"
    assert str(caught.value) == "INVALID_ARGUMENT: program.steps[2].matmul.layer: unknown layer"

    server.fail = queue_full()
    with pytest.raises(spmmd.ResourceExhaustedError) as exhausted:
        client.list()
    assert exhausted.value.retry_after == 0.25
    assert exhausted.value.reason == "QUEUE_FULL"


def test_garbled_details_do_not_hide_the_error() -> None:
    from spmmd.errors import make_error

    error = make_error(grpc.StatusCode.INTERNAL, "boom", b"\xff\xff\xff")
    assert isinstance(error, spmmd.InternalError)
    assert error.reason == ""


def test_unreachable_server_is_unavailable_and_not_ready() -> None:
    with spmmd.Client("127.0.0.1:1", timeout=5) as client:
        with pytest.raises(spmmd.UnavailableError):
            client.list()
        with pytest.raises(TimeoutError):
            client.wait_ready(0.2)


def test_health(client: spmmd.Client) -> None:
    client.wait_ready()
    assert client.health() == spmmd.HealthStatus.SERVING
    assert client.health("spmm.v1.SparseMatmul") == spmmd.HealthStatus.SERVING
    with pytest.raises(spmmd.NotFoundError):
        client.health("nobody")


def test_register_takes_over_when_the_one_who_brought_the_content_is_lost(
    server: FakeServer, client: spmmd.Client
) -> None:
    server.lose_source = 2
    seen: list[spmmd.Progress] = []
    assert client.register("w", WEIGHT, progress=seen.append, timeout=60).name == "w"
    assert len(server.specs) == 3
    assert server.chunks
    server.lose_source = 100
    with pytest.raises(spmmd.SpmmdError, match="ABORTED: try again"):
        client.register("w2", WEIGHT * 2)
    assert len(server.specs) == 3 + 4


def test_an_upload_goes_on_where_a_broken_connection_was(server: FakeServer) -> None:
    server.break_uploads = 2
    seen: list[spmmd.Progress] = []
    with spmmd.Client(server.address, chunk_bytes=64) as client:
        assert client.register("w", WEIGHT, progress=seen.append, timeout=60).name == "w"
    assert len(server.specs) == 3
    offsets = [chunk.offset for chunk in server.chunks]
    assert offsets == list(range(0, WEIGHT.nbytes, 64)), "every byte once"
    assert [progress.received_bytes for progress in seen if progress.received_bytes in (64, 128)]


def test_unregister(client: spmmd.Client) -> None:
    client.register("w", WEIGHT)
    removed = client.unregister("w")
    assert (removed.versions, removed.freed_bytes) == (1, 7)
    assert client.unregister("w", missing_ok=True).versions == 0
    with pytest.raises(spmmd.NotFoundError):
        client.unregister("w")


def test_tls_needs_certificate_and_key_together() -> None:
    with pytest.raises(ValueError, match="go together"):
        spmmd.Client("127.0.0.1:1", tls=spmmd.Tls(certificate=b"x"))


# ---- streams


def test_stream_matches_answers_out_of_order(client: spmmd.Client, server: FakeServer) -> None:
    client.register("w", WEIGHT)
    server.reorder = 4
    with client.stream() as stream:
        pending = [stream.matmul("w", X * i) for i in range(8)]
        done: list[int] = []
        for i, future in enumerate(pending):
            future.add_done_callback(lambda _, i=i: done.append(i))  # type: ignore[misc]
        for i, future in enumerate(pending):
            close(future.result(10), Y * i)
    assert sorted(done) == list(range(8))


def test_stream_answers_all_before_it_closes(client: spmmd.Client, server: FakeServer) -> None:
    client.register("w", WEIGHT)
    server.reorder = 100
    with client.stream() as stream:
        pending = [stream.matmul("w", X) for _ in range(10)]
    assert all(future.done() for future in pending)
    close(pending[3].result(), Y)
    with pytest.raises(spmmd.UnavailableError):
        stream.matmul("w", X)


def poison() -> tuple[spmmd.Program, dict[str, Any]]:
    program = spmmd.Program()
    program.matmul("w", program.input("poison"))
    return program, {"poison": X}


def test_request_that_fails_leaves_the_stream_alive(client: spmmd.Client) -> None:
    client.register("w", WEIGHT)
    with client.stream() as stream:
        bad, good = stream.submit(*poison()), stream.matmul("w", X)
        with pytest.raises(spmmd.InvalidArgumentError) as caught:
            bad.result(10)
        assert caught.value.field_violations[0].field == "request.inputs[0].name"
        close(good.result(10), Y)


def test_broken_stream_fails_all_and_unblocks_submitters(client: spmmd.Client, server: FakeServer) -> None:
    client.register("w", WEIGHT)
    server.reorder, server.break_after = 100, 2
    with client.stream(max_in_flight=3) as stream:
        pending = [stream.matmul("w", X) for _ in range(3)]
        for future in pending:
            with pytest.raises(spmmd.UnavailableError, match="device lost"):
                future.result(10)
        with pytest.raises(spmmd.UnavailableError, match="device lost"):
            stream.matmul("w", X)


def test_stream_bounds_what_is_in_flight(client: spmmd.Client, server: FakeServer) -> None:
    client.register("w", WEIGHT)
    server.reorder = 100  # answers nothing until the stream is closed
    stream = client.stream(max_in_flight=2)
    stream.matmul("w", X)
    stream.matmul("w", X)
    blocked: list[BaseException] = []

    def third() -> None:
        try:
            stream.matmul("w", X)
        except spmmd.SpmmdError as error:
            blocked.append(error)

    thread = threading.Thread(target=third)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    stream.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(blocked) == 1


def test_exception_in_the_block_cancels_what_is_in_flight(client: spmmd.Client, server: FakeServer) -> None:
    client.register("w", WEIGHT)
    server.reorder = 100

    def run() -> Any:
        with client.stream() as stream:
            future = stream.matmul("w", X)
            try:
                raise RuntimeError("mine")
            finally:
                futures.append(future)

    futures: list[Any] = []
    with pytest.raises(RuntimeError, match="mine"):
        run()
    with pytest.raises(spmmd.CancelledError):
        futures[0].result(10)


def test_many_threads_share_a_stream(client: spmmd.Client, server: FakeServer) -> None:
    client.register("w", WEIGHT)
    server.reorder = 3
    wrong: list[int] = []

    def work(seed: int, submit: Callable[..., Any]) -> None:
        for i in range(20):
            scale = seed * 100 + i
            if not np.allclose(submit("w", X * scale).result(20), Y * scale, rtol=1e-4, atol=1e-2):
                wrong.append(scale)

    with client.stream() as stream:
        threads = [threading.Thread(target=work, args=(seed, stream.matmul)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
