"""The dialogue of RegisterLayer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from spmmd._proto import layer_catalog_pb2 as catalog_pb2
from spmmd.errors import InternalError, SpmmdError, UnavailableError, from_rpc_error
from spmmd.types import Layer, LayerState, Progress, _from_wire
from spmmd.weights import Content

ProgressCallback = Callable[[Progress], None]

_ATTEMPTS = 4
# Before an upload whose connection broke goes on over a new one; doubled twice.
_FIRST_PAUSE = 0.25


class Registration:
    """One registration: sends the spec, uploads the content if it is wanted, follows the server's events.

    Args:
      content: None for a file source.
    """

    def __init__(
        self,
        spec: catalog_pb2.LayerSpec,
        content: Content | None,
        progress: ProgressCallback | None,
        chunk_bytes: int,
    ) -> None:
        self._spec = spec
        self._content = content
        self._progress = progress
        self._chunk_bytes = chunk_bytes
        self._accepted: catalog_pb2.RegisterAccepted | None = None
        self._decided = threading.Event()
        self._lock = threading.Lock()
        self._call: Any = None
        self._stopped = False
        self._cancelled = False

    @property
    def layer(self) -> str:
        """The layer's name."""
        return self._spec.name

    def run(self, start: Callable[[Iterator[catalog_pb2.RegisterLayerRequest]], Any]) -> Layer:
        """Does it on a call that `start` opens; returns when the layer is ready.

        Again when the server relied on another registration that was bringing the same content and did not finish; and
        when the connection broke during the upload: the server says what it still has.
        """
        pause = _FIRST_PAUSE
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._run_once(start)
            except UnavailableError:
                if self._cancelled or self._accepted is None or not self._accepted.content_needed:
                    raise
                time.sleep(pause)
                pause *= 2
            except SpmmdError as error:
                if error.reason != "CONTENT_SOURCE_LOST":
                    raise
            with self._lock:
                # Each call has its own sender, whose state these are.
                self._accepted = None
                self._decided = threading.Event()
                self._stopped = self._cancelled
        return self._run_once(start)

    def _run_once(self, start: Callable[[Iterator[catalog_pb2.RegisterLayerRequest]], Any]) -> Layer:
        with self._lock:
            self._call = start(self._requests(self._decided))
            if self._stopped:
                self._call.cancel()
        layer: Layer | None = None
        try:
            for event in self._call:
                layer = self._on_event(event)
                self._decided.set()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            self._end_call()
        if layer is None:
            raise InternalError(grpc.StatusCode.INTERNAL, "the server ended the registration without a layer")
        return layer

    def cancel(self) -> None:
        """Ends the call, and the thread that sends; from any thread, at any time."""
        with self._lock:
            self._cancelled = True
        self._end_call()

    def _end_call(self) -> None:
        with self._lock:
            self._stopped = True
            self._decided.set()
            if self._call is not None:
                self._call.cancel()

    def _requests(self, decided: threading.Event) -> Iterator[catalog_pb2.RegisterLayerRequest]:
        yield catalog_pb2.RegisterLayerRequest(spec=self._spec)
        decided.wait()
        accepted = self._accepted
        # No chunk when the server has the content or refused the spec, or when the call is over.
        if self._content is None or accepted is None or not accepted.content_needed:
            return
        received: dict[int, int] = {part.part: part.bytes for part in accepted.received}
        for chunk in self._content.chunks(self._chunk_bytes, received):
            if self._stopped or decided is not self._decided:
                return
            yield catalog_pb2.RegisterLayerRequest(chunk=chunk)

    def _on_event(self, event: catalog_pb2.RegisterLayerResponse) -> Layer | None:
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self._accepted = event.accepted
            received = sum(part.bytes for part in event.accepted.received)
            self._report(LayerState.UPLOADING if event.accepted.content_needed else LayerState.PACKING, received)
        elif kind == "progress":
            self._report(_from_wire(LayerState, event.progress.state), event.progress.received_bytes)
        elif kind == "layer":
            return Layer.from_proto(event.layer)
        return None

    def _report(self, state: LayerState, received: int) -> None:
        if self._progress is not None and self._accepted is not None:
            accepted = self._accepted
            self._progress(Progress(state, received, accepted.content_bytes, accepted.content_needed))
