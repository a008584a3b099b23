"""Pipelined execution over one stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

import grpc

from spmmd._proto import sparse_matmul_pb2 as matmul_pb2
from spmmd.arrays import Array
from spmmd.errors import SpmmdError, UnavailableError, from_code_number, from_rpc_error
from spmmd.program import (
    Outputs,
    Program,
    RegisteredProgram,
    execute_request,
    matmul_request,
    matmul_result,
    outputs_from_proto,
)
from spmmd.types import Activation, ActivationLike, DType, DTypeLike

_T = TypeVar("_T")
_Convert = Callable[[matmul_pb2.ExecuteResponse], Any]


def closed_error() -> SpmmdError:
    return UnavailableError(grpc.StatusCode.UNAVAILABLE, "the stream is closed")


class Stream:
    """Requests in flight together on one stream, answered as they finish; made by Client.stream(). Thread-safe.

    A request that fails fails its own future only. When the stream itself breaks, all futures in flight fail, and so
    does every later submission. As a context manager it waits for the answers at the end, and cancels what is in
    flight when the block raises.
    """

    def __init__(
        self, start: Callable[[Iterator[matmul_pb2.ExecuteStreamRequest]], Any], *, max_in_flight: int
    ) -> None:
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight: must be at least 1, got {max_in_flight}")
        self._max_in_flight = max_in_flight
        self._requests: queue.SimpleQueue[matmul_pb2.ExecuteStreamRequest | None] = queue.SimpleQueue()
        self._pending: dict[int, tuple[Future[Any], _Convert]] = {}
        self._changed = threading.Condition()
        self._next_id = 1
        self._closed = False
        self._error: SpmmdError | None = None
        self._call = start(iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, name="spmmd-stream", daemon=True)
        self._reader.start()

    def submit(self, program: Program | RegisteredProgram, inputs: Any) -> Future[Outputs]:
        """Client.execute, answered by a future. Waits while max_in_flight requests are unanswered."""
        return self._submit(execute_request(program, inputs), outputs_from_proto)

    def matmul(
        self,
        name: str,
        x: Any,
        *,
        version: int = 0,
        activation: ActivationLike = Activation.NONE,
        threshold: float | None = None,
        bias: bool = True,
        out_dtype: DTypeLike = DType.F32,
    ) -> Future[Array]:
        """Client.matmul, answered by a future. Waits while max_in_flight requests are unanswered."""
        request, leading = matmul_request(
            name, x, version=version, activation=activation, threshold=threshold, bias=bias, out_dtype=out_dtype
        )
        return self._submit(request, lambda response: matmul_result(response, leading))

    def close(self) -> None:
        """Sends no more, and returns when every request is answered."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._requests.put(None)
                self._changed.notify_all()
        self._reader.join()

    def cancel(self) -> None:
        """Ends the stream at once; futures in flight fail with CancelledError."""
        self._call.cancel()
        self.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.cancel()

    def _submit(self, request: matmul_pb2.ExecuteRequest, convert: Callable[[Any], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()  # A request on its way cannot be called back.
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._error is not None or len(self._pending) < self._max_in_flight
            )
            if self._error is not None:
                raise self._error
            if self._closed:
                raise closed_error()
            request_id = self._next_id
            self._next_id += 1
            self._pending[request_id] = (future, convert)
            self._requests.put(matmul_pb2.ExecuteStreamRequest(request_id=request_id, request=request))
        return future

    def _read(self) -> None:
        error: SpmmdError = UnavailableError(grpc.StatusCode.UNAVAILABLE, "the server ended the stream")
        try:
            for response in self._call:
                with self._changed:
                    future, convert = self._pending.pop(response.request_id, (None, None))
                    self._changed.notify_all()
                if future is not None and convert is not None:
                    settle(future, convert, response)
        except grpc.RpcError as rpc_error:
            error = from_rpc_error(rpc_error)
        finally:
            with self._changed:
                self._error = error
                orphans = [future for future, _ in self._pending.values()]
                self._pending.clear()
                self._changed.notify_all()
            self._requests.put(None)  # Lets the sending thread go when the server ended first.
            for orphan in orphans:
                orphan.set_exception(error)


def settle(future: Any, convert: _Convert, response: matmul_pb2.ExecuteStreamResponse) -> None:
    """Sets a future's result or exception from its answer; also for asyncio's futures."""
    try:
        if response.WhichOneof("result") == "error":
            raise from_code_number(response.error.code, response.error.message, response.error.status_details)
        result = convert(response.response)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)
